"""Experts that a step's tokens met, of the rows that ask for them, on a stage.

T: tokens of the step; t: tokens of these rows; L: sparse layers of the stage; k: experts of a token.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spmd_worker.model_config.model_config import ModelConfig
from spmd_worker.ops.kernels.host_copies import to_device
from spmd_worker.ops.sampling.read_back import Awaited, ReadBack
from spmd_worker.replica.mirror.mirror import ScheduledSequence
from spmd_worker.replica.sequence.routed_experts import RoutedTokens, bytes_per_expert

_WORD = 8


class LaunchedRoutes(NamedTuple):
    """`tokens` without their data, which is `data` [t, bytes], once it is read back."""

    tokens: tuple[RoutedTokens, ...]
    data: Awaited[NDArray[np.uint8]]

    def collect(self) -> tuple[RoutedTokens, ...]:
        """The tokens with their experts."""
        ends = np.cumsum([each.num_tokens for each in self.tokens])
        parts = np.split(self.data.value, ends[:-1])
        return tuple([each._replace(data=part.tobytes()) for each, part in zip(self.tokens, parts, strict=True)])


def wants_routes(scheduled: Sequence[ScheduledSequence]) -> bool:
    """Whether some row asks for its experts."""
    return any(
        not each.sequence.is_plain and each.sequence.request.sampling.return_routed_experts for each in scheduled
    )


def launch_routes(
    scheduled: Sequence[ScheduledSequence],
    query_starts: tuple[int, ...],
    routes: Sequence[Tensor],
    model_config: ModelConfig,
    read_back: ReadBack,
) -> LaunchedRoutes:
    """`routes` are the experts of each sparse layer, int64 [T, k]."""
    sparse = [layer.experts for layer in model_config.layers if layer.experts is not None]
    num_bytes = bytes_per_expert(max([each.num_choices for each in sparse], default=1))
    num_chosen = sparse[0].num_chosen if sparse else 1
    tokens, chosen = [], []
    for each, start in zip(scheduled, query_starts):
        request, count = each.sequence.request, each.num_scheduled_tokens
        if request.sampling.return_routed_experts:
            place = (each.sequence.sample_index, each.sequence.num_computed_tokens, count)
            tokens.append(RoutedTokens(request.request_id, *place, num_chosen, num_bytes, b""))
            chosen.append(np.arange(start, start + count))
    rows = np.concatenate(chosen)
    if not routes:
        empty: Awaited[NDArray[np.uint8]] = Awaited(lambda: np.empty((len(rows), 0), np.uint8))
        empty.resolve(())
        return LaunchedRoutes(tuple(tokens), empty)
    indices = to_device(torch.from_numpy(rows), routes[0].device)
    ids = torch.stack([each.index_select(0, indices) for each in routes], dim=1)
    packed = ids.to(torch.uint8 if num_bytes == 1 else torch.int16).view(torch.uint8).flatten()
    num_left = -len(packed) % _WORD
    words = torch.nn.functional.pad(packed, (0, num_left)).view(torch.int64)
    num_rows = len(rows)

    def in_rows(found: Tensor) -> NDArray[np.uint8]:
        return found.numpy().view(np.uint8)[: len(packed)].reshape(num_rows, -1).copy()

    return LaunchedRoutes(tuple(tokens), read_back.later(in_rows, words))
