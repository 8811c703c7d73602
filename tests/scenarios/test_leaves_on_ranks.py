"""Processes on 1, 2, 4 and 8 ranks: tokens and log-probabilities have the same bits, whatever else happens to the rows.

Greedy and drawn rows, samples, prompts' log-probabilities (all of the vocabulary), chunks, preemption, prefix hits;
and layouts beside it. Prints how many log-probabilities were compared.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import ranks
from leaf_models import CASES, leaf_folder
from leaf_runs import SETTINGS, Answers, on_ranks, prompts

from spmd_worker import LLM
from spmd_worker.model_config.model_config import read_model_files
from spmd_worker.ranks.leaves import num_leaves

DTYPES = ("float32", "bfloat16")
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "a step ahead": (2, {"tensor_parallel_size": 2, "async_scheduling": True}),
    "swapped": (2, {"tensor_parallel_size": 2, "preemption_mode": "swap", "swap_space": 0.1}),
    "no prefix cache": (2, {"tensor_parallel_size": 2, "enable_prefix_caching": False}),
    "all in one step": (2, {"tensor_parallel_size": 2, "num_blocks": 400, "max_num_batched_tokens": 1024}),
    "chunks of 7": (4, {"tensor_parallel_size": 4, "max_num_batched_tokens": 7, "max_num_seqs": 7}),
    "replicas": (4, {"tensor_parallel_size": 2, "data_parallel_size": 2}),
    "stages": (4, {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}),
    "over gloo": (4, {"tensor_parallel_size": 4, "over_gloo": True}),
}
EXPERT_LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "1 with experts": (1, {"enable_expert_parallel": True}),
    "2 with experts": (2, {"tensor_parallel_size": 2, "enable_expert_parallel": True}),
    "4 with experts": (4, {"tensor_parallel_size": 4, "enable_expert_parallel": True}),
    "4 with experts in turns": (
        4,
        {"tensor_parallel_size": 4, "enable_expert_parallel": True, "expert_placement": "round_robin"},
    ),
}
SEVERAL = ("llama_biases", "gemma3", "qwen2_moe", "falcon_h1", "qwen3_next")
ON_EIGHT = ("llama_tied", "granite", "qwen3_moe", "deepseek_v3", "nemotron_h")

SAMPLED = """
import json, os, sys
from pathlib import Path
from leaf_runs import SETTINGS, prompts
from spmd_worker import LLM, SamplingParams

folder, out, size = sys.argv[1:4]
kinds = [{"temperature": 1.0}, {"temperature": 0}, {"temperature": 0.7, "top_p": 0.9}]
params = [SamplingParams(max_tokens=20, ignore_eos=True, logprobs=0, **kinds[row % 3]) for row in range(10)]
found = {}
for dtype in sys.argv[4:]:
    with LLM(folder, tensor_parallel_size=int(size), dtype=dtype, **SETTINGS) as llm:
        samples = [each.outputs[0] for each in llm.generate(prompts(331), params, use_tqdm=False)]
        assert llm.llm_engine.counters.num_preemptions > 0
    found[dtype] = [
        [each.token_ids, [step[token].logprob for token, step in zip(each.token_ids, each.logprobs)]]
        for each in samples
    ]
Path(out, os.environ["RANK"]).write_text(json.dumps(found))
"""


def compare(name: str, tmp_path: Path, sizes: tuple[int, ...], *, has_all: bool) -> None:
    """Both dtypes, on as many ranks as the leaves allow."""
    folder, found, total = leaf_folder(name), list[str](), 0
    count = num_leaves(read_model_files(folder).model_config, 8)
    runs = {dtype: {"dtype": dtype} for dtype in DTYPES}
    whole = on_ranks(folder, tmp_path / "1", 1, runs, has_all=has_all)
    for size in (each for each in sizes if count % each == 0):
        sized = {dtype: {**each, "tensor_parallel_size": size} for dtype, each in runs.items()}
        parts = on_ranks(folder, tmp_path / str(size), size, sized, has_all=has_all)
        found += _differences(whole, parts, size)
        total += sum(each.logprobs.size for each in parts.values())
    print(f"LOGPROBS COMPARED {name} {total}")
    assert not found, found


def _differences(whole: dict[str, Answers], parts: dict[str, Answers], size: int) -> list[str]:
    return [
        f"{size} ranks, {name}: {whole[name].difference(each)}" for name, each in parts.items() if whole[name] != each
    ]


@pytest.mark.stress
@pytest.mark.guarantee("The same bits on 1, 2, 4, 8 tensor-parallel ranks")
@pytest.mark.parametrize("name", CASES)
def test_answers_have_same_bits_on_ranks(name: str, tmp_path: Path):
    compare(name, tmp_path, (2, 4), has_all=True)


@pytest.mark.stress
@pytest.mark.parametrize("name", ON_EIGHT)
def test_answers_have_same_bits_on_eight(name: str, tmp_path: Path):
    compare(name, tmp_path, (8,), has_all=False)


@pytest.mark.stress
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SEVERAL)
def test_answers_are_independent_of_layout(name: str, dtype: str, tmp_path: Path):
    folder = leaf_folder(name)
    (plain,) = on_ranks(folder, tmp_path / "plain", 1, {"plain": {"dtype": dtype}}).values()
    layouts = {**LAYOUTS, **(EXPERT_LAYOUTS if "moe" in name or "next" in name else {})}
    found = []
    for size in (1, 2, 4):
        runs = {each: {"dtype": dtype, **settings} for each, (num, settings) in layouts.items() if num == size}
        if runs:
            parts = on_ranks(folder, tmp_path / str(size), size, runs)
            found += [f"{each}: {plain.difference(answers)}" for each, answers in parts.items() if plain != answers]
    assert not found, found


@pytest.mark.guarantee("score_tokens gives the bits that were reported")
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.stress)])
def test_one_rank_scores_what_ranks_sampled(size: int, tmp_path: Path):
    """A trainer's rank gives the bits that the engine's ranks reported."""
    folder = leaf_folder("granite")
    ranks.run_ranks(SAMPLED, size, 240, [folder, tmp_path, str(size), *DTYPES]).checked()
    sampled, *others = (json.loads((tmp_path / str(rank)).read_text()) for rank in range(size))
    assert all(each == sampled for each in others)
    for dtype in DTYPES:
        with LLM(folder, dtype=dtype, **SETTINGS) as llm:
            scored = llm.score_tokens(prompts(331), [ids for ids, _ in sampled[dtype]])
        assert scored == [reported for _, reported in sampled[dtype]]
