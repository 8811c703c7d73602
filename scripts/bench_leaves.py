"""Times row-parallel products in leaves beside the same products of one chain, on the CPU.

    python scripts/bench_leaves.py [--leaves 8] [--seconds 4] [--architecture native] [--shape 576x1536 ...]

One thread, its processor time, so that other work on the machine counts as little as it can. The two forms take turns
on all copies of a weight, more than caches hold: copies of their own would measure pages. Architectures are the
compiler's: x86-64-v3 is AVX2. The last line is one JSON object.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from spmd_worker.native.library import NativeLibrary, native_library
from spmd_worker.ops.kernels.cpu.native import CpuKernels
from spmd_worker.ranks.leaves import leaf_bounds

SHAPES = ("576x1536", "896x4864", "4096x14336")  # outputs by inputs: down projections of 135M, 0.5B and 8B models
ROWS = (1, 16, 64, 256)
WEIGHT_BYTES, MAX_COPIES = 48 << 20, 24


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse_arguments(arguments)
    torch.set_num_threads(1)
    library = native_library(options.architecture)
    if not isinstance(library, NativeLibrary):
        raise SystemExit(f"nothing to time: {library}")
    print(
        f"{library.instruction_set}, {options.leaves} leaves\n\ndtype      product     rows  one chain, us  leaves/one"
    )
    figures = [
        time_product(CpuKernels(library), dtype, shape, num_rows, options)
        for dtype in (torch.bfloat16, torch.float32)
        for shape in options.shape
        for num_rows in ROWS
    ]
    print(json.dumps({"instruction_set": library.instruction_set, "leaves": options.leaves, "products": figures}))


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--leaves", type=int, default=8, help="a power of two")
    parser.add_argument("--seconds", type=float, default=4.0, help="of each product")
    parser.add_argument("--architecture", default="native")
    parser.add_argument("--shape", nargs="+", default=SHAPES, metavar="OUTPUTSxINPUTS")
    return parser.parse_args(arguments)


def time_product(
    kernels: CpuKernels, dtype: torch.dtype, shape: str, num_rows: int, options: argparse.Namespace
) -> dict[str, object]:
    num_outputs, num_inputs = map(int, shape.split("x"))
    ends = leaf_bounds(num_inputs, options.leaves)[1:]
    weight, x = torch.randn(num_outputs, num_inputs).to(dtype), torch.randn(num_rows, num_inputs).to(dtype)
    packed = kernels.pack_leaves(weight)
    copies = [packed.clone() for _ in range(min(MAX_COPIES, WEIGHT_BYTES // packed.nbytes + 1))]
    out = torch.empty(num_rows, num_outputs, dtype=dtype)
    one, leaves = in_turns(
        [
            lambda packed: kernels.linear(x, packed, None, out),
            lambda packed: kernels.linear_of_leaves(x, packed, None, ends, dtype, out),
        ],
        copies,
        options.seconds,
    )
    name = str(dtype).removeprefix("torch.")
    print(f"{name:9} {shape:>11} {num_rows:6} {one:14.1f} {leaves / one:11.3f}", flush=True)
    return {"dtype": name, "shape": shape, "rows": num_rows, "one_us": round(one, 1), "ratio": round(leaves / one, 3)}


def in_turns(forms: Sequence[Callable[[Tensor], Tensor]], weights: Sequence[Tensor], seconds: float) -> list[float]:
    """Median processor time of each form, in microseconds: at least three turns, every other one in reverse."""
    samples: list[list[int]] = [[] for _ in forms]
    end, num_turns = time.perf_counter() + seconds, 0
    while num_turns < 3 or time.perf_counter() < end:
        for index in range(len(forms))[:: 1 if num_turns % 2 else -1]:
            for weight in weights:
                start = time.thread_time_ns()
                forms[index](weight)
                samples[index].append(time.thread_time_ns() - start)
        num_turns += 1
    return [statistics.median(each) / 1e3 for each in samples]


if __name__ == "__main__":
    main()
