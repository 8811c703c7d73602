"""Weights as files store them in panels, as compiled products expand them: the layout of `native/stored.h`.

A packed weight is uint8 [O / 16, 1, bytes of a panel]; a gated one [O / 32, 2, bytes of a panel], panels of gate and up
projection interleaved.

O: outputs, I: inputs of a weight; n: rows; G: groups of inputs.
"""

from dataclasses import dataclass
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from spmd_worker.model_config.int8_format import PANEL, STEP
from spmd_worker.model_config.stored_format import AFFINE4, AFFINE8, StoredFormat
from spmd_worker.ops.kernels import stored_weights
from spmd_worker.ops.kernels.cpu.panels import byte_panel_indices, contiguous_rows

_HEAD_BYTES: Final = 64
_KINDS: Final = {"int4": 0, "e2m1": 1, "nf4": 2, "e4m3": 3, "affine4": 5, "iq4": 6, "affine8": 7}
"""Kinds of numbers, as in `stored.h`."""
_WIDTHS: Final = (AFFINE4, AFFINE8)
"""Formats of 4 and of 8 bits, those with the largest groups."""
_MOST_GROUP_BYTES: Final = max(each.group_bytes for each in _WIDTHS)
_HALF: Final = STEP // 2
_STEP_BYTES: Final = 2
"""Bytes of an output's step in a group, and of its step of minima."""
_LINE_INPUTS: Final = 4 * STEP
_BYTE_BITS: Final = 8
_LINES: Final = 4
"""Lines of a block, and outputs of a line."""


@dataclass(frozen=True, slots=True)
class NativePanels:
    """Implements `kernels.api.StoredPanels`. `are_rows`: the order of numbers is the one that tiles read."""

    are_rows: bool

    def empty(self, stored: StoredFormat, shape: tuple[int, int], device: torch.device, *, is_gated: bool) -> Tensor:
        num_outputs, num_inputs = shape
        num_each = 1 + is_gated
        assert num_outputs % (PANEL * num_each) == 0, shape
        assert num_inputs % STEP == 0, shape
        size = num_outputs // PANEL // num_each, num_each, stored.panel_bytes(num_inputs)
        return torch.empty(size, dtype=torch.uint8, device=device)

    def write_rows(self, packed: Tensor, stored: StoredFormat, start: int, numbers: Tensor, scales: Tensor) -> None:
        num_inputs = numbers.shape[1] * 8 // stored.bits
        heads, numbers_of, groups = _parts_of(packed.detach(), stored, num_inputs)
        panel, part, output = byte_panel_indices(packed, start, start + len(numbers))
        heads[panel, part] = torch.tensor([stored.group_inputs or num_inputs, _KINDS[stored.number]], dtype=torch.int32)
        if stored.number == "e4m3":
            self._write_bytes(numbers_of, (panel, part, output), numbers)
            groups.view(torch.float32)[panel, part, :, output] = scales
            return
        if stored.is_affine:
            write = self._write_bytes_in_order if stored.bits == _BYTE_BITS else self._write_numbers
            write(numbers_of, (panel, part, output), numbers)
            steps, minima, factors = _affine_parts(groups)
            both = scales[..., : 2 * _STEP_BYTES].clone(memory_format=torch.contiguous_format).view(torch.int16)
            steps[panel, part, :, output], minima[panel, part, :, output] = both.unbind(-1)
            factors[panel, part, :, :, output] = scales[..., 4:]
            return
        self._write_numbers(numbers_of, (panel, part, output), numbers)
        if stored.is_mxfp4:
            groups[panel, part, :, output] = scales
            return
        found, zeros = scales.unbind(-1)
        groups[..., : 4 * PANEL].view(torch.float32)[panel, part, :, output] = found
        groups[..., 4 * PANEL :][panel, part, :, output] = zeros.to(torch.uint8)

    def read_values(self, packed: Tensor, stored: StoredFormat, num_inputs: int, rows: tuple[int, int]) -> Tensor:
        _, numbers_of, groups = _parts_of(packed.detach(), stored, num_inputs)
        panel, part, output = byte_panel_indices(packed, *rows)
        if stored.number == "e4m3":
            numbers = self._read_bytes(numbers_of, (panel, part, output))[:, :num_inputs]
            return stored_weights.values(stored, numbers, groups.view(torch.float32)[panel, part, :, output])
        if stored.number == "affine8":
            numbers = self._read_bytes_in_order(numbers_of, (panel, part, output))[:, :num_inputs]
            return stored_weights.values(stored, numbers, _affine_scales(groups, (panel, part, output)))
        numbers = self._read_numbers(numbers_of, (panel, part, output))[:, : num_inputs // 2]
        if stored.is_affine:
            return stored_weights.values(stored, numbers, _affine_scales(groups, (panel, part, output)))
        if stored.is_mxfp4:
            return stored_weights.values(stored, numbers, groups[panel, part, :, output])
        found = groups[..., : 4 * PANEL].view(torch.float32)[panel, part, :, output]
        zeros = groups[..., 4 * PANEL :][panel, part, :, output]
        return stored_weights.values(stored, numbers, torch.stack((found, zeros.float()), dim=-1))

    def _write_numbers(self, to: Tensor, index: "tuple[Tensor, Tensor, Tensor]", numbers: Tensor) -> None:
        """Write numbers uint8 [n, I / 2] as rows `index` of panels [..., bytes]."""
        panel, part, output = index
        wide = torch.stack((numbers & 15, numbers >> 4), dim=-1).flatten(1)
        if self.are_rows:
            padded = -(-wide.shape[1] // _LINE_INPUTS) * _LINE_INPUTS
            wide = F.pad(wide, (0, padded - wide.shape[1])).view(len(wide), padded // _LINE_INPUTS, 2, 2, STEP)
            bytes_ = wide[:, :, :, 0] | wide[:, :, :, 1] << 4
            _parted(to, -1, PANEL, 2 * STEP)[panel, part, :, output] = bytes_.transpose(2, 3).flatten(2)
            return
        wide = wide.view(len(wide), wide.shape[1] // STEP, 2, _HALF)
        blocks = _parted(to[..., : wide.shape[1] * PANEL * _HALF], -1, _LINES, _LINES, _HALF)
        blocks[panel, part, :, output % _LINES, output // _LINES] = wide[:, :, 0] | wide[:, :, 1] << 4

    def _read_numbers(self, source: Tensor, index: "tuple[Tensor, Tensor, Tensor]") -> Tensor:
        """The numbers that `_write_numbers` wrote, uint8 [n, a multiple of 64]."""
        panel, part, output = index
        if self.are_rows:
            bytes_ = _parted(source, -1, PANEL, 2 * STEP)[panel, part, :, output]
            bytes_ = _parted(bytes_, STEP, 2).transpose(-1, -2)
        else:
            bytes_ = _parted(source, -1, _LINES, _LINES, _HALF)[panel, part, :, output % _LINES, output // _LINES]
        pairs = _parted(torch.stack((bytes_ & 15, bytes_ >> 4), dim=-2).flatten(1), -1, 2)
        return pairs[..., 0] | pairs[..., 1] << 4

    def _write_bytes(self, to: Tensor, index: "tuple[Tensor, Tensor, Tensor]", numbers: Tensor) -> None:
        """Write numbers uint8 [n, I] as rows `index` of panels [..., bytes]."""
        panel, part, output = index
        if self.are_rows:
            numbers = (numbers & 0x70) << 1 | (numbers & 0x80) >> 3 | numbers & 0x0F
            padded = F.pad(numbers, (0, -numbers.shape[1] % _LINE_INPUTS)).view(len(numbers), -1, 2, 2, STEP)
            lines = padded.transpose(3, 4).reshape(len(numbers), -1, _LINE_INPUTS)
            _parted(to, -1, PANEL, _LINE_INPUTS)[panel, part, :, output] = lines
            return
        numbers = numbers.view(len(numbers), -1, _HALF)
        blocks = _parted(to[..., : numbers.shape[1] * _HALF * PANEL], -1, _LINES, _LINES, _HALF)
        blocks[panel, part, :, output % _LINES, output // _LINES] = numbers

    def _read_bytes(self, source: Tensor, index: "tuple[Tensor, Tensor, Tensor]") -> Tensor:
        """The numbers that `_write_bytes` wrote, uint8 [n, a multiple of 128]."""
        panel, part, output = index
        if self.are_rows:
            lines = _parted(source, -1, PANEL, _LINE_INPUTS)[panel, part, :, output]
            numbers = _parted(lines, 2, STEP, 2).transpose(3, 4).flatten(1)
            return (numbers & 0xE0) >> 1 | (numbers & 0x10) << 3 | numbers & 0x0F
        return _parted(source, -1, _LINES, _LINES, _HALF)[panel, part, :, output % _LINES, output // _LINES].flatten(1)

    def _write_bytes_in_order(self, to: Tensor, index: "tuple[Tensor, Tensor, Tensor]", numbers: Tensor) -> None:
        """Write whole numbers, bytes [n, I], as rows `index` of panels [..., bytes]."""
        panel, part, output = index
        if self.are_rows:
            padded = F.pad(numbers, (0, -numbers.shape[1] % _LINE_INPUTS)).view(len(numbers), -1, _LINE_INPUTS)
            _parted(to, -1, PANEL, _LINE_INPUTS)[panel, part, :, output] = padded
            return
        _parted(to[..., : numbers.shape[1] * PANEL], -1, PANEL)[panel, part, :, output] = numbers

    def _read_bytes_in_order(self, source: Tensor, index: "tuple[Tensor, Tensor, Tensor]") -> Tensor:
        """The numbers that `_write_bytes_in_order` wrote, uint8 [n, a multiple of 128]."""
        panel, part, output = index
        if self.are_rows:
            return _parted(source, -1, PANEL, _LINE_INPUTS)[panel, part, :, output].flatten(1)
        return _parted(source, -1, PANEL)[panel, part, :, output]


def _affine_parts(groups: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Views of groups of GGUF's types [..., G, bytes]: bits of steps and of those of minima int16 [..., G, 16], and
    factors uint8 [..., G, 2 or 3, 16], of minima first.
    """
    size = PANEL * _STEP_BYTES
    steps, minima = (groups[..., first : first + size].view(torch.int16) for first in (0, size))
    return steps, minima, _parted(groups[..., 2 * size :], -1, PANEL)


def _affine_scales(groups: Tensor, index: "tuple[Tensor, Tensor, Tensor]") -> Tensor:
    """Scales of rows as `StoredPanels.write_rows` takes them."""
    panel, part, output = index
    *steps, factors = _affine_parts(groups)
    both = torch.stack([each[panel, part, :, output] for each in steps], dim=2).view(torch.uint8)
    return torch.cat((both, factors[panel, part, :, :, output]), dim=2)


def _parted(tensor: Tensor, *sizes: int) -> Tensor:
    """A view with the last dimension, of part of a panel perhaps, as several."""
    return torch.unflatten(tensor, -1, sizes)


def stored_panels_fit(weight: Tensor, num_outputs: int, num_inputs: int) -> bool:
    """Whether panels of weights as files store them may have these sizes: groups have 32 inputs or more."""
    most = num_inputs // STEP * _MOST_GROUP_BYTES + _HEAD_BYTES - 1
    ends = (_HEAD_BYTES + each.panel_number_bytes(num_inputs) for each in _WIDTHS)
    num_panels = weight.shape[0] * weight.shape[1]
    return (
        num_panels * PANEL == num_outputs
        and any(end < weight.shape[2] <= end + most for end in ends)
        and weight.is_contiguous()
        and weight.is_cpu
    )


def checked_stored_input(x: Tensor, weight: Tensor, num_outputs: int) -> Tensor:
    """The input rows of a GEMM with a weight as its file stores it, each contiguous."""
    assert x.dtype == torch.bfloat16, x.dtype
    assert x.is_cpu, x.device
    assert x.ndim == 2, x.shape
    assert stored_panels_fit(weight, num_outputs, x.shape[1]), (weight.shape, num_outputs, x.shape)
    return contiguous_rows(x)


def _parts_of(packed: Tensor, stored: StoredFormat, num_inputs: int) -> tuple[Tensor, Tensor, Tensor]:
    """Views of panels: heads int32 [..., 2]; numbers [..., bytes]; scales [..., G, bytes of a group]."""
    end = _HEAD_BYTES + stored.panel_number_bytes(num_inputs)
    num_groups, num_bytes = stored.num_groups(num_inputs), stored.group_bytes
    groups = _parted(packed[..., end : end + num_groups * num_bytes], num_groups, num_bytes)
    return packed[..., :8].view(torch.int32), packed[..., _HEAD_BYTES:end], groups
