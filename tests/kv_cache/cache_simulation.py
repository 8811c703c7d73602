"""A cache of cells and the sequences in it: what the manager decides is done here to visible contents.

One step: any mix of extend, fork and release, then `run_step`, which executes the copies, writes one unique value for
each planned token and reads every sequence back. `execute_copies` is a parameter, so a test can execute them wrongly.
"""

from dataclasses import dataclass, field

from kv_cache.block_ops import BlockOps
from kv_cache.block_table import BlockTable
from kv_cache.cache_manager import CacheManager


def copy_all_sources_first(cells: list[list[int]], block_ops: BlockOps) -> None:
    gathered = [list(cells[source]) for source, _ in block_ops.copy]
    for (_, destination), block in zip(block_ops.copy, gathered):
        cells[destination] = block


def copy_one_after_the_other(cells: list[list[int]], block_ops: BlockOps) -> None:
    for source, destination in block_ops.copy:
        cells[destination] = list(cells[source])


def copy_nothing(cells: list[list[int]], block_ops: BlockOps) -> None:
    del cells, block_ops


@dataclass
class SimulatedSequence:
    table: BlockTable
    mirror: BlockTable
    tokens: list[int] = field(default_factory=list)
    num_planned: int = 0


class CacheSimulation:
    def __init__(self, manager: CacheManager, execute_copies=copy_all_sources_first) -> None:
        self.manager = manager
        self.execute_copies = execute_copies
        self.cells = [[-1] * manager.block_size for _ in range(manager.num_blocks)]
        self.sequences: dict[str, SimulatedSequence] = {}
        self.next_token = 0

    def start(self, name: str) -> None:
        self.sequences[name] = SimulatedSequence(BlockTable(), BlockTable())

    def extend(self, name: str, num_new_tokens: int) -> bool:
        """Plan `num_new_tokens` more for a sequence without a plan; whether there was room."""
        sequence = self.sequences[name]
        first_token, num_tokens = len(sequence.tokens), len(sequence.tokens) + num_new_tokens
        num_needed = self.manager.num_new_blocks(sequence.table, first_token, num_tokens)
        num_free = self.manager.num_free_blocks
        assert self.manager.can_extend(sequence.table, first_token, num_tokens) == (num_needed <= num_free)
        if num_needed > num_free:
            return False
        sequence.mirror.apply(self.manager.extend(sequence.table, first_token, num_tokens))
        assert self.manager.num_free_blocks == num_free - num_needed
        assert self.manager.num_new_blocks(sequence.table, first_token, num_tokens) == 0
        sequence.num_planned = num_new_tokens
        return True

    def fork(self, name: str, child_name: str) -> None:
        parent = self.sequences[name]
        table = self.manager.fork(parent.table)
        self.sequences[child_name] = SimulatedSequence(table, BlockTable(list(table.block_ids)), list(parent.tokens))

    def release(self, name: str) -> None:
        sequence = self.sequences.pop(name)
        self.manager.release(sequence.table)
        assert sequence.table.block_ids == []

    def run_step(self) -> None:
        self.execute_copies(self.cells, self.manager.take_block_ops())
        assert self.manager.take_block_ops().is_empty
        for sequence in self.sequences.values():
            self._write(sequence)
        for name in self.sequences:
            assert self.read(name) == self.sequences[name].tokens, f"sequence {name} reads another's tokens"

    def _write(self, sequence: SimulatedSequence) -> None:
        for _ in range(sequence.num_planned):
            block_index, offset = divmod(len(sequence.tokens), self.manager.block_size)
            self.cells[sequence.mirror.block_ids[block_index]][offset] = self.next_token
            sequence.tokens.append(self.next_token)
            self.next_token += 1
        sequence.num_planned = 0

    def read(self, name: str) -> list[int]:
        sequence = self.sequences[name]
        flat = [cell for block in self.cells for cell in block]
        return [flat[sequence.table.slot(index, self.manager.block_size)] for index in range(len(sequence.tokens))]

    def check_integrity(self) -> None:
        self.manager.check_integrity(sequence.table for sequence in self.sequences.values())
        for sequence in self.sequences.values():
            assert sequence.mirror == sequence.table
