"""Protocol of attention to keys that each token lists, chosen and listed on the device.

T: tokens; D: size of a key. Keys of groups: one key for `rate` tokens each, in the block of the last of them, at that
token's offset divided by the rate. Nothing is read back, so steps can be recorded.
"""

from typing import Protocol

import torch
from torch import Tensor

from spmd_worker.ops.attention.metadata import AttentionMetadata
from spmd_worker.ops.kernels.group_keys import GroupKeys


class ListedKeys(Protocol):
    """A layer's keys are [blocks, *block_shape] of a cache without values; `metadata` is of the step, or of those of
    its tokens that queries are of.
    """

    def positions(self, metadata: AttentionMetadata, block_size: int) -> Tensor:
        """int32 [T] on the device, below 0 of padding."""

    def write(
        self,
        values: Tensor,
        cache: Tensor,
        metadata: AttentionMetadata,
        block_size: int,
        rate: int = 1,
        cleared: Tensor | None = None,
    ) -> None:
        """Write values [T, N] to `cache` [blocks, places, N], of tokens that end groups of `rate`. Blocks that tokens
        begin are set to 0 in `cleared` [blocks, places, M].
        """

    def choose(
        self,
        queries: Tensor,
        weights: Tensor,
        keys: Tensor,
        metadata: AttentionMetadata,
        block_size: int,
        num_chosen: int,
        rate: int = 1,
    ) -> Tensor:
        """Numbers, int32 [T, `num_chosen`] ascending, of the keys of the highest scores that each token sees, ties by
        number, or of all that it sees, if there are no more. Scores are sums over heads of `weights`, float32 [T,
        heads], times relu of products of `queries` [T, heads, D] with `keys` [blocks, places, D].
        """

    def compress(
        self,
        rows: Tensor,
        bias: Tensor,
        metadata: AttentionMetadata,
        sizes: tuple[int, int],
        dtype: torch.dtype,
        *,
        overlaps: bool,
    ) -> Tensor:
        """Means [T, size] of the groups that tokens end, by a softmax of gates; `sizes`: the rate and the size. `rows`
        [blocks, block size, R] have a token's values and gates, to which `bias`, float32, is added; if it `overlaps`,
        those of the group before, too (compressed_entries.py). Rows of other tokens are arbitrary.
        """

    def attend(
        self,
        query: Tensor,
        keys: Tensor,
        metadata: AttentionMetadata,
        scale: float,
        value_size: int,
        groups: GroupKeys,
        window: int = 0,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Attention of queries [T, heads, D], each to the last `window` keys of tokens, its own included, then to those
        of `groups` -> [T, heads, `value_size`], the first numbers of keys. `sinks` as of `AttentionBackend.attend`.
        """
