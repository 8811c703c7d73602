"""Hybrids with gated delta nets against transformers: logits, steps, shards, stages, tensors, each entry of a row.

Float32, 1e-4 of the largest logit. A row is read from two files: with every key, and thinned as the hub's are.
"""

import json
import shutil
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from delta_checkpoints import DELTA_CASES, delta_folder, delta_reference, thinned_delta_folder
from family_checks import (
    adapter_logits,
    are_same,
    check_adapters,
    check_engine,
    check_entries,
    check_int8,
    check_rejected,
    check_stages,
    check_steps,
    check_tensors,
    folder_logits,
    logits_of_ranks,
    planned_models,
    readings_of,
    without_each,
)
from family_mutants import entries
from hybrid_runs import HybridRun, run_rows
from model_configs import with_delta, with_layers, with_norms, with_ropes
from newer_checkpoints import NEWER
from our_model import is_noticed, load_model
from plain_models import in_tiers, new_model
from quantised_files import quantise
from reference_models import Oracle, random_prompt, their_logits
from safetensors.torch import load_file, save_file
from thread_groups import on_ranks
from torch import Tensor
from transformers import AutoConfig

from spmd_worker.base.errors import CheckpointError, ConfigError
from spmd_worker.model_config.families.delta_rows import DELTA_ROWS
from spmd_worker.model_config.families.family import Family
from spmd_worker.model_config.families.table import FAMILIES
from spmd_worker.model_config.model_config import ModelConfig, model_config_of, read_model_files
from spmd_worker.ops.kernels import reference_recurrent
from spmd_worker.ops.kernels.recurrent import DeltaRates, NormRule
from spmd_worker.ops.kernels.reference_recurrent import ReferenceRecurrentKernels
from spmd_worker.ranks.topology import RankLayout, check_divides
from spmd_worker.worker.memory.estimate import rank_layers, state_layer

TOLERANCE = 1e-4
ROWS = [random_prompt(length, seed=7, vocab_size=96) for length in (70, 5, 33)]
FEW = ("qwen3_5", "qwen3_next", "olmo_hybrid")
"""A case of each kind of names."""


quick = partial(in_tiers, among=DELTA_CASES)

oracle = Oracle(delta_reference, ROWS)
expected, worst_error, is_right = oracle.expected, oracle.worst_error, oracle.is_right
our_logits = partial(folder_logits, ROWS)


@pytest.mark.guarantee("Models compute what transformers computes")
@quick(*FEW, "qwen3_5_images", "olmo_hybrid_no_rope", rest=pytest.mark.matrix)
def test_logits_and_ids_equal_transformers(name: str):
    logits, _ = run_rows([load_model(delta_folder(name))], ROWS)
    assert worst_error(name, logits) < TOLERANCE
    for found, right in zip(logits, expected(name), strict=True):
        assert torch.equal(found.argmax(-1), right.argmax(-1))
    full, thin = (read_model_files(each).model_config for each in (delta_folder(name), thinned_delta_folder(name)))
    assert thin == full
    theirs = [AutoConfig.from_pretrained(each(name)).get_text_config() for each in (delta_folder, thinned_delta_folder)]
    assert theirs[0].layer_types == theirs[1].layer_types, "the oracle's own"
    for key in ("rope_theta", "partial_rotary_factor"):
        ropes = [each.rope_parameters or {} for each in theirs]
        assert ropes[0].get(key) == ropes[1].get(key), "the oracle's own"


@pytest.mark.guarantee("A row's answer depends on the row alone")
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.matrix)])
@quick("qwen3_5")
def test_steps_do_not_change_bits_or_states(name: str, dtype: str):
    """Prompts cut anywhere, rows together and alone; slots and blocks hold NaN before."""
    check_steps(load_model(delta_folder(name), dtype=dtype), ROWS)


@pytest.mark.control("A row's answer depends on the row alone")
def test_comparison_detects_steps_that_forget(monkeypatch: pytest.MonkeyPatch):
    """Negative control: a scan that begins from zeros in each step."""
    scan = ReferenceRecurrentKernels.scan_delta

    def scan_delta(self: Any, *given: Any) -> Tensor:
        *others, segments, config = given
        return scan(self, *others, replace(segments, firsts=torch.zeros_like(segments.firsts)), config)

    model = new_model(delta_folder("qwen3_5"))
    whole = run_rows([model], ROWS)[0]
    monkeypatch.setattr(ReferenceRecurrentKernels, "scan_delta", scan_delta)
    assert all(map(torch.equal, run_rows([model], ROWS)[0], whole))
    found = run_rows([model], ROWS, 33)[0]
    assert torch.equal(found[2], whole[2])
    assert worst_error("qwen3_5", found) > 10 * TOLERANCE


def test_slot_of_an_earlier_row_does_not_leak():
    """A row begins from zeros in a slot that holds another's state, here of NaN and of large numbers."""
    model = load_model(delta_folder("qwen3_5"))
    logits, states = run_rows([model], ROWS)
    for number in (float("nan"), 1e30):
        run = HybridRun([model], ROWS)
        for layer in run.states[0]:
            for tensor in filter(torch.is_tensor, layer or ()):
                tensor.fill_(number)
        assert all(map(torch.equal, run.finish(9), logits))
        assert are_same([run.row_states(row) for row in range(len(ROWS))], states)


@quick("qwen3_5", "olmo_hybrid", among=("qwen3_5", "olmo_hybrid"))
def test_bfloat16_is_as_near_float32_as_transformers(name: str):
    logits, _ = run_rows([load_model(delta_folder(name), dtype="bfloat16")], ROWS)
    _, model_class, _ = DELTA_CASES[name]
    theirs = getattr(transformers, model_class)(delta_reference(name).config).eval()
    theirs.load_state_dict(delta_reference(name).state_dict())
    noise = worst_error(name, their_logits(theirs.bfloat16(), ROWS))
    assert 1e-4 < worst_error(name, logits) < 1.5 * noise < 0.3


@quick("olmo_hybrid", among=FEW)
def test_shards_equal_transformers_and_stages_one_rank(name: str):
    """Two key heads: four ranks have each of them twice."""
    for size in (2, 4):
        assert worst_error(name, logits_of_ranks(delta_folder(name), size, ROWS, 40)) < TOLERANCE, size
    check_stages(delta_folder(name), 1, ROWS, 40)


@quick("qwen3_next", "olmo_hybrid")
def test_all_checkpoint_tensors_are_viewed_and_loaded(name: str):
    """By the names of files and of transformers' memory; on two ranks together all of each."""
    check_tensors(delta_folder(name), delta_reference(name).state_dict())


@pytest.mark.guarantee("The plan's bytes are those of the run")
@pytest.mark.parametrize("name", FEW)
def test_planned_bytes_equal_parameters(name: str):
    config = read_model_files(delta_folder(name)).model_config
    for layout, rank, _, model in planned_models(config):
        net, (layer, share) = model.model.layers[0].linear_attn, rank_layers(config, layout, rank)[0]
        planned = state_layer(layer, config.hidden_size, share)
        assert planned is not None
        assert planned.state == (net.config.num_value_heads, net.config.key_size, net.config.value_size)
        assert planned.tail == (net.config.kernel_size - 1, net.conv.weight.shape[0])


def test_int8_projections_stay_near_transformers():
    model = load_model(delta_folder("qwen3_5"), quantization="int8")
    net = model.model.layers[0].linear_attn
    assert net.in_proj.weight.dtype == net.out_proj.weight.dtype == torch.int8
    assert net.conv.weight.dtype == net.gates.a_log.dtype == torch.float32
    check_int8(oracle, "qwen3_5", model)


@pytest.mark.parametrize(
    ("name", "targets"),
    [
        pytest.param(
            *("qwen3_5", ("in_proj_qkv", "in_proj_z", "in_proj_a", "out_proj", "q_proj")), marks=pytest.mark.stress
        ),
        ("qwen3_next", ("in_proj_qkvz", "in_proj_ba")),
        pytest.param("olmo_hybrid", ("q_proj", "g_proj", "b_proj", "o_proj"), marks=pytest.mark.stress),
    ],
)
def test_adapters_of_delta_nets_are_those_of_peft(name: str, targets: tuple[str, ...], tmp_path: Path):
    reference = partial(deepcopy, delta_reference(name))
    check_adapters(oracle, name, *adapter_logits(delta_folder(name), reference, targets, tmp_path, ROWS))


@quick("qwen3_5", among=FEW)
def test_engine_gives_ids_of_transformers(name: str):
    check_engine(delta_folder(name), delta_reference(name), ROWS, 6)


# ---- each entry of a row, and mistakes that no entry makes ---------------------------------------------------------

UNSEEN = (
    *("models", "defaults", "layers", "ropes", "rope.rounding"),
    *("names.aliases", "names.ignored_prefixes", "names.joined_rows", "names.mixer_aliases"),
)
"""Entries without an effect on these logits: the rounding is of bfloat16; the others have tests of their own."""
SIZES = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}


COMPARED = [each for each in DELTA_ROWS if each not in NEWER]
"""Others have a newer release's answers: test_newer_families.py."""


def bare(architecture: str, **keys: Any) -> dict[str, Any]:
    """A file that leaves out nearly all."""
    sizes = {**SIZES, "vocab_size": 160, "intermediate_size": 96, **keys}
    row = FAMILIES[architecture]
    return {"architectures": [architecture], **({"text_config": sizes} if row.text is not None else sizes)}


def mutants(row: Family) -> list[tuple[str, Family]]:
    """The row with one entry as Llama's row has it, and without one of its defaults, names or keys."""
    found = entries(row, Family(), *UNSEEN, "names.parts", "file_keys")
    return found + without_each(row, "names.parts", "defaults")


def readings(architecture: str) -> list[Any]:
    """Of files that leave out some keys; None for one that is rejected."""
    names = {"architectures": [architecture]}
    files = [names if FAMILIES[architecture].text is None else {**names, "text_config": {}}]
    sparse = {"decoder_sparse_step": 2, "mlp_only_layers": [3]}
    files += [bare(architecture, **keys) for keys in ({}, {"mlp_bias": True, "attention_bias": True}, sparse)]
    return readings_of(files)


@pytest.mark.control("Models compute what transformers computes")
@pytest.mark.parametrize(
    "architecture",
    [pytest.param(each, marks=[] if "Next" in each or "Olmo" in each else pytest.mark.stress) for each in COMPARED],
)
def test_comparison_detects_each_row_entry_set_to_llama(architecture: str, monkeypatch: pytest.MonkeyPatch):
    cases = [name for name, (_, model_class, _) in DELTA_CASES.items() if model_class == architecture]
    folders = {name: (delta_folder(name), thinned_delta_folder(name)) for name in cases}
    assert None not in readings(architecture)
    given = (mutants(FAMILIES[architecture]), partial(readings, architecture), folders, our_logits, is_right)
    check_entries(monkeypatch, architecture, *given)


def rotated(config: ModelConfig) -> ModelConfig:
    """Full layers with the rope of the other case."""
    layers = tuple(layer if layer.mixer == "delta" else replace(layer, rope=0) for layer in config.layers)
    return replace(config, layers=layers, ropes=read_model_files(delta_folder("olmo_hybrid")).model_config.ropes)


IN_CONFIG: Mapping[tuple[str, str], Callable[[ModelConfig], ModelConfig]] = {
    ("qwen3_5", "epsilon of the gated norm"): lambda config: with_delta(config, norm_eps=1e-6),
    ("qwen3_5", "sigmoid in place of silu"): lambda config: with_delta(config, gate_activation="sigmoid"),
    ("qwen3_5", "beta doubled"): lambda config: with_delta(config, beta_scale=2.0),
    ("qwen3_5", "norms without their offset"): lambda config: with_norms(config, offset=0.0),
    ("qwen3_5", "rope of complete heads"): lambda config: with_ropes(config, partial_factor=1.0),
    ("qwen3_5", "no norm of heads"): lambda config: with_layers(config, qk_norm="none"),
    ("olmo_hybrid", "beta not doubled"): lambda config: with_delta(config, beta_scale=1.0),
    ("olmo_hybrid", "epsilon of the file"): lambda config: with_delta(config, norm_eps=config.norm.eps),
    ("olmo_hybrid", "norms before all layers"): lambda config: with_layers(config, norms=(True, False, True, False)),
    ("olmo_hybrid_no_rope", "rope where the file has none"): rotated,
}


@pytest.mark.control("Models compute what transformers computes")
@pytest.mark.parametrize(("name", "mistake"), IN_CONFIG)
def test_comparison_detects_mistakes_of_configs(name: str, mistake: str):
    folder = delta_folder(name)

    def mistaken(of: Path) -> list[Tensor]:
        config = IN_CONFIG[name, mistake](read_model_files(of).model_config)
        return run_rows([new_model(of, config=config)], ROWS)[0]

    assert is_noticed([folder], mistaken, lambda logits: worst_error(name, logits) < 10 * TOLERANCE)


def _of_unit_root_mean_square(x: Tensor, scale: float = 1.0) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True)) * scale


def _norm_with_offset(kernels: Any, x: Tensor, gate: Tensor, weight: Tensor, rule: NormRule) -> Tensor:
    return RIGHT.gated_norm(kernels, x, gate, weight + 1, rule)


def _conv_without_silu(kernels: Any, *given: Any, has_silu: bool) -> Tensor:
    assert has_silu
    return RIGHT.short_conv(kernels, *given, has_silu=False)


def _scan_without_bias(kernels: Any, mixed: Tensor, rates: DeltaRates, *others: Any) -> Tensor:
    return RIGHT.scan_delta(kernels, mixed, rates._replace(dt_bias=torch.zeros_like(rates.dt_bias)), *others)


class RIGHT(ReferenceRecurrentKernels):
    """The kernels as they are while others are patched."""

    gated_norm = ReferenceRecurrentKernels.gated_norm
    short_conv = ReferenceRecurrentKernels.short_conv
    scan_delta = ReferenceRecurrentKernels.scan_delta


IN_KERNELS: Mapping[str, tuple[Any, str, Any]] = {
    "gated norm with an offset": (ReferenceRecurrentKernels, "gated_norm", _norm_with_offset),
    "no silu behind the convolution": (ReferenceRecurrentKernels, "short_conv", _conv_without_silu),
    "steps without their bias": (ReferenceRecurrentKernels, "scan_delta", _scan_without_bias),
    "keys of any length": (reference_recurrent, "unit", lambda x, scale=1.0: x * scale),
    "keys of root mean square 1": (reference_recurrent, "unit", _of_unit_root_mean_square),
    "key heads alternate": (
        Tensor,
        "repeat_interleave",
        lambda x, count, dim: x.repeat(*(count if each == dim else 1 for each in range(x.ndim))),
    ),
}


@pytest.mark.control("Models compute what transformers computes")
@pytest.mark.parametrize("mistake", IN_KERNELS)
def test_comparison_detects_mistakes_of_kernels(mistake: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(*IN_KERNELS[mistake])
    assert worst_error("qwen3_5", our_logits(delta_folder("qwen3_5"))) > 10 * TOLERANCE


# ---- config.json ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", COMPARED)
@pytest.mark.parametrize("keys", [{}, {"num_hidden_layers": 6, "head_dim": 32}], ids=["", "sizes"])
def test_omitted_keys_have_the_defaults_of_transformers(architecture: str, keys: dict[str, Any]):
    config = bare(architecture, **keys)
    config_class = next(each for each, model_class, _ in DELTA_CASES.values() if model_class == architecture)
    given = {key: value for key, value in config.items() if key != "architectures"}
    theirs = getattr(transformers, config_class)(**given).get_text_config()
    ours = model_config_of(config, Path("config.json"))
    kinds = {"delta": "linear_attention", "attention": "full_attention"}
    assert [kinds[layer.mixer] for layer in ours.layers] == theirs.layer_types
    delta, full = ours.layers[0].delta, next(layer for layer in ours.layers if layer.mixer == "attention")
    assert delta is not None
    assert (delta.num_key_heads, delta.num_value_heads) == (theirs.linear_num_key_heads, theirs.linear_num_value_heads)
    assert (delta.key_size, delta.value_size) == (theirs.linear_key_head_dim, theirs.linear_value_head_dim)
    assert delta.kernel_size == theirs.linear_conv_kernel_dim
    assert (full.num_kv_heads, ours.norm.eps) == (theirs.num_key_value_heads, theirs.rms_norm_eps)
    assert full.head_size == getattr(theirs, "head_dim", theirs.hidden_size // theirs.num_attention_heads)
    assert ours.max_position_embeddings == theirs.max_position_embeddings
    assert ours.has_tied_embeddings == theirs.tie_word_embeddings
    eos = theirs.eos_token_id
    assert ours.eos_token_ids == (() if eos is None or eos >= ours.vocab_size else (eos,))
    rope = theirs.rope_parameters
    assert [each.partial_factor for each in ours.ropes] == ([rope["partial_rotary_factor"]] if ours.ropes else [])
    assert bool(ours.ropes) == ("Olmo" not in architecture)
    if full.experts is not None:
        experts = full.experts
        assert (experts.num_experts, experts.num_chosen) == (theirs.num_experts, theirs.num_experts_per_tok)
        assert experts.intermediate_size == theirs.moe_intermediate_size
        assert experts.shared_size == theirs.shared_expert_intermediate_size
        assert experts.renormalises == getattr(theirs, "norm_topk_prob", True)


def test_olmo_hybrid_rotates_if_its_file_has_base():
    """Files of the hub have null, a null base or a null type for none; older ones have the base apart."""
    architecture = "OlmoHybridForCausalLM"

    def bases(**keys: Any) -> list[float]:
        ropes = model_config_of(bare(architecture, **keys), Path("config.json")).ropes
        assert all(each.rounding == "result" for each in ropes)
        return [each.rope_theta for each in ropes]

    for none in (None, {}, {"rope_type": None}, {"rope_theta": None, "rope_type": "default"}):
        assert bases(rope_parameters=none) == []
    for given in ({"rope_parameters": {"rope_theta": 500.0}}, {"rope_theta": 500.0, "rope_parameters": None}):
        assert bases(**given) == [500.0]
    assert bases(rope_parameters={"rope_type": "default"}) == [10000.0]
    assert model_config_of(bare(architecture), Path("config.json")).norm.rounds_once


BROKEN: Mapping[str, tuple[str, dict[str, Any], str]] = {
    "kind": ("Qwen3_5ForCausalLM", {"layer_types": ["conv"] * 4}, "must list 4 of linear_attention, full_attention"),
    "count": ("Qwen3NextForCausalLM", {"layer_types": ["linear_attention"]}, "must list 4 of linear_attention"),
    "interval": ("Qwen3_5ForCausalLM", {"full_attention_interval": 0}, "full_attention_interval=0 must be a whole"),
    "heads": ("Qwen3_5ForCausalLM", {"linear_num_key_heads": 5}, "is not a multiple of linear_num_key_heads=5"),
    "gate": (
        "Qwen3_5ForCausalLM",
        {"output_gate_type": "sigmoid"},
        "output_gate_type='sigmoid' is not supported, only",
    ),
    "output": (
        "Qwen3NextForCausalLM",
        {"attn_output_gate": False},
        "attn_output_gate=False is not supported, only true",
    ),
    "taps": ("OlmoHybridForCausalLM", {"linear_conv_kernel_dim": 0}, "linear_conv_kernel_dim=0 must be a whole"),
    "eigenvalues": ("OlmoHybridForCausalLM", {"linear_allow_neg_eigval": 1}, "linear_allow_neg_eigval=1 must be true"),
    "rope": ("OlmoHybridForCausalLM", {"rope_parameters": 3}, "rope_parameters=3 must be an object"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_config_error_names_key_and_rule(case: str):
    architecture, keys, message = BROKEN[case]
    check_rejected(bare(architecture, **keys), message)


def test_known_output_gates_are_read():
    for keys in ({"output_gate_type": "swish"}, {"output_gate_type": "silu", "attn_output_gate": True}):
        given, plain = (model_config_of(bare("Qwen3_5ForCausalLM", **each), Path("config.json")) for each in (keys, {}))
        assert given == plain


def test_ranks_that_do_not_divide_heads_are_rejected():
    config = read_model_files(delta_folder("qwen3_5")).model_config
    check_divides(RankLayout(4), config)
    for changes, message in (({"num_value_heads": 6}, "6 value heads"), ({"num_key_heads": 3}, "3 key heads")):
        with pytest.raises(ConfigError, match=f"gated delta nets have {message}"):
            check_divides(RankLayout(4), with_delta(config, **changes))


def test_wrong_and_missing_delta_weights_are_reported(tmp_path: Path):
    folder = delta_folder("qwen3_next")
    for word, change in (
        ("in_proj_qkvz", lambda tensors, name: tensors.pop(name)),
        ("A_log", lambda tensors, name: tensors.update({name: tensors[name][:3].contiguous()})),
    ):
        shutil.copytree(folder, tmp_path / word)
        tensors = load_file(folder / "model.safetensors")
        name = next(each for each in tensors if word in each)
        change(tensors, name)
        save_file(tensors, tmp_path / word / "model.safetensors", {"format": "pt"})
        with pytest.raises(CheckpointError, match=word):
            new_model(tmp_path / word)


def test_olmo_hybrid_as_transformers_saves_it_is_read(tmp_path: Path):
    """Convolutions in equal thirds, of other widths than keys and values, and norms by the names of other layers'."""
    folder = tmp_path / "saved"
    delta_reference("olmo_hybrid").save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    stored = [len(tensors[f"model.layers.0.linear_attn.{part}_conv1d.weight"]) for part in "qkv"]
    assert stored == [27, 27, 26]
    assert "model.layers.1.feedforward_layer_norm.weight" in tensors
    assert worst_error("olmo_hybrid", our_logits(folder)) < TOLERANCE

    def weights(folder: Path) -> list[Tensor]:
        return on_ranks(2, lambda group: new_model(folder, group).model.layers[0].linear_attn.conv.weight)

    assert all(map(torch.equal, weights(folder), weights(delta_folder("olmo_hybrid"))))
    quantised, plain = quantise(folder, tmp_path, "fp8_block")
    # Regression: they were not read at all beside quantised weights.
    one, other = (run_rows([load_model(each)], ROWS)[0] for each in (quantised, plain))
    assert all(map(torch.equal, one, other))
    name = "model.layers.0.linear_attn.v_conv1d.weight"
    save_file({**tensors, name: tensors[name][:-1].contiguous()}, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match="conv1d"):
        new_model(folder)


def test_layers_for_speculation_and_images_are_skipped(tmp_path: Path):
    """Files of text alone may have the names of those with images too."""
    shutil.copytree(delta_folder("qwen3_5"), tmp_path / "other")
    tensors = load_file(tmp_path / "other" / "model.safetensors")
    renamed = {name.replace("model.", "model.language_model.", 1): each for name, each in tensors.items()}
    extra = {"mtp.layers.0.mlp.up_proj.weight": torch.zeros(2, 2), "model.visual.merger.weight": torch.zeros(2)}
    save_file({**renamed, **extra}, tmp_path / "other" / "model.safetensors", {"format": "pt"})
    assert worst_error("qwen3_5", our_logits(tmp_path / "other")) < TOLERANCE
    assert "mtp" not in json.dumps(sorted(new_model(tmp_path / "other").weights.shapes))
