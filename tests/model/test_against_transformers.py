"""Our logits equal transformers' for every family, rotary scaling and layout of files.

Float32, 1e-4 of the largest logit: prompts of several lengths in one batch, whole, in chunks, and token by token. Each
part of a model is also broken on purpose, which the same comparison must see.
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from model_configs import with_norms, with_ropes, with_windows
from our_model import load_model, prompt_logits
from reference_models import (
    CHECKPOINTS,
    CheckpointSpec,
    LlamaConfig,
    checkpoint_folder,
    open_reference,
    random_prompt,
    reference_logits,
    reference_model,
    relative_error,
    write_checkpoint,
)
from safetensors.torch import load_file, save_file

from spmd_worker.model_config.model_config import ModelConfig, RopeParameters, read_model_files

TOLERANCE = 1e-4
# Around the block size of 16, beyond every window, and (the last) beyond the 48 positions of the dynamic checkpoints.
LENGTHS = (1, 2, 15, 16, 17, 40, 150)
PROMPTS = [random_prompt(length, seed=7) for length in LENGTHS]


def worst_error(name: str, logits: list[torch.Tensor]) -> float:
    """The maximum over the prompts; positions of a prompt are compared together."""
    reference = reference_model(name)
    return max(
        relative_error(ours, reference_logits(reference, prompt)) for prompt, ours in zip(PROMPTS, logits, strict=True)
    )


@pytest.mark.guarantee("Models compute what transformers computes")
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_logits_of_a_mixed_batch_are_transformers(name: str):
    logits = prompt_logits(load_model(checkpoint_folder(name)), PROMPTS)
    assert worst_error(name, logits) < TOLERANCE


@pytest.mark.gate("*-7", "mistral-16", "yarn-16", "mistral-1")
@pytest.mark.parametrize("chunk", [1, 7, 16])
@pytest.mark.parametrize("name", ["llama3", "dynamic", "yarn", "mistral", "qwen2_window", "qwen3_biased_window"])
def test_logits_computed_in_chunks_are_transformers(name: str, chunk: int):
    logits = prompt_logits(load_model(checkpoint_folder(name)), PROMPTS, chunk)
    assert worst_error(name, logits) < TOLERANCE


def test_checkpoints_are_written_as_named():
    """Otherwise older keys and sharded files would be tested by name only."""
    assert (checkpoint_folder("llama_sharded") / "model.safetensors.index.json").exists()
    assert (checkpoint_folder("llama2") / "model.safetensors").exists()
    for name in CHECKPOINTS:
        config = json.loads((checkpoint_folder(name) / "config.json").read_text())
        is_older = "_older_" in name and "window" not in name
        assert ("rope_theta" in config) == is_older, name
        assert ("rope_parameters" in config) != is_older, name
    for name, key in (("linear_older_keys", "type"), ("yarn_older_keys", "type"), ("llama3_older_keys", "rope_type")):
        assert key in json.loads((checkpoint_folder(name) / "config.json").read_text())["rope_scaling"]


Break = Callable[[ModelConfig], ModelConfig]


def _rope(**changes: object) -> Break:
    return lambda model_config: with_ropes(model_config, **changes)


def _plain_rope(model_config: ModelConfig) -> ModelConfig:
    (rope,) = model_config.ropes
    return replace(model_config, ropes=(RopeParameters(rope.size, rope_theta=rope.rope_theta),))


def _windows(*windows: int) -> Break:
    return lambda model_config: with_windows(model_config, *windows)


BREAKS: list[tuple[str, str, Break]] = [
    ("llama2", "another base", _rope(rope_theta=9000.0)),
    ("llama2", "another epsilon", lambda model_config: with_norms(model_config, eps=1e-3)),
    ("llama2", "a window", _windows(0, 0, 149)),
    ("llama3", "no scaling", _plain_rope),
    ("llama3", "another original length", _rope(original_max_position_embeddings=63)),
    ("llama3", "another high frequency factor", _rope(high_freq_factor=3.9)),
    ("llama3", "another low frequency factor", _rope(low_freq_factor=1.1)),
    ("llama3_older_keys", "no scaling", _plain_rope),
    ("llama_older_theta", "the default base", _rope(rope_theta=10000.0)),
    ("linear", "no scaling", _plain_rope),
    ("linear_older_keys", "no scaling", _plain_rope),
    ("dynamic", "no scaling", _plain_rope),
    ("dynamic", "another factor", _rope(factor=3.9)),
    (
        "dynamic",
        "another length before scaling",
        lambda model_config: replace(model_config, max_position_embeddings=49),
    ),
    ("dynamic_older_keys", "no scaling", _plain_rope),
    ("yarn", "no scaling", _plain_rope),
    ("yarn", "no amplitude", _rope(attention_factor=1.0)),
    ("yarn", "not truncated", _rope(truncate=False)),
    ("yarn", "other betas", _rope(beta_fast=8.0, beta_slow=2.0)),
    ("yarn_not_truncated", "truncated", _rope(truncate=True)),
    ("yarn_attention_factor", "derived amplitude", _rope(attention_factor=None)),
    ("yarn_mscale", "mscale unread", _rope(mscale=None)),
    ("yarn_older_keys", "no scaling", _plain_rope),
    ("mistral", "no window", _windows(0, 0, 0)),
    ("mistral", "a window one wider", _windows(14, 14, 14)),
    ("mistral", "a window one narrower", _windows(12, 12, 12)),
    ("qwen2_window", "a window in every layer", _windows(9, 9, 9)),
    ("qwen2_window", "a window too late", _windows(0, 0, 9)),
    ("qwen2_window_older_keys", "no window", _windows(0, 0, 0)),
    ("qwen2_window_unused", "the window that is not to be used", _windows(0, 9, 9)),
]


@pytest.mark.parametrize(("name", "what", "break_it"), BREAKS, ids=[f"{name}: {what}" for name, what, _ in BREAKS])
def test_comparison_detects_wrongly_read_model(name: str, what: str, break_it: Break):
    folder = checkpoint_folder(name)
    logits = prompt_logits(load_model(folder, break_it(read_model_files(folder).model_config)), PROMPTS)
    assert worst_error(name, logits) > TOLERANCE, what


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("llama_biased", "model.layers.1.self_attn.q_proj.bias"),
        ("llama_biased", "model.layers.1.self_attn.o_proj.bias"),
        ("llama_biased", "model.layers.1.mlp.gate_proj.bias"),
        ("llama_biased", "model.layers.1.mlp.down_proj.bias"),
        ("qwen2", "model.layers.2.self_attn.v_proj.bias"),
        ("qwen3", "model.layers.0.self_attn.q_norm.weight"),
        ("qwen3", "model.layers.0.self_attn.k_norm.weight"),
        ("llama2", "model.norm.weight"),
        ("llama2", "lm_head.weight"),
        ("llama_tied", "model.embed_tokens.weight"),
    ],
)
def test_comparison_detects_one_tensor_off_by_one_percent(name: str, tensor: str, tmp_path: Path):
    folder = tmp_path / name
    shutil.copytree(checkpoint_folder(name), folder)
    tensors = load_file(folder / "model.safetensors")
    tensors[tensor] *= 1.01
    save_file(tensors, folder / "model.safetensors")
    assert worst_error(name, prompt_logits(load_model(folder), PROMPTS)) > TOLERANCE


@pytest.mark.parametrize("name", ["llama3", "qwen2", "qwen3", "mistral_no_window"])
def test_last_logits_depend_on_first_token(name: str):
    """Otherwise the comparisons above could not detect a lost context."""
    reference, prompt = reference_model(name), PROMPTS[-1]
    other = [prompt[0] ^ 1, *prompt[1:]]
    first, second = reference_logits(reference, prompt)[-1], reference_logits(reference, other)[-1]
    assert relative_error(first, second) > 100 * TOLERANCE


def test_window_hides_earlier_tokens():
    """Three layers of 13 tokens look back 36: the token before makes no difference, the one after does."""
    model = load_model(checkpoint_folder("mistral"))
    prompt = PROMPTS[-1]
    last = prompt_logits(model, [prompt])[0][-1]
    outside = [*prompt[:-38], prompt[-38] ^ 1, *prompt[-37:]]
    inside = [*prompt[:-37], prompt[-37] ^ 1, *prompt[-36:]]
    assert torch.equal(prompt_logits(model, [outside])[0][-1], last)
    assert relative_error(prompt_logits(model, [inside])[0][-1], last) > 0


def test_bfloat16_checkpoint_is_upcast_exactly(tmp_path: Path):
    folder = write_checkpoint(tmp_path, CheckpointSpec(LlamaConfig), seed=3)
    reference = open_reference(folder).to(torch.bfloat16)
    reference.save_pretrained(folder)
    logits = prompt_logits(load_model(folder), PROMPTS)
    expected = [reference_logits(reference.float(), prompt) for prompt in PROMPTS]
    assert max(map(relative_error, logits, expected)) < TOLERANCE
