"""The worker's copy of the scheduler's state: sequences by request id, updated by the plans of the steps.

A plan is checked completely before it changes anything: a rejected plan leaves the mirror unchanged.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import chain, islice, repeat
from operator import attrgetter
from typing import Final, NamedTuple

from kv_cache.layer_groups import ONE_GROUP, LayerGroups
from spmd_worker.replica.mirror.block_check import MirroredBlocks
from spmd_worker.replica.mirror.comparison_check import check_comparisons, check_repeated
from spmd_worker.replica.mirror.contents import MirroredSlots
from spmd_worker.replica.mirror.last_rows import LastRows
from spmd_worker.replica.mirror.media_check import MediaCheck
from spmd_worker.replica.mirror.plan_check import NO_TABLES, AdapterRules, PlanCheck
from spmd_worker.replica.mirror.records import (
    MirroredGroup,
    MirroredSequence,
    MirrorError,
    PlannedRow,
    ScheduledSequence,
)
from spmd_worker.replica.mirror.state_check import StateCheck, num_lagging_tokens
from spmd_worker.replica.sequence.metadata import SequenceData, SequenceDataDelta, SequenceGroupMetadata
from spmd_worker.replica.sequence.request import Request, RequestId
from spmd_worker.replica.sequence.sampled import NOT_READ, SampledIds
from spmd_worker.replica.sequence.sequence import SequenceKey
from spmd_worker.replica.sequence.step import StepPlan

_NUM_SAMPLES: Final = attrgetter("num_samples")

__all__ = ["Mirror", "MirrorError", "MirroredSequence", "ScheduledSequence"]


class _Sampling(NamedTuple):
    """A step with ids not read yet: rows, and their output lists with former lengths. `is_single`: one id a row."""

    step: int
    rows: tuple[ScheduledSequence, ...]
    outputs: Sequence[list[int]]
    nums_outputs: list[int]
    is_single: bool


class Mirror:
    """The sequences of every request that was scheduled and has not ended, in a cache of `num_blocks` device blocks,
    or, with 0, without one. With `num_steps_ahead` plans come before the ids that they append are read: `take_sampled`.
    `adapters` None: no request may have one. `num_state_slots` is 0 in a model without recurrent states. Tables have an
    entry of each of the `groups` for each block, of which some are left over (`kv_cache/layer_groups.py`). Sequences
    have at most `most_drafts` drafts. `checks_blocks`: what rows read in blocks is followed too (`block_check.py`).
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        num_steps_ahead: int = 0,
        adapters: AdapterRules | None = None,
        num_state_slots: int = 0,
        groups: LayerGroups = ONE_GROUP,
        most_drafts: int = 0,
        *,
        checks_blocks: bool = True,
    ) -> None:
        assert num_blocks >= 0, num_blocks
        assert block_size >= 1, block_size
        self.num_blocks = num_blocks
        self.block_size, self.num_groups = block_size, groups.num_groups
        # A model without attention has states and no blocks: an empty table is enough for any number of tokens.
        has_tables = num_blocks > 0 or not num_state_slots
        self._table_size = block_size if has_tables else NO_TABLES
        self._num_steps_ahead, self._adapters, self._most_drafts = num_steps_ahead, adapters, most_drafts
        self.media_rows: dict[bytes, None] = {}
        """Names of the images whose rows are kept."""
        self._slots = MirroredSlots(num_state_slots)
        self._blocks = MirroredBlocks(num_blocks, block_size, groups) if checks_blocks and num_blocks else None
        self._step: int | None = None
        self._groups: dict[RequestId, MirroredGroup] = {}
        # Those of all groups.
        self._sequences: dict[SequenceKey, MirroredSequence] = {}
        self._sampling: deque[_Sampling] = deque()
        self._last = LastRows()
        # Ids of sequences that continue after their ids are read.
        self._read_ids: dict[MirroredSequence, int] = {}

    def apply(self, plan: StepPlan) -> tuple[ScheduledSequence, ...]:
        """Advance the mirror to the plan's step and return the scheduled rows, in plan order: the same tuple as in the
        step before, if only its sequences continue by a token.

        Raises MirrorError, and changes nothing, if the plan does not follow from the plans before it.
        """
        last = self._last
        if not last.are_plain or not self._is_same_decoding(plan, last):
            return self._apply(plan)
        blocks = self._blocks if plan.continuing_blocks else None
        changes = None if blocks is None else blocks.check(plan, (), last.sequences, is_same=True)
        if not plan.state_ops.is_empty:
            self._slots.move(plan.state_ops, self._state_check(plan, ()).check_state_ops(last.sequences))
        if blocks is not None and changes is not None:
            blocks.change(changes, ())
        self._step = plan.step
        for index, block_id in plan.continuing_blocks:
            last.tables[index].append(block_id)
        last.advance(self._appended_ids(plan, last.sequences))
        if self._num_steps_ahead:
            self._await(plan.step, last)
        return last.scheduled

    def _is_same_decoding(self, plan: StepPlan, last: LastRows) -> bool:
        """Whether the plan only advances the last one's sequences by a token, and each has a block for it."""
        num_rows, num_new = len(last.sequences), {}
        if (
            plan.step != (self._step or 0) + 1
            or plan.groups
            or plan.finished_sequences
            or plan.finished_request_ids
            or plan.continuing_num_ids
            or plan.encode
            or plan.drop_rows
            or plan.hit_comparisons
            or plan.repeated_rows
            or not plan.block_ops.is_empty
            or not plan.num_tokens == num_rows == len(plan.continuing_token_ids) + plan.num_ahead
            or not 0 <= plan.num_ahead <= num_rows * self._num_steps_ahead
            or plan.continuing != last.keys
        ):
            return False
        if plan.continuing_blocks:
            sizes = (self.num_blocks, self._table_size)
            num_new = PlanCheck(plan, self._groups, {}, *sizes, num_groups=self.num_groups).num_new_blocks()
        return all(index in num_new for index in last.to_check(self._table_size, self.num_groups))

    def _apply(self, plan: StepPlan) -> tuple[ScheduledSequence, ...]:
        """`apply` for any plan."""
        sizes = (self.num_blocks, self.block_size)
        following = None if plan.continuing_num_ids else self._last.following(plan.continuing)
        of_plan = (self.num_blocks, self._table_size)
        state = (self._groups, self._sequences, *of_plan, self._step, self._last.scheduled)
        check = PlanCheck(
            *(plan, *state),
            allows_ahead=self._num_steps_ahead > 0,
            adapters=self._adapters,
            num_groups=self.num_groups,
            following=following,
        )
        continuing = check.check()
        rows = self._planned(plan)
        moved = self._state_check(plan, rows).check(continuing)
        blocks = self._blocks
        changes = None if blocks is None else blocks.check(plan, rows, continuing, is_same=following is not None)
        self.media_rows = MediaCheck(plan, self._groups, self.media_rows).check(continuing)
        check_comparisons(plan, *sizes, len(self._slots.owners), self.num_groups)
        check_repeated(plan)
        self._step = plan.step
        if blocks is not None and changes is not None:
            blocks.change(changes, rows)
        self._forget(plan)
        self._slots.move(plan.state_ops, moved)
        for index, block_id in plan.continuing_blocks:
            continuing[index].block_ids.append(block_id)
        if plan.continuing_num_ids:
            last = LastRows().joined(tuple(self._continue_unevenly(plan, continuing)))
        else:
            if following is None:
                following = LastRows().joined(tuple([sequence.decode_row for sequence in continuing]))
            last = following.advance(self._appended_ids(plan, continuing))
        if rows:
            for row in rows:
                self._add(row)
            samples = [(row.data.num_scheduled_tokens, row.data.num_samples) for row in rows]
            pairs = zip(rows, samples)
            last = last.joined(tuple([ScheduledSequence(row.sequence, *counts) for row, counts in pairs]))
        self._last = last
        if self._num_steps_ahead:
            self._await(plan.step, last)
        return last.scheduled

    def request(self, request_id: RequestId) -> Request:
        """The request of a sequence that it holds."""
        return self._groups[request_id].request

    def held(self, key: SequenceKey) -> MirroredSequence:
        """A sequence, as of the last plan."""
        return self._sequences[key]

    def take_sampled(self, step: int, sampled: SampledIds) -> None:
        """Store the ids that `step` sampled, for sequences that go ahead or continue. Call in the order of steps."""
        if not self._num_steps_ahead:
            return
        while self._sampling and self._sampling[0].step < step:
            self._sampling.popleft()
        if not self._sampling or self._sampling[0].step > step:
            return
        awaited = self._sampling[0]
        token_ids: Iterable[int | None] = sampled.token_ids
        if not awaited.is_single or sampled.num_ids:
            # Forks, and sequences with none or several ids at once, continue by the plan's ids.
            nums_samples = list(map(_NUM_SAMPLES, awaited.rows))
            if not sampled.num_ids and max(nums_samples, default=0) <= 1:
                ids = iter(sampled.token_ids)
                token_ids = [next(ids) if num_samples else None for num_samples in nums_samples]
            else:
                given = iter(sampled.rows())
                samples = [list(islice(given, num_samples)) for num_samples in nums_samples]
                token_ids = [each[0][0] if len(each) == 1 and len(each[0]) == 1 else None for each in samples]
        columns = (awaited.rows, awaited.outputs, awaited.nums_outputs, token_ids)
        for row, outputs, num_outputs, token_id in zip(*columns, strict=True):
            if token_id is None:
                continue
            # A sequence that got no id ends there; its later results are never read.
            if len(outputs) > num_outputs:
                outputs[num_outputs] = token_id if token_id > 0 else 0
            else:
                self._read_ids[row.sequence] = max(token_id, 0)

    def _await(self, step: int, last: LastRows) -> None:
        self._read_ids.clear()
        sampling = _Sampling(step, last.scheduled, last.outputs, list(map(len, last.outputs)), last.are_plain)
        self._sampling.append(sampling)
        # One step that is read and one that is not; older ones belong to a step that failed.
        while len(self._sampling) > 1 + self._num_steps_ahead:
            self._sampling.popleft()

    def _appended_ids(self, plan: StepPlan, continuing: Sequence[MirroredSequence]) -> Iterable[int]:
        """Ids of those that go ahead, as far as they are read, then the plan's."""
        read_ids, ahead = self._read_ids, islice(continuing, plan.num_ahead)
        known = (
            (read_ids.get(sequence, NOT_READ) for sequence in ahead) if read_ids else repeat(NOT_READ, plan.num_ahead)
        )
        return chain(known, plan.continuing_token_ids)

    def _continue_unevenly(self, plan: StepPlan, continuing: Sequence[MirroredSequence]) -> list[ScheduledSequence]:
        """Those that go ahead compute one id, each other its given ids, or its last token again if it got none."""
        num_ahead = plan.num_ahead
        rows = LastRows().joined(tuple([sequence.decode_row for sequence in continuing[:num_ahead]]))
        ahead = rows.advance(islice(self._appended_ids(plan, continuing), num_ahead)).scheduled
        given = SampledIds(plan.continuing_token_ids, plan.continuing_num_ids).rows()
        for sequence, token_ids in zip(continuing[num_ahead:], given):
            sequence.draft_token_ids, sequence.num_lagging_tokens = (), 0
            sequence.output_token_ids += token_ids
            sequence.num_scheduled_tokens = max(len(token_ids), 1)
            sequence.num_computed_tokens = sequence.num_tokens - sequence.num_scheduled_tokens
        others = continuing[num_ahead:]
        return [*ahead, *[ScheduledSequence(sequence, sequence.num_scheduled_tokens, 1) for sequence in others]]

    def _state_check(self, plan: StepPlan, rows: Sequence[PlannedRow]) -> StateCheck:
        return StateCheck(plan, rows, self._slots, self._most_drafts)

    def _forget(self, plan: StepPlan) -> None:
        for key in plan.finished_sequences:
            group = self._groups.get(key.request_id)
            if group is not None:
                group.sequences.pop(key.sample_index, None)
                self._leave(key)
        for request_id in plan.finished_request_ids:
            group = self._groups.pop(request_id, None)
            for sequence in [] if group is None else group.sequences.values():
                self._leave(sequence.key)

    def _leave(self, key: SequenceKey) -> None:
        sequence = self._sequences.pop(key, None)
        if sequence is not None and self._blocks is not None:
            self._blocks.leave(sequence)
        if sequence is not None and sequence.state_slot >= 0:
            self._slots.give(sequence.state_slot, None)

    def _planned(self, plan: StepPlan) -> list[PlannedRow]:
        """The rows of the plan's groups, with new records of those that are sent completely, or have just forked."""
        rows: list[PlannedRow] = []
        for update in plan.groups:
            if isinstance(update, SequenceGroupMetadata):
                rows += [
                    PlannedRow(_new_record(update.request, data), update.request, data, True)
                    for data in update.sequences
                ]
                continue
            group = self._groups[update.request_id]
            for delta in update.sequences:
                held = group.sequences.get(delta.sample_index)
                record = _new_record(group.request, delta) if held is None else held
                rows.append(PlannedRow(record, group.request, delta, held is None))
        return rows

    def _add(self, row: PlannedRow) -> None:
        """Take over a new record, or bring the held one up to date."""
        sequence, data = row.sequence, row.data
        if row.is_new:
            group = self._groups.get(row.request.request_id)
            if group is None:
                group = self._groups[row.request.request_id] = MirroredGroup(row.request)
            elif group.request is not row.request:
                group.request = row.request
                for held in group.sequences.values():
                    held.set_request(row.request)
            former = group.sequences.get(sequence.sample_index)
            if former is not None and self._blocks is not None:
                self._blocks.leave(former)
            if data.state_slot >= 0:
                self._slots.give(data.state_slot, sequence)
            group.sequences[sequence.sample_index] = self._sequences[sequence.key] = sequence
            return
        assert isinstance(data, SequenceDataDelta), data
        if self._slots.owners:
            sequence.num_lagging_tokens = num_lagging_tokens(sequence, data.num_computed_tokens)
        sequence.output_token_ids += data.appended_token_ids
        if data.num_kept_blocks != len(sequence.block_ids):
            # A new list: a holder of the old one sees that it did not only grow.
            sequence.block_ids = sequence.block_ids[: data.num_kept_blocks]
        sequence.block_ids += data.appended_block_ids
        sequence.num_computed_tokens = data.num_computed_tokens
        sequence.num_scheduled_tokens = data.num_scheduled_tokens - len(data.draft_token_ids)
        sequence.draft_token_ids = data.draft_token_ids


def _new_record(request: Request, data: SequenceData | SequenceDataDelta) -> MirroredSequence:
    """Record of a sequence that is sent completely, or has just forked, as it is after the step."""
    outputs, table, num_lagging = (
        (data.output_token_ids, data.block_ids, data.num_lagging_tokens)
        if isinstance(data, SequenceData)
        else (data.appended_token_ids, data.appended_block_ids, 0)
    )
    return MirroredSequence(
        request=request,
        sample_index=data.sample_index,
        output_token_ids=list(outputs),
        block_ids=list(table),
        num_computed_tokens=data.num_computed_tokens,
        num_scheduled_tokens=data.num_scheduled_tokens - len(data.draft_token_ids),
        state_slot=data.state_slot,
        draft_token_ids=data.draft_token_ids,
        num_lagging_tokens=num_lagging,
    )
