"""Persistent batch: block tables kept on the device, so that a step sends only what is new of them.

Every computed sequence has a slot with its block table: a table that has grown sends its new blocks. All else that a
step needs of each token and sequence is laid out on the host and sent with them, in one copy: it takes less time than
the launches that would derive it. A step that continues every sequence of the last step by one token, in the same
order, sends what differs from the last step's layout.

Slots are only a cache: they are compared with what the step needs, so any plan may follow any other, and a sequence
that lost its slot is sent completely when it is scheduled again.

T: tokens of the step; S: sequences; R: rows that sample; B: blocks of the longest table; G: groups of layers. A slot
has a row of the tables for each group: row slot * G + g.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from operator import attrgetter, itemgetter
from typing import Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kv_cache.block import BlockId
from spmd_worker.model_config.vision_config import VisionConfig
from spmd_worker.ops.attention.metadata import AttentionMetadata
from spmd_worker.ops.kernels.host_copies import to_device
from spmd_worker.ops.kernels.recurrent import StateSegments
from spmd_worker.replica.mirror.mirror import MirroredSequence, ScheduledSequence
from spmd_worker.replica.sequence.request import RequestId
from spmd_worker.replica.sequence.sequence import SequenceKey
from spmd_worker.worker.runner.batch import (
    Batch,
    Drafts,
    Integers,
    RowsToSample,
    SlotOf,
    adapter_slots,
    drafts_of,
    sampled_tokens,
    token_ids,
)
from spmd_worker.worker.runner.image_layout import last_visible_of, media_of_step, position_delta, rope_positions_of
from spmd_worker.worker.runner.state_rows import column, draft_replay, state_slots

_SLOTS_A_SEQUENCE: Final = 4
"""Slots for the sequences of a few steps in flight and for waiting ones."""
_ALIGNED_WORDS: Final = 4
_MAX_INDEX: Final = 2**31
"""Indices into the tables are sent as int32."""
_NONE: Final = np.empty(0, np.int64)
_SEQUENCE: Final = itemgetter(0)
_NUM_SCHEDULED: Final = itemgetter(1)
_NUM_SAMPLES: Final = itemgetter(2)
_NUM_COMPUTED: Final = attrgetter("num_computed_tokens")
_REGIME: Final = attrgetter("request.rope_regime")
_INDEX: Final = attrgetter("index")
_BLOCKS: Final = attrgetter("block_ids")


@dataclass(slots=True, eq=False)
class _Slot:
    """Rows of number `index` of the tables, where the device has the first `num_known` entries of `table`."""

    index: int
    table: list[BlockId] | None = None
    num_known: int = 0


@dataclass(frozen=True, slots=True)
class _Layout:
    """Layout of a step. On the host: `ends` int64 [S], the tokens computed with the step, `slot_indices` int64 [S],
    `query_starts`, and `width`, the blocks of the longest table. On the device, int64: `slots` [S], `rope_regimes` [T],
    `sample_rows` [R]; int32: `starts` [S + 1], `adapter_slots` [T] if a row has an adapter, `state_slots` [S] if the
    model has states. `deltas` int64 [S], on the host: `position_delta` of each row, if rows have three positions.
    `drafts` are the batch's.
    """

    scheduled: Sequence[ScheduledSequence]
    sequences: list[MirroredSequence]
    ends: Integers
    width: int
    is_decode: bool
    own_slots: list[_Slot]
    slot_indices: Integers
    query_starts: tuple[int, ...]
    slots: Tensor
    rope_regimes: Tensor
    sample_rows: Tensor
    starts: Tensor
    adapter_slots: Tensor | None
    state_slots: Tensor | None
    deltas: Integers | None
    drafts: Drafts


class _Sent(NamedTuple):
    """Numbers of one step on the device. int64: `token_ids`, `positions` [T], `token_blocks` [G * T], `token_offsets`
    [T], `rope_positions` [3 * T] or [6 * T], if rows have three positions, and `places`, new entries' indices into the
    tables; int32: `token_slots` [G * T], `lengths` [S], `blocks`, the entries, `firsts` [S], first positions, if the
    model has states, and `last_visible` [T] if tokens see later ones. With several groups each one's T tokens are
    padded to aligned starts.
    """

    token_ids: Tensor
    positions: Tensor
    token_blocks: Tensor
    token_offsets: Tensor
    rope_positions: Tensor
    places: Tensor
    token_slots: Tensor
    lengths: Tensor
    blocks: Tensor
    firsts: Tensor
    last_visible: Tensor


class BatchState:
    """Builds the batches of one model runner on its device, with the same values as `build_batch`. Block tables are
    int32; entries after a sequence's blocks are left over from other sequences.
    """

    def __init__(
        self,
        block_size: int,
        device: torch.device,
        slot_of: SlotOf | None = None,
        *,
        has_states: bool = False,
        most_drafts: int = 0,
        vision: VisionConfig | None = None,
        num_groups: int = 1,
        group_of: tuple[int, ...] = (),
    ) -> None:
        self._vision = vision
        self._block_size, self._device, self._slot_of, self._has_states = block_size, device, slot_of, has_states
        self._most_drafts = most_drafts
        self._num_groups, self._group_of = num_groups, group_of
        self._slots: dict[MirroredSequence, _Slot] = {}
        """The least recently used first."""
        self._free: list[_Slot] = []
        self._tables = torch.zeros((0, 0), dtype=torch.int32, device=device)
        self._host_tables = np.zeros((0, 0), dtype=np.int32)
        """The same, on the host."""
        self._layout: _Layout | None = None
        self._rows = RowsToSample()
        self.num_bytes_sent = 0
        """Bytes sent to the device for the last batch."""

    def build(self, scheduled: Sequence[ScheduledSequence], *, has_ids: bool = True) -> Batch:
        """Lay out a step. `scheduled` comes from the mirror, in plan order. Without `has_ids`, for a step that
        continues the rows of the last one, the host does not know the token ids and the batch has none.
        """
        last = self._layout
        is_same = last is not None and scheduled is last.scheduled
        sequences = last.sequences if last is not None and is_same else list(map(_SEQUENCE, scheduled))
        firsts = column(_NUM_COMPUTED, sequences)
        replay = draft_replay(scheduled, self._most_drafts, self._device)
        can_continue = last is not None and replay is None and _continues(last, sequences, firsts)
        if last is not None and can_continue and (is_same or _decode(scheduled)):
            layout, sent = self._continue(replace(last, scheduled=scheduled, ends=firsts + 1), has_ids=has_ids)
        else:
            layout, sent = self._lay_out(scheduled, sequences, firsts)
        self._layout = layout
        if len(sent.places):
            self._tables.view(-1)[sent.places] = sent.blocks
        attention = AttentionMetadata(
            query_starts=layout.query_starts,
            context_lengths=tuple(layout.ends.tolist()),
            block_tables=self._tables[:, : layout.width].index_select(0, layout.slots),
            token_blocks=sent.token_blocks[: len(sent.positions)],
            token_offsets=sent.token_offsets,
            starts=layout.starts,
            lengths=sent.lengths,
            slots=sent.token_slots[: len(sent.positions)],
            segments=None
            if layout.state_slots is None
            else StateSegments(layout.state_slots, layout.starts, sent.firsts),
            replay=replay,
            last_visible=sent.last_visible if len(sent.last_visible) else None,
        )
        if self._num_groups > 1:
            attention = self._in_groups(attention, layout, sent)
        return Batch(
            token_ids=sent.token_ids,
            positions=sent.positions,
            rope_regimes=layout.rope_regimes,
            attention=attention,
            sample_rows=layout.sample_rows,
            rows=self._rows.of(scheduled),
            adapter_slots=layout.adapter_slots,
            rope_positions=None if layout.deltas is None else sent.rope_positions.view(-1, len(sent.positions)),
            drafts=layout.drafts,
        )

    def _in_groups(self, first: AttentionMetadata, layout: _Layout, sent: _Sent) -> AttentionMetadata:
        """The metadata of the first group, with that of the others."""
        num_tokens, tables, others = len(sent.positions), self._tables[:, : layout.width], []
        for group in range(1, self._num_groups):
            start = group * _padded(num_tokens)
            of_group = slice(start, start + num_tokens)
            others.append(
                replace(
                    first,
                    block_tables=tables.index_select(0, layout.slots + group),
                    token_blocks=sent.token_blocks[of_group],
                    slots=sent.token_slots[of_group],
                )
            )
        return replace(first, others=tuple(others), group_of=self._group_of)

    def forget(self, finished_sequences: Sequence[SequenceKey], finished_request_ids: Sequence[RequestId]) -> None:
        """Free the slots of finished sequences."""
        if not finished_sequences and not finished_request_ids:
            return
        requests, keys = set(finished_request_ids), set(finished_sequences)
        ended = [each for each in self._slots if each.key in keys or each.key.request_id in requests]
        for sequence in ended:
            slot = self._slots.pop(sequence)
            slot.table = None
            self._free.append(slot)
        self._layout = None

    def _continue(self, layout: _Layout, *, has_ids: bool) -> tuple[_Layout, _Sent]:
        """The last step's sequences, one token further."""
        sequences = layout.sequences
        grown = _grown(sequences, layout.own_slots)
        if grown:
            width = max([layout.width, *[self._num_blocks(sequence) for sequence, _ in grown]])
            self._grow_tables(len(sequences), width)
            layout = replace(layout, width=width)
        places, blocks = self._new_blocks(grown)
        last_ids = np.array([sequence.output_token_ids[-1] for sequence in sequences] if has_ids else [], np.int64)
        positions = layout.ends - 1
        token_blocks, offsets, token_slots = self._of_tokens(layout.slot_indices, positions)
        three = _NONE if layout.deltas is None else self._next_positions(sequences, positions, layout.deltas)
        longs, ints = self._send(
            (last_ids, positions, token_blocks, offsets, three, places),
            (token_slots, layout.ends, blocks, positions if self._has_states else _NONE, _NONE),
        )
        return layout, _Sent(*longs, *ints)

    def _lay_out(
        self,
        scheduled: Sequence[ScheduledSequence],
        sequences: list[MirroredSequence],
        firsts: Integers,
    ) -> tuple[_Layout, _Sent]:
        """Any step. `firsts` are the sequences' first positions."""
        width = max(map(len, map(_BLOCKS, sequences))) // self._num_groups
        self._grow_tables(len(sequences), width)
        own_slots = self._take_slots(sequences)
        places, blocks = self._new_blocks(_grown(sequences, own_slots))
        counts = column(_NUM_SCHEDULED, scheduled)
        slot_indices, regimes = column(_INDEX, own_slots), column(_REGIME, sequences)
        starts, ends = np.append(0, counts.cumsum()), firsts + counts
        positions = np.arange(starts[-1]) + (firsts - starts[:-1]).repeat(counts)
        token_blocks, offsets, token_slots = self._of_tokens(slot_indices.repeat(counts), positions)
        media = media_of_step(self._vision, sequences)
        of_images = (self._vision, media, firsts, counts)
        three, last_visible = rope_positions_of(*of_images), last_visible_of(*of_images)
        of_tokens = (token_blocks, offsets, _NONE if three is None else three.ravel())
        of_step = (token_ids(scheduled), positions, *of_tokens, places)
        of_layout = (slot_indices * self._num_groups, regimes.repeat(counts), sampled_tokens(scheduled, starts[1:]))
        adapters = adapter_slots(sequences, self._slot_of)
        of_adapters = _NONE if adapters is None else adapters.repeat(counts)
        first, held = (firsts, state_slots(sequences)) if self._has_states else (_NONE, _NONE)
        sight = _NONE if last_visible is None else last_visible
        longs, (*ints, states_there, starts_there, adapters_there) = self._send(
            (*of_step, *of_layout), (token_slots, ends, blocks, first, sight, held, starts, of_adapters)
        )
        *longs, slots, rope_regimes, sample_rows = longs
        layout = _Layout(
            scheduled=scheduled,
            sequences=sequences,
            ends=ends,
            width=width,
            is_decode=_decode(scheduled),
            own_slots=own_slots,
            slot_indices=slot_indices,
            query_starts=tuple(starts.tolist()),
            slots=slots,
            rope_regimes=rope_regimes,
            sample_rows=sample_rows,
            starts=starts_there,
            adapter_slots=None if adapters is None else adapters_there,
            state_slots=states_there if self._has_states else None,
            deltas=None if three is None or media is None else np.array([position_delta(each) for each in media]),
            drafts=drafts_of(scheduled),
        )
        return layout, _Sent(*longs, *ints)

    def _next_positions(
        self, sequences: list[MirroredSequence], positions: Integers, deltas: Integers
    ) -> NDArray[np.int64]:
        """`Batch.rope_positions` of rows that decode, flat: they are behind their images, but runs may begin in one."""
        if self._vision is None or self._vision.run_length == 1:
            return np.tile(positions + deltas, 3)
        media = media_of_step(self._vision, sequences)
        found = rope_positions_of(self._vision, media, positions, np.ones_like(positions))
        assert found is not None, "a row of the step has images"
        return found.ravel()

    def _num_blocks(self, sequence: MirroredSequence) -> int:
        return len(sequence.block_ids) // self._num_groups

    def _grow_tables(self, num_sequences: int, width: int) -> None:
        """Enlarge the tables for `num_sequences` of `width` blocks; their contents are kept."""
        num_rows, max_blocks = self._tables.shape
        num_groups = self._num_groups
        num_slots = num_rows // num_groups
        if _SLOTS_A_SEQUENCE * num_sequences <= num_slots and width <= max_blocks:
            return
        shape = (
            max(num_slots, _power_of_two(_SLOTS_A_SEQUENCE * num_sequences)),
            max(max_blocks, _power_of_two(width)),
        )
        num_new, shape = shape[0], (shape[0] * num_groups, shape[1])
        assert shape[0] * shape[1] < _MAX_INDEX, shape
        tables = torch.zeros(shape, dtype=torch.int32, device=self._device)
        tables[:num_rows, :max_blocks] = self._tables
        host_tables = np.zeros(shape, dtype=np.int32)
        host_tables[:num_rows, :max_blocks] = self._host_tables
        self._tables, self._host_tables = tables, host_tables
        self._free += [_Slot(index) for index in range(num_slots, num_new)]

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
        width, num_groups = self._tables.shape[1], self._num_groups
        indices: list[int] = []
        blocks: list[BlockId] = []
        for sequence, slot in grown:
            table = sequence.block_ids
            known = slot.num_known if slot.table is table else 0
            assert known <= len(table), (known, len(table))
            for group in range(num_groups):
                start = (slot.index * num_groups + group) * width
                indices += range(start + known // num_groups, start + len(table) // num_groups)
                blocks += table[known + group :: num_groups]
            slot.table, slot.num_known = table, len(table)
        places, values = np.array(indices, dtype=np.int64), np.array(blocks, dtype=np.int64)
        self._host_tables.ravel()[places] = values
        return places, values

    def _of_tokens(self, slots: Integers, positions: Integers) -> tuple[Integers, Integers, Integers]:
        """Block [G * T], offset in it [T], and slot in the cache [G * T] of each token, padded as in `_Sent`; given
        each one's slot and position.
        """
        numbers, offsets = np.divmod(positions, self._block_size)
        num_groups = self._num_groups
        if not self._host_tables.shape[1]:
            # A model without attention has no blocks.
            return np.zeros_like(offsets), offsets, offsets
        if num_groups == 1:
            blocks = self._host_tables[slots, numbers].astype(np.int64)
            return blocks, offsets, blocks * self._block_size + offsets
        rows = slots * num_groups + np.arange(num_groups)[:, None]
        in_groups = np.zeros((num_groups, _padded(len(positions))), dtype=np.int64)
        in_groups[:, : len(positions)] = self._host_tables[rows, numbers]
        in_slots = in_groups * self._block_size
        in_slots[:, : len(positions)] += offsets
        return in_groups.ravel(), offsets, in_slots.ravel()

    def _send(self, longs: Sequence[Integers], ints: Sequence[Integers]) -> tuple[list[Tensor], list[Tensor]]:
        """Copy arrays of numbers below 2^31 to the device in one copy, as int32; `longs` become int64 there. Each is
        aligned to 16 bytes, because Triton recompiles a kernel for an unaligned tensor.
        """
        arrays = (*longs, *ints)
        starts = [0, *accumulate(_padded(len(each)) for each in arrays)]
        words = np.zeros(starts[-1], dtype=np.int32)
        for start, each in zip(starts, arrays):
            words[start : start + len(each)] = each
        self.num_bytes_sent = words.nbytes
        sent = to_device(torch.from_numpy(words), self._device)
        wide = sent[: starts[len(longs)]].long()
        found = [
            (wide if number < len(longs) else sent)[start : start + len(each)]
            for number, (start, each) in enumerate(zip(starts, arrays))
        ]
        return found[: len(longs)], found[len(longs) :]


def _continues(layout: _Layout, sequences: list[MirroredSequence], firsts: Integers) -> bool:
    """Whether a decode step continues the rows of the last one, also a decode step, by one token."""
    return layout.is_decode and layout.sequences == sequences and bool((layout.ends == firsts).all())


def _decode(scheduled: Sequence[ScheduledSequence]) -> bool:
    """Whether each row computes one token and samples one."""
    ones = [1] * len(scheduled)
    return list(map(_NUM_SCHEDULED, scheduled)) == ones == list(map(_NUM_SAMPLES, scheduled))


def _grown(sequences: list[MirroredSequence], slots: list[_Slot]) -> list[tuple[MirroredSequence, _Slot]]:
    """The sequences with block entries that the device lacks."""
    return [
        (sequence, slot)
        for sequence, slot in zip(sequences, slots)
        if len(sequence.block_ids) != slot.num_known or sequence.block_ids is not slot.table
    ]


def _padded(count: int) -> int:
    return -(-count // _ALIGNED_WORDS) * _ALIGNED_WORDS


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length() if number else 0
