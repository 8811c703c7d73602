"""Slices of all ranks: together exactly the tensor, with key-value heads replicated as often as needed.

Pure arithmetic on the slices that the layers name; the parameters have no storage.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from model_configs import families, spelled, with_layers

from spmd_worker.base.errors import ConfigError
from spmd_worker.model.decoder import DecoderForCausalLM
from spmd_worker.model.layers.context import LayerContext
from spmd_worker.model.layers.embedding import VocabularyShard
from spmd_worker.model.layers.linear import kv_head_range
from spmd_worker.model.registry import build_model
from spmd_worker.model.weights.coverage import checkpoint_problems, parameter_problems
from spmd_worker.model_config.model_config import FAMILIES, ModelConfig, model_config_of
from spmd_worker.ops.attention.sdpa import SdpaBackend
from spmd_worker.ops.kernels.reference import ReferenceKernels
from spmd_worker.ranks.communicator import GroupHandle
from spmd_worker.ranks.topology import VOCABULARY_ALIGNMENT, RankLayout, check_divides


def new_shape(architecture: str = "LlamaForCausalLM", **keys: object) -> ModelConfig:
    sizes = {
        "vocab_size": 211,
        "hidden_size": 64,
        "intermediate_size": 90,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 6,
        "attention_bias": True,
        "mlp_bias": True,
    }
    if "vocab_size_per_layer_input" in FAMILIES[architecture].defaults:
        sizes["vocab_size_per_layer_input"] = sizes["vocab_size"]  # a quarter of a million by default
    return model_config_of(spelled(architecture, {**sizes, **keys}), "config.json")


def new_model(model_config: ModelConfig, size: int, rank: int) -> DecoderForCausalLM:
    group = GroupHandle(ranks=tuple(range(size)), rank=rank, group=None)
    context = LayerContext(group, ReferenceKernels(), SdpaBackend(), torch.float32, torch.device("meta"))
    return build_model(context, model_config)


def times_read(model_config: ModelConfig, size: int) -> dict[str, np.ndarray]:
    """Number of ranks that read each element of each checkpoint tensor."""
    counts: dict[str, np.ndarray] = {}
    for rank in range(size):
        for piece in new_model(model_config, size, rank).weights.slices:
            count = counts.setdefault(piece.checkpoint_name, np.zeros(piece.checkpoint_shape, dtype=np.int8))
            count[tuple(slice(*bounds) for bounds in piece.source)] += 1
    return counts


# With biases, and those of stacked experts' ways back, which the first rank adds.
HELD_BY_ALL = tuple(
    f"{each}.bias" for each in ("o_proj", "down_proj", "c_proj", "dense", "dense_4h_to_h", "out_proj", "fc2", "fc_out")
)
HELD_BY_ALL += (
    *("mlp.gate.weight", "mlp.router.weight", "mlp.router.bias", "block_sparse_moe.gate.weight", "router.layer.weight"),
    *("e_score_correction_bias", "shared_expert_gate.weight", "experts.down_proj_bias", "mixer.gate.weight"),
    *("mlp.router.gate.weight", "mlp.gate.wg.weight", "feed_forward.router.weight", "block_sparse_moe.router.weight"),
    *("q_a_proj.weight", "q_a_proj.bias", "kv_a_proj_with_mqa.weight", "kv_a_proj_with_mqa.bias", "mlp.expert_bias"),
    *("layer_scalar", "per_layer_input_gate.weight", "per_layer_projection.weight"),
    *("per_layer_model_projection.weight", "f_a_proj.weight", "g_a_proj.weight", "dense_bias"),
    *("mlp.router.classifier.weight", "mlp.gate.expert_bias", "moe.router.expert_bias"),
    *("wkv_a_with_mqa.weight", "wkv_a_with_mqa.bias", "attention.wo.bias"),
    *("indexer.ssmax_scaling.s", "indexer.ssmax_scaling.b", "lerope.alpha", ".gate.weight"),
    *("indexer.wq_b.weight", "indexer.wk.weight", "indexer.weights_proj.weight", "indexer.index_qk_proj.weight"),
    *("input_mix_weight_down.weight", "input_mix_weight_up.weight", "block_inject_weight.weight"),
    *("ple.key_proj.weight", "ple.value_proj.weight", "ple.conv1d.weight"),
    *("correct_output_scale", "correction_coefs.weight", "prediction_coefs.weight", "modality_router.weight"),
    *("laurel.linear_left.weight", "laurel.linear_right.weight"),
    *(f"projections.{number}.weight" for number in range(3)),
    *("attn.wq_a.weight", "wkv.weight", "wgate.weight", ".ape", "experts.w2.bias"),
    *("ffn.gate.weight", "ffn.gate.bias", ".tid2eid"),
    *(f"hc_{part}_{leaf}" for part in ("attn", "ffn", "head") for leaf in ("fn", "base", "scale")),
)


@pytest.mark.gate(
    "2-*",
    "8-GptOssForCausalLM",
    "8-LlamaForCausalLM",
    "8-DeepseekV3ForCausalLM",
    "8-Qwen3_5ForCausalLM",
    "8-NemotronHForCausalLM",
)
@pytest.mark.parametrize("architecture", families())
@pytest.mark.parametrize(
    "size", [pytest.param(1, marks=pytest.mark.stress), 2, pytest.param(4, marks=pytest.mark.stress), 8]
)
def test_ranks_together_read_every_tensor_once(architecture: str, size: int):
    model_config = new_shape(architecture)
    # Heads are as many in all layers, but for MiMo's, where the most are in those that slide.
    kv_heads = {f".layers.{index}.": layer.num_kv_heads for index, layer in enumerate(model_config.layers)}
    # Of Ling, whose nets have gates of that name too.
    of_heads = {f".layers.{index}.attention.g_proj." for index, each in enumerate(model_config.layers) if each.latent}
    is_net = architecture in ("KimiLinearForCausalLM", "BailingHybridForCausalLM")
    mamba = next((layer.mamba for layer in model_config.layers if layer.mamba is not None), None)
    num_group_holders = 1 if mamba is None else max(size // mamba.num_groups, 1)
    for name, count in times_read(model_config, size).items():
        # DBRX's attention is in a module with its norms.
        own_name = name.replace("norm_attn_norm", "")
        of_layer = next((heads for part, heads in kv_heads.items() if part in name), model_config.num_kv_heads)
        num_holders = max(size // of_layer, 1)
        if mamba is not None and any(word in name for word in ("in_proj", "conv1d")):
            # B and C, behind z and x, or x alone; dt is the last.
            first = mamba.num_columns * (1 + ("in_proj" in name))
            shared = slice(first, first + 2 * mamba.num_groups * mamba.state_size)
            assert (count[shared] == num_group_holders).all(), name
            count, expected = np.delete(count, shared, axis=0), 1
        elif mamba is not None and name.endswith(("mamba.norm.weight", "mixer.norm.weight")):
            expected = num_group_holders
        elif any(word in name for word in ("qkv_proj", "query_key_value", ".c_attn", "Wqkv")):
            num_queries = model_config.num_heads * model_config.head_size
            assert (count[:num_queries] == 1).all(), name
            count, expected = count[num_queries:], num_holders
        elif (".k_proj." in name or ".v_proj." in name) and not is_net and ".linear_attn." not in name:
            expected = num_holders
        elif (
            any(word in own_name for word in ("norm", ".ln_", "wpe", "embed_positions", "act_fn"))
            or name.endswith(HELD_BY_ALL)
            or any(part in name for part in of_heads)
        ):
            expected = size
        else:
            expected = 1
        assert (count == expected).all(), (name, expected, np.unique(count))


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_fused_tensor_is_split_by_key_value_heads(size: int, monkeypatch: pytest.MonkeyPatch):
    """Rows of the file are those of a reshape to [key-value heads, queries + key + value, size]."""
    row = FAMILIES["GPTNeoXForCausalLM"]
    monkeypatch.setitem(FAMILIES, "GPTNeoXForCausalLM", replace(row, file_keys={}))
    model_config = new_shape("GPTNeoXForCausalLM", rotary_pct=1.0)
    num_heads, num_kv_heads, head_size = model_config.num_heads, model_config.num_kv_heads, model_config.head_size
    per_head = num_heads // num_kv_heads
    rows = np.arange((num_heads + 2 * num_kv_heads) * head_size).reshape(num_kv_heads, per_head + 2, head_size)
    whole = [part.reshape(-1, head_size) for part in (rows[:, :per_head], rows[:, per_head], rows[:, per_head + 1])]
    for rank in range(size):
        first, end = kv_head_range(num_kv_heads, size, rank)
        own = num_heads // size
        expected = [whole[0][rank * own : (rank + 1) * own], *(part[first:end] for part in whole[1:])]
        held = np.full(sum(part.size for part in expected), -1)
        for piece in new_model(model_config, size, rank).weights.slices:
            if piece.checkpoint_name == "gpt_neox.layers.1.attention.query_key_value.bias":
                held[slice(*piece.destination[0])] = np.arange(*piece.source[0])
        assert np.array_equal(held, np.concatenate([part.ravel() for part in expected])), rank


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_every_parameter_element_is_filled_exactly_once(size: int, tied: bool):
    model_config = new_shape(tie_word_embeddings=tied)
    for rank in range(size):
        model = new_model(model_config, size, rank)
        shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        in_file = {piece.checkpoint_name: piece.checkpoint_shape for piece in model.weights.slices}
        weights = model.weights
        assert parameter_problems(weights.slices, weights.paddings, shapes) == []
        assert checkpoint_problems(weights.shapes, in_file, ignorable=weights.names.is_derived) == []
        assert ("lm_head.weight" in in_file) == (not tied)


def test_coverage_check_detects_missing_slice():
    model = new_model(new_shape(), 2, 1)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    for index in range(len(model.weights.slices)):
        slices = [*model.weights.slices]
        del slices[index]
        assert parameter_problems(slices, model.weights.paddings, shapes) != []


def test_only_derived_tensors_are_ignored():
    tied, untied = new_model(new_shape(tie_word_embeddings=True), 1, 0), new_model(new_shape(), 1, 0)
    assert tied.weights.names.is_derived("lm_head.weight")
    assert not untied.weights.names.is_derived("lm_head.weight")
    assert untied.weights.names.is_derived("model.layers.3.self_attn.rotary_emb.inv_freq")
    assert not untied.weights.names.is_derived("model.layers.3.self_attn.q_proj.weight")


@pytest.mark.parametrize(
    ("num_kv_heads", "size", "expected"),
    [
        (4, 1, [(0, 4)]),
        (4, 2, [(0, 2), (2, 4)]),
        (2, 4, [(0, 1), (0, 1), (1, 2), (1, 2)]),
        (1, 3, [(0, 1), (0, 1), (0, 1)]),
    ],
)
def test_key_value_heads_follow_their_queries(num_kv_heads: int, size: int, expected: list[tuple[int, int]]):
    assert [kv_head_range(num_kv_heads, size, rank) for rank in range(size)] == expected


@pytest.mark.parametrize("vocab_size", [1, 63, 64, 65, 211, 1000])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_vocabulary_shards_are_equal_and_cover_ids_once(vocab_size: int, size: int):
    shards = [VocabularyShard(vocab_size, size, rank) for rank in range(size)]
    owned = [token for shard in shards for token in range(shard.start, shard.stop)]
    assert owned == list(range(vocab_size))
    assert len(dict.fromkeys(shard.size for shard in shards)) == 1
    assert shards[0].size % VOCABULARY_ALIGNMENT == 0
    # The place of an id in the gathered logits is the id itself: only the last owner may have padding behind it.
    assert all(shard.start == min(rank * shard.size, vocab_size) for rank, shard in enumerate(shards))


def test_indivisible_heads_are_rejected_with_possible_sizes():
    model_config = with_layers(new_shape(), num_heads=9, num_kv_heads=3)
    with pytest.raises(ConfigError, match=r"tensor_parallel_size=2 .*9 attention heads.* 1, 3 and 9"):
        check_divides(RankLayout(2), model_config)
    for size in (1, 3, 9):
        check_divides(RankLayout(size), model_config)


@pytest.mark.parametrize(
    ("changes", "size", "words"),
    [
        ({"num_heads": 12, "num_kv_heads": 6}, 4, r"6 key-value heads.*1, 2, 3, 6 and 12"),
        ({"num_heads": 12, "num_kv_heads": 4}, 6, r"4 key-value heads.*1, 2, 4 and 12"),
        ({"num_heads": 8, "num_kv_heads": 8}, 16, r"8 attention heads.*1, 2, 4 and 8"),
        ({"num_heads": 7, "num_kv_heads": 7}, 2, r"7 attention heads.*1 and 7"),
        ({"num_heads": 1, "num_kv_heads": 1}, 2, r"1 attention heads.* are 1$"),
        ({"num_heads": 8, "num_kv_heads": 8, "intermediate_size": 5}, 8, r"feed-forward has 5.*1, 2 and 4"),
    ],
)
def test_indivisible_size_is_rejected_with_possible_sizes(changes: dict[str, int], size: int, words: str):
    with pytest.raises(ConfigError, match=words):
        check_divides(RankLayout(size), with_layers(new_shape(), **changes))
