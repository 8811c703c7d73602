"""The worker's copy of what the scheduler knows: sequences by request id, kept up to date by the plans of the steps.

A plan is checked whole before it changes anything (`plan_check.py`): a plan that is refused leaves the mirror as it
was.
"""

from collections import deque
from itertools import islice
from typing import NamedTuple

from kv_cache.block import BlockId
from spmd_worker.mirror.plan_check import PlanCheck
from spmd_worker.mirror.records import MirroredGroup, MirroredSequence, MirrorError, ScheduledSequence
from spmd_worker.sequence.metadata import SequenceGroupMetadata, SequenceGroupMetadataDelta
from spmd_worker.sequence.request import RequestId
from spmd_worker.sequence.sampled import NOT_READ, SampledIds
from spmd_worker.sequence.sequence import SequenceKey
from spmd_worker.sequence.step import StepPlan

__all__ = ["Mirror", "MirrorError", "MirroredSequence", "ScheduledSequence"]

SequenceState = tuple[tuple[int, ...], tuple[BlockId, ...], int]
"""Output tokens, block table, and how many tokens are computed once the last plan has run."""


class _Sampling(NamedTuple):
    """A step whose ids are not read yet: whom it samples one for, and how many output tokens these had."""

    step: int
    rows: tuple[ScheduledSequence, ...]
    nums_outputs: list[int]


class Mirror:
    """The sequences of every request that was scheduled and has not ended, in a cache of `num_blocks` device blocks,
    or, with 0, without one. With `num_steps_ahead` plans come before the ids that they append are read: `take_sampled`.
    """

    def __init__(self, num_blocks: int, block_size: int, num_steps_ahead: int = 0) -> None:
        assert num_blocks >= 0, num_blocks
        assert block_size >= 1, block_size
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._num_steps_ahead = num_steps_ahead
        self._step: int | None = None
        self._groups: dict[RequestId, MirroredGroup] = {}
        self._sampling: deque[_Sampling] = deque()

    def __len__(self) -> int:
        """How many requests the mirror holds."""
        return len(self._groups)

    def state(self) -> dict[SequenceKey, SequenceState]:
        """Every sequence held, in the order of keys, as values: what a scheduler's own state is compared with."""
        state = {}
        for request_id in sorted(self._groups):
            for sample_index, sequence in sorted(self._groups[request_id].sequences.items()):
                num_computed_tokens = sequence.num_computed_tokens + sequence.num_scheduled_tokens
                state[SequenceKey(request_id, sample_index)] = (
                    tuple(sequence.output_token_ids),
                    tuple(sequence.block_ids),
                    num_computed_tokens,
                )
        return state

    def apply(self, plan: StepPlan) -> tuple[ScheduledSequence, ...]:
        """Bring the mirror to the plan's step and return what it computes, in plan order.

        Raises MirrorError, and changes nothing, where the plan does not follow from the plans before it.
        """
        last_rows = self._sampling[-1].rows if self._sampling and self._sampling[-1].step == self._step else ()
        check = PlanCheck(self._groups, self.num_blocks, self.block_size, self._step, last_rows)
        continuing = check.check(plan)
        self._step = plan.step
        self._forget(plan)
        continuing_rows = self._continue(plan, continuing)
        sequences: list[MirroredSequence] = []
        for group in plan.groups:
            if isinstance(group, SequenceGroupMetadata):
                self._replace(group, sequences)
            else:
                self._append(group, sequences)
        rows = [data for group in plan.groups for data in group.sequences]
        columns = (sequences, [data.num_scheduled_tokens for data in rows], [data.num_samples for data in rows])
        others = map(ScheduledSequence._make, zip(*columns, strict=True))
        scheduled = (*continuing_rows, *others)
        if self._num_steps_ahead:
            self._await(plan.step, scheduled)
        return scheduled

    def take_sampled(self, step: int, sampled: SampledIds) -> None:
        """The ids that `step` sampled are read: those that went ahead of them have theirs now, others will when they go
        on. In the order of steps.
        """
        if not self._num_steps_ahead:
            return
        while self._sampling and self._sampling[0].step < step:
            self._sampling.popleft()
        if not self._sampling or self._sampling[0].step > step:
            return
        awaited, given = self._sampling[0], iter(sampled.rows())
        for row, num_outputs in zip(awaited.rows, awaited.nums_outputs):
            token_ids = [each[0] for each in islice(given, row.num_samples) if len(each) == 1]
            if row.num_samples != 1 or not token_ids:
                continue
            # One that is given no id ends with that, and nobody reads what is computed of it meanwhile.
            token_id, outputs = max(token_ids[0], 0), row.sequence.output_token_ids
            if len(outputs) == num_outputs:
                row.sequence.sampled_id = token_id
            elif outputs[num_outputs] == NOT_READ:
                outputs[num_outputs] = token_id

    def _await(self, step: int, scheduled: tuple[ScheduledSequence, ...]) -> None:
        for row in scheduled:
            row.sequence.sampled_id = NOT_READ
        nums_outputs = [len(row.sequence.output_token_ids) for row in scheduled]
        self._sampling.append(_Sampling(step, scheduled, nums_outputs))
        # One that is read and one that is not, and what was never read of a step that failed.
        while len(self._sampling) > 1 + self._num_steps_ahead:
            self._sampling.popleft()

    def _continue(self, plan: StepPlan, continuing: list[MirroredSequence]) -> list[ScheduledSequence]:
        for index, block_id in plan.continuing_blocks:
            continuing[index].block_ids.append(block_id)
        ahead = continuing[: plan.num_ahead]
        for sequence in ahead:
            _go_on(sequence, sequence.sampled_id)
        rows = [sequence.decode_row for sequence in ahead]
        others = continuing[plan.num_ahead :] if ahead else continuing
        if plan.continuing_num_ids:
            return rows + self._continue_unevenly(plan, others)
        for sequence, token_id in zip(others, plan.continuing_token_ids):
            _go_on(sequence, token_id)
        return rows + [sequence.decode_row for sequence in others]

    def _continue_unevenly(self, plan: StepPlan, continuing: list[MirroredSequence]) -> list[ScheduledSequence]:
        """Each computes the ids that it was given, and its last token again where that were none."""
        given = SampledIds(plan.continuing_token_ids, plan.continuing_num_ids).rows()
        for sequence, token_ids in zip(continuing, given):
            sequence.output_token_ids += token_ids
            sequence.num_scheduled_tokens = max(len(token_ids), 1)
            sequence.num_computed_tokens = sequence.num_tokens - sequence.num_scheduled_tokens
        return [ScheduledSequence(sequence, sequence.num_scheduled_tokens, 1) for sequence in continuing]

    def _forget(self, plan: StepPlan) -> None:
        for key in plan.finished_sequences:
            group = self._groups.get(key.request_id)
            if group is not None:
                group.sequences.pop(key.sample_index, None)
        for request_id in plan.finished_request_ids:
            self._groups.pop(request_id, None)

    def _replace(self, update: SequenceGroupMetadata, sequences: list[MirroredSequence]) -> None:
        """Take the request and the listed sequences as they are sent; sequences not listed stay."""
        request = update.request
        group = self._groups.setdefault(request.request_id, MirroredGroup(request))
        group.request = request
        for sequence in group.sequences.values():
            sequence.request = request
        for data in update.sequences:
            sequence = MirroredSequence(
                request=request,
                sample_index=data.sample_index,
                output_token_ids=list(data.output_token_ids),
                block_ids=list(data.block_ids),
                num_computed_tokens=data.num_computed_tokens,
                num_scheduled_tokens=data.num_scheduled_tokens,
            )
            group.sequences[data.sample_index] = sequence
            sequences.append(sequence)

    def _append(self, update: SequenceGroupMetadataDelta, sequences: list[MirroredSequence]) -> None:
        group = self._groups[update.request_id]
        for data in update.sequences:
            sequence = group.sequences.get(data.sample_index)
            if sequence is None:
                sequence = MirroredSequence(group.request, data.sample_index, [], [], 0, 0)
                group.sequences[data.sample_index] = sequence
            sequence.output_token_ids += data.appended_token_ids
            if data.num_kept_blocks != len(sequence.block_ids):
                # Another list: who holds the one before knows that it is not only added to.
                sequence.block_ids = sequence.block_ids[: data.num_kept_blocks]
            sequence.block_ids += data.appended_block_ids
            sequence.num_computed_tokens = data.num_computed_tokens
            sequence.num_scheduled_tokens = data.num_scheduled_tokens
            sequences.append(sequence)


def _go_on(sequence: MirroredSequence, token_id: int) -> None:
    """It has one token more, and computes that."""
    sequence.output_token_ids.append(token_id)
    sequence.num_computed_tokens += sequence.num_scheduled_tokens
    sequence.num_scheduled_tokens = 1
