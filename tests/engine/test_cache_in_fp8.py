"""Runs with a cache in FP8: transformers' numbers with keys and values rounded as it keeps them, in half the memory,
and equal answers however rows are computed.
"""

from typing import Any

import pytest
import torch
from reference_models import checkpoint_folder, mixed_prompts, random_prompt, reference_model
from transformers.cache_utils import DynamicCache

from spmd_worker import LLM, SamplingParams
from spmd_worker.base.errors import ConfigError

NAMES = ("llama3", "mistral")
PROMPTS = [*mixed_prompts(7, 60, seed=8), random_prompt(90, seed=9)]
SETTINGS: dict[str, Any] = {"max_model_len": 128, "num_blocks": 200, "dtype": "float32"}


class RoundingCache(DynamicCache):
    """transformers' own, of numbers rounded to e4m3."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *given: Any, **named: Any) -> Any:
        rounded = (each.to(torch.float8_e4m3fn).to(each.dtype) for each in (key_states, value_states))
        return super().update(*rounded, *given, **named)


def reference_logprobs(name: str, prompt: list[int], cache: DynamicCache) -> torch.Tensor:
    with torch.no_grad():
        logits = reference_model(name)(torch.tensor([prompt]), past_key_values=cache, use_cache=True).logits[0, :-1]
    return logits.float().log_softmax(-1).gather(1, torch.tensor(prompt[1:]).unsqueeze(1)).squeeze(1)


@pytest.mark.parametrize("name", NAMES)
def test_logprobs_are_those_of_rounded_keys_and_values(name: str):
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
    with LLM(checkpoint_folder(name), kv_cache_dtype="fp8", **SETTINGS) as llm:
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    errors, effects = [], []
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        if len(prompt) < 2:
            continue
        found = [at[token].logprob for token, at in zip(prompt[1:], output.prompt_logprobs[1:], strict=True)]
        rounded, plain = (reference_logprobs(name, prompt, kind()) for kind in (RoundingCache, DynamicCache))
        errors.append((torch.tensor(found) - rounded).abs().max())
        effects.append((plain - rounded).abs().max())
    # A number that nearly ties may be rounded to the other side.
    assert max(errors) < 0.1 * max(effects), (errors, effects)


@pytest.mark.parametrize("name", NAMES)
def test_rows_have_equal_answers_however_computed(name: str):
    params = [
        SamplingParams(max_tokens=12, temperature=index % 2, seed=index, logprobs=2, ignore_eos=True)
        for index in range(len(PROMPTS))
    ]

    def answers(prompts: list[list[int]], given: list[SamplingParams], **settings: Any) -> list[Any]:
        with LLM(checkpoint_folder(name), **SETTINGS | settings) as llm:
            outputs = llm.generate(prompts, given, use_tqdm=False)
            return [(each.outputs[0].token_ids, each.outputs[0].logprobs) for each in outputs]

    whole = answers(PROMPTS, params, kv_cache_dtype="fp8")
    assert answers(PROMPTS[3:4], params[3:4], kv_cache_dtype="fp8_e4m3") == whole[3:4]
    cut = {"max_num_batched_tokens": 24, "max_num_seqs": 8, "block_size": 4, "enable_prefix_caching": False}
    assert answers(PROMPTS, params, kv_cache_dtype="fp8", **cut) == whole
    crowded = {"num_blocks": 20, "preemption_mode": "swap", "swap_space": 0.01, "verify_steps": 5}
    assert answers(PROMPTS, params, kv_cache_dtype="fp8", **crowded) == whole
    # Control: in the model's dtype a cache gives others.
    assert answers(PROMPTS, params) != whole


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_blocks_take_a_byte_each_number(dtype: str):
    settings = SETTINGS | {"dtype": dtype}
    with (
        LLM(checkpoint_folder("llama3"), **settings) as plain,
        LLM(checkpoint_folder("llama3"), kv_cache_dtype="fp8", **settings) as reduced,
    ):
        sizes = [max(llm.collective_rpc("get_cache_block_size_bytes")) for llm in (plain, reduced)]
    assert sizes[0] == sizes[1] * (4 if dtype == "float32" else 2)


def test_other_dtypes_are_refused_by_name():
    with pytest.raises((ConfigError, ValueError), match="kv_cache_dtype=fp8_e5m2 is not one of auto, fp8"):
        LLM(checkpoint_folder("llama3"), kv_cache_dtype="fp8_e5m2", **SETTINGS)
