"""Masks, beams and outputs as they come, under every layout: what one process gives."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
import ranks
from reference_models import checkpoint_folder, mixed_prompts

from spmd_worker import LLM

LAYOUTS = {
    "tensor parallel": {"tensor_parallel_size": 2},
    "pipeline parallel": {"pipeline_parallel_size": 2},
    "data parallel": {"data_parallel_size": 2},
}

CALLS = """
from spmd_worker import BeamSearchParams, LLMEngine, RequestOutputKind, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


def calls(llm, prompts):
    ids = lambda outputs: [[each.token_ids for each in output.outputs] for output in outputs]
    plain = ids(llm.generate(prompts, GREEDY, use_tqdm=False))
    params = GREEDY.clone()
    params.bad_words_ids = [each[0][:2] for each in plain] + [[each[0][2]] for each in plain]
    yield "bad words", ids(llm.generate(prompts, params, use_tqdm=False)), plain
    params = SamplingParams(n=2, seed=3, max_tokens=8, ignore_eos=True, allowed_token_ids=[0, 100, 105, 106, 210])
    yield "allowed", ids(llm.generate(prompts, params, use_tqdm=False)), plain
    rules = {"first_tokens": [3, 90, 180], "forced_tokens": [7], "suppress_tokens": [4, 5], "no_repeat_ngram_size": 2,
             "timestamps": {"first_token_id": 130, "end_token_id": 60, "max_initial_index": 30}}
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, token_rules=rules)
    yield "rules", ids(llm.generate(prompts, params, use_tqdm=False)), plain
    params = SamplingParams(temperature=0, max_tokens=2, logprobs=-1, truncate_prompt_tokens=5)
    found = llm.generate(prompts, params, use_tqdm=False)
    yield "all log-probabilities", [[len(each) for each in output.outputs[0].logprobs] for output in found], plain
    beams = llm.beam_search(prompts, BeamSearchParams(beam_width=3, max_tokens=5, ignore_eos=True))
    yield "beams", [[each.tokens for each in output.sequences] for output in beams], plain
    beams = llm.beam_search(prompts, BeamSearchParams(beam_width=3, max_tokens=4, ignore_eos=True, token_rules=rules))
    yield "beams with rules", [[each.tokens for each in output.sequences] for output in beams], plain
    if llm.llm_engine.config.parallel.data_parallel_size > 1:
        return
    engine = llm.llm_engine
    assert isinstance(engine, LLMEngine)
    for index, prompt in enumerate(prompts):
        engine.add_request(f"request {index}", prompt, SamplingParams(
            temperature=0, max_tokens=8, ignore_eos=True, output_kind=RequestOutputKind.DELTA))
    joined = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            joined.setdefault(output.request_id, []).extend(output.outputs[0].token_ids)
    assert [[joined[f"request {index}"]] for index in range(len(prompts))] == plain
"""

SCRIPT = (
    CALLS
    + """
import json, os, sys
from pathlib import Path
from spmd_worker import LLM

with LLM(sys.argv[1], num_blocks=100, device="cpu", **json.loads(sys.argv[2])) as llm:
    prompts = json.loads(sys.argv[3])
    report = {name: found for name, found, _ in calls(llm, prompts)}
    if llm.llm_engine.config.parallel.data_parallel_size == 1:
        # Rank 1 alone, as often as it likes.
        with llm.turns():
            for prompt in prompts if os.environ["RANK"] == "1" else []:
                (beams,) = llm.beam_search([prompt], BeamSearchParams(beam_width=3, max_tokens=5, ignore_eos=True))
                assert [each.tokens for each in beams.sequences] == report["beams"][prompts.index(prompt)]
Path(sys.argv[4], f"{os.environ['RANK']}.json").write_text(json.dumps(report))
"""
)

PROMPTS = mixed_prompts(4, 30, seed=9)


@pytest.fixture(scope="module")
def expected() -> Iterator[dict[str, Any]]:
    scope: dict[str, Any] = {}
    exec(CALLS, scope)
    with LLM(checkpoint_folder("llama3"), num_blocks=100, device="cpu") as llm:
        found = list(scope["calls"](llm, PROMPTS))
    # Negative control: each of them differs from the plain answer.
    assert all(each != plain for _, each, plain in found)
    return {name: each for name, each, _ in found}


@pytest.mark.gate("tensor parallel")
@pytest.mark.parametrize(
    "layout", [pytest.param(each, marks=[] if each == "tensor parallel" else pytest.mark.matrix) for each in LAYOUTS]
)
def test_ranks_match_one_process(layout: str, expected: dict[str, Any], tmp_path_factory: Any):
    folder = tmp_path_factory.mktemp("names")
    arguments = [checkpoint_folder("llama3"), json.dumps(LAYOUTS[layout]), json.dumps(PROMPTS), folder]
    ranks.run_ranks(SCRIPT, 2, timeout_s=240, arguments=arguments).checked()
    for rank in range(2):
        assert json.loads((folder / f"{rank}.json").read_text()) == expected
