"""Hybrids with Mamba2 against transformers: logits, steps, shards, stages, tensors, each entry of a row.

Float32, 1e-4 of the largest logit. A row is read from two files: with every key, and thinned as the hub's are.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from family_checks import (
    adapter_logits,
    check_adapters,
    check_entries,
    check_int8,
    check_schedules,
    check_stages,
    check_steps,
    check_tensors,
    folder_logits,
    logits_of_ranks,
    planned_models,
    readings_of,
    shapes_of_both,
    without_each,
)
from family_mutants import entries
from hybrid_runs import greedy_ids, run_rows
from mamba_checkpoints import MAMBA_CASES, mamba_folder, mamba_reference, open_mamba, thinned_mamba_folder
from our_model import load_model
from peft_adapters import write_adapter
from plain_models import in_tiers, new_model
from reference_models import Oracle, greedy_without_cache, random_prompt, relative_error, their_logits
from torch import Tensor
from transformers import AutoConfig

from spmd_worker.base.config.adapter_limits import AdapterLimits
from spmd_worker.base.errors import AdapterError, ConfigError, ModelConfigError
from spmd_worker.model.adapters.loaded import LoadedAdapters
from spmd_worker.model.adapters.source import read_adapter
from spmd_worker.model.layers.mamba import Mamba, MambaNorm
from spmd_worker.model.layers.mamba1 import Mamba1
from spmd_worker.model_config.families.family import Family
from spmd_worker.model_config.families.mamba1_rows import MAMBA1_ROWS
from spmd_worker.model_config.families.mamba_rows import MAMBA_ROWS, UNBOUNDED
from spmd_worker.model_config.families.table import FAMILIES
from spmd_worker.model_config.layer_config import LayerConfig
from spmd_worker.model_config.model_config import model_config_of, read_model_files
from spmd_worker.native.library import native_library
from spmd_worker.ops.kernels.cpu.native import CpuKernels
from spmd_worker.ops.kernels.recurrent import NormRule
from spmd_worker.ops.kernels.reference_recurrent import ReferenceRecurrentKernels
from spmd_worker.ranks.topology import RankLayout, check_divides

TOLERANCE = 1e-4
ROWS = [random_prompt(length, seed=7, vocab_size=96) for length in (1, 17, 70)]
FEW = ("nemotron", "granite", "falcon", "bamba")
"""One case of each family."""


WITHOUT_OTHERS = ("mamba2", "mamba1", "falcon_mamba")
"""One case of each family without attention."""


quick = partial(in_tiers, among=FEW)

oracle = Oracle(mamba_reference, ROWS)
expected, worst_error, is_right = oracle.expected, oracle.worst_error, oracle.is_right
our_logits = partial(folder_logits, ROWS[:2])


@pytest.mark.guarantee("Models compute what transformers computes")
@quick(*FEW, *WITHOUT_OTHERS, "jamba", among=MAMBA_CASES, rest=pytest.mark.matrix)
def test_logits_and_ids_equal_transformers(name: str):
    model = load_model(mamba_folder(name))
    assert worst_error(name, run_rows([model], ROWS)[0]) < TOLERANCE
    configs = [read_model_files(each).model_config for each in (mamba_folder(name), thinned_mamba_folder(name))]
    assert configs[0] == configs[1]
    assert greedy_ids([model], ROWS[1], 4) == greedy_without_cache(mamba_reference(name), ROWS[1], 4)


@pytest.mark.stress
@pytest.mark.parametrize("name", MAMBA_CASES)
def test_oracle_reads_thin_files_as_full_ones(name: str):
    """None of our code is asked: what it is compared with says the same of both files."""
    assert worst_error(name, their_logits(open_mamba(thinned_mamba_folder(name)), ROWS)) < 1e-5


@pytest.mark.guarantee("A row's answer depends on the row alone")
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.stress)])
@quick("bamba", "falcon_mamba", "jamba")
def test_steps_do_not_change_bits_or_states(name: str, dtype: str):
    """Prompts cut anywhere, rows together and alone; slots and blocks hold NaN before."""
    logits = check_steps(load_model(mamba_folder(name), dtype=dtype), ROWS)
    if dtype == "bfloat16":
        # Rounded scores choose other experts for some tokens.
        assert 1e-4 < worst_error(name, logits) < (0.5 if name in ("nemotron", "granite", "jamba") else 0.2)


@pytest.mark.parametrize("name", ["falcon_norm", "falcon_norm_last", "bamba"])
def test_gated_norm_rounds_where_transformers_does(name: str):
    """In bfloat16 all numbers but those that float32 leaves between two; about a fifth differ with other roundings."""
    theirs = mamba_reference(name).model.layers[0].mamba.norm
    mamba = read_model_files(mamba_folder(name)).model_config.layers[0].mamba
    assert mamba is not None
    generator = torch.Generator().manual_seed(2)
    x, gate = (torch.randn(40, mamba.num_columns, generator=generator).bfloat16() for _ in range(2))
    weight = theirs.weight.detach().bfloat16()
    expected = type(theirs).forward(_Normed(theirs, weight), x[None], gate[None])[0]
    rule = NormRule(mamba.norm_eps, mamba.num_groups, "silu", mamba.norm == "grouped")
    shares = [
        (kernels.gated_norm(x, gate, weight, replace(rule, rounds_once=once)) != expected).float().mean()
        for kernels in (ReferenceRecurrentKernels(), CpuKernels(native_library()).recurrent_kernels())
        for once in (mamba.norm_rounds_once, not mamba.norm_rounds_once)
    ]
    assert shares[0] < 0.01 < 0.1 < shares[1]
    assert shares[2] < 0.01 < 0.1 < shares[3]


class _Normed:
    """A norm of transformers with another weight."""

    def __init__(self, norm: Any, weight: Tensor) -> None:
        self.norm, self.weight = norm, weight

    def __getattr__(self, name: str) -> Any:
        return getattr(self.norm, name)


@pytest.mark.guarantee("A row's answer depends on the row alone")
@pytest.mark.stress
@pytest.mark.parametrize("name", FEW)
def test_row_has_equal_bits_in_any_schedule(name: str):
    check_schedules(mamba_folder(name), partial(greedy_without_cache, mamba_reference(name)))


@pytest.mark.control("A row's answer depends on the row alone")
def test_comparison_detects_scans_that_forget(monkeypatch: pytest.MonkeyPatch):
    """Negative control: a recurrence that begins anew in each step."""
    scan_mamba = ReferenceRecurrentKernels.scan_mamba

    def forgets(self: Any, *arguments: Any) -> Tensor:
        *before, segments, config = arguments
        return scan_mamba(self, *before, replace(segments, firsts=torch.zeros_like(segments.firsts)), config)

    model = new_model(mamba_folder("bamba"))
    whole = run_rows([model], ROWS)[0]
    assert all(map(torch.equal, run_rows([model], ROWS, 63)[0][:2], whole[:2]))
    monkeypatch.setattr(ReferenceRecurrentKernels, "scan_mamba", forgets)
    assert all(map(torch.equal, run_rows([model], ROWS)[0], whole))
    assert relative_error(run_rows([model], ROWS, 63)[0][2], whole[2]) > 100 * TOLERANCE


# Of the last two a group of the norm is on several ranks; so it is of all with four ranks.
@quick(
    "nemotron",
    "granite_dense",
    "mamba1",
    among=(
        *(*FEW, "nemotron_latent", "falcon_norm_last", "granite_dense", "mamba2", "mamba2_tied"),
        *("mamba1", "mamba1_biases", "falcon_mamba", "jamba", "jamba_dense"),
    ),
)
def test_shards_equal_transformers_and_stages_one_rank(name: str):
    for size in (2,) if name in ("nemotron", "granite_dense") else (2, 4):
        assert worst_error(name, logits_of_ranks(mamba_folder(name), size, ROWS, 33)) < TOLERANCE, size
    check_stages(mamba_folder(name), 1, ROWS, 33)


def test_comparison_detects_group_normed_by_each_rank(monkeypatch: pytest.MonkeyPatch):
    """Negative control: each rank norms its own heads where the group is on both."""
    monkeypatch.setattr(MambaNorm, "_gathered", lambda self, part: torch.cat((part, part), dim=1))
    whole = logits_of_ranks(mamba_folder("granite_dense"), 2, ROWS[:2])
    assert max(map(relative_error, whole, expected("granite_dense"))) > 10 * TOLERANCE


@quick(
    "nemotron",
    "mamba1",
    among=(*FEW, "nemotron_latent", "granite_dense", "mamba2", "mamba1", "mamba1_biases", "jamba", "jamba_dense"),
)
def test_all_checkpoint_tensors_are_viewed_and_loaded(name: str):
    """By the names of files and of transformers' memory; on two ranks together all of each."""
    check_tensors(mamba_folder(name), mamba_reference(name).state_dict())


PLANNED = ("nemotron_latent", "granite_dense", "falcon_norm", "mamba2", "mamba1_biases", "falcon_mamba", "jamba")


@pytest.mark.guarantee("The plan's bytes are those of the run")
@pytest.mark.parametrize("name", PLANNED)
def test_planned_bytes_equal_parameters(name: str):
    assert len(list(planned_models(read_model_files(mamba_folder(name)).model_config))) == 7


@pytest.mark.stress
@pytest.mark.parametrize("name", ["falcon", "falcon_mamba"])
def test_int8_projections_stay_near_transformers(name: str):
    model = load_model(mamba_folder(name), quantization="int8")
    mamba = model.model.layers[0].mamba
    assert mamba.in_proj.weight.dtype == mamba.out_proj.weight.dtype == torch.int8
    assert mamba.conv1d.weight.dtype == mamba.gates.a_log.dtype == torch.float32
    check_int8(oracle, name, model)


@pytest.mark.stress
@pytest.mark.parametrize(
    ("name", "targets"),
    [("bamba", ("in_proj", "q_proj", "up_proj")), ("mamba1", ("in_proj",))],
    ids=["bamba", "mamba1"],
)
def test_adapters_of_mamba_are_those_of_peft(name: str, targets: tuple[str, ...], tmp_path: Path):
    folder = mamba_folder(name)
    check_adapters(oracle, name, *adapter_logits(folder, lambda: open_mamba(folder), targets, tmp_path, ROWS))


@pytest.mark.stress
def test_adapters_of_the_step_numbers_are_refused(tmp_path: Path):
    """Their inputs are computed for tokens of earlier steps too."""
    write_adapter(open_mamba(mamba_folder("mamba1")), tmp_path, (("target_modules", ("x_proj",)),))
    loaded = LoadedAdapters(
        load_model(mamba_folder("mamba1")), AdapterLimits(max_loras=2, max_lora_rank=8, max_cpu_loras=2)
    )
    with pytest.raises(AdapterError, match="x_proj"):
        loaded.prepare(read_adapter(tmp_path))


# ---- each entry of a row, and mistakes that no entry makes ---------------------------------------------------------

ROWS_OF_MAMBA = {**MAMBA_ROWS, **MAMBA1_ROWS}
UNSEEN = ("models", "defaults", "newer", "layers", "ropes", "required", "names.aliases", "names.layer_aliases")
"""Entries without an effect on these logits, or without which nothing runs; they have tests of their own."""
UNSEEN_MORE = ("names.ignored_prefixes", "norms.rounds_once", "norms.eps", "variants", "attention.head_size")


def mutants(row: Family) -> list[tuple[str, Family]]:
    """The row with one entry as Llama's row has it, and with one renamed part fewer."""
    unseen = (*UNSEEN, *UNSEEN_MORE, "names.parts", "file_keys")
    return entries(row, Family(), *unseen) + without_each(row, "names.parts")


BARE = (
    {},
    {"attention_bias": True, "mlp_bias": True, "norm_topk_prob": True, "hidden_act": "gelu"},
    {"attention_bias": True, "mlp_bias": True, "norm_topk_prob": True},
    {"num_experts": 16, "n_routed_experts": 32, "rms_norm_eps": 0.5, "layer_norm_epsilon": 0.25},
)
"""Files that leave out nearly all, with keys that the classes do not know."""


def readings(architecture: str) -> list[Any]:
    """Of the bare files; the reason for one that is rejected."""
    sizes = {"hidden_size": 128, "num_attention_heads": 16, "num_hidden_layers": 4, "vocab_size": 300}
    return readings_of(({"architectures": [architecture], **sizes, **keys} for keys in BARE), with_reasons=True)


@pytest.mark.control("Models compute what transformers computes")
@pytest.mark.parametrize(
    "architecture",
    [pytest.param(each, marks=[] if each == "FalconH1ForCausalLM" else pytest.mark.stress) for each in ROWS_OF_MAMBA],
)
def test_comparison_detects_each_row_entry_set_to_llama(architecture: str, monkeypatch: pytest.MonkeyPatch):
    cases = [name for name, (family, _) in MAMBA_CASES.items() if f"{family}ForCausalLM" == architecture]
    folders = {name: [mamba_folder(name)] for name in cases}
    given = (mutants(FAMILIES[architecture]), partial(readings, architecture), folders, our_logits, is_right)
    check_entries(monkeypatch, architecture, *given)


def changed(name: str, change: Callable[[LayerConfig], LayerConfig]) -> list[Tensor]:
    """Logits with another config of layers, of the first rows."""
    config = read_model_files(mamba_folder(name)).model_config
    config = replace(config, layers=tuple(map(change, config.layers)))
    return run_rows([new_model(mamba_folder(name), config=config)], ROWS[:2])[0]


def with_mamba(name: str, **fields: Any) -> list[Tensor]:
    return changed(
        name, lambda each: each if each.mamba is None else replace(each, mamba=replace(each.mamba, **fields))
    )


def with_mamba1(name: str, **fields: Any) -> list[Tensor]:
    return changed(
        name, lambda each: each if each.mamba1 is None else replace(each, mamba1=replace(each.mamba1, **fields))
    )


def with_zeros(name: str, parameter: str) -> list[Tensor]:
    """Without a parameter of the mixers."""
    model = new_model(mamba_folder(name))
    for mixer in model.modules():
        if isinstance(mixer, Mamba | Mamba1):
            mixer.get_parameter(parameter).data.zero_()
    return run_rows([model], ROWS[:2])[0]


def one_group(name: str) -> list[Tensor]:
    """The norm over all heads at once."""
    model = new_model(mamba_folder(name))
    for norm in model.modules():
        if isinstance(norm, MambaNorm):
            norm._share = replace(norm._share, config=replace(norm._share.config, num_groups=1), groups=(0, 1))
    return run_rows([model], ROWS[:2])[0]


def with_rope(name: str) -> list[Tensor]:
    """Rotated heads where a file has no rope."""
    config, rotated = (read_model_files(mamba_folder(each)).model_config for each in (name, "granite_dense"))
    layers = tuple(replace(each, rope=0) if each.mixer == "attention" else each for each in config.layers)
    return run_rows(
        [new_model(mamba_folder(name), config=replace(config, layers=layers, ropes=rotated.ropes))], ROWS[:2]
    )[0]


def whole_heads(name: str) -> list[Tensor]:
    config = read_model_files(mamba_folder(name)).model_config
    ropes = tuple(replace(each, partial_factor=1.0) for each in config.ropes)
    return run_rows([new_model(mamba_folder(name), config=replace(config, ropes=ropes))], ROWS[:2])[0]


def with_experts(name: str, **fields: Any) -> list[Tensor]:
    return changed(
        name, lambda each: each if each.experts is None else replace(each, experts=replace(each.experts, **fields))
    )


ONES = (1.0, 1.0, 1.0, 1.0, 1.0)
MISTAKES: dict[str, tuple[str, Callable[[str], list[Tensor]]]] = {
    "norm over all groups": ("nemotron", one_group),
    "norm before the gate": ("nemotron", lambda name: with_mamba(name, norm="grouped_first")),
    "norm after the gate": ("falcon_norm", lambda name: with_mamba(name, norm="grouped")),
    "no D": ("nemotron", lambda name: with_zeros(name, "gates.skip")),
    "no bias of dt": ("granite", lambda name: with_zeros(name, "gates.dt_bias")),
    "no bias of the convolution": ("bamba", lambda name: with_zeros(name, "conv1d.bias")),
    "dt without bounds": ("granite_dense", lambda name: with_mamba(name, dt_limits=(0.0, float("inf")))),
    "mamba1 without D": ("mamba1", lambda name: with_zeros(name, "gates.skip")),
    "mamba1 without bias of dt": ("mamba1", lambda name: with_zeros(name, "gates.dt_bias")),
    "no norms of dt, B and C": ("falcon_mamba", lambda name: with_mamba1(name, norm="none")),
    "another epsilon of these norms": ("falcon_mamba", lambda name: with_mamba1(name, norm_eps=1e-6)),
    "epsilon of Falcon in Jamba": ("jamba", lambda name: with_mamba1(name, norm_eps=1e-6)),
    "jamba's experts divided": ("jamba", lambda name: with_experts(name, renormalises=True)),
    "rope where there is none": ("granite", with_rope),
    "rope of the whole head": ("bamba", whole_heads),
    "relu without its square": ("nemotron", lambda name: changed(name, lambda each: replace(each, activation="relu"))),
    "softmax over all experts": ("granite", lambda name: with_experts(name, score="softmax")),
    "no scaling of experts": ("nemotron", lambda name: with_experts(name, scaling=1.0)),
    "no groups of experts": ("nemotron", lambda name: with_experts(name, num_groups=1, num_chosen_groups=1)),
    "weights of experts not divided": ("nemotron", lambda name: with_experts(name, renormalises=False)),
    "no residual multiplier": (
        "granite",
        lambda name: changed(name, lambda each: replace(each, residual_multiplier=1.0)),
    ),
    "no ssm_multipliers": ("falcon", lambda name: with_mamba(name, multipliers=ONES)),
    "no ssm_in_multiplier": ("falcon", lambda name: with_mamba(name, in_multiplier=1.0)),
    "no ssm_out_multiplier": ("falcon", lambda name: with_mamba(name, out_multiplier=1.0)),
    "no key_multiplier": ("falcon", lambda name: changed(name, lambda each: replace(each, key_multiplier=1.0))),
    "no attention_in_multiplier": (
        "falcon",
        lambda name: changed(
            name, lambda each: replace(each, attention_multipliers=(1.0, each.attention_multipliers[1]))
        ),
    ),
    "no attention_out_multiplier": (
        "falcon",
        lambda name: changed(
            name, lambda each: replace(each, attention_multipliers=(each.attention_multipliers[0], 1.0))
        ),
    ),
    "no mlp_multipliers": (
        "falcon",
        lambda name: changed(name, lambda each: replace(each, mlp_multipliers=(1.0, 1.0))),
    ),
}


FIRST_MISTAKES = (
    *("mamba1 without bias of dt", "no norms of dt, B and C", "jamba's experts divided"),
    *("norm over all groups", "no D", "dt without bounds", "no ssm_multipliers", "rope of the whole head"),
)


@pytest.mark.control("Models compute what transformers computes")
@pytest.mark.parametrize(
    "mistake",
    [pytest.param(each, marks=[] if each in FIRST_MISTAKES else pytest.mark.stress) for each in MISTAKES],
)
def test_comparison_detects_known_mistakes(mistake: str):
    name, logits_of = MISTAKES[mistake]
    assert max(map(relative_error, logits_of(name), expected(name))) > 10 * TOLERANCE


# ---- config.json ---------------------------------------------------------------------------------------------------

FILES: list[tuple[str, dict[str, Any]]] = [
    ("nemotron_h", {"num_hidden_layers": 4}),
    ("nemotron_h", {"hybrid_override_pattern": "ME*-M", "n_routed_experts": 16, "head_dim": 64}),
    ("nemotron_h", {"hybrid_override_pattern": "M*-", "moe_latent_size": 64, "time_step_limit": [0.1, "Infinity"]}),
    ("granitemoehybrid", {"num_hidden_layers": 3}),
    ("granitemoehybrid", {"num_hidden_layers": 2, "layer_types": ["mamba", "attention"], "num_local_experts": 0}),
    (
        "granitemoehybrid",
        {"num_hidden_layers": 2, "layers_block_type": ["mamba", "attention"], "tie_word_embeddings": True},
    ),
    ("falcon_h1", {"num_hidden_layers": 2}),
    ("falcon_h1", {"num_hidden_layers": 2, "mamba_d_ssm": None, "mamba_rms_norm": True, "mamba_proj_bias": True}),
    ("bamba", {"num_hidden_layers": 3}),
    ("bamba", {"num_hidden_layers": 3, "attn_layer_indices": [1], "mamba_d_head": 2}),
    ("mamba2", {"num_hidden_layers": 3, "num_heads": 8, "head_dim": 32}),
    ("mamba", {"num_hidden_layers": 3}),
    (
        "mamba",
        {"num_hidden_layers": 2, "expand": 3, "time_step_rank": 5, "state_size": 8, "tie_word_embeddings": False},
    ),
    ("falcon_mamba", {"num_hidden_layers": 3}),
    ("jamba", {"num_hidden_layers": 9}),
    ("jamba", {"num_hidden_layers": 5, "num_experts": 1, "attn_layer_period": 2, "attn_layer_offset": 0}),
    ("jamba", {"num_hidden_layers": 5, "num_experts": 4, "expert_layer_period": 3, "mamba_dt_rank": 5}),
    ("mamba2", {"num_hidden_layers": 2, "num_heads": 4, "n_groups": 1, "time_step_limit": [0.1, "Infinity"]}),
]
ARCHITECTURES = {
    "nemotron_h": "NemotronHForCausalLM",
    "granitemoehybrid": "GraniteMoeHybridForCausalLM",
    "falcon_h1": "FalconH1ForCausalLM",
    "bamba": "BambaForCausalLM",
    "mamba2": "Mamba2ForCausalLM",
    "mamba": "MambaForCausalLM",
    "falcon_mamba": "FalconMambaForCausalLM",
    "jamba": "JambaForCausalLM",
}


@pytest.mark.parametrize(("model_type", "keys"), FILES)
def test_omitted_keys_have_the_defaults_of_transformers(model_type: str, keys: dict[str, Any]):
    sizes = {"hidden_size": 128, "num_attention_heads": 16, "vocab_size": 300}
    given = {key: value for key, value in keys.items() if key != "time_step_limit"}
    theirs = AutoConfig.for_model(model_type, **sizes, **given)
    ours = model_config_of({"architectures": [ARCHITECTURES[model_type]], **sizes, **keys}, Path("config.json"))
    named, own = shapes_of_both(theirs, ours)
    stacked = tuple(each.name for each in ours.names.stacked)
    assert named == {name: shape for name, shape in own.items() if not name.endswith(stacked or ("?",))}
    assert ours.has_tied_embeddings == theirs.tie_word_embeddings
    assert ours.norm.eps == getattr(theirs, "rms_norm_eps", 0) or theirs.layer_norm_epsilon
    assert ours.max_position_embeddings == getattr(theirs, "max_position_embeddings", UNBOUNDED)
    assert ours.eos_token_ids == (theirs.eos_token_id,)
    words = {
        "mamba": "linear_attention",
        "mamba1": "linear_attention",
        "attention": "full_attention",
        "attention_and_mamba": "hybrid",
    }
    kinds = [words.get(each.mixer) or ("moe" if each.experts else "mlp") for each in ours.layers]
    assert kinds == list(theirs.layer_types if hasattr(theirs, "layer_types") else theirs.layers_block_type)
    rotates = model_type in ("falcon_h1", "bamba")
    assert [each.partial_factor for each in ours.ropes] == ([0.5 if model_type == "bamba" else 1.0] if rotates else [])
    mamba = next((each.mamba for each in ours.layers if each.mamba is not None), None)
    if mamba is not None:
        assert mamba.dt_limits == ((0.1, float("inf")) if "time_step_limit" in keys else tuple(theirs.time_step_limit))
    multipliers = getattr(theirs, "embedding_multiplier", 1.0), getattr(theirs, "logits_scaling", 1.0)
    assert (ours.embedding_multiplier, ours.logit_divisor) == multipliers
    experts = next((each.experts for each in ours.layers if each.experts is not None), None)
    if experts is not None:
        assert experts.num_experts == (
            theirs.n_routed_experts if model_type == "nemotron_h" else theirs.num_local_experts
        )
        assert experts.num_chosen == theirs.num_experts_per_tok
    if model_type == "jamba":
        assert [1 if each.experts is None else each.experts.num_experts for each in ours.layers] == (
            theirs.layers_num_experts or [1] * len(ours.layers)
        )


def test_nemotron_reads_keys_of_other_mamba_models():
    """transformers lets them win over its own."""
    sizes = {"hidden_size": 128, "num_attention_heads": 16, "vocab_size": 300, "layers_block_type": ["mamba"]}
    own = {"n_groups": 4, "conv_kernel": 3, "use_conv_bias": True, "time_step_limit": [0.0, 9.0]}
    others = {"mamba_n_groups": 2, "mamba_d_conv": 5, "mamba_conv_bias": False, "mamba_dt_limit": [0.1, 0.5]}
    theirs = AutoConfig.for_model("nemotron_h", **sizes, **own, **others)
    config = {"architectures": ["NemotronHForCausalLM"], **sizes, **own}
    plain, ours = (model_config_of({**config, **more}, Path("config.json")).layers[0].mamba for more in ({}, others))
    assert plain is not None
    assert ours is not None
    expected = (theirs.n_groups, theirs.conv_kernel, theirs.use_conv_bias, tuple(theirs.time_step_limit))
    assert (
        (ours.num_groups, ours.kernel_size, ours.has_conv_bias, ours.dt_limits) == expected == (2, 5, False, (0.1, 0.5))
    )
    assert (plain.num_groups, plain.kernel_size, plain.has_conv_bias, plain.dt_limits) == (4, 3, True, (0.0, 9.0))


BROKEN: list[tuple[str, dict[str, Any], str]] = [
    ("nemotron", {"layers_block_type": ["mamba", "conv"]}, r"layers_block_type=\[.*must list 2 of mamba"),
    ("nemotron", {"layers_block_type": None, "hybrid_override_pattern": "MX"}, "must list 2 of mamba"),
    ("nemotron", {"n_groups": 3}, "n_groups=3 does not divide the 8 Mamba heads"),
    ("nemotron", {"conv_kernel": 1}, "conv_kernel=1 must be a whole number from 2"),
    ("nemotron", {"mamba_hidden_act": "gelu"}, "mamba_hidden_act='gelu' is not supported, only 'silu'"),
    ("nemotron", {"time_step_limit": [0.5, 0.1]}, "must be a lower and an upper bound"),
    ("nemotron", {"time_step_limit": 3}, "time_step_limit=3 must be a list of two numbers"),
    ("nemotron", {"time_step_limit": [0.0, {"__float__": "NaN"}]}, "time_step_limit='NaN' must be a number"),
    ("granite", {"layer_types": ["mamba"]}, "must list 3 of mamba, linear_attention, attention, full_attention"),
    ("granite", {"mamba_d_head": 9}, "mamba_n_heads=8 heads of mamba_d_head=9 are not the 128 columns of hidden_size"),
    ("granite", {"position_embedding_type": "alibi"}, "position_embedding_type='alibi' is not supported"),
    ("falcon", {"mamba_d_ssm": 100}, "columns of mamba_d_ssm"),
    ("falcon", {"ssm_multipliers": [1.0]}, r"ssm_multipliers=\[1.0\] must be a list of 5 numbers"),
    ("falcon", {"mlp_multipliers": [1.0, "x"]}, "mlp_multipliers='x' must be a number"),
    ("bamba", {"attn_layer_indices": 3}, "attn_layer_indices=3 must be a list of layers"),
    ("mamba1", {"time_step_rank": "half"}, "time_step_rank='half' must be a whole number from 1"),
    ("mamba1", {"expand": 1.5}, "expand=1.5 must be a whole number from 1"),
    ("mamba1", {"hidden_act": "gelu"}, "hidden_act='gelu' is not supported, only 'silu'"),
    ("falcon_mamba", {"mixer_rms_eps": -1}, "mixer_rms_eps=-1 must be a number"),
    ("jamba", {"expert_layer_period": 0}, "expert_layer_period=0 must be a whole number from 1"),
    ("jamba", {"attn_layer_offset": "x"}, "attn_layer_offset='x' must be a whole number from 0"),
    ("jamba", {"num_experts_per_tok": 9}, "num_experts_per_tok=9 is more than the 6 experts"),
    ("mamba2", {"head_dim": 9}, "num_heads=8 heads of head_dim=9 are not the 128 columns of expand times hidden_size"),
    ("mamba2", {"n_groups": 3}, "n_groups=3 does not divide the 8 Mamba heads"),
    ("mamba2", {"hidden_act": "gelu"}, "hidden_act='gelu' is not supported, only 'silu'"),
    ("mamba2", {"num_heads": "x"}, "num_heads='x' must be a whole number"),
]


@pytest.mark.parametrize(("name", "keys", "message"), BROKEN)
def test_broken_config_error_names_key_and_rule(name: str, keys: dict[str, Any], message: str):
    config = json.loads((mamba_folder(name) / "config.json").read_text())
    with pytest.raises(ModelConfigError, match=message):
        model_config_of({**config, **keys}, Path("config.json"))


def test_ranks_that_do_not_divide_heads_are_rejected():
    config = read_model_files(mamba_folder("bamba")).model_config
    layers = tuple(replace(each, num_heads=24, num_kv_heads=24) for each in config.layers)
    with pytest.raises(ConfigError, match="it has 8 Mamba heads; sizes that do are 1, 2, 4 and 8"):
        check_divides(RankLayout(3), replace(config, layers=layers))
