"""Tensors of a draft's forward passes: tokens of rows, at positions of their blocks.

T: tokens; S: rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spmd_worker.model.drafts.draft_head import DraftTokens
from spmd_worker.model_config.vision_config import VisionConfig
from spmd_worker.ops.attention.metadata import AttentionMetadata
from spmd_worker.ops.kernels.host_copies import to_device
from spmd_worker.worker.runner.image_layout import Media, rope_positions_of


@dataclass(frozen=True, slots=True)
class RowTokens:
    """`count` tokens of a row from position `first` on; its blocks, the regime of its rope, and its images."""

    block_ids: Sequence[int]
    first: int
    count: int
    regime: int
    media: Media = ()


def lay_out(
    rows: Sequence[RowTokens], block_size: int, device: torch.device, vision: VisionConfig | None = None
) -> DraftTokens:
    """The rows' tokens one behind the other. `vision`: how the draft takes images, if it does."""
    counts = np.array([row.count for row in rows], dtype=np.int64)
    starts = (0, *accumulate(counts.tolist()))
    row_of = np.repeat(np.arange(len(rows)), counts)
    positions = np.arange(starts[-1]) - np.array(starts[:-1], dtype=np.int64)[row_of]
    positions += np.array([row.first for row in rows], dtype=np.int64)[row_of]
    ends = tuple(row.first + row.count for row in rows)
    tables = np.zeros((len(rows), -(-max(ends) // block_size)), dtype=np.int64)
    for table, row, end in zip(tables, rows, ends, strict=True):
        num_blocks = -(-end // block_size)
        table[:num_blocks] = row.block_ids[:num_blocks]
    attention = AttentionMetadata(
        query_starts=starts,
        context_lengths=ends,
        block_tables=_to(tables, device),
        token_blocks=_to(tables[row_of, positions // block_size], device),
        token_offsets=_to(positions % block_size, device),
    )
    regimes = np.array([row.regime for row in rows], dtype=np.int64)[row_of]
    last = np.array(starts[1:], dtype=np.int64) - 1
    media = [row.media for row in rows]
    three = rope_positions_of(vision, media if any(media) else None, [row.first for row in rows], counts)
    rope_positions = None if three is None else _to(three, device)
    return DraftTokens(_to(positions, device), _to(regimes, device), attention, _to(last, device), rope_positions)


def to_ids(ids: Sequence[int], device: torch.device) -> Tensor:
    """int64 on the device."""
    return _to(np.array(ids, dtype=np.int64), device)


def _to(array: NDArray[np.int64], device: torch.device) -> Tensor:
    return to_device(torch.from_numpy(np.ascontiguousarray(array)), device)
