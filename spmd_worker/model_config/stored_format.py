"""Matrices that stay in memory as their checkpoint has them: shapes and bytes. Needs no torch.

O: outputs; I: inputs of a matrix; G: its groups of inputs. On GPUs, where they are experts, numbers and scales are two
tensors:

e2m1 (MXFP4)  uint8 [O, I / 2], two numbers a byte, the first in the low bits; scales uint8 [ceil(I / 128), O, 4],
              exponents of 32 inputs each, those of 128 inputs of all outputs side by side, as kernels read them
e4m3 (FP8)    uint8 [O, I]; scales float32 [O / `group_rows`, G], rounded up, as in the file

On CPUs all of them, int4 (GPTQ, AWQ and their like, GGUF's Q4_0: w = (q - zero) * scale, q of 0 to 15), nf4
(bitsandbytes: w = NF4_LEVELS[q] * scale) and three of GGUF's types are in panels of 16 outputs, of which
`native/stored.h` has the layout. There each row has scales of its own. GGUF's have groups of 32 inputs:

affine4  w = step * factor * q - step of minima * factor of minima, q of 0 to 15
iq4      the same of IQ4_LEVELS[q]
affine8  the same of q of -128 to 127, with a factor for each half of a group

Both steps are float16, both factors whole numbers of 8 bits: products of steps, factors and numbers are exact in
float32, so that a value is rounded once before bfloat16, as in the `gguf` package.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Final

MX_GROUP: Final = 32
"""Inputs of an exponent of MXFP4."""
STEP: Final = 128
"""Inputs that kernels multiply in one step, at most: a scale of several inputs covers a multiple of it."""
_MX_IN_STEP: Final = STEP // MX_GROUP
_PANEL: Final = 16
_LINE: Final = 64
"""Bytes of the head of a panel, and the multiple of its size."""
_USUAL_BYTES: Final = 5
"""Bytes of an output's group in a panel: a float32 scale and a zero point, 0 of nf4."""
_SCALE_BYTES: Final = {"e2m1": 1, "e4m3": 4, "affine4": 6, "iq4": 6, "affine8": 7}
"""Bytes of an output's group in a panel, if they are not these."""
NF4_LEVELS: Final = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
    *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
"""Values of NF4's numbers (https://arxiv.org/abs/2305.14314, appendix E), as the kernels have them."""
IQ4_LEVELS: Final = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""Those of IQ4_NL's and IQ4_XS's."""
_AFFINE_WORDS: Final = {
    "affine4": "4-bit integers with minima in groups of 32",
    "iq4": "IQ4 in groups of 32",
    "affine8": "8-bit integers in groups of 32",
}


@dataclass(frozen=True, slots=True)
class StoredFormat:
    """`number` is "e2m1", "e4m3", "int4", "nf4", "affine4", "iq4" or "affine8". A scale covers `group_rows` outputs and
    `group_inputs` inputs, 0 for all inputs.
    """

    number: str
    group_rows: int
    group_inputs: int

    @property
    def is_mxfp4(self) -> bool:
        return self.number == "e2m1"

    @property
    def is_of_panels(self) -> bool:
        """Whether panels alone hold it."""
        return self.number in ("int4", "nf4") or self.is_affine

    @property
    def is_affine(self) -> bool:
        """Whether groups have steps and factors, of values and of minima."""
        return self.number in ("affine4", "iq4", "affine8")

    @property
    def words(self) -> str:
        """The format as messages call it."""
        if self.number == "int4":
            groups = f"in groups of {self.group_inputs}" if self.group_inputs else "with one scale a row"
            return f"4-bit integers {groups}"
        if self.number == "nf4":
            return f"NF4 in blocks of {self.group_inputs}"
        if self.is_affine:
            return _AFFINE_WORDS[self.number]
        return "MXFP4" if self.is_mxfp4 else "FP8"

    @property
    def bits(self) -> int:
        """Bits of a number."""
        return 8 if self.number in ("e4m3", "affine8") else 4

    @property
    def group_bytes(self) -> int:
        """Bytes of the scales of a panel's group of inputs."""
        return _PANEL * _SCALE_BYTES.get(self.number, _USUAL_BYTES)

    def numbers_shape(self, num_outputs: int, num_inputs: int) -> tuple[int, int]:
        """Shape of the bytes of a matrix's numbers."""
        return num_outputs, num_inputs * self.bits // 8

    def scales_shape(self, num_outputs: int, num_inputs: int) -> tuple[int, ...]:
        """Shape of a matrix's scales."""
        if self.is_mxfp4:
            return -(-num_inputs // STEP), num_outputs, _MX_IN_STEP
        return -(-num_outputs // self.group_rows), self.num_groups(num_inputs)

    def num_groups(self, num_inputs: int) -> int:
        """Scales of a row of this many inputs."""
        return -(-num_inputs // self.group_inputs) if self.group_inputs else 1

    def num_bytes(self, num_outputs: int, num_inputs: int, *, is_in_panels: bool = False) -> int:
        """Bytes of a matrix."""
        if is_in_panels:
            return num_outputs // _PANEL * self.panel_bytes(num_inputs)
        scale_bytes = 1 if self.is_mxfp4 else 4
        shapes = self.numbers_shape(num_outputs, num_inputs), self.scales_shape(num_outputs, num_inputs)
        return prod(shapes[0]) + scale_bytes * prod(shapes[1])

    def panel_bytes(self, num_inputs: int) -> int:
        """Bytes of a panel of 16 outputs."""
        scales = self.num_groups(num_inputs) * self.group_bytes
        return _LINE + self.panel_number_bytes(num_inputs) + -(-scales // _LINE) * _LINE

    def panel_number_bytes(self, num_inputs: int) -> int:
        """Bytes of the numbers of a panel."""
        return -(-num_inputs // STEP) * STEP * _PANEL * self.bits // 8


MXFP4: Final = StoredFormat("e2m1", 1, MX_GROUP)
NF4: Final = StoredFormat("nf4", 1, 64)
"""Blocks are of the size that transformers writes: config.json does not tell."""
INT4: Final = StoredFormat("int4", 1, 32)
"""The format of Q4_0, whose zero point is 8."""
AFFINE4: Final = StoredFormat("affine4", 1, 32)
IQ4: Final = StoredFormat("iq4", 1, 32)
AFFINE8: Final = StoredFormat("affine8", 1, 32)
GGUF_FORMATS: Final[Mapping[str, tuple[StoredFormat, ...]]] = {
    "Q4_0": (INT4, AFFINE8),
    **dict.fromkeys(("Q4_1", "Q4_K"), (AFFINE4, AFFINE8)),
    **dict.fromkeys(("IQ4_NL", "IQ4_XS"), (IQ4, AFFINE8)),
    **dict.fromkeys(("Q3_K", "Q5_0", "Q5_1", "Q5_K", "Q6_K", "Q8_0"), (AFFINE8,)),
}
"""Formats in which panels hold a type of GGUF's tensors exactly, the smallest first. `AFFINE8` holds all."""

EXPERTS: Final = "mlp.experts"
"""Name, among `LayerFormats`, of all matrices of a layer's routed experts."""
LayerFormats = Mapping[int, Mapping[str, StoredFormat]]
"""Weights that stay in memory as they are stored: format by index of the layer, and by our name of a linear layer in
it, or `EXPERTS`.
"""
