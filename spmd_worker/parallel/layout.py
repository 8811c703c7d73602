"""Which rank does what: world = data x pipeline x tensor, tensor innermost.

Pure arithmetic, and the one place where the factorisation is checked. Knows nothing about torch, processes or networks.
"""

from dataclasses import dataclass
from typing import Final

from spmd_worker.config import ConfigError
from spmd_worker.model_shape import ModelShape

VOCABULARY_ALIGNMENT: Final = 64
"""Vocabulary shards are padded to a multiple of this many rows, which kernels like and which halves six times."""


@dataclass(frozen=True, slots=True)
class RankLayout:
    """Sizes of the three axes. Rank = (data * pipeline_size + pipeline) * tensor_size + tensor."""

    tensor_parallel_size: int
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return self.tensor_parallel_size * self.pipeline_parallel_size * self.data_parallel_size

    def tensor_rank(self, rank: int) -> int:
        """Place in the tensor-parallel group."""
        return rank % self.tensor_parallel_size

    def pipeline_rank(self, rank: int) -> int:
        """Stage of the pipeline."""
        return rank // self.tensor_parallel_size % self.pipeline_parallel_size

    def data_rank(self, rank: int) -> int:
        """Which replica."""
        return rank // (self.tensor_parallel_size * self.pipeline_parallel_size)

    def tensor_groups(self) -> list[list[int]]:
        """Ranks that share each layer's weights, one list a group, in order."""
        size = self.tensor_parallel_size
        return [list(range(start, start + size)) for start in range(0, self.world_size, size)]

    def pipeline_groups(self) -> list[list[int]]:
        """Ranks that hold the same shard of successive stages, one list a group."""
        stride, replica_size = self.tensor_parallel_size, self.tensor_parallel_size * self.pipeline_parallel_size
        return [
            list(range(start + offset, start + replica_size, stride))
            for start in range(0, self.world_size, replica_size)
            for offset in range(stride)
        ]


def check_world_size(layout: RankLayout, world_size: int) -> None:
    """Raise ConfigError unless the launcher started as many ranks as the layout has."""
    if layout.world_size != world_size:
        raise ConfigError(
            f"parallel.tensor_parallel_size={layout.tensor_parallel_size} x parallel.pipeline_parallel_size="
            f"{layout.pipeline_parallel_size} x parallel.data_parallel_size={layout.data_parallel_size} is "
            f"{layout.world_size} ranks, but {world_size} were started: start {layout.world_size} "
            f"(torchrun --nproc-per-node) or set parallel.tensor_parallel_size to {world_size}"
        )


def check_whole_engines(layout: RankLayout, world_size: int) -> None:
    """Raise ConfigError unless the ranks that were started make one or several whole engines of this layout."""
    if world_size % layout.world_size:
        raise ConfigError(
            f"parallel.tensor_parallel_size={layout.tensor_parallel_size} x parallel.pipeline_parallel_size="
            f"{layout.pipeline_parallel_size} x parallel.data_parallel_size={layout.data_parallel_size} is "
            f"{layout.world_size} ranks an engine, but {world_size} were started: start a multiple of "
            f"{layout.world_size} (torchrun --nproc-per-node)"
        )


def in_every_engine(groups: list[list[int]], layout: RankLayout, world_size: int) -> list[list[int]]:
    """The groups of one engine, for each engine of the world: ranks k * size to (k + 1) * size are engine k."""
    starts = range(0, world_size, layout.world_size)
    return [[start + rank for rank in ranks] for start in starts for ranks in groups]


def check_divides(layout: RankLayout, shape: ModelShape) -> None:
    """Raise ConfigError unless every shard is whole; the message lists the sizes that are.

    Query heads must divide. Key-value heads must divide or, when ranks outnumber them, each must serve a whole number
    of ranks. The feed-forward is cut into nearly equal parts and the vocabulary is padded, so these always divide.
    """
    size = layout.tensor_parallel_size
    problem = _shard_problem(size, shape)
    if problem:
        valid = [str(each) for each in range(1, shape.num_heads + 1) if not _shard_problem(each, shape)]
        raise ConfigError(
            f"parallel.tensor_parallel_size={size} does not divide this model: {problem}; "
            f"sizes that do are {_spoken(valid)}"
        )


def _shard_problem(size: int, shape: ModelShape) -> str:
    if shape.num_heads % size:
        return f"it has {shape.num_heads} attention heads"
    if shape.num_kv_heads % size and size % shape.num_kv_heads:
        return f"it has {shape.num_kv_heads} key-value heads"
    if shape.intermediate_size < size:
        return f"its feed-forward has {shape.intermediate_size} columns"
    return ""


def _spoken(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def shard_range(total: int, size: int, rank: int) -> tuple[int, int]:
    """The part (start, stop) of `total` items that `rank` of `size` owns: nearly equal parts, earlier ones larger."""
    base, extra = divmod(total, size)
    start = rank * base + min(rank, extra)
    return start, start + base + (rank < extra)


def vocabulary_rows(vocab_size: int, num_shards: int) -> int:
    """Rows of each vocabulary shard: an equal part, padded to a multiple of `VOCABULARY_ALIGNMENT`."""
    per_shard = -(-vocab_size // num_shards)
    return -(-per_shard // VOCABULARY_ALIGNMENT) * VOCABULARY_ALIGNMENT
