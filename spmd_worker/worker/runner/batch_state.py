"""What a device keeps of the sequences from step to step, so that a step sends it what is new and no more.

Every sequence that is computed has a slot, in which its block table stays: a table that has grown sends its new blocks.
A step that takes every sequence of the step before one token further, in the same order, sends their token ids beside;
positions, and all that follows from them, the device counts on by itself. Any other step sends its layout whole. All of
it goes in one copy.

Slots are no more than a cache: what is kept is compared with what the step asks for, so that a plan of any kind may
follow any other, and a sequence whose slot went to another is sent whole when it comes back.

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
from spmd_worker.worker.runner.batch import Batch, rows_to_sample, token_ids

_SLOTS_A_SEQUENCE: Final = 4
"""So that those of a few steps under way, and those that wait to go on, keep theirs."""
_ALIGNED_WORDS: Final = 4
_MOST_PLACES: Final = 2**31
"""Places in tables are sent as int32."""


@dataclass(slots=True, eq=False)
class _Slot:
    """`index` is its row of the tables; the device has the first `num_known` blocks of `table`."""

    index: int
    table: list[BlockId] | None = None
    num_known: int = 0


@dataclass(frozen=True, slots=True)
class _Layout:
    """A step's, on the host and on the device. The host's: `context_lengths`, `query_starts`, and `width`, the blocks
    of the longest table. Int64: `slots` [S], `row_of_token`, `positions`, `rope_regimes` [T], `sample_rows` [R]; int32:
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

    def one_further(self, scheduled: Sequence[ScheduledSequence], context_lengths: list[int], width: int) -> "_Layout":
        """Of a step in which every sequence has gone on by its one token."""
        return replace(
            self,
            scheduled=scheduled,
            context_lengths=context_lengths,
            width=width,
            positions=self.positions + 1,
            lengths=self.lengths + 1,
        )


class BatchState:
    """Makes the batches of one model runner, whose device it is. The same values as `build_batch`'s; in block tables,
    int32 here, what stands behind a sequence's blocks is left over from others.
    """

    def __init__(self, block_size: int, device: torch.device) -> None:
        self._block_size, self._device = block_size, device
        self._slots: dict[MirroredSequence, _Slot] = {}
        """Those that were laid out longest ago first."""
        self._free: list[_Slot] = []
        self._tables = torch.zeros((0, 0), dtype=torch.int32, device=device)
        self._layout: _Layout | None = None
        self.num_bytes_sent = 0
        """To the device, for the last batch."""

    def build(self, scheduled: Sequence[ScheduledSequence], *, has_ids: bool = True) -> Batch:
        """Lay out a step. `scheduled` comes from the mirror, in plan order. Without `has_ids`, of a step that takes the
        rows of the last one further, the host does not know their tokens, and the batch has none.
        """
        layout = self._layout
        if layout is not None and scheduled is layout.scheduled:
            sequences, is_decode = layout.sequences, layout.is_decode
        else:
            sequences = [each.sequence for each in scheduled]
            is_decode = all(each.num_scheduled_tokens == each.num_samples == 1 for each in scheduled)
        firsts = [sequence.num_computed_tokens for sequence in sequences]
        if layout is not None and is_decode and _goes_on(layout, sequences, firsts):
            grown = _grown(sequences, layout.own_slots)
            width = max([layout.width, *[len(sequence.block_ids) for sequence, _ in grown]])
            self._make_room(len(sequences), width)
            last_ids = np.array([sequence.output_token_ids[-1] for sequence in sequences] if has_ids else [], np.int64)
            ids, places, blocks = self._send(last_ids, *self._new_blocks(grown))
            layout = layout.one_further(scheduled, [first + 1 for first in firsts], width)
        else:
            width = max([len(sequence.block_ids) for sequence in sequences])
            self._make_room(len(sequences), width)
            slots = self._take_slots(sequences)
            ids, places, blocks, *numbers = self._send(
                token_ids(scheduled), *self._new_blocks(_grown(sequences, slots)), *_numbers(scheduled, slots)
            )
            lengths = [first + each.num_scheduled_tokens for first, each in zip(firsts, scheduled)]
            layout = _laid_out(scheduled, sequences, lengths, width, is_decode, slots, numbers)
        self._layout = layout
        if len(places):
            self._tables.view(-1)[places.long()] = blocks
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
            rows=rows_to_sample(scheduled),
        )

    def forget(self, finished_sequences: Sequence[SequenceKey], finished_request_ids: Sequence[RequestId]) -> None:
        """Their slots are free, and nothing of them is held here any more."""
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

    def _make_room(self, num_sequences: int, width: int) -> None:
        """Tables for so many sequences of so many blocks. What stands in smaller ones stays on the device."""
        num_slots, most_blocks = self._tables.shape
        if _SLOTS_A_SEQUENCE * num_sequences <= num_slots and width <= most_blocks:
            return
        shape = (
            max(num_slots, _power_of_two(_SLOTS_A_SEQUENCE * num_sequences)),
            max(most_blocks, _power_of_two(width)),
        )
        assert shape[0] * shape[1] < _MOST_PLACES, shape
        tables = torch.zeros(shape, dtype=torch.int32, device=self._device)
        tables[:num_slots, :most_blocks] = self._tables
        self._tables = tables
        self._free += [_Slot(index) for index in range(num_slots, shape[0])]

    def _take_slots(self, sequences: list[MirroredSequence]) -> list[_Slot]:
        """Those that have none take a free one, or that of the sequence that was laid out longest ago."""
        kept = self._slots
        for sequence in sequences:
            # Behind all others: so none of this step's gives its slot to another of this step's.
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
        """What the device does not have yet: places in the tables, and the blocks that stand there now. A table that is
        not only added to is another list (`mirror.py`).
        """
        width = self._tables.shape[1]
        places: list[int] = []
        blocks: list[BlockId] = []
        for sequence, slot in grown:
            table = sequence.block_ids
            known = slot.num_known if slot.table is table else 0
            assert known <= len(table), (known, len(table))
            places += range(slot.index * width + known, slot.index * width + len(table))
            blocks += table[known:]
            slot.table, slot.num_known = table, len(table)
        return np.array(places, dtype=np.int64), np.array(blocks, dtype=np.int64)

    def _send(self, *arrays: NDArray[np.int64]) -> list[Tensor]:
        """All of them, numbers below 2^31, as int32 on the device, in one copy. Each begins at a multiple of 16 bytes:
        Triton compiles a kernel anew for a tensor that does not.
        """
        starts = [0, *accumulate(-(-len(each) // _ALIGNED_WORDS) * _ALIGNED_WORDS for each in arrays)]
        words = np.zeros(starts[-1], dtype=np.int32)
        for start, each in zip(starts, arrays):
            words[start : start + len(each)] = each
        self.num_bytes_sent = words.nbytes
        sent = to_device(torch.from_numpy(words), self._device)
        return [sent[start : start + len(each)] for start, each in zip(starts, arrays)]


def _goes_on(layout: _Layout, sequences: list[MirroredSequence], firsts: list[int]) -> bool:
    """Whether a step that decodes takes the one laid out, which did, one token further."""
    return layout.is_decode and layout.sequences == sequences and layout.context_lengths == firsts


def _grown(sequences: list[MirroredSequence], slots: list[_Slot]) -> list[tuple[MirroredSequence, _Slot]]:
    """Of whose tables the device has not all."""
    return [
        (sequence, slot)
        for sequence, slot in zip(sequences, slots)
        if len(sequence.block_ids) != slot.num_known or sequence.block_ids is not slot.table
    ]


def _numbers(scheduled: Sequence[ScheduledSequence], slots: list[_Slot]) -> list[NDArray[np.int64]]:
    """A layout, as it is sent: slots, first positions and rope regimes [S], starts [S + 1], rows of tokens [T], rows
    that sample [R].
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


def _laid_out(
    scheduled: Sequence[ScheduledSequence],
    sequences: list[MirroredSequence],
    context_lengths: list[int],
    width: int,
    is_decode: bool,
    own_slots: list[_Slot],
    numbers: list[Tensor],
) -> _Layout:
    """`numbers` are those of `_numbers`, on the device."""
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
