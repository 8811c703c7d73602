"""Matrices of a GGUF as CPUs hold them (`stored_format.py`): numbers, steps and factors of the file's blocks.

n: rows; B: blocks of a row; G: its groups of 32 inputs; I: its inputs.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from spmd_worker.model.layers.weight_slice import Rectangle
from spmd_worker.model.weights.gguf_checkpoint import GgufCheckpoint
from spmd_worker.model.weights.quantised_weight import QuantisedWeight
from spmd_worker.model_config.stored_format import GGUF_FORMATS, IQ4_LEVELS, StoredFormat
from spmd_worker.model_config.weight_format import GGUF, WeightFormat
from spmd_worker.ops.kernels.stored_weights import affine_scales, to_nibbles

_GROUP: Final = 32
_OF_K: Final = 8
"""Groups of a block of 256 inputs."""
_ZERO_4, _ZERO_5, _ZERO_6 = 8, 16, 32
"""Zero points of numbers of so many bits."""
_NIBBLES, _TWOS, _BITS = (0, 4), (0, 2, 4, 6), tuple(range(8))
"""Shifts to the numbers of a byte."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """Contents of the blocks of some rows. `numbers` uint8, or int8, [n, I]; `steps` float16 [n, G], `factors` int8
    [n, G, 1 or 2]. w = step * factor * (number - `zero`) - step of minima * factor of minima, or of a number's level.
    """

    numbers: Tensor
    steps: Tensor
    factors: Tensor
    minima: Tensor | None = None
    factors_of_minima: Tensor | None = None
    zero: int = 0
    has_levels: bool = False


class GgufWeight(QuantisedWeight):
    """A tensor in blocks, the only part."""

    files: GgufCheckpoint

    def is_stored_as(self, stored: StoredFormat) -> bool:
        return len(self.shape) == 2 and stored in GGUF_FORMATS.get(self.format.number, ())

    def read_stored(self, region: Rectangle, stored: StoredFormat) -> tuple[Tensor, Tensor]:
        (_, (start, stop)) = region
        assert start % _GROUP == stop % _GROUP == 0, region
        raw, inside = self.files.read_blocks(self.parts["numbers"], region)
        found = _READERS[self.format.number](raw)
        groups = slice(inside.start // _GROUP, inside.stop // _GROUP)
        numbers, steps, factors = found.numbers[:, inside], found.steps[:, groups], found.factors[:, groups]
        if stored.number == "int4":
            zeros = torch.full(steps.shape, float(found.zero), device=steps.device)
            return to_nibbles(numbers), torch.stack((steps.to(torch.float32), zeros), dim=-1)
        minima = torch.zeros_like(steps) if found.minima is None else found.minima[:, groups]
        of_minima = torch.zeros_like(steps, dtype=torch.int8)
        if found.factors_of_minima is not None:
            of_minima = found.factors_of_minima[:, groups].view(torch.int8)
        if stored.number != "affine8":
            return to_nibbles(numbers), affine_scales(steps, minima, of_minima, factors)
        if found.has_levels:
            levels = torch.tensor(IQ4_LEVELS, dtype=torch.int8, device=numbers.device)
            numbers = levels[numbers.to(torch.int32)]
        whole = (numbers.view(torch.int8) - found.zero).view(torch.uint8)
        return whole, affine_scales(steps, minima, of_minima, factors.expand(-1, -1, 2))

    def _check(self) -> tuple[int, ...]:
        return self._shape_of("numbers")

    def _read_block(self, block: Rectangle) -> Tensor:
        return self.files.read(self.parts["numbers"], block)


def gguf_weights(files: GgufCheckpoint) -> dict[str, QuantisedWeight]:
    """Weights of the files that are stored in blocks, by name."""
    return {
        name: GgufWeight(files, WeightFormat(GGUF, each.name, 0, 1, each.block), {"numbers": name})
        for name, each in files.quantised_types().items()
    }


def _parts(raw: Tensor, num_parts: int, shifts: Iterable[int], mask: int) -> Tensor:
    """Numbers of the bytes [n, B, some], uint8 [n, B, more]: in each of `num_parts` parts those behind the first shift
    from all of its bytes, then those behind the next.
    """
    by = torch.tensor(tuple(shifts), dtype=torch.uint8, device=raw.device).unsqueeze(1)
    return (torch.unflatten(raw, 2, (num_parts, 1, -1)) >> by & mask).flatten(2)


def _halves(raw: Tensor, first: int, num_groups: int = 1) -> Tensor:
    """The float16 at a byte of each block, for as many groups: [n, G]."""
    copy = raw[..., first : first + 2].clone(memory_format=torch.contiguous_format)
    return copy.view(torch.float16).expand(-1, -1, num_groups).flatten(1)


def _ones(raw: Tensor) -> Tensor:
    """Factors of blocks of one group."""
    return torch.ones((*raw.shape[:2], 1), dtype=torch.int8, device=raw.device)


def _in_groups(factors: Tensor, each: int = 1) -> Tensor:
    """Factors of blocks [n, B, some], of which a group has so many -> int8 [n, G, `each`]."""
    return torch.unflatten(factors.flatten(1).view(torch.int8), 1, (-1, each))


def _fifth_bits(raw: Tensor) -> Tensor:
    """Bits of four bytes of each block of 32, at their place."""
    return _parts(raw, 4, _BITS, 1) << 4


def _q4_0(raw: Tensor) -> Blocks:
    return Blocks(_parts(raw[..., 2:], 1, _NIBBLES, 15).flatten(1), _halves(raw, 0), _ones(raw), zero=_ZERO_4)


def _q4_1(raw: Tensor) -> Blocks:
    numbers = _parts(raw[..., 4:], 1, _NIBBLES, 15)
    return Blocks(numbers.flatten(1), _halves(raw, 0), _ones(raw), -_halves(raw, 2), _ones(raw).flatten(1))


def _q5_0(raw: Tensor) -> Blocks:
    numbers = _parts(raw[..., 6:], 1, _NIBBLES, 15) | _fifth_bits(raw[..., 2:6])
    return Blocks(numbers.flatten(1), _halves(raw, 0), _ones(raw), zero=_ZERO_5)


def _q5_1(raw: Tensor) -> Blocks:
    numbers = _parts(raw[..., 8:], 1, _NIBBLES, 15) | _fifth_bits(raw[..., 4:8])
    return Blocks(numbers.flatten(1), _halves(raw, 0), _ones(raw), -_halves(raw, 2), _ones(raw).flatten(1))


def _q8_0(raw: Tensor) -> Blocks:
    return Blocks(raw[..., 2:].flatten(1).view(torch.int8), _halves(raw, 0), _ones(raw))


def _q3_k(raw: Tensor) -> Blocks:
    numbers = _parts(raw[..., 32:96], 2, _TWOS, 3) | _parts(raw[..., :32], 1, _BITS, 1) << 2
    factors = _parts(raw[..., 96:104], 1, _NIBBLES, 15) | _parts(raw[..., 104:108], 1, _TWOS, 3) << 4
    # The bit says that 4 is not subtracted.
    return Blocks(numbers.flatten(1), _halves(raw, 108, _OF_K), _in_groups(factors, 2) - 32, zero=4)


def _of_k(raw: Tensor, numbers: Tensor) -> Blocks:
    """Blocks of Q4_K and Q5_K: steps, steps of minima, and factors of both, of 6 bits, in twelve bytes."""
    first, second, third = torch.unflatten(raw[..., 4:16], 2, (3, 4)).unbind(2)
    factors = torch.cat((first & 63, third & 15 | first >> 2 & 48), dim=2)
    of_minima = torch.cat((second & 63, third >> 4 | second >> 2 & 48), dim=2)
    steps, minima = (_halves(raw, at, _OF_K) for at in (0, 2))
    return Blocks(numbers.flatten(1), steps, _in_groups(factors), minima, of_minima.flatten(1))


def _q4_k(raw: Tensor) -> Blocks:
    return _of_k(raw, _parts(raw[..., 16:], 4, _NIBBLES, 15))


def _q5_k(raw: Tensor) -> Blocks:
    return _of_k(raw, _parts(raw[..., 48:], 4, _NIBBLES, 15) | _parts(raw[..., 16:48], 1, _BITS, 1) << 4)


def _q6_k(raw: Tensor) -> Blocks:
    numbers = _parts(raw[..., :128], 2, _NIBBLES, 15) | _parts(raw[..., 128:192], 2, _TWOS, 3) << 4
    return Blocks(numbers.flatten(1), _halves(raw, 208, _OF_K), _in_groups(raw[..., 192:208], 2), zero=_ZERO_6)


def _iq4_nl(raw: Tensor) -> Blocks:
    return Blocks(_parts(raw[..., 2:], 1, _NIBBLES, 15).flatten(1), _halves(raw, 0), _ones(raw), has_levels=True)


def _iq4_xs(raw: Tensor) -> Blocks:
    factors = _parts(raw[..., 4:8], 4, _NIBBLES, 15) | _parts(raw[..., 2:4], 2, _TWOS, 3) << 4
    numbers = _parts(raw[..., 8:], 8, _NIBBLES, 15)
    return Blocks(numbers.flatten(1), _halves(raw, 0, _OF_K), _in_groups(factors) - 32, has_levels=True)


_READERS: Final[dict[str, Callable[[Tensor], Blocks]]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
}
"""Readers of blocks, by type; each takes bytes uint8 [n, B, bytes]."""
