"""Sampling masks, experts and scores of prompts: one rank's bits on several ranks, and on each of them."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ranks
from numpy.typing import NDArray

from spmd_worker import LLM, RequestOutput, SamplingParams

PROMPTS = [[5, 6, 7], [*range(40, 71)], [9, 8], [11] * 13]
PARAMS = [
    SamplingParams(temperature=0.8, top_p=0.8, n=2, seed=1, max_tokens=6, logprobs=1),
    SamplingParams(temperature=1.0, top_k=20, max_tokens=9, prompt_logprobs=40, prompt_logprob_start=8),
    SamplingParams(temperature=1.0, min_p=0.1, max_tokens=5, prompt_logprob_token_ids=[3, 200, 330]),
    SamplingParams(temperature=0.0, max_tokens=4, logprob_token_ids=[330, 2, 190]),
]
SETTINGS: dict[str, Any] = {
    "load_format": "dummy",
    "device": "cpu",
    "logprobs_mode": "processed_logprobs",
    "block_size": 8,
    "num_blocks": 16,
    "max_model_len": 64,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 16,
    "skip_tokenizer_init": True,
}


def shown(array: NDArray[Any] | None) -> list[Any] | None:
    return None if array is None else [str(array.dtype), list(array.shape), array.tobytes().hex()]


def shown_output(output: RequestOutput) -> list[Any]:
    """All of it, in text of equal bits."""
    scores = output.prompt_scores
    parts = [shown(output.prompt_routed_experts), None if scores is None else shown(scores.top_token_ids)]
    if scores is not None:
        parts += [shown(each) for each in (scores.token_logprobs, scores.candidate_logprobs, scores.top_logprobs)]
    for each in output.outputs:
        assert each.sampling_mask is not None
        assert each.routed_experts is not None
        mask = [shown(each.sampling_mask.token_ids), shown(each.sampling_mask.offsets)]
        assert len(each.sampling_mask) == len(each.token_ids) == len(each.routed_experts) + 1
        parts += [each.token_ids, *mask, shown(each.routed_experts), repr(each.logprobs)]
    return parts


def answers(llm: LLM) -> list[Any]:
    params = [each.clone() for each in PARAMS]
    for each in params:
        each.return_sampling_mask = each.return_routed_experts = each.ignore_eos = True
    return [shown_output(each) for each in llm.generate(PROMPTS, params, use_tqdm=False)]


def main(model: Path, folder: Path, **layout: Any) -> None:
    with LLM(model, **SETTINGS, **layout) as llm:
        (folder / str(llm.llm_engine.engine_channel.rank)).write_text(json.dumps(answers(llm)))


def leaf_model() -> Path:
    # Here, because it brings transformers, which takes ranks seconds.
    from leaf_models import leaf_folder

    return leaf_folder("qwen3_moe")


@pytest.fixture(scope="module")
def expected() -> list[Any]:
    with LLM(leaf_model(), **SETTINGS) as llm:
        return json.loads(json.dumps(answers(llm)))


LAYOUTS = [
    pytest.param({"tensor_parallel_size": 2}, id="tp"),
    pytest.param({"pipeline_parallel_size": 2}, id="pp"),
    pytest.param({"tensor_parallel_size": 2, "enable_expert_parallel": True}, id="ep", marks=pytest.mark.stress),
    pytest.param({"data_parallel_size": 2}, id="dp", marks=pytest.mark.stress),
    pytest.param({"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, id="tp pp", marks=pytest.mark.stress),
]


@pytest.mark.gate("tp")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_trainer_data_have_one_ranks_bits(layout: dict[str, Any], expected: list[Any], tmp_path: Path):
    size = int(np.prod([value for value in layout.values() if value is not True]))
    ranks.run_forked([__file__, json.dumps(layout), leaf_model(), tmp_path], size, timeout_s=240).checked()
    found = [json.loads(path.read_text()) for path in sorted(tmp_path.iterdir())]
    assert len(found) == size
    assert all(each == expected for each in found)


@pytest.mark.stress
def test_worker_processes_give_one_ranks_bits(expected: list[Any]):
    layout = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}
    with LLM(leaf_model(), **SETTINGS, **layout) as llm:
        assert json.loads(json.dumps(answers(llm))) == expected


if __name__ == "__main__":
    main(Path(sys.argv[2]), Path(sys.argv[3]), **json.loads(sys.argv[1]))
