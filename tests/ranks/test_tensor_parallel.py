"""Tensor-parallel ranks give one rank's answers, every rank has them all, and unlike ranks are told.

Each launch does many things, because starting ranks takes seconds. Every rank has another PYTHONHASHSEED.
"""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import ranks
from plain_outputs import without_times
from reference_models import (
    CHECKPOINTS,
    VOCAB_SIZE,
    checkpoint_folder,
    mixed_prompts,
    random_prompt,
    write_checkpoint,
)

from spmd_worker import LLM, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, logprobs=2, prompt_logprobs=1)
PLAIN_GREEDY = replace(GREEDY, logprobs=None, prompt_logprobs=None)
KINDS = [
    GREEDY,
    PLAIN_GREEDY,
    replace(PLAIN_GREEDY, temperature=1.0),
    replace(GREEDY, temperature=0.8, seed=7),
    replace(PLAIN_GREEDY, temperature=1.0, top_p=0.8),
    replace(GREEDY, temperature=1.1, top_k=20, min_p=0.01, n=3),
    replace(PLAIN_GREEDY, temperature=0.9, repetition_penalty=1.3, logit_bias={20: 2.0}),
    replace(PLAIN_GREEDY, n=2, temperature=1.0),
]
PROMPTS = [*mixed_prompts(len(KINDS), 60, seed=9), random_prompt(300, 0), [VOCAB_SIZE]]
PARAMS = [*KINDS, GREEDY, GREEDY]
SETTINGS = {"num_blocks": 100, "max_model_len": 190, "max_num_batched_tokens": 64, "max_num_seqs": 16}

ANSWERS = """
import json, os, sys
from plain_outputs import without_times
from pathlib import Path
import torch.distributed as dist
from spmd_worker import LLM, SamplingParams

job, out = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
params = [SamplingParams(**each) for each in job["params"]]
answers = {"hash": hash("probe")}
for name, folder in job["folders"].items():
    with LLM(folder, tensor_parallel_size=job["size"], **job["settings"]) as llm:
        outputs = llm.generate(job["prompts"], params, on_error="row", use_tqdm=False)
        used = llm.llm_engine.scheduler.cache.num_used_blocks
    plain = [without_times(each) for each in outputs]
    answers[name] = {"outputs": plain, "used": used, "groups": dist.is_initialized()}
(out / f"{os.environ['RANK']}.json").write_text(json.dumps(answers))
"""


NODES = """
import os
from spmd_worker.ranks import shared_memory
shared_memory.node_name = lambda: f"node {os.environ['RANK']}"
shared_memory.SharedMemoryGroup = None
"""
"""Each rank is on a node of its own, and would fail if it shared memory."""


def answers_of_ranks(names: list[str], size: int, tmp_path: Path, before: str = "") -> list[dict[str, Any]]:
    """Answers of every rank for every checkpoint, in rank order. `before`: what they do first."""
    job = {
        "folders": {name: str(checkpoint_folder(name)) for name in names},
        "prompts": PROMPTS,
        "params": [asdict(each) for each in PARAMS],
        "settings": SETTINGS,
        "size": size,
    }
    return ranks.reports_of_job(before + ANSWERS, size, tmp_path, job, hash_seeds=True)


def check_same(ours: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    """Tokens, errors and ends are equal; log-probabilities to 1e-4."""
    assert len(ours) == len(expected)
    for mine, reference in zip(ours, expected, strict=True):
        assert mine["error"] == reference["error"]
        for key in ("token_ids", "finish_reason"):
            assert [each[key] for each in mine["outputs"]] == [each[key] for each in reference["outputs"]]
        for a, b in zip(logprobs_of(mine), logprobs_of(reference), strict=True):
            assert a == pytest.approx(b, abs=1e-4)


def logprobs_of(output: dict[str, Any]) -> list[float]:
    """Of chosen and prompt tokens: which are the likeliest may be decided by rounding."""
    entries = [entry for entry in output["prompt_logprobs"] or [] if entry is not None]
    entries += [entry for each in output["outputs"] for entry in each["logprobs"] or []]
    return [next(iter(entry.values()))[0] for entry in entries]


def one_rank(name: str) -> list[dict[str, Any]]:
    """As the ranks write it: records as mappings, token ids as strings where they are keys."""
    with LLM(checkpoint_folder(name), **SETTINGS) as llm:
        outputs = llm.generate(PROMPTS, PARAMS, on_error="row", use_tqdm=False)
    return json.loads(json.dumps([without_times(output) for output in outputs]))


def check_size(names: list[str], size: int, tmp_path: Path, before: str = "") -> None:
    by_rank = answers_of_ranks(names, size, tmp_path, before)
    assert len({answers.pop("hash") for answers in by_rank}) == 2, "the hash seeds took effect"
    for answers in by_rank[1:]:
        assert answers == by_rank[0], "every rank has every output"
    for name in names:
        answer = by_rank[0][name]
        assert answer["used"] == 0
        assert not answer["groups"], "closing leaves no group behind"
        check_same(answer["outputs"], one_rank(name))
        refused = [index for index, output in enumerate(answer["outputs"]) if output["error"]]
        assert refused == [len(PROMPTS) - 2, len(PROMPTS) - 1], "the over-long prompt and the unknown token alone"


@pytest.mark.guarantee("Tensor parallelism: one rank's answers")
@pytest.mark.parametrize(
    "names",
    [
        ["llama_biased", "qwen3_biased_window"],
        pytest.param(["llama3", "mistral", "qwen2_tied", "dynamic"], marks=pytest.mark.stress),
    ],
    ids=" ".join,
)
def test_two_ranks_match_one_rank(tmp_path: Path, names: list[str]):
    check_size(names, 2, tmp_path)


@pytest.mark.guarantee("Two nodes answer as one rank")
def test_ranks_that_share_no_memory_match_one_rank(tmp_path: Path):
    """Real nodes, with their own networks, are in the stress tier: test_two_nodes.py."""
    check_size(["llama3"], 2, tmp_path, NODES)


@pytest.mark.stress
@pytest.mark.parametrize(
    "names",
    [
        pytest.param(["llama_tied", "qwen3"], marks=pytest.mark.matrix),
        pytest.param(["llama3", "qwen2"], marks=pytest.mark.stress),
    ],
    ids=" ".join,
)
def test_four_ranks_sharing_kv_heads_match_one_rank(tmp_path: Path, names: list[str]):
    """The model has two key-value heads."""
    check_size(names, 4, tmp_path)


@pytest.mark.stress
@pytest.mark.matrix
def test_three_ranks_of_nine_heads_match_one_rank(tmp_path: Path):
    check_size(["llama_nine_heads"], 3, tmp_path)


@pytest.mark.stress
@pytest.mark.control("Tensor parallelism: one rank's answers")
def test_rank_comparison_detects_another_token_and_logprob(control):
    outputs = one_rank("llama3")
    check_same(outputs, one_rank("llama3"))
    other = one_rank("llama3")
    other[3]["outputs"][0]["token_ids"][5] += 1
    with control():
        check_same(outputs, other)
    other = one_rank("llama3")
    next(iter(other[0]["outputs"][0]["logprobs"][2].values()))[0] += 1e-3
    with control():
        check_same(outputs, other)


UNLIKE = """
import json, os, sys
from pathlib import Path
from spmd_worker import LLM, SamplingParams

job, rank = json.loads(Path(sys.argv[1]).read_text()), int(os.environ["RANK"])
greedy = SamplingParams(temperature=0, max_tokens=8)
prompts, found = job["prompts"], {}

def attempt(name, action):
    try:
        result = action()
    except Exception as error:
        result = f"{type(error).__name__}: {error}"
    found[name] = result

def answers(llm, prompts, params=greedy):
    return [each.outputs[0].token_ids for each in llm.generate(prompts, params, use_tqdm=False)]

def start(folder="llama3", **settings):
    with LLM(job["folders"][folder], tensor_parallel_size=2, **{**job["settings"], **settings}) as llm:
        return answers(llm, prompts)

with LLM(job["folders"]["llama3"], tensor_parallel_size=2, **job["settings"]) as llm:
    attempt("equal", lambda: answers(llm, prompts))
    attempt("other prompt", lambda: answers(llm, prompts[:3] + [prompts[3] + [20 + rank]] + prompts[4:]))
    attempt("other order", lambda: answers(llm, prompts[::-1] if rank else prompts))
    attempt("other number", lambda: answers(llm, prompts[: 5 - rank]))
    attempt("other params", lambda: answers(llm, prompts, SamplingParams(temperature=0, max_tokens=8 + rank)))
    attempt("equal again", lambda: answers(llm, prompts))
attempt("other seed", lambda: start(seed=rank))
attempt("other length", lambda: start(max_model_len=100 + rank))
attempt("other chunks", lambda: start(max_num_batched_tokens=64 + rank))
attempt("other shape", lambda: start("llama_biased" if rank else "llama3"))
attempt("other weights", lambda: start("other_weights" if rank else "llama3"))
attempt("same weights elsewhere", lambda: start("copy" if rank else "llama3"))
attempt("broken on one", lambda: start("broken" if rank else "llama3"))
attempt("other blocks", lambda: start(num_blocks=100 + rank))
attempt("equal at last", start)
Path(sys.argv[2], f"{rank}.json").write_text(json.dumps(found))
"""


def unlike_folders(tmp_path: Path) -> dict[str, str]:
    folders = {name: checkpoint_folder(name) for name in ("llama3", "llama_biased")}
    folders["other_weights"] = write_checkpoint(tmp_path / "other_weights", CHECKPOINTS["llama3"], seed=1)
    folders["copy"] = write_checkpoint(tmp_path / "copy", CHECKPOINTS["llama3"])
    folders["broken"] = write_checkpoint(tmp_path / "broken", CHECKPOINTS["llama3"])
    weights = folders["broken"] / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    return {name: str(folder) for name, folder in folders.items()}


@pytest.mark.guarantee("Ranks that began with other settings, weights, prompts are told")
def test_unlike_ranks_are_reported_on_every_rank(tmp_path: Path):
    prompts = [random_prompt(length, 1) for length in (5, 20, 40, 3, 11)]
    job = {"folders": unlike_folders(tmp_path), "prompts": prompts, "settings": SETTINGS}
    first, second = ranks.reports_of_job(UNLIKE, 2, tmp_path, job, hash_seeds=True)
    expected = {
        "other prompt": ["RanksDisagreeError", "prompts[3]", "prompt_token_ids[3] is 20 on rank 0, 21 on rank 1"],
        "other order": ["RanksDisagreeError", "prompts[0]"],
        "other number": ["RanksDisagreeError", "5 on rank 0, 4 on rank 1"],
        "other params": ["RanksDisagreeError", "sampling.max_tokens is 8 on rank 0, 9 on rank 1"],
        "other seed": ["RanksDisagreeError", "seed is 0 on rank 0, 1 on rank 1"],
        "other length": ["RanksDisagreeError", "model.max_model_len is 100 on rank 0, 101 on rank 1"],
        "other chunks": ["RanksDisagreeError", "max_num_batched_tokens is 64 on rank 0, 65 on rank 1"],
        "other shape": ["RanksDisagreeError", "on rank 0", "on rank 1"],
        "other weights": ["RanksDisagreeError", "weights", "on rank 0", "on rank 1"],
        "broken on one": ["RankFailedError", "rank 1", "CheckpointError"],
        "other blocks": ["RanksDisagreeError", "num_blocks is 100 on rank 0, 101 on rank 1"],
    }
    for name, words in expected.items():
        for found in (first, second):
            message = found[name]
            assert isinstance(message, str), (name, message)
            assert all(word in message for word in words), (name, message)
        assert first[name] == second[name], name
    with LLM(checkpoint_folder("llama3"), **SETTINGS) as llm:
        answers = [
            each.outputs[0].token_ids
            for each in llm.generate(prompts, SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)
        ]
    # Negative control: what is alike goes on, after refusals too, and in a second engine of the same processes.
    for name in ("equal", "equal again", "same weights elsewhere", "equal at last"):
        assert first[name] == second[name] == answers, (name, first[name])
