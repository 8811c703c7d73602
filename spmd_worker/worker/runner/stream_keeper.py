"""Worker events `start_hidden_states` and `stop_hidden_states`: the residual stream of prompts before chosen layers.

A draft head is trained on it (EAGLE-3 reads three layers). Steps run layer by layer meanwhile, with the same bits.

T: tokens of the step; L: layers; H: hidden size.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from spmd_worker.ranks.topology import Stage
from spmd_worker.replica.mirror.mirror import ScheduledSequence
from spmd_worker.replica.sequence.request import RequestId


class StreamKeeper:
    """Handles the two events, which alternate, on a rank with all layers. `is_holder`: the rank keeps what every rank
    of its tensor-parallel group has.
    """

    def __init__(self, stage: Stage, hidden_size: int, dtype: torch.dtype, *, is_holder: bool) -> None:
        self._stage, self._hidden_size, self._dtype, self._is_holder = stage, hidden_size, dtype, is_holder
        self.layers: tuple[int, ...] = ()
        """Numbers of the layers before which the stream is kept; that after the last layer's is behind it."""
        self._kept: dict[RequestId, Tensor] = {}

    def prepare_start_hidden_states(self, layers: Sequence[int]) -> tuple[int, ...]:
        """Raises RuntimeError, or ValueError for a layer that the rank does not have."""
        if self.layers:
            raise RuntimeError("hidden states are kept already: call stop_hidden_states first")
        if not (self._stage.is_first and self._stage.is_last):
            raise RuntimeError("hidden states are kept by ranks with all layers: set parallel.pipeline_parallel_size=1")
        outside = [each for each in layers if not isinstance(each, int) or not 0 <= each <= self._stage.stop]
        if outside or not layers:
            raise ValueError(
                f"layers {list(layers)} must be numbers from 0 to {self._stage.stop}, behind the last layer"
            )
        return tuple(layers)

    def commit_start_hidden_states(self, layers: tuple[int, ...]) -> None:
        self.layers, self._kept = layers, {}

    def prepare_stop_hidden_states(self, payload: None) -> None:
        if not self.layers:
            raise RuntimeError("no hidden states are kept: call start_hidden_states first")

    def commit_stop_hidden_states(self, staged: None) -> dict[RequestId, Tensor]:
        """[tokens of the prompt, L, H] of each request, on the host; none on ranks that hold none."""
        kept, self._kept, self.layers = self._kept, {}, ()
        return kept

    def keep(self, scheduled: Sequence[ScheduledSequence], streams: Mapping[int, Tensor]) -> None:
        """Keep the prompt tokens of a step, whose `streams` [T, H] are those before each layer."""
        if not self._is_holder:
            return
        states = torch.stack([streams[layer] for layer in self.layers], dim=1).to("cpu")
        starts = accumulate((each.num_scheduled_tokens for each in scheduled), initial=0)
        for (sequence, count, _), start in zip(scheduled, starts, strict=False):
            first, num_prompt = sequence.num_computed_tokens, sequence.num_prompt_tokens
            count = min(count, num_prompt - first)
            if count > 0:
                shape = (num_prompt, len(self.layers), self._hidden_size)
                empty = self._kept.get(sequence.request.request_id)
                kept = torch.empty(shape, dtype=self._dtype) if empty is None else empty
                kept[first : first + count] = states[start : start + count]
                self._kept[sequence.request.request_id] = kept
