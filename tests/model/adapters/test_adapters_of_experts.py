"""LoRA of experts and routers: logits are PEFT's, and a row's bits do not depend on the batch, the chunks or the file.

PEFT wraps stacks (`target_parameters`); files with a module for each expert are made of such an adapter.
"""

from functools import cache
from pathlib import Path

import pytest
import torch
from expert_checkpoints import expert_folder, open_experts
from our_model import load_model, prompt_logits
from peft import PeftModel
from peft_adapters import Settings, peft_logits, write_adapter
from reference_models import random_prompt, relative_error
from run_folder import made_once
from torch import Tensor

from spmd_worker.base.config.adapter_limits import AdapterLimits
from spmd_worker.model.adapters.loaded import LoadedAdapters
from spmd_worker.model.adapters.source import AdapterSource, read_adapter

LIMITS = AdapterLimits(max_loras=4, max_lora_rank=16, max_cpu_loras=4, of_experts=True)
PROMPTS = [random_prompt(length, 3, vocab_size=96) for length in (1, 17, 9, 30)]
STACKS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
ROUTER = ["mlp.gate.weight"]
CASES: dict[str, tuple[str, list[str]]] = {
    "mixtral": ("mixtral", STACKS + ROUTER),
    "qwen2_moe": ("qwen2_moe", STACKS + ROUTER + ["shared_expert_gate.weight"]),
    "gpt_oss": ("gpt_oss", STACKS + ["mlp.router.weight"]),
    "glm4_moe": ("glm4_moe", STACKS),
    "down_alone": ("qwen3_moe", STACKS[1:]),
    "olmoe": ("olmoe", STACKS),
    "granite_moe": ("granite_moe", ["experts.gate_up_proj", "experts.down_proj"]),
}


def settings_of(parameters: list[str]) -> Settings:
    return (("target_modules", ("q_proj",)), ("target_parameters", parameters), ("r", 3), ("lora_alpha", 9))


def adapter_of(family: str, parameters: list[str], seed: int = 0) -> Path:
    settings = settings_of(parameters)
    name = f"experts' adapter {family} {parameters} {seed}"
    return made_once(name, lambda folder: write_adapter(open_experts(expert_folder(family)), folder, settings, seed))


def loaded_logits(model, sources: list[AdapterSource | None], prompts=PROMPTS) -> list[Tensor]:
    loaded = LoadedAdapters(model, LIMITS)
    for source in {each.digest: each for each in sources if each is not None}.values():
        loaded.commit(loaded.prepare(source))
    return prompt_logits(model, prompts, loaded=loaded, digests=[0 if each is None else each.digest for each in sources])


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_peft(case: str):
    family, parameters = CASES[case]
    folder = adapter_of(family, parameters)
    theirs = PeftModel.from_pretrained(open_experts(expert_folder(family)), folder).eval()
    model, source = load_model(expert_folder(family)), read_adapter(folder)
    found = loaded_logits(model, [source] * len(PROMPTS))
    errors = [relative_error(ours, peft_logits(theirs, prompt)) for ours, prompt in zip(found, PROMPTS, strict=True)]
    plain = [relative_error(ours, peft_logits(theirs, prompt)) for ours, prompt in zip(prompt_logits(model, PROMPTS), PROMPTS, strict=True)]
    print(case, errors, plain)
    assert max(errors) < 1e-4
    assert min(plain) > 1e-2
