"""Models with windows: rows have the same bits whether blocks behind a window go back to the pool or not.

Each run checks queues, tables and pools against each other after every step (SPMD_WORKER_CHECK).
"""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
from adapter_folders import write_prompt_adapter
from compressed_checkpoints import compressed_folder
from conv_checkpoints import conv_folder
from expert_checkpoints import expert_folder
from family_checkpoints import family_folder
from recent_checkpoints import recent_folder
from state_rows import answers_of, state_rows

from spmd_worker import LLM, PromptAdapterRequest, SamplingParams
from spmd_worker.base.errors import AdapterError, ConfigError
from spmd_worker.worker.memory.plan_text import describe_plan, make_plan

pytestmark = pytest.mark.usefixtures("checks_after_every_step")

FOLDERS = {
    "gemma3": family_folder,
    "cwm": family_folder,
    "starcoder2": family_folder,
    "gpt_oss": expert_folder,
    "lfm3": conv_folder,
    "llama4": recent_folder,
    "gemma4": recent_folder,
    "gemma4_small": recent_folder,
    "deepseek_v4_groups": compressed_folder,
}
NUM_BLOCKS = {"gemma3": 12, "cwm": 32, "starcoder2": 32, "gpt_oss": 24, "lfm3": 32}
NUM_BLOCKS |= {"llama4": 40, "gemma4": 40, "gemma4_small": 40, "deepseek_v4_groups": 12}
"""Of 4 tokens, for one row and a few."""
kinds = pytest.mark.parametrize(
    "name", ["gemma3", *(pytest.param(each, marks=pytest.mark.stress) for each in [*FOLDERS][1:])]
)
SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "device": "cpu",
    "max_model_len": 128,
    "max_num_batched_tokens": 64,
    "max_num_seqs": 8,
    "block_size": 4,
    "num_blocks": 400,
}
SWAP = {"preemption_mode": "swap", "swap_space": 0.1}
WAYS: dict[str, dict[str, Any]] = {
    "one token at a time": {"max_num_batched_tokens": 1, "max_num_seqs": 1},
    "chunks of 7": {"max_num_batched_tokens": 7, "max_num_seqs": 4},
    "chunks of 63": {"max_num_batched_tokens": 63},
    "ahead of ids": {"async_scheduling": True},
    "recompute": {"max_num_batched_tokens": 16, "preemption_mode": "recompute"},
    "swap": {"max_num_batched_tokens": 16, **SWAP},
    "swap, no prefix cache": {"max_num_batched_tokens": 16, **SWAP, "enable_prefix_caching": False},
}
IN_GATE = ("chunks of 7", "swap")


def rows_of() -> tuple[list[Any], list[SamplingParams]]:
    rows, params = state_rows(4, num_samples=3)
    return [{"prompt_token_ids": row["prompt_token_ids"][:100]} for row in rows], params


def answer(name: str, **options: Any) -> tuple[list[Any], LLM]:
    """The answers of all rows, twice: the second time from the prefix cache."""
    with LLM(FOLDERS[name](name), **{**SETTINGS, **options}) as llm:
        found = [answers_of(llm.generate(*rows_of(), use_tqdm=False)) for _ in range(2)]
        assert found[0] == found[1]
        assert llm.llm_engine.scheduler.cache.num_used_blocks == 0
    return found[0], llm


@cache
def with_all_tokens(name: str) -> list[Any]:
    return answer(name, window_groups=False)[0]


@pytest.mark.gate("swap-gemma3")
@kinds
@pytest.mark.parametrize("way", [pytest.param(way, marks=() if way in IN_GATE else pytest.mark.stress) for way in WAYS])
def test_rows_have_the_bits_of_one_group(name: str, way: str):
    is_crowded = way.startswith(("swap", "recompute"))
    options = {**WAYS[way], **({"num_blocks": NUM_BLOCKS[name]} if is_crowded else {})}
    found, llm = answer(name, **options)
    scheduler = llm.llm_engine.scheduler
    assert scheduler.cache.groups.num_windows > 0
    if name in ("gemma3", "deepseek_v4_groups") and is_crowded:
        assert scheduler.counters.num_preemptions > 0
        assert (scheduler.counters.num_swapped_out > 0) == ("swap" in way)
    assert found == with_all_tokens(name)


def test_layers_that_join_run_alone_in_groups():
    """One call computes all of a plain model's layers, with one block table."""
    settings = {**SETTINGS, "max_num_batched_tokens": 16}
    rows, params = [{"prompt_token_ids": [5 + each for each in range(60)]}], SamplingParams(max_tokens=9, logprobs=1)
    found = []
    for is_grouped in (False, True):
        with LLM(family_folder("cwm"), **settings, window_groups=is_grouped) as llm:
            engine = llm.llm_engine
            assert (engine.scheduler.cache.groups.num_windows > 0) == is_grouped
            assert engine.executor.driver_worker.loaded.model.model.joined_layers is not None
            found.append(answers_of(llm.generate(rows, params, use_tqdm=False)))
    assert found[0] == found[1]


def test_long_row_fits_where_it_did_not():
    """A row of 100 tokens in blocks of 4 needs 25 of all layers; Gemma's full layers need 25 of a seventh."""
    folder, settings = family_folder("gemma3"), {**SETTINGS, "num_blocks": 12, "max_num_batched_tokens": 16}
    with pytest.raises(ConfigError, match=r"num_blocks=12 holds 48 tokens .* at least 32"):
        LLM(folder, **settings, window_groups=False)
    with LLM(folder, **settings) as llm:
        (output,) = llm.generate([{"prompt_token_ids": [5] * 100}], SamplingParams(max_tokens=20, ignore_eos=True))
        assert len(output.outputs[0].token_ids) == 20
    with pytest.raises(ConfigError, match=r"num_blocks=10 holds 40 tokens .* at least 11"):
        LLM(folder, **{**settings, "num_blocks": 10})


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"window_groups": False}, "cache.window_groups=false"),
        ({"host_tier_gib": 0.01}, "cache.host_tier_gib keeps blocks of all layers"),
        ({"max_model_len": 8}, "is no longer than a window and a step"),
    ],
)
def test_plan_says_why_all_tokens_are_kept(options: dict[str, Any], reason: str):
    with LLM(family_folder("gemma3"), **{**SETTINGS, **options}) as llm:
        assert llm.llm_engine.scheduler.cache.groups.num_windows == 0
        assert reason in describe_plan(make_plan(llm.llm_engine.resolved))


def test_scores_and_aborts_keep_bits():
    folder, prompts = (
        family_folder("gemma3"),
        [[5 + each % 80 for each in range(start, start + 90)] for start in (0, 7)],
    )
    found = []
    for is_grouped in (False, True):
        with LLM(folder, **{**SETTINGS, "max_num_batched_tokens": 24}, window_groups=is_grouped) as llm:
            params = SamplingParams(max_tokens=4, temperature=0, prompt_logprobs=1)
            outputs = llm.generate([{"prompt_token_ids": each} for each in prompts], params, use_tqdm=False)
            found.append([[each.prompt_logprobs, each.outputs[0].token_ids] for each in outputs])
            llm.sleep(level=1)
            llm.wake_up()
            again = llm.generate([{"prompt_token_ids": each} for each in prompts], params, use_tqdm=False)
            found.append([[each.prompt_logprobs, each.outputs[0].token_ids] for each in again])
    assert found[0] == found[1] == found[2] == found[3]


def test_given_keys_fill_no_window(tmp_path: Path):
    width = 7 * 2 * 2 * 16
    folders = [write_prompt_adapter(tmp_path / f"{count}", width, count, 1, "PREFIX_TUNING") for count in (4, 5)]
    few, many = (
        PromptAdapterRequest(folder.name, count, str(folder), count)
        for folder, count in zip(folders, (4, 5), strict=True)
    )
    params, found = SamplingParams(max_tokens=12, temperature=0, logprobs=1), []
    for is_grouped in (False, True):
        with LLM(family_folder("gemma3"), **SETTINGS, window_groups=is_grouped) as llm:
            rows = [{"prompt_token_ids": [5 + each for each in range(30)]}]
            for _ in range(2):
                found.append(answers_of(llm.generate(rows, params, prompt_adapter_request=few, use_tqdm=False)))
            if is_grouped:
                with pytest.raises(
                    AdapterError, match=r"5 virtual tokens .* fill a window of 5 tokens, .*window_groups"
                ):
                    llm.generate(rows, params, prompt_adapter_request=many, use_tqdm=False)
    assert found[0] == found[1] == found[2] == found[3]
