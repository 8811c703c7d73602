"""Bytes by arithmetic against the parameters of real models, for every family, number of ranks and dtype."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from model_configs import families, spelled, with_layers
from native_builds import WITH_AMX, library_for
from native_libraries import needs_onednn_bfloat16
from two_shapes import with_two_shapes

from spmd_worker.model.layers.context import LayerContext
from spmd_worker.model.layers.relative_bias import AlibiTable
from spmd_worker.model.registry import build_model
from spmd_worker.model_config.layer_config import LayerShare
from spmd_worker.model_config.model_config import DTYPE_BYTES, ModelConfig, model_config_of
from spmd_worker.ops.attention.sdpa import SdpaBackend
from spmd_worker.ops.kernels.api import Kernels
from spmd_worker.ops.kernels.cpu.linear import PackedKernels
from spmd_worker.ops.kernels.cpu.native import CpuKernels
from spmd_worker.ops.kernels.reference import ReferenceKernels
from spmd_worker.ranks.communicator import GroupHandle
from spmd_worker.ranks.expert_layout import ExpertLayout
from spmd_worker.ranks.topology import RankLayout, Stage, stage_of, vocabulary_rows
from spmd_worker.worker.memory.estimate import (
    activation_bytes,
    cache_spec,
    rank_layers,
    rank_vocabulary_rows,
    weights_bytes,
)


def new_shape(architecture: str = "LlamaForCausalLM", **keys: object) -> ModelConfig:
    sizes = {
        "vocab_size": 211,
        "hidden_size": 64,
        "intermediate_size": 90,
        "num_hidden_layers": 3,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 6,
    }
    return model_config_of(spelled(architecture, {**sizes, **keys}), "config.json")


def parameter_bytes(
    model_config: ModelConfig,
    size: int,
    rank: int,
    dtype: str,
    stage: Stage | None = None,
    layout: ExpertLayout | None = None,
) -> int:
    group = GroupHandle(ranks=tuple(range(size)), rank=rank, group=None)
    backends = ReferenceKernels(), SdpaBackend()
    context = LayerContext(group, *backends, getattr(torch, dtype), torch.device("meta"), layout)
    return sum(parameter.nbytes for parameter in build_model(context, model_config, stage).parameters())


@pytest.mark.parametrize("is_exact", [False, True])
@pytest.mark.parametrize("architecture", ["Qwen2MoeForCausalLM", "GptOssForCausalLM", "Glm4MoeForCausalLM"])
def test_weights_bytes_equal_parameters_with_expert_parallelism(architecture: str, is_exact: bool):
    model_config = new_shape(architecture)
    for owners in (((0, 0, 1, 1),), ((0, 1, 1, 1), (0, 0, 0, 0), (1, 0, 1, 0))):
        layout = RankLayout(2, experts=ExpertLayout(owners, is_exact))
        for rank in range(2):
            for dtype in ("float32", "bfloat16"):
                expected = parameter_bytes(model_config, 2, rank, dtype, layout=layout.experts)
                assert weights_bytes(model_config, layout, rank, dtype, "cuda") == expected, (owners, rank, dtype)


STEP = {
    "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    "sliding_window": 5,
    "num_sliding_attention_heads": 16,
    "mlp_layer_types": ["dense", "sparse", "dense"],
}
VARIANTS = [{}, {"tie_word_embeddings": True}, {"attention_bias": True, "mlp_bias": True}]
# Building models takes long: on one number of ranks and on many, keys added on one, on the others in the stress tier.
VARIANTS_AND_SIZES = [
    (VARIANTS[0], (2,)),
    (VARIANTS[0], (8,)),
    pytest.param(VARIANTS[0], (1, 4), marks=pytest.mark.stress),
    *((keys, (2,)) for keys in VARIANTS[1:]),
    *(pytest.param(keys, (1, 4, 8), marks=pytest.mark.stress) for keys in VARIANTS[1:]),
]


@pytest.mark.gate(
    "*-keys0-*",
    "GptOssForCausalLM-*",
    "LlamaForCausalLM-*",
    "DeepseekV3ForCausalLM-*",
    "Qwen3_5ForCausalLM-*",
    "Gemma3ForCausalLM-*",
    "NemotronHForCausalLM-*",
    "GPT2LMHeadModel-*",
)
@pytest.mark.guarantee("The plan's bytes are those of the run")
@pytest.mark.parametrize(("keys", "sizes"), VARIANTS_AND_SIZES)
@pytest.mark.parametrize(
    "architecture", families("OlmoForCausalLM", "PhiForCausalLM", "StableLmForCausalLM", "OPTForCausalLM")
)
def test_weights_bytes_equal_parameters_on_every_rank(architecture: str, keys: dict[str, bool], sizes: tuple[int, ...]):
    model_config = new_shape(architecture, **keys)
    for size in sizes:
        for rank in range(size):
            # Of many ranks each has one of them: building a model takes long.
            for dtype in ("float32", "bfloat16") if size < 4 else (("float32", "bfloat16")[rank % 2],):
                expected = parameter_bytes(model_config, size, rank, dtype)
                estimate = weights_bytes(model_config, RankLayout(size), rank, dtype, "cuda")
                assert estimate == expected, (size, rank, dtype)


# Two of five layers are for images, and the rows of the table of embeddings for them fill rows of their own.
WITH_IMAGE_LAYERS = {
    "architecture": "MllamaForConditionalGeneration",
    "num_hidden_layers": 5,
    "cross_attention_layers": [0, 3],
    "vocab_size": 256,
}


@pytest.mark.parametrize("keys", [*VARIANTS, WITH_IMAGE_LAYERS])
@pytest.mark.parametrize("layers", [(3,), (1, 2), (2, 1), (1, 1, 1)])
def test_weights_bytes_equal_parameters_on_every_stage(layers: tuple[int, ...], keys: dict[str, Any]):
    model_config, layout = new_shape(**keys), RankLayout(2, len(layers), 1, layers)
    assert model_config.num_layers == 3
    for rank in range(layout.world_size):
        stage = stage_of(layout, model_config, rank)
        expected = parameter_bytes(model_config, 2, layout.tensor_rank(rank), "bfloat16", stage)
        assert weights_bytes(model_config, layout, rank, "bfloat16", "cuda") == expected, rank
        assert cache_spec(model_config, layout, rank, "bfloat16", 16).num_layers == layers[layout.pipeline_rank(rank)]


@pytest.mark.parametrize("layers", [(3,), (1, 2)])
def test_layers_of_two_shapes_count_by_their_own(layers: tuple[int, ...]):
    model_config, layout = with_two_shapes(new_shape()), RankLayout(2, len(layers), 1, layers)
    for rank in range(layout.world_size):
        stage = stage_of(layout, model_config, rank)
        expected = parameter_bytes(model_config, 2, layout.tensor_rank(rank), "bfloat16", stage)
        assert weights_bytes(model_config, layout, rank, "bfloat16", "cuda") == expected, rank
        sizes = [
            None if each is None else each.token_size
            for each in cache_spec(model_config, layout, rank, "bfloat16", 16).layers
        ]
        assert sizes == [2 * 48 if index % 2 else 2 * 6 for index in stage.indices]


def test_image_rows_count_on_first_stage_only():
    model_config, layout = new_shape(**WITH_IMAGE_LAYERS), RankLayout(2, 2, 1, (1, 2))
    plain = replace(model_config, num_image_embeddings=0)
    both = [
        [weights_bytes(each, layout, rank, "float32", "cuda") for rank in range(layout.world_size)]
        for each in (model_config, plain)
    ]
    # Half of 264 rows takes 192, in multiples of 64, and half of 256 takes 128.
    assert [one - other for one, other in zip(*both, strict=True)] == [64 * 64 * 4] * 2 + [0] * 2
    # Negative control: all five layers would be counted.
    five = new_shape(**{**WITH_IMAGE_LAYERS, "cross_attention_layers": []})
    deep = RankLayout(2, 2, 1, (2, 3))
    assert weights_bytes(five, deep, 0, "float32", "cuda") > weights_bytes(model_config, layout, 0, "float32", "cuda")


PACKING = {"panels": CpuKernels(library_for(WITH_AMX)), "onednn": PackedKernels()}


def held_bytes(model_config: ModelConfig, kernels: Kernels, rank: int, dtype: str, stage: Stage) -> int:
    """Of the storage of a packed model on one of two ranks."""
    group = GroupHandle(ranks=(0, 1), rank=rank, group=None)
    context = LayerContext(group, kernels, SdpaBackend(), getattr(torch, dtype), torch.device("cpu"))
    model = build_model(context, model_config, stage)
    model.pack_weights()
    storages = {}
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_mkldnn:
            storages[torch.ops.mkldnn.data_ptr(tensor)] = torch.ops.mkldnn._nbytes(tensor)
        else:
            storages[tensor.data_ptr()] = tensor.untyped_storage().nbytes()
    return sum(storages.values())


@pytest.mark.parametrize("kernels", PACKING.values(), ids=PACKING)
@pytest.mark.parametrize("keys", VARIANTS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_packed_weights_bytes_equal_the_estimate(dtype: str, keys: dict[str, bool], kernels: Kernels):
    """Sizes fill the tiles of the AMX unit and of oneDNN. Where nothing packs this dtype the copy is not made: the
    estimate, which does not know the CPU, has it all the same.
    """
    weight = torch.zeros(128, 128, dtype=getattr(torch, dtype))
    is_packed = kernels.pack(weight) is not weight
    sizes = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "num_hidden_layers": 2}
    model_config = new_shape(**sizes, **keys)
    for layout in (RankLayout(2), RankLayout(2, 2)):
        for rank in range(layout.world_size):
            stage = stage_of(layout, model_config, rank)
            estimate = weights_bytes(model_config, layout, rank, dtype, "cpu")
            is_tied = model_config.has_tied_embeddings and stage.is_first and stage.is_last
            copy = is_tied * rank_vocabulary_rows(model_config, layout) * 128 * DTYPE_BYTES[dtype]
            held = held_bytes(model_config, kernels, layout.tensor_rank(rank), dtype, stage)
            assert held == estimate - (0 if is_packed else copy), rank
            # Negative control: without the copy the estimate would be this much less.
            assert estimate - weights_bytes(model_config, layout, rank, dtype, "cuda") == copy


@needs_onednn_bfloat16
def test_tied_head_copy_counts_with_onednn():
    """What the comparison above takes from the kernels, by torch's own word."""
    weight = torch.zeros(128, 128, dtype=torch.bfloat16)
    assert PACKING["onednn"].pack(weight) is not weight


@pytest.mark.control("The plan's bytes are those of the run")
@pytest.mark.parametrize("change", [{"qk_norm": "head"}, {"has_mlp_bias": True}, {"num_kv_heads": 4}, {"head_size": 8}])
def test_comparison_detects_uncounted_weights(change: dict[str, int]):
    model_config = new_shape()
    other = with_layers(model_config, **change)
    assert weights_bytes(model_config, RankLayout(2), 0, "float32", "cuda") != parameter_bytes(other, 2, 0, "float32")


@pytest.mark.gate("Llama*", "Qwen3_5*", "Gemma3*", "GPT2*", "DeepseekV3*", "NemotronH*", "Mllama*", "Bamba*", "Olmo*")
@pytest.mark.parametrize("architecture", families())
def test_num_parameters_excludes_vocabulary_padding(architecture: str):
    for keys in VARIANTS:
        model_config = new_shape(architecture, vocab_size=192, **keys)
        # A table of embeddings with rows for images has no such round number of rows.
        num_padded = vocabulary_rows(model_config.num_embeddings, 1) - model_config.num_embeddings
        num_parameters = model_config.num_parameters + num_padded * model_config.embedding_size
        assert num_parameters * 4 == parameter_bytes(model_config, 1, 0, "float32"), keys


@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize(
    ("architecture", "keys"),
    [
        # Biases of the shared expert and of a tied head; heads that differ, each with a gate.
        ("Ernie4_5_MoeForCausalLM", {"use_bias": True}),
        ("HYV3ForCausalLM", {"mlp_bias": True}),
        ("Step3p7ForConditionalGeneration", STEP),
        ("CohereForCausalLM", {"use_qk_norm": True}),
        ("StableLmForCausalLM", {"qk_layernorm": True}),
        ("PhiForCausalLM", {"qk_layernorm": True, "head_dim": 8}),
        ("OPTForCausalLM", {"do_layer_norm_before": False, "word_embed_proj_dim": 80}),
    ],
)
def test_optional_norms_and_projections_are_counted(architecture: str, keys: dict[str, Any], size: int):
    model_config = new_shape(architecture, **keys)
    for rank in range(size):
        counted = weights_bytes(model_config, RankLayout(size), rank, "float32", "cuda")
        assert counted == parameter_bytes(model_config, size, rank, "float32")
    assert model_config.num_parameters > new_shape(architecture).num_parameters
    layout = RankLayout(1, 2, 1, (1, 2))
    for rank, stage in enumerate(
        (Stage(0, 1, is_first=True, is_last=False), Stage(1, 3, is_first=False, is_last=True))
    ):
        counted = weights_bytes(model_config, layout, rank, "float32", "cuda")
        assert counted == parameter_bytes(model_config, 1, 0, "float32", stage)


def test_the_share_of_a_rank_in_numbers():
    model_config = new_shape()
    shares = [[share for _, share in rank_layers(model_config, RankLayout(4), rank)] for rank in range(4)]
    assert shares == [[LayerShare(2, 1, columns, num_ranks=4)] * 3 for columns in (23, 23, 22, 22)]
    assert rank_vocabulary_rows(model_config, RankLayout(4)) == 64


def test_block_bytes_count_all_layers():
    spec = cache_spec(new_shape(), RankLayout(2), 1, "bfloat16", 16)
    assert spec.block_bytes == 2 * 3 * 1 * 16 * 6 * 2


@pytest.mark.parametrize("size", [1, 2])
def test_table_of_distances_counts_once_a_rank(size: int):
    model_config, layout = new_shape("MptForCausalLM", max_seq_len=500), RankLayout(size)
    plain = with_layers(model_config, alibi=0.0)
    context = LayerContext(
        GroupHandle(ranks=tuple(range(size)), rank=0, group=None),
        *(ReferenceKernels(), SdpaBackend(), torch.float32, torch.device("cpu")),
    )
    table = AlibiTable(context, 1.0, model_config.layers[0].num_heads, model_config.max_position_embeddings).table()
    counted, without = (activation_bytes(each, layout, 0, "bfloat16", 7, 2) for each in (model_config, plain))
    assert counted - without == table.nbytes > 0


def test_activation_bytes_follow_tokens_rows_and_ranks():
    model_config = new_shape(num_key_value_heads=8)

    def estimate(size: int, num_tokens: int, num_rows: int) -> int:
        return activation_bytes(model_config, RankLayout(size), 0, "float32", num_tokens, num_rows)

    assert estimate(1, 200, 8) > estimate(1, 100, 8) > estimate(1, 100, 4)
    assert estimate(2, 100, 4) < estimate(1, 100, 4)
    # At least the residual stream and its norm, and the logits of the rows.
    assert estimate(1, 100, 4) > 100 * 2 * 64 * 4 + 4 * 211 * 4


@pytest.mark.parametrize(
    ("quantization", "size", "num_parts"), [(None, 1, 0), (None, 2, 5), (None, 4, 7), ("int8", 4, 0)]
)
def test_float_parts_of_a_tree_are_counted(quantization: str | None, size: int, num_parts: int):
    """A rank's own, those of all ranks, and two sums; integer sums have no parts."""

    def estimate(*, adds_by_tree: bool) -> int:
        arguments = (new_shape(num_key_value_heads=8), RankLayout(size), 0, "bfloat16", 100, 4, quantization)
        return activation_bytes(*arguments, adds_by_tree=adds_by_tree)

    assert estimate(adds_by_tree=True) - estimate(adds_by_tree=False) == 100 * 64 * num_parts * 4
