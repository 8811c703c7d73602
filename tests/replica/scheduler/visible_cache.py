"""Device, host and tier with contents one can see: what plans say is done to cells, and every row reads back its past,
as far as each group of layers sees it.

A cell stands for the keys and values of one position: it knows the cell before it, its token and the epoch it was
computed in, so nothing of another beginning, or from before a reset, reads right by chance. Knows plans as a worker
does. Knows nothing of schedulers.
"""

from collections.abc import Container, Sequence

from kv_cache.block_ops import BlockOps
from kv_cache.layer_groups import ONE_GROUP, LayerGroups
from spmd_worker.replica.mirror.records import MirroredSequence
from spmd_worker.replica.sequence.hit_comparison import CachedCopy
from spmd_worker.replica.sequence.sequence import SequenceKey

ROOT, RUBBISH, TO_BE_WRITTEN = -4, -2, -3
"""Beginnings of rows with adapters are below `ROOT`."""

Cells = list[list[int]]


class VisibleCache:
    """`run_step` for each step, `finish_transfer` for each transfer, `forget` where nothing old may be found later."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        num_host_blocks: int,
        num_slots: int,
        groups: LayerGroups = ONE_GROUP,
    ) -> None:
        self._block_size, self._groups = block_size, groups
        self._device, self._host, self._places = (
            [[RUBBISH] * block_size for _ in range(count)] for count in (num_blocks, num_host_blocks, num_slots)
        )
        self._transfers: dict[int, tuple[Cells, BlockOps]] = {}
        # Name -> block, outside the engine: what another cache has saved too (`join`).
        self.outside: dict[bytes, list[int]] = {}
        # A cell's number -> (the number of the cell before it, token, epoch), and the other way round.
        self._contents: list[tuple[int, int, int]] = []
        self._numbers: dict[tuple[int, int, int], int] = {}
        self._epoch = 0

    def join(self, other: "VisibleCache") -> None:
        """This cache, which is new, belongs to another engine with the same blocks outside."""
        self.outside, self._contents, self._numbers = other.outside, other._contents, other._numbers

    def forget(self) -> None:
        """What is written from now on is told apart from what was."""
        self._epoch += 1

    def run_step(self, block_ops: BlockOps, rows: list[MirroredSequence], joined: Container[SequenceKey]) -> None:
        """Moves, then writes, then reads; AssertionError where a row does not find what it computed or was given.

        What those that `joined` did not compute themselves was found, so it must be of this epoch.
        """
        self._move(block_ops)
        self._write(rows)
        for block_id, name in block_ops.save:
            block = list(self._device[block_id])
            assert min(block) >= 0, f"block {block_id} is saved without contents: {block}"
            assert self.outside.setdefault(name, block) == block, f"{name.hex()} names two contents"
        for row in rows:
            self._check_history(row, is_new=SequenceKey(row.request.request_id, row.sample_index) in joined)

    def compare(self, row: MirroredSequence, copies: tuple[CachedCopy, ...]) -> None:
        """After a step: what it has computed again is what was found, in another block."""
        for copy in copies:
            block_id = row.block_ids[copy.block_index]
            assert copy.number != block_id, f"block {block_id} is compared with itself"
            cached, computed = self._device[copy.number], self._device[block_id]
            assert cached == computed, f"block {copy.number} has {cached}, {block_id} has {computed}"

    def finish_transfer(self, number: int) -> None:
        """What was stored and loaded arrives, and not before; nothing where it has failed."""
        stored, block_ops = self._transfers.pop(abs(number))
        for (_, place), block in zip(block_ops.store, stored):
            self._places[place] = block
        for place, block_id in block_ops.load:
            self._device[block_id] = list(self._places[place])
        for name, block_id in block_ops.fetch:
            if number > 0:
                self._device[block_id] = list(self.outside[name])

    def _move(self, block_ops: BlockOps) -> None:
        """In the order of the contract of `BlockOps`."""
        stored = [list(self._device[block_id]) for block_id, _ in block_ops.store]
        _assign(self._device, self._host, block_ops.swap_out)
        _assign(self._device, self._device, block_ops.copy)
        _assign(self._host, self._device, block_ops.swap_in)
        if block_ops.transfer:
            self._transfers[block_ops.transfer] = stored, block_ops
        for _, place in block_ops.store:
            self._places[place] = [RUBBISH] * self._block_size
        for _, block_id in (*block_ops.load, *block_ops.fetch):
            self._device[block_id] = [RUBBISH] * self._block_size

    def _write(self, rows: list[MirroredSequence]) -> None:
        """Rows may begin behind what another row of the step writes, whichever comes first in the plan."""
        groups = range(self._groups.num_groups)
        for row in rows:
            for position in _new_positions(row):
                for group in groups:
                    cell = self._get(row, position, group)
                    assert cell != TO_BE_WRITTEN, f"two rows write position {position} of {row}"
                    self._set(row, position, group, TO_BE_WRITTEN)
        left = rows
        while left:
            ready = [row for row in left if all(self._is_written_before(row, each) for each in groups)]
            assert ready, f"these rows wait for each other: {left}"
            for row in ready:
                for position in _new_positions(row):
                    content = _content(row, position, *row.token_ids(position, position + 1))
                    for group in groups:
                        number = self._number(self._get(row, position - 1, self._source(position, group)), content)
                        self._set(row, position, group, number)
            left = [row for row in left if row not in ready]

    def _is_written_before(self, row: MirroredSequence, group: int) -> bool:
        first = row.num_computed_tokens
        return self._get(row, first - 1, self._source(first, group)) != TO_BE_WRITTEN

    def _source(self, position: int, group: int) -> int:
        """The group that has the cell before `position`: a full one, where a chunk of positions begins."""
        is_seen = group < self._groups.num_full or self._groups.first_visible(position) < position
        return group if is_seen else 0

    def _check_history(self, row: MirroredSequence, *, is_new: bool) -> None:
        for group in range(self._groups.num_groups):
            is_full = group < self._groups.num_full
            first = 0 if is_full else self._groups.first_visible(row.num_computed_tokens)
            self._check_group(row, group, first, is_new=is_new)

    def _check_group(self, row: MirroredSequence, group: int, first: int, *, is_new: bool) -> None:
        """The cells from position `first` on."""
        before = ROOT - row.request.adapter if first == 0 else None
        end = _new_positions(row).stop
        for position, token_id in enumerate(row.token_ids(first, end), first):
            cell = self._get(row, position, group)
            where = f"request {row.request.request_id}, sample {row.sample_index}, position {position} of {end}"
            assert cell not in (RUBBISH, TO_BE_WRITTEN), f"{where}: nothing is there"
            if before is None:
                before = self._cell_before(row, cell, first, where)
            content = (before, _content(row, position, token_id))
            assert self._contents[cell][:2] == content, f"{where}: {self._contents[cell]} follows {before}"
            assert not is_new or self._contents[cell][2] == self._epoch, f"{where}: found, but forgotten before"
            before = cell

    def _cell_before(self, row: MirroredSequence, cell: int, first: int, where: str) -> int:
        """The number of the cell before `cell`, whose past must be the row's: its blocks are dropped."""
        found = self._contents[cell][0]
        before = found
        for token_id in reversed(row.token_ids(0, first)):
            assert before >= 0, f"{where}: its past begins at another position"
            assert self._contents[before][1] == token_id, f"{where}: its past is another row's"
            before = self._contents[before][0]
        assert before == ROOT - row.request.adapter, f"{where}: its past has another beginning, {before}"
        return found

    def _number(self, before: int, token_id: int) -> int:
        content = (before, token_id, self._epoch)
        number = self._numbers.setdefault(content, len(self._contents))
        if number == len(self._contents):
            self._contents.append(content)
        return number

    def _get(self, row: MirroredSequence, position: int, group: int) -> int:
        if position < 0:
            return ROOT - row.request.adapter
        return self._block(row, position, group)[position % self._block_size]

    def _set(self, row: MirroredSequence, position: int, group: int, cell: int) -> None:
        self._block(row, position, group)[position % self._block_size] = cell

    def _block(self, row: MirroredSequence, position: int, group: int) -> list[int]:
        entry = position // self._block_size * self._groups.num_groups + group
        return self._device[row.block_ids[entry]]


def _content(row: MirroredSequence, position: int, token_id: int) -> int:
    """The token, or the row of an image that it takes, as a number below 0."""
    for item in row.request.media:
        for _, index, _ in item.rows_between(position, position + 1):
            return -1 - index - (int.from_bytes(item.media_id, "little") << 16)
    return token_id


def _assign(source: Cells, destination: Cells, pairs: Sequence[tuple[int, int]]) -> None:
    """One parallel assignment."""
    gathered = [list(source[index]) for index, _ in pairs]
    for (_, index), block in zip(pairs, gathered):
        destination[index] = block


def _new_positions(row: MirroredSequence) -> range:
    """Drafts follow the given tokens."""
    num_tokens = row.num_scheduled_tokens + len(row.draft_token_ids)
    return range(row.num_computed_tokens, row.num_computed_tokens + num_tokens)
