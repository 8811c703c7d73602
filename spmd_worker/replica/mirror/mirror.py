"""The worker's copy of what the scheduler knows: sequences by request id, kept up to date by the plans of the steps.

A plan is checked whole before it changes anything (`plan_check.py`): a plan that is refused leaves the mirror as it
was.
"""

from collections import deque
from collections.abc import Iterable
from itertools import islice
from typing import NamedTuple

from kv_cache.block import BlockId
from spmd_worker.replica.mirror.plan_check import PlanCheck
from spmd_worker.replica.mirror.records import MirroredGroup, MirroredSequence, MirrorError, ScheduledSequence
from spmd_worker.replica.sequence.metadata import SequenceGroupMetadata, SequenceGroupMetadataDelta
from spmd_worker.replica.sequence.request import RequestId
from spmd_worker.replica.sequence.sampled import NOT_READ, SampledIds
from spmd_worker.replica.sequence.sequence import SequenceKey
from spmd_worker.replica.sequence.step import StepPlan

__all__ = ["Mirror", "MirrorError", "MirroredSequence", "ScheduledSequence"]

SequenceState = tuple[tuple[int, ...], tuple[BlockId, ...], int]
"""Output tokens, block table, and how many tokens are computed once the last plan has run."""


class _Sampling(NamedTuple):
    """A step whose ids are not read yet: its rows, their lists of output tokens, and how many these had. `is_single`:
    each row samples one id.
    """

    step: int
    rows: tuple[ScheduledSequence, ...]
    outputs: list[list[int]]
    nums_outputs: list[int]
    is_single: bool


class _Decoding(NamedTuple):
    """A step of sequences that continue by one id each, and of nothing else."""

    keys: tuple[SequenceKey, ...]
    sequences: list[MirroredSequence]
    scheduled: tuple[ScheduledSequence, ...]


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
        self._decoding: _Decoding | None = None
        """The last step, where it was such a one."""
        self._read_ids: dict[MirroredSequence, int] = {}
        """Of sequences that go on later than their ids are read."""

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
        """Bring the mirror to the plan's step and return what it computes, in plan order: the tuple of the step before,
        where it takes just the sequences of that one a token further.

        Raises MirrorError, and changes nothing, where the plan does not follow from the plans before it.
        """
        decoding = self._decoding
        if decoding is None or not self._goes_on(plan, decoding):
            return self._apply(plan)
        self._step = plan.step
        self._continue(plan, decoding.sequences)
        if self._num_steps_ahead:
            self._await(plan.step, decoding.scheduled)
        return decoding.scheduled

    def _goes_on(self, plan: StepPlan, last: _Decoding) -> bool:
        """Whether the plan takes the sequences of the last one a token further, and nothing else: then it follows if
        each has a block for it. Nearly every step is such a one.
        """
        num_rows, num_new = len(last.sequences), {}
        if (
            plan.step != (self._step or 0) + 1
            or plan.groups
            or plan.finished_sequences
            or plan.finished_request_ids
            or plan.continuing_num_ids
            or not plan.block_ops.is_empty
            or not plan.num_tokens == num_rows == len(plan.continuing_token_ids) + plan.num_ahead
            or not 0 <= plan.num_ahead <= num_rows * self._num_steps_ahead
            or plan.continuing != last.keys
        ):
            return False
        if plan.continuing_blocks:
            num_new = PlanCheck(self._groups, self.num_blocks, self.block_size, self._step).check_blocks(plan)
        size = self.block_size
        lacking = [
            place
            for place, each in enumerate(last.sequences)
            if each.num_computed_tokens + each.num_scheduled_tokens >= len(each.block_ids) * size
        ]
        return all(place in num_new for place in lacking)

    def _apply(self, plan: StepPlan) -> tuple[ScheduledSequence, ...]:
        """As `apply`, of any plan."""
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
        is_decoding = bool(continuing) and not plan.groups and not plan.continuing_num_ids
        self._decoding = _Decoding(plan.continuing, continuing, scheduled) if is_decoding else None
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
        awaited = self._sampling[0]
        if awaited.is_single and not sampled.num_ids:
            rows: Iterable[tuple[int, ...]] = [(token_id,) for token_id in sampled.token_ids]
        else:
            given = iter(sampled.rows())
            # Forks, and those that take none or several at once, go on by what the plan says.
            rows = [
                tuple([each[0] for each in islice(given, row.num_samples) if len(each) == row.num_samples == 1])
                for row in awaited.rows
            ]
        for row, outputs, num_outputs, token_ids in zip(
            awaited.rows, awaited.outputs, awaited.nums_outputs, rows, strict=True
        ):
            for token_id in token_ids:
                # One that is given no id ends with that, and nobody reads what is computed of it meanwhile.
                if len(outputs) > num_outputs:
                    outputs[num_outputs] = token_id if token_id > 0 else 0
                else:
                    self._read_ids[row.sequence] = max(token_id, 0)

    def _await(self, step: int, scheduled: tuple[ScheduledSequence, ...]) -> None:
        self._read_ids.clear()
        outputs = [row.sequence.output_token_ids for row in scheduled]
        is_single = self._decoding is not None
        self._sampling.append(_Sampling(step, scheduled, outputs, list(map(len, outputs)), is_single))
        # One that is read and one that is not, and what was never read of a step that failed.
        while len(self._sampling) > 1 + self._num_steps_ahead:
            self._sampling.popleft()

    def _continue(self, plan: StepPlan, continuing: list[MirroredSequence]) -> list[ScheduledSequence]:
        for index, block_id in plan.continuing_blocks:
            continuing[index].block_ids.append(block_id)
        ahead = continuing[: plan.num_ahead]
        read_ids = self._read_ids
        for sequence in ahead:
            _go_on(sequence, read_ids.get(sequence, NOT_READ) if read_ids else NOT_READ)
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
            sequence.take_request(request)
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
