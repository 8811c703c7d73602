"""The only read-back of a sparse layer: the number of tokens of each expert."""

from pathlib import Path

import torch
from device_waits import DeviceWaits

from spmd_worker.model.layers.context import LayerContext
from spmd_worker.model.layers.experts import SparseFeedForward
from spmd_worker.model_config.model_config import model_config_of
from spmd_worker.ops.attention.sdpa import SdpaBackend
from spmd_worker.ops.kernels.reference import ReferenceKernels
from spmd_worker.ranks.communicator import single_group

SIZES = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "head_dim": 8}
EXPERTS = {"moe_intermediate_size": 24, "intermediate_size": 48, "num_experts": 8, "num_experts_per_tok": 2}


def new_layer(device: str) -> SparseFeedForward:
    keys = {"architectures": ["Qwen3MoeForCausalLM"], "num_key_value_heads": 2, **SIZES, **EXPERTS}
    config = model_config_of(keys, Path("config.json"))
    context = LayerContext(single_group(), ReferenceKernels(), SdpaBackend(), torch.float32, torch.device(device))
    return SparseFeedForward(context, config.layers[0], config.hidden_size)


@torch.inference_mode()
def test_sparse_layer_reads_back_once():
    layer = new_layer("meta")
    with DeviceWaits() as waits:
        layer(torch.empty((5, 32), device="meta"))
    assert (waits.read_backs, waits.uploads) == (["_to_copy"], [])


@torch.inference_mode()
def test_tokens_of_each_expert_are_counted():
    layer = new_layer("cpu")
    for index, parameter in enumerate(layer.parameters()):
        parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(index)))
    x = torch.randn(40, 32, generator=torch.Generator().manual_seed(9))
    layer(x)
    assert layer.num_tokens == layer.gate(x)[0].flatten().bincount(minlength=8).tolist()
    assert 0 < min(layer.num_tokens) < max(layer.num_tokens)
