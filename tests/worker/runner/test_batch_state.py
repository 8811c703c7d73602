"""Batches of which the device keeps what the next step has in common with the last: the same as those laid out anew."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from decoding_steps import decoding
from step_histories import BLOCK_SIZE, GROUPED_WAYS, WAYS, Ways, run_history

from kv_cache.block import BlockId, num_blocks_for
from spmd_worker.replica.mirror.mirror import Mirror, MirroredSequence, ScheduledSequence
from spmd_worker.replica.mirror.records import PlannedRow
from spmd_worker.replica.sequence.request import Request, RequestId
from spmd_worker.replica.sequence.sampling_params import SamplingParams
from spmd_worker.replica.sequence.step import StepPlan
from spmd_worker.worker.runner import batch_state
from spmd_worker.worker.runner.batch import Batch, build_batch
from spmd_worker.worker.runner.batch_state import BatchState

CPU = torch.device("cpu")
KiB = 1024


def assert_same(kept: Batch, anew: Batch) -> None:
    for name in ("token_ids", "positions", "rope_regimes", "sample_rows"):
        assert torch.equal(getattr(kept, name), getattr(anew, name)), name
        assert getattr(kept, name).dtype == torch.int64, name
    assert kept.rows == anew.rows
    assert kept.token_types is anew.token_types is None
    own, other = kept.attention, anew.attention
    for name in ("query_starts", "context_lengths", "sees_later"):
        assert getattr(own, name) == getattr(other, name), name
    for name in ("token_blocks", "token_offsets"):
        assert torch.equal(getattr(own, name), getattr(other, name)), name
    assert own.block_tables.shape == other.block_tables.shape
    for row, length in enumerate(other.context_lengths):
        blocks = slice(num_blocks_for(length, BLOCK_SIZE))
        assert own.block_tables[row, blocks].tolist() == other.block_tables[row, blocks].tolist(), row
    assert own.starts is not None
    assert own.lengths is not None
    assert (own.starts.tolist(), own.lengths.tolist()) == ([*own.query_starts], [*own.context_lengths])
    assert own.starts.dtype == own.lengths.dtype == torch.int32
    assert (own.segments is None) == (other.segments is None)
    if own.segments is not None and other.segments is not None:
        for name in ("slots", "starts", "firsts"):
            ours, theirs = getattr(own.segments, name), getattr(other.segments, name)
            assert ours.dtype == theirs.dtype == torch.int32, name
            assert torch.equal(ours, theirs), name
    assert own.group_of == other.group_of
    for ours, theirs in zip(own.others, other.others, strict=True):
        assert torch.equal(ours.token_blocks, theirs.token_blocks)
        assert ours.slots is not None
        assert ours.slots.tolist() == (theirs.token_blocks * BLOCK_SIZE + theirs.token_offsets).tolist()
        for row, length in enumerate(theirs.context_lengths):
            blocks = slice(num_blocks_for(length, BLOCK_SIZE))
            assert ours.block_tables[row, blocks].tolist() == theirs.block_tables[row, blocks].tolist(), row


class Compared:
    """Looks at the steps of histories: each is laid out with what was kept, and anew."""

    def __init__(self, num_groups: int = 1) -> None:
        self.num_steps = self.num_further = self.num_with_states = 0
        self._grouped: dict[str, Any] = {"num_groups": num_groups, "group_of": tuple(range(num_groups))}
        self.begin()

    def begin(self) -> None:
        """Another history, of a model with states or without."""
        self._states = {
            has_states: BatchState(BLOCK_SIZE, CPU, has_states=has_states, **self._grouped)
            for has_states in (False, True)
        }
        self._layout = None

    def __call__(self, plan: StepPlan, scheduled: tuple[ScheduledSequence, ...]) -> None:
        for each in self._states.values():
            each.forget(plan.finished_sequences, plan.finished_request_ids)
        if not scheduled:
            return
        has_states = scheduled[0].sequence.state_slot >= 0
        state = self._states[has_states]
        anew = build_batch(scheduled, BLOCK_SIZE, CPU, has_states=has_states, **self._grouped)
        assert_same(state.build(scheduled), anew)
        self.num_steps += 1
        self.num_with_states += has_states
        layout = state._layout
        assert layout is not None
        self.num_further += self._layout is not None and layout.query_starts is self._layout.query_starts
        self._layout = layout


def compare(num_histories: int, nums_of_ids: tuple[int, ...] = (1,), all_ways: tuple[Ways, ...] = WAYS) -> Compared:
    compared = Compared(all_ways[0].groups.num_groups)
    for seed in range(num_histories):
        compared.begin()
        run_history(seed, num_steps=25, nums_of_ids=nums_of_ids, look=compared, all_ways=all_ways)
    return compared


def test_kept_batches_equal_rebuilt_in_groups():
    compared = compare(2 * len(GROUPED_WAYS), all_ways=GROUPED_WAYS)
    assert min(compared.num_further, compared.num_with_states) > 20


def test_kept_batches_equal_rebuilt_for_any_schedule():
    compared = compare(24)
    # Negative control: both ways were met.
    assert compared.num_further > 100
    assert compared.num_with_states > 100
    assert compared.num_steps - compared.num_further > 300


def test_kept_batches_equal_rebuilt_for_any_ids():
    compare(12, nums_of_ids=(0, 1, 1, 3))


def without_new_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    new_blocks, calls = BatchState._new_blocks, iter(range(10**6))

    def forgetful(*arguments: object) -> object:
        places, blocks = new_blocks(*arguments)
        is_kept = next(calls) % 7 > 0
        return (places, blocks) if is_kept else (places[:0], blocks[:0])

    monkeypatch.setattr(BatchState, "_new_blocks", forgetful)


def always_further(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_state, "_continues", lambda layout, sequences, firsts: layout.sequences == sequences)


def one_list_for_every_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mirror changes a table in place."""
    add = Mirror._add

    def in_place(self: Mirror, row: PlannedRow) -> None:
        table = row.sequence.block_ids
        add(self, row)
        if not row.is_new:
            table[:] = row.sequence.block_ids
            row.sequence.block_ids = table

    monkeypatch.setattr(Mirror, "_add", in_place)


def without_new_firsts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that continue keep their first positions."""
    continued = BatchState._continue

    def stale(self: BatchState, layout: Any, *, has_ids: bool) -> object:
        layout, sent = continued(self, layout, has_ids=has_ids)
        return layout, sent._replace(firsts=torch.zeros_like(sent.firsts))

    monkeypatch.setattr(BatchState, "_continue", stale)


def slots_of_who_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two sequences of a step in one slot."""
    take_slots = BatchState._take_slots

    def doubled(self: BatchState, sequences: list[MirroredSequence]) -> object:
        slots = take_slots(self, sequences)
        return [slots[0], *slots[:-1]]

    monkeypatch.setattr(BatchState, "_take_slots", doubled)


@pytest.mark.parametrize(
    "broken", [without_new_blocks, always_further, one_list_for_every_table, slots_of_who_computes, without_new_firsts]
)
def test_comparison_detects_wrong_batch_state(
    monkeypatch: pytest.MonkeyPatch, broken: Callable[[pytest.MonkeyPatch], None]
):
    """Negative control of the comparison."""
    broken(monkeypatch)
    with pytest.raises((AssertionError, IndexError)):
        compare(24)


@pytest.mark.parametrize("spread", [15, 0], ids=["blocks at different steps", "all take a block in one step"])
@pytest.mark.parametrize("length", [400, 4096])
def test_256_decode_rows_send_at_most_eight_kib(length: int, spread: int):
    state = BatchState(16, CPU)
    sent = []
    for step, scheduled in zip(range(18), decoding(256, length, 16, spread)):
        assert len(state.build(scheduled).sample_rows) == 256, step
        sent.append(state.num_bytes_sent)
    assert max(sent[1:]) <= 8 * KiB
    # Negative control: what a step sends that is laid out anew.
    assert sent[0] > 16 * KiB


def test_larger_tables_have_what_stood_in_smaller_ones():
    """With more rows, and with longer ones: nothing is sent again."""
    state = BatchState(BLOCK_SIZE, CPU)
    steps = decoding(5, 8 * BLOCK_SIZE - 2, BLOCK_SIZE, 0)
    shapes, sent = [], []
    for num_rows in (1, 1, 2, 3, 5, 5, 5, 5):
        scheduled = next(steps)[:num_rows]
        assert_same(state.build(scheduled), build_batch(scheduled, BLOCK_SIZE, CPU))
        shapes.append(tuple(state._tables.shape))
        sent.append(state.num_bytes_sent)
    assert len(set(shapes)) == 4, shapes
    assert max(sent[-3:]) <= 8 * 8 * 4, "ids, positions, places and so on of five rows, each to 16 bytes"


def test_sent_tensors_are_aligned_to_16_bytes():
    """Triton compiles a form of its own for a pointer that does not, in the middle of a job."""
    state = BatchState(BLOCK_SIZE, CPU)
    for num_rows in (7, 6, 6, 5, 3, 3, 1):
        for scheduled, _ in zip(decoding(num_rows, 30 + num_rows, BLOCK_SIZE, 3), range(2)):
            metadata = state.build(scheduled).attention
            for tensor in (metadata.starts, metadata.lengths, metadata.block_tables):
                assert tensor.data_ptr() % 16 == 0


@pytest.mark.parametrize("num_groups", [2, 3])
def test_tensors_of_each_group_are_aligned(num_groups: int):
    grouped: dict[str, Any] = {"num_groups": num_groups, "group_of": tuple(range(num_groups))}
    state = BatchState(BLOCK_SIZE, CPU, **grouped)
    for num_rows in (7, 6, 5, 1):
        steps = decoding(num_rows, 30 + num_rows, BLOCK_SIZE, 3)
        for scheduled, _ in zip(steps, range(2)):
            for each in scheduled:
                ids = each.sequence.block_ids[:]
                each.sequence.block_ids = [BlockId(block) for block in ids for _ in range(num_groups)]
            batch = state.build(scheduled)
            assert_same(batch, build_batch(scheduled, BLOCK_SIZE, CPU, **grouped))
            for metadata in (batch.attention, *batch.attention.others):
                for tensor in (metadata.slots, metadata.token_blocks, metadata.block_tables):
                    assert tensor.data_ptr() % 16 == 0
            for each in scheduled:
                each.sequence.block_ids = each.sequence.block_ids[::num_groups]


def test_evicted_sequence_is_sent_again_completely(monkeypatch: pytest.MonkeyPatch):
    """Steps take turns with more sequences than there are slots for."""
    monkeypatch.setattr(batch_state, "_SLOTS_A_SEQUENCE", 1)
    steps = [decoding(4, 30 + turn, BLOCK_SIZE, 3) for turn in range(3)]
    state = BatchState(BLOCK_SIZE, CPU)
    for _ in range(6):
        for step in steps:
            scheduled = next(step)
            assert_same(state.build(scheduled), build_batch(scheduled, BLOCK_SIZE, CPU))
    assert len(state._tables) == 4


def test_nothing_is_held_of_who_has_ended():
    state = BatchState(BLOCK_SIZE, CPU)
    scheduled = next(decoding(6, 30, BLOCK_SIZE, 3))
    state.build(scheduled)
    state.forget((), [each.sequence.request.request_id for each in scheduled[:5]])
    assert [each.request.request_id for each in state._slots] == [5]
    assert [slot.table for slot in state._free] == [None] * len(state._free), "nor their tables"
    state.build(scheduled[5:])
    later = [dataclasses.replace(each.sequence, request=each.sequence.request) for each in scheduled[:5]]
    again = tuple(ScheduledSequence(each, 1, 1) for each in later)
    assert_same(state.build(again), build_batch(again, BLOCK_SIZE, CPU))


def test_slots_of_adapters_are_kept_as_rebuilt():
    slots, state = {7: 0, 9: 3}, BatchState(BLOCK_SIZE, CPU, lambda digest: -1 if digest == 0 else slots[digest])
    sequences = []
    for index, adapter in enumerate((0, 7, 9, 7)):
        request = Request(RequestId(index), tuple(range(3 + index)), SamplingParams(), index, adapter=adapter)
        sequences.append(MirroredSequence(request, 0, [], [BlockId(8 * index + block) for block in range(8)], 0, 1))
    first = tuple(ScheduledSequence(each, each.num_tokens, 1) for each in sequences)
    kept = state.build(first)
    assert kept.adapter_slots is not None
    assert kept.adapter_slots.tolist() == [-1] * 3 + [0] * 4 + [3] * 5 + [0] * 6
    assert kept.adapter_slots.dtype == torch.int32
    for _ in range(2):
        for each in sequences:
            each.num_computed_tokens = each.num_tokens
            each.output_token_ids.append(5)
        scheduled = tuple(each.decode_row for each in sequences)
        kept, anew = state.build(scheduled), build_batch(scheduled, BLOCK_SIZE, CPU, slot_of=state._slot_of)
        assert kept.adapter_slots.tolist() == anew.adapter_slots.tolist() == [-1, 0, 3, 0]
    assert kept.adapter_slots is state._layout.adapter_slots
    others = tuple(each.decode_row for each in sequences[:1])
    assert state.build(others).adapter_slots is build_batch(others, BLOCK_SIZE, CPU).adapter_slots is None
    with pytest.raises(AssertionError, match="the model takes none"):
        build_batch(scheduled, BLOCK_SIZE, CPU)
