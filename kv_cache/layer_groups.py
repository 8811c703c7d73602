"""Groups of layers with block tables of their own, so that blocks behind a sliding window go back to the pool.

A block holds `block_size` tokens of one group's layers. All groups take their blocks from one pool, so memory goes
where rows need it: a row within its window needs as much as without groups, a longer one only the window in window
groups.

    layers   w w w w w f w w w w w f       window layers are dealt out in turn, the largest first, to as many
    group    1 2 3 4 5 0 1 2 3 4 5 0       groups as make all about as large: the largest one's bytes are a block's
    table    [f0 a0 b0 c0 d0 e0  f1 a1 b1 c1 d1 e1  ...]   entry i * num_groups + g: tokens of block i, group g

What holds:

1. A table has every group's entry for every block: entries are appended, copied on write, forked and sent together.
2. A token at position p sees positions from `first_visible(p)` on. Window groups drop the blocks before that of the
   first position that the row's next token sees: they release them, like the blocks of a row that ended. The table
   counts them (`BlockTable.num_dropped`); their entries are left over and may name others' blocks: no layer reads them.
3. The last computed token may be computed again (`Sequence.repeats_last`), so its window is kept too.
4. Blocks are dropped when a step is planned, before its decisions. Devices run steps in order, so whoever is given such
   a block writes it after the last step that read it.
5. A prefix of n blocks is found if full groups have all of them, and window groups those that the token behind sees.
   Each group's block has a name of its own, so an evicted one is missing in its group alone.
6. Keys that are given in place of a prompt's first tokens (prefix tuning) are fewer than a window, so none is dropped
   before they are written.
7. A layer may be two parts, one that later tokens need for a while and one that they need always: each is dealt as a
   layer is, and the latter parts are behind all layers (`CacheSpec.part_of`).
8. Without windows everything is as with one group: one entry a block, and nothing is dropped.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from kv_cache.block import BlockHash, num_blocks_for

MAX_GROUPS: Final = 8
"""More groups would fit uneven layers better, and cost the host more for each block."""
MAX_WASTE: Final = 0.125
"""Share of the memory that groups of different sizes may leave unused."""


@dataclass(frozen=True, slots=True)
class LayerGroups:
    """Groups 0 .. num_full - 1 keep all tokens, `num_windows` more those that later tokens see: `windows` has the
    layers' different windows, in tokens, below 0 the size of chunks (`AttentionBackend.attend`). A row has at most
    `num_step_tokens` tokens in a step.
    """

    num_full: int = 1
    num_windows: int = 0
    windows: tuple[int, ...] = ()
    num_step_tokens: int = 0

    def __post_init__(self) -> None:
        assert self.num_full >= 0, self
        assert self.num_groups >= 1, self
        assert bool(self.num_windows) == bool(self.windows) == bool(self.num_step_tokens), self
        assert 0 not in self.windows, f"a layer without a window is of a full group: {self}"

    @property
    def num_groups(self) -> int:
        return self.num_full + self.num_windows

    def first_visible(self, position: int) -> int:
        """First position that the token at `position` sees in some window group."""
        return min([position // -each * -each if each < 0 else max(position - each + 1, 0) for each in self.windows])

    @property
    def lookback(self) -> int:
        """Lower bound of how far a token sees: what `num_unseen` counts is at least so far behind."""
        return max([each for each in self.windows if each > 0], default=1)

    def num_unseen(self, position: int, block_size: int) -> int:
        """Number of leading blocks that tokens from `position` on do not see in window groups."""
        return self.first_visible(position) // block_size if self.windows else 0

    def num_window_blocks(self, block_size: int) -> int:
        """Most blocks that a row has in one window group: those of a step's tokens, and of all that the token before
        the first one sees.
        """
        return (self.num_step_tokens + max(map(abs, self.windows)) - 1) // block_size + 2

    def num_blocks(self, num_tokens: int, block_size: int, num_dropped: int = 0) -> int:
        """Most blocks that a row of `num_tokens` has at once, in all groups, if it has dropped some already."""
        num_full = num_blocks_for(num_tokens, block_size)
        if not self.num_windows:
            return self.num_full * num_full
        num_in_window = min(max(num_full - num_dropped, 0), self.num_window_blocks(block_size))
        return self.num_full * num_full + self.num_windows * num_in_window

    def names(self, block_hash: BlockHash) -> list[BlockHash]:
        """Name of each group's block of the tokens with this hash."""
        return [block_hash, *[BlockHash(block_hash + bytes((group,))) for group in range(1, self.num_groups)]]


ONE_GROUP: Final = LayerGroups()
"""All layers keep all tokens."""


class Grouping(NamedTuple):
    """Groups, and the group of each layer."""

    groups: LayerGroups
    group_of: tuple[int, ...]


def group_layers(sizes: Sequence[int], windows: Sequence[int], num_step_tokens: int) -> Grouping:
    """Deal layers out to the groups that leave the least memory unused, and to few. `sizes` are the bytes, or elements,
    that each layer keeps of a token, 0 for none; `windows` are as in `LayerGroups`, 0 for full attention.
    """
    full = [index for index, size in enumerate(sizes) if size and not windows[index]]
    windowed = [index for index, size in enumerate(sizes) if size and windows[index]]
    if not windowed:
        return Grouping(ONE_GROUP, (0,) * len(sizes))
    choices = [
        (num_full, num_windows)
        for num_full in (range(1, min(len(full), MAX_GROUPS) + 1) if full else (0,))
        for num_windows in range(1, min(len(windowed), MAX_GROUPS - num_full) + 1)
    ]

    def cost(counts: tuple[int, int]) -> tuple[int, int]:
        dealt = _deal(sizes, full, windowed, *counts)
        return sum(counts) * max(_sums(sizes, dealt, sum(counts))), sum(counts)

    num_full, num_windows = min(choices, key=cost)
    distinct = tuple(dict.fromkeys(windows[index] for index in windowed))
    groups = LayerGroups(num_full, num_windows, distinct, num_step_tokens)
    return Grouping(groups, _deal(sizes, full, windowed, num_full, num_windows))


def wasted_share(sizes: Sequence[int], grouping: Grouping) -> float:
    """Share of the memory of a row below its window that its blocks leave unused."""
    num_groups = grouping.groups.num_groups
    return 1 - sum(sizes) / (num_groups * max(_sums(sizes, grouping.group_of, num_groups)))


def _sums(sizes: Sequence[int], group_of: Sequence[int], num_groups: int) -> list[int]:
    sums = [0] * num_groups
    for size, group in zip(sizes, group_of, strict=True):
        sums[group] += size
    return sums


def _deal(
    sizes: Sequence[int], full: Sequence[int], windowed: Sequence[int], num_full: int, num_windows: int
) -> tuple[int, ...]:
    """Group of each layer, the largest dealt first, each to the smallest group so far: layers of one size go round in
    turn. Layers that keep nothing are in the first group.
    """
    found, sums = [0] * len(sizes), [0] * (num_full + num_windows)
    for indices, groups in ((full, range(num_full)), (windowed, range(num_full, len(sums)))):
        for index in sorted(indices, key=lambda each: -sizes[each]):
            found[index] = min(groups, key=sums.__getitem__)
            sums[found[index]] += sizes[index]
    return tuple(found)
