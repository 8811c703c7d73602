"""Ling 3.0 (Bailing hybrid) against transformers: logits, steps, shards, stages, tensors, each entry of its row.

Float32, 1e-4 of the largest logit. What its layers share with other gated delta nets and with latent attention is in
the tests of those.
"""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from bailing_checkpoints import BAILING_CASES, bailing_folder, bailing_reference, thinned_bailing_folder
from family_checks import (
    adapter_logits,
    check_adapters,
    check_stages,
    check_steps,
    check_tensors,
    logits_of_ranks,
    planned_models,
)
from family_mutants import entries
from hybrid_runs import run_rows
from our_model import is_noticed, load_model
from reference_models import Oracle, greedy_without_cache, random_prompt, relative_error
from safetensors.torch import load_file
from torch import Tensor
from transformers import BailingHybridConfig

from kv_cache.cache_spec import BlockLayer, StateLayer
from spmd_worker import LLM, SamplingParams
from spmd_worker.base.errors import ModelConfigError, SpmdError
from spmd_worker.model.layers.latent_attention import LatentAttention
from spmd_worker.model_config.families.family import Family
from spmd_worker.model_config.families.table import FAMILIES
from spmd_worker.model_config.model_config import ModelConfig, model_config_of, read_model_files
from spmd_worker.worker.memory.estimate import cache_spec

TOLERANCE = 1e-4
NAME, ARCHITECTURE = "bailing_hybrid", "BailingHybridForCausalLM"
ROW = FAMILIES[ARCHITECTURE]
ROWS = [random_prompt(length, seed=7, vocab_size=96) for length in (70, 5, 33)]
each_case = pytest.mark.parametrize(
    "name", [pytest.param(each, marks=[] if each == NAME else pytest.mark.matrix) for each in BAILING_CASES]
)

oracle = Oracle(bailing_reference, ROWS)
expected, worst_error = oracle.expected, oracle.worst_error


@pytest.mark.guarantee("Models compute what transformers computes")
@each_case
def test_logits_equal_transformers_with_full_and_thin_files(name: str):
    logits, _ = run_rows([load_model(bailing_folder(name))], ROWS)
    assert worst_error(name, logits) < TOLERANCE / 5
    full, thin = (read_model_files(each(name)).model_config for each in (bailing_folder, thinned_bailing_folder))
    assert thin == full


@pytest.mark.guarantee("A row's answer depends on the row alone")
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.stress)])
def test_steps_do_not_change_bits_or_states(dtype: str):
    """Prompts cut anywhere, rows together and alone; slots and blocks hold NaN before."""
    check_steps(load_model(bailing_folder(NAME), dtype=dtype), ROWS)


def test_shards_equal_transformers_and_stages_one_rank():
    assert worst_error(NAME, logits_of_ranks(bailing_folder(NAME), 2, ROWS, 40)) < TOLERANCE
    check_stages(bailing_folder(NAME), 1, ROWS, 40)


def test_all_checkpoint_tensors_are_viewed_and_loaded():
    """Names of files and of transformers' memory; two ranks together read all of each."""
    tensors = load_file(bailing_folder(NAME) / "model.safetensors")
    assert {"model.layers.0.attention.q_conv1d.weight", "model.layers.1.mlp.gate.expert_bias"} < set(tensors)
    assert tensors["model.layers.0.attention.A_log"].shape == (4,)
    check_tensors(bailing_folder(NAME), tensors, bailing_reference(NAME).state_dict())


@pytest.mark.guarantee("The plan's bytes are those of the run")
@each_case
def test_planned_bytes_equal_parameters_and_states(name: str):
    config = read_model_files(bailing_folder(name)).model_config
    for layout, rank, dtype, model in planned_models(config):
        spec, size = cache_spec(config, layout, rank, dtype, 16), layout.tensor_parallel_size
        taps = config.layers[2].delta
        assert taps is not None
        net = StateLayer((4 // size, 12, 12), (taps.kernel_size - 1, 3 * 48 // size))
        kinds = {"delta": (net, None), "latent": (None, BlockLayer(1, 32 + 16, 0))}
        assert list(zip(spec.states, spec.layers, strict=True)) == [kinds[layer.mixer] for layer in config.layers]
        assert model is not None


def test_adapters_of_all_projections_are_those_of_peft(tmp_path: Path):
    targets = ("q_proj", "b_proj", "f_proj", "g_proj", "o_proj", "kv_a_proj_with_mqa")
    reference = partial(deepcopy, bailing_reference(NAME))
    check_adapters(oracle, NAME, *adapter_logits(bailing_folder(NAME), reference, targets, tmp_path, ROWS))


def test_engine_gives_ids_of_transformers():
    """Small steps, fewer slots than rows, the same prompts again from snapshots."""
    rows, greedy = [*ROWS, [*ROWS[0], *ROWS[1]]], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    right = [greedy_without_cache(bailing_reference(NAME), row, 4) for row in rows]
    with LLM(bailing_folder(NAME), num_blocks=40, max_num_batched_tokens=17, max_num_seqs=2) as llm:
        for _ in range(2):
            outputs = llm.generate(rows, greedy, use_tqdm=False)
            assert [list(each.outputs[0].token_ids) for each in outputs] == right


def with_delta(**changes: Any) -> Callable[[ModelConfig], ModelConfig]:
    def change(config: ModelConfig) -> ModelConfig:
        layers = [
            layer if layer.delta is None else replace(layer, delta=replace(layer.delta, **changes))
            for layer in config.layers
        ]
        return replace(config, layers=tuple(layers))

    return change


MISTAKES: dict[str, Callable[[ModelConfig], ModelConfig]] = {
    "decays without a bound": with_delta(decay_bound=0.0),
    "another bound": with_delta(decay_bound=-5.0),
    "another gate": with_delta(gate_activation="silu"),
    "halves are rotated": lambda config: replace(config, ropes=(replace(config.ropes[0], is_interleaved=False),)),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_comparison_detects_each_mistake(mistake: str):
    """Negative control."""
    folder = bailing_folder(NAME)
    model = load_model(folder, MISTAKES[mistake](read_model_files(folder).model_config))
    assert worst_error(NAME, run_rows([model], ROWS)[0]) > 10 * TOLERANCE


def test_comparison_detects_heads_without_gates():
    """Negative control."""
    model = load_model(bailing_folder(NAME))
    attention = model.model.layers[1].self_attn
    assert isinstance(attention, LatentAttention)
    attention.g_proj = None
    assert worst_error(NAME, run_rows([model], ROWS)[0]) > 10 * TOLERANCE


# Names in memory, by which weights are updated; what files may have in other words.
UNSEEN = ("models", "defaults", "required", "names.joined_rows", "names.aliases", "names.layer_aliases")
UNSEEN += ("names.ignores_later_layers", "rope", "rope.may_be_partial")


def readings() -> list[Any]:
    """Meanings of files with no keys, few and other ones."""
    found: list[Any] = []
    sizes = {"num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 4}
    others = {"mlp_layer_types": ["sparse"] * 4, "kda_safe_gate": False, "mlp_bias": True, "num_key_value_heads": 3}
    for keys in ({}, sizes, {**sizes, **others}):
        try:
            found.append(model_config_of({"architectures": [ARCHITECTURE], **keys}, Path("config.json")))
        except SpmdError as error:
            found.append(str(error))
    return found


def mutants() -> list[tuple[str, Family]]:
    defaults = [
        (f"defaults.{key}", replace(ROW, defaults={each: ROW.defaults[each] for each in ROW.defaults if each != key}))
        for key in ROW.defaults
    ]
    return entries(ROW, Family(), *UNSEEN) + defaults


@pytest.mark.stress
def test_comparison_detects_each_row_entry_set_to_plain(monkeypatch: pytest.MonkeyPatch):
    right, silent = readings(), []

    def logits_of(folder: Path) -> list[Tensor]:
        return run_rows([load_model(folder)], ROWS[1:2])[0]

    def is_right(logits: list[Tensor]) -> bool:
        return relative_error(logits[0], expected(NAME)[1]) < TOLERANCE

    for what, mutant in mutants():
        monkeypatch.setitem(FAMILIES, ARCHITECTURE, mutant)
        folders = (bailing_folder(NAME), thinned_bailing_folder(NAME))
        if readings() == right and not is_noticed(folders, logits_of, is_right):
            silent.append(what)
    assert silent == []


def test_missing_keys_have_the_defaults_of_transformers():
    theirs = BailingHybridConfig()
    ours = model_config_of({"architectures": [ARCHITECTURE]}, Path("config.json"))
    kinds = {"delta": "linear_attention", "latent": "full_attention"}
    assert [kinds[layer.mixer] for layer in ours.layers] == theirs.layer_types
    assert ["dense" if layer.experts is None else "sparse" for layer in ours.layers] == theirs.mlp_layer_types
    latent, delta, experts = ours.layers[5].latent, ours.layers[4].delta, ours.layers[4].experts
    assert latent is not None
    assert delta is not None
    assert experts is not None
    assert (latent.rank, latent.nope_size, latent.rope_size, latent.value_size, latent.query_rank) == (
        *(theirs.kv_lora_rank, theirs.qk_nope_head_dim, theirs.qk_rope_head_dim, theirs.v_head_dim),
        0,
    )
    assert (delta.key_size, delta.num_value_heads, delta.kernel_size, delta.decay_bound) == (
        *(theirs.linear_head_dim, theirs.linear_num_heads, theirs.linear_conv_kernel_dim),
        theirs.kda_lower_bound,
    )
    assert (experts.num_experts, experts.num_chosen, experts.num_groups, experts.num_chosen_groups) == (
        *(theirs.num_local_experts, theirs.num_experts_per_tok, theirs.n_group, theirs.topk_group),
    )
    assert (experts.scaling, experts.renormalises, experts.shared_size) == (
        *(theirs.routed_scaling_factor, theirs.norm_topk_prob),
        theirs.n_shared_experts * theirs.moe_intermediate_size,
    )
    assert (ours.vocab_size, ours.hidden_size, ours.max_position_embeddings, ours.layers[0].intermediate_size) == (
        *(theirs.vocab_size, theirs.hidden_size, theirs.max_position_embeddings),
        theirs.intermediate_size,
    )
    assert (ours.ropes[0].rope_theta, ours.eos_token_ids) == (theirs.rope_theta, (theirs.eos_token_id,))


BAD: list[tuple[dict[str, Any], str]] = [
    ({"kda_lower_bound": 0}, "kda_lower_bound=0 must be a number from -1e+12 to -1e-12"),
    ({"kda_lower_bound": "x"}, "kda_lower_bound='x' must be a number from -1e+12 to -1e-12"),
    ({"kda_lower_bound": float("nan")}, "kda_lower_bound=nan must be a number from -1e+12 to -1e-12"),
    ({"kda_lower_bound": -1e300}, "kda_lower_bound=-1e+300 must be a number from -1e+12 to -1e-12"),
    ({"kda_lower_bound": -(10**400)}, "must be a number from -1e+12 to -1e-12"),
    ({"layer_group_size": 0}, "layer_group_size=0 must be a whole number from 1"),
    ({"layer_types": ["full_attention"]}, "must list 42 of linear_attention, full_attention"),
    ({"head_dim": 0}, "head_dim=0 must be a whole number from 1"),
    ({"kda_safe_gate": 3}, "kda_safe_gate=3"),
    ({"n_group": 7}, "num_experts=512 cannot be cut into n_group=7 equal groups"),
]


@pytest.mark.parametrize(
    ("keys", "message"), BAD, ids=[f"{next(iter(keys))} {index}" for index, (keys, _) in enumerate(BAD)]
)
def test_invalid_keys_are_rejected_by_key(keys: dict[str, Any], message: str):
    with pytest.raises(ModelConfigError) as caught:
        model_config_of({"architectures": [ARCHITECTURE], **keys}, Path("config.json"))
    assert message in str(caught.value)
