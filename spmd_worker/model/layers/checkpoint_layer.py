"""Layers with weights, whose parameters are read and written by region in the checkpoint's order, packed or not.

A region, like `WeightSlice.destination`, indexes the parameter as it was before its layer packed it.
"""

from collections.abc import Iterable, Iterator
from typing import ClassVar

import torch
from torch import Tensor, nn

from spmd_worker.model.layers.weight_slice import PaddingSlice, Rectangle, WeightSlice, replicated
from spmd_worker.ops.kernels.api import Kernels, QuantisedKernels, StoredScaleKernels
from spmd_worker.ops.kernels.int8 import row_maxima


class CheckpointLayer(nn.Module):
    """A layer whose parameters a checkpoint fills."""

    is_float32: ClassVar[bool] = False
    """Whether its parameters are float32 whatever the model's dtype."""

    def weight_slices(self, prefix: str) -> Iterator[WeightSlice]:
        """This rank's slices of checkpoint tensors. `prefix` is the layer's name. Replicated parameters by default: a
        layer that shards must override it. transformers has parameters without dimensions as buffers.
        """
        for name, parameter in self.named_parameters(prefix, recurse=False):
            yield replicated(name, tuple(parameter.shape), name, is_buffer=parameter.ndim == 0)

    def padding_slices(self, prefix: str) -> Iterable[PaddingSlice]:
        """Regions of the parameters that no checkpoint tensor fills."""
        del prefix
        return ()

    def read_region(self, parameter: str, region: Rectangle) -> Tensor:
        """A region of the parameter of this name: a view if it is held in the checkpoint's order, else a copy."""
        tensor: Tensor = getattr(self, parameter)
        return tensor.detach()[tuple(slice(*bounds) for bounds in region)]

    def write_region(self, parameter: str, region: Rectangle, values: Tensor) -> None:
        """Copy `values`, of any dtype and device, into a region of the parameter, whose storage stays."""
        self.read_region(parameter, region).copy_(values)

    def check_changes(self, parameter: str, region: Rectangle, values: Tensor) -> None:
        """Raise CheckpointError if `write_region` cannot write `values` into this region of the parameter."""
        del parameter, region, values


class PackedLayer(CheckpointLayer):
    """`weight` [outputs, inputs] is prepacked by `pack_weights`; from then on its regions are ranges of rows."""

    weight: nn.Parameter
    is_packed = False
    _kernels: Kernels
    _quantised: QuantisedKernels | None = None
    """`_kernels`, if they are quantised."""
    _scales: dict[tuple[int, int], Tensor]
    """A checkpoint's scales of rows of the weight, by their range, before it is packed."""

    def pack_weights(self) -> None:
        """Replace the plain weight by one in the kernels' order."""
        stored, scales = self.scale_kernels("weight"), self._all_scales()
        packed = self._packed() if stored is None or scales is None else stored.pack_stored(self.weight, scales)
        self.weight = nn.Parameter(packed, requires_grad=False)
        self.is_packed = True

    def scale_kernels(self, parameter: str) -> StoredScaleKernels | None:
        """Kernels that compute with a checkpoint's FP8 numbers of the parameter; None if they are dequantised."""
        return None if self._quantised is None or parameter != "weight" else self._quantised.stored

    def keep_scales(self, rows: tuple[int, int], scales: Tensor) -> None:
        """Scales of a checkpoint's numbers, float32 [n, 1] or [n, inputs / 128], with which these rows of a weight that
        is not packed yet were dequantised. They are used if all rows have them, of one kind.
        """
        self._scales = getattr(self, "_scales", {}) | {rows: scales}

    def write_scaled(self, rows: tuple[int, int], values: Tensor, scales: Tensor) -> None:
        """`write_region` of full rows of a packed weight that were dequantised with `scales`."""
        stored = self.scale_kernels("weight")
        assert stored is not None, type(self).__name__
        stored.repack_stored_(self.weight, rows[0], self._converted(values), scales.to(self.weight.device))

    def _all_scales(self) -> Tensor | None:
        """Scales of all rows, if there are such."""
        found = sorted(self.__dict__.pop("_scales", {}).items())
        starts = [0, *(stop for (_, stop), _ in found)]
        is_covered = [start for (start, _), _ in found] == starts[:-1] and starts[-1] == len(self.weight)
        if not is_covered or len({each.shape[1] for _, each in found}) != 1:
            return None
        return torch.cat([each for _, each in found]).to(self.weight.device)

    def _packed(self) -> Tensor:
        return self._kernels.pack(self.weight)

    def read_region(self, parameter: str, region: Rectangle) -> Tensor:
        if parameter != "weight" or not self.is_packed:
            return super().read_region(parameter, region)
        return self._kernels.unpack(self.weight, *region[0])

    def write_region(self, parameter: str, region: Rectangle, values: Tensor) -> None:
        if parameter != "weight" or not self.is_packed:
            super().write_region(parameter, region, values)
        else:
            self._kernels.repack_(self.weight, region[0][0], self._converted(values))

    def needs_full_rows(self, parameter: str) -> bool:
        """Whether `load_rows` is to load the parameter: a quantised weight, whose scales follow from full rows."""
        return self.is_packed and self._quantised is not None and parameter == "weight"

    def load_rows(self, parameter: str, region: Rectangle, values: Tensor, full_rows: Tensor) -> None:
        """`write_region` of `values`, this rank's columns of `full_rows`, whatever the weight was before."""
        assert self._quantised is not None, parameter
        rows, maxima = self._converted(values), row_maxima(self._converted(full_rows))
        self._quantised.repack_part_(self.weight, region[0][0], rows, maxima)

    def _converted(self, values: Tensor) -> Tensor:
        """`values` in the dtype and on the device of the weight that was packed."""
        dtype = self.weight.dtype if self._quantised is None else self._quantised.dtype
        assert dtype.is_floating_point, f"{type(self).__name__} does not say that its weight is quantised"
        return values.detach().to(self.weight.device, dtype)
