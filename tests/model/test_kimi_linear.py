"""Kimi Linear against transformers: logits, steps, shards, stages, tensors, each entry of its row.

Float32, 1e-4 of the largest logit. The row is read from two files: with every key, and thinned as the hub's are. What
its layers share with other gated delta nets and with latent attention is in the tests of those.
"""

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from family_checks import (
    adapter_logits,
    check_adapters,
    check_engine,
    check_rejected,
    check_stages,
    check_steps,
    check_tensors,
    logits_of_ranks,
    planned_models,
    readings_of,
    silent_mutants,
    without_each,
)
from family_mutants import entries
from hybrid_runs import run_rows
from kimi_checkpoints import KIMI_CASES, kimi_folder, kimi_reference, saved_kimi_folder, thinned_kimi_folder
from model_configs import with_delta, with_layers
from our_model import is_noticed, load_model
from plain_models import new_model
from reference_models import Oracle, random_prompt
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, KimiLinearConfig

from kv_cache.cache_spec import BlockLayer, StateLayer
from spmd_worker.base.errors import ConfigError
from spmd_worker.model_config.families.family import Family
from spmd_worker.model_config.families.table import FAMILIES
from spmd_worker.model_config.model_config import ModelConfig, model_config_of, read_model_files
from spmd_worker.model_config.rope import RopeParameters
from spmd_worker.ranks.topology import RankLayout, check_divides
from spmd_worker.worker.memory.estimate import cache_spec

TOLERANCE = 1e-4
NAME, ARCHITECTURE = "kimi_linear", "KimiLinearForCausalLM"
ROW = FAMILIES[ARCHITECTURE]
ROWS = [random_prompt(length, seed=7, vocab_size=96) for length in (70, 5, 33)]
each_case = pytest.mark.parametrize(
    "name", [pytest.param(each, marks=[] if each == NAME else pytest.mark.matrix) for each in KIMI_CASES]
)

oracle = Oracle(kimi_reference, ROWS)
expected, worst_error = oracle.expected, oracle.worst_error


@pytest.mark.guarantee("Models compute what transformers computes")
@each_case
def test_logits_and_ids_equal_transformers(name: str):
    logits, _ = run_rows([load_model(kimi_folder(name))], ROWS)
    assert worst_error(name, logits) < TOLERANCE / 5
    assert all(torch.equal(found.argmax(-1), right.argmax(-1)) for found, right in zip(logits, expected(name)))
    full, thin = (read_model_files(each(name)).model_config for each in (kimi_folder, thinned_kimi_folder))
    assert thin == full
    theirs = [AutoConfig.from_pretrained(each(name)) for each in (kimi_folder, thinned_kimi_folder)]
    for key in ("layer_types", "mlp_layer_types", "linear_head_dim", "linear_num_heads", "linear_conv_kernel_dim"):
        assert getattr(theirs[0], key) == getattr(theirs[1], key), "the oracle's own"


@pytest.mark.guarantee("A row's answer depends on the row alone")
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.stress)])
def test_steps_do_not_change_bits_or_states(dtype: str):
    """Prompts cut anywhere, rows together and alone; slots and blocks hold NaN before."""
    check_steps(load_model(kimi_folder(NAME), dtype=dtype), ROWS)


@pytest.mark.stress
def test_bfloat16_is_near_float32():
    """In the mean: now and then a token goes to another expert."""
    right = torch.cat(expected(NAME))
    found = torch.cat(run_rows([load_model(kimi_folder(NAME), dtype="bfloat16")], ROWS)[0])
    assert 1e-3 < float((found - right).norm() / right.norm()) < 0.2


def test_shards_equal_transformers_and_stages_one_rank():
    assert worst_error(NAME, logits_of_ranks(kimi_folder(NAME), 2, ROWS, 40)) < TOLERANCE
    check_stages(kimi_folder(NAME), 1, ROWS, 40)


def test_ranks_that_do_not_divide_heads_are_rejected():
    with pytest.raises(ConfigError, match="gated delta nets have 2 value heads"):
        check_divides(RankLayout(4), with_delta(config_of(), num_key_heads=2, num_value_heads=2))


def test_all_checkpoint_tensors_are_viewed_and_loaded():
    """By names of the hub, of files that transformers saves, and of its memory; on two ranks together all of each."""
    tensors = load_file(kimi_folder(NAME) / "model.safetensors")
    assert tensors["model.layers.0.self_attn.A_log"].shape == (1, 1, 4, 1)
    assert {"model.layers.0.mlp.up_proj.weight", "model.layers.1.block_sparse_moe.experts.7.w3.weight"} < set(tensors)
    saved = load_file(saved_kimi_folder(NAME) / "model.safetensors")
    check_tensors(kimi_folder(NAME), saved, kimi_reference(NAME).state_dict())


@pytest.mark.guarantee("The plan's bytes are those of the run")
@each_case
def test_planned_bytes_equal_parameters_and_states(name: str):
    config = config_of(name)
    for layout, rank, dtype, model in planned_models(config):
        spec, size = cache_spec(config, layout, rank, dtype, 16), layout.tensor_parallel_size
        num_taps = model.model.layers[0].linear_attn.conv.weight.shape[2]
        net = StateLayer((4 // size, 12, 12), (num_taps - 1, 3 * 48 // size))
        assert spec.states == (net, None, net)
        assert spec.layers == (None, BlockLayer(1, 32 + 16, 0), None)


def test_adapters_of_all_projections_are_those_of_peft(tmp_path: Path):
    targets = ("q_proj", "b_proj", "f_a_proj", "f_b_proj", "g_a_proj", "g_b_proj", "o_proj", "kv_a_proj_with_mqa")
    reference = partial(deepcopy, kimi_reference(NAME))
    check_adapters(oracle, NAME, *adapter_logits(kimi_folder(NAME), reference, targets, tmp_path, ROWS))


def test_engine_gives_ids_of_transformers():
    check_engine(kimi_folder(NAME), kimi_reference(NAME), ROWS, 4)


# ---- each entry of the row, and mistakes that no entry makes -------------------------------------------------------

UNSEEN = (
    *("models", "defaults", "required", "file_keys", "names.parts"),
    *("names.joined_rows", "names.layer_aliases", "rope", "rope.may_be_partial", "ropes"),
)
"""Entries of which every part has a mutant or a test of its own, or, the ropes, without an effect: no layer has one."""


def bare(**keys: Any) -> dict[str, Any]:
    """A file that leaves out nearly all."""
    sizes = {"vocab_size": 160, "hidden_size": 64, "num_hidden_layers": 10, "num_attention_heads": 4}
    return {"architectures": [ARCHITECTURE], **sizes, **keys}


def mutants(row: Family) -> list[tuple[str, Family]]:
    """The row with one entry as Llama's row has it, and without one of its defaults, names, keys or rules."""
    tables = ("defaults", "file_keys", "required", "names.parts")
    return entries(row, Family(), *UNSEEN) + without_each(row, *tables)


def readings() -> list[Any]:
    """Meanings of files that leave out some keys; None for one that is rejected."""
    files = [{"architectures": [ARCHITECTURE]}, bare(), bare(mlp_bias=True, attention_bias=True)]
    files += [bare(first_k_dense_replace=2, head_dim=7), *(bare(**{key: "gelu"}) for key in ROW.required)]
    return readings_of(files)


@pytest.mark.stress
@pytest.mark.control("Models compute what transformers computes")
def test_comparison_detects_each_row_entry_set_to_llama(monkeypatch: pytest.MonkeyPatch):
    folders = [each(name) for name in KIMI_CASES for each in (kimi_folder, thinned_kimi_folder)]
    assert [each is None for each in readings()] == [False] * 4 + [True] * len(ROW.required)
    configs = [read_model_files(folder).model_config for folder in folders]

    def logits_of(folder: Path) -> list[Tensor]:
        config = read_model_files(folder).model_config
        assert config == configs[folders.index(folder)], "the file is read otherwise"
        return run_rows([new_model(folder)], ROWS[1:2])[0]

    is_any_noticed = partial(is_noticed, folders[:3], logits_of, lambda logits: True)
    assert not silent_mutants(monkeypatch, ARCHITECTURE, mutants(ROW), readings, is_any_noticed)


def config_of(name: str = NAME) -> ModelConfig:
    return read_model_files(kimi_folder(name)).model_config


def rotated(config: ModelConfig) -> ModelConfig:
    """Latent layers with DeepSeek's rope."""
    return replace(with_layers(config, rope=0), ropes=(RopeParameters(size=16, is_interleaved=True),))


IN_CONFIG: Mapping[str, Callable[[ModelConfig], ModelConfig]] = {
    "gate by silu": lambda config: with_delta(config, gate_activation="silu"),
    "epsilon of the gated norm": lambda config: with_delta(config, norm_eps=1e-6),
    "beta doubled": lambda config: with_delta(config, beta_scale=2.0),
    "latent keys turned": rotated,
    "scale of the unrotated part alone": lambda config: with_layers(config, scale=32**-0.5),
}


@pytest.mark.control("Models compute what transformers computes")
@pytest.mark.parametrize("mistake", IN_CONFIG)
def test_comparison_detects_mistakes_of_configs(mistake: str):
    config = IN_CONFIG[mistake](config_of())
    logits, _ = run_rows([new_model(kimi_folder(NAME), config=config)], ROWS)
    assert worst_error(NAME, logits) > 10 * TOLERANCE


@pytest.mark.control("Models compute what transformers computes")
@pytest.mark.parametrize("mistake", ["rates of other heads", "gates exchanged"])
def test_comparison_detects_mistakes_of_layers(mistake: str):
    model = new_model(kimi_folder(NAME))
    for layer in (model.model.layers[0], model.model.layers[2]):
        net = layer.linear_attn
        if mistake == "gates exchanged":
            net.z_proj, net.a_proj = net.a_proj, net.z_proj
        else:
            net.gates.a_log.data = net.gates.a_log.data.flip(2)
    assert worst_error(NAME, run_rows([model], ROWS)[0]) > 10 * TOLERANCE


# ---- config.json ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keys", [{}, {"num_hidden_layers": 6, "first_k_dense_replace": 2}], ids=["", "sizes"])
def test_omitted_keys_have_the_defaults_of_transformers(keys: dict[str, Any]):
    theirs, ours = KimiLinearConfig(**keys), model_config_of({"architectures": [ARCHITECTURE], **keys}, Path("c.json"))
    kinds = {"delta": "linear_attention", "latent": "full_attention"}
    assert [kinds[layer.mixer] for layer in ours.layers] == theirs.layer_types
    assert ["sparse" if layer.experts else "dense" for layer in ours.layers] == theirs.mlp_layer_types
    delta, latent, experts = ours.layers[0].delta, ours.layers[4].latent, ours.layers[-1].experts
    assert delta is not None
    assert latent is not None
    assert experts is not None
    assert (delta.num_value_heads, delta.key_size) == (theirs.linear_num_heads, theirs.linear_head_dim)
    assert (delta.kernel_size, delta.norm_eps) == (theirs.linear_conv_kernel_dim, theirs.rms_norm_eps)
    assert (latent.rank, latent.nope_size, latent.value_size) == (512, 128, theirs.v_head_dim)
    assert (latent.rope_size, latent.query_rank) == (theirs.qk_rope_head_dim, theirs.q_lora_rank or 0)
    assert (experts.num_experts, experts.num_chosen) == (theirs.num_local_experts, theirs.num_experts_per_tok)
    assert (experts.intermediate_size, experts.scaling) == (theirs.moe_intermediate_size, theirs.routed_scaling_factor)
    assert (experts.num_groups, experts.renormalises) == (theirs.n_group, theirs.norm_topk_prob)
    assert experts.shared_size == theirs.n_shared_experts * theirs.moe_intermediate_size
    assert (ours.vocab_size, ours.hidden_size) == (theirs.vocab_size, theirs.hidden_size)
    assert (ours.layers[0].intermediate_size, ours.layers[0].num_heads) == (theirs.intermediate_size, 32)
    assert ours.max_position_embeddings == theirs.max_position_embeddings
    assert ours.eos_token_ids == (theirs.eos_token_id,)
    assert ours.has_tied_embeddings == theirs.tie_word_embeddings
    assert not ours.ropes


BROKEN: Mapping[str, tuple[dict[str, Any], str]] = {
    "kinds": ({"layer_types": ["kda"] * 10}, "must list 10 of linear_attention, full_attention"),
    "counted from 0": (
        {"linear_attn_config": {"kda_layers": [*range(9)], "full_attn_layers": [9]}},
        "linear_attn_config.kda_layers=[0, 1, 2, 3, 4, 5, 6, 7, 8] and full_attn_layers must list each of the layers",
    ),
    "layer left out": ({"linear_attn_config": {"full_attn_layers": [4, 8]}}, "each of the layers 1 to 10 once"),
    "no list": ({"linear_attn_config": {"kda_layers": 3}}, "kda_layers=3 must be a list of layers, counted from 1"),
    "section": ({"linear_attn_config": 3}, "linear_attn_config=3 must be an object"),
    "size": ({"linear_attn_config": {"head_dim": 0}}, "linear_attn_config.head_dim=0 must be a whole number"),
    "rope": ({"mla_use_nope": False}, "mla_use_nope=False is not supported, only True"),
    "groups": ({"num_expert_group": 3}, "cannot be cut into n_group=3 equal groups"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_config_error_names_key_and_rule(case: str):
    keys, message = BROKEN[case]
    check_rejected(bare(**keys), message)
