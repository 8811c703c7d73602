"""Splits a step of an encoder-decoder model into the encoder's rows and the decoder's tokens.

    positions   0 .. 15 | 16 17 18     a row whose encoder has 13 rows, in blocks of 16: 13 to 15 are padding
    computed    0 .. 15 | 16 17        `encoder_rows` are the first 16, of which keys 0 to 12 are seen by both tokens

Padding is written too, so that blocks hold the same numbers however they are computed, and never read.

T: tokens of the step; S: sequences; E: encoder's rows; D: decoder's tokens.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kv_cache.block import num_blocks_for
from spmd_worker.ops.attention.metadata import AttentionMetadata, CrossStep
from spmd_worker.ops.kernels.host_copies import to_device
from spmd_worker.replica.mirror.mirror import ScheduledSequence
from spmd_worker.replica.sequence.request import Request

Integers = NDArray[np.int64]

_NUM_ROWS_OF_DUMMIES: Final = 1
"""Keys that are seen in rows without an encoder, which only dummy steps have."""


def with_cross_step(
    attention: AttentionMetadata, scheduled: Sequence[ScheduledSequence], positions: Integers, block_size: int
) -> tuple[AttentionMetadata, Integers]:
    """The metadata of a step with its `CrossStep`, and the decoder's positions of its tokens, int64 [T], 0 for those of
    the encoder. `positions` are those in the cache.
    """
    before = np.array([each.sequence.request.num_virtual_tokens for each in scheduled], dtype=np.int64)
    assert not (before % block_size).any(), "the encoder's positions are whole blocks"
    counts = np.array([each.num_scheduled_tokens for each in scheduled], dtype=np.int64)
    firsts = np.array([each.sequence.num_computed_tokens for each in scheduled], dtype=np.int64)
    own_positions = positions - np.repeat(before, counts)
    num_own = np.clip(firsts + counts - before, 0, counts)
    device = attention.token_blocks.device
    encoder_rows = _to(np.flatnonzero(own_positions < 0), device)
    decoder_rows = _to(np.flatnonzero(own_positions >= 0), device)
    ends = firsts + counts
    own = _part(attention, decoder_rows, num_own, ends - before)
    cross = CrossStep(
        encoder_rows,
        decoder_rows,
        written=_part(attention, encoder_rows, counts - num_own, np.minimum(ends, before)),
        own=replace(own, block_tables=_own_tables(own.block_tables, before[num_own > 0] // block_size)),
        seen=_seen(attention, decoder_rows, num_own, [each.sequence.request for each in scheduled], block_size),
    )
    return replace(attention, cross=cross), np.maximum(own_positions, 0)


def _part(attention: AttentionMetadata, rows: Tensor, counts: Integers, ends: Integers) -> AttentionMetadata:
    """Metadata of some tokens of a step, `counts` [S] of each sequence; those without any are left out."""
    chosen = np.flatnonzero(counts)
    return AttentionMetadata(
        query_starts=(0, *accumulate(counts[chosen].tolist())),
        context_lengths=tuple(ends[chosen].tolist()),
        block_tables=attention.block_tables.index_select(0, _to(chosen, rows.device)),
        token_blocks=attention.token_blocks.index_select(0, rows),
        token_offsets=attention.token_offsets.index_select(0, rows),
        step_lengths=attention.context_lengths,
    )


def _own_tables(tables: Tensor, num_before: Integers) -> Tensor:
    """Tables [S, B] without each sequence's first `num_before` blocks."""
    if not len(num_before) or not num_before.any():
        return tables
    width = tables.shape[1]
    columns = np.arange(width - int(num_before.min())) + num_before[:, None]
    # Behind a table's end its last column, which is arbitrary there.
    return tables.gather(1, _to(np.minimum(columns, width - 1), tables.device))


def _seen(
    attention: AttentionMetadata, rows: Tensor, counts: Integers, requests: Sequence[Request], block_size: int
) -> AttentionMetadata:
    """Metadata of D sequences of one token over the encoder's rows of its sequence."""
    num_rows = np.array([_num_rows(each) for each in requests], dtype=np.int64)
    of_token = np.arange(len(counts)).repeat(counts)
    width = num_blocks_for(int(num_rows[of_token].max(initial=1)), block_size)
    return AttentionMetadata(
        query_starts=tuple(range(len(of_token) + 1)),
        context_lengths=tuple(num_rows[of_token].tolist()),
        block_tables=attention.block_tables[:, :width].index_select(0, _to(of_token, rows.device)),
        token_blocks=attention.token_blocks.index_select(0, rows),
        token_offsets=attention.token_offsets.index_select(0, rows),
        step_lengths=attention.context_lengths,
    )


def _num_rows(request: Request) -> int:
    if not request.num_virtual_tokens:
        return _NUM_ROWS_OF_DUMMIES
    (item,) = request.media
    assert item.num_rows <= request.num_virtual_tokens, request
    return item.num_rows


def _to(array: Integers, device: torch.device) -> Tensor:
    return to_device(torch.from_numpy(np.ascontiguousarray(array)), device)
