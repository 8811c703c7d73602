"""Vocabulary-parallel embedding and head, where each rank has a range of token ids; position and type embeddings.

The vocabulary is padded so that every shard has the same number of rows; padding rows are zero and their logits minus
infinity, so that they are never sampled.

T: tokens of the step; E: tokens whose rows are given; R: rows that sample; Vs: rows of one shard.
"""

import math
import weakref
from collections.abc import Iterator
from typing import Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spmd_worker.model.layers.checkpoint_layer import CheckpointLayer, PackedLayer
from spmd_worker.model.layers.context import LayerContext
from spmd_worker.model.layers.weight_slice import PaddingSlice, Rectangle, WeightSlice
from spmd_worker.model_config.model_config import ModelConfig
from spmd_worker.ops.kernels.int8 import row_maxima
from spmd_worker.ranks.topology import vocabulary_rows


class TokenRows(NamedTuple):
    """Rows given in place of the embeddings of some tokens: `places` are the tokens' indices in the step, int64 [E],
    `rows` [E, hidden_size] in the model's dtype; None on ranks that do not hold them.
    """

    places: Tensor
    rows: Tensor | None


class StepMedia(NamedTuple):
    """Rows of images in the places of some tokens: `places` are the tokens' indices in the step, int64 [E], `rows`
    [E, hidden_size]; `added` are as many for each of the first layers of a model with deepstack. The same on every rank
    of the first stage.
    """

    places: Tensor
    rows: Tensor
    added: tuple[Tensor, ...] = ()


class VocabularyShard:
    """This rank's token ids [start, stop), in a shard of `size` rows."""

    def __init__(self, vocab_size: int, num_shards: int, rank: int) -> None:
        self.vocab_size = vocab_size
        self.size = vocabulary_rows(vocab_size, num_shards)
        self.start = min(rank * self.size, vocab_size)
        self.stop = min(self.start + self.size, vocab_size)

    @property
    def num_owned(self) -> int:
        return self.stop - self.start

    def weight_slices(self, prefix: str, hidden_size: int) -> Iterator[WeightSlice]:
        columns = (0, hidden_size)
        yield WeightSlice(
            f"{prefix}.weight",
            (self.vocab_size, hidden_size),
            ((self.start, self.stop), columns),
            f"{prefix}.weight",
            ((0, self.num_owned), columns),
        )

    def padding_slices(self, prefix: str, hidden_size: int) -> Iterator[PaddingSlice]:
        if self.num_owned < self.size:
            yield PaddingSlice(f"{prefix}.weight", ((self.num_owned, self.size), (0, hidden_size)))


class VocabularyParallelEmbedding(CheckpointLayer):
    """Token ids [T] -> [T, hidden_size], the same on every rank."""

    def __init__(self, context: LayerContext, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.shard = VocabularyShard(vocab_size, context.tensor_group.size, context.tensor_group.rank)
        self.hidden_size, self._group, self._kernels = hidden_size, context.tensor_group, context.kernels
        self._quantised, self._dtype = context.quantised, context.dtype
        self.weight = context.parameter(self.shard.size, hidden_size)
        self.packed: Tensor | None
        """Packed copy for a tied head, updated with the weight; None if packing changes nothing."""
        self.register_buffer("packed", None, persistent=False)
        # Weakly: a weight that sleeps must leave no memory.
        self._packed_from: tuple[weakref.ref[Tensor], int] | None = None
        """Weight that was packed, and its address."""
        self.num_changes = 0
        """Number of writes to the weight."""

    def forward(self, token_ids: Tensor, given: TokenRows | None = None) -> Tensor:
        """int64 [T] -> [T, hidden_size], with the `given` rows of the first rank in place of their tokens'. One rank
        has a row and the others add zero, so the sum is exact.
        """
        if self._group.size == 1:
            return _with_rows(F.embedding(token_ids, self.weight), given)
        is_mine = (token_ids >= self.shard.start) & (token_ids < self.shard.stop)
        rows = F.embedding((token_ids - self.shard.start) * is_mine, self.weight)
        # A product with zero would not do: row 0, looked up for tokens of other ranks, may be NaN or infinite.
        part = _with_rows(rows.masked_fill_(~is_mine.unsqueeze(1), 0.0), given)
        return self._group.all_reduce(part, is_exact=True)

    def pack_for_head(self, *, is_wide: bool = False) -> None:
        """`is_wide`: for `Kernels.linear_of_leaves`."""
        packed = self._kernels.pack_leaves(self.weight) if is_wide else self._kernels.pack(self.weight)
        self.packed = None if packed is self.weight else packed
        self._packed_from = weakref.ref(self.weight), self.weight.data_ptr()

    def follow_weight(self) -> None:
        """Pack the weight again if a caller has replaced it or given it other memory. Raises ValueError for one of
        another shape or dtype.
        """
        self.num_changes += 1
        weight = self.weight
        if self.packed is None or self._packed_from is None or weight.is_meta:
            return
        packed, address = self._packed_from
        if packed() is weight and weight.data_ptr() == address:
            return
        shape, dtype = (self.shard.size, self.hidden_size), self._dtype
        if (tuple(weight.shape), weight.dtype) != (shape, dtype):
            found = f"{weight.dtype} of shape {list(weight.shape)}"
            raise ValueError(f"embed_tokens.weight was replaced by {found}, and must be {dtype} of {list(shape)}")
        self._repack(0, len(weight))
        self._packed_from = weakref.ref(weight), weight.data_ptr()

    def gemm_weight(self) -> Tensor:
        """The weight as a tied head multiplies with it."""
        return self.weight if self.packed is None else self.packed

    def write_region(self, parameter: str, region: Rectangle, values: Tensor) -> None:
        super().write_region(parameter, region, values)
        self.num_changes += 1
        if self.packed is not None:
            self._repack(*region[0])

    def _repack(self, start: int, stop: int) -> None:
        assert self.packed is not None, "its caller has looked"
        rows = self.weight.detach()[start:stop]
        if self._quantised is None:
            self._kernels.repack_(self.packed, start, rows)
        else:
            self._quantised.repack_part_(self.packed, start, rows, row_maxima(rows))

    def weight_slices(self, prefix: str) -> Iterator[WeightSlice]:
        return self.shard.weight_slices(prefix, self.hidden_size)

    def padding_slices(self, prefix: str) -> Iterator[PaddingSlice]:
        return self.shard.padding_slices(prefix, self.hidden_size)


def _with_rows(x: Tensor, given: TokenRows | None) -> Tensor:
    """`x` [T, hidden_size], changed in place."""
    if given is None:
        return x
    return x.index_fill_(0, given.places, 0.0) if given.rows is None else x.index_copy_(0, given.places, given.rows)


class PositionEmbedding(CheckpointLayer):
    """Learned positions (GPT-2): int64 [T] -> [T, hidden_size]. Replicated.

    The first `offset` of `num_positions` rows are unused (OPT). Tokens of the id `padding_token` have the last of
    these, and later tokens of their row are numbered without them (RoBERTa).
    """

    def __init__(
        self, context: LayerContext, num_positions: int, hidden_size: int, offset: int = 0, padding_token: int = -1
    ) -> None:
        super().__init__()
        self._offset, self._padding_token = offset, padding_token
        self.weight = context.parameter(num_positions, hidden_size)

    def forward(self, positions: Tensor, token_ids: Tensor) -> Tensor:
        """The step must have all tokens of a row if there is a `padding_token`."""
        if self._padding_token >= 0:
            positions = self._without_padding(positions, token_ids == self._padding_token)
        return F.embedding(positions + self._offset if self._offset else positions, self.weight)

    def _without_padding(self, positions: Tensor, is_padding: Tensor) -> Tensor:
        if not is_padding.any():
            return positions
        num_before = is_padding.cumsum(0) - is_padding.long()
        firsts = torch.arange(len(positions), device=positions.device) - positions
        return (positions - num_before + num_before[firsts]).masked_fill(is_padding, -1)


class SinusoidalPositions(nn.Module):
    """`ModelConfig.sinusoid`: int64 [T] -> [T, hidden_size]. Nothing of it is stored in files."""

    def __init__(self, context: LayerContext, model_config: ModelConfig) -> None:
        super().__init__()
        offset, num_positions = model_config.position_offset, model_config.max_position_embeddings
        positions = torch.arange(offset, offset + num_positions, device="cpu")
        angles = _SINUSOIDS[model_config.sinusoid](positions, model_config.hidden_size // 2)
        table = torch.cat((angles.sin(), angles.cos()), dim=1)
        self._table = table.to(context.dtype).to(context.device)

    def forward(self, positions: Tensor, token_ids: Tensor) -> Tensor:
        del token_ids
        return F.embedding(positions, self._table)


def _exact_angles(positions: Tensor, num_angles: int) -> Tensor:
    """Float64 [positions, angles]."""
    return positions.double().unsqueeze(1) / 10_000.0 ** (torch.arange(num_angles, device="cpu").double() / num_angles)


def _fairseq_angles(positions: Tensor, num_angles: int) -> Tensor:
    """Float32 [positions, angles]."""
    exponents = torch.arange(num_angles, device="cpu").float() * -(math.log(10_000) / (num_angles - 1))
    return positions.float().unsqueeze(1) * exponents.exp()


_SINUSOIDS: Final = {"exact": _exact_angles, "fairseq": _fairseq_angles}


class TokenTypeEmbedding(CheckpointLayer):
    """Types of tokens: int64 [T] -> [T, hidden_size]. Replicated."""

    def __init__(self, context: LayerContext, num_types: int, hidden_size: int) -> None:
        super().__init__()
        self.weight = context.parameter(num_types, hidden_size)

    def forward(self, token_types: Tensor) -> Tensor:
        return F.embedding(token_types, self.weight)


class VocabularyParallelHead(PackedLayer):
    """[R, hidden_size] -> logits [R, Vs] of this rank's token ids, divided by `divisor` and, if `cap` is above 0,
    bounded by it: cap * tanh(logit / cap). Its weight is that of the embedding `tied_to`, if there is one.

    Logits are of the model's dtype, to which float32 sums are rounded, or with `LayerContext.has_float32_head` these
    sums themselves: products of weights and hidden states of 16 bits are exact in float32, so no copy is converted.
    """

    def __init__(
        self,
        context: LayerContext,
        vocab_size: int,
        hidden_size: int,
        tied_to: VocabularyParallelEmbedding | None,
        *,
        divisor: float = 1.0,
        cap: float = 0.0,
        has_bias: bool = False,
    ) -> None:
        super().__init__()
        self._divisor, self._cap = divisor, cap
        self.shard = VocabularyShard(vocab_size, context.tensor_group.size, context.tensor_group.rank)
        self.hidden_size, self._kernels, self._quantised = hidden_size, context.kernels, context.quantised
        self.weight = tied_to.weight if tied_to is not None else context.parameter(self.shard.size, hidden_size)
        self.bias = context.parameter(self.shard.size) if has_bias else None
        # In a tuple, so that the embedding does not become a submodule.
        self._tied_to = (tied_to,)
        # Rounded, different logits may become equal.
        self._is_wide = context.has_float32_head and context.dtype != torch.float32
        assert not (self._is_wide and context.quantised), "a quantised head has no float32 sums"
        self._is_plain = divisor == 1.0 and not cap and not has_bias and not self._is_wide
        self.argmax_module: nn.Module | None = None
        self._num_changes = 0

    def forward(self, hidden: Tensor) -> Tensor:
        """Logits of padding rows are minus infinity."""
        logits = self._products(hidden)
        if self._divisor != 1.0:
            logits = logits.div_(self._divisor)
        if self._cap:
            logits = self._kernels.bound(logits, self._cap)
        if self.shard.num_owned < self.shard.size:
            logits[:, self.shard.num_owned :] = -torch.inf
        return logits

    def _products(self, hidden: Tensor) -> Tensor:
        if not self._is_wide:
            return self._kernels.linear(hidden, self._gemm_weight, self.bias)
        one_leaf = (self.hidden_size,)
        return self._kernels.linear_of_leaves(hidden, self._gemm_weight, self.bias, one_leaf, torch.float32)

    def argmax(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """[R, hidden_size] -> each row's maximum logit, float32 [R], and the first column with it, int64 [R]."""
        if self.shard.num_owned == 0:
            return self._kernels.argmax(self(hidden))
        is_watched = self._forward_hooks or self._forward_pre_hooks or "forward" in vars(self)
        if is_watched or not self._is_plain:
            return self._kernels.argmax(self(hidden)[:, : self.shard.num_owned])
        if self.argmax_module is None:
            return self._kernels.linear_argmax(hidden, self._gemm_weight, self.shard.num_owned)
        (tied_to,) = self._tied_to
        rows, changes = (None, self._num_changes) if tied_to is None else (tied_to.weight, tied_to.num_changes)
        found: tuple[Tensor, Tensor] = self.argmax_module(
            hidden, self._gemm_weight, self.shard.num_owned, rows, changes
        )
        return found

    def forget_copies(self) -> None:
        """The weight may have other values: the argmax module is rebuilt at its next use."""
        (tied_to,) = self._tied_to
        if tied_to is None:
            self._num_changes += 1
        else:
            tied_to.follow_weight()

    @property
    def is_tied(self) -> bool:
        return self._tied_to[0] is not None

    @property
    def _gemm_weight(self) -> Tensor:
        (tied_to,) = self._tied_to
        return self.weight if tied_to is None else tied_to.gemm_weight()

    def pack_weights(self) -> None:
        (tied_to,) = self._tied_to
        if tied_to is None:
            super().pack_weights()
        else:
            tied_to.pack_for_head(is_wide=self._is_wide)
        if self._is_plain:
            self.argmax_module = self._kernels.argmax_module(self._gemm_weight)

    def _empty_packed(self) -> Tensor | None:
        """A tied head has a packed copy beside the embedding instead."""
        return None if self.is_tied or self._is_wide else super()._empty_packed()

    def _packed(self) -> Tensor:
        return self._kernels.pack_leaves(self.weight) if self._is_wide else super()._packed()

    def write_region(self, parameter: str, region: Rectangle, values: Tensor) -> None:
        """`CheckpointLayer.write_region`; the argmax module is rebuilt at its next use."""
        super().write_region(parameter, region, values)
        self._num_changes += 1

    def weight_slices(self, prefix: str) -> Iterator[WeightSlice]:
        if not self.is_tied:
            yield from self.shard.weight_slices(prefix, self.hidden_size)
        if self.bias is not None:
            owned, destination = (self.shard.start, self.shard.stop), (0, self.shard.num_owned)
            yield WeightSlice(f"{prefix}.bias", (self.shard.vocab_size,), (owned,), f"{prefix}.bias", (destination,))

    def padding_slices(self, prefix: str) -> Iterator[PaddingSlice]:
        if not self.is_tied:
            yield from self.shard.padding_slices(prefix, self.hidden_size)
        if self.bias is not None and self.shard.num_owned < self.shard.size:
            yield PaddingSlice(f"{prefix}.bias", ((self.shard.num_owned, self.shard.size),))
