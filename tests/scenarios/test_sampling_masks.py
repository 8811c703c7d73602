"""Sampling masks of an engine's answers: with them the importance ratios of a trainer in float64 are 1.

`ops/sampling/test_sampling_mask.py` shows it for the same logits within 1e-6; here the float32 forward pass counts too.
"""

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from reference_models import checkpoint_folder, open_reference

from spmd_worker import LLM, RequestOutput, SamplingParams

PROMPTS = [[5, 6, 7], [40, 41, 42, 43], [*range(60, 100)]]
KINDS = [{"top_p": 0.8}, {"top_k": 20}, {"top_p": 0.8, "top_k": 20, "temperature": 0.7}]
MODEL = "llama3"


@pytest.fixture(scope="module")
def trainer() -> torch.nn.Module:
    return open_reference(checkpoint_folder(MODEL)).double()


@pytest.fixture(scope="module")
def llm() -> Any:
    settings = {"dtype": "float32", "device": "cpu", "num_blocks": 100, "max_model_len": 96}
    with LLM(checkpoint_folder(MODEL), logprobs_mode="processed_logprobs", **settings) as llm:
        yield llm


@torch.no_grad()
def ratios(trainer: torch.nn.Module, output: RequestOutput, temperature: float, *, has_mask: bool) -> NDArray[Any]:
    """exp(trainer's log-probability - engine's) of each token of each sample; the trainer's in float64."""
    found, prompt = [], output.prompt_token_ids or []
    for each in output.outputs:
        assert each.sampling_mask is not None
        assert each.logprobs is not None
        tokens = torch.tensor([[*prompt, *each.token_ids]])
        logits = trainer(tokens, use_cache=False).logits[0, len(prompt) - 1 : -1].numpy() / temperature
        assert logits.dtype == np.float64
        for scores, token, entry, kept in zip(logits, each.token_ids, each.logprobs, each.sampling_mask, strict=True):
            assert token in kept
            logprob = scores[token] - np.log(np.exp(scores[kept] if has_mask else scores).sum())
            found.append(np.exp(logprob - entry[token].logprob))
    return np.array(found)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_ratios_of_a_float64_trainer_are_one_with_the_mask(kind: dict[str, Any], llm: LLM, trainer: torch.nn.Module):
    """Negative control: without the mask they are the mass that the filters keep."""
    params = SamplingParams(max_tokens=40, ignore_eos=True, logprobs=0, seed=3, n=4, return_sampling_mask=True, **kind)
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    with_mask, without = (
        np.concatenate([ratios(trainer, each, params.temperature, has_mask=has_mask) for each in outputs])
        for has_mask in (True, False)
    )
    assert len(with_mask) == 480
    # 1.5e-6 was measured.
    assert np.abs(with_mask - 1).max() < 4e-6
    assert without.max() < 0.9
    if kind == KINDS[0]:
        assert without.min() > 0.8 - 1e-5
