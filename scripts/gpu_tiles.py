"""Subjects of `gpu_sweep.py`: shapes, candidate tiles, and how each is launched by the product's own functions."""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, ClassVar, Self
from unittest import mock

import torch
import torch.nn.functional as F
import tune_kernels as tune
from gpu_figures import Findings
from gpu_probe import Probe, Sequences
from torch import Tensor

from spmd_worker.ops.kernels.adapters import AdapterSizes
from spmd_worker.ops.kernels.triton import adapters, attention, fp8, fp8_kernels, leaf_matmul, matmul, tiles
from spmd_worker.ops.kernels.triton.adapters import AdapterTile
from spmd_worker.ops.kernels.triton.fp8 import Fp8Tile
from spmd_worker.ops.kernels.triton.kernels import TritonKernels
from spmd_worker.ops.kernels.triton.leaf_matmul import LeafTile
from spmd_worker.ops.kernels.triton.tiles import Tile
from spmd_worker.ranks.leaves import leaf_bounds

Calls = Sequence[Callable[[], Tensor]]
NUM_LEAVES, NUM_ADAPTERS, RANK = 8, 8, 16
MOST_CANDIDATES, _FEW_BYTES = 14, 1 << 24
SHAPES_8B = {"qkv": (6144, 4096), "o": (4096, 4096), "gated": (14336, 4096), "down": (4096, 14336)}
SHAPES_135M = {"135m qkv": (960, 576), "135m o": (576, 576), "135m gated": (1536, 576), "135m down": (576, 1536)}
"""Outputs (of a half if gated), inputs."""
FEW_ROWS, ALL_ROWS = (1, 16, 64), (16, 64, 256, 2048)
DRY = {"tiny": (32, 512), "tiny gated": (32, 512)}


def dtype_of(device: torch.device) -> torch.dtype:
    # The interpreter computes bfloat16 wrongly.
    return torch.bfloat16 if device.type == "cuda" else torch.float16


def random(device: torch.device, *shape: int, scale: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
    generator = torch.Generator(device).manual_seed(sum(shape))
    values = torch.empty(shape, device=device, dtype=dtype or dtype_of(device))
    return values.normal_(0.0, scale, generator=generator)


@dataclass(frozen=True)
class Subject(ABC):
    """One shape. Fields are what JSON holds, so that a process that compiles makes it again."""

    kind: ClassVar[str]
    name: str

    @abstractmethod
    def candidates(self, device: torch.device) -> list[Any]:
        """Today's tile first."""

    @abstractmethod
    def operands(self, device: torch.device, num_copies: int) -> Any:
        """Tensors of a launch, with `num_copies` of the weights."""

    @abstractmethod
    def calls(self, operands: Any, candidate: Any) -> Calls:
        """One for each copy of the weights."""

    def library(self, operands: Any) -> list[Callable[[], object]] | None:
        del operands
        return None

    @abstractmethod
    def work(self) -> tuple[float, float]:
        """Bytes, and operations at the bfloat16 rate."""

    def kernel_key(self, candidate: Any) -> object:
        """Equal for launches of one kernel."""
        return self.name, candidate

    @property
    def weight_bytes(self) -> int:
        return 1 << 40

    @classmethod
    @abstractmethod
    def all(cls, *, is_dry: bool) -> list[Self]:
        """All shapes; a dry run has one that is tiny."""

    @classmethod
    def entries(cls, results: list[dict[str, Any]]) -> Iterable[str]:
        """Python for the table: here the five fastest, for tables that have no entry for each shape."""
        for result in results:
            best = sorted(result["times"].items(), key=lambda item: item[1])[:5]
            yield f"# {result['name']}, today {result['today']}: {best}"


@dataclass(frozen=True)
class OfWeights(Subject):
    """A matmul."""

    outputs: int
    inputs: int
    is_gated: bool
    rows: int

    @classmethod
    def all(cls, *, is_dry: bool) -> list[Self]:
        shapes = DRY if is_dry else SHAPES_8B
        return cls._of(shapes, (5,) if is_dry else ALL_ROWS)

    @classmethod
    def _of(cls, shapes: dict[str, tuple[int, int]], all_rows: Sequence[int]) -> list[Self]:
        return [
            cls(f"{cls.kind} {name} {n}x{k}, {rows} rows", n, k, "gated" in name, rows)
            for name, (n, k) in shapes.items()
            for rows in all_rows
        ]

    @property
    def num_weights(self) -> int:
        return 2 if self.is_gated else 1

    @property
    def weight_bytes(self) -> int:
        return 2 * self.num_weights * self.outputs * self.inputs

    def work(self) -> tuple[float, float]:
        n, k, m = self.outputs, self.inputs, self.rows
        return self.weight_bytes + 2.0 * m * (k + n), 2.0 * m * self.num_weights * n * k

    def operands(self, device: torch.device, num_copies: int) -> tuple[Tensor, Tensor]:
        n, k = self.num_weights * self.outputs, self.inputs
        return random(device, self.rows, k), random(device, num_copies, n, k, scale=k**-0.5)

    def library(self, operands: Any) -> list[Callable[[], object]] | None:
        x, weights = operands
        return [partial(F.linear, x, weight) for weight in weights]

    @property
    def bucket(self) -> int:
        return matmul.bucket_of(self.rows)


@dataclass(frozen=True)
class Matmul(OfWeights):
    """Few rows, and 2,048 of the 135M model's down."""

    kind: ClassVar[str] = "matmul"

    @classmethod
    def all(cls, *, is_dry: bool) -> list[Self]:
        if is_dry:
            return cls._of(DRY, (5,))
        many = cls._of({"135m down": SHAPES_135M["135m down"]}, (2048,))
        return [*cls._of(SHAPES_8B, FEW_ROWS), *cls._of(SHAPES_135M, FEW_ROWS), *many]

    def candidates(self, device: torch.device) -> list[Tile]:
        chip, dtype = tiles.chip_of(device), dtype_of(device)
        sizes = (self.rows, self.outputs, self.inputs)
        today = matmul.tile_for(*sizes, dtype, device, is_gated=self.is_gated)
        found = tune.candidates(tune.Shape(self.is_gated, self.outputs, self.inputs), self.rows, chip)
        # Results of fewer rows than the tile has, by TMA and not.
        by_pointer = [replace(tile, out_by_tma=not tile.out_by_tma) for tile in (today, *found[:2])]
        found = [today, *by_pointer, *self._nearby(today), *found]
        fitting = (tile for tile in found if tiles.fits(tile, chip, is_gated=self.is_gated))
        # The 135M model's matmuls met what is wanted, but for many rows.
        most = MOST_CANDIDATES if self.weight_bytes > _FEW_BYTES or self.rows > 64 else MOST_CANDIDATES // 2
        return list(dict.fromkeys([today, *fitting]))[:most]

    def _nearby(self, tile: Tile) -> list[Tile]:
        """More programs, warps and stages of today's."""
        deeper = [replace(tile, num_stages=tile.num_stages + more) for more in (1, -1)]
        shorter = replace(tile, inputs=max(64, tile.inputs // 2), num_stages=min(10, 2 * tile.num_stages))
        return [*deeper, replace(tile, per_multiprocessor=2), replace(tile, num_warps=8), shorter]

    def calls(self, operands: Any, candidate: Tile) -> Calls:
        x, weights = operands
        call = matmul.gated_linear if self.is_gated else matmul.linear

        def launch(weight: Tensor) -> Tensor:
            found = call(x, weight, None, candidate)
            if (self.is_gated, candidate) in matmul.REPLACED:
                raise ValueError("was replaced")
            return found

        return [partial(launch, weight) for weight in weights]

    def kernel_key(self, candidate: Tile) -> object:
        is_even = self.inputs % candidate.inputs == 0
        return self.kind, self.is_gated, tune.as_launched(candidate, self.rows), is_even, self.rows < candidate.rows

    @classmethod
    def entries(cls, results: list[dict[str, Any]]) -> Iterable[str]:
        """Complete entries of MEASURED: buckets that were not measured keep their tiles."""
        for key, group in _by_shape(results).items():
            is_gated, outputs, inputs = key
            device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
            kept = matmul._tiles(is_gated, outputs, inputs, device)
            found = {bucket: _best(of) for bucket, of in _by_bucket(group).items()}
            yield f"    ({is_gated}, {outputs}, {inputs}): ("
            for bucket, tile in enumerate(kept):
                text, note = found.get(bucket, (repr(tile), ""))
                yield f"        {in_python(text)},{f'  # {note}' if note else ''}"
            yield "    ),"


@dataclass(frozen=True)
class Leaves(OfWeights):
    """Row-parallel products in 8 leaves; the library adds in no leaves."""

    kind: ClassVar[str] = "leaves"

    @classmethod
    def all(cls, *, is_dry: bool) -> list[Self]:
        if is_dry:
            return cls._of({"tiny": (32, 512)}, (5,))
        return cls._of({name: SHAPES_8B[name] for name in ("down", "o")}, ALL_ROWS)

    @property
    def ends(self) -> list[int]:
        return list(leaf_bounds(self.inputs, NUM_LEAVES)[1:])

    def candidates(self, device: torch.device) -> list[LeafTile]:
        chip, cut = tiles.chip_of(device), leaf_matmul.cut_of(tuple(self.ends))
        today = leaf_matmul.tile_for(self.rows, self.outputs, self.inputs, cut, dtype_of(device), device)
        shape = tune.Shape(False, self.outputs, self.inputs)
        found = [today, *leaf_matmul.family(cut, chip)]
        searched = [leaf_matmul._fitted(tile, cut) for tile in tune._searched(False) if not tile.rest_columns]
        searched = [tile for tile in searched if not tile.is_specialized and tiles.fits(tile, chip, is_gated=False)]
        found += [LeafTile(tile, True) for tile in searched if leaf_matmul._is_in_registers(tile, cut)]
        found += [LeafTile(tile, False) for tile in searched if 2 * leaf_matmul._registers(tile) <= 128]
        useful = [each for each in dict.fromkeys(found) if tune._is_useful(each.tile, shape, self.rows)]

        def clocks(each: LeafTile) -> float:
            more, sizes = leaf_matmul._more_clocks(each, self.inputs, cut), (self.rows, self.outputs, self.inputs)
            return tiles.estimated_clocks(each.tile, *sizes, chip, is_gated=False, more_clocks=more)

        # Both ways of keeping sums, whatever the estimate says of them.
        ways = [sorted((each for each in useful if each.in_registers == way), key=clocks) for way in (True, False)]
        return list(dict.fromkeys([today, *ways[0][: MOST_CANDIDATES // 2], *ways[1][: MOST_CANDIDATES // 2]]))

    def calls(self, operands: Any, candidate: LeafTile) -> Calls:
        x, weights = operands

        def launch(weight: Tensor) -> Tensor:
            found = leaf_matmul.linear_of_leaves(x, weight, None, self.ends, x.dtype, candidate)
            if candidate in leaf_matmul.REPLACED:
                raise ValueError("was replaced")
            return found

        return [partial(launch, weight) for weight in weights]

    def kernel_key(self, candidate: LeafTile) -> object:
        return self.kind, candidate, self.rows < candidate.tile.rows

    @classmethod
    def entries(cls, results: list[dict[str, Any]]) -> Iterable[str]:
        """Entries of LEAVES, by bucket."""
        for (_, outputs, inputs), group in _by_shape(results).items():
            yield f"    ({outputs}, {inputs}, {NUM_LEAVES}): {{"
            for bucket, of in _by_bucket(group).items():
                text, note = _best(of)
                pair = text.removeprefix("LeafTile(tile=").replace(", in_registers=", "$").removesuffix(")")
                tile, _, way = pair.rpartition("$")
                yield f"        {bucket}: ({in_python(tile)}, {way}),  # {note}"
            yield "    },"


@dataclass(frozen=True)
class Fp8(OfWeights):
    """FP8 with a scale a row; the library is cuBLAS in bfloat16."""

    kind: ClassVar[str] = "fp8"

    @property
    def weight_bytes(self) -> int:
        return self.num_weights * self.outputs * self.inputs

    def work(self) -> tuple[float, float]:
        n, k, m = self.outputs, self.inputs, self.rows
        return self.weight_bytes + m * (k + 2.0 * n), 1.0 * m * self.num_weights * n * k

    def candidates(self, device: torch.device) -> list[Fp8Tile]:
        today = fp8.tile_for(device, self.rows, self.outputs, self.inputs, is_gated=self.is_gated)
        if device.type == "cpu":
            return [today, Fp8Tile(16, 16, 1, 4, 2, is_swapped=True)]
        found = list(_fp8_tiles(self.rows, is_gated=self.is_gated))
        fitting = [
            each for each in found if _fp8_bytes(each, is_gated=self.is_gated) <= tiles.chip_of(device).shared_bytes
        ]
        return list(dict.fromkeys([today, *fitting]))

    def operands(self, device: torch.device, num_copies: int) -> Any:
        x, weights = super().operands(device, num_copies)
        if device.type == "cpu":
            # The interpreter does not round to e4m3 as the chip does: small integers are exact.
            x, weights = ((8 * each).round() for each in (x, weights * self.inputs**0.5))
        numbers = x.to(fp8.NUMBERS), weights.to(fp8.NUMBERS) if device.type == "cpu" else None
        x_scales = random(device, self.rows, dtype=torch.float32).abs() * 1e-2
        scales = random(device, self.num_weights * self.outputs, 1, dtype=torch.float32).abs() * 1e-2
        bytes_of = numbers[1] if numbers[1] is not None else (weights * 64).to(fp8.NUMBERS)
        return x, weights[:2], numbers[0], x_scales, bytes_of, scales

    def library(self, operands: Any) -> list[Callable[[], object]] | None:
        return [partial(F.linear, operands[0], weight) for weight in operands[1]]

    def calls(self, operands: Any, candidate: Fp8Tile) -> Calls:
        x, _, numbers, x_scales, weights, scales = operands
        how: dict[str, Any] = {"is_gated": self.is_gated, "tile": candidate}
        return [partial(fp8.multiply, numbers, x_scales, weight, scales, None, x.dtype, **how) for weight in weights]

    def kernel_key(self, candidate: Fp8Tile) -> object:
        return self.kind, self.is_gated, candidate, self.rows < candidate.rows

    @classmethod
    def entries(cls, results: list[dict[str, Any]]) -> Iterable[str]:
        """Entries of MEASURED in fp8.py, by bucket."""
        for key, group in _by_shape(results).items():
            yield f"    {key}: {{"
            for bucket, of in _by_bucket(group).items():
                text, note = _best(of)
                yield f"        {bucket}: {in_python(text)},  # {note}"
            yield "    },"


def _fp8_tiles(num_rows: int, *, is_gated: bool) -> Iterable[Fp8Tile]:
    """Candidates. Some spill: a sum that leaves its registers once in 512 inputs may cost little."""
    swap: dict[str, Any] = {"is_swapped": True}
    if num_rows <= 32:
        for columns, steps, stages in ((64, 2, 5), (64, 2, 4), (64, 4, 3), (64, 1, 8), (128, 2, 3), (128, 1, 6)):
            yield Fp8Tile(16, columns, steps, 4, stages, **swap)
            yield Fp8Tile(16, columns, steps, 4, stages, per_multiprocessor=2, **swap)
        return
    if num_rows <= 64:
        for columns, steps, stages in ((32, 4, 3), (32, 2, 6), (64, 2, 4), (64, 2, 5), (64, 1, 8), (128, 1, 6)):
            yield Fp8Tile(64, columns, steps, 4, stages)
            if columns >= 64:
                yield Fp8Tile(64, columns, steps, 4, stages, **swap)
        yield from (Fp8Tile(64, 64, 1, 4, 4, per_multiprocessor=2), Fp8Tile(64, 128, 2, 4, 4))
        yield from (Fp8Tile(32, 64, 2, 4, 4, **swap), Fp8Tile(64, 128, 1, 8, 6, **swap))
        return
    if is_gated:
        yield from (Fp8Tile(64, 64, 1, 4, 4, per_multiprocessor=2), Fp8Tile(64, 64, 2, 4, 4), Fp8Tile(64, 128, 1, 8, 4))
        yield from (Fp8Tile(128, 64, 1, 8, 6), Fp8Tile(128, 64, 1, 8, 5), Fp8Tile(128, 64, 2, 8, 3))
        yield from (Fp8Tile(128, 64, 1, 8, 6, is_flat=True), Fp8Tile(128, 64, 1, 8, 4))
        yield from (Fp8Tile(128, 128, 1, 8, 3), Fp8Tile(128, 128, 1, 8, 4), Fp8Tile(64, 128, 1, 4, 4))
        yield from (Fp8Tile(64, 128, 1, 8, 4, **swap), Fp8Tile(128, 64, 1, 4, 3, per_multiprocessor=2))
        return
    yield from (Fp8Tile(64, 128, 1, 4, 4, per_multiprocessor=2), Fp8Tile(64, 128, 2, 4, 4), Fp8Tile(64, 128, 1, 4, 8))
    yield from (Fp8Tile(128, 128, 1, 8, 6), Fp8Tile(128, 128, 1, 8, 5), Fp8Tile(128, 128, 1, 8, 4))
    yield from (Fp8Tile(128, 128, 2, 8, 3), Fp8Tile(128, 128, 1, 8, 6, is_flat=True), Fp8Tile(64, 256, 1, 8, 5))
    yield from (Fp8Tile(128, 256, 1, 8, 3), Fp8Tile(64, 256, 1, 8, 4), Fp8Tile(256, 128, 1, 8, 3))
    yield from (Fp8Tile(128, 64, 1, 4, 4, per_multiprocessor=2), Fp8Tile(64, 64, 2, 4, 4, per_multiprocessor=2))
    yield from (Fp8Tile(128, 128, 1, 8, 5, **swap), Fp8Tile(128, 128, 1, 8, 3, is_paired=True))


def _fp8_bytes(tile: Fp8Tile, *, is_gated: bool) -> int:
    """Shared memory of a program: stages of operands, and the result."""
    halves = 2 if is_gated or tile.is_paired else 1
    staged = (tile.rows + halves * tile.columns) * tile.box(fp8_kernels.OF_ROWS.value) * tile.num_stages
    return (staged + 2 * tile.rows * tile.columns) * tile.per_multiprocessor + 1024


@dataclass(frozen=True)
class Prompts(Subject):
    """Attention of prompts from the paged cache; the library is torch's flash attention."""

    kind: ClassVar[str] = "prompts"
    heads: int
    kv_heads: int
    head_size: int
    count: int
    length: int

    @classmethod
    def all(cls, *, is_dry: bool) -> list[Self]:
        if is_dry:
            return [cls("prompts tiny", 2, 1, 16, 1, 20)]
        shapes = {"8b": (32, 8, 128), "135m": (9, 3, 64), "gemma": (8, 4, 256)}
        return [cls(f"prompts {name}, 2 x 1024", *heads, 2, 1024) for name, heads in shapes.items()]

    def candidates(self, device: torch.device) -> list[attention.Tile]:
        group, of = self.heads // self.kv_heads, attention.Tile
        if device.type == "cpu":
            return [attention.many_tile((0, 0), self.head_size, group, 2), of(16, 4, 1, 1)]
        today = attention.many_tile(torch.cuda.get_device_capability(device), self.head_size, group, 2)
        if self.head_size > 128:
            found = [of(128, 8, 2, 1, 2), of(128, 8, 3, 1, 2), of(64, 4, 2, 1, 2), of(64, 4, 2, 2, 2)]
            found += [of(64, 8, 2, 1, 2), of(64, 4, 3, 1, 2), of(128, 8, 1, 1, 2), of(64, 4, 1, 2, 2)]
        else:
            found = [of(128, 8, stages, programs) for stages in (1, 2, 3, 4) for programs in (1, 2)]
            found += [of(64, 4, stages, programs) for stages in (1, 2, 3, 4) for programs in (1, 2, 3)]
            found += [of(128, 4, 2, 1), of(128, 4, 3, 1), of(64, 8, 3, 1), of(64, 8, 2, 2)]
        return list(dict.fromkeys([today, *found]))

    def operands(self, device: torch.device, num_copies: int) -> Any:
        del num_copies
        probe = Probe(Findings(), is_dry=device.type == "cpu")
        sizes = [self.length] * self.count
        return probe.sequences(sizes, sizes, (self.heads, self.kv_heads, self.head_size))

    def calls(self, operands: Any, candidate: attention.Tile) -> Calls:
        made: Sequences = operands
        case = Sequences(made.queries, made.cache, made.tables, made.starts, made.lengths, made.heads)
        with mock.patch.object(attention, "many_tile", return_value=candidate):
            # The first call plans, and what is planned keeps its tile.
            case.attend()
        return [case.attend]

    def library(self, operands: Any) -> list[Callable[[], object]] | None:
        device, sizes = operands.queries.device, (self.heads, self.kv_heads, self.kv_heads)
        q, k, v = (random(device, self.count, each, self.length, self.head_size) for each in sizes)
        return [partial(F.scaled_dot_product_attention, q, k, v, is_causal=True, enable_gqa=True)]

    def work(self) -> tuple[float, float]:
        return 0.0, 2.0 * self.count * self.heads * self.head_size * self.length * (self.length + 1)


@dataclass(frozen=True)
class Adapters(Subject):
    """Eight adapters of rank 16 in a layer, a row each in turn."""

    kind: ClassVar[str] = "adapters"
    widths: tuple[int, ...]
    inputs: int
    rows: int

    def kernel_key(self, candidate: AdapterTile) -> object:
        return self.kind, len(self.widths), self.inputs, candidate

    def __post_init__(self) -> None:
        # JSON has lists.
        object.__setattr__(self, "widths", tuple(self.widths))

    @classmethod
    def all(cls, *, is_dry: bool) -> list[Self]:
        if is_dry:
            return [cls("adapters tiny", (24, 16), 48, 5)]
        layers = {"qkv": ((4096, 1024, 1024), 4096), "gate_up": ((14336, 14336), 4096), "down": ((4096,), 14336)}
        return [
            cls(f"adapters of {name}, {rows} rows", widths, inputs, rows)
            for rows in (64, 256, 2048)
            for name, (widths, inputs) in layers.items()
        ]

    def candidates(self, device: torch.device) -> list[AdapterTile]:
        chip = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
        today = adapters.tile_for(self.rows, dtype_of(device), chip)
        found = [
            *(replace(today, num_stages=stages) for stages in (2, 3, 5)),
            *(replace(today, num_shrink_warps=warps) for warps in (2, 8)),
            *(replace(today, num_expand_warps=warps) for warps in (2, 4, 8)),
            *(replace(today, columns=columns) for columns in (64, 128, 256)),
            *(replace(today, inputs=inputs) for inputs in (64, 128, 256)),
            *(adapters.FEW_ROWS, adapters.MANY_ROWS, replace(adapters.FEW_ROWS, rows=32)),
        ]
        return list(dict.fromkeys([today, *(found if device.type == "cuda" else [replace(today, num_stages=1)])]))

    def operands(self, device: torch.device, num_copies: int) -> Any:
        del num_copies
        kernels, dtype = TritonKernels().adapter_kernels(), dtype_of(device)
        parts = tuple(pairwise((0, *accumulate(self.widths))))
        stack = kernels.new_stack(AdapterSizes(NUM_ADAPTERS, RANK, self.inputs, parts, dtype, device))
        for slot in range(NUM_ADAPTERS):
            pairs = [
                (random(device, RANK, self.inputs, scale=self.inputs**-0.5), random(device, w, RANK))
                for w in self.widths
            ]
            stack.write(slot, stack.pack(pairs))
        slots = torch.arange(self.rows, dtype=torch.int32, device=device) % NUM_ADAPTERS
        return (
            kernels,
            stack,
            slots,
            random(device, self.rows, self.inputs),
            random(device, self.rows, sum(self.widths)),
        )

    def calls(self, operands: Any, candidate: AdapterTile) -> Calls:
        kernels, stack, slots, x, outputs = operands
        stack._columns[candidate.columns] = stack._column_tiles(candidate.columns)
        chosen = mock.patch.object(adapters, "tile_for", return_value=candidate)
        with chosen:
            step = kernels.step(slots, NUM_ADAPTERS)
        base = outputs.clone()

        def add() -> Tensor:
            with chosen:
                stack.add_(base, x, step)
            return base

        return [add]

    def work(self) -> tuple[float, float]:
        n, k, m = sum(self.widths), self.inputs, self.rows
        matrices = min(m, NUM_ADAPTERS) * RANK * (len(self.widths) * k + n)
        return 2.0 * (matrices + m * k + 2 * m * n), 2.0 * m * RANK * (len(self.widths) * k + n)


class Kind:
    """All subjects of a class, and their entries."""

    def __init__(self, of: type[Subject]) -> None:
        self.of, self.entries = of, of.entries

    def __call__(self, *, is_dry: bool) -> list[Subject]:
        return list(self.of.all(is_dry=is_dry))


SUBJECTS = {each.kind: Kind(each) for each in (Matmul, Fp8, Leaves, Prompts, Adapters)}


def _by_shape(results: list[dict[str, Any]]) -> dict[tuple[bool, int, int], list[dict[str, Any]]]:
    found: dict[tuple[bool, int, int], list[dict[str, Any]]] = {}
    for result in results:
        of = result["subject"]
        found.setdefault((of["is_gated"], of["outputs"], of["inputs"]), []).append(result)
    return found


def _by_bucket(results: list[dict[str, Any]]) -> dict[int, list[dict[str, Any]]]:
    found: dict[int, list[dict[str, Any]]] = {}
    for result in sorted(results, key=lambda each: each["subject"]["rows"]):
        found.setdefault(matmul.bucket_of(result["subject"]["rows"]), []).append(result)
    return found


def in_python(text: str) -> str:
    """A tile's text as it stands in a table: sizes by place, and what is no default."""
    usual = ("x_by_tma=True", "weight_by_tma=True", "out_by_tma=True", "is_specialized=False", "rest_columns=0")
    usual += ("is_paired=False", "is_swapped=False", "is_flat=False", "per_multiprocessor=1")
    for each in usual:
        text = text.replace(f", {each}", "")
    return re.sub(r"\b(rows|columns|inputs|steps|num_warps|num_stages)=", "", text)


def _best(results: list[dict[str, Any]]) -> tuple[str, str]:
    """The candidate with the least relative time over all, and microseconds of it / the library's."""
    common = set.intersection(*(set(each["times"]) for each in results))
    if not common:
        return results[0]["today"], "not measured"
    least = [min(each["times"].values()) for each in results]
    scores = {
        text: sum(each["times"][text] / fastest for each, fastest in zip(results, least, strict=True))
        for text in common
    }
    # Equal scores go to the first in the alphabet, whatever a set's order.
    best = min(sorted(scores), key=scores.__getitem__)
    beside = ", ".join(f"{each['times'][best]:.1f}/{each['library'] or 0:.1f}" for each in results)
    return best, beside
