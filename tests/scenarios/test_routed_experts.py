"""Experts of each token: those of transformers' routers, whatever the layout and the order of steps."""

from typing import Any

import numpy as np
import pytest
import torch
from expert_checkpoints import expert_folder, expert_reference
from latent_checkpoints import latent_folder, latent_reference
from reference_models import checkpoint_folder

from spmd_worker import LLM, RequestOutput, SamplingParams
from spmd_worker.replica.sequence.routed_experts import RoutedExperts

PROMPTS = [[5, 6, 7], [*range(40, 61)], [9, 8]]
PARAMS = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True, return_routed_experts=True)
# Prompts are cut into chunks, rows are preempted.
SMALL: dict[str, Any] = {
    "device": "cpu",
    "block_size": 8,
    "num_blocks": 8,
    "max_model_len": 56,
    "max_num_seqs": 6,
    "max_num_batched_tokens": 16,
}
LARGE = {**SMALL, "num_blocks": 40, "max_num_batched_tokens": 64}


def routes(output: RequestOutput) -> list[np.ndarray]:
    """Of prompt and answer, for each sample."""
    return [np.concatenate((output.prompt_routed_experts, each.routed_experts)) for each in output.outputs]


def their_routes(model: torch.nn.Module, tokens: list[int]) -> np.ndarray:
    """Experts that transformers' routers choose, [tokens, layers, k], as each router returns them."""
    found: list[torch.Tensor] = []

    def note(module: torch.nn.Module, inputs: Any, result: Any) -> None:
        indices = next(each for each in reversed(result) if not each.is_floating_point())
        found.append(indices.reshape(len(tokens), -1))

    routers = [each for each in model.modules() if type(each).__name__.endswith("Router")]
    hooks = [each.register_forward_hook(note) for each in routers]
    with torch.no_grad():
        model(torch.tensor([tokens]))
    for each in hooks:
        each.remove()
    return torch.stack(found, dim=1).numpy()


@pytest.mark.guarantee("routed experts are those of transformers' routers")
@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_experts_are_those_of_transformers_routers(name: str):
    is_latent = name == "deepseek_v3"
    folder, reference = (latent_folder, latent_reference) if is_latent else (expert_folder, expert_reference)
    with LLM(folder(name), **LARGE) as llm:
        outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        (found,) = routes(output)
        expected = their_routes(reference(name), [*prompt, *output.outputs[0].token_ids[:-1]])
        assert (found.dtype, found.shape) == (np.uint8, expected.shape)
        assert output.prompt_routed_experts.shape[0] == len(prompt)
        if is_latent:
            # Their order is not defined: torch.topk with sorted=False.
            found, expected = np.sort(found), np.sort(expected)
        assert np.array_equal(found, expected)


@pytest.mark.control("routed experts are those of transformers' routers")
def test_shifted_experts_are_found(monkeypatch: pytest.MonkeyPatch):
    put = RoutedExperts.put
    shifted = lambda self, first, tokens, start, stop: put(self, first + (first > 0), tokens, start, stop)  # noqa: E731
    monkeypatch.setattr(RoutedExperts, "put", shifted)
    with LLM(expert_folder("qwen3_moe"), **LARGE) as llm:
        (output,) = llm.generate(PROMPTS[:1], PARAMS, use_tqdm=False)
    expected = their_routes(expert_reference("qwen3_moe"), [*PROMPTS[0], *output.outputs[0].token_ids[:-1]])
    assert not np.array_equal(routes(output)[0], expected)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(SMALL, id="recompute"),
        pytest.param({**SMALL, "swap_space": 0.1, "preemption_mode": "swap"}, id="swap", marks=pytest.mark.stress),
    ],
)
def test_experts_do_not_depend_on_steps(options: dict[str, Any]):
    """Whole or in chunks, preempted or not, behind a prompt that is cached, with samples."""
    params = PARAMS.clone()
    params.temperature, params.n, params.seed, params.max_tokens = 1.0, 2, 3, 16
    found = []
    for settings in (LARGE, options):
        with LLM(expert_folder("qwen3_moe"), **settings) as llm:
            llm.generate(PROMPTS[1:2], SamplingParams(max_tokens=1), use_tqdm=False)
            outputs = llm.generate(PROMPTS, params, use_tqdm=False)
            assert [each.num_cached_tokens for each in outputs] == [0, 0, 0]
            found.append([routes(each) for each in outputs])
            num_preemptions = llm.llm_engine.scheduler.counters.num_preemptions
    assert num_preemptions > 0
    for mine, others in zip(*found, strict=True):
        assert all(np.array_equal(one, other) for one, other in zip(mine, others, strict=True))


def test_dense_model_rejects_request():
    error = pytest.raises(ValueError, match=r"return_routed_experts=True, but the model has no experts")
    with LLM(checkpoint_folder("llama3"), **LARGE) as llm, error:
        llm.generate(PROMPTS, PARAMS, use_tqdm=False)
