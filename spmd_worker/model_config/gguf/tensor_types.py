"""Types of GGUF's tensors: how many elements of a row are stored together, in how many bytes."""

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class TensorType:
    """`block` elements of a row take `block_bytes`. `number` is the format's, by which files name the type."""

    name: str
    number: int
    block: int
    block_bytes: int

    @property
    def is_plain(self) -> bool:
        """Whether elements are stored one by one, as numbers of this type."""
        return self.block == 1


_SIZES: Final = (
    *(("F32", 0, 1, 4), ("F16", 1, 1, 2), ("BF16", 30, 1, 2)),
    *(("Q4_0", 2, 32, 18), ("Q4_1", 3, 32, 20), ("Q5_0", 6, 32, 22), ("Q5_1", 7, 32, 24), ("Q8_0", 8, 32, 34)),
    *(("Q2_K", 10, 256, 84), ("Q3_K", 11, 256, 110), ("Q4_K", 12, 256, 144), ("Q5_K", 13, 256, 176)),
    *(("Q6_K", 14, 256, 210), ("IQ2_XXS", 16, 256, 66), ("IQ2_XS", 17, 256, 74), ("IQ3_XXS", 18, 256, 98)),
    *(("IQ1_S", 19, 256, 50), ("IQ4_NL", 20, 32, 18), ("IQ3_S", 21, 256, 110), ("IQ2_S", 22, 256, 82)),
    *(("IQ4_XS", 23, 256, 136), ("IQ1_M", 29, 256, 56), ("TQ1_0", 34, 256, 54), ("TQ2_0", 35, 256, 66)),
    ("MXFP4", 39, 32, 17),
)

TENSOR_TYPES: Final = {number: TensorType(name, number, *sizes) for name, number, *sizes in _SIZES}
"""Types by their numbers. Integers, float64 and what programs use in memory alone are left out: no weight has them."""
