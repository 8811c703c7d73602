"""Findings and figures of one script that asks a GPU: collected by name, shown as they are made, reported as JSON.

A finding that the contract rests on has a value that it must have: any other is in `wrong`. A figure stands beside what
it is compared with: the library's time, the floor (bytes at the memory's rate, or operations at the rate of the matrix
unit), and the limit that it is to keep. A figure over its limit is said and is no error.
"""

import json
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import cycle, islice

import torch
from gpu_report import figure_line
from torch import Tensor

CHIPS = {"H200": (4.3e12, 790e12), "H100": (3.0e12, 790e12)}
"""Bytes and bfloat16 operations per second that were seen on a chip, by a word of its name."""
REFERENCE_CHIP = CHIPS["H200"]
"""Limits in seconds are an H200's; another chip's are in proportion to its floors."""
WORST_ERROR = 1e-2
"""Largest error of a result in bfloat16 beside one in float32, as a share of its norm."""
_CACHED_BYTES = 1.5e8
"""More than the L2 cache holds."""
_LAUNCHES, _SAMPLE_S = 12, 0.02


class NotOfferedError(Exception):
    """This version of the runtime does not offer what was asked."""


@dataclass(frozen=True, slots=True)
class Rates:
    """Bytes and operations per second of a chip."""

    bytes_per_s: float
    flop_per_s: float

    def floor_us(self, num_bytes: float, flop: float = 0.0) -> float:
        """Microseconds that neither memory nor matrix unit can beat."""
        return max(num_bytes / self.bytes_per_s, flop / self.flop_per_s) * 1e6


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured number. `wanted` is the most that it may be, or the least if `is_least`."""

    name: str
    value: float
    unit: str
    library: float | None = None
    floor: float | None = None
    wanted: float | None = None
    is_least: bool = False

    @property
    def is_met(self) -> bool | None:
        """None if nothing is wanted."""
        if self.wanted is None:
            return None
        return self.value >= self.wanted if self.is_least else self.value <= self.wanted


class Findings(dict[str, object]):
    """Findings in the order in which they were made. `wrong`: names of those that are not what they must be."""

    def __init__(self) -> None:
        super().__init__()
        self.wrong: list[str] = []
        self.failed: list[str] = []
        self.not_offered: dict[str, str] = {}
        self.figures: list[Figure] = []

    def say(self, name: str, value: object, decides: str = "") -> None:
        self[name] = value
        print(f"{name:<60} {value!s:<40} {decides}", flush=True)

    def must(self, name: str, value: object, wanted: object, decides: str = "") -> None:
        """A finding that the contract rests on."""
        is_right = type(value) is type(wanted) and value == wanted
        self.say(name, value, decides if is_right else f"WRONG: must be {wanted}")
        if not is_right:
            self.wrong.append(name)

    def must_be_near(self, name: str, found: Tensor, wanted: Tensor, worst: float = WORST_ERROR) -> None:
        error = float((found.float() - wanted.float()).norm() / wanted.float().norm())
        # False for what is no number.
        is_near = error < worst
        self.say(name, f"{error:.1e}", "" if is_near else f"WRONG: must be below {worst}")
        if not is_near:
            self.wrong.append(name)

    def figure(self, name: str, value: float, unit: str, **beside: float | None) -> None:
        """See `Figure`; `least` or `most` is what is wanted."""
        least, most = beside.pop("least", None), beside.pop("most", None)
        wanted = most if least is None else least
        figure = Figure(name, value, unit, **beside, wanted=wanted, is_least=least is not None)
        self.figures.append(figure)
        print(figure_line(asdict(figure)), flush=True)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """A part of the script: what it raises is said, and the others are still worth their answers."""
        began = time.perf_counter()
        try:
            yield
        except NotOfferedError as error:
            self.not_offered[name] = str(error)
            print(f"{name} is not offered: {error}", flush=True)
        except Exception as error:
            self.failed.append(name)
            self.say(f"{name} failed", f"{type(error).__name__}: {str(error)[:1000]}")
        self.say(f"{name}: seconds", round(time.perf_counter() - began, 1))

    def report(self) -> int:
        """Print all of it as the last line; returns the script's exit status."""
        figures = [asdict(each) | {"is_met": each.is_met} for each in self.figures]
        ends = {"failed": self.failed, "wrong": self.wrong, "not_offered": self.not_offered, "figures": figures}
        print(json.dumps({**self, **ends}, default=str), flush=True)
        return 1 if self.failed or self.wrong else 0


def rates() -> Rates:
    """Those of this GPU: as seen before on this kind, else measured here in a moment."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "H200"
    for word, known in CHIPS.items():
        if word in name:
            return Rates(*known)
    room = torch.empty(1 << 29, dtype=torch.int32, device="cuda")
    halves = room[: 1 << 28], room[1 << 28 :]
    copied_us = graph_us([lambda: halves[0].copy_(halves[1])])
    square = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    multiplied_us = graph_us([lambda: square @ square])
    return Rates((1 << 31) / copied_us * 1e6, 2 * 8192**3 / multiplied_us * 1e6)


def copies_past_the_cache(num_bytes: int, make: Callable[[], Tensor]) -> list[Tensor]:
    """Tensors of `num_bytes`, as many as do not fit into the L2 cache together: a step finds none of its weights
    there.
    """
    return [make() for _ in range(min(64, max(1, math.ceil(_CACHED_BYTES / num_bytes))))]


def graph_us(calls: Sequence[Callable[[], object]]) -> float:
    """Median microseconds of a call, of `calls` taken in turn and launched one after another by one CUDA graph: so the
    host's part is in no figure.
    """
    for call in calls:
        # Compiles; libraries allocate their room.
        call()
    torch.cuda.synchronize()
    launches = list(islice(cycle(calls), max(_LAUNCHES, len(calls))))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in launches:
            call()
    graph.replay()
    torch.cuda.synchronize()
    began = time.perf_counter()
    samples: list[float] = []
    while len(samples) < 3 or (len(samples) < 20 and time.perf_counter() - began < _SAMPLE_S):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        samples.append(start.elapsed_time(end))
    return statistics.median(samples) / len(launches) * 1e3


class Clock:
    """Times calls on a GPU. On dry runs, and where kernels are only compiled, each runs once and takes 1 us."""

    def __init__(self, *, is_timing: bool) -> None:
        self._is_timing = is_timing

    def us(self, calls: Sequence[Callable[[], object]]) -> float:
        """See `graph_us`."""
        if self._is_timing:
            return graph_us(calls)
        calls[0]()
        return 1.0
