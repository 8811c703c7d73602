"""PEFT folders of random adapters, written with safetensors alone, for any checkpoint folder.

Knows the names and shapes of a folder's tensors. Knows nothing of the runtime under test, nor of transformers.
"""

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from ranks import REPOSITORY
from run_folder import made_once
from safetensors import safe_open
from safetensors.torch import save_file

DEMO = REPOSITORY / "scripts" / "demo" / "model"
TARGETS = ("q_proj", "v_proj", "down_proj")
CONFIG: dict[str, Any] = {
    "peft_type": "LORA",
    "r": 4,
    "lora_alpha": 4,
    "target_modules": list(TARGETS),
    "bias": "none",
}
"""Content of adapter_config.json, unless rank and targets are given."""


def write_adapter(
    folder: Path, model: Path, seed: int, targets: Sequence[str] = TARGETS, rank: int = 4, scale: float = 0.5
) -> Path:
    """An adapter of `model` whose matrices follow from `seed`: large enough that greedy answers change."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors, config = adapter_tensors(model, seed, targets, rank, scale)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def write_lora(folder: Path, seed: int) -> str:
    """Path of an adapter of the demo model, written or overwritten."""
    return str(write_adapter(folder, DEMO, seed))


def lora_tensors(seed: int) -> dict[str, torch.Tensor]:
    """Tensors of the same adapter; `CONFIG` belongs to them."""
    return adapter_tensors(DEMO, seed)[0]


def demo_adapters(*names: str) -> dict[str, str]:
    """Folders of adapters of the demo model, by name, each written once a run. Names decide on their matrices."""
    return {name: str(made_once(f"adapter-{name}", partial(_write_demo, name))) for name in names}


def _write_demo(name: str, folder: Path) -> None:
    write_adapter(folder, DEMO, sum(name.encode()))


def write_prompt_adapter(folder: Path, width: int, num_tokens: int, seed: int, kind: str = "PROMPT_TUNING") -> Path:
    """A prompt adapter whose rows of `width` numbers follow from `seed`."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = torch.randn(num_tokens, width, generator=torch.Generator().manual_seed(seed))
    save_file({"prompt_embeddings": rows}, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": kind, "num_virtual_tokens": num_tokens}))
    return folder


def demo_prompt_adapters(**num_tokens: int) -> dict[str, str]:
    """Folders of prompt adapters of the demo model with so many virtual tokens, each written once a run."""
    made = {name: partial(write_prompt_adapter, width=128, num_tokens=num) for name, num in num_tokens.items()}
    return {
        name: str(made_once(f"prompt adapter {name} {num_tokens[name]}", partial(write, seed=sum(name.encode()))))
        for name, write in made.items()
    }


def adapter_tensors(
    model: Path, seed: int, targets: Sequence[str] = TARGETS, rank: int = 4, scale: float = 0.5
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Tensors by PEFT's names, and the content of adapter_config.json."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for path in sorted(model.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in sorted(file.keys()):
                module = name.removesuffix(".weight")
                if module.rpartition(".")[2] in targets:
                    num_out, num_in = file.get_slice(name).get_shape()
                    a = torch.randn(rank, num_in, generator=generator) * num_in**-0.5
                    b = torch.randn(num_out, rank, generator=generator) * scale
                    tensors[f"base_model.model.{module}.lora_A.weight"] = a
                    tensors[f"base_model.model.{module}.lora_B.weight"] = b
    assert tensors, (model, targets)
    return tensors, CONFIG | {"r": rank, "lora_alpha": rank, "target_modules": list(targets)}
