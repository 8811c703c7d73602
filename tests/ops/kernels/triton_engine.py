"""The whole engine with kernels of a GPU, interpreted, beside the CPU's own: a process of its own.

    OPENBLAS_CORETYPE=Nehalem TRITON_INTERPRET=1 python tests/ops/kernels/triton_engine.py       prints one JSON object

A model of two layers in float32. Twelve rows, greedy and drawn, with penalties, filters, seeds and a beginning in
common, run whole, in chunks, preempted for want of blocks, and each alone. Tiles are cut down: rows pass several
segments.
"""

import json
import logging
import tempfile
from pathlib import Path
from unittest import mock

import torch

from spmd_worker import LLM, SamplingParams
from spmd_worker.base.errors import ConfigError
from spmd_worker.ops.kernels.triton import attention_kernels, matmul, tiles
from spmd_worker.ops.kernels.triton.penalties import ProcessedRows, RowHistories
from spmd_worker.ops.sampling import read_back
from spmd_worker.replica.sequence.sampled import NOT_READ

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 320,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "eos_token_id": 2,
}
COMMON = [3 + 7 * at % 300 for at in range(32)]
NUM_AHEAD = []
"""Rows ahead of their ids in each step with penalties."""
WORKER = "spmd_worker.worker.triton_worker.TritonWorker"


def rows() -> tuple[list[dict], list[SamplingParams]]:
    prompts, params = [], []
    for row in range(12):
        own = [3 + (row * 31 + at * 17) % 300 for at in range(1 + 3 * row)]
        prompts.append({"prompt_token_ids": [*COMMON, *own] if row % 3 == 0 else own})
        chosen = (
            {"temperature": 0.0},
            {"temperature": 1.0, "seed": row, "top_k": 20},
            {"temperature": 0.8, "seed": row, "top_p": 0.9, "repetition_penalty": 1.3},
            {"temperature": 0.0, "presence_penalty": 0.5, "frequency_penalty": 0.2},
        )[row % 4]
        params.append(SamplingParams(max_tokens=5, ignore_eos=True, logprobs=2, **chosen))
    return prompts, params


def answers(folder: Path, worker: str | None, *, alone: bool = False, **settings: int | str) -> tuple[list, int]:
    """Of each row its ids and log-probabilities; and how many rows were preempted."""
    prompts, params = rows()
    settings = {"num_blocks": 64, "max_num_batched_tokens": 512} | settings
    with LLM(folder, dtype="float32", device="cpu", load_format="dummy", worker_cls=worker, **settings) as llm:
        if alone:
            outputs = [llm.generate(*each, use_tqdm=False)[0] for each in zip(prompts, params, strict=True)]
        else:
            outputs = llm.generate(prompts, params, use_tqdm=False)
        preempted = llm.llm_engine.scheduler.counters.num_preemptions
    found: list = []
    for output in outputs:
        completion = output.outputs[0]
        found.append(
            (completion.token_ids, [{token: each.logprob for token, each in at.items()} for at in completion.logprobs])
        )
    return found, preempted


def refusal(folder: Path, dtype: str) -> str:
    try:
        LLM(folder, dtype=dtype, device="cpu", load_format="dummy", worker_cls=WORKER, num_blocks=64).close()
    except ConfigError as error:
        return str(error)
    return ""


def counted(histories: RowHistories, logits: torch.Tensor, prepared: ProcessedRows) -> None:
    """`process_`, whose rows are counted that the host does not know the last token of."""
    rows = [slot.row for slot in prepared.slots if slot is not None]
    NUM_AHEAD.append(sum(row.output_token_ids[-1:] == [NOT_READ] for row in rows))
    PROCESS(histories, logits, prepared)


PROCESS = RowHistories.process_


def main() -> None:
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    attention_kernels.TILE, attention_kernels.SEGMENT = 16, 32
    matmul.FLOAT32 = tiles.Tile(64, 64, 64, 4, 2, False, False, False)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(CONFIG))
        expected, _ = answers(folder, None)
        whole, _ = answers(folder, WORKER)
        chunked, _ = answers(folder, WORKER, max_num_batched_tokens=16, max_num_seqs=8)
        preempted, num_preempted = answers(folder, WORKER, num_blocks=66, block_size=2)
        alone, _ = answers(folder, WORKER, alone=True)
        # As on a GPU, where tokens are not looked at before they are read.
        with mock.patch.object(read_back, "_FREE_ON", ()), mock.patch.object(RowHistories, "process_", counted):
            ahead, _ = answers(folder, WORKER, async_scheduling=True)
        refused = refusal(folder, "bfloat16")
        reduced = {"kv_cache_dtype": "fp8"}
        expected_in_fp8, _ = answers(folder, None, **reduced)
        in_fp8, _ = answers(folder, WORKER, **reduced)
        cut_in_fp8, _ = answers(folder, WORKER, max_num_batched_tokens=16, max_num_seqs=8, block_size=2, **reduced)
    ids = [[row[0] for row in each] for each in (expected, whole)]
    print(
        json.dumps(
            {
                "ids are the CPU's": ids[0] == ids[1],
                "same bits in chunks": chunked == whole,
                "same bits preempted": preempted == whole,
                "same bits alone": alone == whole,
                "same bits a step ahead": ahead == whole,
                "rows with penalties go ahead": sum(NUM_AHEAD) >= 20,
                "ids are the CPU's with a cache in FP8": [row[0] for row in in_fp8]
                == [row[0] for row in expected_in_fp8],
                "same bits in chunks with a cache in FP8": cut_in_fp8 == in_fp8,
                "control: a cache in FP8 has other bits": in_fp8 != whole,
                "bfloat16 is refused": "interpreter does not support bfloat16: use dtype=float32" in refused,
                "control: other kernels have other bits": expected != whole,
                "control: rows were preempted": num_preempted > 0,
            }
        )
    )


if __name__ == "__main__":
    main()
