"""Llama 4, Gemma 3n and Gemma 4 against transformers: logits, steps, shards, stages, tensors, rows' entries, mistakes.

Float32, 1e-4 of the largest logit. A row is read from two files: with every key, and thinned as the hub's are.
"""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from family_checks import (
    adapter_logits,
    check_adapters,
    check_entries,
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
from hybrid_runs import greedy_ids, run_rows
from our_model import load_model
from plain_models import in_tiers, new_model
from recent_checkpoints import CASES, recent_folder, recent_reference, thinned_recent_folder
from reference_models import Oracle, open_reference, random_prompt, their_logits
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig

from spmd_worker import LLM, SamplingParams
from spmd_worker.base.errors import ConfigError, ModelConfigError
from spmd_worker.model.layers.sparse_gates import SparseGatedLinear
from spmd_worker.model_config.families.family import Family
from spmd_worker.model_config.families.table import FAMILIES
from spmd_worker.model_config.layer_config import LayerConfig
from spmd_worker.model_config.model_config import ModelConfig, model_config_of, read_model_files
from spmd_worker.ranks.topology import RankLayout, check_divides
from spmd_worker.worker.memory.estimate import weights_bytes

TOLERANCE = 1e-4
ROWS = [random_prompt(length, seed=7, vocab_size=96) for length in (1, 17, 70)]
INPUT_PROJECTIONS = ("per_layer_input_gate", "per_layer_projection", "per_layer_model_projection")
FEW = ("llama4", "gemma3n", "gemma4")
"""One case of each shape."""


quick = partial(in_tiers, among=CASES)

oracle = Oracle(recent_reference, ROWS)
expected, worst_error, is_right = oracle.expected, oracle.worst_error, oracle.is_right
our_logits = partial(folder_logits, ROWS)


@pytest.mark.guarantee("Models compute what transformers computes")
@pytest.mark.parametrize("name", CASES)
def test_logits_and_ids_equal_transformers(name: str):
    model = load_model(recent_folder(name))
    assert worst_error(name, run_rows([model], ROWS)[0]) < TOLERANCE
    configs = [read_model_files(each).model_config for each in (recent_folder(name), thinned_recent_folder(name))]
    assert configs[0] == configs[1]
    ids = greedy_ids([model], ROWS[2], 3)
    assert ids[0] == int(expected(name)[2][-1].argmax())
    with torch.no_grad():
        after = recent_reference(name)(torch.tensor([[*ROWS[2], *ids[:2]]]), use_cache=False).logits[0, -2:]
    assert after.argmax(-1).tolist() == ids[1:]


@pytest.mark.stress
@pytest.mark.parametrize("name", CASES)
def test_oracle_reads_thin_files_as_full_ones(name: str):
    """None of our code is asked: what it is compared with says the same of both files."""
    assert all(map(torch.equal, their_logits(recent_reference(name, is_thinned=True), ROWS), expected(name)))


@pytest.mark.guarantee("A row's answer depends on the row alone")
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.stress)])
@quick(*FEW)
def test_steps_and_other_rows_change_no_bit(name: str, dtype: str):
    """Prompts cut anywhere, rows together and alone; blocks hold NaN before."""
    check_steps(load_model(recent_folder(name), dtype=dtype), ROWS)


@quick("llama4", "gemma4_small")
def test_engine_answers_as_transformers(name: str):
    """Prompts in several steps, and again with cached prefixes."""
    sampling = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    with LLM(recent_folder(name), dtype="float32", device="cpu", max_num_batched_tokens=32, max_model_len=128) as llm:
        for _ in range(2):
            for row, output in zip(ROWS, llm.generate([{"prompt_token_ids": row} for row in ROWS], sampling)):
                ids = list(output.outputs[0].token_ids)
                with torch.no_grad():
                    logits = recent_reference(name)(torch.tensor([[*row, *ids]]), use_cache=False).logits[0]
                assert logits.argmax(-1)[len(row) - 1 : -1].tolist() == ids
        if name == "gemma4_small":
            with pytest.raises(ValueError, match="whose layers read inputs of each token id: give token ids"):
                llm.generate([{"prompt_embeds": torch.zeros(3, 64)}], sampling)


@quick(*FEW)
def test_shards_equal_transformers_and_stages_one_rank(name: str):
    folder = recent_folder(name)
    assert worst_error(name, logits_of_ranks(folder, 2, ROWS, 33)) < TOLERANCE
    config = read_model_files(folder).model_config
    if config.num_layer_inputs:
        with pytest.raises(ConfigError, match="pipeline_parallel_size=2 is not supported for this model"):
            check_divides(RankLayout(1, 2), config)
        return
    check_stages(folder, config.num_layers // 2, ROWS, 33)


@pytest.mark.control("A row's answer depends on the row alone")
def test_comparison_detects_bounds_of_a_ranks_gates(monkeypatch: pytest.MonkeyPatch):
    """Negative control: each rank bounds its gates by these alone."""
    monkeypatch.setattr(SparseGatedLinear, "_gathered", lambda layer, gates: gates)
    assert worst_error("gemma3n", logits_of_ranks(recent_folder("gemma3n"), 2, ROWS)) > 30 * TOLERANCE


@quick(*FEW)
def test_all_checkpoint_tensors_are_viewed_and_loaded(name: str):
    """By the names of files and of transformers' memory."""
    check_tensors(recent_folder(name), recent_reference(name).state_dict())


@pytest.mark.guarantee("The plan's bytes are those of the run")
@pytest.mark.parametrize("name", CASES)
def test_planned_bytes_equal_parameters(name: str):
    assert len(list(planned_models(read_model_files(recent_folder(name)).model_config))) == 7


@quick("gemma3n", among=(*FEW, "gemma4_small"))
def test_adapters_of_linear_layers_are_those_of_peft(name: str, tmp_path: Path):
    folder, targets = recent_folder(name), ["q_proj", "k_proj", "gate_proj", "down_proj"]
    targets += INPUT_PROJECTIONS if name in ("gemma3n", "gemma4_small") else ()
    targets += ("linear_left", "linear_right") if name == "gemma3n" else ()
    check_adapters(oracle, name, *adapter_logits(folder, lambda: open_reference(folder), targets, tmp_path, ROWS))


@quick("gemma3n", among=("gemma3n", "gemma3n_other", "gemma4_small"))
def test_int8_projections_stay_near_transformers(name: str):
    model = load_model(recent_folder(name), quantization="int8")
    if not model.model_config.has_tied_embeddings:
        # A tied head is a quantised copy beside the parameters.
        planned = weights_bytes(model.model_config, RankLayout(1), 0, "float32", "cpu", "int8")
        assert planned == sum(each.nbytes for each in model.parameters())
    logits, _ = run_rows([model], ROWS)
    assert 1e-3 < worst_error(name, logits) < 0.4
    assert all(map(torch.equal, run_rows([model], ROWS, 16)[0], logits))


TEXT_PARTS = {
    "llama4": ("Llama4ForConditionalGeneration", "", "language_model.", "vision_model."),
    "gemma4": ("Gemma4ForConditionalGeneration", "model.", "model.language_model.", "model.vision_tower."),
    "gemma4_small": ("Gemma4ForConditionalGeneration", "model.", "model.language_model.", "model.vision_tower."),
    "gemma4_unified": (
        "Gemma4UnifiedForConditionalGeneration",
        "model.",
        "model.language_model.",
        "model.embed_vision.",
    ),
    "gemma4_small of text alone": ("Gemma4ForCausalLM", "model.", "model.language_model.", ""),
    "gemma3n": ("Gemma3nForConditionalGeneration", "model.", "model.language_model.", "model.audio_tower."),
}
"""Architecture, the beginning of names that another replaces, and that of names for images."""


def with_images_beside(folder: Path, part: str) -> None:
    """Write a file with the text of a case inside it, as models that take images have."""
    architecture, prefix, other_prefix, images = TEXT_PARTS[part]
    name = part.split()[0]
    shutil.copytree(recent_folder(name), folder)
    config = json.loads((folder / "config.json").read_text())
    text = {key: value for key, value in config.items() if key not in ("architectures", "transformers_version")}
    given = {"architectures": [architecture], "text_config": text} if images else config
    (folder / "config.json").write_text(json.dumps(given))
    tensors = load_file(folder / "model.safetensors")
    tensors = {other_prefix + each.removeprefix(prefix): tensor for each, tensor in tensors.items()}
    if images:
        tensors[f"{images}patch.weight"] = torch.ones(2, 2)
    if name in ("gemma3n", "gemma4_small"):
        # The hub's files have them in layers that do not read them.
        for other in ("k_proj.weight", "v_proj.weight", "k_norm.weight"):
            tensors[f"{other_prefix}layers.5.self_attn.{other}"] = torch.ones(2)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize("part", TEXT_PARTS)
def test_text_of_a_file_with_images_has_the_same_logits(part: str, tmp_path: Path):
    with_images_beside(tmp_path / "with_images", part)
    found = run_rows([new_model(tmp_path / "with_images")], ROWS)[0]
    assert worst_error(part.split()[0], found) < TOLERANCE


@pytest.mark.parametrize("name", ["gemma3n", pytest.param("gemma4_small", marks=pytest.mark.stress), "llama4"])
def test_images_are_refused_by_the_models_name(name: str, tmp_path: Path):
    """Text beside them is answered."""
    architecture = TEXT_PARTS[name][0]
    folder = tmp_path / "with_images"
    with_images_beside(folder, name)
    text, picture = [5, 7, 11, 13], np.zeros((28, 28, 3), np.uint8)
    prompts = [
        {"prompt_token_ids": text},
        {"prompt_token_ids": text, "multi_modal_data": {"image": picture}},
        {"prompt": "What is it?", "multi_modal_data": {"image": [picture]}},
    ]
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, detokenize=False)
    words = rf"takes no images: the model \({architecture}\) runs with text alone.*: leave images out$"
    if name == "gemma3n":
        # Its tokens have embeddings in another table.
        prompts.append({"prompt_token_ids": [5, 90]})
        words = rf"{words}|token id 90 is for images or audio, and the model \({architecture}\) runs with text alone"
    with LLM(str(folder), dtype="float32", device="cpu", num_blocks=64) as llm:
        plain, *refused = llm.generate(prompts, params, use_tqdm=False, on_error="row")
        assert len(plain.outputs[0].token_ids) == 4
        assert llm.llm_engine.model_config.architecture == architecture
        for each in refused:
            assert re.search(words, each.error or ""), each.error


# ---- each entry of a row, and mistakes that no entry makes ---------------------------------------------------------

UNSEEN = ("models", "defaults", "newer", "layers", "ropes", "names.aliases")
"""Entries with tests of their own, or, as ropes of plain rows, without an effect where `layers` needs them."""
BARE = ({}, {"num_experts": 4, "num_local_experts": 8, "mlp_bias": True, "norm_topk_prob": True, "hidden_size": 1024})
"""Files that leave out nearly all, with keys that the classes do not know."""


def mutants(row: Family) -> list[tuple[str, Family]]:
    """The row with one entry as Llama's row has it, and with one renamed part fewer."""
    found = entries(row, Family(), *UNSEEN, "names.parts", "file_keys")
    return found + without_each(row, "names.parts", "file_keys")


def readings(architecture: str) -> list[Any]:
    """Model configs of the bare files; None for one that is rejected."""
    return readings_of({"architectures": [architecture], **keys} for keys in BARE)


@pytest.mark.gate("Llama4ForCausalLM")
@pytest.mark.parametrize("architecture", ["Llama4ForCausalLM", "Gemma3nForCausalLM", "Gemma4ForCausalLM"])
def test_comparison_detects_each_row_entry_set_to_llama(architecture: str, monkeypatch: pytest.MonkeyPatch):
    cases = [name for name, (family, _) in CASES.items() if f"{family}ForCausalLM" == architecture]
    folders = {name: (recent_folder(name), thinned_recent_folder(name)) for name in cases}
    assert None not in readings(architecture)
    given = (mutants(FAMILIES[architecture]), partial(readings, architecture), folders, our_logits, is_right)
    check_entries(monkeypatch, architecture, *given)


def with_layers(name: str, change: Callable[[LayerConfig], LayerConfig]) -> ModelConfig:
    config = read_model_files(recent_folder(name)).model_config
    return replace(config, layers=tuple(change(each) for each in config.layers))


def with_rope(name: str, index: int, **fields: Any) -> ModelConfig:
    config = read_model_files(recent_folder(name)).model_config
    ropes = [replace(each, **fields) if each is config.ropes[index] else each for each in config.ropes]
    return replace(config, ropes=tuple(ropes))


def _other_keys(layer: LayerConfig) -> LayerConfig:
    """The layer with keys of the first layer of its kind."""
    return layer if layer.kv_layer is None else replace(layer, kv_layer=int(layer.window == 0))


def _lower_cutoff(layer: LayerConfig) -> LayerConfig:
    return layer if layer.gate_cutoff is None else replace(layer, gate_cutoff=layer.gate_cutoff - 0.1)


def _with_streams(layer: LayerConfig, **fields: Any) -> LayerConfig:
    assert layer.predicted_streams is not None
    return replace(layer, predicted_streams=replace(layer.predicted_streams, **fields))


def _weighs_outputs(layer: LayerConfig) -> LayerConfig:
    experts = layer.experts
    return layer if experts is None else replace(layer, experts=replace(experts, weighs_inputs=False))


def _plain_norms(layer: LayerConfig) -> LayerConfig:
    return replace(layer, norm=replace(layer.norm, offset=1.0))


def _without_scales(name: str, parameter: str) -> list[Tensor]:
    """Logits with ones, or of tables zeros, in place of these weights."""
    model = new_model(recent_folder(name))
    for each, value in model.named_parameters():
        if each.endswith(parameter):
            value.data.fill_(0.0 if "inputs" in parameter else 1.0)
    return run_rows([model], ROWS)[0]


@pytest.mark.parametrize(
    "parameter",
    [
        "layer_scalar.value",
        "per_expert_scale",
        "gate.scale",
        "experts_input_norm.weight",
        "inputs.table.weight",
        "inputs.projection.weight",
        "post_per_layer_input_norm.weight",
        "altup.correct_output_scale",
        "altup.router_norm.weight",
        "laurel.post_laurel_norm.weight",
    ],
)
def test_comparison_detects_weights_left_out(parameter: str):
    name = "gemma4_small" if "input" in parameter and "experts" not in parameter else "gemma4"
    name = "gemma3n" if "altup" in parameter or "laurel" in parameter else name
    assert worst_error(name, _without_scales(name, parameter)) > 30 * TOLERANCE


MISTAKES: dict[str, tuple[str, Callable[[str], ModelConfig]]] = {
    "no chunks": ("llama4", lambda name: with_layers(name, lambda each: replace(each, chunk=0))),
    "chunks as windows": (
        "llama4",
        lambda name: with_layers(name, lambda each: replace(each, chunk=0, window=each.chunk)),
    ),
    "chunks in all layers": ("llama4", lambda name: with_layers(name, lambda each: replace(each, chunk=32))),
    "queries do not grow": ("llama4", lambda name: with_rope(name, 1, query_growth=0.0)),
    "queries grow a token later": ("llama4", lambda name: with_rope(name, 1, growth_offset=0)),
    "halves are rotated": ("llama4", lambda name: with_rope(name, 0, is_interleaved=False)),
    "no norm of heads": ("llama4", lambda name: with_layers(name, lambda each: replace(each, qk_norm="none"))),
    "weights are of outputs": ("llama4_other", lambda name: with_layers(name, _weighs_outputs)),
    "all gates open": ("gemma3n", lambda name: with_layers(name, lambda each: replace(each, gate_cutoff=None))),
    "more gates open": ("gemma3n", lambda name: with_layers(name, _lower_cutoff)),
    "inputs by the stream as it is": (
        "gemma3n",
        lambda name: with_layers(name, partial(_with_streams, scales_output=False)),
    ),
    "another active stream": ("gemma3n_other", lambda name: with_layers(name, partial(_with_streams, active=0))),
    "first layer's keys": ("gemma4_small", lambda name: with_layers(name, _other_keys)),
    "scores by the head size": ("gemma4", lambda name: with_layers(name, lambda each: replace(each, scale=0.25))),
    "values are not normed": ("gemma4", lambda name: with_layers(name, lambda each: replace(each, norms_values=False))),
    "proportional as partial": ("gemma4", lambda name: with_rope(name, 0, rope_type="default")),
    "norms add one": ("gemma4", lambda name: with_layers(name, _plain_norms)),
    "no window": ("gemma4", lambda name: with_layers(name, lambda each: replace(each, window=0))),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_comparison_detects_known_mistakes(mistake: str):
    name, config_of = MISTAKES[mistake]
    logits = run_rows([new_model(recent_folder(name), config=config_of(name))], ROWS)[0]
    assert worst_error(name, logits) > 30 * TOLERANCE


# ---- config.json ---------------------------------------------------------------------------------------------------

BROKEN: list[tuple[str, dict[str, Any], str]] = [
    ("llama4", {"layer_types": ["chunked_attention"] * 3}, r"layer_types=\[.*must list 4 of chunked_attention"),
    ("llama4", {"attention_chunk_size": None}, "attention_chunk_size=None must be a whole number"),
    ("llama4", {"attn_temperature_tuning": "yes"}, "attn_temperature_tuning='yes' must be true or false"),
    ("llama4", {"floor_scale": 0}, "floor_scale=0 must be a whole number"),
    ("llama4", {"moe_layers": 3}, "moe_layers=3 must be a list of layers"),
    ("llama4", {"no_rope_layers": [1, 0]}, r"no_rope_layers=\[1, 0\] must list 4 of 0 and 1"),
    ("llama4", {"no_rope_layers": [1, 0, True, 1]}, "no_rope_layers=.*True, 1. must list 4 of 0 and 1"),
    ("gemma4", {"use_bidirectional_attention": "all"}, "use_bidirectional_attention='all' is not supported"),
    ("gemma4", {"per_layer_config": {"1": {"head_dim": 32}}}, "per_layer_config=.* of every full_attention layer"),
    ("gemma4", {"per_layer_config": None, "global_head_dim": 17}, "global_head_dim=17 must be even"),
    ("gemma4", {"per_layer_config": None, "num_global_key_value_heads": 3}, "not a multiple of num_global_key_value"),
    ("gemma4", {"rope_parameters": {"rope_theta": 5.0}}, "rope_parameters=.*must have an object for each"),
    ("gemma4_dense", {"per_layer_config": None, "layer_types": ["full_attention"]}, "layer_types must list 6 of"),
    ("gemma4_small", {"num_kv_shared_layers": 5}, "num_kv_shared_layers=5 leaves layers of a kind"),
    ("gemma4_small", {"num_kv_shared_layers": 6}, "num_kv_shared_layers=6 must be a whole number"),
    ("gemma3n", {"intermediate_size": [40, 40]}, "intermediate_size=.* must be a number, or list one for each of"),
    ("gemma3n", {"intermediate_size": [40] * 5 + [0]}, "intermediate_size=0 must be a whole number"),
    ("gemma3n", {"activation_sparsity_pattern": [0.5] * 5}, "activation_sparsity_pattern=.* must list 6 numbers"),
    ("gemma3n", {"activation_sparsity_pattern": [1.0] * 6}, "activation_sparsity_pattern=.* to below 1"),
    ("gemma3n", {"altup_num_inputs": 1}, "altup_num_inputs=1 must be a whole number from 2 to 64"),
    ("gemma3n", {"altup_active_idx": 4}, "altup_active_idx=4 must be a whole number from 0 to 3"),
    ("gemma3n", {"altup_correct_scale": 1}, "altup_correct_scale=1 must be true or false"),
    ("gemma3n", {"laurel_rank": 0}, "laurel_rank=0 must be a whole number"),
    ("gemma3n", {"hidden_size_per_layer_input": 0}, "hidden_size_per_layer_input=0 must be a whole number from 1"),
    ("gemma4_small", {"vocab_size_per_layer_input": 9}, "vocab_size_per_layer_input=9 must be vocab_size=96 or more"),
]


@pytest.mark.parametrize(("name", "keys", "message"), BROKEN)
def test_broken_config_error_names_key_and_rule(name: str, keys: dict[str, Any], message: str, tmp_path: Path):
    config = json.loads((recent_folder(name) / "config.json").read_text())
    with pytest.raises(ModelConfigError, match=message):
        model_config_of({**config, **keys}, tmp_path / "config.json")


def test_layers_of_gemma4_have_padded_numbers():
    """transformers writes "05" of ten layers or more."""
    config = AutoConfig.for_model("gemma4_text").to_dict() | {"architectures": ["Gemma4ForCausalLM"]}
    assert "05" in config["per_layer_config"]
    sizes = {layer.head_size for layer in model_config_of(config, Path("config.json")).layers}
    assert sizes == {config["head_dim"], config["per_layer_config"]["05"]["head_dim"]}
    config["per_layer_config"]["9" * 5000] = config["per_layer_config"].pop("05")
    with pytest.raises(ModelConfigError, match="of every full_attention layer"):
        model_config_of(config, Path("config.json"))


@pytest.mark.parametrize("is_null", [True, False])
def test_gemma4_without_ropes_has_those_of_its_class(is_null: bool):
    config = json.loads((recent_folder("gemma4") / "config.json").read_text())
    del config["rope_parameters"]
    theirs = AutoConfig.for_model(**config).rope_parameters
    ours = model_config_of({**config, **({"rope_parameters": None} if is_null else {})}, Path("config.json"))
    full, sliding = (theirs[kind] for kind in ("full_attention", "sliding_attention"))
    assert [each.rope_theta for each in ours.ropes] == [full["rope_theta"], sliding["rope_theta"]] == [1e6, 1e4]
    assert [each.partial_factor for each in ours.ropes] == [full["partial_rotary_factor"], 1.0]


def test_bare_llama4_file_has_the_defaults_of_transformers():
    from transformers import Llama4TextConfig

    theirs = Llama4TextConfig()
    ours = model_config_of({"architectures": ["Llama4ForCausalLM"]}, Path("config.json"))
    assert (ours.hidden_size, ours.vocab_size, ours.num_layers) == (theirs.hidden_size, theirs.vocab_size, 48)
    assert [each.chunk for each in ours.layers] == [8192 * (kind[0] == "c") for kind in theirs.layer_types]
    first, second = ours.layers[0], ours.ropes[1]
    assert (first.num_heads, first.num_kv_heads, first.head_size) == (40, 8, 128)
    assert first.experts is not None
    sizes = (first.experts.num_experts, first.experts.num_chosen, first.experts.intermediate_size)
    assert sizes == (theirs.num_local_experts, theirs.num_experts_per_tok, theirs.intermediate_size)
    assert first.experts.shared_size == theirs.intermediate_size
    assert (second.query_growth, second.original_max_position_embeddings) == (theirs.attn_scale, theirs.floor_scale)
    assert (ours.norm.eps, ours.ropes[0].rope_theta) == (theirs.rms_norm_eps, theirs.rope_parameters["rope_theta"])
    assert ours.eos_token_ids == (theirs.eos_token_id,)
    # Older files have a number.
    same = {"architectures": ["Llama4ForCausalLM"], "attn_temperature_tuning": 4}
    assert model_config_of(same, Path("config.json")) == ours
    assert ours.max_position_embeddings == theirs.max_position_embeddings
