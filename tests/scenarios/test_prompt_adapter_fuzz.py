"""Rows with prompt adapters and several samples, drawn with an engine whose cache holds little more than one sequence:
each row's answers are those that it has alone in a large cache.

TESTS_SEED sets the seed. A failing draw prints its engine and its first differing row.
"""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from stress_seed import SEED

from spmd_worker import LLM, PromptAdapterRequest, SamplingParams
from spmd_worker.worker.runner.prefix_store import PrefixStore

FAMILIES = {
    "llama3": [("prompt", 20), ("p", 16), ("prefix", 20), ("prefix", 5)],
    "gpt2": [("prompt", 5), ("prefix", 5), ("prefix", 16)],
    "gemma2": [("prompt", 20), ("prompt", 3)],
}
NUM_DRAWS = 8
"""Engines of a family."""
NUM_CALLS = 2
MAX_LENGTH = 72
VOCAB_SIZE = 96
LARGE = {"num_blocks": 400, "block_size": 16, "max_num_seqs": 16, "max_num_batched_tokens": 512}
COMMON: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_model_len": MAX_LENGTH}

Row = tuple[list[int], SamplingParams, int | None]


def engine_of(draw: random.Random) -> dict[str, Any]:
    """Options that may not change a bit."""
    block_size = draw.choice([2, 4, 8, 16])
    least = -(-MAX_LENGTH // block_size)
    options: dict[str, Any] = {"block_size": block_size, "num_blocks": least + draw.choice([0, 1, 2, least // 2])}
    options |= draw.choice([{}, {"preemption_mode": "recompute"}, {"preemption_mode": "swap", "swap_space": 0.1}])
    options["max_num_seqs"] = draw.choice([3, 5, 8])
    options["max_num_batched_tokens"] = draw.choice([8, 16, 100])
    options["enable_prefix_caching"] = draw.random() < 0.7
    options["async_scheduling"] = draw.random() < 0.4
    if draw.random() < 0.3:
        options["speculative_config"] = {"method": draw.choice(["ngram", "suffix"]), "num_speculative_tokens": 3}
    return options


def row_of(draw: random.Random, heads: list[list[int]], num_adapters: int) -> Row:
    adapter = draw.choice([None, *range(num_adapters), *range(num_adapters)])
    head = draw.choice(heads)
    prompt = [*head[: draw.randint(0, len(head))], *(draw.randrange(5, VOCAB_SIZE) for _ in range(draw.randint(1, 4)))]
    n = draw.choice([1, 2, 2, 3])
    options: dict[str, Any] = {
        "n": n,
        "temperature": draw.choice([0.0, 0.7, 1.0, 1.5]),
        "seed": draw.randrange(1000),
        "max_tokens": draw.choice([3, 9, 25, 25]),
        "logprobs": draw.choice([None, 0, 2]),
        "ignore_eos": draw.random() < 0.7,
    }
    more = [
        {"best_of": 3},
        {"repetition_penalty": 1.3},
        {"presence_penalty": 0.7, "frequency_penalty": -0.4},
        {"stop_token_ids": [draw.randrange(5, VOCAB_SIZE) for _ in range(4)]},
        {"logit_bias": {draw.randrange(5, VOCAB_SIZE): 4.0}},
        {"top_k": 7},
        {"top_p": 0.8, "min_p": 0.01},
        {"cache_salt": "a"},
        {"skip_reading_prefix_cache": True},
        {"min_tokens": 1},
    ]
    for each in draw.sample(more, draw.choice([0, 0, 1, 2])):
        options |= each
    return prompt, SamplingParams(**options), adapter


def answers(llm: LLM, rows: list[Row], requests: list[PromptAdapterRequest]) -> list[Any]:
    outputs = llm.generate(
        [prompt for prompt, _, _ in rows],
        [params for _, params, _ in rows],
        prompt_adapter_request=[None if adapter is None else requests[adapter] for _, _, adapter in rows],
        use_tqdm=False,
    )
    return [
        [
            [one.token_ids, one.finish_reason, one.cumulative_logprob, [[*each.items()] for each in one.logprobs or []]]
            for one in output.outputs
        ]
        for output in outputs
    ]


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> tuple[Path, list[PromptAdapterRequest]]:
    # Here, because they bring transformers.
    from family_checkpoints import family_folder
    from prompt_adapter_folders import prompt_adapter_folder
    from reference_models import checkpoint_folder

    folder = checkpoint_folder("llama3") if request.param == "llama3" else family_folder(request.param)
    requests = [
        PromptAdapterRequest(
            f"{kind} {num_tokens}", index, str(prompt_adapter_folder(folder, kind, num_tokens)), num_tokens
        )
        for index, (kind, num_tokens) in enumerate(FAMILIES[request.param], start=1)
    ]
    return folder, requests


@pytest.fixture(scope="module")
def large(family: tuple[Path, list[PromptAdapterRequest]]) -> Iterator[LLM]:
    with LLM(family[0], **COMMON, **LARGE) as made:
        yield made


@pytest.mark.stress
@pytest.mark.parametrize("number", range(NUM_DRAWS))
def test_samples_with_adapters_equal_in_tiny_cache(
    family: tuple[Path, list[PromptAdapterRequest]], large: LLM, number: int
):
    folder, requests = family
    draw = random.Random(f"{SEED} {folder.name} {number}")
    options = engine_of(draw)
    heads = [[draw.randrange(5, VOCAB_SIZE) for _ in range(24)] for _ in range(3)]
    with LLM(folder, **COMMON, **options) as tiny:
        for call in range(NUM_CALLS):
            rows = [row_of(draw, heads, len(requests)) for _ in range(draw.randint(5, 9))]
            found = answers(tiny, rows, requests)
            for index, row in enumerate(rows):
                large.reset_prefix_cache()
                (expected,) = answers(large, [row], requests)
                assert found[index] == expected, (options, call, index, row)
            if draw.random() < 0.3:
                tiny.reset_prefix_cache()
        tiny.llm_engine.scheduler.check_integrity()
        assert tiny.llm_engine.scheduler.cache.num_used_blocks == 0
        print(f"\nADAPTERS {folder.name} {number}: {tiny.llm_engine.counters.num_preemptions} preemptions of {options}")


@pytest.mark.stress
@pytest.mark.parametrize("family", ["llama3"], indirect=True)
def test_fuzz_detects_exchanged_keys(
    family: tuple[Path, list[PromptAdapterRequest]], large: LLM, monkeypatch: pytest.MonkeyPatch
):
    """Negative control: keys in place of values in the tiny cache alone."""
    answers(large, [([5], SamplingParams(max_tokens=1), adapter) for adapter in range(len(family[1]))], family[1])
    keep = PrefixStore.keep
    monkeypatch.setattr(PrefixStore, "keep", lambda store, content, tensor: keep(store, content, tensor.flip(1)))
    with pytest.raises(AssertionError, match="num_blocks"):
        test_samples_with_adapters_equal_in_tiny_cache(family, large, 0)
