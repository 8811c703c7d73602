"""Persistent batch: block tables and positions kept on the device, so that a step sends only what is new.

Every computed sequence has a slot with its block table: a table that has grown sends its new blocks. A step that
continues every sequence of the last step by one token, in the same order, also sends the token ids; the device
increments the positions itself. Any other step sends its complete layout. Everything goes in one copy.

Slots are only a cache: they are compared with what the step needs, so any plan may follow any other, and a sequence
that lost its slot is sent completely when it is scheduled again.

T: tokens of the step; S: sequences; R: rows that sample; B: blocks of the longest table.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kv_cache.block import BlockId
from spmd_worker.ops.attention.metadata import AttentionMetadata
from spmd_worker.ops.kernels.host_copies import to_device
from spmd_worker.replica.mirror.mirror import MirroredSequence, ScheduledSequence
from spmd_worker.replica.sequence.request import RequestId
from spmd_worker.replica.sequence.sequence import SequenceKey
from spmd_worker.worker.runner.batch import Batch, RowsToSample, token_ids

_SLOTS_A_SEQUENCE: Final = 4
"""Slots for the sequences of a few steps in flight and for waiting ones."""
_ALIGNED_WORDS: Final = 4
_MAX_INDEX: Final = 2**31
"""Indices into the tables are sent as int32."""


@dataclass(slots=True, eq=False)
class _Slot:
    """Row `index` of the tables, where the device has the first `num_known` blocks of `table`."""

    index: int
    table: list[BlockId] | None = None
    num_known: int = 0


@dataclass(frozen=True, slots=True)
class _Layout:
    """Layout of a step. On the host: `context_lengths`, `query_starts`, and `width`, the blocks of the longest table.
    On the device, int64: `slots` [S], `row_of_token`, `positions`, `rope_regimes` [T], `sample_rows` [R]; int32:
    `starts` [S + 1], `lengths` [S].
    """

    scheduled: Sequence[ScheduledSequence]
    sequences: list[MirroredSequence]
    context_lengths: list[int]
    width: int
    is_decode: bool
    own_slots: list[_Slot]
    query_starts: tuple[int, ...]
    slots: Tensor
    row_of_token: Tensor
    positions: Tensor
    rope_regimes: Tensor
    sample_rows: Tensor
    starts: Tensor
    lengths: Tensor


class BatchState:
    """Builds the batches of one model runner on its device, with the same values as `build_batch`. Block tables are
    int32; entries after a sequence's blocks are left over from other sequences.
    """

    def __init__(self, block_size: int, device: torch.device) -> None:
        self._block_size, self._device = block_size, device
        self._slots: dict[MirroredSequence, _Slot] = {}
        """The least recently used first."""
        self._free: list[_Slot] = []
        self._tables = torch.zeros((0, 0), dtype=torch.int32, device=device)
        self._layout: _Layout | None = None
        self._rows = RowsToSample()
        self.num_bytes_sent = 0
        """Bytes sent to the device for the last batch."""

    def build(self, scheduled: Sequence[ScheduledSequence], *, has_ids: bool = True) -> Batch:
        """Lay out a step. `scheduled` comes from the mirror, in plan order. Without `has_ids`, for a step that
        continues the rows of the last one, the host does not know the token ids and the batch has none.
        """
        layout = self._layout
        if layout is not None and scheduled is layout.scheduled:
            sequences, is_decode = layout.sequences, layout.is_decode
        else:
            sequences = [each.sequence for each in scheduled]
            is_decode = all(each.num_scheduled_tokens == each.num_samples == 1 for each in scheduled)
        firsts = [sequence.num_computed_tokens for sequence in sequences]
        if layout is not None and is_decode and _continues(layout, sequences, firsts):
            grown = _grown(sequences, layout.own_slots)
            width = max([layout.width, *[len(sequence.block_ids) for sequence, _ in grown]])
            self._grow_tables(len(sequences), width)
            last_ids = np.array([sequence.output_token_ids[-1] for sequence in sequences] if has_ids else [], np.int64)
            ids, indices, blocks = self._send(last_ids, *self._new_blocks(grown))
            layout = replace(
                layout,
                scheduled=scheduled,
                context_lengths=[first + 1 for first in firsts],
                width=width,
                positions=layout.positions + 1,
                lengths=layout.lengths + 1,
            )
        else:
            width = max([len(sequence.block_ids) for sequence in sequences])
            self._grow_tables(len(sequences), width)
            slots = self._take_slots(sequences)
            ids, indices, blocks, *numbers = self._send(
                token_ids(scheduled), *self._new_blocks(_grown(sequences, slots)), *_numbers(scheduled, slots)
            )
            lengths = [first + each.num_scheduled_tokens for first, each in zip(firsts, scheduled)]
            layout = _new_layout(scheduled, sequences, lengths, width, is_decode, slots, numbers)
        self._layout = layout
        if len(indices):
            self._tables.view(-1)[indices.long()] = blocks
        tables = self._tables[:, :width].index_select(0, layout.slots)
        attention = AttentionMetadata(
            query_starts=layout.query_starts,
            context_lengths=tuple(layout.context_lengths),
            block_tables=tables,
            token_blocks=tables[layout.row_of_token, layout.positions // self._block_size].long(),
            token_offsets=layout.positions % self._block_size,
            starts=layout.starts,
            lengths=layout.lengths,
        )
        return Batch(
            token_ids=ids.long(),
            positions=layout.positions,
            rope_regimes=layout.rope_regimes,
            attention=attention,
            sample_rows=layout.sample_rows,
            rows=self._rows.of(scheduled),
        )

    def forget(self, finished_sequences: Sequence[SequenceKey], finished_request_ids: Sequence[RequestId]) -> None:
        """Free the slots of finished sequences."""
        if not finished_sequences and not finished_request_ids:
            return
        requests, keys = set(finished_request_ids), set(finished_sequences)
        for sequence in list(self._slots):
            request_id = sequence.request.request_id
            if request_id in requests or (keys and SequenceKey(request_id, sequence.sample_index) in keys):
                slot = self._slots.pop(sequence)
                slot.table = None
                self._free.append(slot)
        self._layout = None

    def _grow_tables(self, num_sequences: int, width: int) -> None:
        """Enlarge the tables for `num_sequences` of `width` blocks; their contents are kept."""
        num_slots, max_blocks = self._tables.shape
        if _SLOTS_A_SEQUENCE * num_sequences <= num_slots and width <= max_blocks:
            return
        shape = (
            max(num_slots, _power_of_two(_SLOTS_A_SEQUENCE * num_sequences)),
            max(max_blocks, _power_of_two(width)),
        )
        assert shape[0] * shape[1] < _MAX_INDEX, shape
        tables = torch.zeros(shape, dtype=torch.int32, device=self._device)
        tables[:num_slots, :max_blocks] = self._tables
        self._tables = tables
        self._free += [_Slot(index) for index in range(num_slots, shape[0])]

    def _take_slots(self, sequences: list[MirroredSequence]) -> list[_Slot]:
        """Sequences without a slot take a free one, or that of the least recently used sequence."""
        kept = self._slots
        for sequence in sequences:
            # Moved to the end, so that no sequence of this step loses its slot to another of this step.
            slot = kept.pop(sequence, None)
            if slot is not None:
                kept[sequence] = slot
        for sequence in sequences:
            if sequence not in kept:
                slot = self._free.pop() if self._free else kept.pop(next(iter(kept)))
                slot.table = None
                kept[sequence] = slot
        return [kept[sequence] for sequence in sequences]

    def _new_blocks(self, grown: list[tuple[MirroredSequence, _Slot]]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Table entries that the device lacks: indices and blocks. A table that was changed other than by appending is
        a new list (`mirror.py`).
        """
        width = self._tables.shape[1]
        indices: list[int] = []
        blocks: list[BlockId] = []
        for sequence, slot in grown:
            table = sequence.block_ids
            known = slot.num_known if slot.table is table else 0
            assert known <= len(table), (known, len(table))
            indices += range(slot.index * width + known, slot.index * width + len(table))
            blocks += table[known:]
            slot.table, slot.num_known = table, len(table)
        return np.array(indices, dtype=np.int64), np.array(blocks, dtype=np.int64)

    def _send(self, *arrays: NDArray[np.int64]) -> list[Tensor]:
        """Copy arrays of numbers below 2^31 to the device as int32, in one copy. Each is aligned to 16 bytes, because
        Triton recompiles a kernel for an unaligned tensor.
        """
        starts = [0, *accumulate(-(-len(each) // _ALIGNED_WORDS) * _ALIGNED_WORDS for each in arrays)]
        words = np.zeros(starts[-1], dtype=np.int32)
        for start, each in zip(starts, arrays):
            words[start : start + len(each)] = each
        self.num_bytes_sent = words.nbytes
        sent = to_device(torch.from_numpy(words), self._device)
        return [sent[start : start + len(each)] for start, each in zip(starts, arrays)]


def _continues(layout: _Layout, sequences: list[MirroredSequence], firsts: list[int]) -> bool:
    """Whether a decode step continues the rows of the last one, also a decode step, by one token."""
    return layout.is_decode and layout.sequences == sequences and layout.context_lengths == firsts


def _grown(sequences: list[MirroredSequence], slots: list[_Slot]) -> list[tuple[MirroredSequence, _Slot]]:
    """The sequences with block entries that the device lacks."""
    return [
        (sequence, slot)
        for sequence, slot in zip(sequences, slots)
        if len(sequence.block_ids) != slot.num_known or sequence.block_ids is not slot.table
    ]


def _numbers(scheduled: Sequence[ScheduledSequence], slots: list[_Slot]) -> list[NDArray[np.int64]]:
    """The arrays of a layout: slots, first positions and rope regimes [S], starts [S + 1], rows of tokens [T], sampled
    rows [R].
    """
    counts = np.array([each.num_scheduled_tokens for each in scheduled])
    starts = np.concatenate(([0], counts.cumsum()))
    return [
        np.array([slot.index for slot in slots]),
        np.array([each.sequence.num_computed_tokens for each in scheduled]),
        np.array([each.sequence.request.rope_regime for each in scheduled]),
        starts,
        np.arange(len(scheduled)).repeat(counts),
        (starts[1:] - 1).repeat([each.num_samples for each in scheduled]),
    ]


def _new_layout(
    scheduled: Sequence[ScheduledSequence],
    sequences: list[MirroredSequence],
    context_lengths: list[int],
    width: int,
    is_decode: bool,
    own_slots: list[_Slot],
    numbers: list[Tensor],
) -> _Layout:
    """`numbers` are the arrays of `_numbers`, on the device."""
    slots, first_positions, regimes, starts, row_of_token, rows = numbers
    row_of_token = row_of_token.long()
    offsets = (first_positions - starts[:-1]).long()
    return _Layout(
        scheduled=scheduled,
        sequences=sequences,
        context_lengths=context_lengths,
        width=width,
        is_decode=is_decode,
        own_slots=own_slots,
        query_starts=(0, *accumulate(each.num_scheduled_tokens for each in scheduled)),
        slots=slots.long(),
        row_of_token=row_of_token,
        positions=torch.arange(len(row_of_token), device=row_of_token.device) + offsets[row_of_token],
        rope_regimes=regimes.long()[row_of_token],
        sample_rows=rows.long(),
        starts=starts,
        lengths=first_positions + starts[1:] - starts[:-1],
    )


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()
