"""Small models with random weights whose layers the compiled library can join, on one rank of a group.

Knows how a worker builds and packs. Knows nothing of torchrun or of what is compared.
"""

from dataclasses import replace

import torch
from model_configs import with_layers, with_windows
from native_builds import WITH_AMX, library_for
from our_model import BLOCK_SIZE, prompt_logits

from spmd_worker.model.decoder import DecoderForCausalLM
from spmd_worker.model.layers.context import LayerContext
from spmd_worker.model.registry import build_model
from spmd_worker.model_config.layer_config import ExpertsConfig, LayerConfig, NormConfig
from spmd_worker.model_config.model_config import ModelConfig, RopeParameters
from spmd_worker.ops.attention.backend import AttentionBackend
from spmd_worker.ops.attention.cpu import CpuBackend
from spmd_worker.ops.kernels.cpu.int8 import Int8CpuKernels
from spmd_worker.ops.kernels.cpu.native import CpuKernels
from spmd_worker.ranks.communicator import GroupHandle, single_group
from spmd_worker.ranks.leaves import num_leaves
from spmd_worker.ranks.topology import Stage

NORM = NormConfig(eps=1e-5)
LAYER = LayerConfig(
    num_heads=4,
    num_kv_heads=2,
    head_size=16,
    intermediate_size=128,
    scale=16**-0.5,
    norm=NORM,
)
GEMMA_LAYER = replace(
    LAYER,
    norm=NormConfig(eps=1e-6, offset=1.0, rounds_once=True),
    norms=(True, True, True, True),
    qk_norm="head",
    activation="gelu_tanh",
    score_cap=30.0,
)
SPARSE_LAYER = replace(
    LAYER, qk_norm="head", intermediate_size=48, experts=ExpertsConfig(8, 3, 48, shared_size=32, has_shared_gate=True)
)
PLAIN = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=96,
    hidden_size=64,
    layers=(LAYER,) * 3,
    norm=NORM,
    max_position_embeddings=256,
    ropes=(RopeParameters(LAYER.head_size),),
    has_tied_embeddings=False,
    dtype="float32",
    eos_token_ids=(),
)
SHAPES = {
    "plain": PLAIN,
    "biased": with_layers(PLAIN, has_qkv_bias=True, has_output_bias=True, has_mlp_bias=True),
    "windows": with_windows(with_layers(PLAIN, has_qkv_bias=True), 0, 20, 33),
    "normed heads, some not rotated": replace(
        PLAIN, layers=tuple(replace(LAYER, qk_norm="head", rope=rope) for rope in (0, None, 0))
    ),
    "wide heads": replace(
        with_layers(PLAIN, head_size=32, scale=32**-0.5, num_heads=2, num_kv_heads=2),
        ropes=(RopeParameters(32),),
        has_tied_embeddings=True,
    ),
    # Four leaves, of unequal sizes in the feed-forward; the others have two.
    "many leaves": with_layers(PLAIN, num_heads=8, num_kv_heads=4, intermediate_size=160, has_output_bias=True),
}
ONE_RANK_SHAPES = {
    "four norms, two ropes": replace(
        PLAIN,
        layers=tuple(
            replace(GEMMA_LAYER, window=window, rope=rope) for window, rope in ((20, 1), (20, 1), (0, 0), (20, 1))
        ),
        ropes=(RopeParameters(16, rope_theta=1e6), RopeParameters(16)),
    ),
    "norms of outputs": with_layers(
        PLAIN, norms=(False, True, False, True), qk_norm="head", has_mlp_bias=True, activation="gelu"
    ),
    "scaled outputs": with_layers(PLAIN, residual_multiplier=0.22),
    "experts behind a dense layer": replace(PLAIN, layers=(LAYER, SPARSE_LAYER, SPARSE_LAYER, LAYER)),
    "scaled experts": with_layers(replace(PLAIN, layers=(SPARSE_LAYER,) * 3), residual_multiplier=0.22),
    "norms of outputs of experts": with_layers(
        replace(PLAIN, layers=(SPARSE_LAYER,) * 2), norms=(False, True, False, True), rope=None
    ),
    "norms of deviations": with_layers(
        PLAIN, norm=replace(NORM, kind="layer"), activation="relu2", residual_multiplier=0.7
    ),
}
"""Shapes whose layers are not joined on several ranks: outputs are complete before they are added, or of experts."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def new_model(
    model_config: ModelConfig,
    dtype: torch.dtype,
    group: GroupHandle | None = None,
    stage: Stage | None = None,
    instruction_set: str = WITH_AMX,
    backend: AttentionBackend | None = None,
    *,
    has_bytes: bool = False,
) -> DecoderForCausalLM:
    """Packed, into int8 if it `has_bytes`; each rank of a group has other weights."""
    library = library_for(instruction_set)
    group = group or single_group()
    backend = backend or CpuBackend(library, dtype, (model_config.head_size,), BLOCK_SIZE)
    quantised = Int8CpuKernels(library, dtype) if has_bytes else None
    kernels = quantised or CpuKernels(library)
    most = 1 if has_bytes else 8
    context = LayerContext(
        *(group, kernels, backend, dtype, torch.device("cpu")),
        quantised=quantised,
        num_leaves=num_leaves(model_config, most),
    )
    model = build_model(context, model_config, stage)
    generator = torch.Generator().manual_seed(11 + group.rank)
    for parameter in model.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2 + (parameter.ndim == 1))
    model.pack_weights()
    return model


def joined_and_one_by_one(
    model: DecoderForCausalLM, prompts: list[list[int]], chunk: int | None = None
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Logits of both ways; the model is as it was afterwards."""
    stack = model.model
    joined = stack.joined_layers
    assert joined is not None, "the layers of this model can be joined"
    together = prompt_logits(model, prompts, chunk)
    stack.joined_layers = None
    apart = prompt_logits(model, prompts, chunk)
    stack.joined_layers = joined
    return together, apart


def are_equal(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    """Bit for bit, and numbers; ids that a rank does not own have minus infinity."""
    pairs = zip(first, second, strict=True)
    return all(torch.equal(one, other) and not bool(one.isnan().any()) for one, other in pairs)
