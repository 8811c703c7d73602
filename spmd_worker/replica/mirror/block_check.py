"""Contents of blocks, as a mirror follows them from plans, and the check that rows read their own keys and values.

A block holds what the sequence has computed into whose table it was put last, to be written, or what a move brought.
Who reads a block that others have filled, found in the prefix cache, shared with a fork, copied or swapped in, must
have the same tokens. What is free is not known: contents stay until somebody else is given the block.

Contents of sequences that have ended are compared while the tokens of these are kept: of the last ones, twice as many
tokens as the cache holds.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple, NoReturn

from kv_cache.block import BlockId, num_blocks_for
from kv_cache.layer_groups import LayerGroups
from spmd_worker.replica.mirror.contents import begins_alike
from spmd_worker.replica.mirror.records import Computed, MirroredSequence, PlannedRow, reject
from spmd_worker.replica.sequence.request import RequestId
from spmd_worker.replica.sequence.sampled import SampledIds
from spmd_worker.replica.sequence.sequence import SequenceKey
from spmd_worker.replica.sequence.step import StepPlan


class BlockContents(NamedTuple):
    """Keys and values at entry `entry` of a sequence's table, of its first `num_tokens` tokens, drafts included."""

    computed: Computed
    num_tokens: int
    entry: int


class Outside(NamedTuple):
    """Keys and values that a connector brings: it knows by name what they are."""


OUTSIDE: Final = Outside()

Held = Computed | BlockContents | Outside | None
"""Contents of a block: written by a sequence whose table has it, moved there, or none."""


class BlockChanges(NamedTuple):
    """Changes by a step: blocks by what moves write there, by the sequences that write them then, and the sequences
    that are no longer in theirs.
    """

    moved: Mapping[BlockId, Held]
    host: Mapping[BlockId, Held]
    written: Mapping[BlockId, Computed]
    displaced: Sequence[MirroredSequence]


class MirroredBlocks:
    """`check` a plan, then `change` by what it returned; `leave` for each record that ends or is replaced."""

    def __init__(self, num_blocks: int, block_size: int, groups: LayerGroups) -> None:
        self._block_size, self._groups = block_size, groups
        self._device: list[Held] = [None] * num_blocks
        self._host: dict[BlockId, Held] = {}
        self._ended: deque[Computed] = deque()
        self._num_ended_tokens, self._max_ended_tokens = 0, 2 * num_blocks * block_size

    def check(
        self, plan: StepPlan, rows: Sequence[PlannedRow], continuing: Sequence[MirroredSequence], *, is_same: bool
    ) -> BlockChanges:
        """Raise MirrorError, before anything has changed, where a row reads what is not its own. `is_same`: all that
        continue were in the step before.
        """
        moved, host = self._moves(plan)
        written = {block_id: continuing[index].computed for index, block_id in plan.continuing_blocks}
        num_written = len(plan.continuing_blocks)
        for row in rows:
            block_ids = self._written_by(row, written)
            num_written += len(block_ids)
            written.update(dict.fromkeys(block_ids, row.sequence.computed))
        if len(written) != num_written:
            reject(plan, "block_ids", "a block given to two rows", "one that writes it")
        displaced = self._displaced(plan, written, rows, continuing)
        for sequence in () if is_same else continuing:
            _check_displaced(plan, sequence)
        for row in rows:
            end = num_blocks_for(row.num_computed_tokens, self._block_size) * self._groups.num_groups
            if row.num_kept_blocks:
                _check_displaced(plan, row.sequence)
            if row.num_kept_blocks < end and row.num_computed_tokens > row.request.num_given_tokens:
                after = {each.sequence.computed: each.after.computed for each in rows if not each.is_new}
                self._check_reads(plan, row, end, moved, written, after, continuing)
        return BlockChanges(moved, host, written, displaced)

    def change(self, changes: BlockChanges, rows: Sequence[PlannedRow]) -> None:
        """Follow a plan, before the records of its rows change."""
        for row in rows:
            # A record that is new has its whole table.
            for block_id in () if row.is_new else row.sequence.block_ids[row.num_kept_blocks :]:
                if self._device[block_id] is row.sequence.computed:
                    self._device[block_id] = self._contents(block_id)
            row.sequence.is_displaced = False
        for sequence in changes.displaced:
            sequence.is_displaced = True
        self._host.update(changes.host)
        device = self._device
        for block_id, held in (*changes.moved.items(), *changes.written.items()):
            device[block_id] = held

    def leave(self, sequence: MirroredSequence) -> None:
        """A record ends, or another takes its place: its blocks may be found yet."""
        computed = sequence.computed
        computed.leave()
        self._ended.append(computed)
        self._num_ended_tokens += len(computed.tokens or b"") // 8
        while self._num_ended_tokens > self._max_ended_tokens:
            oldest = self._ended.popleft()
            self._num_ended_tokens -= len(oldest.tokens or b"") // 8
            oldest.tokens = None

    def _moves(self, plan: StepPlan) -> tuple[dict[BlockId, Held], dict[BlockId, Held]]:
        """Contents that moves write on the device, and on the host."""
        operations = plan.block_ops
        if operations.is_empty:
            return {}, {}
        host = {to: self._contents(block_id) for block_id, to in operations.swap_out}
        moved = {to: self._contents(block_id) for block_id, to in operations.copy}
        for block_id, to in operations.swap_in:
            moved[to] = host[block_id] if block_id in host else self._host.get(block_id)
        for _, to in (*operations.load, *operations.fetch):
            moved[to] = OUTSIDE
        return moved, host

    def _contents(self, block_id: BlockId) -> Held:
        """Contents of a block, whatever its writer's table becomes."""
        held = self._device[block_id]
        if not isinstance(held, Computed):
            return held
        return BlockContents(held, held.num_written(), _entry(held.table(), block_id))

    def _written_by(self, row: PlannedRow, written: Mapping[BlockId, Computed]) -> Sequence[BlockId]:
        """The blocks from that of a row's first token on."""
        first, kept = row.num_computed_tokens // self._block_size * self._groups.num_groups, row.num_kept_blocks
        if 0 < row.num_computed_tokens <= row.request.num_given_tokens:
            # Given keys and values are written too, where they are not found.
            while first and not self._is_found(row, first - 1, written):
                first -= 1
        if first >= kept:
            return row.new_blocks[first - kept :]
        return [*row.sequence.block_ids[first:kept], *row.new_blocks]

    def _is_found(self, row: PlannedRow, entry: int, written: Mapping[BlockId, Computed]) -> bool:
        """True if another row has computed, or does in this step, what a row needs in an entry of its table."""
        block_id, end = row.new_blocks[entry], (entry // self._groups.num_groups + 1) * self._block_size
        held, num_tokens = written.get(block_id, self._device[block_id]), min(end, row.num_computed_tokens)
        computed = _holder(held, entry, block_id, num_tokens)
        return computed is not None and begins_alike(computed, row.request, (), num_tokens)

    def _displaced(
        self,
        plan: StepPlan,
        written: Mapping[BlockId, Computed],
        rows: Sequence[PlannedRow],
        continuing: Sequence[MirroredSequence],
    ) -> list[MirroredSequence]:
        """Sequences that are not in the step, and of whose blocks it writes some: they were preempted."""
        # Hot path: most blocks that are given out are those of sequences that have ended.
        formers = dict.fromkeys(map(self._device.__getitem__, written))
        ended = plan.finished_sequences, plan.finished_request_ids
        readers = {held: reader for held in formers if (reader := _reader(held, *ended)) is not None}
        displaced = []
        for block_id, writer in written.items() if readers else ():
            former = readers.get(self._device[block_id])
            if former is None or former.computed is writer or not self._reads(former, block_id):
                continue
            row = next((each for each in rows if each.sequence is former), None)
            if former in continuing or (row is not None and _entry(former.block_ids, block_id) < row.num_kept_blocks):
                value = f"block {block_id} to request {writer.key.request_id}, sample {writer.key.sample_index}"
                reject(plan, "block_ids", value, "no block that this row reads", *former.key)
            if row is None:
                displaced.append(former)
        return displaced

    def _reads(self, sequence: MirroredSequence, block_id: BlockId) -> bool:
        """True if a sequence has something in a block, and its next token sees it."""
        if block_id not in sequence.block_ids:
            return False
        index, group = divmod(_entry(sequence.block_ids, block_id), self._groups.num_groups)
        end = sequence.num_computed_tokens + sequence.num_scheduled_tokens
        if index * self._block_size >= end:
            return False
        # The row may go on behind all of its drafts.
        last = sequence.num_written_tokens - 1
        return group < self._groups.num_full or index >= self._groups.num_unseen(last, self._block_size)

    def _check_reads(
        self,
        plan: StepPlan,
        row: PlannedRow,
        end: int,
        moved: Mapping[BlockId, Held],
        written: Mapping[BlockId, Computed],
        after: Mapping[Computed, Computed],
        continuing: Sequence[MirroredSequence],
    ) -> None:
        """Check what a row finds in the entries below `end` that it has got with this plan. `after`: known rows as they
        are after the step.
        """
        kept, num_computed, size = row.num_kept_blocks, row.num_computed_tokens, self._block_size
        num_groups, num_full = self._groups.num_groups, self._groups.num_full
        num_unseen, own = self._groups.num_unseen(num_computed, size), row.sequence.computed
        # Whose tokens are compared, how many of them, and the block of the last.
        others: dict[Computed, tuple[int, BlockId]] = {}
        for entry, block_id in enumerate(row.new_blocks[: end - kept], kept):
            index, group = divmod(entry, num_groups)
            if index < num_unseen and group >= num_full:
                continue
            num_tokens = min((index + 1) * size, num_computed)
            held = moved[block_id] if block_id in moved else self._device[block_id]
            writer = written.get(block_id)
            if writer is not None and writer is not own:
                held = after.get(writer, writer)
            if isinstance(held, Outside):
                continue
            computed = _holder(held, entry, block_id, num_tokens)
            if computed is None and isinstance(held, Computed):
                # The token that fills a block may be computed in this step.
                computed = _holder(_continued(held, plan, continuing), entry, block_id, num_tokens)
            if computed is None:
                self._reject_read(plan, row, block_id, num_tokens, held)
            others[computed] = num_tokens, block_id
        outputs = row.output_token_ids if others else ()
        for computed, (num_tokens, block_id) in others.items():
            if computed is not own and not begins_alike(computed, row.request, outputs, num_tokens):
                self._reject_read(plan, row, block_id, num_tokens, computed)

    def _reject_read(
        self, plan: StepPlan, row: PlannedRow, block_id: BlockId, num_tokens: int, held: Computed | BlockContents | None
    ) -> NoReturn:
        value = f"{block_id}, which nobody has filled"
        if held is not None:
            key = (held.computed if isinstance(held, BlockContents) else held).key
            value = f"{block_id}, with tokens of request {key.request_id}, sample {key.sample_index}"
        first = (num_tokens - 1) // self._block_size * self._block_size
        reject(plan, "block_ids", value, f"its tokens {first} to {num_tokens - 1} there", *row.sequence.key)


def _check_displaced(plan: StepPlan, sequence: MirroredSequence) -> None:
    if sequence.is_displaced:
        reject(plan, "block_ids", "others' by now", "a new table", *sequence.key)


def _holder(held: Held, entry: int, block_id: BlockId, num_tokens: int) -> Computed | None:
    """The sequence whose keys and values a block holds, if they are that entry's, as far as `num_tokens` tokens."""
    if isinstance(held, BlockContents):
        return held.computed if held.entry == entry and num_tokens <= held.num_tokens else None
    if not isinstance(held, Computed) or num_tokens > held.num_written():
        return None
    table = held.table()
    return held if entry < len(table) and table[entry] == block_id else None


def _continued(held: Computed, plan: StepPlan, continuing: Sequence[MirroredSequence]) -> Computed | None:
    """Contents that a row that continues has computed after the step; None for others, and for one ahead of its id."""
    record = held.record
    index = -1 if record is None else next((place for place, each in enumerate(continuing) if each is record), -1)
    if record is None or index < plan.num_ahead:
        return None
    given = SampledIds(plan.continuing_token_ids, plan.continuing_num_ids).rows()
    token_ids = given[index - plan.num_ahead]
    table = [*record.block_ids, *(block_id for place, block_id in plan.continuing_blocks if place == index)]
    num_scheduled = max(len(token_ids), 1)
    num_computed = record.num_tokens + len(token_ids) - num_scheduled
    outputs = [*record.output_token_ids, *token_ids]
    return MirroredSequence(record.request, record.sample_index, outputs, table, num_computed, num_scheduled).computed


def _entry(table: list[BlockId], block_id: BlockId) -> int:
    """The entry of a block in a table; one that a window has left over may name it too, before."""
    return len(table) - 1 - table[::-1].index(block_id)


def _reader(
    held: Held, finished: tuple[SequenceKey, ...], finished_requests: tuple[RequestId, ...]
) -> MirroredSequence | None:
    """The sequence that may read a block with these contents as its own; None if it has ended."""
    if held is None or isinstance(held, Outside):
        return None
    record = (held.computed if isinstance(held, BlockContents) else held).record
    if record is None or record.key in finished or record.key.request_id in finished_requests:
        return None
    return record
