"""Which sequences of a step are computed together for the blocks that they share: native/shared_blocks.h, and the plan
of native/attention.cpp that is made of it.
"""

import ctypes
from dataclasses import dataclass
from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from probe_library import divided_work

TILE, BLOCK = 64, 16
Tables = list[list[int]]


@dataclass(frozen=True)
class Group:
    sequences: tuple[int, ...]
    num_tiles: int


@dataclass(frozen=True)
class Bundle:
    num_items: int
    num_tiles: int
    chunk: int


@pytest.fixture(scope="module")
def probe():
    loaded = divided_work()
    loaded.grouped_blocks.restype = loaded.planned_bundles.restype = ctypes.c_int64
    return loaded


def numbers(values: list[int]) -> "ctypes.Array[ctypes.c_int64]":
    return (ctypes.c_int64 * max(1, len(values)))(*values)


def laid_out(tables: Tables) -> tuple["ctypes.Array[ctypes.c_int64]", ctypes.c_int64]:
    """Padded with zeros, and how far it is from one to the next."""
    stride = max(map(len, tables))
    return numbers([block for table in tables for block in (*table, *[0] * (stride - len(table)))]), ctypes.c_int64(
        stride
    )


def groups_of(probe, tables: Tables, whole: list[int], most: int, block_size: int = BLOCK) -> list[Group]:
    count = len(tables)
    members, sizes, num_tiles = (numbers([0] * count) for _ in range(3))
    sizes_of = map(ctypes.c_int64, (block_size,))
    more = map(ctypes.c_int64, (count, most))
    num_groups = probe.grouped_blocks(*laid_out(tables), *sizes_of, numbers(whole), *more, members, sizes, num_tiles)
    found, place = [], 0
    for size, tiles in list(zip(sizes, num_tiles, strict=True))[:num_groups]:
        found.append(Group(tuple(members[place : place + size]), tiles))
        place += size
    assert place == count
    return found


def bundles_of(
    probe,
    tables: Tables,
    lengths: list[int],
    num_tokens: list[int] | None = None,
    *,
    num_kv_heads: int = 2,
    group_size: int = 4,
    window: int = 0,
    ahead: int = 0,
    num_threads: int = 1,
) -> list[Bundle]:
    starts = [0, *accumulate(num_tokens or [1] * len(tables))]
    found = [numbers([0] * 4096) for _ in range(3)]
    more = map(ctypes.c_int64, (len(tables), num_kv_heads, group_size, window, ahead, num_threads))
    arguments = (*laid_out(tables), ctypes.c_int64(BLOCK), numbers(starts), numbers(lengths), *more)
    count = probe.planned_bundles(*arguments, *found)
    return [Bundle(*each) for each in zip(*(list(array[:count]) for array in found), strict=True)]


def behind(prompt: list[int], count: int, first: int = 1000) -> Tables:
    """Sequences with a block of their own each."""
    return [[*prompt, first + number] for number in range(count)]


def tiles(first: int, count: int) -> list[int]:
    """The blocks of so many tiles."""
    return list(range(first, first + count * TILE // BLOCK))


def test_what_begins_alike_is_one_group(probe):
    tables = behind(tiles(5, 1), 3)
    tables.insert(2, [*tiles(20, 1), 9])
    assert groups_of(probe, tables, [1] * 4, most=8) == [Group((0, 1, 3), 1), Group((2,), 0)]


def test_a_sequence_that_does_not_decode_shares_nothing(probe):
    assert groups_of(probe, behind(tiles(5, 1), 3), [1, 0, 1], most=8) == [Group((0, 2), 1), Group((1,), 0)]


def test_part_of_a_tile_is_not_shared(probe):
    tables = [[5, 6, 7, 20, 1], [5, 6, 7, 21, 2]]
    assert groups_of(probe, tables, [1, 1], most=8) == [Group((0,), 0), Group((1,), 0)]


def test_a_large_block_holds_several_tiles(probe):
    assert groups_of(probe, [[5, 1], [5, 2]], [4, 5], most=8, block_size=256) == [Group((0, 1), 4)]


def test_no_group_has_more_than_the_most(probe):
    tables = behind(tiles(5, 1), 5)
    assert [group.sequences for group in groups_of(probe, tables, [1] * 5, most=2)] == [(0, 1), (2, 3), (4,)]
    assert all(group.num_tiles == 0 for most in (0, 1) for group in groups_of(probe, tables, [1] * 5, most))


def test_no_system_prompt_parts_samples_of_a_prompt(probe):
    """Whichever comes first, and in turns with samples of another."""
    system, long, short = tiles(1, 1), tiles(100, 3), tiles(200, 2)
    lone = [*system, *tiles(300, 3), 8]
    tables = [lone, *behind([*system, *long], 3)]
    assert groups_of(probe, tables, [4] * 4, most=8) == [Group((1, 2, 3), 4), Group((0,), 0)]
    turns = [
        behind([*system, *part], 2, first)[number] for number in range(2) for part, first in ((long, 1), (short, 5))
    ]
    assert groups_of(probe, turns, [4, 3, 4, 3], most=8) == [Group((0, 2), 4), Group((1, 3), 3)]
    assert groups_of(probe, [*turns, lone], [4, 3, 4, 3, 4], most=8)[-1] == Group((4,), 0)
    # Those that no samples are of share the system prompt.
    others = [[*system, *tiles(400 + 10 * number, 2), 9] for number in range(3)]
    assert groups_of(probe, [*turns, *others], [4, 3, 4, 3, 3, 3, 3], most=8) == [
        Group((4, 5, 6), 1),
        Group((0, 2), 4),
        Group((1, 3), 3),
    ]


def test_small_shared_part_is_not_grouped(probe):
    tables = [[*tiles(1, 1), *tiles(100 * number, 4), 9] for number in range(1, 3)]
    assert groups_of(probe, tables, [5, 5], most=8) == [Group((0,), 0), Group((1,), 0)]
    assert groups_of(probe, tables, [4, 5], most=8) == [Group((0, 1), 1)]


blocks = st.integers(0, 3)


@st.composite
def steps(draw):
    """Tables that often begin alike, in a vocabulary of few blocks."""
    block_size = draw(st.sampled_from([2, 16, 64, 256]))
    per_tile = max(1, TILE // block_size)
    tables, whole = [], []
    for _ in range(draw(st.integers(1, 12))):
        num_tiles = draw(st.integers(0, 5))
        kind = [draw(blocks) for _ in range(num_tiles)]
        tables.append([block * 100 + place for block in kind for place in range(per_tile)] + [0] * per_tile)
        whole.append(num_tiles if block_size <= TILE else num_tiles * (block_size // TILE))
    return tables, whole, draw(st.integers(0, 6)), block_size


@settings(max_examples=200, deadline=None)
@given(steps())
def test_groups_have_each_sequence_once(probe, step):
    tables, whole, most, block_size = step
    found = groups_of(probe, tables, whole, most, block_size)
    assert sorted(sequence for group in found for sequence in group.sequences) == list(range(len(tables)))
    order = [(-len(group.sequences), group.sequences[0]) for group in found]
    assert order == sorted(order)
    for group in found:
        assert list(group.sequences) == sorted(group.sequences)
        if len(group.sequences) == 1:
            assert group.num_tiles == 0
            continue
        assert len(group.sequences) <= most
        assert 0 < group.num_tiles <= min(whole[sequence] for sequence in group.sequences)
        num_blocks = -(-group.num_tiles * TILE // block_size)
        assert len({tuple(tables[sequence][:num_blocks]) for sequence in group.sequences}) == 1


def shared_of(bundles: list[Bundle]) -> list[tuple[int, int]]:
    return [(bundle.num_items, bundle.num_tiles) for bundle in bundles if bundle.num_items > 1]


def test_attention_takes_samples_together_head_by_head(probe):
    tables = behind(tiles(1, 3), 8)
    assert shared_of(bundles_of(probe, tables, [193] * 8)) == [(4, 3)] * 4
    # Each thread has several bundles, or nothing is shared.
    assert shared_of(bundles_of(probe, tables, [193] * 8, num_threads=2)) == [(2, 3)] * 8
    assert shared_of(bundles_of(probe, tables, [193] * 8, num_threads=3)) == []
    # As many as have room: 64 rows.
    assert (
        shared_of(bundles_of(probe, tables, [193] * 8, num_kv_heads=8, group_size=20)) == [(3, 3)] * 16 + [(2, 3)] * 8
    )
    assert shared_of(bundles_of(probe, tables, [193] * 8, num_kv_heads=8, group_size=33)) == []


def test_partly_visible_tiles_are_not_shared(probe):
    tables = behind(tiles(1, 3), 8)
    # A token that stands at the end of a tile sees it whole, but it is its last.
    assert shared_of(bundles_of(probe, tables, [192] * 8)) == [(4, 2)] * 4
    # Prompts' chunks, tokens that see what is behind them, and windows that have passed the first key.
    assert shared_of(bundles_of(probe, tables, [193] * 8, [2] * 8)) == []
    assert shared_of(bundles_of(probe, tables, [193] * 8, ahead=8)) == []
    assert shared_of(bundles_of(probe, tables, [193] * 8, window=192)) == []
    assert shared_of(bundles_of(probe, tables, [193] * 8, window=193)) == [(4, 3)] * 4


def test_large_bundles_come_first(probe):
    samples, strangers = behind(tiles(1, 3), 8), [[*tiles(100 + 20 * number, 3), 9] for number in range(40)]
    prompt = [[*tiles(2000, 3), 9]]
    tables, num_tokens = [*strangers, *samples, *prompt], [1] * 48 + [130]
    found = bundles_of(probe, tables, [193] * 49, num_tokens, num_kv_heads=1, num_threads=2)
    sizes = [bundle.num_items for bundle in found]
    # A prompt's 130 tokens of 4 heads are 9 items.
    assert sizes == sorted(sizes, reverse=True)
    assert sum(sizes) == 40 + 8 + 9
    assert sizes[0] == 6
    chunks = [[each.num_items for each in found if each.chunk == chunk] for chunk in range(found[-1].chunk + 1)]
    assert sum(map(len, chunks)) == len(found)
    # Two threads, eight chunks each, or a bundle that is more than a chunk.
    assert all(sum(chunk) <= (40 + 8 + 9) // 16 or len(chunk) == 1 for chunk in chunks)
    assert max(map(len, chunks)) == (40 + 8 + 9) // 16
