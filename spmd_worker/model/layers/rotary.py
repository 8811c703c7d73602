"""Rotary position embedding (https://arxiv.org/abs/2104.09864) and its scalings for longer texts.

Angles are computed once a step for all layers that share a rope. Knows positions, not queries and keys.

With `dynamic` scaling (NTK) the base depends on the sequence length when a token is computed. A row's answer must
depend on the row alone, so a token's base is a function of its position and its row's prompt length: prompt tokens use
the base of the full prompt, each later token that of the length including it. Hugging Face's models do the same when
they compute the prompt at once and then one token at a time, so a row that grows past the model's original length
while it decodes has the same keys as there: earlier ones are not recomputed.

With `longrope` a row uses the frequencies for long texts if prompt and `max_tokens` together exceed the original
length, else those for short ones, for all of its tokens: none is computed twice when the row crosses that length.
Hugging Face's models use the long ones from the first token past the original length, which is the same for rows that
stay on one side; for a row that crosses it they recompute everything or do not, by model.

Angles depend on positions and the row's regime (`ModelConfig.rope_regime`) and nothing else, because the hashes of
cached blocks cover the regime and the tokens of a row and nothing else.

T: tokens of the step; D: head size; R: rotated elements of a head.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from spmd_worker.model.layers.checkpoint_layer import CheckpointLayer
from spmd_worker.model.layers.context import LayerContext
from spmd_worker.model.layers.weight_slice import WeightSlice, replicated
from spmd_worker.model_config.rope import RopeParameters
from spmd_worker.ops.kernels.api import Kernels


@dataclass(frozen=True, slots=True)
class Angles:
    """Cosines and sines [T, R / 2] of a step's tokens, for the first R elements of a head: element i is paired with i +
    R / 2, or neighbours are paired if `is_interleaved`. R may be 0. `is_plain`: all of a head, in halves, and nothing
    else; else rotated queries are multiplied by `query_factors` [T, 1, 1], if there are any. With float32 angles the
    rotation is computed in float32 and rounded once. `log_lengths` are logarithms of positions + 1, float32 [T, 1], if
    layers read them.
    """

    cos: Tensor
    sin: Tensor
    is_interleaved: bool
    is_plain: bool
    query_factors: Tensor | None = None
    log_lengths: Tensor | None = None

    def to(self, device: torch.device) -> "Angles":
        """The same on a device."""
        return replace(self, cos=self.cos.to(device), sin=self.sin.to(device))

    def rotate(self, kernels: Kernels, x: Tensor) -> Tensor:
        """[T, heads, D] -> [T, heads, D]."""
        if not self.cos.shape[1]:
            return x
        size = 2 * self.cos.shape[1]
        if self.cos.dtype != x.dtype:
            assert self.cos.dtype == torch.float32, self.cos.dtype
            if size == x.shape[-1] and not self.is_interleaved:
                return kernels.rotate_once(x, self.cos, self.sin)
            return self.rotate(kernels, x.float()).to(x.dtype)
        if size == x.shape[-1] and not self.is_interleaved:
            return kernels.rotate(x, self.cos, self.sin)
        rotated = x[..., :size]
        if self.is_interleaved:
            rotated = rotated.reshape(*rotated.shape[:-1], size // 2, 2).transpose(-1, -2).flatten(-2)
        rotated = kernels.rotate(rotated, self.cos, self.sin)
        if self.is_interleaved:
            rotated = rotated.reshape(*rotated.shape[:-1], 2, size // 2).transpose(-1, -2).flatten(-2)
        return torch.cat((rotated, x[..., size:]), dim=-1)

    def rotate_last(self, kernels: Kernels, x: Tensor) -> Tensor:
        """`rotate` of the last R elements of each head, not of the first."""
        size = x.shape[-1] - 2 * self.cos.shape[1]
        return torch.cat((x[..., :size], self.rotate(kernels, x[..., size:])), dim=-1)

    @property
    def reverse(self) -> "Angles":
        """The angles that undo these."""
        return replace(self, sin=-self.sin)


class RopeFactors(CheckpointLayer):
    """Logarithms of the factors of a rope's frequencies, float32 [R / 2], a buffer in transformers. Replicated."""

    is_float32 = True

    def __init__(self, context: LayerContext, rope: RopeParameters) -> None:
        super().__init__()
        self.alpha = replace(context, dtype=torch.float32).parameter(rope.rotary_size // 2)

    def weight_slices(self, prefix: str) -> Iterator[WeightSlice]:
        yield replicated(f"{prefix}.alpha", self.shape_of("alpha"), f"{prefix}.alpha", is_buffer=True)


class RotaryEmbedding:
    """Positions -> cosines and sines. `max_positions` is the length before scaling, tokens. `factors` are those of the
    frequencies, if they are learned.
    """

    def __init__(
        self, rope: RopeParameters, max_positions: int, device: torch.device, factors: RopeFactors | None = None
    ) -> None:
        self._factors = factors
        self._rope, self._rotary_size, self._max_positions = rope, rope.rotary_size, max_positions
        self._is_full = self._rotary_size == rope.size and not (rope.is_interleaved or rope.query_growth)
        self._frequencies = inverse_frequencies(rope, self._rotary_size).to(device)
        self._exponents = _exponents(self._rotary_size).double().to(device)
        self._axes = torch.tensor(rope.pair_axes).to(device) if rope.sections else None
        self._amplitude = attention_factor(rope)
        self._amplitudes: Tensor | None = None
        """That of short and that of long rows, if they differ."""
        if rope.short_mscale and rope.long_mscale:
            self._amplitudes = torch.tensor((rope.short_mscale, rope.long_mscale)).to(device)

    def is_plain(self, dtype: torch.dtype) -> bool:
        """Whether full heads rotate in halves, rounded at each step, as in fused kernels; float32 never rounds."""
        return self._is_full and (self._rope.rounding == "each step" or dtype == torch.float32)

    def angles(
        self, positions: Tensor, regimes: Tensor, dtype: torch.dtype, rope_positions: Tensor | None = None
    ) -> Angles:
        """int64 [T] positions and regimes -> angles for tensors of `dtype`, computed in float32 and rounded to `dtype`
        unless `RopeParameters.rounding` is "result". With `rope_positions`, int64 [3, T], pairs turn by the position
        of their section; three equal numbers give the bits of one.
        """
        turned_by = positions.float().unsqueeze(1)
        if rope_positions is not None:
            assert self._axes is not None, "a model whose tokens have three positions has sections"
            # Contiguous: cosines of strided tensors may have other bits.
            turned_by = rope_positions.t().float().index_select(1, self._axes)
        frequencies = self._frequencies_at(positions, regimes)
        if self._factors is not None:
            frequencies = frequencies * self._factors.alpha.exp()
        radians = turned_by * frequencies
        amplitude = self._amplitude if self._amplitudes is None else self._amplitudes[regimes].unsqueeze(1)
        cos, sin = radians.cos() * amplitude, radians.sin() * amplitude
        sin = -sin if self._rope.is_backward else sin
        if self._rope.rounding != "result":
            cos, sin = cos.to(dtype), sin.to(dtype)
        if self._rope.rounding == "angles":
            cos, sin = cos.float(), sin.float()
        factors, log_lengths = self._query_factors(positions, dtype), None
        if self._rope.gives_lengths:
            # Through float64, as query factors.
            log_lengths = (positions + 1).double().log().float().unsqueeze(1)
        return Angles(cos, sin, self._rope.is_interleaved, self.is_plain(dtype), factors, log_lengths)

    def _query_factors(self, positions: Tensor, dtype: torch.dtype) -> Tensor | None:
        """[T, 1, 1], rounded as angles are. Through float64: the last bit of a logarithm may depend on the element's
        index in the tensor.
        """
        rope = self._rope
        if not rope.query_growth:
            return None
        lengths = 1 + torch.floor((positions + rope.growth_offset).double() / rope.original_max_position_embeddings)
        factors = (1 + rope.query_growth * lengths.log()).view(-1, 1, 1)
        return factors.to(torch.float32 if rope.rounding == "result" else dtype)

    def _frequencies_at(self, positions: Tensor, regimes: Tensor) -> Tensor:
        """[R / 2], or [T, R / 2] if tokens differ."""
        if self._rope.rope_type == "longrope":
            return self._frequencies[regimes]
        # One pair has the same frequency under every base.
        if self._rope.rope_type != "dynamic" or self._rotary_size == 2:
            return self._frequencies
        lengths = torch.maximum(positions + 1, regimes).clamp(min=self._max_positions).double()
        growth = self._rope.factor * lengths / self._max_positions - (self._rope.factor - 1)
        base = self._rope.rope_theta * growth ** (self._rotary_size / (self._rotary_size - 2))
        return (1.0 / base.unsqueeze(1) ** self._exponents).float()


def inverse_frequencies(rope: RopeParameters, head_size: int) -> Tensor:
    """Radians per token of each pair, float32 [R / 2], of `longrope` [2, R / 2]: short, long. `head_size` is R."""
    plain = 1.0 / (rope.rope_theta ** _exponents(head_size))
    if rope.rope_type == "linear":
        return plain / rope.factor
    if rope.rope_type == "proportional":
        num_rotated = int(rope.partial_factor * head_size // 2)
        return torch.where(torch.arange(head_size // 2) < num_rotated, plain / rope.factor, 0.0)
    if rope.rope_type == "llama3":
        return _llama3(plain, rope)
    if rope.rope_type == "yarn":
        return _yarn(plain, rope, head_size)
    if rope.rope_type == "longrope":
        factors = torch.tensor((rope.short_factors, rope.long_factors), dtype=torch.float32)
        return 1.0 / (factors * rope.rope_theta ** _exponents(head_size))
    return plain


def attention_factor(rope: RopeParameters) -> float:
    """Factor of cosines and sines: 1 except for YaRN and LongRoPE."""
    if rope.rope_type not in ("yarn", "longrope"):
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.rope_type == "longrope":
        original = rope.original_max_position_embeddings
        return 1.0 if rope.factor <= 1 else math.sqrt(1 + math.log(rope.factor) / math.log(original))
    if rope.mscale and rope.mscale_all_dim:
        return _yarn_scale(rope.factor, rope.mscale) / _yarn_scale(rope.factor, rope.mscale_all_dim)
    return _yarn_scale(rope.factor, 1.0)


def _exponents(head_size: int) -> Tensor:
    return torch.arange(0, head_size, 2, dtype=torch.float32) / head_size


def _llama3(plain: Tensor, rope: RopeParameters) -> Tensor:
    """Llama 3.1: long wavelengths are stretched, short ones kept, those between blended. None are between equal factors
    (Llama 4 Scout).
    """
    original = rope.original_max_position_embeddings
    wavelengths = 2 * math.pi / plain
    stretched = torch.where(wavelengths > original / rope.low_freq_factor, plain / rope.factor, plain)
    if rope.high_freq_factor == rope.low_freq_factor:
        return stretched
    blend = (original / wavelengths - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blended = (1 - blend) * plain / rope.factor + blend * plain
    is_between = (wavelengths <= original / rope.low_freq_factor) & (wavelengths >= original / rope.high_freq_factor)
    return torch.where(is_between, blended, stretched)


def _yarn(plain: Tensor, rope: RopeParameters, head_size: int) -> Tensor:
    """YaRN (https://arxiv.org/abs/2309.00071): a ramp over dimensions between interpolation and extrapolation."""
    low, high = _yarn_dimension(rope.beta_fast, rope, head_size), _yarn_dimension(rope.beta_slow, rope, head_size)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_size - 1)
    width = high - low if high != low else 0.001
    ramp = ((torch.arange(head_size // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    return plain / rope.factor * ramp + plain * (1 - ramp)


def _yarn_dimension(num_rotations: float, rope: RopeParameters, head_size: int) -> float:
    """The dimension with `num_rotations` rotations over the original length."""
    original = rope.original_max_position_embeddings
    return head_size * math.log(original / (num_rotations * 2 * math.pi)) / (2 * math.log(rope.rope_theta))


def _yarn_scale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
