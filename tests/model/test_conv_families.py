"""Hybrids with short convolutions against transformers: logits, steps, shards, stages, tensors, each entry of a row.

Float32, 1e-4 of the largest logit. A row is read from two files: with every key, and thinned as the hub's are.
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conv_checkpoints import CASES, conv_folder, conv_reference, thinned_conv_folder
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
from our_model import load_model
from plain_models import in_tiers, new_model
from reference_models import (
    Oracle,
    open_reference,
    random_prompt,
    reference_greedy,
    stateless,
    their_logits,
)
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig
from transformers.models.lfm2_moe.modeling_lfm2_moe import Lfm2MoeTopKRouter

from spmd_worker.base.errors import CheckpointError, ConfigError, ModelConfigError
from spmd_worker.model.layers.attention import Attention
from spmd_worker.model.layers.experts import select_experts
from spmd_worker.model.layers.short_conv import ShortConv
from spmd_worker.model_config.families.conv_rows import CONV_ROWS
from spmd_worker.model_config.families.family import Family
from spmd_worker.model_config.families.table import FAMILIES
from spmd_worker.model_config.layer_config import ExpertsConfig
from spmd_worker.model_config.model_config import model_config_of, read_model_files
from spmd_worker.ops.kernels.reference_recurrent import ReferenceRecurrentKernels, silu
from spmd_worker.ranks.topology import RankLayout, check_divides

TOLERANCE = 1e-4
ROWS = [random_prompt(length, seed=7, vocab_size=96) for length in (1, 17, 70)]
FEW = ("lfm2_biases", "lfm2_moe", "lfm3")
"""One case of each family."""


quick = partial(in_tiers, among=FEW)

oracle = Oracle(conv_reference, ROWS)
expected, worst_error, is_right = oracle.expected, oracle.worst_error, oracle.is_right
our_logits = partial(folder_logits, ROWS)


@pytest.mark.guarantee("Models compute what transformers computes")
@quick(*FEW, among=CASES, rest=pytest.mark.matrix)
def test_logits_and_ids_equal_transformers(name: str):
    model = load_model(conv_folder(name))
    assert worst_error(name, run_rows([model], ROWS)[0]) < TOLERANCE
    configs = [read_model_files(each).model_config for each in (conv_folder(name), thinned_conv_folder(name))]
    assert configs[0] == configs[1]
    assert greedy_ids([model], ROWS[1], 4) == reference_greedy(stateless(conv_reference(name)), ROWS[1], 4)


@pytest.mark.stress
@pytest.mark.parametrize("name", CASES)
def test_oracle_reads_thin_files_as_full_ones(name: str):
    """None of our code is asked: what it is compared with says the same of both files."""
    assert all(map(torch.equal, their_logits(conv_reference(name, is_thinned=True), ROWS), expected(name)))


@pytest.mark.guarantee("A row's answer depends on the row alone")
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.stress)])
@quick("lfm3")
def test_steps_do_not_change_bits_or_states(name: str, dtype: str):
    """Prompts cut anywhere, rows together and alone; slots and blocks hold NaN before."""
    logits = check_steps(load_model(conv_folder(name), dtype=dtype), ROWS)
    if dtype == "bfloat16":
        # Rounded scores choose other experts for some tokens.
        assert 1e-4 < worst_error(name, logits) < (0.5 if name == "lfm2_moe" else 0.2)


@pytest.mark.stress
@pytest.mark.parametrize("name", FEW)
def test_row_has_equal_bits_in_any_schedule(name: str):
    check_schedules(conv_folder(name), lambda row, count: reference_greedy(stateless(conv_reference(name)), row, count))


def test_comparison_detects_steps_that_forget(monkeypatch: pytest.MonkeyPatch):
    """Negative control: a convolution that begins anew in each step."""
    forgets = ReferenceRecurrentKernels.short_conv

    def short_conv(self: Any, x: Tensor, *others: Any, **options: Any) -> Tensor:
        *before, segments = others
        return forgets(self, x, *before, replace(segments, firsts=torch.zeros_like(segments.firsts)), **options)

    model = new_model(conv_folder("lfm2"))
    whole = run_rows([model], ROWS)[0]
    assert all(map(torch.equal, run_rows([model], ROWS, 63)[0][:2], whole[:2]))
    monkeypatch.setattr(ReferenceRecurrentKernels, "short_conv", short_conv)
    assert all(map(torch.equal, run_rows([model], ROWS)[0], whole))
    assert not torch.equal(run_rows([model], ROWS, 63)[0][2], whole[2])


@quick("lfm3")
def test_shards_equal_transformers_and_stages_one_rank(name: str):
    assert worst_error(name, logits_of_ranks(conv_folder(name), 2, ROWS, 33)) < TOLERANCE
    check_stages(conv_folder(name), 3, ROWS, 33)


@quick("lfm3")
def test_all_checkpoint_tensors_are_viewed_and_loaded(name: str):
    """By the names of files and of transformers' memory; on two ranks together all of each."""
    check_tensors(conv_folder(name), conv_reference(name).state_dict())


@pytest.mark.guarantee("The plan's bytes are those of the run")
@pytest.mark.parametrize("name", ["lfm2_biases", "lfm2_moe", "lfm3_plain", "lfm3"])
def test_planned_bytes_equal_parameters(name: str):
    assert len(list(planned_models(read_model_files(conv_folder(name)).model_config))) == 7


def test_int8_projections_stay_near_transformers():
    model = load_model(conv_folder("lfm3"), quantization="int8")
    conv = model.model.layers[0].conv
    assert conv.in_proj.weight.dtype == conv.out_proj.weight.dtype == torch.int8
    assert conv.conv.weight.dtype == torch.float32
    check_int8(oracle, "lfm3", model)


def test_adapters_of_convolutions_are_those_of_peft(tmp_path: Path):
    folder = conv_folder("lfm2_biases")
    targets = ("in_proj", "out_proj", "q_proj", "w2")
    check_adapters(
        oracle, "lfm2_biases", *adapter_logits(folder, lambda: open_reference(folder), targets, tmp_path, ROWS)
    )


# ---- each entry of a row, and mistakes that no entry makes ---------------------------------------------------------

UNSEEN = ("models", "defaults", "newer", "layers", "experts.sum_eps", "rope.rounding", "names.layer_aliases")
"""Entries without an effect on these logits: the rounding is of bfloat16; the others have tests of their own."""
BARE = (
    {},
    {"attention_bias": True, "mlp_bias": True, "rms_norm_eps": 0.5, "hidden_act": "gelu"},
    {"num_experts": None, "num_local_experts": 4, "hidden_size": 1024},
)
"""Files that leave out nearly all, with keys that the classes do not know."""


def mutants(row: Family) -> list[tuple[str, Family]]:
    """The row with one entry as Llama's row has it, with one renamed part, and with one norm fewer."""
    return entries(row, Family(), *UNSEEN, "names.parts", "file_keys") + without_each(row, "names.parts")


def readings(architecture: str) -> list[Any]:
    """Of the bare files; None for one that is rejected."""
    kinds = {"num_hidden_layers": 4, "layer_types": ["conv", "full_attention"] * 2}
    return readings_of({"architectures": [architecture], **kinds, **keys} for keys in BARE)


@pytest.mark.parametrize(
    "architecture",
    [
        pytest.param(name, marks=[] if name == "Lfm3ForCausalLM" else pytest.mark.stress)
        for name, row in CONV_ROWS.items()
        if not row.vision
    ],
)
def test_comparison_detects_each_row_entry_set_to_llama(architecture: str, monkeypatch: pytest.MonkeyPatch):
    cases = [name for name, (family, _) in CASES.items() if f"{family}ForCausalLM" == architecture]
    folders = {name: (conv_folder(name), thinned_conv_folder(name)) for name in cases}
    assert None not in readings(architecture)
    given = (mutants(FAMILIES[architecture]), partial(readings, architecture), folders, our_logits, is_right)
    check_entries(monkeypatch, architecture, *given)


def _other_order(name: str) -> list[Tensor]:
    """Of the projections B, C and v."""
    model = new_model(conv_folder(name))
    for layer in model.model.layers:
        if isinstance(getattr(layer, "conv", None), ShortConv):
            before, after, value = layer.conv.in_proj.weight.chunk(3)
            layer.conv.in_proj.weight.data = torch.cat((after, before, value))
    return run_rows([model], ROWS)[0]


def _newest_first(name: str) -> list[Tensor]:
    model = new_model(conv_folder(name))
    for layer in model.model.layers:
        if isinstance(getattr(layer, "conv", None), ShortConv):
            layer.conv.conv.weight.data = layer.conv.conv.weight.flip(-1)
    return run_rows([model], ROWS)[0]


def _with_silu(name: str) -> list[Tensor]:
    model, plain = new_model(conv_folder(name)), ReferenceRecurrentKernels()

    class Other(ReferenceRecurrentKernels):
        def short_conv(self, *arguments: Any, has_silu: bool) -> Tensor:
            return silu(plain.short_conv(*arguments, has_silu=has_silu))

    for layer in model.model.layers:
        if isinstance(getattr(layer, "conv", None), ShortConv):
            layer.conv._kernels = Other()
    return run_rows([model], ROWS)[0]


def _changed(name: str, **fields: Any) -> list[Tensor]:
    config = read_model_files(conv_folder(name)).model_config
    layers = tuple(each if each.conv is not None else replace(each, **fields) for each in config.layers)
    return run_rows([new_model(conv_folder(name), config=replace(config, layers=layers))], ROWS)[0]


def _partial_rope(name: str) -> list[Tensor]:
    """The proportional rope as one over a part of a head."""
    config = read_model_files(conv_folder(name)).model_config
    ropes = tuple(replace(each, rope_type="default") for each in config.ropes)
    return run_rows([new_model(conv_folder(name), config=replace(config, ropes=ropes))], ROWS)[0]


MISTAKES: dict[str, tuple[str, Callable[[str], list[Tensor]]]] = {
    "projections in another order": ("lfm2", _other_order),
    "silu after the convolution": ("lfm2", _with_silu),
    "newest tap first": ("lfm2", _newest_first),
    "proportional as partial": ("lfm3", _partial_rope),
    "no window": ("lfm3", lambda name: _changed(name, window=0)),
    "one rope": ("lfm3", lambda name: _changed(name, rope=1)),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_comparison_detects_known_mistakes(mistake: str):
    name, logits_of = MISTAKES[mistake]
    assert worst_error(name, logits_of(name)) > 100 * TOLERANCE


def test_gates_multiply_heads_before_their_projection():
    """By hand, for the gates of one layer."""
    model = new_model(conv_folder("lfm3"))
    attention = next(each.self_attn for each in model.model.layers if hasattr(each, "self_attn"))
    assert isinstance(attention, Attention)
    x, attended = torch.randn(3, 64), torch.randn(3, 64)
    assert attention.g_proj is not None
    gates = torch.sigmoid(F.linear(x, attention.g_proj.weight))
    expected_heads = (attended.view(3, 4, 16) * gates[..., None]).flatten(1)
    torch.testing.assert_close(attention._gated(attended, attention.g_proj(x).unsqueeze(2)), expected_heads)


def test_small_scores_are_divided_as_by_transformers():
    """1e-6 in the sum shows where all scores are small."""
    logits = torch.randn(5, 8, generator=torch.Generator().manual_seed(1)) - 14
    experts = ExpertsConfig(8, 2, 16, score="sigmoid", renormalises=True, scaling=1.7, sum_eps=1e-6)
    ids, weights = select_experts(logits, None, experts)
    config = AutoConfig.for_model("lfm2_moe", num_experts=8, num_experts_per_tok=2, hidden_size=8)
    config.use_expert_bias, config.routed_scaling_factor = False, 1.7
    router = Lfm2MoeTopKRouter(config)
    router.weight.data.copy_(torch.eye(8))
    _, theirs, chosen = router(logits)
    order = chosen.argsort(dim=-1)
    assert torch.equal(ids, chosen.gather(1, order))
    torch.testing.assert_close(weights, theirs.gather(1, order))
    plain = select_experts(logits, None, replace(experts, sum_eps=1e-20))[1]
    assert not torch.allclose(plain, weights, rtol=1e-2)
    row = read_model_files(conv_folder("lfm2_moe")).model_config.layers[-1].experts
    assert row is not None
    assert row.sum_eps == 1e-6


# ---- config.json ---------------------------------------------------------------------------------------------------

FILES: list[tuple[str, dict[str, Any]]] = [
    ("lfm2", {}),
    ("lfm2", {"full_attn_idxs": [2, 5], "num_hidden_layers": 6, "tie_embedding": False}),
    ("lfm2", {"block_ff_dim": 1000, "block_multiple_of": 64, "block_ffn_dim_multiplier": 1.3}),
    ("lfm2", {"block_ff_dim": 10240, "intermediate_size": 6656, "block_auto_adjust_ff_dim": False}),
    ("lfm2_moe", {"layer_types": ["conv", "full_attention"] * 2, "num_hidden_layers": 4, "tie_embedding": False}),
    ("lfm3", {}),
    ("lfm3", {"num_hidden_layers": 7, "use_sandwich_norm": False, "conv_L_cache": 5}),
]


@pytest.mark.parametrize(("model_type", "keys"), FILES)
def test_omitted_keys_have_the_defaults_of_transformers(model_type: str, keys: dict[str, Any]):
    sizes = {"hidden_size": 128, "num_attention_heads": 32 if model_type != "lfm3" else 16, "vocab_size": 128000}
    theirs = AutoConfig.for_model(model_type, **sizes, **keys)
    architecture = {"lfm2": "Lfm2", "lfm2_moe": "Lfm2Moe", "lfm3": "Lfm3"}[model_type]
    ours = model_config_of({"architectures": [f"{architecture}ForCausalLM"], **sizes, **keys}, Path("config.json"))
    named, own = shapes_of_both(theirs, ours)
    assert named == own
    assert ours.has_tied_embeddings == theirs.tie_word_embeddings
    kinds = [
        "conv" if each.mixer == "conv" else "sliding_attention" if each.window else "full_attention"
        for each in ours.layers
    ]
    assert kinds == theirs.layer_types
    assert ours.norm.eps == theirs.norm_eps
    assert ours.max_position_embeddings == theirs.max_position_embeddings
    assert ours.eos_token_ids == (theirs.eos_token_id,)
    ropes = theirs.rope_parameters
    ropes = [ropes] if "rope_type" in ropes else [ropes["full_attention"], ropes["sliding_attention"]]
    assert [each.rope_theta for each in ours.ropes] == [each["rope_theta"] for each in ropes]
    assert [each.rope_type for each in ours.ropes] == [each["rope_type"] for each in ropes]


BROKEN: list[tuple[str, dict[str, Any], str]] = [
    ("lfm2", {"layer_types": ["conv"] * 3}, r"layer_types=\[.*must list 4 of full_attention, conv"),
    ("lfm2", {"layer_types": ["conv"] * 3 + ["sliding_attention"]}, "layer_types="),
    ("lfm2", {"layer_types": None, "full_attn_idxs": 3}, "full_attn_idxs=3 must be a list of layers"),
    ("lfm2", {"layer_types": None, "full_attn_idxs": [-1]}, "full_attn_idxs=-1 must be a whole number"),
    ("lfm2", {"conv_L_cache": 1}, "conv_L_cache=1 must be a whole number from 2"),
    ("lfm2", {"conv_bias": "no"}, "conv_bias='no' must be true or false"),
    ("lfm2", {"block_multiple_of": 0}, "block_multiple_of=0"),
    ("lfm2", {"block_ffn_dim_multiplier": 1e12, "block_ff_dim": 2**31 - 1}, "block_ff_dim=2147483647, adjusted"),
    ("lfm2_moe", {"layer_types": None}, "layer_types=None must list 4"),
    ("lfm2_moe", {"use_expert_bias": 1}, "use_expert_bias=1 must be true or false"),
    ("lfm3", {"layer_types": ["conv", "attention"] * 2 + ["conv"]}, "layer_types must list 5 of"),
    ("lfm3", {"sliding_window": None}, "leaves sliding_attention in layer_types without a window"),
    ("lfm3", {"use_attention_gate": "yes"}, "use_attention_gate='yes'"),
]


@pytest.mark.parametrize(("name", "keys", "message"), BROKEN)
def test_broken_config_error_names_key_and_rule(name: str, keys: dict[str, Any], message: str, tmp_path: Path):
    config = json.loads((conv_folder(name) / "config.json").read_text())
    with pytest.raises(ModelConfigError, match=message):
        model_config_of({**config, **keys}, tmp_path / "config.json")


def test_three_ranks_do_not_divide_channels():
    config = read_model_files(conv_folder("lfm2")).model_config
    layers = tuple(replace(each, num_heads=6, num_kv_heads=6) for each in config.layers)
    with pytest.raises(ConfigError, match="its convolutions have 64 channels; sizes that do are 1 and 2"):
        check_divides(RankLayout(3), replace(config, layers=layers))


def test_missing_convolution_weights_are_reported(tmp_path: Path):
    folder = tmp_path / "without"
    shutil.copytree(conv_folder("lfm2"), folder)
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.0.conv.conv.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"layers\.0\.conv\.conv\.weight"):
        new_model(folder)
