"""Row-parallel products in leaves on a GPU: bits of ranks and of rows, and their price beside products without leaves.

    python scripts/gpu_leaves.py [--warm]                                         on a GPU
    OPENBLAS_CORETYPE=Nehalem TRITON_INTERPRET=1 python scripts/gpu_leaves.py --dry
                                      the same code on CPU tensors, tiny, nothing timed

Needs torch, triton and numpy only. A line a finding, and one JSON object last. --warm launches each kernel once, for
Triton's cache. Exits with 1 where something is wrong. Ranks are shares of one tensor: exchanges are not timed.
"""

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import triton
from gpu_figures import Clock, Findings, copies_past_the_cache, rates
from torch import Tensor

from spmd_worker.ops.kernels.triton import leaf_matmul
from spmd_worker.ops.kernels.triton.kernels import TritonKernels
from spmd_worker.ranks.leaves import leaf_bounds, tree_sum

NUM_LEAVES = 8
SHAPES = {"down": (4096, 14336), "o": (4096, 4096), "0.5b down": (896, 4864), "unequal": (2048, 1408)}
"""Outputs, inputs; of an 8B model where no other is named."""
TIMED = ("down", "o")
ROWS = (1, 16, 17, 64, 65, 256, 257, 1024)
TIMED_ROWS = (16, 64, 256, 2048)
RANKS = (2, 4, 8)


class LeavesProbe:
    """Asks about one shape after the other."""

    def __init__(self, findings: Findings, *, is_dry: bool, is_warming: bool) -> None:
        self.findings, self.is_dry, self.is_warming = findings, is_dry, is_warming
        self.device = torch.device("cpu" if is_dry else "cuda")
        self.dtype = torch.float32 if is_dry else torch.bfloat16
        self.kernels, self.rates = TritonKernels(), rates()
        self.clock = Clock(is_timing=not is_dry and not is_warming)

    def random(self, *shape: int, scale: float = 1.0) -> Tensor:
        generator = torch.Generator(self.device).manual_seed(sum(shape))
        return torch.randn(*shape, device=self.device, generator=generator).mul_(scale).to(self.dtype)

    def bits(self, name: str, n: int, k: int) -> None:
        """Rows alone, ranks, a graph, and the error."""
        rows = (1, 5) if self.is_dry else ROWS
        x, weight, bias = self.random(rows[-1], k), self.random(n, k, scale=k**-0.5), self.random(n)
        ends = leaf_bounds(k, NUM_LEAVES)[1:]
        multiply = partial(self.kernels.linear_of_leaves, weight=weight, bias=bias, ends=ends, dtype=self.dtype)
        whole = multiply(x)
        self.findings.must_be_near(f"{name}: error", whole, x.float() @ weight.float().T + bias.float())
        other = [m for m in rows if not torch.equal(multiply(x[:m]), whole[:m])]
        self.findings.must(f"{name}: rows with other bits", other, [], "none: the contract holds")
        for m in rows:
            sums = {size: tree_sum(self._parts(x[:m], weight, bias, ends, size)).to(self.dtype) for size in RANKS}
            other = [size for size, total in sums.items() if not torch.equal(total, whole[:m])]
            self.findings.must(f"{name}, {m} rows: ranks with other bits than one", other, [], "none: leaves hold")
        parts = self._parts(x, weight, bias, ends, NUM_LEAVES)
        is_same = torch.equal(sum(parts[1:], parts[0]), tree_sum(parts))
        self.findings.must(f"{name}: control: ranks in order have the tree's bits", is_same, False)
        if not self.is_dry:
            self._recorded(name, x, multiply, whole)

    def _recorded(self, name: str, x: Tensor, multiply: "partial[Tensor]", whole: Tensor) -> None:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = multiply(x)
        captured.zero_()
        graph.replay()
        torch.cuda.synchronize()
        self.findings.must(f"{name}: the same bits out of a graph", torch.equal(captured, whole), True)

    def _parts(self, x: Tensor, weight: Tensor, bias: Tensor, ends: Sequence[int], size: int) -> list[Tensor]:
        """Parts of ranks, which have their leaves' inputs."""
        bounds, each = (0, *ends), len(ends) // size
        found = []
        for start, stop in pairwise(range(0, len(bounds), each)):
            own = slice(bounds[start], bounds[stop])
            of_rank = [end - own.start for end in bounds[start + 1 : stop + 1]]
            added = None if start else bias
            found.append(self.kernels.linear_of_leaves(x[:, own], weight[:, own], added, of_rank, torch.float32))
        return found

    def price(self, name: str, n: int, k: int) -> None:
        """Microseconds, without leaves and with them, of all inputs and of a rank's half."""
        weights = copies_past_the_cache(2 * n * k, partial(self.random, n, k, scale=k**-0.5))
        ends = leaf_bounds(k, NUM_LEAVES)[1:]
        half = ends[NUM_LEAVES // 2 - 1]
        for m in (3,) if self.is_dry else TIMED_ROWS:
            x = self.random(m, k)
            plain = self.clock.us([partial(self.kernels.linear, x, weight, None) for weight in weights])
            multiply = self.kernels.linear_of_leaves
            us = self.clock.us([partial(multiply, x, weight, None, ends, self.dtype) for weight in weights])
            floor = self.rates.floor_us(2 * (n * k + m * k + m * n), 2.0 * m * n * k)
            words = f"{name} {n}x{k}, {m} rows"
            self.findings.figure(f"{words}, in {NUM_LEAVES} leaves", us, "us", library=plain, floor=floor)
            price = "" if self.is_dry or self.is_warming else f"{100 * (us / plain - 1):+.0f} %"
            self.findings.say(f"{words}: price of leaves", price, "beside the same product without")
            of_half = (None, ends[: NUM_LEAVES // 2], torch.float32)
            part = [partial(multiply, x[:, :half], weight[:, :half], *of_half) for weight in weights]
            floor = self.rates.floor_us(n * k + m * k + 4 * m * n, 1.0 * m * n * k)
            self.findings.figure(f"{words}, part of a rank of two", self.clock.us(part), "us", floor=floor)
            cut = leaf_matmul.cut_of(tuple(ends))
            self.findings.say(f"{words}: tile", leaf_matmul.tile_for(m, n, k, cut, self.dtype, self.device))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry", action="store_true", help="on CPU tensors, interpreted, nothing timed")
    parser.add_argument("--warm", action="store_true", help="launch each kernel once, time nothing")
    arguments = parser.parse_args()
    findings = Findings()
    findings.say("device", "CPU, interpreted" if arguments.dry else torch.cuda.get_device_name())
    findings.say("torch, triton", f"{torch.__version__}, {triton.__version__}")
    probe = LeavesProbe(findings, is_dry=arguments.dry, is_warming=arguments.warm)
    shapes = {"tiny": (40, 288)} if arguments.dry else SHAPES
    with torch.inference_mode():
        for name, (n, k) in shapes.items():
            with findings.part(f"bits of {name}"):
                probe.bits(name, n, k)
            if arguments.dry or name in TIMED:
                with findings.part(f"price of {name}"):
                    probe.price(name, n, k)
    findings.must("tiles that did not work", [*map(str, leaf_matmul.REPLACED)], [])
    return findings.report()


if __name__ == "__main__":
    sys.exit(main())
