"""Kernels of plain torch whose products take weights as files store them: the reference of compiled ones.

Held rows are one after the other, each of as many bytes as a sixteenth of a panel: its format, numbers, scales.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from spmd_worker.model_config.stored_format import StoredFormat
from spmd_worker.ops.attention.sdpa import SdpaBackend
from spmd_worker.ops.kernels import stored_weights
from spmd_worker.ops.kernels.api import StoredPanels
from spmd_worker.ops.kernels.reference import ReferenceKernels
from spmd_worker.worker.backends.backend import DeviceBackend, Operations

_HEAD, _UNIT = 4, 32
_KINDS = ("int4", "e2m1", "nf4", "e4m3", "affine4", "iq4", "affine8")


class RowPanels:
    """Implements `kernels.api.StoredPanels`."""

    def empty(self, stored: StoredFormat, shape: tuple[int, int], device: torch.device, *, is_gated: bool) -> Tensor:
        assert shape[0] % (16 * (1 + is_gated)) == shape[1] % _UNIT == 0, shape
        return torch.empty((shape[0], stored.panel_bytes(shape[1]) // 16), dtype=torch.uint8, device=device)

    def write_rows(self, packed: Tensor, stored: StoredFormat, start: int, numbers: Tensor, scales: Tensor) -> None:
        rows, end = packed[start : start + len(numbers)], _HEAD + numbers.shape[1]
        rows[:, 0], rows[:, 1] = _KINDS.index(stored.number), stored.group_inputs // _UNIT
        rows[:, _HEAD:end].copy_(numbers)
        if stored.number == "e4m3":
            rows[:, end : end + 4 * scales.shape[1]].view(torch.float32).copy_(scales)
            return
        if stored.is_mxfp4 or stored.is_affine:
            rows[:, end : end + scales[0].numel()].copy_(scales.flatten(1))
            return
        num_groups = scales.shape[1]
        rows[:, end : end + 4 * num_groups].view(torch.float32).copy_(scales[..., 0])
        rows[:, end + 4 * num_groups : end + 5 * num_groups].copy_(scales[..., 1])

    def read_values(self, packed: Tensor, stored: StoredFormat, num_inputs: int, rows: tuple[int, int]) -> Tensor:
        held, num_groups = packed[slice(*rows)], stored.num_groups(num_inputs)
        end = _HEAD + num_inputs * stored.bits // 8
        numbers = held[:, _HEAD:end]
        if stored.is_affine:
            size = num_groups * stored.group_bytes // 16
            return stored_weights.values(stored, numbers, held[:, end : end + size].unflatten(1, (num_groups, -1)))
        if stored.is_mxfp4:
            return stored_weights.values(stored, numbers, held[:, end : end + num_groups])
        scales = held[:, end : end + 4 * num_groups].view(torch.float32)
        if stored.number == "e4m3":
            return stored_weights.values(stored, numbers, scales)
        zeros = held[:, end + 4 * num_groups : end + 5 * num_groups].float()
        return stored_weights.values(stored, numbers, torch.stack((scales, zeros), dim=-1))


class PanelKernels(ReferenceKernels):
    """Products dequantise such weights first."""

    def stored_panels(self, dtype: torch.dtype) -> StoredPanels | None:
        return RowPanels() if dtype == torch.bfloat16 else None

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
        return super().linear(x, self._expanded(weight, x), bias, out)

    def linear_of_leaves(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, ends: Sequence[int], dtype: torch.dtype, *out: Any
    ) -> Tensor:
        return super().linear_of_leaves(x, self._expanded(weight, x), bias, ends, dtype, *out)

    def _expanded(self, weight: Tensor, x: Tensor) -> Tensor:
        if weight.dtype != torch.uint8:
            return weight
        kind, units = weight[0, :2].tolist()
        stored = StoredFormat(_KINDS[kind], 1, units * _UNIT)
        return RowPanels().read_values(weight, stored, x.shape[1], (0, len(weight))).to(x.dtype)


class PanelDevice(DeviceBackend):
    """A CPU with these kernels."""

    def operations(self) -> Operations:
        return Operations(PanelKernels(), SdpaBackend())
