"""The layers that all towers have in common: attention and feed-forward on a residual stream, each behind a norm.

Every operation is row-wise but attention, so a patch's numbers depend on its sequence alone. N: patches; E: width of
the tower; H: heads; D: head size.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn

from spmd_worker.model.layers.context import LayerContext
from spmd_worker.model.layers.rotary import Angles
from spmd_worker.model.towers.attention import ImageAttention, ImageSequences
from spmd_worker.model.towers.layers import TowerGates, TowerLinear, TowerNorm, TowerTable
from spmd_worker.model_config.vision_config import TowerConfig

_ROWS_AT_ONCE: Final = {"cpu": 1024}
_MOST_ROWS_AT_ONCE: Final = 16384
_QK_NORM_EPS: Final = 1e-6


def rows_at_once(x: Tensor) -> tuple[Tensor, ...]:
    """Parts of x [N, ...] whose feed-forward is computed at once: intermediate numbers stay in the cache of a CPU."""
    return torch.split(x, _ROWS_AT_ONCE.get(x.device.type, _MOST_ROWS_AT_ONCE))


class TowerLayer(nn.Module):
    """One layer."""

    def __init__(self, context: LayerContext, config: TowerConfig, index: int) -> None:
        super().__init__()
        names, size = config.names, config.hidden_size
        beginning = f"{names.layers}.{index}."
        self._num_heads, self._head_size, self._kernels = config.num_heads, config.head_size, context.kernels
        self._num_key_heads = config.num_key_heads
        self._activation, self._norms_heads = config.activation, config.norms_heads

        def norm(name: str) -> TowerNorm:
            return TowerNorm(context, beginning + name, size, config.norm, config.eps)

        def inner_norm(name: str) -> TowerNorm | None:
            sizes = (config.head_size, "rms", config.eps) if self._norms_heads else (size, "rms", _QK_NORM_EPS)
            return TowerNorm(context, beginning + name, *sizes) if name else None

        def linear(name: str, input_size: int, output_size: int, *, has_bias: bool) -> TowerLinear:
            return TowerLinear(context, ((beginning + name, output_size),), (input_size,), has_bias=has_bias)

        self.attention_norm, self.mlp_norm = norm(names.norms[0]), norm(names.norms[1])
        num_heads = config.num_heads + 2 * config.num_key_heads
        num_each = num_heads * config.head_size // len(names.qkv)
        parts = tuple([(beginning + name, num_each) for name in names.qkv])
        unbiased = tuple([beginning + name for name in names.unbiased])
        self.qkv = TowerLinear(context, parts, (size,), has_bias=config.has_qkv_bias, unbiased=unbiased)
        self.output = linear(names.output, size, size, has_bias=config.has_bias)
        self.query_norm, self.key_norm = inner_norm(names.query_norm), inner_norm(names.key_norm)
        *first, down = names.mlp
        self.up: TowerGates | TowerLinear
        if config.is_gated:
            gates = (beginning + first[0], beginning + first[1])
            arguments = (gates, size, config.intermediate_size, config.activation)
            self.up = TowerGates(context, *arguments, has_bias=config.has_bias)
        else:
            self.up = linear(first[0], size, config.intermediate_size, has_bias=config.has_bias)
        self.down = linear(down, config.intermediate_size, size, has_bias=config.has_bias)
        scales = [TowerTable(context, beginning + name, size) for name in names.scales]
        self.attention_scale = scales[0] if scales else None
        self.mlp_scale = scales[1] if scales else None

    def forward(self, x: Tensor, angles: Angles | None, attention: ImageAttention, sequences: ImageSequences) -> None:
        """The residual stream [N, E], changed in place."""
        attended = attention.attend(*self._query_key_value(x, angles), sequences)
        self._kernels.add_(x, _scaled(self.output(attended), self.attention_scale))
        for rows in rows_at_once(x):
            y = self.up(self.mlp_norm(rows))
            if isinstance(self.up, TowerLinear) and not isinstance(self.up, TowerGates):
                y = self._kernels.activate(y, self._activation)
            self._kernels.add_(rows, _scaled(self.down(y), self.mlp_scale))

    def _query_key_value(self, x: Tensor, angles: Angles | None) -> tuple[Tensor, Tensor, Tensor]:
        """[N, E] -> [N, H, D] each; keys and values may have fewer heads."""
        projected = self.qkv(self.attention_norm(x))
        if self.query_norm is not None and self.key_norm is not None:
            query, key, value = projected.chunk(3, dim=1)
            shape = (len(x), self._num_heads, self._head_size)
            of_norm = shape if self._norms_heads else (len(x), -1)
            normed = [
                norm(each.contiguous().view(of_norm)).view(shape)
                for norm, each in ((self.query_norm, query), (self.key_norm, key))
            ]
            if angles is not None:
                normed = [angles.rotate(self._kernels, each) for each in normed]
            return normed[0], normed[1], value.view(shape)
        num_rotated = self._num_heads + self._num_key_heads
        heads = projected.view(len(x), num_rotated + self._num_key_heads, self._head_size)
        value = heads[:, num_rotated:]
        # Queries and keys are rotated in one call.
        both = heads[:, :num_rotated]
        both = both if angles is None else angles.rotate(self._kernels, both)
        return both[:, : self._num_heads], both[:, self._num_heads :], value


def _scaled(x: Tensor, scale: TowerTable | None) -> Tensor:
    return x if scale is None else x.mul_(scale.weight)


class Trunk(nn.Module):
    """All layers of a tower."""

    def __init__(
        self, context: LayerContext, config: TowerConfig, layer: Callable[..., nn.Module] = TowerLayer
    ) -> None:
        """`layer` makes one, as `TowerLayer` is made."""
        super().__init__()
        self._config, self._backend = config, context.attention
        self.layers = nn.ModuleList(layer(context, config, index) for index in range(config.num_layers))
        self.on_layer: Callable[[], None] = lambda: None
        """Called behind each layer, of which an image has all once."""

    def forward(self, x: Tensor, *arguments: Any, **options: Any) -> Tensor:
        """The last of `states`, whose arguments these are."""
        for _ in self.states(x, *arguments, **options):
            pass
        return x

    def states(
        self,
        x: Tensor,
        sequences: ImageSequences,
        angles: Angles | None = None,
        windows: ImageSequences | None = None,
    ) -> Iterator[Tensor]:
        """The residual stream [N, E], changed in place, behind each layer. Layers other than `full_layers` see
        `windows`, if there are any.
        """
        config = self._config
        num_blocks = max(sequences.num_blocks, 0 if windows is None else windows.num_blocks)
        attention = ImageAttention(self._backend, config, x, num_blocks)
        for index, layer in enumerate(self.layers):
            is_full = windows is None or index in config.full_layers
            layer(x, angles, attention, sequences if is_full or windows is None else windows)
            self.on_layer()
            yield x


class PatchEmbedding(TowerLinear):
    """float32 [N, 3 * frames * P * P] -> [N, E]: a convolution whose squares do not overlap."""

    def __init__(self, context: LayerContext, config: TowerConfig) -> None:
        side, frames = config.patch_size, () if config.num_frames == 1 else (config.num_frames,)
        parts = ((config.names.patches, config.hidden_size),)
        super().__init__(context, parts, (3, *frames, side, side), has_bias=config.has_patch_bias)
        self._dtype = context.dtype

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self._dtype))


def axial_angles(
    rows: Tensor, columns: Tensor, head_size: int, theta: float, dtype: torch.dtype, *, is_by_turns: bool = False
) -> Angles:
    """int64 [N] each -> angles: half of a head's pairs turn by row, the others by column. Both have every second
    frequency of a head if `is_by_turns`, else those of half a head.
    """
    half = head_size // 2
    if is_by_turns:
        every = theta ** -(torch.arange(0, head_size, 2, dtype=torch.float64) / head_size)
        of_rows, of_columns = every[::2], every[1::2]
    else:
        of_rows = of_columns = theta ** -(torch.arange(0, half, 2, dtype=torch.float64) / half)
    tables = []
    for function in (torch.cos, torch.sin):
        parts = [_table(function, *pair) for pair in ((rows, of_rows), (columns, of_columns))]
        tables.append(torch.cat(parts, dim=1).to(rows.device, dtype))
    return Angles(tables[0], tables[1], is_interleaved=False, is_plain=True)


def _table(function: Callable[[Tensor], Tensor], indices: Tensor, frequencies: Tensor) -> Tensor:
    """float32 [N, frequencies]. By float64: the last bit of a cosine may depend on its index in the tensor."""
    every = torch.arange(int(indices.max()) + 1, dtype=torch.float32, device=indices.device)
    turns = every.unsqueeze(1) * frequencies.to(indices.device, torch.float32)
    return function(turns.double()).float()[indices]


def interpolated(table: Tensor, taps: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Rows of `table` by index, times float32 weights, added one after another: float32 [N, E]."""
    found: Tensor | None = None
    for index, weight in taps:
        part = table[index].float().mul_(weight.unsqueeze(1))
        found = part if found is None else found.add_(part)
    assert found is not None, "no rows"
    return found
