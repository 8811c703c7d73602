"""Layers with weights, whose parameters are read and written by region in the checkpoint's order, packed or not.

A region, like `WeightSlice.destination`, indexes the parameter as it was before its layer packed it.
"""

from collections.abc import Container, Iterable, Iterator
from typing import ClassVar

import torch
from torch import Tensor, nn

from spmd_worker.base.errors import CheckpointError
from spmd_worker.model.layers.weight_slice import PaddingSlice, Rectangle, WeightSlice, replicated
from spmd_worker.model_config.stored_format import StoredFormat
from spmd_worker.ops.kernels import stored_weights
from spmd_worker.ops.kernels.api import Kernels, QuantisedKernels, StoredPanels, StoredScaleKernels
from spmd_worker.ops.kernels.int8 import row_maxima

_READ_ELEMENTS = 1 << 22
"""Elements of a weight that is held as stored dequantised at once, with temporary tensors of about 10 bytes each."""


class CheckpointLayer(nn.Module):
    """A layer whose parameters a checkpoint fills."""

    is_float32: ClassVar[bool] = False
    """Whether its parameters are float32 whatever the model's dtype."""
    bounds: ClassVar[tuple[str, ...]] = ()
    """Names of parameters that may be infinite, as `WeightSlice.is_bound` says of their tensors."""

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

    def shape_of(self, parameter: str) -> tuple[int, ...]:
        """Shape of the parameter that regions index."""
        return tuple(self.get_parameter(parameter).shape)

    def dtype_of(self, parameter: str) -> torch.dtype:
        """Dtype of what `read_region` returns."""
        return self.get_parameter(parameter).dtype

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


def is_as_built(module: nn.Module, classes: Container[type], called: nn.Module | None = None) -> bool:
    """Whether a caller of `get_model` left a module and all in it as they were built, of these classes: neither
    replaced nor given hooks or another `forward`, which calls that join modules would not call. Those in `called` may
    be anything.
    """
    others = set() if called is None else {*called.modules()}
    return all(
        type(each) in classes
        and not each._forward_hooks
        and not each._forward_pre_hooks
        and "forward" not in vars(each)
        for each in module.modules()
        if each not in others
    )


class PackedLayer(CheckpointLayer):
    """`weight` [outputs, inputs] is prepacked by `pack_weights`; from then on its regions are ranges of rows.

    After `hold_as_stored` it is held as its file has it: in panels that the kernels' products take, or as bytes of
    numbers, and the buffer `weight_scales`. It is read dequantised, and replaced from such files alone.
    """

    weight: nn.Parameter
    weight_scales: Tensor
    stored: StoredFormat | None = None
    pairs_gates = False
    """Whether rows are gates and ups that the kernels have in pairs of panels."""
    _panels: StoredPanels | None = None
    """The kernels' panels, if the weight is held as stored in them."""
    _plain: tuple[tuple[int, ...], torch.dtype]
    """Shape and dtype of the weight before it was packed, or of the dequantised one if it is held as stored."""
    is_packed = False
    _kernels: Kernels
    _quantised: QuantisedKernels | None = None
    """`_kernels`, if they are quantised."""
    _scales: dict[tuple[int, int], Tensor]
    """A checkpoint's scales of rows of the weight, by their range, before it is packed."""

    def hold_as_stored(self, stored: StoredFormat, panels: StoredPanels | None = None) -> None:
        """Replace the plain weight, which is not filled yet, by one in this format: in `panels`, or as bytes and
        scales, both on the meta device.
        """
        (num_outputs, num_inputs), dtype = self.weight.shape, self.weight.dtype
        self.stored, self._panels, self._plain = stored, panels, ((num_outputs, num_inputs), dtype)
        if panels is not None:
            sizes, device = (num_outputs, num_inputs), self.weight.device
            packed = panels.empty(stored, sizes, device, is_gated=self.pairs_gates)
            self.weight = nn.Parameter(packed, requires_grad=False)
            return
        assert self.weight.is_meta, "no plain weight has memory before"
        numbers, scales = stored_weights.empty_tensors(stored, (num_outputs, num_inputs), self.weight.device)
        self.weight = nn.Parameter(numbers, requires_grad=False)
        self.register_buffer("weight_scales", scales)

    def hold_plain(self) -> None:
        """Undo `hold_as_stored` in panels, before the weight is filled."""
        assert self._panels is not None, "stacked weights have memory of their own"
        shape, dtype = self._plain
        self.stored = self._panels = None
        self.weight = nn.Parameter(torch.empty(shape, dtype=dtype, device=self.weight.device), requires_grad=False)

    @property
    def is_multiplied_as_held(self) -> bool:
        """Whether the kernels' products take the weight; otherwise they take `plain_weight`."""
        return self.stored is None or self._panels is not None

    def plain_weight(self) -> Tensor:
        """A dequantised copy of a weight that is held as stored."""
        return self.read_region("weight", ((0, self._plain[0][0]), (0, self._plain[0][1])))

    def write_stored(self, start: int, numbers: Tensor, scales: Tensor) -> None:
        """Replace rows from `start` on by a file's: see `stored_weights.write_rows`, `StoredPanels.write_rows`."""
        assert self.stored is not None, type(self).__name__
        if self._panels is not None:
            self._panels.write_rows(self.weight.data, self.stored, start, numbers, scales)
            return
        stored_weights.write_rows(self.stored, self.weight.data, self.weight_scales, start, numbers, scales)

    def pack_weights(self) -> None:
        """Replace the plain weight by one in the kernels' order, unless it was replaced before it was filled."""
        if self.stored is not None or self.is_packed:
            self.is_packed = True
            return
        self._plain = tuple(self.weight.shape), self.weight.dtype
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

    def pack_empty(self) -> None:
        """Replace a plain weight that is not filled yet by zeros in the kernels' order, if they have such a tensor:
        ranges of its rows are then packed as they are written, and no other copy of it exists.
        """
        if self.stored is None and self._quantised is None:
            self._replace_empty()

    def quantise_empty(self) -> None:
        """`pack_empty` of a weight whose scales follow from its own complete rows: `load_rows` fills it."""
        if self.is_quantised_when_filled and not self.is_packed:
            self._replace_empty()

    @property
    def is_quantised_when_filled(self) -> bool:
        """Whether `quantise_empty` replaces the weight, or has replaced it."""
        return self.stored is None and self._quantised is not None and not self.shares_rows

    def _replace_empty(self) -> None:
        empty = self._empty_packed()
        if empty is not None:
            self._plain = tuple(self.weight.shape), self.weight.dtype
            self.weight, self.is_packed = nn.Parameter(empty, requires_grad=False), True

    def _packed(self) -> Tensor:
        return self._kernels.pack(self.weight)

    def _empty_packed(self) -> Tensor | None:
        return self._kernels.empty_packed(self.weight, is_gated=self.pairs_gates)

    def shape_of(self, parameter: str) -> tuple[int, ...]:
        is_plain = parameter != "weight" or (self.stored is None and not self.is_packed)
        return super().shape_of(parameter) if is_plain else self._plain[0]

    def dtype_of(self, parameter: str) -> torch.dtype:
        is_stored = parameter == "weight" and self.stored is not None
        return self._plain[1] if is_stored else super().dtype_of(parameter)

    def read_region(self, parameter: str, region: Rectangle) -> Tensor:
        if self.stored is not None and parameter == "weight":
            (start, stop), columns = region
            size = stop - start, columns[1] - columns[0]
            values = torch.empty(size, dtype=self._plain[1], device=self.weight.device)
            step = max(1, _READ_ELEMENTS // self._plain[0][1])
            for first in range(start, stop, step):
                last = min(first + step, stop)
                values[first - start : last - start] = self._stored_rows(first, last)[:, slice(*columns)]
            return values
        if parameter != "weight" or not self.is_packed:
            return super().read_region(parameter, region)
        return self._kernels.unpack(self.weight, *region[0])

    def _stored_rows(self, start: int, stop: int) -> Tensor:
        """Values of rows of a weight that is held as stored, float32."""
        assert self.stored is not None, type(self).__name__
        if self._panels is not None:
            return self._panels.read_values(self.weight.data, self.stored, self._plain[0][1], (start, stop))
        return stored_weights.read_values(self.stored, self.weight.data, self.weight_scales, (start, stop))

    def check_changes(self, parameter: str, region: Rectangle, values: Tensor) -> None:
        """`CheckpointLayer.check_changes`: a weight that is held as stored keeps its values."""
        if self.stored is None or parameter != "weight":
            return
        held = self.read_region(parameter, region).to(values.dtype)
        if not torch.equal(held, values.to(held.device)):
            raise CheckpointError(stored_weight_error(self.stored))

    def write_region(self, parameter: str, region: Rectangle, values: Tensor) -> None:
        if self.stored is not None and parameter == "weight":
            # Written back unchanged.
            self.check_changes(parameter, region, values)
        elif parameter != "weight" or not self.is_packed:
            super().write_region(parameter, region, values)
        else:
            self._kernels.repack_(self.weight, region[0][0], self._converted(values))

    def needs_full_rows(self, parameter: str) -> bool:
        """Whether `load_rows` is to load the parameter: a quantised weight, whose scales follow from full rows."""
        return self.is_packed and self._quantised is not None and parameter == "weight"

    @property
    def shares_rows(self) -> bool:
        """Whether scales of a quantised weight follow from rows of which other ranks may have parts."""
        return self._quantised is not None and self._quantised.integer is None

    def load_rows(self, parameter: str, region: Rectangle, values: Tensor, full_rows: Tensor) -> None:
        """`write_region` of `values`, this rank's columns of `full_rows`, whatever the weight was before."""
        assert self._quantised is not None, parameter
        rows, maxima = self._converted(values), row_maxima(self._converted(full_rows))
        self._quantised.repack_part_(self.weight, region[0][0], rows, maxima)

    def requantised(self, full_rows: Tensor, inputs: tuple[int, int], scales: Tensor | None) -> Tensor:
        """Columns `inputs` of `full_rows` as a layer that `needs_full_rows` would hold them, dequantised; with the
        file's `scales` if it keeps them.
        """
        assert self._quantised is not None, type(self).__name__
        rows, stored = self._converted(full_rows)[:, slice(*inputs)].contiguous(), self.scale_kernels("weight")
        if scales is not None and stored is not None:
            return self._quantised.unpack(stored.pack_stored(rows, scales.to(rows.device)), 0, len(rows))
        packed = self._quantised.pack(rows)
        self._quantised.repack_part_(packed, 0, rows, row_maxima(self._converted(full_rows)))
        return self._quantised.unpack(packed, 0, len(rows))

    def _converted(self, values: Tensor) -> Tensor:
        """`values` in the dtype and on the device of the weight that was packed."""
        dtype = self.weight.dtype if self._quantised is None else self._quantised.dtype
        assert dtype.is_floating_point, f"{type(self).__name__} does not say that its weight is quantised"
        return values.detach().to(self.weight.device, dtype)


def stored_weight_error(stored: StoredFormat) -> str:
    """Reason and way out for a weight that is held as stored and would be changed."""
    return (
        f"is held in {stored.words}, as in its file, and cannot be changed but by reload_weights: set "
        f"model.dequantize_weights=true, which dequantises weights when they are loaded"
    )
