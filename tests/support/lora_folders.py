"""LoRA adapters for the demo's model (`scripts/demo/model`): PEFT folders and trainers' tensors, with random matrices.

Loading them needs neither PEFT nor transformers, so that engines in other processes start fast.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

HIDDEN, QUERIES, KEYS, LAYERS = 128, 128, 64, 4
"""Sizes of the model's query and value projections."""
WIDTHS = {"q_proj": QUERIES, "v_proj": KEYS}
CONFIG: dict[str, Any] = {"peft_type": "LORA", "r": 4, "lora_alpha": 16, "target_modules": list(WIDTHS), "bias": "none"}


def lora_tensors(seed: int) -> dict[str, Tensor]:
    """Tensors by the names of PEFT's file, large enough that greedy answers change."""
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) / shape[1] ** 0.5

    made = {}
    for layer in range(LAYERS):
        for module, width in WIDTHS.items():
            name = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            made[f"{name}.lora_A.weight"], made[f"{name}.lora_B.weight"] = noise(4, HIDDEN), noise(width, 4)
    return made


def write_lora(folder: Path, seed: int) -> str:
    """Write or overwrite a PEFT folder; returns its path."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(CONFIG))
    save_file(lora_tensors(seed), folder / "adapter_model.safetensors")
    return str(folder)
