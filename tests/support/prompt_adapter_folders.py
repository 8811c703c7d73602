"""Prompt adapters made by PEFT for small checkpoints, and what PEFT computes with them.

Knows nothing of the runtime under test.
"""

from functools import cache
from pathlib import Path

import torch
from peft import (
    PeftModel,
    PrefixTuningConfig,
    PromptEncoderConfig,
    PromptTuningConfig,
    TaskType,
    get_peft_model,
)
from reference_models import open_reference
from run_folder import made_once
from torch import Tensor

CONFIGS = {"prompt": PromptTuningConfig, "p": PromptEncoderConfig, "prefix": PrefixTuningConfig}


def write_prompt_adapter(base: Path, folder: Path, kind: str, num_tokens: int, seed: int = 0) -> None:
    """An adapter with random numbers of the size of embeddings, and of keys and values."""
    torch.manual_seed(seed)
    config = CONFIGS[kind](task_type=TaskType.CAUSAL_LM, num_virtual_tokens=num_tokens)
    model = get_peft_model(open_reference(base), config)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in sorted(model.named_parameters()):
        if "prompt_encoder" in name:
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * (0.3 if kind == "p" else 0.7))
    model.save_pretrained(folder)


@cache
def prompt_adapter_folder(base: Path, kind: str, num_tokens: int, seed: int = 0) -> Path:
    """The PEFT folder of such an adapter; written once a run."""
    name = f"{kind} tuning {base.name} {num_tokens} {seed}"
    return made_once(name, lambda folder: write_prompt_adapter(base, folder, kind, num_tokens, seed))


@cache
def tuned_model(base: Path, kind: str, num_tokens: int, seed: int = 0) -> PeftModel:
    return PeftModel.from_pretrained(open_reference(base), prompt_adapter_folder(base, kind, num_tokens, seed)).eval()


@torch.no_grad()
def tuned_greedy(model: PeftModel, prompt: list[int], num_tokens: int) -> tuple[list[int], Tensor]:
    """Greedy ids after a prompt, and their log-probabilities, each from a complete pass."""
    ids, logprobs = list(prompt), []
    # A cache is what prefix tuning passes its keys and values in.
    uses_cache = model.peft_config["default"].peft_type == "PREFIX_TUNING"
    for _ in range(num_tokens):
        logits = model(torch.tensor([ids]), use_cache=uses_cache).logits[0, -1].float()
        ids.append(int(logits.argmax()))
        logprobs.append(logits.log_softmax(-1)[ids[-1]])
    return ids[len(prompt) :], torch.stack(logprobs)
