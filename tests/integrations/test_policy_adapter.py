"""TRL's policy is pushed as an adapter: seen on a stand-in for TRL's `VLLMGeneration` and a model that PEFT adapts.

After each sync the log-probabilities of what the engine samples are those of PEFT's own forward pass.
"""

import logging
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from adapter_folders import adapter_tensors
from expert_checkpoints import expert_folder, open_experts
from peft import LoraConfig, PeftModel, get_peft_model
from reference_models import checkpoint_folder, mixed_prompts, open_reference

from spmd_worker import LoRARequest, RequestOutput, SamplingParams
from spmd_worker.base.errors import AdapterError
from spmd_worker.integrations import policy_adapter
from spmd_worker.integrations.policy_adapter import PolicyLLM, pushed_at_start, pushed_at_sync
from spmd_worker.replica.sequence.lora_request import TensorSnapshot

LLM: Any = PolicyLLM  # the name that the integration replaces in TRL's module
PROMPTS = mixed_prompts(4, 40, seed=3)
ROLLOUT = SamplingParams(temperature=1.0, max_tokens=8, logprobs=0, ignore_eos=True)
EQUAL, ONE_SYNC_BEHIND = 1e-6, 1e-3


class Distribution:
    is_fsdp = False

    def gather_params(self, _: list[Any]) -> Any:
        return nullcontext()


class Generation:
    """`VLLMGeneration` of TRL 1.16 in its colocate mode: what its methods call, in their order."""

    mode = "colocate"

    def __init__(self, model: PeftModel, folder: str, *, sleeps: bool = False) -> None:
        self.model, self.folder, self.enable_sleep_mode = model, folder, sleeps
        self._dist, self.num_pushed = Distribution(), 0
        self._init_vllm()

    def _init_vllm(self) -> None:
        self.llm = LLM(
            self.folder, num_blocks=100, logprobs_mode="processed_logprobs", enable_sleep_mode=self.enable_sleep_mode
        )
        if self.enable_sleep_mode:
            self.llm.sleep(level=2)
        self._llm_weights_sleeping = self.enable_sleep_mode

    def _iter_named_params(self) -> Iterator[tuple[str, torch.Tensor]]:
        model = self.model
        with self._dist.gather_params(list(model.parameters())):
            model.merge_adapter()
            for given, parameter in model.named_parameters():
                name = given.removeprefix("base_model.model.").replace(".base_layer", "")
                if model.prefix not in name:
                    yield name, parameter.data
            model.unmerge_adapter()

    def sync_weights(self) -> None:
        if self.enable_sleep_mode:
            self.llm.wake_up(tags=["weights"])
            self._llm_weights_sleeping = False
        for pair in self._iter_named_params():
            self.llm.llm_engine.model_executor.driver_worker.model_runner.model.load_weights([pair])
            self.num_pushed += 1
        self.llm.reset_prefix_cache()

    def generate(self) -> list[RequestOutput]:
        if self.enable_sleep_mode:
            if self._llm_weights_sleeping:
                self.sync_weights()
            self.llm.wake_up(tags=["kv_cache"])
        prompts = [{"prompt_token_ids": ids} for ids in PROMPTS]
        outputs = self.llm.generate(prompts, sampling_params=ROLLOUT, use_tqdm=False)
        if self.enable_sleep_mode:
            self.llm.sleep(level=2)
            self._llm_weights_sleeping = True
        return outputs


@pytest.fixture(autouse=True)
def _wrapped_methods(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Generation, "_init_vllm", pushed_at_start(Generation._init_vllm))
    monkeypatch.setattr(Generation, "sync_weights", pushed_at_sync(Generation.sync_weights))


def adapted(name: str, **config: Any) -> PeftModel:
    arguments = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", **config}
    return get_peft_model(open_reference(checkpoint_folder(name)), LoraConfig(**arguments)).eval()


@torch.no_grad()
def update(model: PeftModel, step: int) -> None:
    """Stands for an optimiser's step, in place."""
    generator = torch.Generator().manual_seed(step)
    for name, parameter in model.named_parameters():
        if model.prefix in name:
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))


@torch.no_grad()
def mean_difference(outputs: list[RequestOutput], model: PeftModel) -> float:
    found, expected = [], []
    for output in outputs:
        (completion,) = output.outputs
        ids = torch.tensor([[*output.prompt_token_ids, *completion.token_ids]])
        rows = model(ids).logits[0].double().log_softmax(-1)[len(output.prompt_token_ids) - 1 : -1]
        expected += rows.gather(1, torch.tensor(completion.token_ids).unsqueeze(1)).squeeze(1).tolist()
        found += [next(iter(entry.values())).logprob for entry in completion.logprobs]
    return float((torch.tensor(found) - torch.tensor(expected)).abs().mean())


@pytest.mark.guarantee("A policy that is pushed as an adapter is the one that samples", is_control_inside=True)
@pytest.mark.parametrize(("name", "sleeps"), [("qwen2_tied", False), ("llama3", True)])
def test_after_each_sync_log_probabilities_are_the_policys(name: str, sleeps: bool):
    model = adapted(name)
    generation = Generation(model, str(checkpoint_folder(name)), sleeps=sleeps)
    num_weights = len(list(generation._iter_named_params()))
    for step in range(2):
        before = generation.generate() if step and not sleeps else None
        update(model, step)
        generation.sync_weights()
        outputs = generation.generate()
        assert mean_difference(outputs, model) < EQUAL
        assert all(output.num_cached_tokens == 0 for output in outputs), "blocks of the last policy"
        # With sleep this syncs the same policy again.
        assert mean_difference(generation.generate(), model) < EQUAL
        if before is not None:
            assert mean_difference(before, model) > ONE_SYNC_BEHIND, "negative control"
            assert any(output.num_cached_tokens for output in before), "negative control"
    # The weights once, or once after each sleep.
    assert generation.num_pushed == num_weights * (4 if sleeps else 1)
    generation.llm.close()


@pytest.mark.stress
def test_policy_with_adapted_experts_is_pushed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(globals(), "PROMPTS", [[each % 90 + 3 for each in prompt] for prompt in PROMPTS])
    stacks = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    folder, config = expert_folder("qwen3_moe"), LoraConfig(r=4, target_modules=["o_proj"], target_parameters=stacks)
    model = get_peft_model(open_experts(folder), config).eval()
    generation = Generation(model, str(folder))
    for step in range(2):
        update(model, step)
        generation.sync_weights()
        assert mean_difference(generation.generate(), model) < 10 * EQUAL
    assert generation.policy_push is not None
    update(model, 2)
    assert mean_difference(generation.generate(), model) > ONE_SYNC_BEHIND, "negative control"
    generation.llm.close()


def test_snapshot_is_compared_when_it_is_loaded_alone(monkeypatch: pytest.MonkeyPatch):
    """A call that names a pushed policy again reads and hashes no tensor; one with the trainer's own tensors does."""
    tensors, config = adapter_tensors(checkpoint_folder("llama3"), 1)
    snapshot = LoRARequest("policy", 1, lora_tensors=TensorSnapshot.of(tensors), peft_config=config)
    own = LoRARequest("policy", 1, lora_tensors=tensors, peft_config=config)
    num_staged = 0

    def counted(adapters: Any, *given: Any) -> Any:
        nonlocal num_staged
        num_staged += 1
        return stage(adapters, *given)

    with PolicyLLM(checkpoint_folder("llama3"), num_blocks=64, enable_lora=True) as llm:
        kind = type(llm.llm_engine.executor.adapters)
        stage = kind.stage
        monkeypatch.setattr(kind, "stage", counted)
        digest_of = llm.llm_engine.adapters.digest_of
        digest = digest_of(snapshot)
        assert (digest_of(snapshot), num_staged) == (digest, 1)
        assert (digest_of(own), num_staged) == (digest, 2)
        for tensor in tensors.values():
            tensor.add_(1.0)
        with pytest.raises(AdapterError, match="lora_int_id=1 is loaded as 'policy'"):
            digest_of(own)
        assert digest_of(snapshot) == digest
        # Other contents under the id, also of the same name: the snapshot is not what is loaded.
        assert digest_of(replace(own, load_inplace=True)) != digest
        with pytest.raises(AdapterError, match="lora_int_id=1 is loaded as 'policy'"):
            digest_of(snapshot)
        assert digest_of(replace(snapshot, load_inplace=True)) == digest


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"use_dora": True}, "use_dora=True"),
        ({"target_modules": ["q_proj", "lm_head"]}, "token heads"),
        ({"r": 600}, "rank 600 is above 512"),
    ],
)
def test_other_policies_are_merged_as_before(config: dict[str, Any], reason: str, caplog: pytest.LogCaptureFixture):
    model = adapted("llama3", **config)
    with caplog.at_level(logging.WARNING):
        generation = Generation(model, str(checkpoint_folder("llama3")))
        update(model, 0)
        generation.sync_weights()
    assert reason in "".join(record.getMessage() for record in caplog.records)
    assert mean_difference(generation.generate(), model) < 5 * EQUAL
    generation.llm.close()


def test_policy_is_merged_if_asked(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(policy_adapter, "is_pushing", False)
    model = adapted("qwen2_tied")
    generation = Generation(model, str(checkpoint_folder("qwen2_tied")))
    for step in range(2):
        update(model, step)
        generation.sync_weights()
        assert mean_difference(generation.generate(), model) < 5 * EQUAL
    assert generation.num_pushed == 2 * len(list(generation._iter_named_params()))
    generation.llm.close()
