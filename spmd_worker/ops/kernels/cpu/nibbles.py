"""Weights of 4 bits a number in panels, as compiled products expand them: the layout of `native/nibbles.h`.

A packed weight is uint8 [O / 16, 1, bytes of a panel]; a gated one [O / 32, 2, bytes of a panel], panels of gate and up
projection interleaved.

O: outputs, I: inputs of a weight; n: rows; G: groups of inputs.
"""

from typing import Final

import torch
from torch import Tensor

from spmd_worker.model_config.int8_format import PANEL, STEP
from spmd_worker.model_config.stored_format import StoredFormat
from spmd_worker.ops.kernels import stored_weights
from spmd_worker.ops.kernels.cpu.panels import byte_panel_indices, contiguous_rows

_HEAD_BYTES: Final = 64
_INTEGERS, _FP4 = range(2)
"""Kinds of scales, numbered as in `nibbles.h`."""
_HALF: Final = STEP // 2
_LINES: Final = 4
"""Lines of a block, and outputs of a line."""


class NibblePanels:
    """Implements `kernels.api.StoredPanels`."""

    def empty(self, stored: StoredFormat, shape: tuple[int, int], device: torch.device, *, is_gated: bool) -> Tensor:
        num_outputs, num_inputs = shape
        num_each = 1 + is_gated
        assert num_outputs % (PANEL * num_each) == 0, shape
        assert num_inputs % STEP == 0, shape
        size = num_outputs // PANEL // num_each, num_each, stored.panel_bytes(num_inputs)
        return torch.empty(size, dtype=torch.uint8, device=device)

    def write_rows(self, packed: Tensor, stored: StoredFormat, start: int, numbers: Tensor, scales: Tensor) -> None:
        num_inputs = numbers.shape[1] * 2
        heads, blocks, groups = _parts_of(packed.detach(), stored, num_inputs)
        panel, part, output = byte_panel_indices(packed, start, start + len(numbers))
        index = panel, part, output // _LINES, output % _LINES
        kind = _FP4 if stored.is_mxfp4 else _INTEGERS
        heads[panel, part] = torch.tensor([stored.group_inputs or num_inputs, kind], dtype=torch.int32)
        wide = numbers.view(len(numbers), num_inputs // STEP, _HALF)
        # Inputs in their order, of which a byte has the one and that half a block after it.
        pairs = torch.stack((wide & 15, wide >> 4), dim=-1).flatten(-2)
        blocks[index] = pairs[..., :_HALF] | pairs[..., _HALF:] << 4
        if stored.is_mxfp4:
            groups[panel, part, :, output] = scales
            return
        found, zeros = scales.unbind(-1)
        groups[..., : 4 * PANEL].view(torch.float32)[panel, part, :, output] = found
        groups[..., 4 * PANEL :][panel, part, :, output] = zeros.to(torch.uint8)

    def read_values(self, packed: Tensor, stored: StoredFormat, rows: tuple[int, int]) -> Tensor:
        num_inputs = _num_inputs(packed, stored)
        _, blocks, groups = _parts_of(packed.detach(), stored, num_inputs)
        panel, part, output = byte_panel_indices(packed, *rows)
        bytes_ = blocks[panel, part, output // _LINES, output % _LINES]
        pairs = torch.cat((bytes_ & 15, bytes_ >> 4), dim=-1).view(len(bytes_), num_inputs // 2, 2)
        numbers = pairs[..., 0] | pairs[..., 1] << 4
        if stored.is_mxfp4:
            return stored_weights.values(stored, numbers, groups[panel, part, :, output])
        found = groups[..., : 4 * PANEL].view(torch.float32)[panel, part, :, output]
        zeros = groups[..., 4 * PANEL :][panel, part, :, output]
        return stored_weights.values(stored, numbers, torch.stack((found, zeros.float()), dim=-1))


def nibbles_fit(weight: Tensor, num_outputs: int, num_inputs: int) -> bool:
    """Whether panels of 4 bits may have these sizes: groups have 32 inputs or more."""
    least, most = (_HEAD_BYTES + num_inputs * PANEL // 2 + size for size in (0, 5 * PANEL * num_inputs // STEP + 63))
    num_panels = weight.shape[0] * weight.shape[1]
    return (
        num_panels * PANEL == num_outputs
        and least < weight.shape[2] <= most
        and weight.is_contiguous()
        and weight.is_cpu
    )


def checked_nibble_input(x: Tensor, weight: Tensor, num_outputs: int) -> Tensor:
    """The input rows of a GEMM with a weight of 4 bits, each contiguous."""
    assert x.dtype == torch.bfloat16, x.dtype
    assert x.is_cpu, x.device
    assert x.ndim == 2, x.shape
    assert nibbles_fit(weight, num_outputs, x.shape[1]), (weight.shape, num_outputs, x.shape)
    return contiguous_rows(x)


def _num_inputs(packed: Tensor, stored: StoredFormat) -> int:
    """Inputs of panels of this size."""
    num_inputs = (packed.shape[-1] - _HEAD_BYTES) * 2 // PANEL // STEP * STEP
    while stored.panel_bytes(num_inputs) > packed.shape[-1]:
        num_inputs -= STEP
    return num_inputs


def _parts_of(packed: Tensor, stored: StoredFormat, num_inputs: int) -> tuple[Tensor, Tensor, Tensor]:
    """Views of panels: heads int32 [..., 2]; blocks [..., 4, 4, I / 32, 16], the outputs of a line before lines; scales
    [..., G, bytes of a group].
    """
    heads = packed[..., :8].view(torch.int32)
    end = _HEAD_BYTES + num_inputs * PANEL // 2
    blocks = packed[..., _HEAD_BYTES:end].unflatten(-1, (num_inputs // STEP, _LINES, _LINES, _HALF))
    num_groups, num_bytes = stored.num_groups(num_inputs), PANEL if stored.is_mxfp4 else 5 * PANEL
    groups = packed[..., end : end + num_groups * num_bytes].unflatten(-1, (num_groups, num_bytes))
    return heads, blocks.permute(0, 1, 4, 3, 2, 5), groups
