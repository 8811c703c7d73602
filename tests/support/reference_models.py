"""Small random checkpoints in Hugging Face format, written by transformers, and what transformers computes with them.

`CHECKPOINTS` names one checkpoint for each way in which a family, its biases, heads, windows, rotary scaling, keys or
files can differ. A folder is written once a run. Weights are scaled so that logits depend on the whole context.
Knows nothing of the runtime under test.
"""

import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from run_folder import made_once
from tokenizer_folders import CHATML, write_byte_level
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCAB_SIZE = 211
EOS_TOKEN_ID = 5

# Head size 16, not a multiple of 64 in vocabulary or columns, and a length that a test can exceed.
_SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 90,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": EOS_TOKEN_ID,
    "pad_token_id": 0,
}

_CLASSES: dict[type[PreTrainedConfig], type[PreTrainedModel]] = {
    LlamaConfig: LlamaForCausalLM,
    MistralConfig: MistralForCausalLM,
    Qwen2Config: Qwen2ForCausalLM,
    Qwen3Config: Qwen3ForCausalLM,
}

Rewrite = Callable[[dict[str, Any]], None]
"""Changes the content of config.json as an older or hand-written one would differ."""


@dataclass(frozen=True, slots=True)
class CheckpointSpec:
    """One checkpoint: the config class, what differs from `_SIZES`, and how its files are written."""

    config_class: type[PreTrainedConfig]
    overrides: Mapping[str, Any] = field(default_factory=dict)
    rewrite: Rewrite | None = None
    max_shard_size: str = "1GB"


def _rope(rope_type: str, theta: float = 10000.0, **values: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": rope_type, "rope_theta": theta, **values}}


def _older_rope(config: dict[str, Any]) -> None:
    """`rope_theta` and `rope_scaling` with the key `type`, as configs were before `rope_parameters`."""
    scaling = config.pop("rope_parameters")
    config["rope_theta"] = scaling.pop("rope_theta")
    scaling["type"] = scaling.pop("rope_type")
    config["rope_scaling"] = scaling if scaling["type"] != "default" else None


def _older_rope_type(config: dict[str, Any]) -> None:
    """Llama 3.1's keys: `rope_scaling` next to `rope_theta`, but with `rope_type`."""
    _older_rope(config)
    config["rope_scaling"]["rope_type"] = config["rope_scaling"].pop("type")


def _without(*keys: str) -> Rewrite:
    def drop(config: dict[str, Any]) -> None:
        for key in keys:
            del config[key]

    return drop


_YARN = {"factor": 4.0, "original_max_position_embeddings": 64}
_LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}

CHECKPOINTS: dict[str, CheckpointSpec] = {
    "llama2": CheckpointSpec(LlamaConfig, {"num_key_value_heads": 4}),
    "llama3": CheckpointSpec(LlamaConfig, {**_rope("llama3", 500000.0, **_LLAMA3)}),
    "llama3_older_keys": CheckpointSpec(LlamaConfig, {**_rope("llama3", 50000.0, **_LLAMA3)}, _older_rope_type),
    "llama_tied": CheckpointSpec(LlamaConfig, {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    "llama_four_layers": CheckpointSpec(LlamaConfig, {"tie_word_embeddings": True, "num_hidden_layers": 4}),
    "llama_biased": CheckpointSpec(LlamaConfig, {"attention_bias": True, "mlp_bias": True}),
    "llama_head_dim": CheckpointSpec(LlamaConfig, {"head_dim": 24}),
    "llama_sharded": CheckpointSpec(LlamaConfig, max_shard_size="100KB"),
    "llama_older_theta": CheckpointSpec(LlamaConfig, {**_rope("default", 777.0)}, _older_rope),
    "llama_nine_heads": CheckpointSpec(
        LlamaConfig, {"hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 8}
    ),
    "linear": CheckpointSpec(LlamaConfig, {**_rope("linear", factor=3.0)}),
    "linear_older_keys": CheckpointSpec(LlamaConfig, {**_rope("linear", factor=3.0)}, _older_rope),
    "dynamic": CheckpointSpec(LlamaConfig, {**_rope("dynamic", factor=4.0), "max_position_embeddings": 48}),
    "dynamic_older_keys": CheckpointSpec(
        LlamaConfig, {**_rope("dynamic", factor=4.0), "max_position_embeddings": 48}, _older_rope
    ),
    "yarn": CheckpointSpec(LlamaConfig, {**_rope("yarn", **_YARN)}),
    "yarn_not_truncated": CheckpointSpec(LlamaConfig, {**_rope("yarn", truncate=False, **_YARN)}),
    "yarn_attention_factor": CheckpointSpec(LlamaConfig, {**_rope("yarn", attention_factor=0.7, **_YARN)}),
    "yarn_mscale": CheckpointSpec(LlamaConfig, {**_rope("yarn", mscale=0.9, mscale_all_dim=0.4, **_YARN)}),
    "yarn_betas": CheckpointSpec(LlamaConfig, {**_rope("yarn", beta_fast=8.0, beta_slow=2.0, **_YARN)}),
    "yarn_older_keys": CheckpointSpec(Qwen2Config, {**_rope("yarn", 1000000.0, **_YARN)}, _older_rope),
    "mistral": CheckpointSpec(MistralConfig, {"sliding_window": 13}),
    "mistral_no_window": CheckpointSpec(MistralConfig, {"sliding_window": None, "head_dim": 32}),
    "qwen2": CheckpointSpec(Qwen2Config, {**_rope("default", 1000000.0)}),
    "qwen2_tied": CheckpointSpec(Qwen2Config, {"tie_word_embeddings": True}),
    "qwen2_window": CheckpointSpec(
        Qwen2Config, {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}
    ),
    "qwen2_window_older_keys": CheckpointSpec(
        Qwen2Config,
        {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 2},
        _without("layer_types"),
    ),
    "qwen2_window_unused": CheckpointSpec(
        Qwen2Config, {"use_sliding_window": False, "sliding_window": 9, "max_window_layers": 1}
    ),
    "qwen3": CheckpointSpec(Qwen3Config, {"head_dim": 32}),
    "qwen3_tied": CheckpointSpec(Qwen3Config, {"head_dim": 32, "tie_word_embeddings": True}),
    "qwen3_biased_window": CheckpointSpec(
        Qwen3Config,
        {
            "head_dim": 16,
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 7,
            "max_window_layers": 1,
        },
    ),
}


@cache
def checkpoint_folder(name: str) -> Path:
    """The folder of the checkpoint of this name: written once a run, by whichever test process asks for it first."""
    return made_once(name, lambda folder: write_checkpoint(folder, CHECKPOINTS[name]))


def write_checkpoint(folder: Path, spec: CheckpointSpec, seed: int = 0) -> Path:
    """Write a checkpoint with random float32 weights; the same seed gives the same weights."""
    config = spec.config_class(**{**_SIZES, **spec.overrides})
    model = _CLASSES[spec.config_class](config).float()
    fill(model, torch.Generator().manual_seed(1000 + seed))
    model.generation_config = GenerationConfig(
        bos_token_id=1, eos_token_id=EOS_TOKEN_ID, pad_token_id=0, do_sample=False
    )
    model.save_pretrained(folder, max_shard_size=spec.max_shard_size)
    if spec.rewrite is not None:
        edit_config(folder, spec.rewrite)
    return folder


def write_text_checkpoint(folder: Path) -> Path:
    """A Llama of 320 ids with a byte-level tokenizer and a chat template."""
    write_checkpoint(folder, CheckpointSpec(LlamaConfig, {"vocab_size": 320}))
    return write_byte_level(folder, chat_template=CHATML)


def edit_config(folder: Path, rewrite: Rewrite) -> None:
    """Change config.json in place."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    rewrite(config)
    path.write_text(json.dumps(config, indent=2))


@torch.no_grad()
def fill(model: PreTrainedModel, generator: torch.Generator) -> None:
    """Matrices ~ N(0, 1 / fan_in), embeddings small, norms near 1: no part of the context drowns the others."""
    for name, parameter in sorted(model.named_parameters()):
        noise = torch.randn(parameter.shape, generator=generator)
        if name.endswith("norm.weight"):
            parameter.copy_(1 + 0.1 * noise)
        elif "embed_tokens" in name or "lm_head" in name:
            parameter.copy_(0.05 * noise)
        elif parameter.dim() == 1:
            parameter.copy_(0.3 * noise)
        else:
            parameter.copy_(noise / parameter.shape[1] ** 0.5)


@cache
def reference_model(name: str) -> PreTrainedModel:
    """transformers' model of the checkpoint, in float32, with the attention that is plain matrix products."""
    return open_reference(checkpoint_folder(name))


def open_reference(folder: Path, attention: str = "eager") -> PreTrainedModel:
    """transformers' model of a folder."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation=attention)
    return model.eval()


def number_of_parameters(folder: Path) -> int:
    """transformers' own, of a model without memory; some of its buffers are tensors of the files."""
    config = AutoConfig.from_pretrained(folder)
    config = getattr(config, "text_config", config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    named = [each for key, each in model.named_buffers() if key.endswith(("e_score_correction_bias", "layer_scalar"))]
    return sum(each.numel() for each in (*model.parameters(), *named))


def without_defaults(config: Mapping[str, Any], defaults: Mapping[str, Any], *kept: str) -> dict[str, Any]:
    """The keys whose value is not the default, and those that a config.json always has, or that are kept."""
    kept = ("architectures", "model_type", *kept)
    return {key: value for key, value in config.items() if key in kept or value != defaults.get(key)}


@torch.no_grad()
def reference_logits(model: PreTrainedModel, prompt: list[int]) -> torch.Tensor:
    """Float32 [tokens, vocabulary]: the logits after each token of one prompt, computed alone."""
    forget_rotary_state(model)
    return model(torch.tensor([prompt]), use_cache=False).logits[0].float()


@torch.no_grad()
def their_logits(model: Any, rows: list[list[int]]) -> list[torch.Tensor]:
    """`reference_logits` of rows, each alone, by a model whose ropes have no state."""
    return [model(torch.tensor([row]), use_cache=False).logits[0].float() for row in rows]


@dataclass(frozen=True, eq=False)
class Oracle:
    """Logits of transformers for rows, with the model of a case; by the case's name."""

    open_model: Callable[[str], Any]
    rows: list[list[int]]
    tolerance: float = 1e-4

    @cache  # noqa: B019  # one a module, for the whole run
    def expected(self, name: str) -> list[torch.Tensor]:
        """Logits of the rows."""
        return their_logits(self.open_model(name), self.rows)

    def worst_error(self, name: str, logits: list[torch.Tensor]) -> float:
        """The largest `relative_error` of the first rows' logits."""
        return max(map(relative_error, logits, self.expected(name)))

    def is_right(self, name: str, logits: list[torch.Tensor]) -> bool:
        """Whether the logits of the first rows are transformers'."""
        return self.worst_error(name, logits) < self.tolerance


@torch.no_grad()
def reference_greedy(model: PreTrainedModel, prompt: list[int], num_tokens: int, *, stops: bool = False) -> list[int]:
    """Ids that `generate` appends to one prompt, alone, with its own cache; up to the end of sequence if it `stops`."""
    forget_rotary_state(model)
    output = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        max_new_tokens=num_tokens,
        do_sample=False,
        eos_token_id=EOS_TOKEN_ID if stops else None,
        pad_token_id=0,
    )
    return output[0, len(prompt) :].tolist()


@torch.no_grad()
def greedy_without_cache(model: Any, prompt: list[int], num_tokens: int) -> list[int]:
    """Ids after a prompt by one definition for all tokens: decode of some classes has another."""
    ids = list(prompt)
    for _ in range(num_tokens):
        ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[len(prompt) :]


@torch.no_grad()
def reference_greedy_batch(model: PreTrainedModel, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
    """`generate` for prompts of mixed length at once, padded on the left. Not for rotary scalings that have state."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    model.generation_config.eos_token_id = None
    output = model.generate(
        ids, attention_mask=mask, max_new_tokens=num_tokens, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    return output[:, longest:].tolist()


def forget_rotary_state(model: PreTrainedModel) -> None:
    """transformers' dynamic scaling remembers the longest input it has seen; ours knows one row at a time."""
    model.model.rotary_emb = type(model.model.rotary_emb)(config=model.config)


def stateless(model: Any) -> Any:
    """The model without dynamic ropes, whose state `reference_greedy` resets."""
    shown = SimpleNamespace(config=None, generate=model.generate)
    shown.model = SimpleNamespace(rotary_emb=_Stateless())
    return shown


class _Stateless:
    def __init__(self, config: Any = None) -> None:
        pass


def random_prompt(length: int, seed: int, vocab_size: int = VOCAB_SIZE) -> list[int]:
    """Token ids from 10 on, so that special ids do not end anything by chance."""
    generator = random.Random(f"{seed}:{length}")
    return [generator.randrange(10, vocab_size) for _ in range(length)]


def mixed_prompts(count: int, longest: int, seed: int = 0) -> list[list[int]]:
    """Prompts of 1 to `longest` tokens, in no order of length."""
    generator = random.Random(f"lengths:{seed}")
    return [random_prompt(generator.randint(1, longest), seed * 1000 + index) for index in range(count)]


def relative_error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """The largest difference, as a share of the largest magnitude of the reference."""
    assert ours.shape == theirs.shape, (ours.shape, theirs.shape)
    return float((ours.double() - theirs.double()).abs().max() / theirs.abs().max())
