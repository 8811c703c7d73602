"""Weights in NVFP4: FP4 numbers, an FP8 scale for each 16 inputs, and one of the weight.

O: outputs, I: inputs of the weight; G: groups of inputs.
"""

import torch
from torch import Tensor

from spmd_worker.model.layers.weight_slice import full_rectangle
from spmd_worker.model.weights.dequantise import fp4_values
from spmd_worker.model.weights.quantised_weight import LinearWeight, MisfitError, Range, full_words


class Nvfp4Weight(LinearWeight):
    """Bytes of two numbers [O, I / 2], the first in the low bits, `weight_scale` FP8 [O, G], and a float32: ModelOpt's
    `weight_scale_2`, which is multiplied by scales, or compressed-tensors' `weight_global_scale`, which divides them.
    """

    def _check(self) -> tuple[int, ...]:
        found = self._shape_of("numbers")
        if len(found) != 2:
            raise MisfitError(f"{self.parts['numbers']} has the shape {list(found)}, but must be a matrix")
        shape = found[0], 2 * found[1]
        self._block_size = self._find_block_size(shape)
        self._expect("numbers", None, torch.uint8)
        self._expect("scales", self._num_groups(shape), torch.float8_e4m3fn)
        role = self._role_of_all
        self._expect(role, None, torch.float32)
        if self._shape_of(role) not in ((), (1,)):
            raise MisfitError(f"{self.parts[role]} has the shape {list(self._shape_of(role))}, but must be one number")
        return shape

    @property
    def _role_of_all(self) -> str:
        """Role of the weight's own scale."""
        return "divisor" if "divisor" in self.parts else "factor"

    def _numbers(self, rows: Range, columns: Range) -> Tensor:
        words, inner = full_words(columns, 2)
        return fp4_values(self._read_part("numbers", rows, words))[:, inner]

    def _scales(self, rows: Range, columns: Range) -> Tensor:
        role = self._role_of_all
        of_weight = self._read_part(role, *full_rectangle(self._shape_of(role)))
        scales = self._read_part("scales", rows, columns).to(torch.float32)
        return scales.mul_(of_weight) if role == "factor" else scales.div_(of_weight)

    def _zeros(self, rows: Range, columns: Range) -> Tensor:
        raise AssertionError("has no zero points: has_zeros is False")
