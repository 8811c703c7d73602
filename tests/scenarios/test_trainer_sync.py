"""A trainer's loop around an engine in its process: after each sync the engine samples with the trainer's weights.

The trainer sees the difference of log-probabilities: the engine's of its samples, and those of the trainer's own
forward pass for the same tokens.
"""

import copy

import pytest
import torch
from delta_checkpoints import DELTA_CASES, delta_folder
from reference_models import checkpoint_folder, mixed_prompts, open_reference, reference_logits
from transformers import PreTrainedModel

from spmd_worker import LLM, RequestOutput, SamplingParams

PROMPTS = [[token % 96 for token in prompt] for prompt in mixed_prompts(4, 40, seed=3)] * 2
ROLLOUT = SamplingParams(temperature=1.0, max_tokens=8, logprobs=0, ignore_eos=True)
EQUAL, ONE_SYNC_BEHIND = 5e-6, 1e-2


def mean_difference(outputs: list[RequestOutput], model: PreTrainedModel) -> float:
    found, expected = [], []
    for output in outputs:
        (completion,) = output.outputs
        ids = [*output.prompt_token_ids, *completion.token_ids]
        rows = reference_logits(model, ids).double().log_softmax(-1)[len(output.prompt_token_ids) - 1 : -1]
        expected += rows.gather(1, torch.tensor(completion.token_ids).unsqueeze(1)).squeeze(1).tolist()
        found += [next(iter(entry.values())).logprob for entry in completion.logprobs]
    return float((torch.tensor(found) - torch.tensor(expected)).abs().mean())


@torch.no_grad()
def update(model: PreTrainedModel, step: int) -> None:
    """Stands for an optimiser's step."""
    generator = torch.Generator().manual_seed(step)
    for parameter in model.parameters():
        parameter.add_(0.1 * parameter.std() * torch.randn(parameter.shape, generator=generator))


@pytest.mark.gate("qwen3_5", "qwen2_tied")
@pytest.mark.guarantee("A trainer's weights are those that sample", is_control_inside=True)
@pytest.mark.parametrize("name", ["llama3", "qwen2_tied", "qwen3", "qwen3_5"])
def test_after_each_sync_log_probabilities_are_the_trainers(name: str):
    folder = delta_folder(name) if name in DELTA_CASES else checkpoint_folder(name)
    trained = open_reference(folder)
    rollouts = []
    with LLM(folder, num_blocks=100, logprobs_mode="processed_logprobs") as llm:
        for step in range(3):
            before = copy.deepcopy(trained)
            update(trained, step)
            inner = llm.llm_engine.model_executor.driver_worker.model_runner.model
            for pair in trained.named_parameters():
                inner.load_weights([pair])
            llm.reset_prefix_cache()
            outputs = llm.generate([{"prompt_token_ids": ids} for ids in PROMPTS], ROLLOUT, use_tqdm=False)
            assert mean_difference(outputs, trained) < EQUAL
            assert mean_difference(outputs, before) > ONE_SYNC_BEHIND, "negative control"
            rollouts += [tuple(output.outputs[0].token_ids) for output in outputs]
    assert len(set(rollouts)) == len(rollouts), "every sample of every step is another"
