"""Weights of FP4 numbers, two a byte, with scales of groups of inputs.

O: outputs, I: inputs of the weight; G: groups of inputs.
"""

import torch
from torch import Tensor

from spmd_worker.model.layers.weight_slice import Rectangle, full_rectangle
from spmd_worker.model.weights.dequantise import fp4_values
from spmd_worker.model.weights.quantised_weight import LinearWeight, MisfitError, Range, full_words
from spmd_worker.model_config.stored_format import MX_GROUP, StoredFormat


class Fp4Weight(LinearWeight):
    """DeepSeek V4's experts: bytes [O, I / 2], the first number in the low bits, and exponents [O, G] of 32 inputs."""

    def _check(self) -> tuple[int, ...]:
        found = self._shape_of("numbers")
        if len(found) != 2:
            raise MisfitError(f"{self.parts['numbers']} has the shape {list(found)}, but must be a matrix")
        shape = found[0], 2 * found[1]
        self._block_size = self._find_block_size(shape)
        self._check_dtypes(self._num_groups(shape))
        return shape

    def _check_dtypes(self, groups: tuple[int, int]) -> None:
        self._expect("numbers", None, torch.int8, torch.uint8)
        self._expect("scales", groups, torch.float8_e8m0fnu, torch.uint8)

    def is_stored_as(self, stored: StoredFormat) -> bool:
        return stored.is_mxfp4

    def read_stored(self, region: Rectangle, stored: StoredFormat) -> tuple[Tensor, Tensor]:
        rows, (start, stop) = region
        numbers = self._read_part("numbers", rows, (start // 2, stop // 2)).view(torch.uint8)
        return numbers, self._exponents(rows, (start // MX_GROUP, stop // MX_GROUP))

    def _exponents(self, rows: Range, columns: Range) -> Tensor:
        return self._read_part("scales", rows, columns).view(torch.uint8)

    def _numbers(self, rows: Range, columns: Range) -> Tensor:
        words, inner = full_words(columns, 2)
        return fp4_values(self._read_part("numbers", rows, words).view(torch.uint8))[:, inner]

    def _scales(self, rows: Range, columns: Range) -> Tensor:
        return self._exponents(rows, columns).view(torch.float8_e8m0fnu).to(torch.float32)

    def _zeros(self, rows: Range, columns: Range) -> Tensor:
        raise AssertionError("has no zero points: has_zeros is False")


class Nvfp4Weight(Fp4Weight):
    """NVFP4: the same bytes, `weight_scale` FP8 [O, G] of 16 inputs, and a float32 of the weight: ModelOpt's
    `weight_scale_2`, which is multiplied by scales, or compressed-tensors' `weight_global_scale`, which divides them.
    """

    def _check_dtypes(self, groups: tuple[int, int]) -> None:
        self._expect("numbers", None, torch.uint8)
        self._expect("scales", groups, torch.float8_e4m3fn)
        role = self._role_of_all
        self._expect(role, None, torch.float32)
        if self._shape_of(role) not in ((), (1,)):
            raise MisfitError(f"{self.parts[role]} has the shape {list(self._shape_of(role))}, but must be one number")

    @property
    def _role_of_all(self) -> str:
        """Role of the weight's own scale."""
        return "divisor" if "divisor" in self.parts else "factor"

    def is_stored_as(self, stored: StoredFormat) -> bool:
        return False

    def _scales(self, rows: Range, columns: Range) -> Tensor:
        role = self._role_of_all
        of_weight = self._read_part(role, *full_rectangle(self._shape_of(role)))
        scales = self._read_part("scales", rows, columns).to(torch.float32)
        return scales.mul_(of_weight) if role == "factor" else scales.div_(of_weight)
