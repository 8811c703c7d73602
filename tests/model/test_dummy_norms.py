"""Dummy weights of norms, which are recognised by name, in every family."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from model_configs import spelled

from spmd_worker.model.layers.context import LayerContext
from spmd_worker.model.layers.delta_net import GatedNorm
from spmd_worker.model.layers.gated_streams import StreamNorm
from spmd_worker.model.layers.mamba import MambaNorm
from spmd_worker.model.layers.norm import FullNorm, HeadNorms, RMSNorm
from spmd_worker.model.registry import build_model
from spmd_worker.model.weights.dummy import mean_and_std
from spmd_worker.model_config.model_config import ENCODERS, FAMILIES, model_config_of
from spmd_worker.ops.attention.sdpa import SdpaBackend
from spmd_worker.ops.kernels.reference import ReferenceKernels
from spmd_worker.ranks.communicator import single_group

SIZES: dict[str, Any] = {
    "vocab_size": 300_000,
    "vocab_size_per_layer_input": 300_000,
    "hidden_size": 512,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 64,
    "num_key_value_heads": 32,
}


def norms_of(config: dict[str, Any]) -> tuple[dict[str, tuple[int, ...]], set[str]]:
    """Checkpoint names and shapes of the weights of norms, and the names of all others."""
    model_config = model_config_of(config, Path("config.json"))
    context = LayerContext(single_group(), ReferenceKernels(), SdpaBackend(), torch.float32, torch.device("meta"))
    model, norms, others = build_model(context, model_config), {}, set()
    for piece in model.weights.slices:
        module = model.get_submodule(piece.parameter_name.rpartition(".")[0])
        is_norm = isinstance(module, RMSNorm | FullNorm | HeadNorms | GatedNorm | MambaNorm | StreamNorm)
        if is_norm and not piece.checkpoint_name.endswith("bias"):
            norms[piece.checkpoint_name] = piece.checkpoint_shape
        else:
            others.add(piece.checkpoint_name)
    return norms, others


def configs_of_all_families() -> Iterator[tuple[str, dict[str, Any]]]:
    for architecture, family in FAMILIES.items():
        sizes = {**spelled(architecture, SIZES), "architectures": [architecture]}
        yield architecture, {"text_config": sizes, **sizes} if family.text is not None else sizes
    yield "StableLmForCausalLM", {**SIZES, "architectures": ["StableLmForCausalLM"], "qk_layernorm": True}
    for architecture in ENCODERS:
        yield architecture, {**SIZES, **ENCODERS[architecture].required, "architectures": [architecture]}


def test_dummy_norm_weights_are_recognised_in_all_families():
    for architecture, config in configs_of_all_families():
        norms, others = norms_of(config)
        for name, shape in norms.items():
            assert mean_and_std(name, shape) == (1.0, 0.1), (architecture, name)
        for name in others:
            is_factor = name.endswith((".layer_scalar", ".scale", ".per_expert_scale"))
            assert mean_and_std(name, (8, 8))[0] == float(is_factor), (architecture, name)
