"""The questions about our GPU kernels that only a GPU answers: a line a finding, and one JSON object last.

    python scripts/gpu_probe.py           on a GPU, a few minutes
    OPENBLAS_CORETYPE=Nehalem TRITON_INTERPRET=1 python scripts/gpu_probe.py --dry
                                      the same code on CPU tensors, tiny, nothing timed

Needs torch, triton and numpy only. What a finding decides stands beside it; docs/internals/gpu.md has the list. A part
that fails is said, and the others go on. What the contract rests on has a value that it must have: any other is in
`wrong`.
Exits with 1 where a part failed or something is wrong.
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from spmd_worker.ops.kernels.triton import attention, matmul
from spmd_worker.ops.kernels.triton.matmul import Tile

SHAPES = {
    "8b qkv": (6144, 4096),
    "8b gate_up": (28672, 4096),
    "8b down": (4096, 14336),
    "135m down": (576, 1536),
}
"""Outputs, inputs."""
ROWS = (1, 2, 7, 16, 63, 64, 65, 128, 255, 256, 257, 1024)
TILES = (Tile(64, 64, 64, 4, 5), Tile(128, 128, 64, 8, 4), Tile(64, 32, 128, 4, 5), Tile(128, 256, 64, 8, 3))
SMALL_TILES = (Tile(16, 64, 128, 4, 5), Tile(32, 64, 128, 4, 5))
DRY_TILES = (Tile(16, 16, 16, 4, 2), Tile(32, 16, 16, 4, 2))
MODELS = {"135m": (9, 3, 64), "0.5b": (14, 2, 64), "8b": (32, 8, 128)}
"""Query heads, key-value heads, head size."""
BYTES_PER_S, FLOP_PER_S = 4.3e12, 790e12
"""What one H200 was seen to reach: floors are computed with them, whatever the device."""


WORST_ERROR = 1e-2
"""Of a result in bfloat16 beside one in float32, as a share of its norm."""


class Findings(dict[str, object]):
    """In the order in which they were made. `wrong`: names of those that are not what they must be."""

    def __init__(self) -> None:
        super().__init__()
        self.wrong: list[str] = []

    def must(self, name: str, value: object, wanted: object, decides: str = "") -> None:
        """A finding that the contract rests on."""
        is_right = type(value) is type(wanted) and value == wanted
        self.say(name, value, decides if is_right else f"WRONG: must be {wanted}")
        if not is_right:
            self.wrong.append(name)

    def must_be_near(self, name: str, found: Tensor, wanted: Tensor) -> None:
        error = float((found.float() - wanted).norm() / wanted.norm())
        # False for what is no number.
        is_near = error < WORST_ERROR
        self.say(name, f"{error:.1e}", "" if is_near else f"WRONG: must be below {WORST_ERROR}")
        if not is_near:
            self.wrong.append(name)

    def say(self, name: str, value: object, decides: str = "") -> None:
        self[name] = value
        print(f"{name:<60} {value!s:<40} {decides}", flush=True)


class Probe:
    """Each method asks one question."""

    def __init__(self, findings: Findings, *, is_dry: bool) -> None:
        self.findings, self.is_dry = findings, is_dry
        self.device = torch.device("cpu" if is_dry else "cuda")
        self.dtype = torch.float32 if is_dry else torch.bfloat16
        self.shapes = {"tiny": (40, 48)} if is_dry else SHAPES
        self.rows = (1, 3, 40) if is_dry else ROWS
        self.tiles = DRY_TILES if is_dry else TILES

    def random(self, *shape: int, scale: float = 1.0) -> Tensor:
        generator = torch.Generator(self.device).manual_seed(sum(shape))
        return (torch.randn(*shape, device=self.device, generator=generator) * scale).to(self.dtype)

    def microseconds(self, call: Callable[[], object]) -> float:
        return 0.0 if self.is_dry else float(triton.testing.do_bench(call, return_mode="median")) * 1e3

    def matmul_bits(self) -> None:
        for name, (n, k) in self.shapes.items():
            x, weight = self.random(max(self.rows), k), self.random(n, k, scale=k**-0.5)
            first = matmul.linear(x, weight, None, self.tiles[0])
            wanted = x.float() @ weight.float().T
            self.findings.must_be_near(f"{name}: error", first, wanted)
            other = [tile for tile in self.tiles if not torch.equal(matmul.linear(x, weight, None, tile), first)]
            self.findings.say(f"{name}: tiles with other bits", other, "none: tiles may follow the rows")
            whole = matmul.linear(x, weight, None)
            rows = [m for m in self.rows if not torch.equal(matmul.linear(x[:m], weight, None), whole[:m])]
            self.findings.must(f"{name}: rows with other bits", rows, [], "none: the contract holds")
            small = [] if self.is_dry else SMALL_TILES
            other = [tile for tile in small if not torch.equal(matmul.linear(x, weight, None, tile), first)]
            self.findings.say(f"{name}: tiles of 16 and 32 rows with other bits", other, "none: mma.sync for few rows")
            turned = matmul.linear(weight, x[:64], None, self.tiles[0]).T
            self.findings.say(
                f"{name}: weight first, same bits", torch.equal(turned, first[:64]), "True: rows as columns"
            )
            gated = matmul.gated_linear(x, weight, None)
            rows = [m for m in self.rows if not torch.equal(matmul.gated_linear(x[:m], weight, None), gated[:m])]
            self.findings.must(f"{name}: gated rows with other bits", rows, [], "none: the contract holds")
            separate = F.silu(first[:, : n // 2]) * first[:, n // 2 :]
            self.findings.say(f"{name}: gated is linear and silu", torch.equal(gated, separate), "False: exp differs")
            library = F.linear(x, weight)
            rows = [m for m in self.rows if not torch.equal(F.linear(x[:m], weight), library[:m])]
            self.findings.say(f"{name}: cuBLAS rows with other bits", rows, "what plain torch costs")
            self.findings.say(f"{name}: cuBLAS is ours", torch.equal(library, first), "True: may be mixed in")

    def matmul_speed(self) -> None:
        for name, (n, k) in self.shapes.items():
            weight = self.random(n, k, scale=k**-0.5)
            for m in self.rows[:1] if self.is_dry else (1, 16, 64, 256, 2048):
                x = self.random(m, k)
                times = {tile: self.microseconds(partial(matmul.linear, x, weight, None, tile)) for tile in self.tiles}
                best = min(times, key=times.__getitem__)
                library = self.microseconds(partial(F.linear, x, weight))
                floor = max(2 * n * k / BYTES_PER_S, 2.0 * m * n * k / FLOP_PER_S) * 1e6
                figures = [round(each, 1) for each in (times[best], library, floor)]
                self.findings.say(f"{name} rows {m}: us ours, cuBLAS, floor", [*figures, str(best)])

    def sequences(self, lengths: Sequence[int], counts: Sequence[int], heads: tuple[int, int, int]) -> "Sequences":
        num_heads, num_kv_heads, size = heads
        blocks = [-(-length // 16) for length in lengths]
        order = torch.randperm(sum(blocks) + 1, generator=torch.Generator().manual_seed(1))
        tables = torch.zeros(len(lengths), max(blocks), dtype=torch.int64)
        for index, count in enumerate(blocks):
            tables[index, :count], order = order[:count], order[count:]
        cache = self.random(sum(blocks) + 1, 2, num_kv_heads, 16, size)
        starts = [sum(counts[:index]) for index in range(len(counts) + 1)]
        queries = self.random(starts[-1], num_heads * size)
        return Sequences(queries, cache, tables.to(self.device), starts, list(lengths), heads)

    def attention_bits(self) -> None:
        heads = (3, 1, 16) if self.is_dry else (32, 8, 128)
        length, chunk = (600, 5) if self.is_dry else (3000, 70)
        case = self.sequences([length], [chunk], heads)
        whole = case.attend()
        picked = (0, chunk // 2, chunk - 1)
        alone = [case.alone(row, length - chunk + row + 1).attend() for row in picked]
        same = torch.equal(torch.cat(alone), whole[list(picked)])
        self.findings.must("attention: decode is the prompt's row, bit for bit", same, True, "the contract holds")
        once = case.alone(chunk - 1, length).attend(splits=False)
        self.findings.must("attention: split is whole, bit for bit", torch.equal(once, alone[-1]), True)
        self.findings.must_be_near("attention: error", whole, case.reference())

    def attention_speed(self) -> None:
        cases = ((1, 20),) if self.is_dry else ((256, 400), (256, 1500), (64, 4096), (1, 4096))
        for name, heads in {"tiny": (3, 1, 16)}.items() if self.is_dry else MODELS.items():
            for batch, length in cases:
                case = self.sequences([length] * batch, [1] * batch, heads)
                plan = case.plan()
                us = self.microseconds(partial(case.attend, plan))
                moved = batch * length * heads[1] * heads[2] * 2 * case.cache.itemsize
                rate = round(moved / us / 1e6, 2) if us else None
                self.findings.say(f"decode {name} {batch} x {length}: us, TB/s", [round(us, 1), rate], "85 % of 4.3")

    def graphs(self) -> None:
        """Whether kernels can be captured, with the same bits, and what a launch costs outside and inside."""
        case = self.sequences([400, 1500, 33], [1, 1, 20], (3, 1, 16) if self.is_dry else MODELS["8b"])
        plan = case.plan()
        expected = case.attend(plan)
        if self.is_dry:
            self.findings.say("attention out of a graph", "needs a GPU")
            return
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(100):
            case.attend(plan)
        # Launches alone: the device is still at work.
        self.findings.say("two launches from Python, us", round((time.perf_counter() - began) * 1e4, 1), "why graphs")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = case.attend(plan)
        captured.zero_()
        graph.replay()
        torch.cuda.synchronize()
        self.findings.must("attention out of a graph is the same bits", torch.equal(captured, expected), True)
        self.findings.say("two kernels in a graph, us", round(self.microseconds(graph.replay), 1), "the launch floor")

    def sums(self) -> None:
        mass = torch.rand(64, 3200 if self.is_dry else 128000, dtype=torch.float64, device=self.device)
        whole = mass.cumsum(-1)
        rows = [m for m in (1, 2, 8, 32) if not torch.equal(mass[:m].cumsum(-1), whole[:m])]
        self.findings.say("torch.cumsum: rows with other bits", rows, "why masses should be integers")


class Sequences:
    """Queries at the end of sequences in a paged cache, with a method a way of attending."""

    def __init__(
        self, queries: Tensor, cache: Tensor, tables: Tensor, starts: list[int], lengths: list[int],
        heads: tuple[int, int, int],
    ) -> None:  # fmt: skip
        self.queries, self.cache, self.tables = queries, cache, tables
        self.starts, self.lengths, self.heads = starts, lengths, heads

    def alone(self, row: int, length: int) -> "Sequences":
        """One query of the only sequence, whose keys end with it."""
        return Sequences(self.queries[row : row + 1], self.cache, self.tables, [0, 1], [length], self.heads)

    def plan(self, *, splits: bool = True) -> attention.PlannedAttention:
        return attention.plan_attention(self.starts, self.lengths, self.tables, *self.heads, splits=splits)

    def attend(self, plan: attention.PlannedAttention | None = None, *, splits: bool = True) -> Tensor:
        plan = self.plan(splits=splits) if plan is None else plan
        return attention.attend(self.queries, self.cache, plan, self.heads[0], self.heads[2] ** -0.5)

    def reference(self) -> Tensor:
        """In float32, of the only sequence."""
        num_heads, num_kv_heads, size = self.heads
        length, device = self.lengths[0], self.cache.device
        pages = self.cache[self.tables[0, : -(-length // 16)]]
        k, v = (pages[:, i].transpose(1, 2).flatten(0, 1)[:length].float() for i in (0, 1))
        k, v = (each.repeat_interleave(num_heads // num_kv_heads, 1) for each in (k, v))
        q = self.queries.view(-1, num_heads, size).float()
        position = torch.arange(length - len(q), length, device=device)[:, None]
        scores = torch.einsum("thd,nhd->htn", q, k) * size**-0.5
        scores = scores.masked_fill(torch.arange(length, device=device)[None] > position, -math.inf)
        return torch.einsum("htn,nhd->thd", scores.softmax(-1), v)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry", action="store_true", help="on CPU tensors, interpreted, nothing timed")
    is_dry = parser.parse_args().dry
    findings = Findings()
    findings.say("device", "CPU, interpreted" if is_dry else torch.cuda.get_device_name())
    findings.say("torch, triton", f"{torch.__version__}, {triton.__version__}")
    probe = Probe(findings, is_dry=is_dry)
    failed = []
    parts = (
        probe.attention_bits,
        probe.matmul_bits,
        probe.sums,
        probe.graphs,
        probe.attention_speed,
        probe.matmul_speed,
    )
    for part in parts:
        began = time.perf_counter()
        try:
            part()
        except Exception as error:  # the other questions are still worth their answers
            failed.append(part.__name__)
            findings.say(f"{part.__name__} failed", f"{type(error).__name__}: {str(error)[:300]}")
        findings.say(f"{part.__name__}: seconds", round(time.perf_counter() - began, 1))
    report = findings | {"failed": failed, "wrong": findings.wrong}
    print(json.dumps(report, default=str))
    return 1 if failed or findings.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
