"""Families with experts: names of tensors, invalid files, and each entry of a row."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from expert_checkpoints import CASES, expert_folder, expert_reference, open_experts, thinned_expert_folder
from expert_models import (
    LINEAR,
    PLACED,
    PROMPTS,
    SECOND,
    TOLERANCE,
    changed,
    expected,
    load,
    new_model,
    quick,
)
from family_checks import readings_of, silent_mutants, without_each
from family_mutants import entries
from model_types import MODEL_TYPES
from newer_checkpoints import NEWER
from our_model import is_noticed, prompt_logits
from reference_models import relative_error, their_logits
from safetensors.torch import load_file, save_file
from thread_groups import on_ranks
from torch import Tensor
from transformers import AutoConfig

from spmd_worker.base.errors import CheckpointError, SpmdError
from spmd_worker.model.layers.context import LayerContext
from spmd_worker.model.registry import build_model
from spmd_worker.model_config.families.experts_table import EXPERT_FAMILIES
from spmd_worker.model_config.families.family import Family
from spmd_worker.model_config.families.minimax_rows import MINIMAX_ROWS
from spmd_worker.model_config.families.sliding_sparse_rows import SLIDING_SPARSE_ROWS
from spmd_worker.model_config.families.sparse_rows import SPARSE_ROWS
from spmd_worker.model_config.families.table import FAMILIES
from spmd_worker.model_config.model_config import model_config_of, read_model_files
from spmd_worker.model_config.pooling import PoolingConfig
from spmd_worker.ops.attention.sdpa import SdpaBackend
from spmd_worker.ops.kernels.reference import ReferenceKernels
from spmd_worker.ranks.communicator import GroupHandle, single_group
from spmd_worker.ranks.expert_layout import ExpertLayout
from spmd_worker.ranks.topology import Stage


@pytest.mark.gate("gpt_oss", "glm4_moe", "hy_v3", "step3p7", "qwen3_vl_moe")
@quick("gpt_oss", slow=SECOND)
def test_all_checkpoint_tensors_are_viewed_and_loaded(name: str):
    """Separate and stacked tensors as they are in the file; on two ranks together all of each."""
    folder = expert_folder(name)
    model = new_model(folder)
    files = load_file(folder / "model.safetensors")
    tensors = {each: tensor for each, tensor in files.items() if not model.weights.names.is_derived(each)}
    with model.as_checkpoint() as view:
        shown = dict(view.named_parameters())
        assert all(torch.equal(shown[each].float(), tensors[each].float()) for each in tensors)
    assert set(shown) == set(tensors)
    loaded_from = {"files": files, "memory": expert_reference(name).state_dict()}
    for what, given in loaded_from.items():
        other = new_model(folder)
        for parameter in other.parameters():
            parameter.data.zero_()
        assert other.load_weights(list(given.items())) == set(tensors), what
        assert all(map(torch.equal, other.parameters(), model.parameters())), what

    for layout in (None, ExpertLayout(PLACED)):

        def run(group: GroupHandle, layout: ExpertLayout | None = layout) -> dict[str, Tensor]:
            shard = new_model(folder, group, layout=layout)
            assert set(shard.weights.shapes) == set(tensors)
            with shard.as_checkpoint() as view:
                return {each: parameter.detach().clone() for each, parameter in view.named_parameters()}

        first, second = on_ranks(2, run)
        assert set(first) | set(second) == set(tensors)
        for each, tensor in tensors.items():
            held = [rank[each].numel() for rank in (first, second) if each in rank]
            assert sum(held) >= tensor.numel(), each
            is_of_expert = ".experts." in each or ("_linear" in each and "shared" not in each)
            is_of_expert |= ".moe." in each and "_proj" in each
            # Laguna's bias of the choice is in the module of the experts.
            is_of_expert &= not each.endswith("e_score_correction_bias")
            if layout is not None and is_of_expert:
                assert sum(held) == tensor.numel(), each


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("qwen3_moe", marks=pytest.mark.matrix),
        *(pytest.param(each, marks=pytest.mark.stress) for each in ("mixtral", "glm4_moe", "granite_moe")),
        *(pytest.param(each, marks=pytest.mark.stress) for each in ("step3p7", "ernie_moe", "phimoe", "hy_v3")),
    ],
)
def test_stacked_experts_of_transformers_are_read_from_files(name: str, tmp_path: Path):
    """`save_pretrained` with `save_original_format=False`; on two ranks too, each its own experts."""
    expert_reference(name).save_pretrained(tmp_path, save_original_format=False)
    stored = load_file(tmp_path / "model.safetensors")
    assert any(each.endswith("experts.gate_up_proj") for each in stored)
    model = new_model(expert_folder(name))
    assert all(map(torch.equal, new_model(tmp_path).parameters(), model.parameters()))

    def run(group: GroupHandle) -> list[list[Tensor]]:
        folders = (tmp_path, expert_folder(name))
        return [[*new_model(folder, group, layout=ExpertLayout(PLACED)).parameters()] for folder in folders]

    assert all(all(map(torch.equal, *both)) for both in on_ranks(2, run))
    broken = next(each for each in stored if each.endswith("experts.gate_up_proj"))
    stored[broken] = stored[broken][:7].contiguous()
    save_file(stored, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"(has 8 experts|checkpoint \[7, )"):
        new_model(tmp_path)


def test_transposed_stacks_are_recognised_by_their_shape(tmp_path: Path):
    """As the hub has Qwen3-VL's with experts; transformers writes them as it has them in memory, and reads both."""
    folder = expert_folder("qwen3_vl_moe")

    def turn(tensors: dict[str, Tensor]) -> None:
        for each in [each for each in tensors if ".experts." in each]:
            tensors[each] = tensors[each].transpose(1, 2).contiguous()

    turned, model = changed("qwen3_vl_moe", tmp_path / "turned", turn), new_model(folder)
    name = "model.language_model.layers.0.mlp.experts.gate_up_proj"
    assert load_file(turned / "model.safetensors")[name].shape == (8, 64, 80)
    found = new_model(turned)
    assert all(map(torch.equal, found.parameters(), model.parameters()))
    (theirs,) = their_logits(open_experts(turned), PROMPTS[1:2])
    assert torch.equal(theirs, expected("qwen3_vl_moe")[1]), "the oracle's own"
    for parameter in found.parameters():
        parameter.data.zero_()
    found.load_weights(load_file(turned / "model.safetensors").items())
    assert all(map(torch.equal, found.parameters(), model.parameters()))


def test_stage_knows_tensors_of_other_layer_kinds():
    folder = expert_folder("glm4_moe")
    whole = new_model(folder).weights.shapes
    for stage in (Stage(0, 1, is_first=True, is_last=False), Stage(1, 4, is_first=False, is_last=True)):
        assert new_model(folder, stage=stage).weights.shapes == whole


def test_rank_reads_only_its_own_experts():
    folder = expert_folder("qwen3_moe")
    _, whole = load(folder)
    reports = on_ranks(2, lambda group: load(folder, group, layout=ExpertLayout(LINEAR))[1])
    tensors = load_file(folder / "model.safetensors")
    experts = sum(tensor.nbytes for each, tensor in tensors.items() if ".experts." in each)
    for report in reports:
        assert report.num_bytes_read <= whole.num_bytes_read - experts // 2


def test_missing_and_extra_experts_are_rejected_by_name(tmp_path: Path):
    lost, found = "model.layers.2.mlp.experts.5.up_proj.weight", "model.layers.2.mlp.experts.8.up_proj.weight"
    folder = changed("qwen3_moe", tmp_path / "lost", lambda tensors: tensors.pop(lost))
    with pytest.raises(CheckpointError, match=rf"1 missing .*checkpoint:\n  {lost}"):
        load(folder)
    folder = changed("qwen3_moe", tmp_path / "found", lambda tensors: tensors.update({found: torch.zeros(32, 64)}))
    with pytest.raises(CheckpointError, match=rf"1 in .*but not .*:\n  {found}"):
        load(folder)
    # GLM's files have a layer beyond the last, which speculates.
    beyond = {"model.layers.4.eh_proj.weight": torch.zeros(64, 128)}
    load(changed("glm4_moe", tmp_path / "beyond", lambda tensors: tensors.update(beyond)))
    with pytest.raises(CheckpointError, match=r"eh_proj"):
        load(changed("qwen3_moe", tmp_path / "beyond_others", lambda tensors: tensors.update(beyond)))
    for each in ("mtp.layers.0.weight", "model.mtp_block.0.weight"):
        load(changed("ernie_moe", tmp_path / each, lambda tensors, each=each: tensors.update({each: torch.zeros(2)})))
    model = new_model(expert_folder("qwen3_moe"))
    with pytest.raises(ValueError, match=rf"^{found}: .*no such weight"):
        model.load_weights([(found, torch.zeros(32, 64))])
    for shape in ((7, 64, 64), (8, 65, 64), (8, 64)):
        with pytest.raises(ValueError, match=rf"shape \[{', '.join(map(str, shape))}\].* has 8 experts"):
            model.load_weights([("model.layers.1.mlp.experts.gate_up_proj", torch.zeros(shape))])
    with pytest.raises(ValueError, match=r"experts\.0\.gate_proj\.weight: .*shape \[33, 64\], .*\[32, 64\]"):
        model.load_weights([("model.layers.1.mlp.experts.gate_up_proj", torch.zeros(8, 66, 64))])
    with pytest.raises(ValueError, match=r"experts\.gate_up_proj: .*meta device"):
        model.load_weights([("model.layers.1.mlp.experts.gate_up_proj", torch.zeros((8, 64, 64), device="meta"))])
    assert not model.weights.update.is_open


SPARSE_ROWS_OF_ALL = (*EXPERT_FAMILIES, *SPARSE_ROWS, *SLIDING_SPARSE_ROWS, *MINIMAX_ROWS)
SPARSE_FAMILIES = [each for each in SPARSE_ROWS_OF_ALL if each not in NEWER]
SIZES = {
    "vocab_size": 300_000,
    "hidden_size": 256,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 64,
}
_CHOICE = {"layer_types": ["minimax_m3_sparse"] * 4}
BAD = [
    ("Qwen3Moe", {"num_experts": 4, "num_experts_per_tok": 5}, "num_experts_per_tok=5 is more than the 4 experts that"),
    ("Glm4Moe", {"n_routed_experts": 9, "n_group": 2}, "n_routed_experts=9 cannot be cut into n_group=2 equal groups"),
    ("Glm4Moe", {"n_routed_experts": 8, "n_group": 8}, "cannot be cut into n_group=8 equal groups of two or more"),
    ("Glm4Moe", {"n_group": 2, "topk_group": 3}, "topk_group=3 is more than n_group=2"),
    (
        "Glm4Moe",
        {"n_routed_experts": 8, "n_group": 4, "topk_group": 1, "num_experts_per_tok": 3},
        "num_experts_per_tok=3 is more than the 2 experts of topk_group=1 groups that a token can choose from",
    ),
    ("Glm4Moe", {"topk_method": "greedy"}, "topk_method='greedy' is not supported, only 'noaux_tc'"),
    ("Qwen3Moe", {"num_experts": 0}, "num_experts=0 must be a whole number from 1 to 4096"),
    ("Qwen3Moe", {"num_local_experts": 10**9}, "num_local_experts=1000000000 must be a whole number from 1 to 4096"),
    ("Dots1", {}, "n_routed_experts=None must be a whole number"),
    ("Qwen2Moe", {"mlp_only_layers": 3}, "mlp_only_layers=3 must be a list of layers, from 0 on"),
    ("Qwen2Moe", {"use_sliding_window": 1}, "use_sliding_window=1 must be true or false"),
    ("Qwen3Moe", {"use_sliding_window": True, "sliding_window": 0}, "sliding_window=0 must be a whole number from 1"),
    ("HYV3", {"mlp_layer_types": ["sparse"] * 3}, "must list 4 of dense and sparse"),
    ("HYV3", {"mlp_layer_types": ["sparse", "dense", "moe", "sparse"]}, "must list 4 of dense and sparse"),
    ("ExaoneMoe", {"sliding_window_pattern": "LLLG"}, "sliding_window_pattern='LLLG' must be a whole number from 1"),
    ("Ernie4_5_Moe", {"moe_layer_end_index": -2}, "moe_layer_end_index=-2 must be a whole number from -1"),
    ("Ernie4_5_Moe", {"moe_k": 65}, "moe_k=65 is more than the 64 experts that a token can choose from"),
    ("Ernie4_5_Moe", {"moe_norm_min": 0}, "moe_norm_min=0 must be a number from 1e-12 to 1e+12"),
    ("HunYuanMoEV1", {"num_experts": 8, "moe_topk": [2, 2, 2]}, "moe_topk=[2, 2, 2] must list 4 numbers"),
    ("HunYuanMoEV1", {"num_experts": [8, 8, 2, 8], "moe_topk": 3}, "moe_topk=3 is more than the 2 experts"),
    ("HunYuanMoEV1", {"num_experts": [8, 8, "2", 8]}, "num_experts='2' must be a whole number from 1 to 4096"),
    ("GraniteMoeSWA", {"layer_rope_theta": [0, 1e4]}, "layer_rope_theta=[0, 10000.0] must list 4 numbers"),
    ("GraniteMoeSWA", {"layer_rope_theta": [0, 1e4, False, 1]}, "layer_rope_theta=False must be a number from 1e-12"),
    (
        "GraniteMoeSWA",
        {"layer_rope_theta": [1, 1, 1, 2], "rope_scaling": {"type": "yarn", "factor": 2.0}},
        "layer_rope_theta=[1, 1, 1, 2] must be above 1, or 0, with rope_type yarn",
    ),
    ("Phimoe", {"num_experts_per_tok": 3}, "num_experts_per_tok=3 is not supported, only 2"),
    (
        "Phimoe",
        {"rope_scaling": {"type": "linear", "factor": 2.0}},
        "rope_type='linear' is not supported, only default",
    ),
    (
        "Phimoe",
        {"rope_scaling": {"type": "longrope", "short_factor": [1, 1], "long_factor": [2, 2], "short_mscale": 1.1}},
        "rope longrope long_mscale=None must be a number",
    ),
    ("Laguna", {"num_attention_heads_per_layer": [64] * 3}, "per_layer=[64, 64, 64] must list 4 numbers"),
    ("Laguna", {"num_attention_heads_per_layer": [64, 64, 64, 3]}, "must list multiples of num_key_value_heads=8"),
    ("Laguna", {"gating": False}, "gating=False is not supported, only true or per-head or per-element"),
    ("Laguna", {"moe_router_logit_softcapping": 5.0}, "moe_router_logit_softcapping=5.0 is not supported, only 0.0"),
    ("Cohere2Moe", {"expert_selection_fn": "relu"}, "expert_selection_fn='relu' is not supported, only softmax or sig"),
    ("Cohere2Moe", {"first_k_dense_replace": 5}, "first_k_dense_replace=5 must be a whole number from 0 to 4"),
    ("Afmoe", {"route_norm": False}, "route_norm=False is not supported, only True"),
    ("MiMoV2Flash", {"swa_head_dim": 64}, "swa_head_dim=64 is not supported, only 192 in this model"),
    ("MiMoV2Flash", {"v_head_dim": 256}, "v_head_dim=256 must be head_dim=192 or less"),
    ("MiMoV2Flash", {"hybrid_layer_pattern": [0, 1]}, "hybrid_layer_pattern=[0, 1] must list 4 of 0 and 1"),
    ("MiMoV2Flash", {"moe_layer_freq": [0, 1, 1, True]}, "moe_layer_freq=[0, 1, 1, True] must list 4 of 0 and 1"),
    ("MiMoV2Flash", {"num_key_value_heads": 64}, "=64 is not a multiple of twice num_key_value_heads=64"),
    ("Dbrx", {"ffn_config": {"moe_normalize_expert_weights": 2.0}}, "=2.0 is not supported, only 1.0 or null"),
    ("Dbrx", {"attn_config": 3}, "attn_config=3 must be an object"),
    ("Dbrx", {"attn_config": {"kv_n_heads": 5}}, "n_heads=16 is not a multiple of attn_config.kv_n_heads=5"),
    ("MiniMaxM3VL", {"layer_types": ["minimax_m3_sparse"]}, "must list 4 of full_attention and minimax_m3_sparse"),
    ("MiniMaxM3VL", {**_CHOICE, "index_n_heads": 2}, "index_n_heads=2 must be num_key_value_heads=4"),
    ("MiniMaxM3VL", {**_CHOICE, "index_head_dim": 32}, "index_head_dim=32 must be at least the 128 rotated"),
    (
        "MiniMaxM3VL",
        {**_CHOICE, "index_local_blocks": 17},
        "local_blocks=17 must be at most index_topk_blocks=16",
    ),
    ("MiniMaxM3VL", {**_CHOICE, "index_local_blocks": 0}, "index_local_blocks=0 must be a whole number"),
    (
        "MiniMaxM3VL",
        {**_CHOICE, "index_topk_blocks": 9000},
        "index_topk_blocks=9000 of index_block_size must be",
    ),
    (
        "MiniMaxM3VL",
        {"sparse_attention_config": {"sparse_attention_freq": [2] * 4}},
        "sparse_attention_config.sparse_attention_freq=[2, 2, 2, 2] must list 0 or 1 for each of num_hidden",
    ),
    (
        "MiniMaxM3VL",
        {"sparse_attention_config": {"sparse_attention_freq": [1] * 3}},
        "sparse_attention_config.sparse_attention_freq=[1, 1, 1] must list 0 or 1 for each of num_hidden_layers=4",
    ),
    ("MiniMaxM3VL", {"moe_layer_freq": [0, 1, 1, 1.0]}, "moe_layer_freq=[0, 1, 1, 1.0] must list 0 or 1 for each"),
    ("MiniMaxM3VL", {"sparse_attention_config": {"sparse_init_block": 1}}, "sparse_init_block=1 is not supported"),
    ("MiniMaxM3VL", {**_CHOICE, "index_block_size": 513}, "index_block_size=513 must be at most 512"),
    ("MiniMaxM3VL", {"swiglu_alpha": 1.5}, "swiglu_alpha=1.5 is not supported, only 1.702"),
    ("BailingMoe", {}, "its layers have experts of a form that does not run"),
]


@pytest.mark.parametrize(("family", "keys", "message"), BAD, ids=[f"{each[0]} {list(each[1])}" for each in BAD])
def test_invalid_expert_keys_are_rejected_by_key(family: str, keys: dict[str, Any], message: str, tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps({**SIZES, "architectures": [f"{family}ForCausalLM"], **keys}))
    with pytest.raises(SpmdError, match=r"config\.json") as caught:
        read_model_files(tmp_path)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


BAD_STEP = [
    ({"gating": "per-element"}, "gating='per-element' is not supported, only True"),
    ({"swiglu_limits": [1.0] * 3}, "swiglu_limits=[1.0, 1.0, 1.0] must list 4 numbers"),
    ({"swiglu_limits_shared": [-1, 0, 0, 0]}, "swiglu_limits_shared=-1 must be a number from 1e-12"),
    ({"moe_layers_enum": "1,x"}, "moe_layers_enum='1,x' must list layers"),
    ({"moe_layers_enum": 3}, "moe_layers_enum=3 must list layers"),
    ({"layer_types": ["sliding_attention"] * 4}, "leaves sliding_attention in layer_types without a window"),
    ({"num_sliding_attention_heads": 12}, "num_sliding_attention_heads=12 is not a multiple of num_key_value_heads=8"),
    (
        {"per_layer_config": {"1": {"head_dim": 8}}},
        "per_layer_config={'1': {'head_dim': 8}} is not supported, only num",
    ),
    ({"rope_theta": [1e4]}, "rope_theta=[10000.0] must list 4 numbers"),
    ({"rope_theta": 1e4, "rope_scaling": 3}, "rope_scaling=3 must be an object"),
    ({"num_hidden_layers": 10**9}, "num_hidden_layers=1000000000 must be a whole number from 1 to 1024"),
]


@pytest.mark.parametrize(("keys", "message"), BAD_STEP, ids=[next(iter(keys)) for keys, _ in BAD_STEP])
def test_invalid_keys_of_step_are_rejected_by_key(keys: dict[str, Any], message: str):
    config = minimal_file("Step3p7ForConditionalGeneration")
    with pytest.raises(SpmdError, match=r"config\.json") as caught:
        model_config_of({**config, "text_config": {**config["text_config"], **keys}}, Path("config.json"))
    assert message in str(caught.value)


def test_layers_of_hunyuan_have_counts_of_their_own():
    """transformers cannot build a file with a list of experts: the sizes are compared with the file alone."""
    config = {**minimal_file("HunYuanMoEV1ForCausalLM"), "num_experts": [8, 4, 4, 2, 9], "moe_topk": [3, 2, 1, 2]}
    model_config = model_config_of(config, Path("config.json"))
    found = [(layer.experts.num_experts, layer.experts.num_chosen) for layer in model_config.layers if layer.experts]
    assert found == [(8, 3), (4, 2), (4, 1), (2, 2)]
    context = LayerContext(single_group(), ReferenceKernels(), SdpaBackend(), torch.float32, torch.device("meta"))
    shapes = build_model(context, model_config).weights.shapes
    assert [shapes[f"model.layers.{layer}.mlp.gate.wg.weight"][0] for layer in range(4)] == [8, 4, 4, 2]
    assert "model.layers.3.mlp.experts.1.up_proj.weight" in shapes
    assert "model.layers.3.mlp.experts.2.up_proj.weight" not in shapes


COUNTS_OF_SHARED = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
SIZES_OF_SHARED = ("shared_intermediate_size", "share_expert_dim", "shared_expert_intermediate_size")
SCALINGS = (
    *("routed_scaling_factor", "router_scaling_factor", "moe_router_scaling_factor"),
    *("route_scale", "moe_routed_scaling_factor"),
)


def minimal_file(architecture: str) -> dict[str, Any]:
    counts = {"n_routed_experts": 16, "num_experts_per_tok": 2} if architecture == "Dots1ForCausalLM" else {}
    sizes, names = {**SIZES, **counts}, {"architectures": [architecture], "model_type": MODEL_TYPES[architecture]}
    return {"text_config": sizes, **names} if FAMILIES[architecture].text is not None else {**sizes, **names}


def test_nested_keys_of_dbrx_have_transformers_defaults():
    theirs, whole = AutoConfig.for_model("dbrx"), {"architectures": ["DbrxForCausalLM"], "vocab_size": 96}
    ours = model_config_of(whole, Path("config.json"))
    (layer,) = dict.fromkeys(ours.layers)
    assert layer.experts is not None
    sizes = (ours.hidden_size, ours.num_layers, ours.max_position_embeddings)
    assert sizes == (theirs.hidden_size, theirs.num_hidden_layers, theirs.max_position_embeddings)
    assert (layer.num_heads, layer.num_kv_heads) == (theirs.num_attention_heads, theirs.attn_config.kv_n_heads)
    experts = (layer.experts.num_experts, layer.experts.num_chosen, layer.experts.intermediate_size)
    of_file = theirs.ffn_config
    assert experts == (of_file.moe_num_experts, of_file.moe_top_k, of_file.ffn_hidden_size)
    assert (layer.experts.renormalises, layer.norm.eps, ours.ropes[0].rope_theta) == (True, 1e-5, 1e4)
    given = {"attn_config": {"rope_theta": 5e5}, "rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}}
    given |= {"ffn_config": {"moe_normalize_expert_weights": None, "ffn_act_fn": {"name": "gelu"}}}
    other = model_config_of({**whole, **given}, Path("config.json"))
    assert (other.ropes[0].rope_theta, other.layers[0].activation) == (5e5, "gelu")
    assert not other.layers[0].experts.renormalises


@pytest.mark.parametrize("architecture", [each for each in SPARSE_FAMILIES if each != "DbrxForCausalLM"])
def test_defaults_of_omitted_keys_equal_transformers(architecture: str):
    config = minimal_file(architecture)
    whole, ours = AutoConfig.for_model(**config), model_config_of(config, Path("config.json"))
    theirs = whole.get_text_config()
    assert ours.layers[0].num_kv_heads == theirs.num_key_value_heads
    assert ours.head_size == (getattr(theirs, "head_dim", None) or 4)
    assert ours.max_position_embeddings == theirs.max_position_embeddings
    assert ours.has_tied_embeddings == getattr(whole, "tie_word_embeddings", False)
    assert ours.norm.eps == (theirs.rms_norm_eps or theirs.layer_norm_eps)
    assert ours.eos_token_ids == (() if theirs.eos_token_id is None else (theirs.eos_token_id,))
    rope, theirs_rope = ours.ropes[0], theirs.rope_parameters
    theirs_rope = theirs_rope.get("full_attention", theirs_rope)
    for key in ("rope_type", "rope_theta", "factor", "truncate", "beta_fast", "original_max_position_embeddings"):
        if key in theirs_rope:
            assert getattr(rope, key) == theirs_rope[key], key
    assert rope.partial_factor == theirs_rope.get("partial_rotary_factor", 1.0)
    kinds = getattr(theirs, "layer_types", None) or ["full_attention"] * 4
    window = getattr(theirs, "sliding_window", None) or 0
    if architecture != "MixtralForCausalLM":
        assert [layer.window for layer in ours.layers] == [
            window if kind == "sliding_attention" else 0 for kind in kinds
        ]
    experts = next(layer.experts for layer in ours.layers if layer.experts is not None)
    counts = [
        getattr(theirs, key) for key in ("n_routed_experts", "num_experts", "num_local_experts") if hasattr(theirs, key)
    ]
    assert [experts.num_experts] * len(counts) == counts
    assert experts.num_chosen == theirs.num_experts_per_tok
    assert experts.intermediate_size == getattr(theirs, "moe_intermediate_size", 96)
    assert experts.min_sum == getattr(theirs, "moe_norm_min", 0.0)
    assert experts.jitter == getattr(theirs, "router_jitter_noise", 0.0)
    assert ours.has_head_bias == getattr(theirs, "lm_head_bias", False)
    shared = [getattr(theirs, key) for key in SIZES_OF_SHARED if hasattr(theirs, key)]
    assert [experts.shared_size] * len(shared) == shared
    shared = [getattr(theirs, key) for key in COUNTS_OF_SHARED if hasattr(theirs, key)]
    assert [experts.shared_size] * len(shared) == [(each or 0) * experts.intermediate_size for each in shared]
    # The sum of a softmax of the chosen is 1.
    is_softmax = getattr(theirs, "expert_selection_fn", "") == "softmax"
    assert experts.renormalises == (getattr(theirs, "norm_topk_prob", experts.renormalises) and not is_softmax)
    scalings = [getattr(theirs, key) for key in SCALINGS if hasattr(theirs, key)] or [1.0]
    assert [experts.scaling] == scalings
    assert max(experts.limit, experts.bound) == getattr(theirs, "swiglu_limit", experts.bound)
    firsts = ("first_k_dense_replace", "moe_layer_start_index", "num_dense_layers")
    num_dense = next((getattr(theirs, key) for key in firsts if hasattr(theirs, key)), 0)
    listed = getattr(theirs, "mlp_only_layers", None) or []
    is_dense = [index < num_dense or index in listed for index in range(4)]
    if getattr(theirs, "mlp_layer_types", None):
        is_dense = [kind == "dense" for kind in theirs.mlp_layer_types]
    assert [layer.experts is None for layer in ours.layers] == is_dense


def mutants(architecture: str) -> list[tuple[str, Family]]:
    """The row with one entry as Llama has it, or one entry of its experts as Qwen3-MoE's plain ones."""
    row = FAMILIES[architecture]
    assert row.experts is not None
    # What transformers has in memory, and layers that speculate, are compared by tests of their own.
    unseen = (
        "models",
        "defaults",
        "required",
        "names.aliases",
        "names.layer_aliases",
        "names.joined",
        "names.joined_rows",
    )
    # Parameters and buffers of transformers are compared in test_buffers.py.
    unseen += ("names.ignores_later_layers", "names.as_parameters")
    return entries(row, Family(), *unseen) + without_each(row, "defaults", "required")


def readings(architecture: str, required: tuple[str, ...]) -> list[Any]:
    """What a minimal file says, files with another value of what must have one, and one with every key of experts."""
    whole = minimal_file(architecture)
    minimal = {"architectures": whole["architectures"], **whole.get("text_config", whole)}
    files = [
        whole,
        minimal,
        *({**minimal, key: 16} for key in ("num_local_experts", "n_routed_experts", "num_experts")),
    ]
    files += [{**minimal, "attention_bias": True, "mlp_bias": True}, {**minimal, "decoder_sparse_step": 2}]
    files += [{**minimal, "num_hidden_layers": 70}]
    files += [{**minimal, "mlp_only_layers": [1]}, *({**minimal, key: "other"} for key in required)]
    files += [{**minimal, "use_sliding_window": True, "sliding_window": 9, "num_hidden_layers": 70}]
    files += [{**minimal, "use_sliding_window": True}]
    files += [{**minimal, "sliding_window_pattern": 3, "hidden_act": "gelu"}]
    files += [{**minimal, "rope_scaling": {"type": "dynamic", "alpha": 50.0, "factor": 1.0}}]
    kinds = {"layer_types": ["sliding_attention", "full_attention"] * 2, "mlp_layer_types": ["sparse", "dense"] * 2}
    files += [{**minimal, **kinds, "swa_rope_theta": 500.0}]
    files += [
        {**minimal, **_CHOICE, "hidden_act": "swigluoai"},
        {**minimal, "mlp_layer_types": ["sparse", "dense"] * 2},
    ]
    files += [{**minimal, "moe_layer_freq": [0, 1] * 2}]
    files += [{key: value for key, value in minimal.items() if key != "intermediate_size"}]
    files += [{**minimal, "rope_parameters": None}, {**minimal, "attn_config": {"rope_theta": 500.0}}]
    if "text_config" in whole:
        files.append({**whole, "text_config": {**whole["text_config"], "tie_word_embeddings": True}})
    return readings_of(files, with_reasons=True)


NOTICED: dict[str, Any] = {"OlmoeForCausalLM": [], "Glm4vMoeForConditionalGeneration": pytest.mark.stress}
"""Families whose entries are broken one by one in another tier than matrix."""


def is_case_noticed(name: str) -> bool:
    def logits_of(folder: Path) -> list[Tensor]:
        return prompt_logits(new_model(folder, config=read_model_files(folder).model_config), PROMPTS[2:3])

    def is_right(logits: list[Tensor]) -> bool:
        return relative_error(logits[0], expected(name)[2]) < TOLERANCE

    return is_noticed((expert_folder(name), thinned_expert_folder(name)), logits_of, is_right)


SAME_FUNCTION = {
    # Stacks that are as in memory are read without it too; the test of those that are turned needs it.
    ("Qwen3VLMoeForConditionalGeneration", "names.stacked"),
    ("MiniMaxM3VLForCausalLM", "names.stacked"),
    # Weights that have the sum 1 divided by it: other bits, not another number.
    ("GraniteMoeForCausalLM", "experts.renormalises"),
    ("GraniteMoeSharedForCausalLM", "experts.renormalises"),
    ("GptOssForCausalLM", "experts.renormalises"),
    ("GraniteMoeSWAForCausalLM", "experts.renormalises"),
    # Its weights are not divided by their sum, whatever the row says.
    ("PhimoeForCausalLM", "experts.renormalises"),
    # Layers that speculate, which the files here do not have: see the test of tensors beyond the model.
    ("ExaoneMoeForCausalLM", "names.ignored_prefixes"),
    ("Ernie4_5_MoeForCausalLM", "names.ignored_prefixes"),
    ("MellumForCausalLM", "names.ignored_prefixes"),
    ("MiMoV2FlashForCausalLM", "names.ignored_prefixes"),
    ("MiniMaxM3VLForCausalLM", "names.ignored_prefixes"),
    # Sections differ in images alone: see the tests of rows in text models.
    ("Glm4vMoeForConditionalGeneration", "rope.sections"),
}


@pytest.mark.gate("GptOssForCausalLM", "MiniMaxM2ForCausalLM", "Qwen2MoeForCausalLM")
@pytest.mark.parametrize(
    "architecture",
    [pytest.param(each, marks=NOTICED.get(each, pytest.mark.matrix)) for each in SPARSE_FAMILIES],
)
def test_comparison_detects_each_row_entry_set_to_plain(architecture: str, monkeypatch: pytest.MonkeyPatch):
    cases = [name for name in CASES if read_model_files(expert_folder(name)).model_config.architecture == architecture]
    assert cases
    required = tuple(FAMILIES[architecture].required)
    read = partial(readings, architecture, required)
    silent = silent_mutants(
        monkeypatch, architecture, mutants(architecture), read, lambda: any(map(is_case_noticed, cases))
    )
    assert [what for what in silent if (architecture, what) not in SAME_FUNCTION] == []


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("name", "rule"),
    [("qwen2_moe_window", each) for each in ("never", "late_layers", "in_use")]
    + [("qwen3_moe_sparse_step", each) for each in ("never", "late_layers", "even_layers")],
)
def test_comparison_detects_windows_of_other_layers(name: str, rule: str, monkeypatch: pytest.MonkeyPatch):
    """Two of Qwen's families read the same keys differently."""
    assert not is_case_noticed(name)
    architecture = read_model_files(expert_folder(name)).model_config.architecture
    row = FAMILIES[architecture]
    monkeypatch.setitem(FAMILIES, architecture, replace(row, windows=replace(row.windows, rule=rule)))
    assert is_case_noticed(name)


def test_stacked_experts_of_a_backbone_need_no_prefix():
    sizes = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    keys = {"num_key_value_heads": 2, "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2}
    config = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "moe_intermediate_size": 24,
        "intermediate_size": 48,
        **sizes,
        **keys,
    }
    model_config = replace(
        model_config_of(config, Path("config.json")), pooling=PoolingConfig("embed", "LAST", sizes["hidden_size"])
    )
    context = LayerContext(single_group(), ReferenceKernels(), SdpaBackend(), torch.float32, torch.device("cpu"))
    model = build_model(context, model_config)
    stack = torch.randn(4, 48, 32)
    loaded = model.load_weights([("layers.0.mlp.experts.gate_up_proj", stack)])
    parts = [
        f"model.layers.0.mlp.experts.{expert}.{part}_proj.weight" for expert in range(4) for part in ("gate", "up")
    ]
    assert loaded == set(parts)
    with model.as_checkpoint() as view:
        assert torch.equal(torch.cat([view.get_parameter(name) for name in parts]), stack.flatten(0, 1))
