"""Times the compiled CPU kernels against the memory and the AMX unit they run on, and against plain torch.

    python scripts/bench_kernels.py [--quick] [--threads N]

Decode: one query token of each of 64 sequences, 32 query heads on 8 key-value heads, blocks of 16 in random places, a
new layer's cache at every call so that it comes from memory. The floor is the cache's bytes at the speed of reading
memory, measured here. Shared: the same where the first three quarters of the keys lie in the same blocks for all
sequences, beside where each has its own. Prefill: whole prompts, in useful (causal) operations. Products: packed, and
in leaves, against plain; the larger two are down projections of models of 1.7B and 8B parameters. The last line is one
JSON object. Figures are medians; a busy machine spoils them, so the fastest call is shown beside.
"""

import argparse
import itertools
import json
import statistics
import time
from collections import deque
from collections.abc import Callable

import torch
import torch.nn.functional as F

from spmd_worker.ops.attention.backend import AttentionBackend
from spmd_worker.ops.attention.cpu import CpuBackend, cpu_backend_or_reason
from spmd_worker.ops.attention.metadata import AttentionMetadata
from spmd_worker.ops.attention.sdpa import SdpaBackend
from spmd_worker.ops.kernels.api import Kernels
from spmd_worker.ops.kernels.cpu.native import cpu_kernels

NUM_SEQUENCES, NUM_HEADS, NUM_KV_HEADS, BLOCK_SIZE = 64, 32, 8, 16
MIN_CACHE_BYTES = 1 << 29
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
GEMMS = ((1536, 1536), (4096, 1024), (2048, 6144), (4096, 14336))
"""Outputs and inputs."""
NUM_LEAVES, NUM_RESULTS = 8, 4


def main() -> None:
    arguments = _arguments()
    torch.set_num_threads(arguments.threads or torch.get_num_threads())
    kernels, reason = cpu_kernels(torch.bfloat16)
    if reason is not None:
        raise SystemExit(f"nothing to time: {reason}")
    seconds = 0.3 if arguments.quick else 1.5
    with torch.inference_mode():
        bandwidth = _bandwidth(seconds)
        print(f"{torch.get_num_threads()} threads, memory read at {bandwidth / 1e9:.1f} GB/s\n")
        decode = _decode_table(bandwidth, seconds)
        shared = _shared_table(seconds)
        prefill = _prefill_table(seconds)
        products = _gemm_table(kernels, seconds)
    figures = {"threads": torch.get_num_threads(), "read_gb_s": round(bandwidth / 1e9, 1)}
    print(json.dumps({**figures, "decode": decode, "shared": shared, "prefill": prefill, "products": products}))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a fifth of the time")
    parser.add_argument("--threads", type=int, help="default: torch's")
    return parser.parse_args()


def _time(call: Callable[[], object], seconds: float) -> tuple[float, float]:
    """Median and fastest of as many calls as fit, at least 5, in milliseconds. The first is not counted."""
    call()
    samples: list[float] = []
    end = time.perf_counter() + seconds
    while len(samples) < 5 or time.perf_counter() < end:
        start = time.perf_counter()
        call()
        samples.append((time.perf_counter() - start) * 1e3)
    return statistics.median(samples), min(samples)


def _keeping(call: Callable[[], object]) -> Callable[[], object]:
    """The last results are kept, as a model's are: one in the memory of the last would find its lines in a cache."""
    results: deque[object] = deque(maxlen=NUM_RESULTS)
    return lambda: results.append(call())


def _bandwidth(seconds: float) -> float:
    """Bytes per second of adding up more memory than caches hold."""
    memory = torch.ones(MIN_CACHE_BYTES // 4)
    _, fastest_ms = _time(memory.sum, seconds)
    return MIN_CACHE_BYTES / fastest_ms * 1e3


def _decode_table(bandwidth: float, seconds: float) -> list[dict[str, object]]:
    print("decode, ms         D   keys   floor   ours (fastest)  ours/floor   sdpa   sdpa/ours")
    table = []
    for dtype_name, head_size, num_keys in itertools.product(DTYPES, (64, 128), (256, 1024)):
        ours, fastest, num_bytes = _decode(_ours(dtype_name, head_size), dtype_name, head_size, num_keys, seconds)
        sdpa, _, _ = _decode(SdpaBackend(), dtype_name, head_size, num_keys, seconds / 2)
        floor = num_bytes / bandwidth * 1e3
        print(
            f"{dtype_name:14} {head_size:5} {num_keys:6} {floor:7.2f} {ours:7.2f} ({fastest:6.2f}) {ours / floor:11.2f}"
            f" {sdpa:6.2f} {sdpa / ours:11.2f}"
        )
        row = {"dtype": dtype_name, "head_size": head_size, "keys": num_keys, "floor_ms": floor, "ours_ms": ours}
        table.append({**row, "ours_fastest_ms": fastest, "sdpa_ms": sdpa})
    print()
    return table


def _shared_table(seconds: float) -> list[dict[str, object]]:
    print("shared, ms         D   keys   common (fastest)   apart (fastest)  common/apart")
    table = []
    for dtype_name, head_size, num_keys in itertools.product(DTYPES, (64, 128), (256, 1024)):
        backend, num_common = _ours(dtype_name, head_size), num_keys * 3 // 4
        common, fastest, _ = _decode(backend, dtype_name, head_size, num_keys, seconds, num_common)
        apart, fastest_apart, _ = _decode(backend, dtype_name, head_size, num_keys, seconds)
        print(
            f"{dtype_name:14} {head_size:5} {num_keys:6} {common:8.2f} ({fastest:6.2f}) {apart:8.2f}"
            f" ({fastest_apart:6.2f}) {common / apart:12.2f}"
        )
        row = {"dtype": dtype_name, "head_size": head_size, "keys": num_keys, "common_keys": num_common}
        table.append({**row, "common_ms": common, "apart_ms": apart})
    print()
    return table


def _ours(dtype_name: str, head_size: int) -> CpuBackend:
    backend = cpu_backend_or_reason(DTYPES[dtype_name], (head_size,), BLOCK_SIZE)
    assert isinstance(backend, CpuBackend), backend
    return backend


def _decode(
    backend: AttentionBackend, dtype_name: str, head_size: int, num_keys: int, seconds: float, num_common: int = 0
) -> tuple[float, float, int]:
    """Median and fastest milliseconds, and the bytes of cache of one layer. The first `num_common` keys of all
    sequences lie in the same blocks.
    """
    blocks_each = num_keys // BLOCK_SIZE
    num_blocks = NUM_SEQUENCES * blocks_each
    dtype, shape = DTYPES[dtype_name], backend.block_shape(NUM_KV_HEADS, BLOCK_SIZE, head_size)
    num_bytes = num_blocks * 2 * NUM_KV_HEADS * BLOCK_SIZE * head_size * dtype.itemsize
    layers = torch.zeros(max(2, MIN_CACHE_BYTES // num_bytes), num_blocks, *shape, dtype=dtype)
    layers.normal_()
    tables = torch.randperm(num_blocks).view(NUM_SEQUENCES, blocks_each)
    tables[:, : num_common // BLOCK_SIZE] = tables[0, : num_common // BLOCK_SIZE].clone()
    metadata = AttentionMetadata(
        query_starts=tuple(range(NUM_SEQUENCES + 1)),
        context_lengths=(num_keys,) * NUM_SEQUENCES,
        block_tables=tables,
        token_blocks=tables[:, -1].contiguous(),
        token_offsets=torch.full((NUM_SEQUENCES,), BLOCK_SIZE - 1),
    )
    query = torch.randn(NUM_SEQUENCES, NUM_HEADS, head_size).to(dtype)
    turn = itertools.cycle(layers)
    median, fastest = _time(lambda: backend.attend(query, next(turn), metadata, head_size**-0.5, 0), seconds)
    return median, fastest, num_bytes


def _prefill_table(seconds: float) -> list[dict[str, object]]:
    print("prefill, GFLOP/s   D   prompts   ours (fastest)    sdpa   ours/sdpa   write ms")
    table = []
    cases = itertools.product(DTYPES, (64, 128), ((1, 2048), (4, 512), (16, 128)))
    for dtype_name, head_size, (num_prompts, length) in cases:
        num_operations = 4 * NUM_HEADS * head_size * num_prompts * length * (length + 1) / 2
        ours, fastest, write = _prefill(
            _ours(dtype_name, head_size), dtype_name, head_size, num_prompts, length, seconds
        )
        sdpa, _, _ = _prefill(SdpaBackend(), dtype_name, head_size, num_prompts, length, seconds / 2)
        rates = [num_operations / milliseconds / 1e6 for milliseconds in (ours, fastest, sdpa)]
        print(
            f"{dtype_name:14} {head_size:5} {num_prompts:4} x {length:<5} {rates[0]:6.0f} ({rates[1]:4.0f})"
            f" {rates[2]:9.0f} {rates[0] / rates[2]:9.2f} {write:11.2f}"
        )
        row = {"dtype": dtype_name, "head_size": head_size, "prompts": num_prompts, "length": length}
        table.append({**row, "ours_gflops": rates[0], "ours_fastest_gflops": rates[1], "sdpa_gflops": rates[2]})
    print()
    return table


def _prefill(
    backend: AttentionBackend, dtype_name: str, head_size: int, num_prompts: int, length: int, seconds: float
) -> tuple[float, float, float]:
    """Median and fastest milliseconds of attending, median of writing."""
    blocks_each, num_tokens = length // BLOCK_SIZE, num_prompts * length
    num_blocks, dtype = num_prompts * blocks_each, DTYPES[dtype_name]
    cache = torch.zeros(num_blocks, *backend.block_shape(NUM_KV_HEADS, BLOCK_SIZE, head_size), dtype=dtype)
    tables = torch.randperm(num_blocks).view(num_prompts, blocks_each)
    metadata = AttentionMetadata(
        query_starts=tuple(range(0, num_tokens + 1, length)),
        context_lengths=(length,) * num_prompts,
        block_tables=tables,
        token_blocks=tables.flatten().repeat_interleave(BLOCK_SIZE),
        token_offsets=torch.arange(BLOCK_SIZE).repeat(num_blocks),
    )
    merged = torch.randn(num_tokens, NUM_HEADS + 2 * NUM_KV_HEADS, head_size).to(dtype)
    query, key, value = merged.split([NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS], dim=1)
    write, _ = _time(lambda: backend.write(key, value, cache, metadata), seconds / 4)
    median, fastest = _time(lambda: backend.attend(query, cache, metadata, head_size**-0.5, 0), seconds)
    return median, fastest, write


def _gemm_table(kernels: Kernels, seconds: float) -> list[dict[str, object]]:
    print("products, GFLOP/s   outputs  inputs   rows   packed leaves  plain   packed/plain")
    table = []
    for dtype_name, (num_outputs, num_inputs), num_rows in itertools.product(DTYPES, GEMMS, (1, 16, 64, 512)):
        weight = torch.randn(num_outputs, num_inputs).to(DTYPES[dtype_name])
        x, packed = torch.randn(num_rows, num_inputs).to(weight.dtype), kernels.pack(weight)
        of_leaves = kernels.pack_leaves(weight)
        ends = [num_inputs * leaf // NUM_LEAVES for leaf in range(1, NUM_LEAVES + 1)]
        calls = (
            lambda: kernels.linear(x, packed, None),  # noqa: B023
            lambda: kernels.linear_of_leaves(x, of_leaves, None, ends, x.dtype),  # noqa: B023
            lambda: F.linear(x, weight),  # noqa: B023
        )
        ours, in_leaves, plain = (_time(_keeping(call), seconds / 4)[0] for call in calls)
        shape = {"dtype": dtype_name, "outputs": num_outputs, "inputs": num_inputs, "rows": num_rows}
        speeds = [2e-6 * num_rows * num_outputs * num_inputs / ms for ms in (ours, in_leaves, plain)]
        sizes = f"{num_outputs:8} {num_inputs:7} {num_rows:6}"
        print(f"{dtype_name:18} {sizes} {speeds[0]:8.0f} {speeds[1]:6.0f} {speeds[2]:6.0f} {plain / ours:14.2f}")
        table.append({**shape, "packed_ms": ours, "leaves_ms": in_leaves, "plain_ms": plain})
    print()
    return table


if __name__ == "__main__":
    main()
