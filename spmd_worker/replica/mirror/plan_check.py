"""Checks that a plan follows from the plans before it: every rule, before the mirror changes anything.

Knows the mirror's state and the size of the cache; changes neither.
"""

from collections.abc import Mapping, Sequence
from typing import NoReturn

from kv_cache.block import BlockId
from spmd_worker.replica.mirror.records import MirroredGroup, MirroredSequence, MirrorError, ScheduledSequence
from spmd_worker.replica.sequence.metadata import (
    SequenceData,
    SequenceDataDelta,
    SequenceGroupMetadata,
    SequenceGroupMetadataDelta,
)
from spmd_worker.replica.sequence.request import Request, RequestId
from spmd_worker.replica.sequence.sequence import SequenceKey
from spmd_worker.replica.sequence.step import StepPlan


class PlanCheck:
    """One check of one plan against `groups`, which are at step `step` (None: before the first). Without blocks,
    sequences are computed completely at once. `last_rows` are that step's, if the next may go ahead of its ids.
    """

    def __init__(
        self,
        groups: Mapping[RequestId, MirroredGroup],
        num_blocks: int,
        block_size: int,
        step: int | None,
        last_rows: Sequence[ScheduledSequence] = (),
    ) -> None:
        self._groups, self.num_blocks, self.block_size, self._step = groups, num_blocks, block_size, step
        self._last_rows = last_rows

    def check(self, plan: StepPlan) -> list[MirroredSequence]:
        """Raise MirrorError unless all of the plan follows from the mirror's state; returns the continuing rows."""
        if self._step is not None and plan.step != self._step + 1:
            raise MirrorError(f"step {plan.step}: field step is {plan.step}, the mirror expects {self._step + 1}")
        self._check_block_ops(plan)
        finished_requests = dict.fromkeys(plan.finished_request_ids)
        finished_sequences = dict.fromkeys(plan.finished_sequences)
        listed: dict[RequestId, None] = {}
        continuing = self._check_continuing(plan)
        num_tokens = len(continuing) + sum([max(num_ids - 1, 0) for num_ids in plan.continuing_num_ids])
        for group in plan.groups:
            request_id = group.request_id
            if request_id in listed:
                _refuse(plan, request_id, None, "groups", "listed twice", "listed once")
            if request_id in finished_requests:
                _refuse(plan, request_id, None, "groups", "listed and in finished_request_ids", "one or the other")
            listed[request_id] = None
            if finished_sequences or len(group.sequences) != 1:
                _check_listing(plan, request_id, group.sequences, finished_sequences)
            if isinstance(group, SequenceGroupMetadata):
                num_tokens += self._check_snapshot(plan, group)
            else:
                num_tokens += self._check_delta(plan, group)
        if num_tokens != plan.num_tokens:
            raise MirrorError(f"step {plan.step}: field num_tokens is {plan.num_tokens}, its rows compute {num_tokens}")
        return continuing

    def _check_continuing(self, plan: StepPlan) -> list[MirroredSequence]:
        """The continuing sequences; the mirror must hold each with all its tokens computed."""
        keys, groups, block_size = plan.continuing, self._groups, self.block_size
        num_ids = self._check_continuing_ids(plan)
        num_new_blocks = self.check_blocks(plan)
        sequences: list[MirroredSequence] = []
        for place, (request_id, sample_index) in enumerate(keys):
            group = groups.get(request_id)
            sequence = None if group is None else group.sequences.get(sample_index)
            if sequence is None:
                _refuse_key(plan, keys[place], "unknown", "a sequence the mirror holds")
            end = sequence.num_computed_tokens + sequence.num_scheduled_tokens
            if end != sequence.num_tokens:
                _refuse_key(
                    plan, keys[place], f"computed to {end}", f"computed to {sequence.num_tokens}, its last token"
                )
            # Hot path: most get one id, and have a block for it.
            if end >= len(sequence.block_ids) * block_size or num_ids:
                last = end - 1 + (num_ids[place] if num_ids else 1)
                if last >= (len(sequence.block_ids) + num_new_blocks.get(place, 0)) * block_size:
                    _refuse_key(plan, keys[place], f"without a block for token {last}", "a block for it")
            sequences.append(sequence)
        self._check_listed_once(plan)
        self._check_ahead(plan, sequences[: plan.num_ahead])
        return sequences

    def _check_ahead(self, plan: StepPlan, sequences: list[MirroredSequence]) -> None:
        """Check that the step before samples exactly the id that each of these appends."""
        if not sequences:
            return
        sampling = dict.fromkeys([row.sequence for row in self._last_rows if row.num_samples == 1])
        for place, sequence in enumerate(sequences):
            if sequence not in sampling:
                rule = "one that the step before samples one id for"
                _refuse_key(plan, plan.continuing[place], "ahead of its id", rule)

    def _check_continuing_ids(self, plan: StepPlan) -> tuple[int, ...]:
        """Number of ids that each appends; empty if each appends one."""
        num_ids, num_keys = plan.continuing_num_ids, len(plan.continuing) - plan.num_ahead
        if not 0 <= plan.num_ahead <= len(plan.continuing):
            raise MirrorError(
                f"step {plan.step}: field num_ahead is {plan.num_ahead}, the mirror expects from 0 to "
                f"{len(plan.continuing)}, the sequences in continuing"
            )
        if num_ids and (len(num_ids) != num_keys or min(num_ids) < 0):
            raise MirrorError(
                f"step {plan.step}: field continuing_num_ids has {len(num_ids)} entries from {min(num_ids)} on, the "
                f"mirror expects one, of 0 or more, for each of the {num_keys} sequences in continuing"
                f"{_not_ahead(plan)}"
            )
        num_expected = sum(num_ids) if num_ids else num_keys
        if len(plan.continuing_token_ids) != num_expected:
            rule = (
                f"the {num_expected} that continuing_num_ids shares out"
                if num_ids
                else f"one for each of the {num_keys} sequences in continuing{_not_ahead(plan)}"
            )
            raise MirrorError(
                f"step {plan.step}: field continuing_token_ids has {len(plan.continuing_token_ids)} entries, not {rule}"
            )
        return (1,) * plan.num_ahead + num_ids if num_ids else ()

    def check_blocks(self, plan: StepPlan) -> dict[int, int]:
        """Number of new blocks per continuing sequence (by index): one at most if each appends one id. Raises
        MirrorError for blocks, or sequences, that do not exist.
        """
        num_new_blocks: dict[int, int] = {}
        for place, _ in plan.continuing_blocks:
            num_new_blocks[place] = num_new_blocks.get(place, 0) + 1
        outside = self._first_outside([block_id for _, block_id in plan.continuing_blocks])
        if outside is not None:
            rule = f"the cache has blocks 0 to {self.num_blocks - 1}"
            raise MirrorError(f"step {plan.step}: field continuing_blocks names device block {outside}, {rule}")
        wrong = [place for place in num_new_blocks if not 0 <= place < len(plan.continuing)]
        if wrong or (not plan.continuing_num_ids and len(num_new_blocks) != len(plan.continuing_blocks)):
            places = [place for place, _ in plan.continuing_blocks]
            rule = f"different ones from 0 to {len(plan.continuing) - 1}"
            raise MirrorError(
                f"step {plan.step}: field continuing_blocks names places {places}, the mirror expects {rule}"
            )
        return num_new_blocks

    def _check_listed_once(self, plan: StepPlan) -> None:
        """Check that no sequence continues twice, or continues and is listed or has ended."""
        keys = dict.fromkeys(plan.continuing)
        if len(keys) != len(plan.continuing):
            raise MirrorError(f"step {plan.step}: field continuing lists a sequence twice, the mirror expects it once")
        for group in plan.groups:
            for data in group.sequences:
                if (group.request_id, data.sample_index) in keys:
                    _refuse(plan, group.request_id, data, "continuing", "also in groups", "one or the other")
        finished_requests = dict.fromkeys(plan.finished_request_ids)
        ended = [key for key in plan.finished_sequences if key in keys]
        ended += [key for key in plan.continuing if key.request_id in finished_requests] if finished_requests else []
        if ended:
            _refuse_key(plan, ended[0], "also finished", "one or the other")

    def _check_block_ops(self, plan: StepPlan) -> None:
        """Check that device blocks of the moves exist. The mirror does not know the number of host blocks."""
        operations = plan.block_ops
        if operations.is_empty:
            return
        device_blocks = (
            ("swap_in", [destination for _, destination in operations.swap_in]),
            ("swap_out", [source for source, _ in operations.swap_out]),
            ("copy", [block for pair in operations.copy for block in pair]),
            ("store", [block for block, _ in operations.store]),
            ("load", [block for _, block in operations.load]),
        )
        for name, blocks in device_blocks:
            outside = self._first_outside(blocks)
            if outside is not None:
                rule = f"the cache has blocks 0 to {self.num_blocks - 1}"
                raise MirrorError(f"step {plan.step}: field block_ops.{name} names device block {outside}, {rule}")

    def _check_snapshot(self, plan: StepPlan, group: SequenceGroupMetadata) -> int:
        """Number of tokens that the group computes."""
        num_scheduled_tokens = 0
        num_prompt_tokens = len(group.request.prompt_token_ids)
        for data in group.sequences:
            self._check_sample_index(plan, group.request, data)
            self._check_blocks(plan, group.request_id, data, "block_ids", data.block_ids)
            num_tokens = num_prompt_tokens + len(data.output_token_ids)
            self._check_counts(plan, group.request, data, num_tokens, len(data.block_ids))
            num_scheduled_tokens += data.num_scheduled_tokens
        return num_scheduled_tokens

    def _check_delta(self, plan: StepPlan, update: SequenceGroupMetadataDelta) -> int:
        """Number of tokens that the group computes."""
        group = self._groups.get(update.request_id)
        if group is None:
            _refuse(
                plan,
                update.request_id,
                None,
                "request_id",
                "a delta",
                "a snapshot: the mirror does not hold the request",
            )
        num_scheduled_tokens = 0
        for data in update.sequences:
            sequence = group.sequences.get(data.sample_index)
            if sequence is None:
                self._check_fork(plan, group.request, data)
            else:
                self._check_continuation(plan, sequence, data)
            num_scheduled_tokens += data.num_scheduled_tokens
        return num_scheduled_tokens

    def _check_continuation(self, plan: StepPlan, sequence: MirroredSequence, data: SequenceDataDelta) -> None:
        request_id = sequence.request.request_id
        expected = sequence.num_computed_tokens + sequence.num_scheduled_tokens
        # A sequence that sampled without getting an id recomputes its last token.
        may_repeat = not data.appended_token_ids and expected == sequence.num_tokens
        if data.num_computed_tokens != expected and not (may_repeat and data.num_computed_tokens == expected - 1):
            _refuse(plan, request_id, data, "num_computed_tokens", data.num_computed_tokens, expected)
        if not 0 <= data.num_kept_blocks <= len(sequence.block_ids):
            rule = f"from 0 to {len(sequence.block_ids)}, the known blocks"
            _refuse(plan, request_id, data, "num_kept_blocks", data.num_kept_blocks, rule)
        if data.appended_block_ids:
            self._check_blocks(plan, request_id, data, "appended_block_ids", data.appended_block_ids)
        num_prompt_tokens = len(sequence.request.prompt_token_ids)
        num_tokens = num_prompt_tokens + len(sequence.output_token_ids) + len(data.appended_token_ids)
        num_blocks = data.num_kept_blocks + len(data.appended_block_ids)
        self._check_counts(plan, sequence.request, data, num_tokens, num_blocks)

    def _check_fork(self, plan: StepPlan, request: Request, data: SequenceDataDelta) -> None:
        """Check a sequence that the mirror does not hold, of a request that it does: the delta has all of it."""
        self._check_sample_index(plan, request, data)
        if data.num_kept_blocks != 0:
            _refuse(plan, request.request_id, data, "num_kept_blocks", data.num_kept_blocks, "0 for a new sequence")
        self._check_blocks(plan, request.request_id, data, "appended_block_ids", data.appended_block_ids)
        num_tokens = len(request.prompt_token_ids) + len(data.appended_token_ids)
        self._check_counts(plan, request, data, num_tokens, len(data.appended_block_ids))

    def _check_sample_index(self, plan: StepPlan, request: Request, data: SequenceData | SequenceDataDelta) -> None:
        if not 0 <= data.sample_index < request.sampling.num_sequences:
            rule = f"from 0 to {request.sampling.num_sequences - 1}"
            _refuse(plan, request.request_id, data, "sample_index", data.sample_index, rule)

    def _check_blocks(
        self,
        plan: StepPlan,
        request_id: RequestId,
        data: SequenceData | SequenceDataDelta,
        name: str,
        blocks: Sequence[BlockId],
    ) -> None:
        outside = self._first_outside(blocks)
        if outside is not None:
            _refuse(plan, request_id, data, name, outside, f"from 0 to {self.num_blocks - 1}")

    def _first_outside(self, blocks: Sequence[BlockId]) -> BlockId | None:
        if not blocks or (min(blocks) >= 0 and max(blocks) < self.num_blocks):
            return None
        return next(block for block in blocks if not 0 <= block < self.num_blocks)

    def _check_counts(
        self,
        plan: StepPlan,
        request: Request,
        data: SequenceData | SequenceDataDelta,
        num_tokens: int,
        num_blocks: int,
    ) -> None:
        """Check that the chunk lies inside the tokens and the blocks, and samples only at the end of the tokens."""
        request_id = request.request_id
        end = data.num_computed_tokens + data.num_scheduled_tokens
        has_room = end <= num_blocks * self.block_size if self.num_blocks else data.num_computed_tokens == 0
        is_inside = 0 <= data.num_computed_tokens < end <= num_tokens and has_room
        is_inside = is_inside and (self.num_blocks > 0 or end == num_tokens)
        most = request.sampling.num_sequences - data.sample_index if end == num_tokens else 0
        if is_inside and 0 <= data.num_samples <= most:
            return
        if data.num_computed_tokens < 0:
            _refuse(plan, request_id, data, "num_computed_tokens", data.num_computed_tokens, "0 or more")
        if data.num_scheduled_tokens < 1:
            _refuse(plan, request_id, data, "num_scheduled_tokens", data.num_scheduled_tokens, "1 or more")
        if end > num_tokens:
            rule = f"at most {num_tokens - data.num_computed_tokens}, what is left of {num_tokens} tokens"
            _refuse(plan, request_id, data, "num_scheduled_tokens", data.num_scheduled_tokens, rule)
        if not self.num_blocks and (data.num_computed_tokens, end) != (0, num_tokens):
            rule = f"all of the {num_tokens} tokens at once, where there is no cache"
            _refuse(plan, request_id, data, "num_scheduled_tokens", data.num_scheduled_tokens, rule)
        if self.num_blocks and end > num_blocks * self.block_size:
            rule = f"enough blocks of {self.block_size} for {end} tokens"
            _refuse(plan, request_id, data, "block_ids", f"{num_blocks} blocks", rule)
        rule = f"0 at token {end} of {num_tokens}" if end != num_tokens else f"from 0 to {most}"
        _refuse(plan, request_id, data, "num_samples", data.num_samples, rule)


def _check_listing(
    plan: StepPlan,
    request_id: RequestId,
    sequences: Sequence[SequenceData | SequenceDataDelta],
    finished: dict[SequenceKey, None],
) -> None:
    """Check that a group lists at least one sequence, each once, and none that the plan lists as ended."""
    if not sequences:
        _refuse(plan, request_id, None, "sequences", "empty", "at least one")
    if len(sequences) > 1 and len(dict.fromkeys(data.sample_index for data in sequences)) != len(sequences):
        indices = [data.sample_index for data in sequences]
        _refuse(plan, request_id, None, "sequences", f"samples {indices}", "each sample once")
    if finished:
        for data in sequences:
            if (request_id, data.sample_index) in finished:
                _refuse(plan, request_id, data, "sequences", "listed and in finished_sequences", "one or the other")


def _not_ahead(plan: StepPlan) -> str:
    return " that do not go ahead" if plan.num_ahead else ""


def _refuse_key(plan: StepPlan, key: SequenceKey, value: str, expected: str) -> NoReturn:
    raise MirrorError(
        f"step {plan.step}, request {key.request_id}, sample {key.sample_index}: field continuing lists it {value}, "
        f"the mirror expects {expected}"
    )


def _refuse(
    plan: StepPlan,
    request_id: RequestId,
    data: SequenceData | SequenceDataDelta | None,
    name: str,
    value: object,
    expected: object,
) -> NoReturn:
    sample = "" if data is None else f", sample {data.sample_index}"
    raise MirrorError(
        f"step {plan.step}, request {request_id}{sample}: field {name} is {value}, the mirror expects {expected}"
    )
