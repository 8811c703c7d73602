"""Small random model folders that pool, written by transformers, and what transformers and plain torch make of them.

`FOLDERS` has one for each way in which a folder says how its rows are pooled. Knows nothing of the runtime under test.
"""

import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from json_files import edit
from reference_models import fill, random_prompt
from run_folder import made_once
from safetensors.torch import load_file, save_file
from tokenizer_folders import write_byte_level
from torch.nn import functional as F
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    GPTNeoXConfig,
    GPTNeoXForTokenClassification,
    LlamaConfig,
    LlamaForSequenceClassification,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3ForSequenceClassification,
    Qwen3ForTokenClassification,
    Qwen3Model,
)

SIZES: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 2,
    "pad_token_id": None,
}
DENSE_SIZE = 24
_SHARED = random_prompt(40, 1)
PROMPTS = [_SHARED, [17, 40, 5], [*_SHARED[:35], 9, 33], [12], random_prompt(60, 2), [*_SHARED, *_SHARED[:21]]]
# The longest row takes 16 blocks of 4, all of them four times as many.
SETTINGS: dict[str, Any] = {"device": "cpu", "num_blocks": 80, "block_size": 4, "max_model_len": 64}
SMALL_STEPS = {"max_num_batched_tokens": 16, "max_num_seqs": 6}
WAYS: dict[str, dict[str, Any]] = {
    "in chunks": {"max_num_batched_tokens": 7, "max_num_seqs": 4},
    "one by one": {"max_num_seqs": 1},
    "recomputed": {"num_blocks": 24, "preemption_mode": "recompute", **SMALL_STEPS},
    "swapped": {"num_blocks": 24, "preemption_mode": "swap", "swap_space": 0.01, **SMALL_STEPS},
    "without a cache of prefixes": {"enable_prefix_caching": False},
}


def _write(folder: Path, model_class: Any, config_class: Any, **settings: Any) -> None:
    torch.manual_seed(7)
    model = model_class(config_class(**{**SIZES, **settings}))
    fill(model, torch.Generator().manual_seed(11))
    model.save_pretrained(folder)
    write_byte_level(folder)


def write_modules(folder: Path, pooling: dict[str, Any], *kinds: str, **sentence: Any) -> None:
    """The files of sentence-transformers, with what its releases write."""
    modules = [
        ("", "Transformer"),
        ("1_Pooling", "Pooling"),
        *[(f"{i}_{kind}", kind) for i, kind in enumerate(kinds, 2)],
    ]
    listed = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (path, kind) in enumerate(modules)
    ]
    (folder / "modules.json").write_text(json.dumps(listed))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    settings = {"word_embedding_dimension": SIZES["hidden_size"], **pooling}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(settings))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"do_lower_case": False, **sentence}))
    size, generator = SIZES["hidden_size"], torch.Generator().manual_seed(3)
    for number, kind in enumerate(kinds, 2):
        if kind != "Dense":
            continue
        inside = folder / f"{number}_Dense"
        inside.mkdir(exist_ok=True)
        settings = {
            "in_features": size,
            "out_features": DENSE_SIZE,
            "bias": True,
            "activation_function": "torch.nn.modules.activation.Tanh",
        }
        (inside / "config.json").write_text(json.dumps(settings))
        weight = torch.randn(DENSE_SIZE, size, generator=generator) / size**0.5
        save_file(
            {"linear.weight": weight, "linear.bias": torch.randn(DENSE_SIZE, generator=generator)},
            inside / "model.safetensors",
        )
        size = DENSE_SIZE


def _causal(folder: Path) -> None:
    _write(folder, Qwen3ForCausalLM, Qwen3Config, tie_word_embeddings=True)


def _untied(folder: Path) -> None:
    _write(folder, Qwen3ForCausalLM, Qwen3Config, tie_word_embeddings=False)


def _mean(folder: Path) -> None:
    _causal(folder)
    write_modules(folder, {"pooling_mode_mean_tokens": True, "pooling_mode_lasttoken": False}, max_seq_length=100)


def _cls(folder: Path) -> None:
    _write(folder, Qwen3Model, Qwen3Config)
    write_modules(folder, {"pooling_mode": "cls"})


def _last(folder: Path) -> None:
    _causal(folder)
    edit(folder / "config.json", matryoshka_dimensions=[16, 32])
    write_modules(folder, {"pooling_mode_lasttoken": True}, "Normalize")


def _dense(folder: Path) -> None:
    _causal(folder)
    write_modules(folder, {"pooling_mode_mean_tokens": True}, "Dense", "Normalize")


def _labels(folder: Path) -> None:
    _write(folder, Qwen3ForSequenceClassification, Qwen3Config, num_labels=3)


def _reward(folder: Path) -> None:
    _write(folder, LlamaForSequenceClassification, LlamaConfig, num_labels=1)


def _tokens(folder: Path) -> None:
    _write(folder, Qwen3ForTokenClassification, Qwen3Config, num_labels=5)


def _neox_tokens(folder: Path) -> None:
    _write(folder, GPTNeoXForTokenClassification, GPTNeoXConfig, num_labels=3)


def _steps(folder: Path) -> None:
    """Qwen2.5-Math-PRM: the backbone, and its own head, of which transformers has no class."""
    _write(folder, Qwen2ForCausalLM, Qwen2Config)
    tensors = load_file(folder / "model.safetensors")
    generator, size = torch.Generator().manual_seed(5), SIZES["hidden_size"]
    for name, num_outputs in (("score.0", size), ("score.2", 2)):
        tensors[f"{name}.weight"] = torch.randn(num_outputs, size, generator=generator) / size**0.5
        tensors[f"{name}.bias"] = torch.randn(num_outputs, generator=generator)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    edit(folder / "config.json", architectures=["Qwen2ForProcessRewardModel"])


FOLDERS: dict[str, Callable[[Path], None]] = {
    "causal": _causal,
    "untied": _untied,
    "mean": _mean,
    "cls": _cls,
    "last": _last,
    "dense": _dense,
    "labels": _labels,
    "reward": _reward,
    "tokens": _tokens,
    "neox_tokens": _neox_tokens,
    "steps": _steps,
}


def pooling_folder(name: str) -> Path:
    """The folder of this name, written once a run."""
    return made_once(f"pooling-{name}", FOLDERS[name])


def change_of(name: str) -> float:
    """Factor of the weights of this name in a changed model."""
    return (-0.5, 1.25, 0.75)[len(name) % 3]


def changed_tensors(name: str) -> dict[str, torch.Tensor]:
    """Change every weight of the folder of this name."""
    tensors = load_file(pooling_folder(name) / "model.safetensors")
    return {key: tensor * change_of(key) for key, tensor in tensors.items()}


def changed_folder(name: str) -> Path:
    """The folder of this name with `changed_tensors`, written once a run."""

    def write(folder: Path) -> None:
        shutil.copytree(pooling_folder(name), folder, dirs_exist_ok=True)
        save_file(changed_tensors(name), folder / "model.safetensors", {"format": "pt"})

    return made_once(f"pooling-{name}-changed", write)


@cache
def _backbone(name: str) -> Any:
    return AutoModel.from_pretrained(pooling_folder(name), dtype=torch.float32).eval()


@torch.no_grad()
def hidden_states(name: str, prompt: list[int]) -> torch.Tensor:
    """[T, H] of transformers' backbone, of a row alone and without padding."""
    return _backbone(name)(torch.tensor([prompt])).last_hidden_state[0]


@torch.no_grad()
def reference_vector(name: str, prompt: list[int], dimensions: int | None = None) -> torch.Tensor:
    """sentence-transformers' modules, computed by hand."""
    states = hidden_states(name, prompt)
    x = {"cls": states[0], "mean": states.mean(0), "dense": states.mean(0)}.get(name, states[-1])
    if name == "dense":
        linear = torch.nn.Linear(SIZES["hidden_size"], DENSE_SIZE)
        linear.load_state_dict({key.removeprefix("linear."): value for key, value in _dense_weights().items()})
        x = torch.tanh(linear(x))
    x = x if dimensions is None else x[:dimensions]
    return F.normalize(x, dim=0) if name in ("last", "dense", "causal", "untied") else x


def _dense_weights() -> dict[str, torch.Tensor]:
    return load_file(pooling_folder("dense") / "2_Dense" / "model.safetensors")


@torch.no_grad()
def reference_logits_of_labels(name: str, prompt: list[int]) -> torch.Tensor:
    """[labels] of `AutoModelForSequenceClassification`, of a row alone and without padding."""
    model = AutoModelForSequenceClassification.from_pretrained(pooling_folder(name), dtype=torch.float32).eval()
    return model(torch.tensor([prompt])).logits[0]


@torch.no_grad()
def reference_logits_of_tokens(name: str, prompt: list[int]) -> torch.Tensor:
    """[tokens, labels] of `AutoModelForTokenClassification`, of a row alone; a process reward model's head is computed
    as Qwen's file defines it: linear, ReLU, linear.
    """
    if name == "steps":
        weights = load_file(pooling_folder(name) / "model.safetensors")
        states = hidden_states(name, prompt)
        states = F.relu(F.linear(states, weights["score.0.weight"], weights["score.0.bias"]))
        return F.linear(states, weights["score.2.weight"], weights["score.2.bias"])
    model = AutoModelForTokenClassification.from_pretrained(pooling_folder(name), dtype=torch.float32).eval()
    return model(torch.tensor([prompt])).logits[0]


@torch.no_grad()
def reference_difference(name: str, prompt: list[int], no: int, yes: int) -> torch.Tensor:
    """Score of two tokens, as Qwen3-Reranker's model card computes it."""
    model = AutoModelForCausalLM.from_pretrained(pooling_folder(name), dtype=torch.float32).eval()
    logits = model(torch.tensor([prompt])).logits[0, -1]
    return logits[yes] - logits[no]
