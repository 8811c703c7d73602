"""Weights of one byte an element, int8 or FP8, as GPUs have them: rows of numbers and scales in one tensor.

O: outputs; I: inputs; G: scales of a row, 1 or I / 128.
"""

import torch
from torch import Tensor

from spmd_worker.model_config.byte_rows import GROUP, fits_bytes, inputs_of, row_bytes
from spmd_worker.ops.kernels.int8 import Int8Weights, row_maxima


def is_packed(weight: Tensor) -> bool:
    """Whether a weight is in byte rows."""
    return weight.dtype == torch.uint8


def byte_rows_shape(packed: Tensor) -> tuple[int, int]:
    """Outputs and inputs of a packed weight."""
    return packed.shape[0], inputs_of(packed.shape[-1])


class ByteRows(Int8Weights):
    """Packed layout of a weight of one byte an element: uint8 [O, bytes], see `model_config/byte_rows.py`; with scales
    of groups [O, 1, bytes], and with those of blocks of 128 rows and 128 inputs, which each row has, [O, 1, 1, bytes].
    Rows of numbers and scales are views.
    """

    number: torch.dtype = torch.int8

    def empty(self, weight: Tensor, *, is_gated: bool) -> Tensor:
        del is_gated
        return weight.new_zeros((len(weight), row_bytes(weight.shape[1])), dtype=torch.uint8)

    def numbers(self, packed: Tensor) -> Tensor:
        """[O, I], a view."""
        rows = packed.detach().flatten(1)
        return rows[:, : inputs_of(rows.shape[1])].view(self.number)

    def scales(self, packed: Tensor) -> Tensor:
        """Float32 [O, G], a view."""
        rows = packed.detach().flatten(1)
        num_inputs = inputs_of(rows.shape[1])
        num_scales = 1 if packed.ndim == 2 else num_inputs // GROUP
        return rows[:, num_inputs : num_inputs + 4 * num_scales].view(torch.float32)

    def numbers_and_scales(self, packed: Tensor, start: int, stop: int) -> tuple[Tensor, Tensor]:
        return self.numbers(packed)[start:stop], self.scales(packed)[start:stop].squeeze(1)

    def store(self, packed: Tensor, start: int, numbers: Tensor, scales: Tensor) -> None:
        """`scales`: float32 [n] or [n, G]."""
        rows = slice(start, start + len(numbers))
        # Float8 is copied as bytes: torch lacks other copies of it on some devices.
        self.numbers(packed).view(torch.uint8)[rows] = numbers.view(torch.uint8)
        self.scales(packed)[rows] = scales.view(len(numbers), -1)


class ByteRowPacking:
    """The methods of `kernels.api.QuantisedKernels` that pack weights in byte rows. Weights whose inputs do not fit
    them stay as they are.
    """

    weights: ByteRows

    def pack(self, weight: Tensor) -> Tensor:
        return self.pack_part(weight, row_maxima(weight))

    def pack_gated(self, weight: Tensor) -> Tensor:
        return self.pack(weight)

    def pack_part(self, weight: Tensor, maxima: Tensor) -> Tensor:
        return self.weights.pack(weight, maxima) if fits_bytes(weight.shape[1]) else weight

    def unpack(self, packed: Tensor, start: int, stop: int) -> Tensor:
        """A dequantised copy; a view of a plain weight."""
        return self.weights.dequantised(packed, start, stop) if is_packed(packed) else packed.detach()[start:stop]

    def repack_(self, packed: Tensor, start: int, rows: Tensor) -> None:
        if is_packed(packed):
            self.weights.requantise_changed(packed, start, rows)
        else:
            packed.detach()[start : start + len(rows)].copy_(rows)

    def repack_part_(self, packed: Tensor, start: int, rows: Tensor, maxima: Tensor) -> None:
        if is_packed(packed):
            self.weights.overwrite(packed, start, rows, maxima)
        else:
            packed.detach()[start : start + len(rows)].copy_(rows)

    def is_changed(self, packed: Tensor, start: int, rows: Tensor) -> bool:
        if not is_packed(packed):
            return not torch.equal(packed.detach()[start : start + len(rows)], rows)
        return bool(self.weights.is_changed(packed, start, rows).any())
