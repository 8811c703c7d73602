"""LoRA adapters made by PEFT for small checkpoints, and the logits of PEFT's model with them.

Matrices B are random, not zero. Knows nothing of the runtime under test.
"""

from pathlib import Path
from typing import Any

import torch
from family_checkpoints import WITH_IMAGES, family_folder, family_reference
from peft import LoraConfig, PeftModel, get_peft_model
from reference_models import open_reference
from run_folder import made_once
from torch import Tensor
from transformers import PreTrainedModel

Settings = tuple[tuple[str, Any], ...]
"""Arguments of LoraConfig."""


def new_reference(family: str) -> PreTrainedModel:
    """transformers' model of a case, which PEFT changes in place."""
    if family in WITH_IMAGES:
        return family_reference.__wrapped__(family)
    return open_reference(family_folder(family))


def write_adapter(base: PreTrainedModel, folder: Path, settings: Settings, seed: int = 0) -> None:
    """An adapter with random matrices for a model, which is changed."""
    options = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", **dict(settings)}
    targets = options["target_modules"]
    options["target_modules"] = list(targets) if isinstance(targets, tuple) else targets
    model = get_peft_model(base, LoraConfig(**options))
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in sorted(model.named_parameters()):
        if "lora_" in name:
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.data.copy_(noise / (2 * parameter.shape[1]) ** 0.5)
    model.save_pretrained(folder)


def adapter_folder(family: str, settings: Settings = (), seed: int = 0) -> Path:
    """The PEFT folder of such an adapter for a case of `family_checkpoints`; written once a run."""
    name = f"adapter {family} {settings} {seed}"
    return made_once(name, lambda folder: write_adapter(new_reference(family), folder, settings, seed))


def peft_model(family: str, settings: Settings = (), seed: int = 0) -> PeftModel:
    """PEFT's model with the adapter."""
    return PeftModel.from_pretrained(new_reference(family), adapter_folder(family, settings, seed)).eval()


@torch.no_grad()
def peft_logits(model: PeftModel, prompt: list[int]) -> Tensor:
    """Float32 [tokens, vocabulary]."""
    return model(input_ids=torch.tensor([prompt]), use_cache=False).logits[0].float()
