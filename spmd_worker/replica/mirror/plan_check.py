"""Checks that a plan follows from the plans before it: every rule, before the mirror changes anything."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

from kv_cache.block import BlockId
from spmd_worker.replica.mirror.last_rows import LastRows
from spmd_worker.replica.mirror.records import MirroredGroup, MirroredSequence, ScheduledSequence, reject
from spmd_worker.replica.sequence.metadata import (
    GroupUpdate,
    SequenceData,
    SequenceDataDelta,
    SequenceGroupMetadata,
    SequenceGroupMetadataDelta,
)
from spmd_worker.replica.sequence.request import Request, RequestId
from spmd_worker.replica.sequence.sampled import num_equal
from spmd_worker.replica.sequence.sequence import SequenceKey
from spmd_worker.replica.sequence.step import StepPlan


class AdapterRules(NamedTuple):
    """`has` tells whether an adapter, by its digest, is loaded; a step may have `max_adapters` different ones."""

    has: Callable[[int], bool]
    max_adapters: int


NO_TABLES: Final = 2**62
"""Block size of a model without attention, whose tables are empty: more tokens than any sequence has."""


class PlanCheck:
    """One check of one plan against `groups`, and the `sequences` of all of them, which are at step `step` (None:
    before the first). Without blocks, sequences are computed completely at once, unless `block_size` is `NO_TABLES`:
    then tables are empty, and enough for any tokens. With `allows_ahead` the rows of that step, `last_rows`, may go
    ahead of the ids that it samples. Tables have `num_groups` entries for each block.
    """

    def __init__(
        self,
        plan: StepPlan,
        groups: Mapping[RequestId, MirroredGroup],
        sequences: Mapping[SequenceKey, MirroredSequence],
        num_blocks: int,
        block_size: int,
        step: int | None = None,
        last_rows: Sequence[ScheduledSequence] = (),
        *,
        allows_ahead: bool = False,
        adapters: AdapterRules | None = None,
        num_groups: int = 1,
        following: LastRows | None = None,
    ) -> None:
        """`following`: the rows of the continuing sequences in the step before, if all were there in this order."""
        self._plan, self._groups, self._sequences = plan, groups, sequences
        self._step, self._last_rows = step, last_rows
        self._num_blocks, self._block_size, self._allows_ahead = num_blocks, block_size, allows_ahead
        self._adapters, self._num_groups, self._following = adapters, num_groups, following

    def check(self) -> Sequence[MirroredSequence]:
        """Raise MirrorError unless all of the plan follows from the mirror's state; returns the continuing rows."""
        plan = self._plan
        if self._step is not None and plan.step != self._step + 1:
            reject(self._plan, "step", plan.step, self._step + 1)
        self._check_block_ops()
        continuing = self._check_continuing()
        num_tokens = len(continuing) + sum([max(num_ids - 1, 0) for num_ids in plan.continuing_num_ids])
        listed: dict[RequestId, None] = {}
        finished_requests = dict.fromkeys(plan.finished_request_ids)
        finished_sequences = dict.fromkeys(plan.finished_sequences)
        for group in plan.groups:
            request_id = group.request_id
            if request_id in listed:
                reject(self._plan, "groups", "listed twice", "listed once", request_id)
            if request_id in finished_requests:
                reject(self._plan, "groups", "listed and in finished_request_ids", "one or the other", request_id)
            listed[request_id] = None
            if finished_sequences or len(group.sequences) != 1:
                self._check_listing(group, finished_sequences)
            num_tokens += self._check_group(group)
        if num_tokens != plan.num_tokens:
            reject(self._plan, "num_tokens", plan.num_tokens, f"{num_tokens}, the tokens of its rows")
        if self._adapters is not None:
            self._check_adapters(self._adapters.max_adapters, continuing)
        return continuing

    def num_new_blocks(self) -> dict[int, int]:
        """Number of new entries of tables by index in `continuing`. Raises MirrorError for blocks that do not exist."""
        plan, num_groups = self._plan, self._num_groups
        if not plan.continuing_blocks:
            return {}
        indices, block_ids = zip(*plan.continuing_blocks)
        self._check_blocks("continuing_blocks", block_ids)
        num_new_blocks = dict.fromkeys(indices, 1)
        if len(num_new_blocks) != len(indices):
            num_new_blocks = Counter(indices)
        is_outside = not 0 <= min(indices) <= max(indices) < len(plan.continuing)
        are_uneven = num_groups > 1 and any(count % num_groups for count in num_new_blocks.values())
        has_several = not plan.continuing_num_ids and len(num_new_blocks) * num_groups != len(indices)
        if is_outside or are_uneven or has_several:
            rule = f"different ones from 0 to {len(plan.continuing) - 1}"
            rule += f", {num_groups} times each" if num_groups > 1 else ""
            reject(self._plan, "continuing_blocks", f"at indices {list(indices)}", rule)
        return num_new_blocks

    def _check_continuing(self) -> Sequence[MirroredSequence]:
        """The continuing sequences; the mirror must hold each with all its tokens computed."""
        plan = self._plan
        num_ids = self._check_continuing_ids()
        num_new_blocks = self.num_new_blocks()
        sequences, to_check = self._held_and_to_check()
        # Hot path: most get one id, and have a block for it.
        for index in range(len(sequences)) if num_ids else to_check:
            key, sequence = plan.continuing[index], sequences[index]
            end = sequence.num_computed_tokens + sequence.num_scheduled_tokens
            if end != sequence.num_tokens:
                rule = f"computed to {sequence.num_tokens}, its last token"
                reject(self._plan, "continuing", f"computed to {end}", rule, *key)
            last = end - 1 + (num_ids[index] if num_ids else 1)
            if last >= self._num_covered(len(sequence.block_ids) + num_new_blocks.get(index, 0)):
                reject(self._plan, "continuing", f"without a block for token {last}", "a block for it", *key)
        if not self._are_listed_once():
            self._check_listed_once()
        if plan.num_ahead:
            sampling = [row.sequence for row in self._last_rows if row.num_samples == 1] if self._allows_ahead else []
            known = dict.fromkeys(sampling)
            outside = [
                key for key, sequence in zip(plan.continuing[: plan.num_ahead], sequences) if sequence not in known
            ]
            if outside:
                rule = "one that the step before samples one id for"
                reject(self._plan, "continuing", "ahead of its id", rule, *outside[0])
        return sequences

    def _held_and_to_check(self) -> tuple[Sequence[MirroredSequence], list[int]]:
        """The continuing sequences, and the indices of those whose tokens and blocks must be looked at."""
        if self._following is not None:
            return self._following.sequences, self._following.to_check(self._block_size, self._num_groups)
        sequences = self._held(self._plan.continuing)
        return sequences, self._to_check(sequences)

    def _are_listed_once(self) -> bool:
        """Whether it is certain at once that no sequence is listed twice: rows of the step before were not, and what is
        listed or has ended is left out of them, or unknown.
        """
        plan, following = self._plan, self._following
        if following is None:
            return False
        listed = [(group.request_id, data.sample_index) for group in plan.groups for data in group.sequences]
        listed += plan.finished_sequences
        for request_id in plan.finished_request_ids:
            group = self._groups.get(request_id)
            listed += [] if group is None else [(request_id, index) for index in group.sequences]
        return all(key in following.dropped or key not in self._sequences for key in listed)

    def _held(self, keys: tuple[SequenceKey, ...]) -> list[MirroredSequence]:
        sequences = []
        for key, sequence in zip(keys, map(self._sequences.get, keys)):
            if sequence is None:
                reject(self._plan, "continuing", "unknown", "a sequence that it holds", *key)
            sequences.append(sequence)
        return sequences

    def _to_check(self, sequences: list[MirroredSequence]) -> list[int]:
        """Indices of the sequences whose tokens are not all computed, or whose blocks are full."""
        size, num_groups = self._block_size, self._num_groups
        return [
            index
            for index, each in enumerate(sequences)
            if (end := each.num_computed_tokens + each.num_scheduled_tokens) * num_groups >= len(each.block_ids) * size
            or end != each.num_prompt_tokens + len(each.output_token_ids)
        ]

    def _check_continuing_ids(self) -> tuple[int, ...]:
        """Number of ids that each appends; empty if each appends one."""
        plan, num_ids = self._plan, self._plan.continuing_num_ids
        if not 0 <= plan.num_ahead <= len(plan.continuing):
            rule = f"from 0 to {len(plan.continuing)}, the sequences in continuing"
            reject(self._plan, "num_ahead", plan.num_ahead, rule)
        num_keys = len(plan.continuing) - plan.num_ahead
        if num_ids and (len(num_ids) != num_keys or min(num_ids) < 0):
            rule = f"one, of 0 or more, for each of the {num_keys} sequences that do not go ahead"
            reject(self._plan, "continuing_num_ids", f"{len(num_ids)} numbers from {min(num_ids)} on", rule)
        num_expected = sum(num_ids) if num_ids else num_keys
        if len(plan.continuing_token_ids) != num_expected:
            rule = f"{num_expected} for the {num_keys} sequences that do not go ahead"
            reject(self._plan, "continuing_token_ids", f"{len(plan.continuing_token_ids)} ids", rule)
        return (1,) * plan.num_ahead + num_ids if num_ids else ()

    def _check_listed_once(self) -> None:
        """Check that no sequence continues twice, or continues and is listed or has ended."""
        plan, keys = self._plan, dict.fromkeys(self._plan.continuing)
        if len(keys) != len(plan.continuing):
            reject(self._plan, "continuing", "a list with one sequence twice", "each once")
        for group in plan.groups:
            for data in group.sequences:
                if (group.request_id, data.sample_index) in keys:
                    reject(
                        self._plan,
                        "continuing",
                        "also in groups",
                        "one or the other",
                        group.request_id,
                        data.sample_index,
                    )
        finished_requests = dict.fromkeys(plan.finished_request_ids)
        ended = [key for key in plan.finished_sequences if key in keys]
        ended += [key for key in plan.continuing if key.request_id in finished_requests] if finished_requests else []
        if ended:
            reject(self._plan, "continuing", "also finished", "one or the other", *ended[0])

    def _check_block_ops(self) -> None:
        """Check that device blocks of the moves exist. The mirror does not know the number of host blocks."""
        operations = self._plan.block_ops
        if operations.is_empty:
            return
        self._check_blocks("block_ops.swap_in", [destination for _, destination in operations.swap_in])
        self._check_blocks("block_ops.swap_out", [source for source, _ in operations.swap_out])
        self._check_blocks("block_ops.copy", [block_id for pair in operations.copy for block_id in pair])
        self._check_blocks("block_ops.store", [block_id for block_id, _ in operations.store])
        self._check_blocks("block_ops.load", [block_id for _, block_id in operations.load])
        self._check_blocks("block_ops.save", [block_id for block_id, _ in operations.save])
        self._check_blocks("block_ops.fetch", [block_id for _, block_id in operations.fetch])

    def _check_listing(self, group: GroupUpdate, finished: Mapping[SequenceKey, None]) -> None:
        """Check that a group lists at least one sequence, each once, and none that has ended."""
        request_id, indices = group.request_id, [data.sample_index for data in group.sequences]
        if not indices:
            reject(self._plan, "sequences", "empty", "at least one", request_id)
        if len(dict.fromkeys(indices)) != len(indices):
            reject(self._plan, "sequences", f"samples {indices}", "each sample once", request_id)
        for index in indices:
            if (request_id, index) in finished:
                reject(
                    self._plan, "sequences", "listed and in finished_sequences", "one or the other", request_id, index
                )

    def _check_group(self, update: GroupUpdate) -> int:
        """Number of tokens that the group computes."""
        if isinstance(update, SequenceGroupMetadata):
            for data in update.sequences:
                self._check_snapshot(update.request, data)
        else:
            self._check_delta(update)
        return sum([data.num_scheduled_tokens for data in update.sequences])

    def _check_snapshot(self, request: Request, data: SequenceData) -> None:
        self._check_sample_index(request, data)
        if request.adapter and not (self._adapters is not None and self._adapters.has(request.adapter)):
            reject(self._plan, "adapter", request.adapter, "an adapter that is loaded", request.request_id)
        self._check_blocks("block_ids", data.block_ids, request.request_id, data.sample_index)
        num_tokens = len(request.prompt_token_ids) + len(data.output_token_ids)
        self._check_counts(request, data, num_tokens, len(data.block_ids))

    def _check_delta(self, update: SequenceGroupMetadataDelta) -> None:
        """Check a delta; it has all data of a sequence that the mirror does not hold, which has just forked."""
        group = self._groups.get(update.request_id)
        if group is None:
            rule = "a snapshot: the mirror does not hold the request"
            reject(self._plan, "request_id", "a delta", rule, update.request_id)
        for data in update.sequences:
            key = update.request_id, data.sample_index
            sequence = group.sequences.get(data.sample_index)
            if sequence is None:
                self._check_sample_index(group.request, data)
                if data.num_kept_blocks != 0:
                    reject(self._plan, "num_kept_blocks", data.num_kept_blocks, "0 for a new sequence", *key)
                num_tokens = len(group.request.prompt_token_ids)
            else:
                self._check_continuation(sequence, data)
                num_tokens = sequence.num_tokens
            self._check_blocks("appended_block_ids", data.appended_block_ids, *key)
            num_blocks = data.num_kept_blocks + len(data.appended_block_ids)
            self._check_counts(group.request, data, num_tokens + len(data.appended_token_ids), num_blocks)

    def _check_continuation(self, sequence: MirroredSequence, data: SequenceDataDelta) -> None:
        key = sequence.request.request_id, data.sample_index
        expected = sequence.num_computed_tokens + sequence.num_scheduled_tokens
        # Drafts of the last step that are among its ids are computed already; one more id follows them.
        expected += num_equal(sequence.draft_token_ids, data.appended_token_ids[:-1])
        # A sequence that sampled without getting an id recomputes its last token.
        may_repeat = not data.appended_token_ids and expected == sequence.num_tokens
        if data.num_computed_tokens != expected and not (may_repeat and data.num_computed_tokens == expected - 1):
            reject(self._plan, "num_computed_tokens", data.num_computed_tokens, expected, *key)
        if not 0 <= data.num_kept_blocks <= len(sequence.block_ids):
            rule = f"from 0 to {len(sequence.block_ids)}, the known blocks"
            reject(self._plan, "num_kept_blocks", data.num_kept_blocks, rule, *key)

    def _check_adapters(self, max_adapters: int, continuing: Sequence[MirroredSequence]) -> None:
        """Check that the rows of the step have few different adapters."""
        requests = [sequence.request for sequence in continuing]
        for group in self._plan.groups:
            known = group if isinstance(group, SequenceGroupMetadata) else self._groups[group.request_id]
            requests.append(known.request)
        found = dict.fromkeys(request.adapter for request in requests if request.adapter)
        if len(found) > max_adapters:
            reject(self._plan, "groups", f"of {len(found)} adapters", f"at most {max_adapters} in a step")

    def _check_sample_index(self, request: Request, data: SequenceData | SequenceDataDelta) -> None:
        if not 0 <= data.sample_index < request.sampling.num_sequences:
            rule = f"from 0 to {request.sampling.num_sequences - 1}"
            reject(self._plan, "sample_index", data.sample_index, rule, request.request_id, data.sample_index)

    def _check_blocks(self, name: str, block_ids: Sequence[BlockId], *key: int) -> None:
        if block_ids and not 0 <= min(block_ids) <= max(block_ids) < self._num_blocks:
            outside = next(block_id for block_id in block_ids if not 0 <= block_id < self._num_blocks)
            reject(self._plan, name, outside, f"from 0 to {self._num_blocks - 1}", *key)

    def _check_counts(
        self, request: Request, data: SequenceData | SequenceDataDelta, num_tokens: int, num_blocks: int
    ) -> None:
        """Check that the chunk lies inside the tokens and the blocks, and samples only at the end of the tokens."""
        first, num_scheduled = data.num_computed_tokens, data.num_scheduled_tokens
        end, num_tokens = first + num_scheduled, num_tokens + len(data.draft_token_ids)
        is_all = (first, end) == (0, num_tokens)
        is_cached = self._num_blocks > 0 or self._block_size == NO_TABLES
        has_blocks = end <= self._num_covered(num_blocks) if is_cached else is_all
        if num_blocks % self._num_groups:
            rule = f"a multiple of {self._num_groups}, the groups of layers"
            reject(self._plan, "block_ids", f"{num_blocks} blocks", rule, request.request_id, data.sample_index)
        max_samples = request.sampling.num_sequences - data.sample_index if end == num_tokens else 0
        if data.draft_token_ids:
            self._check_drafts(request, data, end, num_tokens)
        if 0 <= first < end <= num_tokens and has_blocks and 0 <= data.num_samples <= max_samples:
            return
        every = f"all of the {num_tokens} tokens at once, where there is no cache"
        left = f"at most {num_tokens - first}, what is left of {num_tokens} tokens"
        samples = f"0 at token {end} of {num_tokens}" if end != num_tokens else f"from 0 to {max_samples}"
        rules = (
            (first >= 0, "num_computed_tokens", first, "0 or more"),
            (num_scheduled >= 1, "num_scheduled_tokens", num_scheduled, "1 or more"),
            (end <= num_tokens, "num_scheduled_tokens", num_scheduled, left),
            (
                is_cached or is_all,
                "num_scheduled_tokens",
                num_scheduled,
                every,
            ),
            (has_blocks, "block_ids", f"{num_blocks} blocks", f"enough blocks of {self._block_size} for {end} tokens"),
            (False, "num_samples", data.num_samples, samples),
        )
        _, name, value, rule = next(each for each in rules if not each[0])
        reject(self._plan, name, value, rule, request.request_id, data.sample_index)

    def _check_drafts(
        self, request: Request, data: SequenceData | SequenceDataDelta, end: int, num_tokens: int
    ) -> None:
        """Check that the drafts follow the last known token, which is computed too, in a sequence that samples once."""
        where, num_drafts = (request.request_id, data.sample_index), len(data.draft_token_ids)
        if end != num_tokens or data.num_samples != 1 or data.num_scheduled_tokens <= num_drafts:
            rule = "none but behind the last known token, which is computed too, of a sequence that samples once"
            reject(self._plan, "draft_token_ids", f"{num_drafts} drafts", rule, *where)
        if min(data.draft_token_ids) < 0:
            reject(self._plan, "draft_token_ids", min(data.draft_token_ids), "token ids", *where)

    def _num_covered(self, num_entries: int) -> int:
        """Number of tokens whose keys and values a table of so many entries has room for."""
        if self._block_size == NO_TABLES:
            return NO_TABLES
        return num_entries // self._num_groups * self._block_size
