"""Measures tiles of the Triton backend's matmuls on this GPU, and keeps the fastest for the worker.

    python scripts/tune_kernels.py MODEL                a folder with config.json, or such a file; within two minutes
    python scripts/tune_kernels.py --shapes 6144x4096,gated:14336x4096
    TRITON_INTERPRET=1 OPENBLAS_CORETYPE=Nehalem python scripts/tune_kernels.py --shapes 48x64 --dry
                                                        the same code on CPU tensors, tiny, nothing timed or written

The table goes to `$XDG_CACHE_HOME/spmd-worker/tiles/`, one file for each kind of device and version of Triton; the
worker reads it at start, and its entries take precedence over those that ship. Entries of other shapes stay. Ranks need
not have the same table: every tile is checked to have the bits of the base tile, and one that has not is left out.

Tiles are compiled in parallel first. A matmul is timed in a CUDA graph whose launches take copies of the weight in
turn, so that it is read from memory as in a model. Prints the fastest tiles beside cuBLAS; the last line is one JSON
object. A shape is `[gated:]OUTPUTSxINPUTS`, of a half if gated.
"""

import argparse
import json
import multiprocessing
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.nn.functional as F
from torch import Tensor

from spmd_worker.ops.kernels.triton import matmul, tile_files, tiles
from spmd_worker.ops.kernels.triton.tile_table import Entry, Key
from spmd_worker.ops.kernels.triton.tiles import Chip, Tile

MEASURED_ROWS = ((8, 16), (32,), (64,), (128,), (256,), (512,), (2048,))
"""Rows with which each bucket's tiles are timed: recorded steps are padded to 8, 16, 32, 64 rows, and less above."""
BYTES_BEYOND_CACHE = 160 << 20
"""Copies of a weight have at least so many bytes together."""
MEASURED_US = 1500.0
BYTES_PER_US, FLOP_PER_US = 4e6, 7e8
MAX_HEAD_ROWS = 512
MAX_HEAD_OUTPUTS = 65536
"""More outputs are a vocabulary's, whose rows are at most those that sample in a step."""
NUM_CANDIDATES = 12


@dataclass(frozen=True, order=True)
class Shape:
    """A weight's: outputs of a half if gated."""

    is_gated: bool
    outputs: int
    inputs: int

    @classmethod
    def parse(cls, text: str) -> "Shape":
        kind, _, sizes = text.rpartition(":")
        outputs, _, inputs = sizes.partition("x")
        if kind not in ("", "gated") or not (outputs.isdigit() and inputs.isdigit()):
            raise SystemExit(f"--shapes {text}: a shape is OUTPUTSxINPUTS or gated:OUTPUTSxINPUTS")
        return cls(kind == "gated", int(outputs), int(inputs))

    @property
    def num_weights(self) -> int:
        return 2 if self.is_gated else 1

    @property
    def num_bytes(self) -> int:
        return 2 * self.num_weights * self.outputs * self.inputs

    def __str__(self) -> str:
        return f"{'gated:' * self.is_gated}{self.outputs}x{self.inputs}"


def model_shapes(path: Path, num_ranks: int) -> set[Shape]:
    """Weights of a rank's dense layers and head. Experts have other kernels."""
    # Here, because a GPU without the package's dependencies can still tune --shapes.
    from spmd_worker.model_config.model_config import read_model_files

    config = read_model_files(path if path.is_dir() else path.parent).model_config
    shapes = (
        set()
        if config.pooling is not None
        else {Shape(False, -(-config.vocab_size // num_ranks), config.embedding_size)}
    )
    for layer in config.layers:
        num_heads, num_kv_heads = layer.num_heads // num_ranks, max(1, layer.num_kv_heads // num_ranks)
        shapes.add(Shape(False, (num_heads + 2 * num_kv_heads) * layer.head_size, config.hidden_size))
        shapes.add(Shape(False, config.hidden_size, num_heads * layer.head_size))
        if layer.experts is None:
            width = layer.intermediate_size // num_ranks
            is_gated = layer.is_gated and layer.activation == "silu"
            outputs = 2 * width if layer.is_gated and not is_gated else width
            shapes |= {Shape(is_gated, outputs, config.hidden_size), Shape(False, config.hidden_size, width)}
    return shapes


def fastest(times: dict[int, dict[Tile, float]]) -> Tile | None:
    """The tile with the least time relative to the fastest, summed over numbers of rows, of those timed with each; None
    if there is none. With fewer rows than a tile has, it was timed with x by pointer.
    """
    tried = dict.fromkeys(tile for each in times.values() for tile in each)
    tried |= dict.fromkeys(replace(tile, x_by_tma=True) for tile in tried if tile.rows > _FEWEST_ROWS)
    scores = {}
    for tile in tried:
        found = [each.get(as_launched(tile, num_rows)) for num_rows, each in times.items()]
        if None not in found:
            scores[tile] = sum(us / min(each.values()) for us, each in zip(found, times.values(), strict=True))
    return min(scores, key=scores.__getitem__, default=None)


_FEWEST_ROWS = 16


def as_launched(tile: Tile, num_rows: int) -> Tile:
    """`tile` with the way that x goes: by pointer if there are fewer rows than it has."""
    return replace(tile, x_by_tma=False) if num_rows < tile.rows else tile


def candidates(shape: Shape, num_rows: int, chip: Chip) -> list[Tile]:
    """Tiles worth timing, in the order of their estimated time."""
    searched = [*_searched(shape.is_gated), *tiles.family(chip, is_gated=shape.is_gated)]
    if chip.capability < (9, 0):
        searched = [tile for tile in searched if not (tile.x_by_tma or tile.weight_by_tma or tile.out_by_tma)]
    fitting = [tile for tile in dict.fromkeys(searched) if tiles.fits(tile, chip, is_gated=shape.is_gated)]
    launched = dict.fromkeys(as_launched(tile, num_rows) for tile in fitting)
    useful = [tile for tile in launched if _is_useful(tile, shape, num_rows)]
    sizes = (num_rows, shape.outputs, shape.inputs, chip)
    useful.sort(key=lambda tile: tiles.estimated_clocks(tile, *sizes, is_gated=shape.is_gated))
    chosen, num_alike = [], defaultdict(int)
    for tile in useful:
        # Ways of one tile are estimated alike: they must not crowd out the next shape.
        num_alike[tile.rows, tile.width] += 1
        if num_alike[tile.rows, tile.width] <= _MOST_ALIKE:
            chosen.append(tile)
    return chosen[:NUM_CANDIDATES]


_MOST_ALIKE = 4


def _is_useful(tile: Tile, shape: Shape, num_rows: int) -> bool:
    """Not mostly padding, unless a row tile is wide enough to be bound by its columns."""
    is_padded = tile.rows >= 2 * max(num_rows, 16) and (1 + shape.is_gated) * tile.width < 256
    is_wide = tile.width > max(shape.outputs, 16)
    return not (is_padded or is_wide or tile.rows > 8 * num_rows or (num_rows > 256 and tile.rows < 64))


def _searched(is_gated: bool) -> Iterable[Tile]:
    """Tiles for chips with TMA."""
    few = (
        [(16, 32, 128, 4, 5), (16, 64, 128, 4, 5), (16, 32, 256, 4, 4), (16, 64, 256, 4, 3)]
        if is_gated
        else [
            *((16, 16, 256, 4, 4), (16, 32, 256, 4, 4), (16, 64, 256, 4, 4), (16, 64, 128, 4, 8)),
            *((16, 128, 128, 4, 5), (16, 32, 512, 4, 3)),
        ]
    )
    for sizes in few:
        yield Tile(*sizes, x_by_tma=False)
        yield Tile(*sizes, x_by_tma=False, weight_by_tma=False)
        yield Tile(*sizes)
    some = (
        [(32, 32, 128, 4, 4), (32, 64, 128, 4, 4), (32, 64, 64, 4, 6), (64, 64, 128, 4, 4), (64, 64, 64, 4, 5)]
        if is_gated
        else [
            *((32, 32, 256, 4, 4), (32, 64, 256, 4, 4), (32, 64, 128, 4, 6), (32, 128, 128, 4, 4)),
            *((64, 32, 256, 4, 4), (64, 32, 128, 4, 7), (64, 64, 128, 4, 4), (64, 64, 128, 4, 6), (64, 64, 256, 4, 3)),
            *((64, 256, 64, 4, 4), (64, 128, 128, 4, 4), (32, 32, 64, 4, 6), (64, 32, 64, 4, 6), (64, 64, 64, 4, 6)),
        ]
    )
    for sizes in some:
        yield Tile(*sizes)
        yield Tile(*sizes, x_by_tma=False)
    by_pointers = {"out_by_tma": False}
    if is_gated:
        yield from (Tile(64, 128, 64, 8, 4), Tile(64, 128, 64, 4, 4), Tile(64, 64, 128, 8, 4), Tile(128, 64, 64, 8, 5))
        yield from (Tile(128, 128, 64, 8, 3), Tile(128, 128, 64, 8, 4, **by_pointers), Tile(128, 64, 128, 8, 3))
        yield from (Tile(32, 128, 64, 4, 5), Tile(16, 128, 64, 4, 6, False), Tile(64, 128, 64, 4, 5, **by_pointers))
        yield from (Tile(64, 64, 64, 4, 4, per_multiprocessor=2), Tile(64, 128, 64, 4, 2, per_multiprocessor=2))
        yield Tile(128, 64, 64, 8, 3, **by_pointers, per_multiprocessor=2)
        yield Tile(128, 128, 64, 8, 4, **by_pointers, is_specialized=True)
        return
    yield from (
        Tile(16, 32, 256, 4, 4, x_by_tma=False, per_multiprocessor=2),
        Tile(16, 64, 128, 4, 4, False, per_multiprocessor=2),
    )
    # A whole number of row tiles' columns for 132 multiprocessors: 48, 96, 192.
    yield from (Tile(16, 32, 256, 4, 5, False, rest_columns=16), Tile(32, 32, 256, 4, 4, rest_columns=16))
    yield from (Tile(64, 32, 128, 4, 7, rest_columns=16), Tile(64, 32, 256, 4, 3, rest_columns=16))
    yield from (Tile(64, 64, 128, 4, 5, rest_columns=32), Tile(64, 64, 64, 4, 8, rest_columns=32))
    yield from (Tile(128, 32, 64, 8, 8, rest_columns=16), Tile(128, 64, 64, 8, 7, rest_columns=32))
    yield from (Tile(64, 128, 64, 4, 5, rest_columns=64), Tile(128, 128, 64, 8, 4, rest_columns=64))
    yield from (Tile(128, 128, 64, 8, 5, **by_pointers, rest_columns=64), Tile(128, 64, 128, 8, 3, rest_columns=32))
    yield from (Tile(64, 32, 128, 4, 4, per_multiprocessor=2), Tile(64, 64, 64, 4, 5, per_multiprocessor=2))
    yield from (Tile(64, 128, 64, 4, 5), Tile(64, 128, 64, 4, 7), Tile(64, 128, 64, 4, 3, per_multiprocessor=2))
    yield from (Tile(128, 64, 64, 4, 6), Tile(128, 64, 128, 4, 4), Tile(128, 64, 128, 8, 4), Tile(128, 64, 64, 8, 7))
    yield from (Tile(128, 128, 64, 8, 6), Tile(128, 128, 64, 4, 5), Tile(128, 128, 64, 8, 4), Tile(64, 256, 64, 8, 4))
    yield from (Tile(128, 128, 64, 8, 3, **by_pointers, per_multiprocessor=2), Tile(256, 128, 64, 8, 3))
    yield from (Tile(128, 256, 64, 8, 3), Tile(128, 256, 64, 8, 4, **by_pointers))
    yield Tile(128, 256, 64, 8, 3, is_specialized=True)
    yield Tile(128, 256, 64, 8, 4, **by_pointers, is_specialized=True)


class Sweep:
    """Times tiles of one GPU, or, if `is_dry`, only runs them."""

    def __init__(self, *, is_dry: bool, deadline: float) -> None:
        self.is_dry, self.deadline = is_dry, deadline
        self.device = torch.device("cpu" if is_dry else "cuda")
        self.dtype = torch.float16 if is_dry else torch.bfloat16
        self.chip = tiles.chip_of(self.device)
        self.rows = ((5,), (20,)) if is_dry else MEASURED_ROWS
        self.results: list[dict[str, object]] = []
        if not is_dry:
            self._warm_up()
            # A graph that stays keeps the pool of the others.
            self.stream, self.pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()
            kept = torch.zeros(1, device=self.device)
            self.kept = self._recorded(kept.zero_)

    def measure(self, shape: Shape) -> Entry | None:
        """The fastest tile for each bucket; None if there was no time for all."""
        k = shape.inputs
        num_copies = 1 if self.is_dry else min(64, -(-BYTES_BEYOND_CACHE // shape.num_bytes))
        whole = self._random(num_copies, shape.num_weights * shape.outputs, k, scale=k**-0.5)
        is_head = shape.outputs > MAX_HEAD_OUTPUTS
        x = self._random(max(rows[-1] for rows in self.rows if not is_head or rows[-1] <= MAX_HEAD_ROWS), k)
        # Bits of the kernels are compared with those of the tile that every chip has.
        expected = _call(shape, x, whole[0], self._base(shape))
        entry: list[Tile] = []
        for rows in self.rows:
            if rows[-1] > len(x):
                entry.append(entry[-1])
                continue
            times = {num_rows: self._times(shape, x[:num_rows], whole, expected[:num_rows]) for num_rows in rows}
            best = fastest(times)
            if best is None:
                return None
            entry.append(best)
        return tuple(entry)

    def _warm_up(self) -> None:
        """Bring clocks up."""
        values = torch.zeros((8192, 8192), dtype=self.dtype, device=self.device)
        for _ in range(200):
            torch.matmul(values, values)
        torch.cuda.synchronize()

    def _base(self, shape: Shape) -> Tile:
        if self.is_dry:
            return DRY_TILES[0]
        return tiles.GATED_SAFE if shape.is_gated else tiles.SAFE

    def _times(self, shape: Shape, x: Tensor, whole: Tensor, expected: Tensor) -> dict[Tile, float]:
        """Microseconds of each candidate that works, has the right bits and was reached before the deadline."""
        library = self._microseconds(lambda weight: F.linear(x, weight), x, whole)
        times: dict[Tile, float] = {}
        for tile in DRY_TILES if self.is_dry else candidates(shape, len(x), self.chip):
            if time.monotonic() > self.deadline:
                break
            try:
                found = _call(shape, x, whole[0], tile)
            except Exception as error:  # of a tile that does not compile
                print(f"{shape} rows {len(x)}: {_short(tile)}: {type(error).__name__}: {str(error)[:200]}", flush=True)
                continue
            if (shape.is_gated, tile) in matmul.REPLACED:
                continue
            if not torch.equal(found, expected):
                print(f"{shape} rows {len(x)}: {_short(tile)} has other bits and is left out", flush=True)
                continue
            times[tile] = self._microseconds(lambda weight, tile=tile: _call(shape, x, weight, tile), x, whole)
        best = sorted(times, key=times.__getitem__)
        shown = "; ".join(f"{_short(tile)} {times[tile]:.1f}" for tile in best[:5])
        print(f"{shape} rows {len(x)}: cuBLAS {library:.1f}; {shown}", flush=True)
        self.results.append(
            {"shape": str(shape), "rows": len(x), "cublas": round(library, 2)}
            | {"tiles": {_short(tile): round(times[tile], 2) for tile in best}}
        )
        return times

    def _microseconds(self, call: Callable[[Tensor], Tensor], x: Tensor, whole: Tensor) -> float:
        """Time of a launch in a CUDA graph, its weights in turn."""
        if self.is_dry:
            began = time.perf_counter()
            call(whole[0])
            return (time.perf_counter() - began) * 1e6
        elements = whole[0].numel()
        floor = 2 + max(2 * elements / BYTES_PER_US, 2 * elements * len(x) / FLOP_PER_US)
        num_launches = max(len(whole), min(120, int(MEASURED_US / floor)))
        call(whole[0])
        torch.cuda.synchronize()

        def launch() -> None:
            for index in range(num_launches):
                call(whole[index % len(whole)])

        graph = self._recorded(launch)
        found = []
        for _ in range(3):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            found.append(start.elapsed_time(end) * 1e3 / num_launches)
        return min(found)

    def _recorded(self, launch: Callable[[], object]) -> "torch.cuda.CUDAGraph":
        """A graph of what `launch` launches. `torch.cuda.graph` would empty the allocator's cache each time."""
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self.stream):
            graph.capture_begin(pool=self.pool)
            launch()
            graph.capture_end()
        return graph

    def _random(self, *shape: int, scale: float = 1.0) -> Tensor:
        generator = torch.Generator(self.device).manual_seed(sum(shape))
        values = torch.empty(shape, device=self.device, dtype=self.dtype)
        return values.normal_(0.0, scale, generator=generator)


DRY_TILES = (Tile(16, 16, 16, 4, 2), Tile(32, 16, 16, 4, 2, x_by_tma=False), Tile(16, 32, 16, 4, 2, False, False))


def _call(shape: Shape, x: Tensor, weight: Tensor, tile: Tile) -> Tensor:
    return (matmul.gated_linear if shape.is_gated else matmul.linear)(x, weight, None, tile)


def _short(tile: Tile) -> str:
    """Sizes, warps, stages, and letters of ways: t for TMA, p for pointers."""
    ways = "".join("pt"[each] for each in (tile.x_by_tma, tile.weight_by_tma, tile.out_by_tma))
    extra = "s" * tile.is_specialized + (f"x{tile.per_multiprocessor}" if tile.per_multiprocessor > 1 else "")
    columns = f"{tile.columns}+{tile.rest_columns}" if tile.rest_columns else tile.columns
    return f"{tile.rows}x{columns}x{tile.inputs}/{tile.num_warps}/{tile.num_stages}{ways}{extra}"


Job = tuple[bool, Tile, bool, bool]
"""What a kernel depends on: whether gated, tile, whether inputs are a multiple of its step, whether x goes by TMA."""


def jobs_of(shape: Shape, chip: Chip) -> list[Job]:
    """Kernels that a shape's sweep launches, those of the fewest rows first."""
    counts = [num_rows for rows in MEASURED_ROWS for num_rows in rows]
    return list(
        dict.fromkeys(
            (shape.is_gated, tile, shape.inputs % tile.inputs == 0, num_rows >= tile.rows)
            for num_rows in counts
            for tile in candidates(shape, num_rows, chip)
        )
    )


class Compilers:
    """Processes that fill Triton's cache, in the order in which shapes are measured."""

    def __init__(self, shapes: Sequence[Shape], chip: Chip, num_processes: int) -> None:
        self._jobs = {shape: jobs_of(shape, chip) for shape in shapes}
        pool = multiprocessing.get_context("spawn").Pool(num_processes)
        ordered = dict.fromkeys(job for jobs in self._jobs.values() for job in jobs)
        self._results = {job: pool.apply_async(_compile, (job,)) for job in ordered}
        pool.close()

    def wait_for(self, shape: Shape) -> None:
        """Wait until the kernels of `shape` are compiled."""
        began = time.monotonic()
        failed = {error for job in self._jobs[shape] if (error := self._results[job].get())}
        print(
            f"{shape}: {len(self._jobs[shape])} kernels, waited {time.monotonic() - began:.1f} s", *failed, flush=True
        )


def _compile(job: Job) -> str:
    """Launch a small matmul with the kernel; returns what went wrong."""
    is_gated, tile, is_even, is_full = job
    inputs = 2 * tile.inputs if is_even else 2 * tile.inputs + 16
    outputs = 2 * tile.width
    x = torch.zeros(tile.rows if is_full else tile.rows - 8, inputs, dtype=torch.bfloat16, device="cuda")
    weight = torch.zeros((2 if is_gated else 1) * outputs, inputs, dtype=torch.bfloat16, device="cuda")
    try:
        _call(Shape(is_gated, outputs, inputs), x, weight, tile)
    except Exception as error:  # the others are still worth compiling
        return f"{_short(tile)}: {type(error).__name__}: {str(error)[:200]}"
    return f"{_short(tile)} failed" if (is_gated, tile) in matmul.REPLACED else ""


def main() -> None:
    arguments = _arguments()
    began = time.monotonic()
    shapes = [Shape.parse(text) for text in arguments.shapes.split(",") if text]
    if arguments.model is not None:
        shapes += sorted(model_shapes(arguments.model, arguments.tensor_parallel_size))
    shapes = list(dict.fromkeys(shapes))
    if not shapes:
        raise SystemExit("give a model's folder or --shapes")
    sweep = Sweep(is_dry=arguments.dry, deadline=began + arguments.budget_s)
    print(f"{sweep.chip.name}, torch {torch.__version__}: {', '.join(map(str, shapes))}", flush=True)
    compilers = None if arguments.dry else Compilers(shapes, sweep.chip, arguments.jobs)
    entries: dict[Key, Entry] = {}
    with torch.inference_mode():
        for shape in shapes:
            if compilers is not None:
                compilers.wait_for(shape)
            entry = sweep.measure(shape)
            if entry is None:
                print(f"{shape}: no time left, keeps the tiles that it has", flush=True)
            else:
                entries[shape.is_gated, shape.outputs, shape.inputs] = entry
    if arguments.results is not None:
        arguments.results.write_text(json.dumps(sweep.results) + "\n", encoding="utf-8")
    path = arguments.out or tile_files.table_path(sweep.chip)
    if path is None:
        raise SystemExit("there is no home directory: give --out")
    if not arguments.dry:
        tile_files.write_table(path, sweep.chip, tile_files.read_table(sweep.chip) | entries)
    print(
        json.dumps(
            {
                "device": sweep.chip.name,
                "shapes": {str(Shape(*key)): [_short(tile) for tile in entry] for key, entry in entries.items()},
                "seconds": round(time.monotonic() - began, 1),
                "table": None if arguments.dry else str(path),
            }
        )
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", type=Path, help="a model's folder, or its config.json")
    parser.add_argument("--tensor-parallel-size", type=int, default=1, help="ranks that share the model's matrices")
    parser.add_argument("--shapes", default="", help="shapes beside the model's, with commas between them")
    parser.add_argument("--budget-s", type=float, default=120.0, help="seconds after which nothing more is timed")
    parser.add_argument("--jobs", type=int, default=min(12, os.cpu_count() or 1), help="processes that compile")
    parser.add_argument("--out", type=Path, help="the table's file; default: where the worker looks")
    parser.add_argument("--results", type=Path, help="a JSON file for all that was measured")
    parser.add_argument("--dry", action="store_true", help="on CPU tensors, interpreted, nothing timed or written")
    return parser.parse_args()


if __name__ == "__main__":
    main()
