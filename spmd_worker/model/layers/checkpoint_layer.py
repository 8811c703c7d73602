"""Layers with weights: parts of their parameters are read and written in the checkpoint's order, packed or not.

A region is in the parameter as it is before its layer packs it, which `WeightSlice.destination` speaks of too.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import ClassVar

from torch import Tensor, nn

from spmd_worker.model.layers.weight_slice import PaddingSlice, Rectangle, WeightSlice
from spmd_worker.ops.kernels.api import Kernels, QuantisedKernels
from spmd_worker.ops.kernels.int8 import row_maxima


class CheckpointLayer(nn.Module, ABC):
    """A layer whose parameters a checkpoint fills."""

    is_float32: ClassVar[bool] = False
    """Whether its parameters are float32 in every dtype."""

    @abstractmethod
    def weight_slices(self, prefix: str) -> Iterator[WeightSlice]:
        """What of which checkpoint tensors this rank holds, and where. `prefix` is this layer's name."""

    def padding_slices(self, prefix: str) -> Iterator[PaddingSlice]:
        """What of the parameters no checkpoint fills."""
        del prefix
        return iter(())

    def read_region(self, parameter: str, region: Rectangle) -> Tensor:
        """Part of the parameter of this name: a view where it is held in the checkpoint's order, else a copy."""
        tensor: Tensor = getattr(self, parameter)
        return tensor.detach()[tuple(slice(*bounds) for bounds in region)]

    def write_region(self, parameter: str, region: Rectangle, values: Tensor) -> None:
        """Make `values`, of any dtype and device, this part of the parameter, in place: its storage stays."""
        self.read_region(parameter, region).copy_(values)

    def takes_whole_rows(self, parameter: str) -> bool:
        """Whether the parameter depends on whole rows of the checkpoint's tensor: see `PackedLayer.load_rows`."""
        del parameter
        return False

    def load_rows(self, parameter: str, region: Rectangle, values: Tensor, whole_rows: Tensor) -> None:
        """As `write_region`, with the rows of the checkpoint's tensor of which `values` are parts. Only for a parameter
        that `takes_whole_rows`.
        """
        raise AssertionError(parameter)

    def check_changes(self, parameter: str, region: Rectangle, values: Tensor) -> None:
        """Raise CheckpointError where `write_region` cannot make `values` this part of the parameter."""
        del parameter, region, values


class PackedLayer(CheckpointLayer):
    """A layer whose `weight` [outputs, inputs] its kernels hold in an order of their own, after `pack_weights`. From
    then on a region of the weight is some of its rows.
    """

    weight: nn.Parameter
    is_packed = False
    _kernels: Kernels
    _quantised: QuantisedKernels | None = None
    """`_kernels`, where they are such."""

    def pack_weights(self) -> None:
        """Let the kernels have the weight in their own order; the packed copy replaces the plain one."""
        self.weight = nn.Parameter(self._packed(), requires_grad=False)
        self.is_packed = True

    def _packed(self) -> Tensor:
        """The plain weight as the kernels like it."""
        return self._kernels.pack(self.weight)

    def read_region(self, parameter: str, region: Rectangle) -> Tensor:
        """See `CheckpointLayer.read_region`."""
        if parameter != "weight" or not self.is_packed:
            return super().read_region(parameter, region)
        return self._kernels.unpack(self.weight, *region[0])

    def write_region(self, parameter: str, region: Rectangle, values: Tensor) -> None:
        """See `CheckpointLayer.write_region`."""
        if parameter != "weight" or not self.is_packed:
            super().write_region(parameter, region, values)
        else:
            self._kernels.repack_(self.weight, region[0][0], self._as_given(values))

    def takes_whole_rows(self, parameter: str) -> bool:
        """A quantised weight does: the scale of a row is that of all of its inputs."""
        return self.is_packed and self._quantised is not None and parameter == "weight"

    def load_rows(self, parameter: str, region: Rectangle, values: Tensor, whole_rows: Tensor) -> None:
        """See `CheckpointLayer.load_rows`. What the weight was before makes no difference."""
        assert self._quantised is not None, parameter
        rows, maxima = self._as_given(values), row_maxima(self._as_given(whole_rows))
        self._quantised.repack_part_(self.weight, region[0][0], rows, maxima)

    def _as_given(self, values: Tensor) -> Tensor:
        """As `pack_weights` was given the weight."""
        dtype = self.weight.dtype if self._quantised is None else self._quantised.dtype
        assert dtype.is_floating_point, f"{type(self).__name__} does not say that its weight is quantised"
        return values.detach().to(self.weight.device, dtype)
