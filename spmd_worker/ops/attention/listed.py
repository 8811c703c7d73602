"""Protocol of attention to keys that each token of a step lists, chosen and listed on the device.

T: tokens; D: size of a key. Keys of groups: one key for `rate` tokens each, in the block of the last of them, at that
token's offset divided by the rate. Nothing is read back, so steps can be recorded.
"""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from spmd_worker.ops.attention.metadata import AttentionMetadata
from spmd_worker.ops.kernels.group_keys import GroupKeys


class ListedKeys(Protocol):
    """A step's tokens, or those that queries are of. A layer's keys are [blocks, *block_shape] of a cache without
    values.
    """

    @property
    def positions(self) -> Tensor:
        """int32 [T] on the device, below 0 of padding."""

    def write(
        self, values: Tensor, cache: Tensor, block_size: int, rate: int = 1, cleared: Tensor | None = None
    ) -> None:
        """Write values [T, N] to `cache` [blocks, places, N], of tokens that end groups of `rate`. Blocks that tokens
        begin are set to 0 in `cleared` [blocks, places, M].
        """

    def choose(
        self, queries: Tensor, weights: Tensor, keys: Tensor, block_size: int, num_chosen: int, rate: int = 1
    ) -> Tensor:
        """Numbers, int32 [T, `num_chosen`] ascending, of the keys of the highest scores that each token sees, ties by
        number, or of all that it sees, if there are no more. Scores are sums over heads of `weights`, float32 [T,
        heads], times relu of products of `queries` [T, heads, D] with `keys` [blocks, places, D].
        """

    def compress(
        self, rows: Tensor, bias: Tensor, rate: int, size: int, *, overlaps: bool, dtype: torch.dtype
    ) -> Tensor:
        """Means [T, `size`] of the groups of `rate` that tokens end, by a softmax of gates. `rows` [blocks, block size,
        R] have a token's values and gates, to which `bias`, float32, is added; if it `overlaps`, those of the group
        before, too (compressed_entries.py). Means of other tokens are arbitrary.
        """

    def attend(
        self,
        queries: Tensor,
        keys: Tensor,
        scale: float,
        value_size: int,
        groups: GroupKeys,
        window: int = 0,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Attention of queries [T, H, D], each to the last `window` keys of tokens, its own included, then to those of
        `groups`, both ascending -> [T, H, `value_size`], the first numbers of keys. `sinks` as of
        `AttentionBackend.attend`.
        """


ListKeys = Callable[[AttentionMetadata, int], ListedKeys]
"""The tokens of a step, or some of them, with blocks of a size."""
