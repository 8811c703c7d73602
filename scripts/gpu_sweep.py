"""Tiles of the Triton backend on this GPU: a sweep of a minute over those that are estimates or slower than wanted.

    python scripts/gpu_sweep.py --out sweep.json [--only matmul,fp8,...,latent,scans] [--budget-s 60]
    python scripts/gpu_sweep.py --show sweep.json       entries of the tables in Python, to be pasted
    TRITON_INTERPRET=1 OPENBLAS_CORETYPE=Nehalem python scripts/gpu_sweep.py --dry

Kernels are compiled first, in parallel. A candidate whose bits are not those of the tile that is launched today is
named and left out. A line for each shape has the time of today's tile, the library's and the five fastest; the results
are written after each shape, so that a sweep that is cut off is worth what it measured. The last line is one JSON
object. `--dry` runs few candidates on CPU tensors and writes nothing.

Tables: matmul -> MEASURED of `ops/kernels/triton/tile_table.py`, leaves -> LEAVES there, fp8 -> MEASURED of
`ops/kernels/triton/fp8.py`; prompts -> `attention.many_tile`, adapters -> `adapters.FEW_ROWS` and `MANY_ROWS`, which
have a tile for a kind of heads or for all layers: their entries are shown as they were measured. So have latent ->
`attention.many_tile`, and scans -> `BV` and `BP` of `scan_delta_kernels.py` and `scan_mamba_kernels.py`.
"""

import argparse
import json
import multiprocessing
import os
import re
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import triton
from gpu_figures import rates
from gpu_hybrid_tiles import ALL_SUBJECTS, subject_of
from gpu_tiles import Subject
from torch import Tensor

from spmd_worker.ops.kernels.triton.compile_ahead import compiling

BYTES_BEYOND_CACHE = 160 << 20
SAMPLE_US, MOST_LAUNCHES, NUM_SAMPLES = 1500.0, 120, 3
SHOWN = 5
TOGETHER = 3
"""Kernels that a process compiles one after another, with the same operands."""


class Timer:
    """Times launches of one graph, whose operands are taken in turn."""

    def __init__(self) -> None:
        self._stream, self._pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()
        # A graph that stays keeps the pool of the others.
        self._kept_value = torch.zeros(1, device="cuda")
        self._kept = self._recorded(self._kept_value.zero_)
        values = torch.zeros((8192, 8192), dtype=torch.bfloat16, device="cuda")
        for _ in range(200):
            torch.matmul(values, values)
        torch.cuda.synchronize()

    def us(self, calls: list[Callable[[], object]], floor_us: float) -> float:
        num_launches = max(len(calls), min(MOST_LAUNCHES, int(SAMPLE_US / (2 + floor_us))))
        calls[0]()

        def launch() -> None:
            for index in range(num_launches):
                calls[index % len(calls)]()

        graph = self._recorded(launch)
        graph.replay()
        found = []
        for _ in range(NUM_SAMPLES):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            found.append(start.elapsed_time(end) * 1e3 / num_launches)
        return min(found)

    def _recorded(self, launch: Callable[[], object]) -> "torch.cuda.CUDAGraph":
        """`torch.cuda.graph` would empty the allocator's cache each time."""
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._pool)
            launch()
            graph.capture_end()
        return graph


class NoTimer:
    """The dry run's: each call runs once and takes a microsecond."""

    def us(self, calls: list[Callable[[], object]], floor_us: float) -> float:
        del floor_us
        calls[0]()
        return 1.0


@dataclass
class Result:
    """Microseconds of one subject: of the library, of today's tile and of each candidate, by its text."""

    kind: str
    subject: dict[str, Any]
    name: str
    floor: float
    library: float | None
    today: str
    times: dict[str, float]
    wrong: list[str]

    def line(self) -> str:
        best = sorted(self.times, key=self.times.__getitem__)[:SHOWN]
        beside = "" if self.library is None else f" library {self.library:.1f}"
        shown = "; ".join(f"{_short(text)} {self.times[text]:.2f}" for text in best)
        mine = self.times.get(self.today)
        now = "failed" if mine is None else f"{mine:.2f}"
        wrong = "".join(f"\n    left out: {_short(each)}" for each in self.wrong)
        return f"{self.name}: floor {self.floor:.1f}{beside} today {_short(self.today)} {now} | {shown}{wrong}"


def _short(text: str) -> str:
    """Values of fields, 1 for True."""
    text = re.sub(r"\w+=|\b(?:Leaf|Fp8|Adapter)?Tile| ", "", text)
    return text.replace("True", "1").replace("False", "0")


def measured(subject: Subject, timer: "Timer | NoTimer", device: torch.device, deadline: float) -> Result:
    """All candidates, today's first, until the deadline."""
    is_dry = device.type == "cpu"
    num_copies = 1 if is_dry else max(1, min(64, -(-BYTES_BEYOND_CACHE // subject.weight_bytes)))
    operands = subject.operands(device, num_copies)
    floor = rates().floor_us(*subject.work())
    library = None
    if not is_dry and (calls := subject.library(operands)) is not None:
        library = round(timer.us(calls, floor), 2)
    candidates = subject.candidates(device)
    result = Result(subject.kind, asdict(subject), subject.name, floor, library, str(candidates[0]), {}, [])
    expected: Tensor | None = None
    for candidate in candidates[:2] if is_dry else candidates:
        if time.monotonic() > deadline and expected is not None:
            break
        try:
            calls = subject.calls(operands, candidate)
            found = calls[0]()
            expected = found.clone() if expected is None else expected
            if not torch.equal(found, expected):
                result.wrong.append(f"{candidate}: other bits")
                continue
            result.times[str(candidate)] = round(timer.us(list(calls), floor), 3)
        except Exception as error:  # of a tile that does not compile or fit
            result.wrong.append(f"{candidate}: {type(error).__name__}: {str(error).strip()[:120]}")
    return result


def compile_some(kind: str, fields: dict[str, Any], indices: list[int]) -> list[str]:
    """Compile the kernels of some candidates, in a process of its own, for Triton's cache; returns what went wrong."""
    # With an index: threads that compile set their device, and torch refuses to set one without.
    subject, device, errors = subject_of(kind, fields), torch.device("cuda", torch.cuda.current_device()), []
    with torch.inference_mode():
        operands, candidates = subject.operands(device, 1), subject.candidates(device)
        # Launches nothing, so that the GPU is left to what is timed meanwhile.
        with compiling(device, 1):
            for index in indices:
                try:
                    subject.calls(operands, candidates[index])[0]()
                except Exception as error:  # said again where it is measured
                    errors.append(f"{type(error).__name__}: {str(error)[:100]}")
    return errors


class Compilers:
    """Processes that compile candidates; those with the same kernel are launched once."""

    def __init__(self, subjects: Iterable[Subject], num_processes: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pool = ProcessPoolExecutor(num_processes, mp_context=context)
        self._jobs: dict[str, list[Future[list[str]]]] = {}
        asked: set[object] = set()
        for subject in subjects:
            keys = [subject.kernel_key(candidate) for candidate in subject.candidates(torch.device("cuda"))]
            new = [index for index, key in enumerate(keys) if key not in asked and keys.index(key) == index]
            asked.update(keys)
            # Kernels of earlier subjects are waited for there.
            self._jobs[subject.name] = [
                self._pool.submit(compile_some, subject.kind, asdict(subject), new[start : start + TOGETHER])
                for start in range(0, len(new), TOGETHER)
            ]
        self.num_kernels = len(asked)

    def wait_for(self, subject: Subject, deadline: float) -> None:
        for job in self._jobs[subject.name]:
            try:
                job.result(timeout=max(0.0, deadline - time.monotonic()))
            except Exception as error:  # the sweep compiles it itself
                print(f"{subject.name}: compiling: {type(error).__name__}: {str(error)[:100]}", flush=True)
                return

    def stop(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


def run(arguments: argparse.Namespace) -> int:
    began = time.monotonic()
    deadline = began + arguments.budget_s
    device = torch.device("cpu" if arguments.dry else "cuda")
    kinds = arguments.only.split(",")
    subjects = [each for kind in kinds for each in ALL_SUBJECTS[kind](is_dry=arguments.dry)]
    name = "interpreted" if arguments.dry else torch.cuda.get_device_name()
    print(f"{name}, torch {torch.__version__}, triton {triton.__version__}: {len(subjects)} shapes", flush=True)
    compilers = None if arguments.dry else Compilers(subjects, arguments.jobs)
    timer = NoTimer() if arguments.dry else Timer()
    results: list[Result] = []
    with torch.inference_mode():
        for subject in subjects:
            if time.monotonic() > deadline:
                print(f"{subject.name}: no time left", flush=True)
                continue
            if compilers is not None:
                compilers.wait_for(subject, deadline)
            try:
                result = measured(subject, timer, device, deadline)
            except Exception as error:  # the others are worth their answers
                print(f"{subject.name}: {type(error).__name__}: {str(error)[:300]}", flush=True)
                continue
            results.append(result)
            print(result.line(), flush=True)
            if arguments.out is not None and not arguments.dry:
                arguments.out.write_text(json.dumps([asdict(each) for each in results]) + "\n", encoding="utf-8")
    seconds = round(time.monotonic() - began, 1)
    if compilers is not None:
        compilers.stop()
    num_kernels = 0 if compilers is None else compilers.num_kernels
    wrong = {each.name: each.wrong for each in results if each.wrong}
    ends = {"device": name, "measured": len(results), "of": len(subjects), "kernels": num_kernels, "seconds": seconds}
    print(json.dumps({**ends, "left_out": wrong}))
    return 0 if results else 1


def show(path: Path) -> None:
    """Entries of tables, in Python."""
    for kind, results in _by_kind(json.loads(path.read_text(encoding="utf-8"))).items():
        print(f"# {kind}")
        for line in ALL_SUBJECTS[kind].entries(results):
            print(line)


def _by_kind(results: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for result in results:
        found.setdefault(result["kind"], []).append(result)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="a JSON file for all that was measured")
    parser.add_argument("--show", type=Path, metavar="RESULTS", help="print entries of the tables, and measure nothing")
    parser.add_argument("--only", default=",".join(ALL_SUBJECTS), help="kinds, separated by commas")
    parser.add_argument("--budget-s", type=float, default=60.0, help="seconds after which nothing more is timed")
    parser.add_argument("--jobs", type=int, default=min(16, os.cpu_count() or 1), help="processes that compile")
    parser.add_argument("--dry", action="store_true", help="on CPU tensors, interpreted, nothing timed or written")
    arguments = parser.parse_args()
    if unknown := [kind for kind in arguments.only.split(",") if kind not in ALL_SUBJECTS]:
        parser.error(f"--only {','.join(unknown)}: the kinds are {', '.join(ALL_SUBJECTS)}")
    if arguments.show is not None:
        show(arguments.show)
        return 0
    return run(arguments)


if __name__ == "__main__":
    sys.exit(main())
