"""LoRA adapters made by PEFT for small checkpoints, and the logits of PEFT's model with them.

Matrices B are random, not zero. Knows nothing of the runtime under test.
"""

from functools import cache
from pathlib import Path
from typing import Any

import torch
from family_checkpoints import family_folder
from peft import LoraConfig, PeftModel, get_peft_model
from reference_models import open_reference
from run_folder import made_once
from torch import Tensor

Settings = tuple[tuple[str, Any], ...]
"""Arguments of LoraConfig."""


def write_adapter(base: Path, folder: Path, settings: Settings, seed: int = 0) -> None:
    """An adapter with random matrices for the checkpoint `base`."""
    options = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", **dict(settings)}
    model = get_peft_model(open_reference(base), LoraConfig(**options))
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in sorted(model.named_parameters()):
        if "lora_" in name:
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.data.copy_(noise / (2 * parameter.shape[1]) ** 0.5)
    model.save_pretrained(folder)


@cache
def adapter_folder(family: str, settings: Settings = (), seed: int = 0) -> Path:
    """The PEFT folder of such an adapter for a case of `family_checkpoints`; written once a run."""
    base = family_folder(family)
    return made_once(f"adapter {family} {settings} {seed}", lambda folder: write_adapter(base, folder, settings, seed))


@cache
def peft_model(family: str, settings: Settings = (), seed: int = 0) -> PeftModel:
    """PEFT's model with the adapter."""
    return PeftModel.from_pretrained(
        open_reference(family_folder(family)), adapter_folder(family, settings, seed)
    ).eval()


@torch.no_grad()
def peft_logits(model: PeftModel, prompt: list[int]) -> Tensor:
    """Float32 [tokens, vocabulary]."""
    return model(torch.tensor([prompt]), use_cache=False).logits[0].float()
