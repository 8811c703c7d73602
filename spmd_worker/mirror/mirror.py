"""The worker's copy of what the scheduler knows: sequences by request id, kept up to date by the plans of the steps.

A plan is checked whole before it changes anything (`plan_check.py`): a plan that is refused leaves the mirror as it
was.
"""

from kv_cache.block import BlockId
from spmd_worker.mirror.plan_check import PlanCheck
from spmd_worker.mirror.records import MirroredGroup, MirroredSequence, MirrorError, ScheduledSequence
from spmd_worker.sequence.metadata import SequenceGroupMetadata, SequenceGroupMetadataDelta
from spmd_worker.sequence.request import RequestId
from spmd_worker.sequence.sampled import SampledIds
from spmd_worker.sequence.sequence import SequenceKey
from spmd_worker.sequence.step import StepPlan

__all__ = ["Mirror", "MirrorError", "MirroredSequence", "ScheduledSequence"]

SequenceState = tuple[tuple[int, ...], tuple[BlockId, ...], int]
"""Output tokens, block table, and how many tokens are computed once the last plan has run."""


class Mirror:
    """The sequences of every request that was scheduled and has not ended, in a cache of `num_blocks` device blocks,
    or, with 0, without one.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        assert num_blocks >= 0, num_blocks
        assert block_size >= 1, block_size
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._step: int | None = None
        self._groups: dict[RequestId, MirroredGroup] = {}

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
        continuing = PlanCheck(self._groups, self.num_blocks, self.block_size, self._step).check(plan)
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
        return (*continuing_rows, *others)

    def _continue(self, plan: StepPlan, continuing: list[MirroredSequence]) -> list[ScheduledSequence]:
        for index, block_id in plan.continuing_blocks:
            continuing[index].block_ids.append(block_id)
        if plan.continuing_num_ids:
            return self._continue_unevenly(plan, continuing)
        for sequence, token_id in zip(continuing, plan.continuing_token_ids):
            sequence.output_token_ids.append(token_id)
            sequence.num_computed_tokens += sequence.num_scheduled_tokens
            sequence.num_scheduled_tokens = 1
        return [sequence.decode_row for sequence in continuing]

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
