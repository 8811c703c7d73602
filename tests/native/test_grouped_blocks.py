"""Which sequences of a step are computed together for the blocks that they share: native/shared_blocks.h by itself."""

import ctypes
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spmd_worker.native import build

TILE = 64


@dataclass(frozen=True)
class Group:
    sequences: tuple[int, ...]
    num_tiles: int


@pytest.fixture(scope="module")
def probe(tmp_path_factory):
    library = tmp_path_factory.mktemp("probe") / "grouped_blocks.so"
    compiler, source = build._compilers()[0], Path(__file__).with_name("grouped_blocks.cpp")
    folder = Path(build.__file__).parent
    command = [*compiler, "-std=c++17", "-Wall", "-Wextra", "-Werror", "-O1", "-fPIC", "-shared", f"-I{folder}"]
    subprocess.run([*command, str(source), "-o", str(library)], check=True, timeout=240)
    call = ctypes.CDLL(str(library)).grouped_blocks
    call.restype = ctypes.c_int64
    return call


def groups_of(probe, tables: list[list[int]], whole: list[int], most: int, block_size: int = 16) -> list[Group]:
    stride = max(map(len, tables), default=1)
    flat = [block for table in tables for block in (*table, *[0] * (stride - len(table)))]
    count = len(tables)
    arrays = [(ctypes.c_int64 * max(1, count))() for _ in range(3)]
    num_groups = probe(
        (ctypes.c_int64 * len(flat))(*flat),
        *map(ctypes.c_int64, (stride, block_size, TILE)),
        (ctypes.c_int64 * count)(*whole),
        *map(ctypes.c_int64, (count, most)),
        *arrays,
    )
    members, sizes, num_tiles = map(list, arrays)
    found, place = [], 0
    for size, tiles in list(zip(sizes, num_tiles, strict=True))[:num_groups]:
        found.append(Group(tuple(members[place : place + size]), tiles))
        place += size
    assert place == count
    return found


def test_what_begins_alike_is_one_group(probe):
    prompt = [5, 6, 7, 8]
    tables = [[*prompt, 20], [*prompt, 21], [1, 2, 3, 4, 9], [*prompt, 22]]
    assert groups_of(probe, tables, [1] * 4, most=8) == [Group((0, 1, 3), 1), Group((2,), 0)]


def test_a_sequence_that_does_not_decode_shares_nothing(probe):
    tables = [[5, 6, 7, 8, 20 + number] for number in range(3)]
    assert groups_of(probe, tables, [1, 0, 1], most=8) == [Group((0, 2), 1), Group((1,), 0)]


def test_part_of_a_tile_is_not_shared(probe):
    tables = [[5, 6, 7, 20, 1], [5, 6, 7, 21, 2]]
    assert groups_of(probe, tables, [1, 1], most=8) == [Group((0,), 0), Group((1,), 0)]


def test_a_large_block_holds_several_tiles(probe):
    assert groups_of(probe, [[5, 1], [5, 2]], [4, 5], most=8, block_size=256) == [Group((0, 1), 4)]


def test_no_group_has_more_than_the_most(probe):
    tables = [[5, 6, 7, 8, 20 + number] for number in range(5)]
    assert [group.sequences for group in groups_of(probe, tables, [1] * 5, most=2)] == [(0, 1), (2, 3), (4,)]
    assert all(group.num_tiles == 0 for group in groups_of(probe, tables, [1] * 5, most=0))


def test_samples_of_a_prompt_do_not_give_it_up_for_a_system_prompt(probe):
    """Two of three tiles and a third that shares one: together they would save two reads of a tile; apart, three."""
    system, prompt = [1, 2, 3, 4], list(range(5, 13))
    tables = [[*system, *prompt, 20], [*system, *prompt, 21], [*system, *range(30, 38), 22], [*system, *range(40, 49)]]
    found = groups_of(probe, tables, [3] * 4, most=8)
    assert found == [Group((0, 1), 3), Group((2, 3), 1)]


blocks = st.integers(0, 3)


@st.composite
def steps(draw):
    """Tables that often begin alike, in a vocabulary of few blocks."""
    block_size = draw(st.sampled_from([2, 16, 64, 256]))
    per_tile = max(1, TILE // block_size)
    tables, whole = [], []
    for _ in range(draw(st.integers(1, 9))):
        num_tiles = draw(st.integers(0, 5))
        kind = [draw(blocks) for _ in range(num_tiles)]
        tables.append([block * 100 + place for block in kind for place in range(per_tile)] + [0] * per_tile)
        whole.append(num_tiles if block_size <= TILE else num_tiles * (block_size // TILE))
    return tables, whole, draw(st.integers(0, 6)), block_size


@settings(max_examples=200, deadline=None)
@given(steps())
def test_groups_hold_each_sequence_once_and_share_what_they_say(probe, step):
    tables, whole, most, block_size = step
    found = groups_of(probe, tables, whole, most, block_size)
    assert sorted(sequence for group in found for sequence in group.sequences) == list(range(len(tables)))
    assert [group.sequences[0] for group in found] == sorted(group.sequences[0] for group in found)
    for group in found:
        assert list(group.sequences) == sorted(group.sequences)
        if len(group.sequences) == 1:
            assert group.num_tiles == 0
            continue
        assert len(group.sequences) <= most
        assert 0 < group.num_tiles <= min(whole[sequence] for sequence in group.sequences)
        num_blocks = -(-group.num_tiles * TILE // block_size)
        assert len({tuple(tables[sequence][:num_blocks]) for sequence in group.sequences}) == 1
