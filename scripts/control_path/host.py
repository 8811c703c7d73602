"""What a decode step costs the host beside what the device computes: the whole engine around a model that computes
nothing.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from kv_cache.block import num_blocks_for
from spmd_worker import LLM, SamplingParams
from spmd_worker.model.adapters.loaded import LoadedAdapters
from spmd_worker.ops.sampling import read_back
from spmd_worker.ranks.communicator import GroupHandle
from spmd_worker.worker.backends.cpu import CpuDevice
from spmd_worker.worker.memory.plan import cache_spec_of
from spmd_worker.worker.runner.step_graphs import StepGraphs

MODEL = Path(__file__).resolve().parents[1] / "demo" / "model"
BACKEND = f"{__name__}.HollowDevice"
_NUM_WARM_UP_STEPS = 4


class HollowModel(nn.Module):
    """Stands for kernels and graphs: hidden states and largest logits that are there already. All else is the real
    model's.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.real = model
        num_rows = 4096
        self._hidden = torch.zeros(num_rows, model.model_config.hidden_size)
        self._values, self._columns = torch.ones(num_rows), torch.full((num_rows,), 7)
        self.plan: Callable[[], object] = _nothing

    def __getattr__(self, name: str) -> Any:
        """Of the real model."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("real"), name)

    def forward(self, token_ids: Tensor, *others: Any, **named: Any) -> Tensor:
        del others, named
        self.plan()
        return self._hidden[: len(token_ids)]

    def argmax_logits(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        return self._values[: len(hidden)], self._columns[: len(hidden)]


def _nothing() -> None:
    return


class HollowGraph:
    """Stands for a step's graph, which one call of the driver launches."""

    def record(self, launch: Callable[[], None]) -> None:
        del launch

    def replay(self) -> None:
        return


class HollowDevice(CpuDevice):
    """Keeps batches on the device, which here is the CPU: an operation on 256 numbers takes what its launch would. What
    graphs read is filled for each step, attention's plan too.
    """

    keeps_state = True

    def new_graphs(self, model: Any, tensor: GroupHandle, adapters: LoadedAdapters | None = None) -> StepGraphs:
        # Triton is optional, and other benchmarks of this script do without.
        from spmd_worker.ops.attention.backend import block_shapes
        from spmd_worker.ops.attention.triton import TritonBackend, TritonFixedAttention
        from spmd_worker.ops.kernels.triton.attention import Launches

        scheduler, spec = self.resolved.config.scheduler, cache_spec_of(self.resolved, 0)
        most, max_seqs, length = (
            scheduler.max_num_batched_tokens,
            self.resolved.max_num_seqs,
            self.resolved.max_model_len,
        )
        num_blocks = num_blocks_for(length, spec.block_size)
        attention = TritonFixedAttention(most, max_seqs, num_blocks, spec.block_size, self.device)
        (shape,) = block_shapes(TritonBackend(), spec)
        hollow: Any = HollowModel(model)
        num_heads = model.model_config.num_heads
        layer = (torch.empty(1, num_heads, spec.shapes[0].key_size), torch.empty(1, *shape), num_heads, 0)
        hollow.plan = partial(attention.plan, *layer, Launches(has_many=True, has_joins=True))
        return StepGraphs(hollow, attention, HollowGraph, most, max_seqs)


def bench_host(options: argparse.Namespace) -> int:
    """What a decode step costs the host beside kernels and graphs: median and p90 microseconds of `LLMEngine.step`.

    `sequences` decode behind prompts of `context` tokens, greedy, in an engine whose model computes nothing: planning,
    agreement (records, digest, message), mirror, batch, choice of tokens, read-back and outputs are the real ones.
    With a step ahead and one at a time, in turns. The device's own time is not in it: operations on the CPU stand for
    launches. Needs triton, of which nothing is compiled.
    """
    times: dict[str, list[float]] = {"ahead": [], "one at a time": []}
    for turn in range(options.turns):
        for kind in list(times) if turn % 2 == 0 else list(times)[::-1]:
            times[kind] += _steps(options, is_async=kind == "ahead")
    results = {}
    print("                 median us   p90 us   us a sequence")
    for kind, seconds in times.items():
        median, p90 = (1e6 * statistics.quantiles(seconds, n=10)[place] for place in (4, 8))
        results[kind] = {"median_us": round(median, 1), "p90_us": round(p90, 1)}
        print(f"{kind:15s} {median:11.1f} {p90:8.1f} {median / options.sequences:15.2f}")
    print(json.dumps({"sequences": options.sequences, "context": options.context, "results": results}))
    return 0


def _steps(options: argparse.Namespace, *, is_async: bool) -> list[float]:
    """Seconds of each step in which all sequences decode."""
    num_sequences, num_steps = options.sequences, options.steps + _NUM_WARM_UP_STEPS
    num_blocks = num_sequences * (-(-(options.context + num_steps) // 16) + 1)
    settings = {"max_num_seqs": num_sequences, "max_num_batched_tokens": 4096, "num_blocks": max(num_blocks, 64)}
    with (
        # As on a GPU, where a look at a value waits.
        mock.patch.object(read_back, "_FREE_ON", ()),
        # One launch of a kernel.
        mock.patch("spmd_worker.ops.kernels.triton.attention.fill_plan", return_value=None),
        LLM(MODEL, dtype="float32", device="cpu", device_backend=BACKEND, async_scheduling=is_async, **settings) as llm,
    ):
        engine, seconds = llm.llm_engine, []
        engine.lockstep.on_message = lambda payload: None
        params = SamplingParams(temperature=0.0, max_tokens=num_steps, ignore_eos=True, detokenize=False)
        for row in range(num_sequences):
            ids = [3 + (row * 31 + place * 17) % 100 for place in range(options.context)]
            engine.add_request(ids, params)
        while engine.has_unfinished_requests():
            before = engine.counters.num_computed_tokens
            began_s = time.thread_time()
            engine.step()
            ended_s = time.thread_time()
            if engine.counters.num_computed_tokens - before == num_sequences and engine.has_unfinished_requests():
                seconds.append(ended_s - began_s)
    return seconds[_NUM_WARM_UP_STEPS // 2 : -2]
