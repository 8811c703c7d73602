"""Memory of LoRA adapters: the estimate is what the compiled kernels hold, and the plan says so."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from expert_checkpoints import expert_folder
from family_checkpoints import family_folder
from our_model import load_model

from spmd_worker.base.config.adapter_limits import AdapterLimits
from spmd_worker.base.config.schema import ModelOptions, RunConfig
from spmd_worker.model.adapters.loaded import LoadedAdapters
from spmd_worker.model.adapters.source import adapter_from_tensors
from spmd_worker.model.decoder import DecoderForCausalLM
from spmd_worker.ops.kernels.cpu.adapters import NativeStack
from spmd_worker.ranks.topology import RankLayout
from spmd_worker.resolved import resolve_run
from spmd_worker.worker.memory.estimate import adapter_bytes
from spmd_worker.worker.memory.plan_text import describe_plan, make_plan

LIMITS = AdapterLimits(max_loras=1, max_lora_rank=32, max_cpu_loras=3)
OF_EXPERTS = replace(LIMITS, of_experts=True)


def held_bytes(model: DecoderForCausalLM, limits: AdapterLimits) -> int:
    """Bytes of as many adapters of the largest rank as may be loaded, for all modules."""
    loaded, num_bytes = LoadedAdapters(model, limits), 0
    modules = loaded.targets.linears
    for seed in range(LIMITS.max_cpu_loras):
        tensors: dict[str, torch.Tensor] = {}
        for name in modules:
            outputs, inputs = loaded.targets.sizes(name)
            tensors[f"{name}.lora_A.weight"] = torch.full((LIMITS.max_lora_rank, inputs), 1.0 + seed)
            tensors[f"{name}.lora_B.weight"] = torch.ones(outputs, LIMITS.max_lora_rank)
        config: dict[str, Any] = {"peft_type": "LORA", "r": LIMITS.max_lora_rank, "lora_alpha": 1}
        loaded.commit(loaded.prepare(adapter_from_tensors(config, tensors)))
    for stack in loaded.stacks:
        assert isinstance(stack, NativeStack), type(stack)
        num_bytes += stack.num_bytes
    return num_bytes


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_estimate_covers_adapters_of_all_modules(dtype: str):
    for folder, least, limits in (
        (family_folder("seed_oss"), 0.9, LIMITS),
        (family_folder("opt_350m"), 0.9, LIMITS),
        (family_folder("phi3"), 0.7, LIMITS),
        (expert_folder("qwen2_moe"), 0.9, LIMITS),
        (expert_folder("qwen2_moe"), 0.9, OF_EXPERTS),
    ):
        model = load_model(folder, dtype=dtype)
        estimate = adapter_bytes(model.model_config, RankLayout(1), 0, dtype, limits)
        held = held_bytes(model, limits)
        assert least * estimate <= held <= estimate, (folder.name, held, estimate)


def test_ranks_share_the_outputs_of_adapters():
    model_config = load_model(family_folder("seed_oss")).model_config
    one, two = (adapter_bytes(model_config, RankLayout(size), 0, "float32", LIMITS) for size in (1, 2))
    stages = [adapter_bytes(model_config, RankLayout(1, 2), rank, "float32", LIMITS) for rank in (0, 1)]
    assert one / 2 < two < one
    assert sum(stages) == one


def test_plan_counts_adapters():
    def plan_of(**options: Any) -> tuple[int, str]:
        config = RunConfig(model=ModelOptions(path=str(family_folder("seed_oss")), **options), device="cpu")
        plan = make_plan(resolve_run(config, "cpu"))
        return plan.shares[0].weights_bytes, describe_plan(plan)

    without, text = plan_of()
    assert "adapters" not in text
    counted, text = plan_of(enable_lora=True, max_cpu_loras=4, max_lora_rank=32)
    assert counted > without
    assert "adapters   at most 4 of rank 32 (model.max_cpu_loras, model.max_lora_rank), up to " in text
