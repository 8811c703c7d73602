"""Greedy tokens of the engine equal those of transformers' `generate` in any schedule.

64 tokens for 32 prompts of 1 to 100 tokens: together and alone, whole and in chunks, with a cache so small that rows
are preempted and computed again. Other families and scalings: 32 tokens for a few.
"""

from functools import cache
from typing import Any

import pytest
from reference_models import (
    EOS_TOKEN_ID,
    checkpoint_folder,
    mixed_prompts,
    random_prompt,
    reference_greedy,
    reference_greedy_batch,
    reference_logits,
    reference_model,
)

from spmd_worker import LLM, SamplingParams
from spmd_worker.worker.runner import batch as runner_batch

NUM_TOKENS, NUM_OF_FEW = 64, 32
PROMPTS = mixed_prompts(32, 100)
FEW_PROMPTS = [random_prompt(length, seed=3) for length in (1, 7, 16, 33, 60, 90)]
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
FEW = SamplingParams(temperature=0, max_tokens=NUM_OF_FEW, ignore_eos=True)

SCHEDULES: dict[str, dict[str, Any]] = {
    "whole": {"num_blocks": 400},
    "in chunks": {"num_blocks": 400, "max_num_batched_tokens": 24, "max_num_seqs": 24},
    "one token a prompt a step": {"num_blocks": 400, "max_num_batched_tokens": 3, "max_num_seqs": 3},
    "without chunks": {"num_blocks": 400, "enable_chunked_prefill": False},
    "preempted": {"num_blocks": 32},
    "preempted in chunks": {"num_blocks": 64, "block_size": 8, "max_num_batched_tokens": 32, "max_num_seqs": 32},
}


@cache
def expected(name: str) -> list[list[int]]:
    return reference_greedy_batch(reference_model(name), PROMPTS, NUM_TOKENS)


@cache
def expected_of_few(name: str) -> list[list[int]]:
    """One prompt at a time, because dynamic scaling in transformers depends on the longest of a batch."""
    return [reference_greedy(reference_model(name), prompt, NUM_OF_FEW) for prompt in FEW_PROMPTS]


def generate(llm: LLM, prompts: list[list[int]], sampling: SamplingParams = GREEDY) -> list[list[int]]:
    outputs = llm.generate(prompts, sampling, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


def check_same(name: str, prompts: list[list[int]], ours: list[list[int]], theirs: list[list[int]]) -> None:
    """A failure reports whether the top two tokens were about equally likely, so that rounding decides."""
    for prompt, mine, reference in zip(prompts, ours, theirs, strict=True):
        if mine != reference:
            place = next(index for index, (a, b) in enumerate(zip(mine, reference, strict=True)) if a != b)
            logits = reference_logits(reference_model(name), [*prompt, *reference[:place]])[-1]
            first, second = logits.topk(2).values.tolist()
            pytest.fail(f"{name}: token {place} of a prompt of {len(prompt)}: margin {first - second:.2g} of {first}")


QUICK = {("llama3", schedule) for schedule in ("whole", "in chunks", "preempted")}
QUICK |= {("qwen2", schedule) for schedule in ("whole", "preempted in chunks")}
# The longest schedule, and those that another model has in an earlier tier.
LONG = {(name, "one token a prompt a step") for name in ("llama3", "qwen2", "qwen3")}
LONG |= {("qwen2", schedule) for schedule in ("in chunks", "without chunks", "preempted")}
LONG |= {("qwen3", schedule) for schedule in SCHEDULES}


def tier(case: tuple[str, str]) -> list[pytest.MarkDecorator]:
    return [] if case in QUICK else [pytest.mark.stress if case in LONG else pytest.mark.matrix]


@pytest.mark.gate("llama3-preempted in chunks", "qwen2-whole")
@pytest.mark.parametrize(
    ("name", "schedule"),
    [
        pytest.param(name, schedule, marks=tier((name, schedule)))
        for name in ("llama3", "qwen2", "qwen3")
        for schedule in SCHEDULES
    ],
)
def test_greedy_tokens_of_32_prompts_are_transformers(name: str, schedule: str):
    settings = {"max_model_len": 200, **SCHEDULES[schedule]}
    with LLM(checkpoint_folder(name), **settings) as llm:
        check_same(name, PROMPTS, generate(llm, PROMPTS), expected(name))
        counters = llm.llm_engine.counters
        assert (counters.num_preemptions > 0) == schedule.startswith("preempted"), counters
        assert llm.llm_engine.scheduler.cache.num_used_blocks == 0


@pytest.mark.stress
def test_greedy_tokens_of_prompts_alone_are_transformers():
    with LLM(checkpoint_folder("llama3"), num_blocks=400) as llm:
        alone = [generate(llm, [prompt])[0] for prompt in PROMPTS[::3]]
    check_same("llama3", PROMPTS[::3], alone, expected("llama3")[::3])


WINDOWED_OR_STATEFUL = ["dynamic", "mistral", "qwen2_window", "qwen3"]
ONE_OF_EACH = ["dynamic", "qwen2_window"]
OTHERS = [*WINDOWED_OR_STATEFUL, "yarn", "llama_tied", "llama_biased", "llama_nine_heads", "qwen3_biased_window"]


@pytest.mark.gate("qwen2_window-preempted in chunks", "dynamic-preempted in chunks")
@pytest.mark.parametrize(
    ("name", "schedule"),
    [
        *(
            # Their logits, after every token of a prompt, test_against_transformers compares.
            pytest.param(name, "whole", marks=[] if name in ONE_OF_EACH else pytest.mark.stress)
            for name in OTHERS
        ),
        *(
            pytest.param(name, "preempted in chunks", marks=[] if name in ONE_OF_EACH else pytest.mark.matrix)
            for name in WINDOWED_OR_STATEFUL
        ),
    ],
)
def test_greedy_tokens_of_other_families_equal_transformers(name: str, schedule: str):
    # 122 tokens are the longest row, 19 blocks of 8 hold one and a bit.
    settings = SCHEDULES[schedule] | ({} if schedule == "whole" else {"num_blocks": 19, "window_groups": False})
    with LLM(checkpoint_folder(name), max_model_len=128, **settings) as llm:
        check_same(name, FEW_PROMPTS, generate(llm, FEW_PROMPTS, FEW), expected_of_few(name))
        assert (llm.llm_engine.counters.num_preemptions > 0) == (schedule != "whole")


def test_rows_end_where_transformers_ends_them():
    """Two that end early and four that do not."""
    sampling, name = SamplingParams(temperature=0, max_tokens=NUM_TOKENS), "llama3"
    ending = [prompt for prompt, tokens in zip(PROMPTS, expected(name), strict=True) if EOS_TOKEN_ID in tokens[:-1]]
    prompts = ending[:2] + [prompt for prompt in PROMPTS if prompt not in ending][:4]
    with LLM(checkpoint_folder(name), num_blocks=400) as llm:
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
    theirs = [reference_greedy(reference_model(name), prompt, NUM_TOKENS, stops=True) for prompt in prompts]
    assert [output.outputs[0].token_ids for output in outputs] == theirs
    reasons = ["stop" if tokens[-1] == EOS_TOKEN_ID else "length" for tokens in theirs]
    assert [output.outputs[0].finish_reason for output in outputs] == reasons == ["stop"] * 2 + ["length"] * 4


@pytest.mark.stress
def test_comparison_detects_wrongly_resumed_row(monkeypatch: pytest.MonkeyPatch):
    """Negative control: positions that start at 0 for every chunk are right until a prompt is cut."""
    positions = runner_batch._positions
    monkeypatch.setattr(
        runner_batch, "_positions", lambda firsts, counts, total: positions([0] * len(firsts), counts, total)
    )
    with LLM(checkpoint_folder("llama3"), max_model_len=200, **SCHEDULES["preempted in chunks"]) as llm:
        assert generate(llm, PROMPTS) != expected("llama3")


def test_comparison_detects_rows_that_share_a_block(monkeypatch: pytest.MonkeyPatch):
    """Negative control: a cache whose block 0 is block 1 too."""
    tables = runner_batch._block_tables
    monkeypatch.setattr(runner_batch, "_block_tables", lambda given: tables([[b - (b == 1) for b in t] for t in given]))
    with LLM(checkpoint_folder("llama3"), num_blocks=400) as llm:
        assert generate(llm, PROMPTS) != expected("llama3")
