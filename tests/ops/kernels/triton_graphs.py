"""Whole steps replayed, beside the same steps launched kernel by kernel: a process of its own.

    OPENBLAS_CORETYPE=Nehalem TRITON_INTERPRET=1 python tests/ops/kernels/triton_graphs.py        prints one JSON object

A model of one layer in float32. Rows, greedy and drawn, of which some see several segments, decode beside chunks of
prompts; blocks are given to others in between, and rows go where they were not. Tiles and sizes are cut down, so that
steps are filled up.
"""

import json
import logging
import sys
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from unittest import mock

import torch
from recorded_graphs import RecordedGraph
from triton_engine import CONFIG
from two_shapes import two_shapes

from spmd_worker import LLM, SamplingParams
from spmd_worker.ops.attention.triton import TritonFixedAttention
from spmd_worker.ops.kernels.triton import attention, attention_kernels, matmul
from spmd_worker.worker.backends import triton as triton_backend
from spmd_worker.worker.runner import step_graphs
from spmd_worker.worker.worker import Worker

SMALL = {
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "hidden_size": 32,
    "intermediate_size": 48,
    "vocab_size": 64,
}
EAGER, GRAPHS = "triton", "recorded_graphs.RecordedDevice"
SETTINGS = {"num_blocks": 24, "block_size": 8, "max_num_batched_tokens": 20, "max_num_seqs": 4, "max_model_len": 96}


def rows() -> tuple[list[dict], list[SamplingParams]]:
    lengths = (31, 1, 34, 5, 12)
    prompts = [
        {"prompt_token_ids": [3 + (row * 31 + at * 17) % 60 for at in range(length)]}
        for row, length in enumerate(lengths)
    ]
    ways = ({"temperature": 1.0, "seed": 5, "logprobs": 2}, {"temperature": 0.0}, {"temperature": 0.0})
    chosen = [ways[row % len(ways)] for row in range(len(lengths))]
    return prompts, [SamplingParams(max_tokens=4 - row % 3, ignore_eos=True, **way) for row, way in enumerate(chosen)]


def open_llm(folder: Path, backend: str, **settings: object) -> LLM:
    settings = SETTINGS | settings
    return LLM(folder, dtype="float32", device="cpu", load_format="dummy", device_backend=backend, **settings)


def answers(llm: LLM) -> list:
    found = []
    for output in llm.generate(*rows(), use_tqdm=False, on_error="row"):
        if not output.outputs:
            found.append(output.error)
            continue
        entries = output.outputs[0].logprobs or []
        found.append((output.outputs[0].token_ids, [{key: each.logprob for key, each in at.items()} for at in entries]))
    return found


def counted(compute: Callable[[], list]) -> tuple[list, int, int]:
    """And how many graphs were recorded and replayed for it."""
    before = (RecordedGraph.num_recorded, RecordedGraph.num_replayed)
    found = compute()
    return found, RecordedGraph.num_recorded - before[0], RecordedGraph.num_replayed - before[1]


def scale_weights(model: torch.nn.Module) -> None:
    """In place, as an update is."""
    for parameter in model.parameters():
        parameter.data.mul_(1.01)


def move_weights(worker: Worker) -> None:
    """As code of somebody's does that assigns tensors."""
    for parameter in worker.get_model().parameters():
        parameter.data = parameter.data * 1.01


def planted(what: str) -> AbstractContextManager[object]:
    """Something that a graph would get wrong."""
    if what == "items of the step before":
        return mock.patch.object(attention, "fill_plan")
    if what == "tokens that fill up are written":
        return mock.patch.object(sys.modules[TritonFixedAttention.__module__], "_NO_SLOT", 0)
    if what == "weights that have moved":
        return mock.patch.object(step_graphs.StepGraphs, "request_address_check")
    return nullcontext()


def main() -> None:
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    attention_kernels.TILE, attention_kernels.SEGMENT = 16, 32
    matmul.FLOAT32 = matmul.Tile(64, 64, 64, 4, 2)
    step_graphs._SMALL_SIZES = (3, 8)
    # Nothing is compiled here.
    triton_backend.TritonDevice.warm_up_masks = lambda self, runner: None
    triton_backend.warm_up_steps = lambda *arguments: ()
    found = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(CONFIG | SMALL))
        with open_llm(folder, EAGER) as llm:
            eager = answers(llm)
            llm.apply_model(scale_weights)
            scaled = answers(llm)
        with open_llm(folder, GRAPHS, enable_sleep_mode=True) as llm:
            at_start = RecordedGraph.num_recorded
            first, num_recorded, num_replayed = counted(lambda: answers(llm))
            found["same bits"] = first == eager
            # Of 3 and of 4 rows, layers and head.
            found["recorded at the start, and one more for chunks"] = (at_start, num_recorded) == (4, 1)
            found["replayed"] = num_replayed > 4
            # With prompts that are cached: steps of other kinds.
            found["same bits of cached prompts"] = answers(llm) == eager
            # What moves goes on, and nothing is recorded for it.
            llm.apply_model(scale_weights)
            updated, num_recorded, _ = counted(lambda: answers(llm))
            found["same bits after an update in place"] = updated == scaled
            found["an update in place records nothing"] = num_recorded == 0
            found["control: the update changed answers"] = scaled != eager
            llm.sleep(level=1)
            llm.wake_up()
            awake, num_recorded, _ = counted(lambda: answers(llm))
            found["same bits after sleep"] = awake == scaled
            found["recorded anew after sleep"] = num_recorded > 0
        with open_llm(folder, GRAPHS) as llm:
            llm.collective_rpc(move_weights)
            moved, num_recorded, _ = counted(lambda: answers(llm))
            found["same bits where weights have moved"] = moved == scaled and num_recorded > 0
        with open_llm(folder, GRAPHS, enforce_eager=True) as llm:
            plain, *counts = counted(lambda: answers(llm))
            found["enforce_eager records nothing"] = (plain, counts) == (eager, [0, 0])
        for what in ("items of the step before", "tokens that fill up are written", "weights that have moved"):
            with planted(what), open_llm(folder, GRAPHS) as llm:
                if what == "weights that have moved":
                    llm.collective_rpc(move_weights)
                found[f"control: {what}"] = answers(llm) != (scaled if "moved" in what else eager)
        (folder / "config.json").write_text(json.dumps(CONFIG | SMALL | {"num_hidden_layers": 2}))
        with two_shapes():
            with open_llm(folder, EAGER) as llm:
                eager = answers(llm)
                assert len(llm.llm_engine.model_executor.driver_worker.worker.running.caches.engine.tensors) == 2
            with open_llm(folder, GRAPHS) as llm:
                found["same bits of layers of two shapes"] = answers(llm) == eager
            with open_llm(folder, "cpu") as llm:
                same = [ours[0] == theirs[0] for ours, theirs in zip(answers(llm), eager, strict=True)]
                found["the CPU's tokens of layers of two shapes"] = all(same)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
