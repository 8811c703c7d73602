"""Sequences that decode behind the same blocks are computed together there, and have the bits they have alone.

What they are compared with are the same sequences, each with a copy of those blocks of its own, and each alone.
"""

import math
from dataclasses import dataclass, replace

import pytest
import torch
from native_builds import library_for
from native_libraries import each_library
from paged_steps import Sequence, Sizes, error, formula, run, sequence, together
from torch import Tensor

from spmd_worker.ops.attention.cpu import CpuBackend

WHOLE = 10_000
FLOAT32, BFLOAT16 = torch.float32, torch.bfloat16
each_dtype = pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16], ids=["float32", "bfloat16"])


@dataclass(frozen=True)
class Branch:
    """A sequence of `length` tokens, of which the first `num_shared` are those of an earlier one."""

    length: int
    of: int = 0
    num_shared: int = 0


def samples(*lengths: int, num_shared: int) -> list[Branch]:
    """Of one prompt."""
    return [Branch(lengths[0]), *(Branch(length, 0, num_shared) for length in lengths[1:])]


# A prompt behind a system prompt, two samples of each, in turns, and one that has nothing in common with them.
NESTED = [
    Branch(300),
    Branch(270, 0, 128),
    Branch(290, 0, 256),
    Branch(200),
    Branch(281, 1, 256),
    Branch(331, 0, 256),
    Branch(261, 1, 256),
]


@pytest.fixture(autouse=True)
def one_thread():
    """The fewer threads, the more sequences are computed together."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def grow(branches: list[Branch], sizes: Sizes) -> tuple[list[Sequence], list[Tensor]]:
    """The sequences, and tables in which they have whole blocks in common."""
    sequences: list[Sequence] = []
    tables: list[list[int]] = []
    num_blocks = 0
    for seed, branch in enumerate(branches):
        one = sequence(branch.length, sizes, seed)
        shared_blocks = branch.num_shared // sizes.block_size
        if branch.num_shared:
            parent = sequences[branch.of].merged
            one = replace(one, merged=torch.cat((parent[: branch.num_shared], one.merged[branch.num_shared :])))
        count = -(-branch.length // sizes.block_size) - shared_blocks
        own = range(num_blocks, num_blocks + count)
        tables.append([*(tables[branch.of][:shared_blocks] if shared_blocks else ()), *own])
        sequences.append(one)
        num_blocks += count
    return sequences, [torch.tensor(table) for table in tables]


def backend_for(instruction_set: str, sizes: Sizes) -> CpuBackend:
    return CpuBackend(library_for(instruction_set), sizes.dtype, (sizes.head_size,), sizes.block_size)


def assert_sharing_changes_no_bit(instruction_set: str, branches: list[Branch], sizes: Sizes) -> list[Tensor]:
    backend = backend_for(instruction_set, sizes)
    sequences, tables = grow(branches, sizes)
    last_chunks = [1] * len(sequences)
    apart = together(backend, sequences, last_chunks)
    shared = together(backend, sequences, last_chunks, tables)
    for number, (one, here, there) in enumerate(zip(sequences, shared, apart, strict=True)):
        assert torch.equal(here, there), number
        assert torch.equal(here, run(backend, one, WHOLE)[-1:]), number
        # Of one token's numbers, whose largest is not much larger than the others.
        assert error(here, formula(one)[-1:]) < (4e-6 if sizes.dtype == FLOAT32 else 8e-3), number
    return shared


@pytest.mark.gate("16-1-*-native", "16-3-*", "16-4-float32-*", "16-7-bfloat16-native", "64-3-float32-native")
@pytest.mark.guarantee("A common beginning is read together, no bit changes")
@each_library
@each_dtype
@pytest.mark.parametrize(
    ("block_size", "group_size"),
    [
        *((16, group_size) for group_size in (1, 3, 4)),
        *(pytest.param(*case, marks=pytest.mark.matrix) for case in ((16, 7), (64, 3))),
        *(pytest.param(64, group_size, marks=pytest.mark.stress) for group_size in (1, 4, 7)),
    ],
)
def test_a_common_beginning_changes_no_bit(instruction_set, dtype, group_size, block_size):
    sizes = Sizes(dtype=dtype, group_size=group_size, block_size=block_size)
    assert_sharing_changes_no_bit(instruction_set, NESTED, sizes)


@each_library
@each_dtype
def test_distance_bias_is_of_each_sequences_own_position(instruction_set, dtype):
    """Rows that share a tile are at different distances from its keys."""
    sizes = Sizes(dtype=dtype, group_size=1, head_size=32, max_distance=80)
    assert_sharing_changes_no_bit(instruction_set, NESTED, sizes)


@pytest.mark.gate("8-*", "2-*-native", "128-bfloat16-native")
@each_library
@each_dtype
@pytest.mark.parametrize("block_size", [2, 8, pytest.param(128, marks=pytest.mark.matrix)])
def test_nor_do_blocks_of_another_size(instruction_set, dtype, block_size):
    sizes = Sizes(dtype=dtype, block_size=block_size)
    assert_sharing_changes_no_bit(instruction_set, samples(150, 129, 193, 131, 200, num_shared=128), sizes)


@pytest.mark.gate("*-native", "heads-bfloat16-*")
@each_library
@each_dtype
@pytest.mark.parametrize(
    "changes",
    [{"window": 160}, {"has_sinks": True}, {"score_cap": 3.0}, {"head_size": 80, "num_kv_heads": 3}],
    ids=["window", "sinks", "cap", "heads"],
)
def test_nor_do_windows_sinks_bounds_and_heads(instruction_set, dtype, changes):
    """With the window, some sequences see the common tokens whole and others do not."""
    lengths = (230, 150, 161, 140, 159, 160, 131)
    sizes = replace(Sizes(dtype=dtype, group_size=3), **changes)
    assert_sharing_changes_no_bit(instruction_set, samples(*lengths, num_shared=128), sizes)


@pytest.mark.gate("*-native", "float32-x86-64-v3")
@each_library
@each_dtype
def test_more_samples_than_one_thread_takes_at_once(instruction_set, dtype):
    lengths = [131 + 7 * number % 60 for number in range(50)]
    sizes = Sizes(dtype=dtype, num_kv_heads=2, group_size=4, head_size=32)
    assert_sharing_changes_no_bit(instruction_set, samples(*lengths, num_shared=128), sizes)


@each_library
@each_dtype
def test_chunks_of_prompts_beside_them_change_no_bit(instruction_set, dtype):
    sizes = Sizes(dtype=dtype, group_size=3)
    backend = backend_for(instruction_set, sizes)
    sequences, tables = grow(NESTED, sizes)
    last_chunks = [1, 1, 66, 1, 1, 3, 1]
    for here, there in zip(
        together(backend, sequences, last_chunks, tables), together(backend, sequences, last_chunks), strict=True
    ):
        assert torch.equal(here, there)


@each_library
@each_dtype
def test_threads_change_no_bit(instruction_set, dtype):
    """How many sequences are computed together depends on the number of threads."""
    sizes = Sizes(dtype=dtype, group_size=3)
    results = [assert_sharing_changes_no_bit(instruction_set, NESTED, sizes)]
    backend = backend_for(instruction_set, sizes)
    sequences, tables = grow(NESTED, sizes)
    for num_threads in (2, 3):
        torch.set_num_threads(num_threads)
        results.append(together(backend, sequences, [1] * len(sequences), tables))
    for one, *others in zip(*results, strict=True):
        assert all(torch.equal(one, other) for other in others)


@each_library
@each_dtype
def test_private_block_between_shared_ones_is_read(instruction_set, dtype):
    """Blocks that begin alike and differ further on: in the first tile, in the second, in the last block of it."""
    sizes = Sizes(dtype=dtype, group_size=3)
    backend = backend_for(instruction_set, sizes)
    sequences, tables = grow(samples(*[140] * 9, num_shared=128), sizes)
    num_blocks = 1 + max(int(table.max()) for table in tables)
    for number, place in enumerate((1, 3, 4, 7), start=1):
        changed = sequences[number].merged.clone()
        changed[16 * place : 16 * place + 16] = sequence(16, sizes, seed=99 + number).merged
        sequences[number] = replace(sequences[number], merged=changed)
        tables[number][place] = num_blocks + number
    for one, result in zip(sequences, together(backend, sequences, [1] * 9, tables), strict=True):
        assert torch.equal(result, run(backend, one, WHOLE)[-1:])


@each_library
@each_dtype
def test_overflowed_sequence_leaves_other_sequences_unchanged(instruction_set, dtype):
    sizes = Sizes(dtype=dtype, group_size=3)
    backend = backend_for(instruction_set, sizes)
    sequences, tables = grow(samples(150, 129, 193, 131, num_shared=128), sizes)
    healthy = together(backend, sequences, [1] * 4, tables)
    broken = sequences[2].merged.clone()
    broken[130:] = math.nan
    sequences[2] = replace(sequences[2], merged=broken)
    for number, (before, after) in enumerate(zip(healthy, together(backend, sequences, [1] * 4, tables), strict=True)):
        assert after.isnan().all() if number == 2 else torch.equal(before, after)


@pytest.mark.control("A common beginning is read together, no bit changes")
@each_dtype
def test_the_common_blocks_are_what_is_read(dtype):
    """The control of all above: where the tables have blocks in common that the sequences do not, results differ."""
    sizes = Sizes(dtype=dtype, group_size=3)
    backend = backend_for("native", sizes)
    sequences, tables = grow(samples(150, 129, 193, num_shared=128), sizes)
    other = sequence(193, sizes, seed=7)
    apart = together(backend, [*sequences[:2], other], [1] * 3)
    mixed = together(backend, [*sequences[:2], other], [1] * 3, tables)
    # The last one's prompt was written last, over the blocks of all.
    assert not torch.equal(mixed[0], apart[0])
    assert not torch.equal(mixed[1], apart[1])
    assert torch.equal(mixed[2], apart[2])
