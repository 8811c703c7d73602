"""Our GPU kernels by their public methods: bits that the contract rests on, and times beside the library and the floor.

    python scripts/gpu_probe.py [--only bits,matmul,gated,attention,adapters] [--warm]        on a GPU
    OPENBLAS_CORETYPE=Nehalem TRITON_INTERPRET=1 python scripts/gpu_probe.py --dry
                                      the same code on CPU tensors, tiny, nothing timed

Needs torch, triton and numpy only. A line a finding, and one JSON object last. --warm launches each kernel once, for
Triton's cache. A part that fails is said, and the others go on. Exits with 1 where a part failed or something is wrong.
"""

import argparse
import math
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.nn.functional as F
import triton
from gpu_figures import Clock, Findings, copies_past_the_cache, rates
from torch import Tensor

from spmd_worker.ops.attention import triton as offered_attention
from spmd_worker.ops.attention.metadata import AttentionMetadata
from spmd_worker.ops.attention.triton import TritonBackend
from spmd_worker.ops.kernels.adapters import AdapterKernels, AdapterSizes, AdapterStack
from spmd_worker.ops.kernels.triton.kernels import TritonKernels

SHAPES = {
    "qkv": (6144, 4096),
    "o": (4096, 4096),
    "gate_up": (28672, 4096),
    "down": (4096, 14336),
    "head": (128256, 4096),
    "135m down": (576, 1536),
}
"""Outputs, inputs; of an 8B model where no other is named."""
TIMED_ROWS = (1, 16, 64, 256, 2048)
HEAD = "head"
ROWS = (1, 2, 7, 16, 63, 64, 65, 128, 255, 256, 257, 1024)
BITS_SHAPES = ("qkv", "gate_up", "down", "135m down")
MODELS = {"8b": (32, 8, 128), "135m": (9, 3, 64), "gemma": (8, 4, 256)}
"""Query heads, key-value heads, head size."""
DECODES = {"8b": ((256, 400), (256, 1500), (64, 4096), (1, 4096)), "135m": ((256, 400),), "gemma": ((256, 400),)}
"""Sequences, keys of each."""
PROMPTS = {"8b": (2, 1024), "135m": (2, 1024), "gemma": (2, 1024)}
ADAPTED = {"qkv": (4096, 1024, 1024), "o": (4096,), "gate_up": (14336, 14336), "down": (4096,)}
"""Outputs of the parts of layers of `SHAPES`."""
NUM_ADAPTERS, RANK = 8, 16
BLOCK = 16
MOST_OF_LIBRARY = {1: 1.0, 16: 1.0, 64: 1.0, 256: 1.2, 2048: 1.1}
"""How many times the library's time a matmul may take, by rows."""
LEAST_OF_RATE = 3.5 / 4.3
"""Share of the memory's rate that attention of 256 x 400 has to reach."""


class Probe:
    """Each method asks one question."""

    def __init__(self, findings: Findings, *, is_dry: bool, is_warming: bool = False) -> None:
        self.findings, self.is_dry, self.is_warming = findings, is_dry, is_warming
        self.device = torch.device("cpu" if is_dry else "cuda")
        self.dtype = torch.float32 if is_dry else torch.bfloat16
        self.shapes = {"tiny": (40, 48)} if is_dry else SHAPES
        self.models = {"tiny": (3, 1, 16)} if is_dry else MODELS
        self.kernels, self.rates = TritonKernels(), rates()
        self.clock = Clock(is_timing=not is_dry and not is_warming)

    def random(self, *shape: int, scale: float = 1.0) -> Tensor:
        generator = torch.Generator(self.device).manual_seed(sum(shape))
        return torch.randn(*shape, device=self.device, generator=generator).mul_(scale).to(self.dtype)

    def bits(self) -> None:
        for name in ("tiny",) if self.is_dry else BITS_SHAPES:
            self._matmul_bits(name, *self.shapes[name])
        for name, heads in self.models.items():
            if self._is_offered(name, heads):
                self._attention_bits(name, heads)
        self._recorded_bits()
        self._sums()

    def matmul(self) -> None:
        for name, (n, k) in self.shapes.items():
            weights = copies_past_the_cache(2 * n * k, partial(self.random, n, k, scale=k**-0.5))
            for m in (3,) if self.is_dry else TIMED_ROWS:
                if (name, m) != (HEAD, TIMED_ROWS[-1]):
                    self._time_matmul(f"{name} {n}x{k}, {m} rows", weights, m, is_gated=False)

    def gated(self) -> None:
        n, k = (40, 48) if self.is_dry else SHAPES["gate_up"]
        weights = [self.random(n, k, scale=k**-0.5)]
        for m in (3,) if self.is_dry else TIMED_ROWS:
            self._time_matmul(f"gated {n}x{k}, {m} rows", weights, m, is_gated=True)

    def attention(self) -> None:
        for name, heads in self.models.items():
            if not self._is_offered(name, heads):
                continue
            for batch, length in ((2, 20),) if self.is_dry else DECODES[name]:
                self._time_decode(f"decode {name}, {batch} x {length}", batch, length, heads)
            count, length = (1, 20) if self.is_dry else PROMPTS[name]
            self._time_prompts(f"prompts {name}, {count} x {length}", count, length, heads)

    def adapters(self) -> None:
        kernels = self.kernels.adapter_kernels()
        layers = {"tiny": (24, 16)} if self.is_dry else ADAPTED
        stacks = {name: self._adapter_stack(kernels, name, widths) for name, widths in layers.items()}
        rows = (3, 40) if self.is_dry else (1, 64, 256, 2048)
        for name, stack in stacks.items():
            n, k = self.shapes[name]
            x, outputs = self.random(rows[-1], k), self.random(rows[-1], n)
            whole = outputs.clone()
            stack.add_(whole, x, kernels.step(self._adapter_slots(rows[-1]), NUM_ADAPTERS))
            self.findings.must(f"{name}: adapters change outputs", bool((whole != outputs).any()), True)
            for m in rows:
                step, room = kernels.step(self._adapter_slots(m), NUM_ADAPTERS), outputs[:m].clone()
                stack.add_(room, x[:m], step)
                same = torch.equal(room, whole[:m])
                self.findings.must(f"{name}, {m} rows: bits of adapters", same, True, "tiles of 16 and of 64 rows")
                us = self.clock.us([partial(stack.add_, room, x[:m], step)])
                num_bytes = 2 * (min(m, NUM_ADAPTERS) * RANK * (len(layers[name]) * k + n) + m * k + 2 * m * n)
                floor = self.rates.floor_us(num_bytes)
                self.findings.figure(f"adapters of {name} {n}x{k}, {m} rows", us, "us", floor=floor)
        for m in rows:
            us = self.clock.us([partial(kernels.step, self._adapter_slots(m))])
            self.findings.figure(f"rows by adapter, {m} rows", us, "us")
            columns = self.random(m, 80 if self.is_dry else SHAPES["gate_up"][0])
            us = self.clock.us([partial(self.kernels.silu_and_mul, columns)])
            floor = self.rates.floor_us(3 * columns.numel())
            self.findings.figure(f"gates apart, {m} rows", us, "us", floor=floor)

    def _adapter_stack(self, kernels: AdapterKernels, name: str, widths: Sequence[int]) -> AdapterStack:
        """A layer with `NUM_ADAPTERS` of `RANK`."""
        (_, k), starts = self.shapes[name], (0, *accumulate(widths))
        parts = tuple(pairwise(starts))
        stack = kernels.new_stack(AdapterSizes(NUM_ADAPTERS, RANK, k, parts, self.dtype, self.device))
        for slot in range(NUM_ADAPTERS):
            matrices = [(self.random(RANK, k, scale=k**-0.5), self.random(w, RANK)) for w in widths]
            stack.write(slot, stack.pack(matrices))
        return stack

    def _adapter_slots(self, count: int) -> Tensor:
        return torch.arange(count, dtype=torch.int32, device=self.device) % NUM_ADAPTERS

    def _is_offered(self, name: str, heads: tuple[int, int, int]) -> bool:
        """Whether this version has attention for heads of this size."""
        sizes = getattr(offered_attention, "HEAD_SIZES", None)
        if sizes is None or heads[2] in sizes:
            return True
        self.findings.not_offered[f"attention {name}"] = f"heads of {heads[2]}"
        return False

    def _matmul_bits(self, name: str, n: int, k: int) -> None:
        rows = (1, 3, 40) if self.is_dry else ROWS
        x, weight = self.random(max(rows), k), self.random(n, k, scale=k**-0.5)
        packed, gated_packed = self.kernels.pack(weight), self.kernels.pack_gated(weight)
        linear = self.kernels.linear(x, packed, None)
        self.findings.must_be_near(f"{name}: error", linear, x.float() @ weight.float().T)
        other = [m for m in rows if not torch.equal(self.kernels.linear(x[:m], packed, None), linear[:m])]
        self.findings.must(f"{name}: rows with other bits", other, [], "none: the contract holds")
        gated = self.kernels.gated_linear(x, gated_packed, None)
        other = [m for m in rows if not torch.equal(self.kernels.gated_linear(x[:m], gated_packed, None), gated[:m])]
        self.findings.must(f"{name}: gated rows with other bits", other, [], "none: the contract holds")
        library = F.linear(x, weight)
        other = [m for m in rows if not torch.equal(F.linear(x[:m], weight), library[:m])]
        self.findings.say(f"{name}: library's rows with other bits", other, "what plain torch costs")

    def _time_matmul(self, name: str, weights: list[Tensor], m: int, *, is_gated: bool) -> None:
        n, k = weights[0].shape
        x = self.random(m, k)
        pack = self.kernels.pack_gated if is_gated else self.kernels.pack
        ours = self.kernels.gated_linear if is_gated else self.kernels.linear
        us = self.clock.us([partial(ours, x, pack(weight), None) for weight in weights])
        library = None if self.is_warming else self.clock.us([partial(F.linear, x, weight) for weight in weights])
        columns = n // 2 if is_gated else n
        floor = self.rates.floor_us(2 * (n * k + m * k + m * columns), 2.0 * m * n * k)
        # A gated matmul applies its activation too, which the library's does not.
        most = None if library is None or is_gated or m not in MOST_OF_LIBRARY else MOST_OF_LIBRARY[m] * library
        self.findings.figure(name, us, "us", library=library, floor=floor, most=most)

    def sequences(self, lengths: Sequence[int], counts: Sequence[int], heads: tuple[int, int, int]) -> "Sequences":
        num_heads, num_kv_heads, size = heads
        blocks = [-(-length // BLOCK) for length in lengths]
        order = torch.randperm(sum(blocks) + 1, generator=torch.Generator().manual_seed(1))
        tables = torch.zeros(len(lengths), max(blocks), dtype=torch.int64)
        first = 0
        for index, count in enumerate(blocks):
            tables[index, :count], first = order[first : first + count], first + count
        shape = TritonBackend().block_shape(num_kv_heads, BLOCK, size)
        cache = self.random(sum(blocks) + 1, *shape)
        starts = [sum(counts[:index]) for index in range(len(counts) + 1)]
        queries = self.random(starts[-1], num_heads, size)
        return Sequences(queries, cache, tables.to(self.device), starts, list(lengths), heads)

    def _attention_bits(self, name: str, heads: tuple[int, int, int]) -> None:
        length, chunk = (600, 5) if self.is_dry else (3000, 70)
        case = self.sequences([length], [chunk], heads)
        whole = case.attend()
        picked = (0, chunk // 2, chunk - 1)
        alone = [case.alone(row, length - chunk + row + 1).attend() for row in picked]
        same = torch.equal(torch.cat(alone), whole[list(picked)])
        self.findings.must(f"attention {name}: decode is the prompt's row, bit for bit", same, True)
        self.findings.must_be_near(f"attention {name}: error", whole, case.reference())

    def _time_decode(self, name: str, batch: int, length: int, heads: tuple[int, int, int]) -> None:
        case = self.sequences([length] * batch, [1] * batch, heads)
        us = self.clock.us([case.attend])
        moved = batch * length * heads[1] * heads[2] * 2 * case.cache.itemsize
        floor = self.rates.floor_us(moved)
        most = floor / LEAST_OF_RATE if name == "decode 8b, 256 x 400" else None
        self.findings.figure(name, us, "us", floor=floor, most=most)
        self.findings.say(f"{name}: TB/s", round(moved / us / 1e6, 2))

    def _time_prompts(self, name: str, count: int, length: int, heads: tuple[int, int, int]) -> None:
        num_heads, num_kv_heads, size = heads
        case = self.sequences([length] * count, [length] * count, heads)
        us, library = self.clock.us([case.attend]), None
        if not self.is_dry and not self.is_warming:
            q, k, v = (self.random(count, each, length, size) for each in (num_heads, num_kv_heads, num_kv_heads))
            attend = partial(F.scaled_dot_product_attention, q, k, v, is_causal=True, enable_gqa=True)
            library = self.clock.us([attend])
        flop = 2.0 * count * num_heads * size * length * (length + 1)
        self.findings.figure(name, us, "us", library=library, floor=self.rates.floor_us(0, flop))

    def _recorded_bits(self) -> None:
        """Whether attention can be recorded, with the same bits, and what a launch costs from the host."""
        case = self.sequences([400, 1500, 33], [1, 1, 20], next(iter(self.models.values())))
        expected = case.attend()
        if self.is_dry:
            self.findings.say("attention out of a graph", "needs a GPU")
            return
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(100):
            case.attend()
        # Launches alone: the device is still at work.
        self.findings.say("attention's launches from Python, us", round((time.perf_counter() - began) * 1e4, 1))
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = case.attend()
        captured.zero_()
        graph.replay()
        torch.cuda.synchronize()
        self.findings.must("attention out of a graph is the same bits", torch.equal(captured, expected), True)

    def _sums(self) -> None:
        mass = torch.rand(64, 3200 if self.is_dry else 128000, dtype=torch.float64, device=self.device)
        whole = mass.cumsum(-1)
        rows = [m for m in (1, 2, 8, 32) if not torch.equal(mass[:m].cumsum(-1), whole[:m])]
        self.findings.say("torch.cumsum: rows with other bits", rows, "why masses are integers")


class Sequences:
    """Queries at the end of sequences in a paged cache; the step's work is planned once."""

    def __init__(
        self, queries: Tensor, cache: Tensor, tables: Tensor, starts: list[int], lengths: list[int],
        heads: tuple[int, int, int],
    ) -> None:  # fmt: skip
        self.queries, self.cache, self.tables = queries, cache, tables
        self.starts, self.lengths, self.heads = starts, lengths, heads
        self._backend = TritonBackend()
        positions = [
            length - (end - start) + at
            for length, start, end in zip(lengths, starts, starts[1:], strict=False)
            for at in range(end - start)
        ]
        rows = [row for row, (start, end) in enumerate(pairwise(starts)) for _ in range(start, end)]
        slots = torch.tensor(positions, device=tables.device)
        owners = torch.tensor(rows, device=tables.device)
        blocks = tables[owners, slots // BLOCK]
        self._metadata = AttentionMetadata(tuple(starts), tuple(lengths), tables, blocks, slots % BLOCK)

    def alone(self, row: int, length: int) -> "Sequences":
        """One query of the only sequence, whose keys end with it."""
        return Sequences(self.queries[row : row + 1], self.cache, self.tables, [0, 1], [length], self.heads)

    def attend(self) -> Tensor:
        return self._backend.attend(self.queries, self.cache, self._metadata, self.heads[2] ** -0.5, 0)

    def reference(self) -> Tensor:
        """In float32, of the only sequence."""
        num_heads, num_kv_heads, size = self.heads
        length, device = self.lengths[0], self.cache.device
        pages = self.cache[self.tables[0, : -(-length // BLOCK)]]
        k, v = (pages[:, i].transpose(1, 2).flatten(0, 1)[:length].float() for i in (0, 1))
        k, v = (each.repeat_interleave(num_heads // num_kv_heads, 1) for each in (k, v))
        q = self.queries.float()
        position = torch.arange(length - len(q), length, device=device)[:, None]
        scores = torch.einsum("thd,nhd->htn", q, k) * size**-0.5
        scores = scores.masked_fill(torch.arange(length, device=device)[None] > position, -math.inf)
        return torch.einsum("htn,nhd->thd", scores.softmax(-1), v)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry", action="store_true", help="on CPU tensors, interpreted, nothing timed")
    parser.add_argument("--only", default="bits,matmul,gated,attention,adapters", help="parts, separated by commas")
    parser.add_argument("--warm", action="store_true", help="launch each kernel once, time nothing")
    arguments = parser.parse_args()
    findings = Findings()
    findings.say("device", "CPU, interpreted" if arguments.dry else torch.cuda.get_device_name())
    findings.say("torch, triton", f"{torch.__version__}, {triton.__version__}")
    probe = Probe(findings, is_dry=arguments.dry, is_warming=arguments.warm)
    questions: dict[str, Callable[[], None]] = {
        "bits": probe.bits,
        "matmul": probe.matmul,
        "gated": probe.gated,
        "attention": probe.attention,
        "adapters": probe.adapters,
    }
    for name in arguments.only.split(","):
        with findings.part(name), torch.inference_mode():
            questions[name]()
    return findings.report()


if __name__ == "__main__":
    sys.exit(main())
