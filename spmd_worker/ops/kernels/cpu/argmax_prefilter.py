"""Int8 pre-filter of the argmax of a linear layer: an int8 copy of the weight bounds the outputs of a row, and only
those that may be the argmax are computed in bfloat16, with the bits of the full GEMM (`native/argmax_prefilter.cpp`
has the bounds).

It saves up to half of a GEMM that may dominate the step of a small model. It costs more than it saves where many
outputs are computed all the same, because logits are close to each other or rows have a few very large elements: then
it is bypassed for a number of calls, which doubles each time.

R: rows; V: the weight's outputs; H: its inputs.
"""

from typing import Final

import torch
from torch import Tensor, nn

from spmd_worker.model_config.int8_format import row_bytes
from spmd_worker.native.library import Function
from spmd_worker.native.threads import num_threads
from spmd_worker.ops.kernels.api import Kernels
from spmd_worker.ops.kernels.cpu.argmax_bytes import argmax_bytes
from spmd_worker.ops.kernels.cpu.panels import argmax_results, check_tensor, checked_input, panel_shape

_MAX_COMPUTED_SHARE: Final = 1 / 8
"""Share of the logits above which the pre-filter is bypassed."""

_MIN_BYPASSED_CALLS: Final = 64
_MAX_BYPASSED_CALLS: Final = 4096


class ArgmaxPrefilter(nn.Module):
    """Implements `Kernels.argmax_module` for one weight in panels of bfloat16. The arguments `fill` and `find`
    are the compiled functions. The int8 copy is made at the first call, and again after a change of the weight.
    """

    def __init__(self, kernels: Kernels, fill: Function, find: Function, num_bytes: int) -> None:
        super().__init__()
        self._kernels, self._fill, self._find = kernels, fill, find
        self.int8_copy: Tensor
        self.register_buffer("int8_copy", torch.zeros(num_bytes, dtype=torch.int8), persistent=False)
        self._version = -1
        self._bypass_length, self._num_to_bypass = _MIN_BYPASSED_CALLS, 0

    def forward(
        self, x: Tensor, weight: Tensor, count: int, rows: Tensor | None, version: int
    ) -> tuple[Tensor, Tensor]:
        """`Kernels.argmax_module`: x [R, H], `weight` in panels, `rows` [V, H]."""
        if self._num_to_bypass > 0:
            self._num_to_bypass -= 1
            return self._kernels.linear_argmax(x, weight, count)
        if version != self._version:
            self.fill(weight)
            self._version = version
        values, indices, num_computed = self.find(x, weight, count, rows)
        if num_computed > _MAX_COMPUTED_SHARE * len(x) * count:
            self._num_to_bypass = self._bypass_length
            self._bypass_length = min(2 * self._bypass_length, _MAX_BYPASSED_CALLS)
        else:
            self._bypass_length = _MIN_BYPASSED_CALLS
        return values, indices

    def fill(self, weight: Tensor) -> None:
        """Make the int8 copy and its bounds from the weight as it is now."""
        num_outputs, num_inputs = self._checked_shape(weight)
        self._fill(weight.data_ptr(), num_inputs, num_outputs, self.int8_copy.data_ptr(), num_threads())

    def _checked_shape(self, weight: Tensor) -> tuple[int, int]:
        """Outputs and inputs of the weight: in panels of bfloat16, of the size that the copy was made for."""
        assert weight.is_contiguous(), weight.stride()
        assert weight.dtype == torch.bfloat16, weight.dtype
        shape = panel_shape(weight)
        num_bytes = argmax_bytes(*shape, "bfloat16", "cpu")
        assert self.int8_copy.numel() == num_bytes > 0, (self.int8_copy.shape, weight.shape)
        return shape

    def find(self, x: Tensor, weight: Tensor, count: int, rows: Tensor | None) -> tuple[Tensor, Tensor, int]:
        """The results of `Kernels.linear_argmax`, bit for bit, and the number of logits that were computed."""
        num_outputs, num_inputs = self._checked_shape(weight)
        assert 0 < count <= num_outputs, (count, num_outputs)
        x = checked_input(x, weight)
        if rows is not None:
            check_tensor(rows, x.dtype, (num_outputs, num_inputs))
        values, indices = argmax_results(len(x))
        scratch = torch.empty((len(x), row_bytes(num_inputs)), dtype=torch.int8)
        num_computed: int = self._find(
            *(x.data_ptr(), x.stride(0), *x.shape, weight.data_ptr(), num_outputs, count),
            *(None if rows is None else rows.data_ptr(), self.int8_copy.data_ptr()),
            *(values.data_ptr(), indices.data_ptr(), scratch.data_ptr(), num_threads()),
        )
        return values, indices, num_computed
