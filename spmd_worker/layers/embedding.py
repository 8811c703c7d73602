"""Vocabulary-parallel embedding and head: each rank owns a run of token ids.

The vocabulary is padded so that every shard has the same number of rows; padding rows are zero and their logits minus
infinity, so that they can never be sampled.

T: tokens of the step; V: vocabulary; Vs: rows of one shard.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spmd_worker.distributed.topology import vocabulary_rows
from spmd_worker.layers.context import LayerContext
from spmd_worker.layers.weight_slice import PaddingSlice, WeightSlice


class VocabularyShard:
    """Which token ids [start, stop) this rank owns, of shards of `size` rows."""

    def __init__(self, vocab_size: int, num_shards: int, rank: int) -> None:
        self.vocab_size = vocab_size
        self.size = vocabulary_rows(vocab_size, num_shards)
        self.start = min(rank * self.size, vocab_size)
        self.stop = min(self.start + self.size, vocab_size)

    @property
    def num_owned(self) -> int:
        """Token ids of this shard that exist."""
        return self.stop - self.start

    def weight_slices(self, prefix: str, hidden_size: int) -> Iterator[WeightSlice]:
        """The rows this rank reads."""
        columns = (0, hidden_size)
        yield WeightSlice(
            f"{prefix}.weight",
            (self.vocab_size, hidden_size),
            ((self.start, self.stop), columns),
            f"{prefix}.weight",
            ((0, self.num_owned), columns),
        )

    def padding_slices(self, prefix: str, hidden_size: int) -> Iterator[PaddingSlice]:
        """The rows that no checkpoint fills."""
        if self.num_owned < self.size:
            yield PaddingSlice(f"{prefix}.weight", ((self.num_owned, self.size), (0, hidden_size)))


class VocabularyParallelEmbedding(nn.Module):
    """Token ids [T] -> [T, hidden_size], the same on every rank."""

    def __init__(self, context: LayerContext, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.shard = VocabularyShard(vocab_size, context.tensor_group.size, context.tensor_group.rank)
        self.hidden_size, self._group = hidden_size, context.tensor_group
        self.weight = context.parameter(self.shard.size, hidden_size)

    def forward(self, token_ids: Tensor) -> Tensor:
        """int64 [T] -> [T, hidden_size]. Each row comes from one rank; the others add zero, so the sum is exact."""
        if self._group.size == 1:
            return F.embedding(token_ids, self.weight)
        is_mine = (token_ids >= self.shard.start) & (token_ids < self.shard.stop)
        rows = F.embedding((token_ids - self.shard.start) * is_mine, self.weight)
        return self._group.all_reduce(rows * is_mine.unsqueeze(1))

    def weight_slices(self, prefix: str) -> Iterator[WeightSlice]:
        """`prefix` is this layer's name."""
        return self.shard.weight_slices(prefix, self.hidden_size)

    def padding_slices(self, prefix: str) -> Iterator[PaddingSlice]:
        """`prefix` is this layer's name."""
        return self.shard.padding_slices(prefix, self.hidden_size)


class VocabularyParallelHead(nn.Module):
    """[R, hidden_size] -> [R, Vs], logits of this rank's token ids. Tied to the embedding when it is given."""

    def __init__(
        self, context: LayerContext, vocab_size: int, hidden_size: int, tied_to: VocabularyParallelEmbedding | None
    ) -> None:
        super().__init__()
        self.shard = VocabularyShard(vocab_size, context.tensor_group.size, context.tensor_group.rank)
        self.hidden_size, self.is_tied, self._kernels = hidden_size, tied_to is not None, context.kernels
        self.weight = tied_to.weight if tied_to is not None else context.parameter(self.shard.size, hidden_size)
        self._packed_tied: Tensor | None = None

    def forward(self, hidden: Tensor) -> Tensor:
        """Rows that sample -> logits; ids past the vocabulary get minus infinity."""
        logits = self._kernels.linear(hidden, self._gemm_weight, None)
        if self.shard.num_owned < self.shard.size:
            logits[:, self.shard.num_owned :] = -torch.inf
        return logits

    def largest(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Of each row the largest logit, float32 [R], and its column, int64 [R]: the first of equal ones."""
        if self.shard.num_owned == 0:
            return self._kernels.largest(self(hidden))
        return self._kernels.linear_argmax(hidden, self._gemm_weight, self.shard.num_owned)

    @property
    def _gemm_weight(self) -> Tensor:
        return self.weight if self._packed_tied is None else self._packed_tied

    def pack_weights(self) -> None:
        """As in the linear layers; a tied head keeps a packed copy beside the embedding, which needs plain rows."""
        packed = self._kernels.pack(self.weight)
        if not self.is_tied:
            self.weight = nn.Parameter(packed, requires_grad=False)
        elif packed is not self.weight:
            self._packed_tied = packed

    def weight_slices(self, prefix: str) -> Iterator[WeightSlice]:
        """`prefix` is this layer's name; a tied head has no weights of its own."""
        return iter(()) if self.is_tied else self.shard.weight_slices(prefix, self.hidden_size)

    def padding_slices(self, prefix: str) -> Iterator[PaddingSlice]:
        """`prefix` is this layer's name; a tied head has no weights of its own."""
        return iter(()) if self.is_tied else self.shard.padding_slices(prefix, self.hidden_size)
