"""Jobs on two ranks for each kind of model: greedy ids equal transformers', and two replicas and a resumed job write
the bytes of one uninterrupted replica.
"""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import ranks
from cut_jobs import Ended, end_after
from expert_checkpoints import CASES as EXPERT_CASES
from expert_checkpoints import expert_folder, open_experts
from family_checkpoints import ALL_CASES, family_folder, family_reference
from quantised_files import quantise, quantise_experts
from reference_models import (
    CheckpointSpec,
    LlamaConfig,
    greedy_without_cache,
    open_reference,
    random_prompt,
    write_checkpoint,
)
from transformers import PreTrainedModel

from spmd_worker.base.config.compose import compose_run
from spmd_worker.frontends.batch.job import run_job
from spmd_worker.ranks.environment import RankEnvironment

PROMPTS = [[token % 96 for token in random_prompt(length, seed=11)] for length in (2, 19, 40)]
NUM_TOKENS = 8
Made = tuple[Path, Callable[[], PreTrainedModel]]
"""A folder, and transformers' model of what its weights mean."""


def family(name: str) -> Callable[[Path], Made]:
    return lambda _: (family_folder(name), lambda: family_reference(name))


def experts(name: str) -> Callable[[Path], Made]:
    return lambda _: (expert_folder(name), lambda: open_experts(expert_folder(name)))


def quantised(name: str) -> Callable[[Path], Made]:
    def make(folder: Path) -> Made:
        sizes = {"intermediate_size": 96, "num_hidden_layers": 2}
        files, plain = quantise(write_checkpoint(folder / "llama", CheckpointSpec(LlamaConfig, sizes)), folder, name)
        return files, lambda: open_reference(plain)

    return make


def mxfp4(folder: Path) -> Made:
    files, plain = quantise_experts(expert_folder("gpt_oss"), folder)
    return files, lambda: open_experts(plain)


MODELS: dict[str, Callable[[Path], Made]] = {
    "Gemma 3": family("gemma3"),
    "Phi-3": family("phi3"),
    "OLMo 2": family("olmo2"),
    "GPT-2": family("gpt2"),
    "Qwen2.5-VL's text": family("qwen2_5_vl"),
    "Qwen3-MoE": experts("qwen3_moe"),
    "Mixtral": experts("mixtral"),
    "GLM-4.5": experts("glm4_moe"),
    "gpt-oss, MXFP4": mxfp4,
    "FP8 block": quantised("fp8_block"),
    "AWQ": quantised("awq"),
    "GPTQ": quantised("gptq_order"),
}
IN_LAYOUTS = ("Qwen2.5-VL's text", "gpt-oss, MXFP4")
"""The others run in the stress tier: their parts are tested one by one."""


@pytest.mark.gate("Qwen2.5-VL's text")
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.matrix if name in IN_LAYOUTS else pytest.mark.stress) for name in MODELS],
)
def test_job_on_two_ranks_has_transformers_ids(name: str, tmp_path: Path):
    folder, reference = MODELS[name](tmp_path)
    row = {"temperature": 0, "max_tokens": NUM_TOKENS, "ignore_eos": True}
    lines = [json.dumps({"prompt_token_ids": prompt, **row}) for prompt in PROMPTS]
    (tmp_path / "rows.jsonl").write_text("".join(f"{line}\n" for line in lines))
    keys = {
        "model.path": folder,
        "model.dtype": "float32",
        "device": "cpu",
        "parallel.tensor_parallel_size": 2,
        "cache.num_blocks": 64,
        "scheduler.max_num_seqs": 4,
        "job.input": tmp_path / "rows.jsonl",
        "job.output": tmp_path / "out.jsonl",
        "job.run_dir": tmp_path / "run",
    }
    words = [f"{key}={value}" for key, value in keys.items()]
    ranks.run_forked([ranks.REPOSITORY / "launch.py", *words], 2, timeout_s=240).checked()
    answers = [
        json.loads(line)["outputs"][0]["token_ids"] for line in (tmp_path / "out.jsonl").read_text().splitlines()
    ]
    model = reference()
    assert answers == [greedy_without_cache(model, prompt, NUM_TOKENS) for prompt in PROMPTS]
    # Negative control: rows differ, so an answer of another row would be seen.
    assert len({str(answer) for answer in answers}) > 1


NUM_ROWS, NUM_DONE = 12, 5
IN_MATRIX = "glm4_moe"
"""Experts, partial ropes, norms of heads. The others run in the stress tier."""


def job(folder: Path, name: str, output: str) -> list[str]:
    """Drawn rows of several lengths, with the log-probabilities of what was drawn: so hot that no token is sure."""
    rows = [
        {"prompt_token_ids": [token % 96 for token in random_prompt(3 + 4 * index, seed=index)], "logprobs": 2}
        for index in range(NUM_ROWS)
    ]
    (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    keys = {
        "model.path": expert_folder(name) if name in EXPERT_CASES else family_folder(name),
        "model.dtype": "float32",
        "device": "cpu",
        "model.max_model_len": 96,
        "cache.num_blocks": 64,
        "job.commit_rows": 1,
        "scheduler.max_num_seqs": 3,
        "scheduler.max_num_batched_tokens": 24,
        "sampling.max_tokens": 6,
        "sampling.temperature": 8.0,
        "sampling.ignore_eos": "true",
        "job.input": folder / "rows.jsonl",
        "job.output": folder / output,
    }
    return [f"{key}={value}" for key, value in keys.items()]


def run_here(words: list[str]) -> None:
    run_job(compose_run(ranks.REPOSITORY / "conf", words), RankEnvironment())


@pytest.mark.stress
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.matrix if name == IN_MATRIX else pytest.mark.stress)
        for name in (*ALL_CASES, *EXPERT_CASES)
    ],
)
def test_two_replicas_and_resumed_job_write_equal_bytes(name: str, tmp_path: Path):
    run_here(job(tmp_path, name, "whole.jsonl"))
    whole = (tmp_path / "whole.jsonl").read_bytes()
    assert whole.count(b"\n") == NUM_ROWS
    assert b"error" not in whole.replace(b'"error": null', b"")
    words = [*job(tmp_path, name, "replicas.jsonl"), "parallel.data_parallel_size=2"]
    ranks.run_forked([ranks.REPOSITORY / "launch.py", *words], 2, timeout_s=240).checked()
    assert (tmp_path / "replicas.jsonl").read_bytes() == whole
    words = job(tmp_path, name, "resumed.jsonl")
    with pytest.MonkeyPatch.context() as monkeypatch:
        end_after(monkeypatch, NUM_DONE)
        with pytest.raises(Ended):
            run_here(words)
    run_here(words)
    assert (tmp_path / "resumed.jsonl").read_bytes() == whole
    metrics = json.loads((tmp_path / "resumed.jsonl.run" / "metrics.json").read_text())
    assert NUM_DONE <= metrics["resumed_rows"] < NUM_ROWS
    # Negative control: another seed draws another job.
    run_here([*job(tmp_path, name, "other.jsonl"), "seed=1"])
    assert (tmp_path / "other.jsonl").read_bytes() != whole
