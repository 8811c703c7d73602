"""Stages of a pipeline give one rank's answers bit for bit, even or uneven, tied or not."""

import json
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import ranks
from plain_outputs import without_times
from reference_models import checkpoint_folder, mixed_prompts

from spmd_worker import LLM, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, logprobs=2, prompt_logprobs=1)
KINDS = [
    GREEDY,
    replace(GREEDY, logprobs=None, prompt_logprobs=None, temperature=1.0, n=3),
    replace(GREEDY, temperature=0.8, top_p=0.9, seed=7, n=2, best_of=3, prompt_logprobs=None),
]
PROMPTS = mixed_prompts(6, 60, seed=9)
PARAMS = [KINDS[index % len(KINDS)] for index in range(len(PROMPTS))]
SETTINGS = {
    "num_blocks": 14,
    "max_model_len": 190,
    "max_num_batched_tokens": 64,
    "max_num_seqs": 16,
    "swap_space": 0.01,
    "preemption_mode": "swap",
}

SCRIPT = """
import json, os, sys
from plain_outputs import without_times
from pathlib import Path
from spmd_worker import LLM, SamplingParams

job, out = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
params = [SamplingParams(**each) for each in job["params"]]
answers = {}
for name, folder in job["folders"].items():
    with LLM(folder, **job["layout"], **job["settings"]) as llm:
        outputs = llm.generate(job["prompts"], params, use_tqdm=False)
        layers = llm.collective_rpc(lambda worker: [worker.get_model().stage.start, worker.get_model().stage.stop])[0]
        preemptions = llm.llm_engine.counters.num_preemptions
    answers[name] = {"outputs": [without_times(each) for each in outputs], "layers": layers, "preemptions": preemptions}
(out / f"{os.environ['RANK']}.json").write_text(json.dumps(answers))
"""


SHARING = "from spmd_worker.ranks import shared_memory\nshared_memory._FEW_ELEMENTS = 1\n"
"""Ranks share out the rows of every sum with its norm, as they do where there are many."""

UNGATHERED = "shared_memory.SharedMemoryGroup.gather_rows = lambda self, residual: residual\n"


def run(layout: dict[str, Any], size: int, names: list[str], tmp_path: Path, before: str = "") -> list[dict[str, Any]]:
    job = {
        "folders": {name: str(checkpoint_folder(name)) for name in names},
        "prompts": PROMPTS,
        "params": [asdict(each) for each in PARAMS],
        "settings": SETTINGS,
        "layout": layout,
    }
    return ranks.reports_of_job(before + SCRIPT, size, tmp_path, job, env={"SPMD_WORKER_CHECK": "1"})


@cache
def one_rank(name: str) -> list[dict[str, Any]]:
    with LLM(checkpoint_folder(name), **SETTINGS) as llm:
        outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    return json.loads(json.dumps([without_times(output) for output in outputs]))


def check(by_rank: list[dict[str, Any]], stages: list[list[int]]) -> None:
    for answers, layers in zip(by_rank, stages, strict=True):
        for name, answer in answers.items():
            assert answer["outputs"] == one_rank(name), name
            assert answer["layers"] == layers
            assert answer["preemptions"] > 0, "a crowded cache, so that every stage swaps"


@pytest.mark.guarantee("Stages: one rank's bits")
@pytest.mark.parametrize("names", [["llama3"], pytest.param(["llama_tied", "qwen3"], marks=pytest.mark.stress)])
def test_two_stages_match_one_rank_bit_for_bit(tmp_path: Path, names: list[str]):
    by_rank = run({"pipeline_parallel_size": 2}, 2, names, tmp_path)
    num_layers = by_rank[1][names[0]]["layers"][1]
    cut = by_rank[0][names[0]]["layers"][1]
    check(by_rank, [[0, cut], [cut, num_layers]])


@pytest.mark.stress
def test_uneven_stages_match_one_rank_bit_for_bit(tmp_path: Path):
    """The gate has it of a model that reads images: test_images.py."""
    by_rank = run({"pipeline_parallel_size": 2, "pipeline_layers": [1, 2]}, 2, ["llama_tied"], tmp_path)
    check(by_rank, [[0, 1], [1, 3]])


@pytest.mark.stress
@pytest.mark.matrix
def test_three_stages_match_one_rank_bit_for_bit(tmp_path: Path):
    """Each stage has one layer."""
    by_rank = run({"pipeline_parallel_size": 3}, 3, ["llama_tied"], tmp_path)
    check(by_rank, [[0, 1], [1, 2], [2, 3]])


@pytest.mark.stress
def test_four_stages_match_one_rank_bit_for_bit(tmp_path: Path):
    by_rank = run({"pipeline_parallel_size": 4}, 4, ["llama_four_layers"], tmp_path)
    check(by_rank, [[0, 1], [1, 2], [2, 3], [3, 4]])


@pytest.mark.matrix
@pytest.mark.parametrize(
    "before", [pytest.param("", marks=pytest.mark.stress), SHARING], ids=["few elements", "shared rows"]
)
def test_stages_of_two_ranks_match_one_rank(tmp_path: Path, before: str):
    by_rank = run({"pipeline_parallel_size": 2, "tensor_parallel_size": 2}, 4, ["llama_tied"], tmp_path, before)
    for answers in by_rank:
        assert answers["llama_tied"]["outputs"] == by_rank[0]["llama_tied"]["outputs"]
        for ours, theirs in zip(answers["llama_tied"]["outputs"], one_rank("llama_tied"), strict=True):
            assert [each["token_ids"] for each in ours["outputs"]] == [each["token_ids"] for each in theirs["outputs"]]


@pytest.mark.stress
@pytest.mark.matrix
def test_stage_check_detects_ungathered_shared_rows(tmp_path: Path):
    """Negative control: the residual stream as this rank has it, with the other rank's rows as they were."""
    layout = {"pipeline_parallel_size": 2, "tensor_parallel_size": 2}
    answers = run(layout, 4, ["llama_tied"], tmp_path, SHARING + UNGATHERED)[0]["llama_tied"]["outputs"]
    tokens = [[each["token_ids"] for each in answer["outputs"]] for answer in answers]
    assert tokens != [[each["token_ids"] for each in answer["outputs"]] for answer in one_rank("llama_tied")]


@pytest.mark.stress
@pytest.mark.control("Stages: one rank's bits")
def test_stage_check_detects_lost_hidden_states(tmp_path: Path):
    """Negative control."""
    forgetful = SCRIPT.replace(
        "answers = {}",
        "from spmd_worker.worker.runner.model_runner import ModelRunner\n"
        "receive = ModelRunner._receive\n"
        "def forget(self, *args):\n"
        "    incoming = receive(self, *args).clone()\n"
        "    incoming[:] = 0\n"
        "    return incoming\n"
        "ModelRunner._receive = forget\n"
        "answers = {}",
    )
    job = {
        "folders": {"llama_tied": str(checkpoint_folder("llama_tied"))},
        "prompts": PROMPTS,
        "params": [asdict(each) for each in PARAMS],
        "settings": SETTINGS,
        "layout": {"pipeline_parallel_size": 2},
    }
    first, _ = ranks.reports_of_job(forgetful, 2, tmp_path, job)
    assert first["llama_tied"]["outputs"] != one_rank("llama_tied")
