"""Scores of a step's queries and keys with embedded distances, an argument of attention.

T: tokens; Hq: query heads of this rank; D: head size.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class DistanceScores:
    """Products of a step's queries and keys with embedded distances (https://arxiv.org/abs/2006.03654), not scaled. W:
    embedded distances; L: tokens of the longest sequence, or more.

    `of_queries` and `of_keys` [T, Hq, W], of the queries' dtype and with the same strides, columns contiguous; either
    may be None. `columns` int32 [2 * L - 1]: the column of a key at position j and a query at i is number L - 1 + j -
    i. Sequences are complete, and each query head has a key-value head of its own.
    """

    of_queries: Tensor | None
    of_keys: Tensor | None
    columns: Tensor

    def check(self, query: Tensor, query_starts: Sequence[int], lengths: Sequence[int]) -> None:
        """Raise AssertionError unless they are of these queries [T, Hq, D] of complete sequences."""
        tables = self.tables
        for each in tables:
            assert each.shape[:2] == query.shape[:2], (each.shape, query.shape)
            assert each.dtype == query.dtype, (each.dtype, query.dtype)
            assert each.stride() == tables[0].stride(), (each.stride(), tables[0].stride())
            assert each.stride(2) == 1, each.stride()
        assert self.columns.dtype == torch.int32, self.columns.dtype
        assert self.columns.is_contiguous(), self.columns.stride()
        assert self.columns.shape[0] >= 2 * max(lengths, default=1) - 1, self.columns.shape
        assert self.columns.shape[0] % 2 == 1, self.columns.shape
        counts = [end - start for start, end in pairwise(query_starts)]
        assert counts == [*lengths], "sequences are complete"

    @property
    def tables(self) -> tuple[Tensor, Tensor]:
        """Those of queries and of keys, one in place of the other if that is not there."""
        found = [each for each in (self.of_queries, self.of_keys) if each is not None]
        return found[0], found[-1]
