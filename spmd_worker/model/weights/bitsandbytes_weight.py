"""Weights quantised by bitsandbytes, as transformers saves them (https://github.com/bitsandbytes-foundation).

O: outputs, I: inputs of the weight; N = O I.
"""

from math import isfinite
from typing import Any, Final

import torch
from torch import Tensor

from spmd_worker.base.config.plain_values import shown
from spmd_worker.base.files import JsonError, parse_json_object
from spmd_worker.model.layers.weight_slice import Rectangle
from spmd_worker.model.weights.dequantise import values_of_bytes
from spmd_worker.model.weights.quantised_weight import (
    LinearWeight,
    MisfitError,
    Range,
    ScaledWeight,
    full_words,
)
from spmd_worker.model_config.stored_format import NF4_LEVELS, StoredFormat

_BLOCK_SIZES: Final = (32, 64, 128, 256, 512, 1024, 2048, 4096)
_NUM_VALUES: Final = 16
_NUM_STEPS: Final = 256
_MOST_STATE_BYTES: Final = 1 << 12
_BY_ROWS: Final = 0
_PER_STEP: Final = 7.874015718698502e-3
"""1 / 127, by which the library multiplies in float32."""


class Nf4Weight(LinearWeight):
    """NF4 and FP4: `weight`, ceil(N / 2) bytes of two numbers, the first in the high bits; `quant_map` float32 [16],
    the value of each number; `absmax` [ceil(N / `blocksize`)], the scale of each block; and `quant_state`, JSON. Blocks
    run along the whole weight: they begin and end inside rows if their size does not divide the inputs.

    With double quantisation `absmax` is uint8, the index in `nested_quant_map` float32 [256] of what is multiplied by
    `nested_absmax`, one of `nested_blocksize` scales, and added to the JSON's `nested_offset`.
    """

    _values: Tensor
    _steps: Tensor | None
    _nested_size: int
    _offset: float

    def _check(self) -> tuple[int, ...]:
        state = self._state()
        rows, columns = self._matrix_shape(state)
        num_elements, size = rows * columns, self._size(state, "blocksize")
        num_bytes = self.files.num_bytes(self.parts["numbers"])
        if num_bytes != -(-num_elements // 2):
            raise MisfitError(
                f"{self.parts['numbers']} has {num_bytes} bytes, but {self.parts['state']} says {[rows, columns]}"
            )
        num_blocks = -(-num_elements // size)
        self._expect("scales", (num_blocks,), torch.float32, torch.uint8)
        self._values, self._steps = self._table("values", _NUM_VALUES), None
        if self.files.stored_dtype(self.parts["scales"]) == torch.uint8:
            self._check_nested(state, num_blocks)
        self._block_size = 1, size
        return rows, columns

    def _check_nested(self, state: dict[str, Any], num_blocks: int) -> None:
        for role, leaf in (("steps", "nested_quant_map"), ("nested", "nested_absmax")):
            if role not in self.parts:
                raise MisfitError(f"{self.parts['numbers']} has no {self.parts['numbers']}.{leaf}")
        self._nested_size, offset = self._size(state, "nested_blocksize"), state.get("nested_offset")
        self._expect("nested", (-(-num_blocks // self._nested_size),), torch.float32)
        self._steps = self._table("steps", _NUM_STEPS)
        if type(offset) is not float or not isfinite(offset):
            raise self._state_error(state, "nested_offset", "a finite number")
        if state.get("nested_dtype") != "float32":
            raise self._state_error(state, "nested_dtype", "float32")
        self._offset = offset

    def _state(self) -> dict[str, Any]:
        self._expect("state", None, torch.uint8)
        name, shape = self.parts["state"], self._shape_of("state")
        if len(shape) != 1 or shape[0] > _MOST_STATE_BYTES:
            raise MisfitError(
                f"{name} has the shape {list(shape)}, but must be at most {_MOST_STATE_BYTES} bytes of JSON"
            )
        try:
            return parse_json_object(bytes(self._read_part("state", (0, shape[0])).tolist()))
        except JsonError as error:
            raise MisfitError(f"{name} {error}") from None

    def _matrix_shape(self, state: dict[str, Any]) -> tuple[int, int]:
        shape = state.get("shape")
        if not isinstance(shape, list) or len(shape) != 2 or any(type(each) is not int or each < 1 for each in shape):
            raise self._state_error(state, "shape", "the two sizes of a matrix")
        return shape[0], shape[1]

    def _size(self, state: dict[str, Any], key: str) -> int:
        size = state.get(key)
        if type(size) is not int or size not in _BLOCK_SIZES:
            raise self._state_error(state, key, f"one of {', '.join(map(str, _BLOCK_SIZES))}")
        return size

    def _state_error(self, state: dict[str, Any], key: str, rule: str) -> MisfitError:
        return MisfitError(f"{self.parts['state']} has {key}={shown(state.get(key))}, but it must be {rule}")

    def _table(self, role: str, size: int) -> Tensor:
        self._expect(role, (size,), torch.float32)
        table = self._read_part(role, (0, size))
        # Waits for a GPU: other streams read the table.
        if not table.isfinite().all():
            raise MisfitError(f"{self.parts[role]} has values that are not finite")
        return table

    def _read_block(self, block: Rectangle) -> Tensor:
        num_inputs, size = self.shape[1], self._block_size[1]
        if num_inputs % size == 0:
            return super()._read_block(block)
        (first, last), (start, stop) = block
        begin, end = (first * num_inputs + start) // size, ((last - 1) * num_inputs + stop - 1) // size + 1
        scales = self._scales_of(begin, end)
        of_rows = torch.arange(first, last, device=scales.device).unsqueeze(1) * num_inputs
        places = of_rows + torch.arange(start, stop, device=scales.device)
        return self._numbers(*block).mul_(scales[places // size - begin])

    def is_stored_as(self, stored: StoredFormat) -> bool:
        # The table is of any numbers, FP4's too.
        is_nf4 = stored.number == "nf4" and self._values.tolist() == torch.tensor(NF4_LEVELS).tolist()
        return is_nf4 and self._block_size[1] == stored.group_inputs and self.shape[1] % stored.group_inputs == 0

    def read_stored(self, region: Rectangle, stored: StoredFormat) -> tuple[Tensor, Tensor]:
        rows, (start, stop) = region
        assert start % stored.group_inputs == stop % 2 == 0, region
        (num_rows, num_inputs), size = self.shape, stored.group_inputs
        packed = self.files.read_bytes(
            self.parts["numbers"], (num_rows, num_inputs // 2), (rows, (start // 2, stop // 2))
        )
        scales = self._scales(rows, (start // size, -(-stop // size)))
        return packed >> 4 | packed << 4, torch.stack((scales, torch.zeros_like(scales)), dim=-1)

    def _numbers(self, rows: Range, columns: Range) -> Tensor:
        (num_rows, num_inputs), (start, stop) = self.shape, columns
        if num_inputs % 2 == 0:
            (first, last), inner = full_words(columns, 2)
            return self._values_of((num_rows, num_inputs // 2), (rows, (first, last)))[:, inner]
        # Rows begin inside bytes: all of their inputs are read.
        words, inner = full_words((rows[0] * num_inputs, rows[1] * num_inputs), 2)
        values = self._values_of((-(-num_rows * num_inputs // 2),), (words,))[inner]
        return values.view(-1, num_inputs)[:, start:stop]

    def _values_of(self, shape: tuple[int, ...], region: Rectangle) -> Tensor:
        """Values of a region of the bytes, in this shape, twice as many in the last dimension."""
        packed = self.files.read_bytes(self.parts["numbers"], shape, region)
        return values_of_bytes(packed, self._values, is_high_first=True)

    def _scales(self, rows: Range, columns: Range) -> Tensor:
        num_groups = self.shape[1] // self._block_size[1]
        scales = self._scales_of(rows[0] * num_groups, rows[1] * num_groups)
        return scales.view(-1, num_groups)[:, slice(*columns)]

    def _scales_of(self, begin: int, end: int) -> Tensor:
        """Float32 scales of blocks, in the order of the file."""
        stored = self._read_part("scales", (begin, end))
        if self._steps is None:
            return stored
        (first, last), inner = full_words((begin, end), self._nested_size)
        factors = self._read_part("nested", (first, last)).repeat_interleave(self._nested_size)[inner]
        # Rounded twice, as in the library.
        return self._steps.index_select(0, stored.to(torch.int32)).mul_(factors).add_(self._offset)

    def _zeros(self, rows: Range, columns: Range) -> Tensor:
        raise AssertionError("numbers have values of their own: has_zeros is False")


class Int8Weight(ScaledWeight):
    """LLM.int8(): `weight` int8 [O, I], `SCB` float32 [O], 127 times the scales, and `weight_format`, the order of the
    numbers, which older releases had others of than rows. Outliers are of activations: they change no weight.
    """

    def _check(self) -> tuple[int, ...]:
        name = self.parts.get("layout")
        if name is not None:
            self._expect("layout", (), torch.uint8)
            layout = int(self._read_part("layout"))
            if layout != _BY_ROWS:
                raise MisfitError(f"{name} is {layout}, but must be {_BY_ROWS}, numbers by rows")
        return super()._check()

    def _read_block(self, block: Rectangle) -> Tensor:
        return super()._read_block(block).mul_(_PER_STEP)
