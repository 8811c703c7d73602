"""Weights of experts side by side: names and values stay, updates in place arrive, moved weights are moved back, sleep
keeps them together. With kernels in torch in place of a GPU's.
"""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from spmd_worker.model.decoder import DecoderForCausalLM
from spmd_worker.model.layers.context import LayerContext
from spmd_worker.model.layers.experts import SparseFeedForward, select_experts
from spmd_worker.model.registry import build_model
from spmd_worker.model.weight_memory import WeightMemory
from spmd_worker.model_config.layer_config import ExpertsConfig
from spmd_worker.model_config.model_config import ModelConfig, model_config_of
from spmd_worker.ops.attention.sdpa import SdpaBackend
from spmd_worker.ops.kernels.api import ExpertKernels, ExpertStack
from spmd_worker.ops.kernels.reference import ReferenceKernels
from spmd_worker.ranks.communicator import single_group
from spmd_worker.ranks.topology import complete_model

SIZES = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 16}
EXPERTS = {"num_key_value_heads": 2, "intermediate_size": 24, "num_local_experts": 6, "num_experts_per_tok": 2}
KEYS = {"architectures": ["GptOssForCausalLM"], **SIZES, **EXPERTS}


class TorchExperts:
    """Implements `ExpertKernels` from the stack alone, for gates in turns."""

    def route(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        choice_bias: Tensor | None,
        experts: ExpertsConfig,
        add: object = None,
    ) -> tuple[Tensor, Tensor, None]:
        assert bias is not None
        assert add is None, "no adapters"
        return *select_experts(x.float() @ weight.T + bias, choice_bias, experts), None

    def outputs(
        self,
        x: Tensor,
        ids: Tensor,
        stack: ExpertStack,
        slots: Tensor | None,
        totals: Tensor,
        *,
        others_are_zero: bool,
        added: object = None,
    ) -> Tensor:
        del slots, others_are_zero
        assert added is None
        assert stack.gate_up_bias is not None
        assert stack.down_bias is not None
        totals += ids.flatten().bincount(minlength=len(totals))
        rows, experts = x.repeat_interleave(ids.shape[1], 0), ids.flatten()
        columns = (stack.gate_up[experts] @ rows.unsqueeze(2)).squeeze(2) + stack.gate_up_bias[experts]
        gates, ups = columns[:, ::2].clamp(max=stack.limit), columns[:, 1::2].clamp(-stack.limit, stack.limit)
        gated = gates * (1.702 * gates).sigmoid() * (ups + 1)
        return (stack.down[experts] @ gated.unsqueeze(2)).squeeze(2) + stack.down_bias[experts]

    def weighted_sum(
        self, results: Tensor, ids: Tensor, weights: Tensor, slots: Tensor | None, is_own: Tensor | None
    ) -> Tensor:
        del slots, is_own
        return (results.view(*ids.shape, -1) * weights.unsqueeze(2)).sum(1)


class StackingKernels(ReferenceKernels):
    def expert_kernels(self) -> ExpertKernels:
        return TorchExperts()


def config() -> ModelConfig:
    return model_config_of(KEYS, Path("config.json"))


def new_model(kernels: ReferenceKernels) -> DecoderForCausalLM:
    context = LayerContext(single_group(), kernels, SdpaBackend(), torch.float32, torch.device("cpu"))
    model = build_model(context, config(), complete_model(config()))
    model.weights.fill(model.weights.dummy())
    model.pack_weights()
    return model


def sparse(model: DecoderForCausalLM) -> SparseFeedForward:
    return model.sparse_layers[1]


def computed(layer: SparseFeedForward) -> Tensor:
    """Outputs for the same tokens, in inference mode, as of a step."""
    tokens = torch.randn(17, 32, generator=torch.Generator().manual_seed(4))
    with torch.inference_mode():
        return layer(tokens)


def num_storages(layer: SparseFeedForward) -> int:
    return len({each.down_proj.weight.untyped_storage().data_ptr() for each in layer.experts.values()})


@torch.no_grad()
def test_stacked_experts_keep_names_and_values():
    stacked, apart = new_model(StackingKernels()), new_model(ReferenceKernels())
    ours, theirs = dict(stacked.named_parameters()), dict(apart.named_parameters())
    assert list(ours) == list(theirs)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert (num_storages(sparse(stacked)), num_storages(sparse(apart))) == (1, 6)
    assert torch.allclose(computed(sparse(stacked)), computed(sparse(apart)), rtol=1e-4, atol=1e-5)
    assert sparse(stacked).num_tokens == sparse(apart).num_tokens


@torch.no_grad()
def test_loaded_weights_arrive_in_the_stack():
    model = new_model(StackingKernels())
    before = computed(sparse(model))
    names = [name for name in model.weights.tensors if "layers.1.mlp.experts" in name]
    model.load_weights([(name, 2 * model.weights.held[name].read()) for name in names])
    assert not torch.allclose(computed(sparse(model)), before)
    assert num_storages(sparse(model)) == 1


@torch.no_grad()
@pytest.mark.parametrize("forgets", [True, False])
def test_moved_weights_are_stacked_again(forgets: bool):
    model = new_model(StackingKernels())
    layer = sparse(model)
    before = computed(layer)
    for parameter in layer.experts.parameters():
        parameter.data = 2 * parameter.data
    assert num_storages(layer) == 6
    if forgets:
        model.forget_addresses()
    # Control: without it the old weights are used.
    assert torch.equal(computed(layer), before) != forgets
    assert num_storages(layer) == (1 if forgets else 6)


@torch.no_grad()
@pytest.mark.parametrize("keeps", [True, False])
def test_experts_stay_side_by_side_after_sleep(keeps: bool):
    model = new_model(StackingKernels())
    layer = sparse(model)
    before = computed(layer)
    memory = WeightMemory(model, StackingKernels())
    memory.release(memory.copy_to_host() if keeps else None)
    assert all(parameter.is_meta for parameter in layer.experts.parameters())
    assert layer._stacked is not None
    assert layer._stacked._stack is None
    assert memory.restore(memory.allocate()) == keeps
    assert num_storages(layer) == 1
    if not keeps:
        model.weights.reload(model.weights.dummy())
    assert torch.equal(computed(layer), before)
