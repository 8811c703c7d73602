"""Memories of cells and the sequences in them: what the manager decides is done here to visible contents.

One step: any mix of operations, then `run_step`, which executes the moves in the order of the contract, writes what is
planned and reads everything back: every sequence on the device and on the host, and every block that can be found. What
a cell holds stands for keys and values: it depends on the token, on all tokens before it and on the weights, so a block
of another beginning, or of old weights, never reads right by chance. `memories` is a parameter, so a test can execute
the moves wrongly.
"""

from dataclasses import dataclass, field

from kv_cache.block import num_blocks_for
from kv_cache.block_hash import hash_blocks, root_hash
from kv_cache.block_ops import BlockOps
from kv_cache.block_table import BlockTable, TableChange
from kv_cache.cache_manager import CacheManager
from kv_cache.host_tier import HostTier

NOTHING = -1
"""What no token ever wrote."""
ON_THE_WAY = -2
"""What a block or a place holds while a transfer is in flight."""
FIRST_NEW_TOKEN = 1000
"""Prompts have tokens below it; the others are all different."""


class Memories:
    """The cells of device, host and connector's places: the engines of a rank, made of lists.

    A transfer's bytes arrive when the test says so (`finish`), at the latest moment that the contract allows; until
    then there is rubbish where they will be.
    """

    order = ("swap_out", "store", "copy", "swap_in", "load")

    def __init__(self, block_size: int, num_blocks: int, num_host_blocks: int, num_slots: int) -> None:
        self.block_size = block_size
        self.device = [[NOTHING] * block_size for _ in range(num_blocks)]
        self.host = [[NOTHING] * block_size for _ in range(num_host_blocks)]
        self.places = [[NOTHING] * block_size for _ in range(num_slots)]
        self.in_flight: dict[int, tuple[list[tuple[list[int], int]], list[tuple[int, int]]]] = {}

    def execute(self, block_ops: BlockOps) -> None:
        if block_ops.transfer:
            self.in_flight[block_ops.transfer] = ([], list(block_ops.load))
        for kind in self.order:
            getattr(self, kind)(block_ops)

    def swap_out(self, block_ops: BlockOps) -> None:
        move(self.device, self.host, block_ops.swap_out)

    def copy(self, block_ops: BlockOps) -> None:
        move(self.device, self.device, block_ops.copy)

    def swap_in(self, block_ops: BlockOps) -> None:
        move(self.host, self.device, block_ops.swap_in)

    def store(self, block_ops: BlockOps) -> None:
        for block_id, place in block_ops.store:
            self.in_flight[block_ops.transfer][0].append((list(self.device[block_id]), place))
            self.places[place] = [ON_THE_WAY] * self.block_size

    def load(self, block_ops: BlockOps) -> None:
        for _, block_id in block_ops.load:
            self.device[block_id] = [ON_THE_WAY] * self.block_size

    def finish(self, number: int) -> None:
        stored, loaded = self.in_flight.pop(number)
        for block, place in stored:
            self.places[place] = block
        for place, block_id in loaded:
            self.device[block_id] = list(self.places[place])


def move(source_cells: list[list[int]], destination_cells: list[list[int]], pairs) -> None:
    """All sources are read before any destination is written."""
    gathered = [list(source_cells[source]) for source, _ in pairs]
    for (_, destination), block in zip(pairs, gathered):
        destination_cells[destination] = block


@dataclass
class SimulatedSequence:
    """`future` are the tokens that are known already, as a prompt's are; after them every token is a new one.

    `tokens` were written, to cells that hold `contents`; those in `planned` are written by the step being planned.
    """

    table: BlockTable
    mirror: BlockTable
    future: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    contents: list[int] = field(default_factory=list)
    planned: list[int] = field(default_factory=list)
    num_named: int = 0
    has_names: bool = True
    host_table: BlockTable | None = None
    transfer: int | None = None

    @property
    def is_on_device(self) -> bool:
        return self.host_table is None and self.transfer is None

    @property
    def has_begun(self) -> bool:
        return bool(self.tokens or self.planned or self.table.block_ids)


class CacheSimulation:
    """Sequences by name. Those that are not on the device wait on the host, or for a transfer."""

    def __init__(self, manager: CacheManager, memories=Memories) -> None:
        self.manager = manager
        self.block_size = manager.block_size
        self.tier = manager._transfers.connector if manager._transfers is not None else None
        num_slots = self.tier.num_slots if self.tier is not None else 0
        self.memories = memories(manager.block_size, manager.num_blocks, manager.num_host_blocks, num_slots)
        self.sequences: dict[str, SimulatedSequence] = {}
        self.root = root_hash()
        self.fresh: list[int] = []
        self.num_started = 0
        # What a cell holds after (what the cell before holds, token) with the weights of today.
        self._keys: dict[tuple[int, int, int], int] = {}
        self._weights = 0
        # Name -> what a block of that name holds; those that can be found must hold just that.
        self._contents_of: dict[bytes, list[int]] = {}
        self._next_token = FIRST_NEW_TOKEN

    # Sequences on the device.

    def start(self, name: str, future=()) -> None:
        self.sequences[name] = SimulatedSequence(BlockTable(), BlockTable(), list(future))

    def start_from_cache(self, name: str, future, *, keep_watermark: bool = False) -> bool:
        """Begin with what can be found, one token at least left to compute; whether there was room."""
        self.start(name, future)
        sequence = self.sequences[name]
        hashes = self._findable(sequence)
        prefix = self.manager.find_prefix(hashes)
        num_taken = num_blocks_for(len(future), self.block_size) - len(prefix)
        num_taken += sum(self.manager._pool.ref_count(block_id) == 0 for block_id in prefix)
        spare = self.manager.watermark_blocks if keep_watermark else 0
        can_start = self.manager.can_start(prefix, len(future), keep_watermark=keep_watermark)
        are_free = num_taken + spare <= self.manager.num_free_blocks
        assert can_start == are_free, f"can_start says {can_start}, {num_taken} blocks to take and {spare} to spare"
        if can_start:
            self.manager.adopt(sequence.table, prefix)
            sequence.mirror.apply(TableChange(0, tuple(prefix)))
            sequence.num_named = len(prefix)
            self._write_tokens(sequence, self._plan_tokens(sequence, len(prefix) * self.block_size))
        return can_start

    def extend(self, name: str, num_new_tokens: int, *, is_named: bool = False) -> bool:
        """Plan `num_new_tokens` more for a sequence without a plan; whether there was room."""
        sequence = self.sequences[name]
        assert sequence.is_on_device, sequence
        assert not sequence.planned, sequence
        first_token, num_tokens = len(sequence.tokens), len(sequence.tokens) + num_new_tokens
        num_needed = self.manager.num_new_blocks(sequence.table, first_token, num_tokens)
        num_free = self.manager.num_free_blocks
        assert self.manager.can_extend(sequence.table, first_token, num_tokens) == (num_needed <= num_free)
        if num_needed > num_free:
            return False
        sequence.mirror.apply(self.manager.extend(sequence.table, first_token, num_tokens))
        # A copied block that nobody else lists becomes free, if only its name kept it from being written to.
        assert self.manager.num_free_blocks >= num_free - num_needed
        assert self.manager.num_new_blocks(sequence.table, first_token, num_tokens) == 0
        sequence.planned = self._plan_tokens(sequence, num_new_tokens)
        if is_named:
            self.name(name)
        return True

    def name(self, name: str) -> None:
        """Every full block, of what is written and of what is planned, can be found from now on."""
        sequence = self.sequences[name]
        tokens = sequence.tokens + sequence.planned
        num_full = len(tokens) // self.block_size
        if not sequence.has_names or num_full <= sequence.num_named:
            return
        hashes = hash_blocks(self.root, tokens, self.block_size)
        self._remember(hashes, self._contents(sequence, sequence.planned))
        self.manager.set_hashes(sequence.table, hashes, sequence.num_named, len(sequence.tokens))
        for index in range(sequence.num_named, num_full):
            if (index + 1) * self.block_size > len(sequence.tokens):
                self.fresh += self.manager.find_prefix(hashes[index : index + 1])
        sequence.num_named = num_full

    def fork(self, name: str, child_name: str) -> None:
        """The child has what earlier steps wrote. It shares what is known of the prompt, and then goes its own way."""
        parent = self.sequences[name]
        table = self.manager.fork(parent.table)
        future = [token for token in parent.planned + parent.future if token < FIRST_NEW_TOKEN]
        child = SimulatedSequence(table, BlockTable(list(table.block_ids)), future)
        child.tokens, child.contents = list(parent.tokens), list(parent.contents)
        child.has_names = parent.has_names
        child.num_named = min(parent.num_named, len(child.tokens) // self.block_size)
        self.sequences[child_name] = child

    def can_leave(self, name: str) -> bool:
        """A table with named blocks that only this step writes is not released in it: see `DeviceTables`."""
        return not any(block_id in self.fresh for block_id in self.sequences[name].table.block_ids)

    def release(self, name: str) -> None:
        sequence = self.sequences.pop(name)
        if sequence.host_table is not None:
            self.manager.release_host(sequence.host_table)
            assert sequence.host_table.block_ids == []
        self.manager.release(sequence.table)
        assert sequence.table.block_ids == []

    def recompute(self, name: str) -> None:
        """Give the blocks back and begin again, with nothing."""
        sequence = self.sequences[name]
        self.release(name)
        self.start(name, sequence.tokens + sequence.planned + sequence.future)

    # To the host and back, beyond, and out of mind.

    def swap_out(self, name: str) -> bool:
        """Whether the manager took it; if not, nothing has changed."""
        sequence = self.sequences[name]
        before = (list(sequence.table.block_ids), self.manager.num_free_blocks, self.manager.num_used_host_blocks)
        hashes = self._named(sequence)
        self._remember(hashes, sequence.contents)
        host_table = self.manager.swap_out(sequence.table, hashes)
        if host_table is None:
            after = (sequence.table.block_ids, self.manager.num_free_blocks, self.manager.num_used_host_blocks)
            assert before == after, f"{before} became {after}"
            return False
        assert sequence.table.block_ids == []
        assert host_table.num_blocks == len(before[0])
        sequence.host_table = host_table
        sequence.mirror = BlockTable()
        sequence.future = sequence.planned + sequence.future
        sequence.planned = []
        return True

    def swap_in(self, name: str) -> bool:
        sequence = self.sequences[name]
        hashes, num_tokens = self._named(sequence), len(sequence.tokens) + 1
        if not self.manager.can_swap_in(sequence.host_table, hashes, num_tokens):
            return False
        sequence.table = self.manager.swap_in(sequence.host_table, hashes)
        assert sequence.host_table.block_ids == []
        sequence.host_table, sequence.num_named = None, len(hashes)
        sequence.mirror = BlockTable(list(sequence.table.block_ids))
        self._remember(hashes, sequence.contents)
        num_needed = self.manager.num_new_blocks(sequence.table, len(sequence.tokens), num_tokens)
        assert num_needed <= self.manager.num_free_blocks, "what can_swap_in promised is not there"
        return True

    def load_prefix(self, name: str, future) -> bool:
        """Have the connector bring what it has of a new sequence, which waits for it."""
        self.start(name, future)
        sequence = self.sequences[name]
        hashes = self._findable(sequence)
        sequence.transfer = self.manager.load_prefix(self.manager.find_prefix(hashes), hashes, len(future))
        return sequence.transfer is not None

    def finish_transfer(self, index: int) -> None:
        """One of those in flight, whichever; those that wait for it need wait no more."""
        numbers = list(self.memories.in_flight)
        if not numbers:
            return
        number = numbers[index % len(numbers)]
        self.memories.finish(number)
        self.manager.finish_transfer(number)
        for sequence in self.sequences.values():
            if sequence.transfer == number:
                sequence.transfer = None

    def reset_prefix_cache(self) -> None:
        """As weights change under the same names: whatever was computed until now must never be found again.

        So it comes when nothing is planned, and those that hold something old give nothing a name any more.
        """
        assert not any(sequence.planned for sequence in self.sequences.values())
        self.manager.reset_prefix_cache()
        self._weights += 1
        self._contents_of.clear()
        for sequence in self.sequences.values():
            sequence.has_names = sequence.has_names and not sequence.tokens
            sequence.num_named = 0

    # The step.

    def run_step(self) -> None:
        block_ops = self.manager.take_block_ops()
        check_contract(block_ops)
        self.memories.execute(block_ops)
        assert self.manager.take_block_ops().is_empty
        self.fresh.clear()
        for sequence in self.sequences.values():
            planned, sequence.planned = sequence.planned, []
            self._write(sequence, planned)
        self.check_contents()

    def check_contents(self) -> None:
        for name in self.sequences:
            assert self.read(name) == self.sequences[name].contents, f"sequence {name} reads another's tokens"
        for block_hash, contents in self._contents_of.items():
            for block_id, cells in self._found(block_hash):
                assert cells[block_id] == contents, f"block {block_id} is found and reads another's: {cells[block_id]}"

    def _found(self, block_hash: bytes):
        """Wherever a name is found: (block, the cells of that memory)."""
        for block_id in self.manager.find_prefix([block_hash]):
            yield block_id, self.memories.device
        host_block = self.manager._swap._pool.find(block_hash)
        if host_block is not None:
            yield host_block, self.memories.host
        place = self.tier._pool.find(block_hash) if self.tier is not None else None
        if place is not None:
            yield place, self.memories.places

    def read(self, name: str) -> list[int]:
        """What the sequence reads of its written tokens, on the device or on the host."""
        sequence = self.sequences[name]
        table, cells = sequence.table, self.memories.device
        if sequence.host_table is not None:
            table, cells = sequence.host_table, self.memories.host
        slots = [divmod(position, self.block_size) for position in range(len(sequence.tokens))]
        return [cells[table.block_ids[index]][offset] for index, offset in slots]

    def check_integrity(self) -> None:
        sequences = self.sequences.values()
        self.manager.check_integrity(
            [sequence.table for sequence in sequences],
            [sequence.host_table for sequence in sequences if sequence.host_table is not None],
        )
        for sequence in sequences:
            assert sequence.mirror == sequence.table

    def _write(self, sequence: SimulatedSequence, planned: list[int]) -> None:
        first = len(sequence.tokens)
        self._write_tokens(sequence, planned)
        for index in range(first, len(sequence.tokens)):
            block_index, offset = divmod(index, self.block_size)
            self.memories.device[sequence.mirror.block_ids[block_index]][offset] = sequence.contents[index]

    def _write_tokens(self, sequence: SimulatedSequence, tokens: list[int]) -> None:
        contents = self._contents(sequence, tokens)
        sequence.tokens += tokens
        sequence.contents = contents

    def _remember(self, hashes: list[bytes], contents: list[int]) -> None:
        """What blocks of these names hold, wherever they are found."""
        for index, block_hash in enumerate(hashes):
            block = contents[index * self.block_size : (index + 1) * self.block_size]
            assert self._contents_of.setdefault(block_hash, block) == block

    def _contents(self, sequence: SimulatedSequence, planned: list[int]) -> list[int]:
        contents = list(sequence.contents)
        for token in planned:
            key = (contents[-1] if contents else NOTHING, token, self._weights)
            contents.append(self._keys.setdefault(key, len(self._keys)))
        return contents

    def _plan_tokens(self, sequence: SimulatedSequence, count: int) -> list[int]:
        planned = [sequence.future.pop(0) for _ in range(min(count, len(sequence.future)))]
        while len(planned) < count:
            planned.append(self._next_token)
            self._next_token += 1
        return planned

    def _findable(self, sequence: SimulatedSequence) -> list[bytes]:
        """Names of a new sequence's full blocks that leave a token to compute."""
        return hash_blocks(self.root, sequence.future[:-1], self.block_size)

    def _named(self, sequence: SimulatedSequence) -> list[bytes]:
        return hash_blocks(self.root, sequence.tokens, self.block_size) if sequence.has_names else []


def check_contract(block_ops: BlockOps) -> None:
    """What whoever records moves owes, as far as one step's moves tell: rules 3 and 4 of `BlockOps`."""
    received = [destination for _, destination in (*block_ops.copy, *block_ops.swap_in, *block_ops.load)]
    assert len(received) == len(set(received)), f"a device block receives twice: {block_ops}"
    host = [destination for _, destination in block_ops.swap_out]
    assert len(host) == len(set(host)), f"a host block receives twice: {block_ops}"
    places = [place for _, place in block_ops.store]
    assert len(places) == len(set(places)), f"a place is stored to twice: {block_ops}"


def make_simulation(
    num_blocks=7,
    block_size=4,
    *,
    num_host_blocks=0,
    num_slots=0,
    watermark_blocks=0,
    manager=CacheManager,
    memories=Memories,
    tier=HostTier,
) -> CacheSimulation:
    """`manager`, `memories` and `tier` are classes: broken ones must be noticed."""
    connector = tier(num_slots) if num_slots else None
    return CacheSimulation(
        manager(num_blocks, block_size, watermark_blocks, num_host_blocks=num_host_blocks, connector=connector),
        memories,
    )
