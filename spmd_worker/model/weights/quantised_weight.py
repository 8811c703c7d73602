"""Quantised weights: the tensors of the file that make one, and any rectangle of it dequantised to float32.

Each layout reads the stored numbers of a rectangle, widened to full int32 words if they are packed, and the scales that
the rectangle needs; nothing else of the file. Knows formats, not models or ranks.

O: outputs, I: inputs of the weight; P: numbers per int32; G: groups of inputs.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from spmd_worker.base.errors import CheckpointError
from spmd_worker.model.layers.weight_slice import Rectangle, extents
from spmd_worker.model.weights.checkpoint import Checkpoint
from spmd_worker.model.weights.dequantise import AWQ_ORDER, apply_scales, mxfp4, unpack
from spmd_worker.model.weights.region import split_region
from spmd_worker.model_config.stored_format import MX_GROUP, StoredFormat
from spmd_worker.model_config.weight_format import WeightFormat

_BLOCK_ELEMENTS = 1 << 20
"""Elements dequantised at once, with temporary tensors of about 20 bytes per element."""
_SCALED_GROUP = 128
"""Inputs of a scale that kernels can use as it is, beside all inputs."""
_WORD, _MIDDLE = 8, 8
"""Numbers of 4 bits in an int32, and the zero point of symmetric ones."""
_SCALE_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.float8_e8m0fnu)

Range = tuple[int, int]


class MisfitError(CheckpointError):
    """Tensors of one weight do not match each other, or the format in config.json. The message begins with a name."""


@dataclass(slots=True)
class QuantisedWeight(ABC):
    """A weight of `shape`. `parts` are the names of its tensors in the checkpoint, by role.

    `is_stored_transposed`: the file has the last two dimensions transposed.
    """

    files: Checkpoint
    format: WeightFormat
    parts: dict[str, str]
    shape: tuple[int, ...] = field(init=False)
    is_stored_transposed = False

    def __post_init__(self) -> None:
        self.shape = self._check()

    def blocks(self, region: Rectangle, max_elements: int) -> Iterator[Rectangle]:
        """Cut a region into blocks of about `max_elements`, in the order of the file."""
        if not self.is_stored_transposed:
            yield from split_region(self.shape, region, max_elements)
            return
        stored = (*self.shape[:-2], self.shape[-1], self.shape[-2])
        for block in split_region(stored, _transposed(region), max_elements):
            yield _transposed(block)

    def read(self, region: Rectangle) -> Tensor:
        """The region as float32, dequantised block by block. Raises CheckpointError."""
        result = torch.empty(extents(region), dtype=torch.float32, device=self.files.staging.device)
        for block in self.blocks(region, _BLOCK_ELEMENTS):
            inside = tuple(slice(a - start, b - start) for (a, b), (start, _) in zip(block, region, strict=True))
            result[inside] = self._read_block(block)
        return result

    @abstractmethod
    def is_stored_as(self, stored: StoredFormat) -> bool:
        """Whether `read_stored` reads numbers and scales of this format."""

    @abstractmethod
    def read_stored(self, region: Rectangle, stored: StoredFormat) -> tuple[Tensor, Tensor]:
        """Bytes of numbers and scales of a region of a matrix, which begins and ends where scales do, as
        `stored_weights.write_rows` and `StoredPanels.write_rows` take them, outputs first. Only if `is_stored_as`.
        """

    @abstractmethod
    def _check(self) -> tuple[int, ...]:
        """The weight's shape. Raises MisfitError if the parts do not match."""

    @abstractmethod
    def _read_block(self, block: Rectangle) -> Tensor:
        """The block as float32."""

    def _shape_of(self, role: str) -> tuple[int, ...]:
        return self.files.shape(self.parts[role])

    def _expect(self, role: str, shape: tuple[int, ...] | None, *dtypes: torch.dtype) -> None:
        """Raise MisfitError for a part of another shape, unless it is None, or of another dtype."""
        name, found, dtype = self.parts[role], self._shape_of(role), self.files.stored_dtype(self.parts[role])
        if shape is not None and found != shape:
            raise MisfitError(f"{name} has the shape {list(found)}, but the other tensors imply {list(shape)}")
        if dtype not in dtypes:
            words = " or ".join(str(each).removeprefix("torch.") for each in dtypes)
            raise MisfitError(f"{name} is {str(dtype).removeprefix('torch.')}, but must be {words}")

    def _read_part(self, role: str, *ranges: Range) -> Tensor:
        return self.files.read_stored(self.parts[role], ranges)


class LinearWeight(QuantisedWeight):
    """[O, I] with scales [Go, Gi] of rectangles of `_block_size`, or of groups of inputs in any order."""

    _block_size: tuple[int, int]

    def _read_block(self, block: Rectangle) -> Tensor:
        rows, columns = block
        row_groups, row_range = _groups_of(torch.arange(*rows) // self._block_size[0])
        column_groups, column_range = _groups_of(self._groups_of_inputs(columns))
        scales = self._scales(row_range, column_range)
        zeros = self._zeros(row_range, column_range) if self.format.has_zeros else None
        return apply_scales(self._numbers(rows, columns), scales, zeros, row_groups, column_groups)

    def is_stored_as(self, stored: StoredFormat) -> bool:
        num_inputs = self.shape[1]
        if stored.number != "int4" or (self.format.number, self.format.bits) != ("int", 4):
            return False
        if self._block_size != (1, stored.group_inputs or num_inputs) or self.format.has_order:
            return False
        # Files may have an order where config.json says that there is none.
        columns = 0, num_inputs
        ascending = torch.arange(num_inputs) // self._block_size[1]
        return "order" not in self.parts or torch.equal(self._groups_of_inputs(columns).cpu(), ascending)

    def read_stored(self, region: Rectangle, stored: StoredFormat) -> tuple[Tensor, Tensor]:
        rows, (start, stop) = region
        assert stored.number == "int4", stored
        assert start % _WORD == stop % _WORD == 0, region
        size = self._block_size[1]
        groups = start // size, -(-stop // size)
        scales = self._scales(rows, groups).to(torch.float32)
        zeros = self._zeros(rows, groups) if self.format.has_zeros else torch.full_like(scales, _MIDDLE)
        return self._nibbles(rows, (start // _WORD, stop // _WORD)), torch.stack((scales, zeros.to(scales)), dim=-1)

    def _nibbles(self, rows: Range, words: Range) -> Tensor:
        """Unsigned numbers of 4 bits, two a byte, uint8 [outputs, inputs / 2], of words of eight inputs."""
        raise AssertionError(f"{type(self).__name__} has numbers of 8 bits: is_stored_as says no")

    @abstractmethod
    def _numbers(self, rows: Range, columns: Range) -> Tensor:
        """Stored numbers as float32 [outputs, inputs] of those ranges."""

    @abstractmethod
    def _scales(self, rows: Range, columns: Range) -> Tensor:
        """Scales of those groups of outputs and inputs."""

    @abstractmethod
    def _zeros(self, rows: Range, columns: Range) -> Tensor:
        """Zero points of those groups, if the format has them."""

    def _groups_of_inputs(self, columns: Range) -> Tensor:
        if "order" not in self.parts:
            return torch.arange(*columns) // self._block_size[1]
        groups = self._read_part("order", columns).to(torch.int64)
        num_groups = self.shape[1] // self._block_size[1]
        if len(groups) and not 0 <= int(groups.min()) <= int(groups.max()) < num_groups:
            raise CheckpointError(f"{self.parts['order']}: has groups outside 0 to {num_groups - 1}")
        return groups

    def _find_block_size(self, shape: tuple[int, int]) -> tuple[int, int]:
        """Raises MisfitError if groups do not divide the inputs."""
        rows, columns = self.format.block_rows or shape[0], self.format.block_columns or shape[1]
        if rows == 1 and shape[1] % max(columns, 1):
            raise MisfitError(
                f"{self.parts['numbers']} has {shape[1]} inputs, which is not a multiple of the group size {columns}"
            )
        return max(rows, 1), max(columns, 1)

    def _num_groups(self, shape: tuple[int, int]) -> tuple[int, int]:
        rows, columns = self._block_size
        return -(-shape[0] // rows), -(-shape[1] // columns)


class ScaledWeight(LinearWeight):
    """FP8 or int8 `weight` [O, I], `weight_scale` (DeepSeek: `weight_scale_inv`), zero points of its shape."""

    _scale_shape: tuple[int, int]

    def _check(self) -> tuple[int, ...]:
        shape = self._shape_of("numbers")
        if len(shape) != 2:
            raise MisfitError(f"{self.parts['numbers']} has the shape {list(shape)}, but must be a matrix")
        wanted = torch.float8_e4m3fn if self.format.number == "e4m3" else torch.int8
        self._expect("numbers", None, wanted)
        self._expect("scales", None, *_SCALE_DTYPES)
        pair = shape[0], shape[1]
        found = self._shape_of("scales")
        if self.format.block_rows is None:
            # One scale per tensor, or one per row.
            has_rows = found in ((shape[0],), (shape[0], 1))
            self._block_size = 1 if has_rows else max(shape[0], 1), max(shape[1], 1)
        else:
            self._block_size = self._find_block_size(pair)
        self._scale_shape = self._num_groups(pair)
        for role in ("scales", "zeros") if self.format.has_zeros else ("scales",):
            self._check_scales(role)
        if "order" in self.parts:
            self._expect("order", (shape[1],), torch.int32)
        return shape

    def _check_scales(self, role: str) -> None:
        """Raise MisfitError for scales of another shape, of which dimensions of 1 may be left out."""
        rows, columns = self._scale_shape
        allowed = [(rows, columns), *([(rows,)] if columns == 1 else []), *([()] if rows == columns == 1 else [])]
        # ModelOpt leaves dimensions for the numbers of a block.
        allowed.append((rows, 1, columns, 1))
        found = self._shape_of(role)
        if found not in allowed:
            raise MisfitError(
                f"{self.parts[role]} has the shape {list(found)}, but must have {[rows, columns]} for "
                f"{self.parts['numbers']} of shape {list(self._shape_of('numbers'))} in {self.format.words}"
            )

    def row_scales(self, region: Rectangle) -> Tensor | None:
        """Float32 scales of a region's rows, [n, 1], or of their groups of 128 inputs, [n, G]; None if the numbers are
        not FP8, or the region's rectangles of one scale are of other sizes.
        """
        rows, (first, stop) = region
        num_inputs, width = self.shape[1], self._block_size[1]
        is_grouped = width == _SCALED_GROUP < num_inputs and first % width == 0 and (stop - first) % width == 0
        if self.format.number != "e4m3" or self.format.has_zeros or not (is_grouped or width >= num_inputs):
            return None
        return self._scales_of_rows(rows, (first // width, stop // width) if is_grouped else (0, 1))

    def _scales_of_rows(self, rows: Range, columns: Range) -> Tensor:
        row_groups, row_range = _groups_of(torch.arange(*rows) // self._block_size[0])
        scales = self._scales(row_range, columns)
        return scales.index_select(0, row_groups.to(scales.device))

    def is_stored_as(self, stored: StoredFormat) -> bool:
        if stored.number != "e4m3":
            return super().is_stored_as(stored)
        rows, columns = self._block_size
        is_plain = self.format.number == "e4m3" and not self.format.has_zeros and "order" not in self.parts
        # A scale of several rows may be one of each.
        is_right = columns == stored.group_inputs if stored.group_inputs else columns >= self.shape[1]
        return is_plain and is_right and stored.group_rows in (1, rows)

    def read_stored(self, region: Rectangle, stored: StoredFormat) -> tuple[Tensor, Tensor]:
        if stored.number != "e4m3":
            return super().read_stored(region, stored)
        rows, columns = region
        numbers = self._read_part("numbers", rows, columns).view(torch.uint8)
        of_rows, of_columns = (
            (start // size, -(-stop // size)) for (start, stop), size in zip(region, self._block_size, strict=True)
        )
        has_own = stored.group_rows == 1
        return numbers, self._scales_of_rows(rows, of_columns) if has_own else self._scales(of_rows, of_columns)

    def _numbers(self, rows: Range, columns: Range) -> Tensor:
        return self._read_part("numbers", rows, columns).to(torch.float32)

    def _scales(self, rows: Range, columns: Range) -> Tensor:
        return self._read_scales("scales", rows, columns)

    def _zeros(self, rows: Range, columns: Range) -> Tensor:
        return self._read_scales("zeros", rows, columns)

    def _read_scales(self, role: str, rows: Range, columns: Range) -> Tensor:
        num_dimensions = len(self._shape_of(role))
        ranges = (rows, (0, 1), columns, (0, 1)) if num_dimensions == 4 else (rows, columns)[:num_dimensions]
        return self._read_part(role, *ranges).to(torch.float32).reshape(rows[1] - rows[0], columns[1] - columns[0])


class PackedWeight(ScaledWeight):
    """compressed-tensors' `weight_packed` int32 [O, I / P], `weight_shape`, `weight_scale` [O, G], and zero points
    [O / P, G], packed along the outputs. Numbers and zero points are stored with an offset of half their range.
    """

    def _check(self) -> tuple[int, ...]:
        packed, num_packed = self._shape_of("numbers"), 32 // self.format.bits
        self._expect("shape", (2,), torch.int64, torch.int32)
        shape = tuple(self._read_part("shape", (0, 2)).tolist())
        rows, columns = shape
        if min(shape) < 1 or packed != (rows, -(-columns // num_packed)):
            raise MisfitError(
                f"{self.parts['numbers']} has the shape {list(packed)}, but {self.parts['shape']} says {list(shape)}"
            )
        self._expect("numbers", None, torch.int32)
        self._expect("scales", None, *_SCALE_DTYPES)
        self._block_size = self._find_block_size((rows, columns))
        self._scale_shape = self._num_groups((rows, columns))
        self._check_scales("scales")
        if self.format.has_zeros:
            self._expect("zeros", (-(-self._scale_shape[0] // num_packed), self._scale_shape[1]), torch.int32)
        if "order" in self.parts:
            self._expect("order", (columns,), torch.int32)
        return shape

    def _numbers(self, rows: Range, columns: Range) -> Tensor:
        wide, inner = full_words(columns, 32 // self.format.bits)
        packed = self._read_part("numbers", rows, wide)
        numbers = unpack(packed, self.format.bits, 1)[:, inner]
        # Zero points have the same offset.
        return (numbers - (0 if self.format.has_zeros else 1 << (self.format.bits - 1))).to(torch.float32)

    def _nibbles(self, rows: Range, words: Range) -> Tensor:
        return self._read_part("numbers", rows, words).contiguous().view(torch.uint8)

    def _zeros(self, rows: Range, columns: Range) -> Tensor:
        wide, inner = full_words(rows, 32 // self.format.bits)
        return unpack(self._read_part("zeros", wide, columns), self.format.bits, 0)[inner]


class GptqWeight(LinearWeight):
    """`qweight` int32 [I / P, O], packed along the inputs, `scales` [G, O], `qzeros` int32 [G, O / P], and `g_idx`
    int32 [I], the group of each input. The first version stores zero points minus one
    (https://github.com/AutoGPTQ/AutoGPTQ).
    """

    is_stored_transposed = True

    def _check(self) -> tuple[int, ...]:
        found = self._shape_of("numbers")
        if len(found) != 2:
            raise MisfitError(f"{self.parts['numbers']} has the shape {list(found)}, but must be a matrix")
        shape = self._unpacked(found)
        num_packed = 32 // self.format.bits
        self._block_size = self._find_block_size(shape)
        num_groups = self._num_groups(shape)[1]
        self._expect("numbers", None, torch.int32)
        self._expect("scales", (num_groups, shape[0]), *_SCALE_DTYPES)
        self._expect("zeros", (num_groups, -(-shape[0] // num_packed)), torch.int32)
        if "order" in self.parts:
            self._expect("order", (shape[1],), torch.int32, torch.int64)
        return shape

    def _unpacked(self, found: tuple[int, ...]) -> tuple[int, int]:
        return found[1], found[0] * (32 // self.format.bits)

    def _numbers(self, rows: Range, columns: Range) -> Tensor:
        wide, inner = full_words(columns, 32 // self.format.bits)
        return unpack(self._read_part("numbers", wide, rows), self.format.bits, 0)[inner].T.to(torch.float32)

    def _nibbles(self, rows: Range, words: Range) -> Tensor:
        # The bytes of a word have its inputs in their order.
        return self._read_part("numbers", words, rows).T.contiguous().view(torch.uint8)

    def _scales(self, rows: Range, columns: Range) -> Tensor:
        return self._read_part("scales", columns, rows).T

    def _zeros(self, rows: Range, columns: Range) -> Tensor:
        wide, inner = full_words(rows, 32 // self.format.bits)
        packed, bits = self._read_part("zeros", columns, wide), self.format.bits
        stored = unpack(packed, bits, 1)[:, inner].T
        if not self.format.zero_offset:
            return stored
        # Writers subtract from full words: a zero point of 0 borrows from the next one.
        one_each = sum(1 << shift for shift in range(0, 32, bits))
        zeros = unpack(packed + one_each, bits, 1)[:, inner].T
        if not self.format.is_symmetric:
            return zeros
        # Some writers of the first version store the middle itself.
        middle = 1 << (self.format.bits - 1)
        return torch.where(stored == middle, stored, zeros)


class AwqWeight(GptqWeight):
    """`qweight` int32 [I, O / 8], packed along the outputs in `AWQ_ORDER`, `scales` [G, O], `qzeros` int32 [G, O / 8]
    (https://github.com/casper-hansen/AutoAWQ, gemm).
    """

    def _unpacked(self, found: tuple[int, ...]) -> tuple[int, int]:
        return found[1] * 8, found[0]

    def _numbers(self, rows: Range, columns: Range) -> Tensor:
        wide, inner = full_words(rows, 8)
        return unpack(self._read_part("numbers", columns, wide), 4, 1, AWQ_ORDER)[:, inner].T.to(torch.float32)

    def _nibbles(self, rows: Range, words: Range) -> Tensor:
        wide, inner = full_words(rows, _WORD)
        packed = self._read_part("numbers", (words[0] * _WORD, words[1] * _WORD), wide).contiguous().view(torch.uint8)
        numbers = torch.stack((packed & 15, packed >> 4), dim=-1).view(len(packed), -1, _WORD)
        found = numbers[:, :, list(AWQ_ORDER)].flatten(1)[:, inner]
        return (found[::2] | found[1::2] << 4).T.contiguous()

    def _zeros(self, rows: Range, columns: Range) -> Tensor:
        wide, inner = full_words(rows, 8)
        return unpack(self._read_part("zeros", columns, wide), 4, 1, AWQ_ORDER)[:, inner].T


class Mxfp4Weight(QuantisedWeight):
    """GPT-OSS's experts [E, I, O]: `_blocks` uint8 [E, O, I / 32, 16], `_scales` uint8 [E, O, I / 32]."""

    is_stored_transposed = True

    def _check(self) -> tuple[int, ...]:
        found = self._shape_of("numbers")
        if len(found) != 4 or found[3] != 16:
            raise MisfitError(
                f"{self.parts['numbers']} has the shape {list(found)}, but must have 4 dimensions, the last 16"
            )
        self._expect("numbers", None, torch.uint8)
        self._expect("scales", found[:3], torch.uint8, torch.float8_e8m0fnu)
        return found[0], found[2] * MX_GROUP, found[1]

    def is_stored_as(self, stored: StoredFormat) -> bool:
        return stored.is_mxfp4

    def read_stored(self, region: Rectangle, stored: StoredFormat) -> tuple[Tensor, Tensor]:
        """`QuantisedWeight.read_stored` of one expert."""
        experts, (start, stop), rows = region
        groups = start // MX_GROUP, stop // MX_GROUP
        numbers = self._read_part("numbers", experts, rows, groups, (0, MX_GROUP // 2))
        exponents = self._read_part("scales", experts, rows, groups).view(torch.uint8)
        return numbers[0].flatten(1), exponents[0]

    def _read_block(self, block: Rectangle) -> Tensor:
        experts, columns, rows = block
        wide, inner = full_words(columns, 32)
        numbers = self._read_part("numbers", experts, rows, wide, (0, 16))
        exponents = self._read_part("scales", experts, rows, wide).view(torch.uint8)
        return mxfp4(numbers, exponents)[..., inner].transpose(1, 2)


def _transposed(rectangle: Rectangle) -> Rectangle:
    return (*rectangle[:-2], rectangle[-1], rectangle[-2])


def full_words(bounds: Range, size: int) -> tuple[Range, slice]:
    """The words of `size` numbers that contain the indices `bounds`, and the slice of those in them."""
    start, stop = bounds
    first = start // size
    return (first, -(-stop // size)), slice(start - first * size, stop - first * size)


def _groups_of(groups: Tensor) -> tuple[Tensor, Range]:
    """Groups relative to the lowest of them, and their range."""
    if not len(groups):
        return groups, (0, 0)
    first, last = int(groups.min()), int(groups.max())
    return groups - first, (first, last + 1)
