"""Updates that a step sends to the workers' mirrors: snapshots of unknown groups, deltas of known ones.

Only here, and where drafts are proposed (`replica/drafts`), does a plan read token values from sequences.
"""

from collections.abc import Sequence as Sized
from dataclasses import dataclass, field
from typing import NamedTuple

from kv_cache.block import BlockId
from kv_cache.block_table import TableChange
from spmd_worker.replica.sequence.metadata import (
    GroupUpdate,
    SequenceData,
    SequenceDataDelta,
    SequenceGroupMetadata,
    SequenceGroupMetadataDelta,
)
from spmd_worker.replica.sequence.request import RequestId
from spmd_worker.replica.sequence.sampled import SampledIds
from spmd_worker.replica.sequence.sequence import Sequence


class Decision(NamedTuple):
    """One sequence of a step: tokens [first_token, first_token + num_tokens) are computed, then its `drafts`, of which
    there are `num_drafts`. `change` is its table's.
    """

    sequence: Sequence
    first_token: int
    num_tokens: int
    num_samples: int
    change: TableChange
    num_drafts: int = 0


@dataclass(frozen=True, slots=True)
class Decisions:
    """All decisions of a step: sequences that go ahead of their ids, those that continue with their given ids, the
    blocks allocated to either (index in its list, block), and all others. `last_ids` are the last ids of those that
    continue; `uneven` maps an index in `continuing` to its number of given ids where that is not one.
    """

    ahead: list[Sequence] = field(default_factory=list)
    ahead_blocks: list[tuple[int, BlockId]] = field(default_factory=list)
    continuing: list[Sequence] = field(default_factory=list)
    last_ids: list[int] = field(default_factory=list)
    blocks: list[tuple[int, BlockId]] = field(default_factory=list)
    others: list[Decision] = field(default_factory=list)
    uneven: dict[int, int] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        num_more = sum([max(num_ids - 1, 0) for num_ids in self.uneven.values()])
        num_others = sum(decision.num_tokens + decision.num_drafts for decision in self.others)
        return len(self.ahead) + len(self.continuing) + num_more + num_others

    @property
    def has_drafts(self) -> bool:
        return any(decision.num_drafts for decision in self.others)

    def proceed(self, sequence: Sequence) -> None:
        """Let a sequence continue with its given ids, which are marked as sent."""
        outputs = sequence.output_token_ids
        sequence.num_sent_tokens = len(outputs)
        self.continuing.append(sequence)
        self.last_ids.append(outputs[-1] if outputs else 0)

    def all_continuing(self) -> tuple[list[Sequence], list[tuple[int, BlockId]]]:
        """`StepPlan.continuing` with those that go ahead first, and their blocks."""
        if not self.ahead:
            return self.continuing, self.blocks
        num_ahead = len(self.ahead)
        blocks = [(num_ahead + index, block_id) for index, block_id in self.blocks]
        return self.ahead + self.continuing, self.ahead_blocks + blocks


def given_ids(decisions: Decisions) -> SampledIds:
    """Ids to append for each continuing sequence that does not go ahead. Marks the ids of those that do as sent: the
    mirrors get these from the devices.
    """
    for sequence in decisions.ahead:
        sequence.num_sent_tokens += 1
    if not decisions.uneven:
        return SampledIds(tuple(decisions.last_ids))
    rows = []
    for index, sequence in enumerate(decisions.continuing):
        outputs = sequence.output_token_ids
        rows.append(outputs[len(outputs) - decisions.uneven.get(index, 1) :])
    return SampledIds.from_rows(rows)


def group_updates(decisions: Sized[Decision]) -> tuple[GroupUpdate, ...]:
    """One update per group, in the order of its first decision. Marks what is sent as known."""
    by_request: dict[RequestId, list[Decision]] = {}
    for decision in decisions:
        by_request.setdefault(decision.sequence.request.request_id, []).append(decision)
    return tuple(_update_of(group) for group in by_request.values())


def _update_of(decisions: list[Decision]) -> GroupUpdate:
    """A snapshot if the mirrors do not hold the group with its blocks, else a delta."""
    sequences = [decision.sequence for decision in decisions]
    request = sequences[0].request
    # A fork is not known either, but a delta can carry it: everything is appended.
    must_snapshot = any(not sequence.is_known and not sequence.is_new_fork for sequence in sequences)
    update: GroupUpdate
    if must_snapshot:
        update = SequenceGroupMetadata(request, tuple(map(_snapshot_of, decisions)))
    else:
        update = SequenceGroupMetadataDelta(request.request_id, tuple(map(_delta_of, decisions)))
    for sequence in sequences:
        sequence.is_known, sequence.is_new_fork = True, False
        sequence.num_sent_tokens = len(sequence.output_token_ids)
        # A sequence that lags is always sent here: more ids were appended than it computes, so it does not continue.
        sequence.num_lagging_tokens = 0
    return update


def _snapshot_of(decision: Decision) -> SequenceData:
    sequence, first_token, num_tokens, num_samples, _, num_drafts = decision
    return SequenceData(
        sample_index=sequence.sample_index,
        output_token_ids=tuple(sequence.output_token_ids),
        block_ids=tuple(sequence.table.block_ids),
        num_computed_tokens=first_token,
        num_scheduled_tokens=num_tokens + num_drafts,
        num_samples=num_samples,
        state_slot=-1 if sequence.state_slot is None else sequence.state_slot,
        draft_token_ids=sequence.drafts if num_drafts else (),
        num_lagging_tokens=sequence.num_lagging_tokens,
    )


def _delta_of(decision: Decision) -> SequenceDataDelta:
    sequence, first_token, num_tokens, num_samples, change, num_drafts = decision
    state_slot = -1
    if not sequence.is_known:
        change = TableChange(0, tuple(sequence.table.block_ids))
        state_slot = -1 if sequence.state_slot is None else sequence.state_slot
    return SequenceDataDelta(
        sample_index=sequence.sample_index,
        appended_token_ids=tuple(sequence.output_token_ids[sequence.num_sent_tokens :]),
        num_kept_blocks=change.first_index,
        appended_block_ids=change.block_ids,
        num_computed_tokens=first_token,
        num_scheduled_tokens=num_tokens + num_drafts,
        num_samples=num_samples,
        state_slot=state_slot,
        draft_token_ids=sequence.drafts if num_drafts else (),
    )
