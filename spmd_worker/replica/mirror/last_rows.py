"""The rows of the mirror's last step, by column: most of them continue in the next one, in the same order.

So a step costs what changes in it, and a few passes over columns: no sequence is looked up or checked by itself that
has only continued by one id. Such a row is plain: all its tokens are computed, it has no drafts, its states do not lag,
and its table covers them.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from kv_cache.block import BlockId
from spmd_worker.replica.mirror.records import MirroredSequence, ScheduledSequence
from spmd_worker.replica.sequence.sampled import left_out, without
from spmd_worker.replica.sequence.sequence import SequenceKey


@dataclass(frozen=True, slots=True)
class LastRows:
    """Rows in plan order, of which the first `num_plain` are plain: their lists of output tokens and of blocks, and
    their numbers of tokens after the step. `dropped` are the keys that `following` has left out.
    """

    keys: tuple[SequenceKey, ...] = ()
    sequences: tuple[MirroredSequence, ...] = ()
    scheduled: tuple[ScheduledSequence, ...] = ()
    outputs: tuple[list[int], ...] = ()
    tables: tuple[list[BlockId], ...] = ()
    ends: list[int] = field(default_factory=list)
    num_plain: int = 0
    dropped: dict[SequenceKey, None] = field(default_factory=dict)

    @property
    def are_plain(self) -> bool:
        """Whether there are rows, and all are plain."""
        return 0 < self.num_plain == len(self.keys)

    def following(self, keys: tuple[SequenceKey, ...]) -> "LastRows | None":
        """The rows of the next step's continuing sequences; None unless these are among the rows, in their order."""
        dropped = left_out(keys, self.keys)
        if dropped is None:
            return None
        return LastRows(
            keys,
            without(self.sequences, dropped),
            without(self.scheduled, dropped),
            without(self.outputs, dropped),
            without(self.tables, dropped),
            list(without(tuple(self.ends), dropped)),
            self.num_plain - sum(index < self.num_plain for index in dropped),
            dict.fromkeys([self.keys[index] for index in dropped]),
        )

    def to_check(self, block_size: int, num_groups: int) -> list[int]:
        """Indices of the rows that may lack a block, and of those that are not plain."""
        plain = self.ends[: self.num_plain]
        full = [index for index, end in enumerate(plain) if not end % block_size]
        lacking = [index for index in full if plain[index] * num_groups >= len(self.tables[index]) * block_size]
        return lacking + list(range(self.num_plain, len(self.keys)))

    def advance(self, token_ids: Iterable[int]) -> "LastRows":
        """Append an id to each row; all are plain then."""
        num_plain = self.num_plain
        for outputs, token_id in zip(self.outputs, token_ids, strict=True):
            outputs.append(token_id)
        for sequence in self.sequences[:num_plain]:
            sequence.num_computed_tokens += 1
        others = self.sequences[num_plain:]
        for sequence in others:
            sequence.draft_token_ids, sequence.num_lagging_tokens = (), 0
            sequence.num_computed_tokens += sequence.num_scheduled_tokens
            sequence.num_scheduled_tokens = 1
        self.ends[:] = [end + 1 for end in self.ends[:num_plain]] + [each.num_computed_tokens + 1 for each in others]
        if not others:
            return self
        scheduled = (*self.scheduled[:num_plain], *[sequence.decode_row for sequence in others])
        columns = (self.keys, self.sequences, scheduled, self.outputs, self.tables, self.ends)
        return LastRows(*columns, len(self.keys))

    def joined(self, scheduled: tuple[ScheduledSequence, ...]) -> "LastRows":
        """These rows and others, which are not plain."""
        sequences = tuple([row.sequence for row in scheduled])
        return LastRows(
            self.keys + tuple([sequence.key for sequence in sequences]),
            self.sequences + sequences,
            self.scheduled + scheduled,
            self.outputs + tuple([sequence.output_token_ids for sequence in sequences]),
            self.tables + tuple([sequence.block_ids for sequence in sequences]),
            self.ends + [each.num_computed_tokens + each.num_scheduled_tokens for each in sequences],
            self.num_plain,
        )
