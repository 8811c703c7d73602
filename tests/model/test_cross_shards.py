"""Decoders with encoders on ranks: the plan's bytes are those of the layers, and ranks read every tensor once.

Pure arithmetic: parameters have no storage. Without the encoder itself, which every rank of the first stage has.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from spmd_worker.model.decoder import DecoderForCausalLM
from spmd_worker.model.layers.context import LayerContext
from spmd_worker.model.registry import build_model
from spmd_worker.model_config.model_config import ModelConfig, model_config_of
from spmd_worker.ops.attention.sdpa import SdpaBackend
from spmd_worker.ops.kernels.reference import ReferenceKernels
from spmd_worker.ranks.communicator import GroupHandle
from spmd_worker.ranks.topology import RankLayout, stage_of
from spmd_worker.worker.memory.estimate import weights_bytes

_SIZES: dict[str, Any] = {"vocab_size": 211, "d_model": 64, "d_kv": 24, "d_ff": 96, "num_heads": 8, "num_layers": 3}
_SIZES |= {"decoder_layers": 3, "decoder_attention_heads": 8, "decoder_ffn_dim": 96, "decoder_start_token_id": 3}
_SIZES |= {"encoder_layers": 1, "encoder_attention_heads": 8, "encoder_ffn_dim": 96, "feed_forward_proj": "gated-gelu"}
ARCHITECTURES = [f"{each}ForConditionalGeneration" for each in ("Bart", "Whisper", "T5")]
LAYOUTS = [RankLayout(1), RankLayout(4), RankLayout(2, 3)]
HELD_BY_ALL = ("norm", "embed_positions", "out_proj.bias", "fc2.bias")


def decoder(architecture: str) -> ModelConfig:
    config = model_config_of({"architectures": [architecture], **_SIZES}, Path("config.json"))
    return replace(config, encoder_part=None)


def models(config: ModelConfig, layout: RankLayout) -> list[DecoderForCausalLM]:
    """Of each rank, in bfloat16."""
    found = []
    for rank in range(layout.world_size):
        size = layout.tensor_parallel_size
        group = GroupHandle(ranks=tuple(range(size)), rank=layout.tensor_rank(rank), group=None)
        context = LayerContext(group, ReferenceKernels(), SdpaBackend(), torch.bfloat16, torch.device("meta"))
        found.append(build_model(context, config, stage_of(layout, config, rank)))
    return found


@pytest.mark.guarantee("The plan's bytes are those of the run")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_weights_bytes_equal_parameters_of_decoders(architecture: str, layout: RankLayout):
    config = decoder(architecture)
    for rank, model in enumerate(models(config, layout)):
        num_bytes = sum(parameter.nbytes for parameter in model.parameters())
        assert weights_bytes(config, layout, rank, "bfloat16", "cuda") == num_bytes


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_ranks_read_every_tensor_of_decoders_once(architecture: str, layout: RankLayout):
    counts: dict[str, np.ndarray] = {}
    for model in models(decoder(architecture), layout):
        for piece in model.weights.slices:
            count = counts.setdefault(piece.checkpoint_name, np.zeros(piece.checkpoint_shape, dtype=np.int64))
            count[tuple(slice(*bounds) for bounds in piece.source)] += 1
    size, num_stages = layout.tensor_parallel_size, layout.pipeline_parallel_size
    for name, count in counts.items():
        expected = size if any(word in name for word in HELD_BY_ALL) else 1
        if name.endswith("relative_attention_bias.weight"):
            expected = num_stages
        elif model.weights.names.tied is not None and name == model.weights.names.tied[0]:
            # The last stage has a copy.
            expected = min(num_stages, 2)
        assert (count == expected).all(), (name, expected)
