"""Drafts by models change no bit of an answer, and the draft that is the target itself is always right."""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import ranks
from draft_checkpoints import EAGLE_TARGET, eagle_folder, mtp_folder, small_draft_folder
from plain_outputs import without_times
from reference_models import checkpoint_folder, mixed_prompts

from spmd_worker import LLM, SamplingParams
from spmd_worker.replica.scheduler.counters import SchedulerCounters

GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
KINDS = [
    GREEDY,
    replace(GREEDY, temperature=0.8, seed=1, logprobs=1),
    replace(GREEDY, temperature=0.7, top_p=0.9, seed=2),
    replace(GREEDY, repetition_penalty=1.3, min_tokens=4, ignore_eos=False),
    replace(GREEDY, temperature=1.0, n=2, seed=3),
]
PROMPTS = [[token_id % 86 + 5 for token_id in prompt] for prompt in mixed_prompts(6, 40, seed=3)]
PARAMS = [KINDS[index % len(KINDS)] for index in range(len(PROMPTS))]
NUM_DRAFTS = 3

Answers = list[dict[str, Any]]


def speculation(method: str) -> dict[str, Any]:
    models = {"draft_model": small_draft_folder, "eagle3": eagle_folder, "mtp": None}
    model = models[method]
    given = {} if model is None else {"model": str(model())}
    return {"method": method, "num_speculative_tokens": NUM_DRAFTS, "max_step_tokens": 64, **given}


def target_of(method: str) -> Path:
    return mtp_folder() if method == "mtp" else checkpoint_folder(EAGLE_TARGET)


def answers(
    folder: Path, speculative_config: dict[str, Any] | None = None, **settings: Any
) -> tuple[Answers, SchedulerCounters]:
    given = {} if speculative_config is None else {"speculative_config": speculative_config}
    settings = {"num_blocks": 200, **given, **settings}
    with LLM(str(folder), dtype="float32", max_model_len=128, **settings) as llm:
        outputs = llm.generate([{"prompt_token_ids": each} for each in PROMPTS], PARAMS, use_tqdm=False)
        return [without_times(each) for each in outputs], llm.llm_engine.counters


@cache
def plain_answers(folder: Path) -> Answers:
    return answers(folder)[0]


@pytest.mark.parametrize("method", ["draft_model", "mtp", "eagle3"])
@pytest.mark.parametrize(
    "settings",
    [{}, {"num_blocks": 9, "max_num_batched_tokens": 48, "preemption_mode": "recompute"}],
    ids=["plenty", "preempted in chunks"],
)
def test_drafts_change_no_bit(method: str, settings: dict[str, Any]):
    folder = target_of(method)
    found, counters = answers(folder, speculation(method), **settings)
    assert found == plain_answers(folder)
    assert counters.num_drafted_tokens > 20, counters
    assert bool(counters.num_preemptions) == bool(settings), counters


def test_draft_equal_to_its_target_is_always_accepted():
    folder = checkpoint_folder(EAGLE_TARGET)
    config = {**speculation("draft_model"), "model": str(folder)}
    with LLM(str(folder), dtype="float32", max_model_len=128, speculative_config=config) as llm:
        prompts = [{"prompt_token_ids": each} for each in PROMPTS[:3]]
        for _ in range(2):
            # The second time the prompts are found in the cache, but not the keys of the draft.
            llm.generate(prompts, GREEDY, use_tqdm=False)
        counters = llm.llm_engine.counters
    assert counters.num_drafted_tokens == counters.num_accepted_tokens > 60, counters
