"""Adapters that PEFT writes, for a checkpoint folder: random matrices, B too, so that every adapted module changes."""

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from reference_models import open_reference
from run_folder import made_once


def peft_model(model_folder: Path, seed: int = 0, scale: float = 0.1, **config: Any) -> PeftModel:
    """transformers' model of the folder with an adapter: of all linear modules and rank 8, unless `config` differs."""
    arguments = {"r": 8, "target_modules": "all-linear", **config}
    model = get_peft_model(open_reference(model_folder), LoraConfig(**arguments))
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            size = scale if ".lora_B." in name else parameter.shape[-1] ** -0.5
            parameter.data.copy_(size * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def adapter_folder(model_folder: Path, name: str, seed: int = 0, scale: float = 0.1, **config: Any) -> Path:
    """The folder of such an adapter, written once a run."""

    def write(folder: Path) -> None:
        peft_model(model_folder, seed, scale, **config).save_pretrained(folder, save_embedding_layers=False)

    return made_once(f"adapter {model_folder.name} {name}", write)
