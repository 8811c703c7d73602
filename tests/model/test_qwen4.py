"""Qwen4 against transformers: logits, steps, shards, stages, tensors, each entry of a row, and mistakes.

Float32, 1e-4 of the largest logit. A row is read from two files: with every key, and without those of the class.
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
from allocated import peak_bytes
from family_checks import (
    adapter_logits,
    check_adapters,
    check_entries,
    check_int8,
    check_rejected,
    check_schedules,
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
from model_configs import with_indexers, with_layers, with_norms
from our_model import is_noticed, load_model
from plain_models import in_tiers, new_model
from qwen4_checkpoints import QWEN4_CASES, qwen4_folder, qwen4_reference, thinned_qwen4_folder
from reference_models import Oracle, greedy_without_cache, random_prompt
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.models.qwen4_exp import modeling_qwen4_exp

from spmd_worker.base.errors import CheckpointError
from spmd_worker.model.layers import gated_streams as streams_module
from spmd_worker.model.layers import ngrams as ngrams_module
from spmd_worker.model.layers.choice_bytes import choice_bytes
from spmd_worker.model.layers.chosen_keys import ChosenKeys
from spmd_worker.model.layers.ngrams import NgramEmbedding
from spmd_worker.model.layers.run_indexer import RunIndexer
from spmd_worker.model_config.families.family import Family
from spmd_worker.model_config.families.qwen4_rows import QWEN4_ROWS
from spmd_worker.model_config.families.table import FAMILIES
from spmd_worker.model_config.layer_config import LayerConfig
from spmd_worker.model_config.model_config import ModelConfig, model_config_of, read_model_files
from spmd_worker.model_config.stream_config import NgramConfig, multipliers, primes_from
from spmd_worker.ranks.topology import RankLayout
from spmd_worker.worker.memory.estimate import activation_bytes, rank_layers, state_layer, weights_bytes

TOLERANCE = 1e-4
ROWS = [random_prompt(length, seed=7, vocab_size=96) for length in (70, 5, 33)]
# Ends of texts: n-grams do not go beyond them.
ROWS[0][10:12] = ROWS[1][:1] = ROWS[2][20:23:2] = [2, 2]
SIZES = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
INDEXER = {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 256, "indexer_budget": 8}
INDEXER |= {"indexer_compress_ratio": 2}

quick = partial(in_tiers, among=QWEN4_CASES)

oracle = Oracle(qwen4_reference, ROWS)
expected, worst_error, is_right = oracle.expected, oracle.worst_error, oracle.is_right
our_logits = partial(folder_logits, ROWS)


@pytest.mark.guarantee("Models compute what transformers computes")
@quick("qwen4", "qwen4_images")
def test_logits_and_ids_equal_transformers(name: str):
    logits, _ = run_rows([load_model(qwen4_folder(name))], ROWS)
    assert worst_error(name, logits) < TOLERANCE
    for found, right in zip(logits, expected(name), strict=True):
        assert torch.equal(found.argmax(-1), right.argmax(-1))
    full, thin = (read_model_files(each).model_config for each in (qwen4_folder(name), thinned_qwen4_folder(name)))
    assert thin == full


@pytest.mark.guarantee("A row's answer depends on the row alone")
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.stress)])
@quick("qwen4")
def test_steps_do_not_change_bits_or_states(name: str, dtype: str):
    """Prompts cut anywhere, also within n-grams and runs; slots and blocks hold NaN before."""
    check_steps(load_model(qwen4_folder(name), dtype=dtype), ROWS)


@pytest.mark.control("A row's answer depends on the row alone")
def test_comparison_detects_ids_that_are_forgotten(monkeypatch: pytest.MonkeyPatch):
    """Negative control: n-grams that know the ids of their own step alone."""
    earlier = ngrams_module._earlier_ids

    def of_step(ids: Tensor, kept: Tensor, segments: Any, count: int) -> Tensor:
        return earlier(ids, kept, replace(segments, firsts=torch.zeros_like(segments.firsts)), count)

    model = new_model(qwen4_folder("qwen4"))
    whole = run_rows([model], ROWS)[0]
    monkeypatch.setattr(ngrams_module, "_earlier_ids", of_step)
    assert all(map(torch.equal, run_rows([model], ROWS)[0], whole))
    assert worst_error("qwen4", run_rows([model], ROWS, 33)[0]) > 10 * TOLERANCE


@quick("qwen4")
def test_shards_equal_transformers_and_stages_one_rank(name: str):
    """Two key-value heads: four ranks have each of them twice."""
    assert worst_error(name, logits_of_ranks(qwen4_folder(name), 4, ROWS, 40)) < TOLERANCE
    check_stages(qwen4_folder(name), 3, ROWS, 40)


@quick("qwen4")
def test_all_checkpoint_tensors_are_viewed_and_loaded(name: str):
    """By the names of files and of transformers' memory, where a table is one tensor; on two ranks all of each."""
    check_tensors(qwen4_folder(name), dict(qwen4_reference(name).named_parameters()))


@pytest.mark.guarantee("The plan's bytes are those of the run")
def test_planned_bytes_equal_parameters():
    config = read_model_files(qwen4_folder("qwen4")).model_config
    for layout, rank, _, model in planned_models(config):
        layer, share = rank_layers(config, layout, rank)[0]
        planned = state_layer(layer, config.hidden_size, share, most_drafts=2)
        assert planned is not None
        ngrams = model.model.layers[0].ple
        assert planned.second_tail == (9, len(ngrams.conv1d.weight) + 3)
        assert planned.second_saved == (2, len(ngrams.conv1d.weight) + 3)
    assert config.num_parameters == sum(each.numel() for each in qwen4_reference("qwen4").parameters())


@pytest.mark.guarantee("The plan's bytes are those of the run")
def test_choice_of_runs_stays_below_the_plan():
    """The last tokens of a long row, beside a row that sees all of its keys."""
    folder, num_keys = qwen4_folder("qwen4"), 16_384
    config = replace(read_model_files(folder).model_config, max_position_embeddings=num_keys)
    run = HybridRun([load_model(folder, config)], [[3] * num_keys, [5] * 16])
    run.sequences[0].num_computed_tokens = num_keys - 64
    most = peak_bytes(lambda: run.step(None))
    planned = activation_bytes(config, RankLayout(1), 0, "float32", 80, 80)
    assert 0.7 < most / planned < 1
    # Negative control: most of it is the choice's.
    assert planned - choice_bytes(config, 4) < most / 2


def test_ranks_with_fewer_heads_choose_for_more_tokens():
    """Keys and values of two heads on one rank, or of one on each: twice as many tokens have scores at a time."""
    config = with_indexers(read_model_files(qwen4_folder("qwen4")).model_config, num_chosen=12_288)
    config = replace(config, max_position_embeddings=1 << 20)
    of_one_head = choice_bytes(with_layers(config, num_kv_heads=1), 4)
    assert of_one_head > choice_bytes(config, 4)
    assert of_one_head == choice_bytes(config, 4, 2)
    assert activation_bytes(config, RankLayout(tensor_parallel_size=2), 0, "float32", 1, 1) > of_one_head


def test_drafts_are_planned_by_the_widest_convolution():
    config = read_model_files(qwen4_folder("qwen4")).model_config
    streams = config.layers[0].streams
    assert streams is not None
    config = with_layers(config, streams=replace(streams, num_streams=16))
    without, planned = (
        activation_bytes(config, RankLayout(1), 0, "float32", 80, 8, most_drafts=most) for most in (0, 2)
    )
    assert planned - without == 3 * (16 * config.hidden_size + 3) * (80 + 2 * 8) * 4


@pytest.mark.stress
@pytest.mark.parametrize("name", ["qwen4", "qwen4_sigmoid"])
def test_greedy_rows_are_transformers_in_any_schedule(name: str):
    check_schedules(qwen4_folder(name), partial(greedy_without_cache, qwen4_reference(name)))


def test_int8_projections_stay_near_transformers():
    model = load_model(qwen4_folder("qwen4"), quantization="int8")
    first = model.model.layers[0]
    assert first.linear_attn.in_proj.weight.dtype == torch.int8
    assert first.mlp_hyper_connection.down.weight.dtype == first.ple.key_proj.weight.dtype == torch.float32
    planned = weights_bytes(model.model_config, RankLayout(1), 0, "float32", "cpu", "int8")
    assert planned == sum(each.nbytes for each in model.parameters())
    # Other runs are chosen, and other experts.
    check_int8(oracle, "qwen4", model, 1.0)


@pytest.mark.stress
def test_adapters_are_those_of_peft(tmp_path: Path):
    reference, targets = partial(deepcopy, qwen4_reference("qwen4")), ("in_proj_qkv", "out_proj", "q_proj", "o_proj")
    check_adapters(oracle, "qwen4", *adapter_logits(qwen4_folder("qwen4"), reference, targets, tmp_path, ROWS))


def test_hashes_are_those_of_transformers():
    """Of a vocabulary and tables as large as real ones."""
    theirs = modeling_qwen4_exp
    for seed, number, size in ((1234, 0, 3), (-5, 7, 4)):
        assert multipliers(248320, size, number, seed) == tuple(
            theirs._build_layer_multipliers(248320, size, number, seed).tolist()
        )
    for start in (1, 20_000_000):
        right = tuple([theirs._find_nth_prime_after(start - 1, nth + 1) for nth in range(6)])
        assert primes_from(start, 0, 6) == right
        assert primes_from(start, 2, 4) == right[2:]


# ---- each entry of a row, and mistakes that no entry makes ---------------------------------------------------------

UNSEEN = (
    *(
        "models",
        "defaults",
        "layers",
        "layer",
        "rope.rounding",
        "names.aliases",
        "names.ignored_prefixes",
        "names.norms",
    ),
    *("names.norm", "rope.sections", "rope.interleaves_sections", "vision", "names.ignored"),
)
"""Entries without an effect on these logits, or without which nothing is read."""


def bare(architecture: str, **keys: Any) -> dict[str, Any]:
    """A file that leaves out nearly all."""
    sizes = {**SIZES, **INDEXER, "vocab_size": 160, **keys}
    row = FAMILIES[architecture]
    return {"architectures": [architecture], **({"text_config": sizes} if row.text is not None else sizes)}


def mutants(row: Family) -> list[tuple[str, Family]]:
    """The row with one entry as Llama's row has it, and without one of its defaults."""
    return entries(row, Family(), *UNSEEN, "names.parts", "file_keys") + without_each(row, "defaults")


def readings(architecture: str) -> list[Any]:
    """Of files that leave out some keys; None for one that is rejected."""
    names = {"architectures": [architecture]}
    files = [{**names, **INDEXER} if FAMILIES[architecture].text is None else {**names, "text_config": INDEXER}]
    return readings_of([*files, bare(architecture), bare(architecture, attention_bias=True, mlp_bias=True)])


@pytest.mark.control("Models compute what transformers computes")
@pytest.mark.parametrize(
    "architecture",
    [pytest.param(each, marks=pytest.mark.stress if "Conditional" in each else []) for each in QWEN4_ROWS],
)
def test_comparison_detects_each_row_entry_set_to_llama(architecture: str, monkeypatch: pytest.MonkeyPatch):
    cases = [name for name, (_, model_class, _) in QWEN4_CASES.items() if model_class == architecture]
    folders = {name: (qwen4_folder(name), thinned_qwen4_folder(name)) for name in cases}
    assert None not in readings(architecture)
    given = (mutants(FAMILIES[architecture]), partial(readings, architecture), folders, our_logits, is_right)
    check_entries(monkeypatch, architecture, *given)


def _with_ngrams(config: ModelConfig, change: Callable[[NgramConfig], NgramConfig]) -> ModelConfig:
    def changed(layer: LayerConfig) -> LayerConfig:
        return layer if layer.ngrams is None else replace(layer, ngrams=change(layer.ngrams))

    return replace(config, layers=tuple(map(changed, config.layers)))


IN_CONFIG: Mapping[str, Callable[[ModelConfig], ModelConfig]] = {
    "one run more": lambda config: with_indexers(config, num_chosen=16),
    "runs of half the tokens": lambda config: with_indexers(config, run_length=2),
    "all keys seen": lambda config: with_indexers(config, num_chosen=512),
    "norms without their offset": lambda config: with_norms(config, offset=0.0),
    "no gates of attention": lambda config: with_layers(config, output_gate=""),
    "ends of texts ignored": lambda config: _with_ngrams(config, lambda each: replace(each, end_token=95)),
    "multipliers of another layer": lambda config: _with_ngrams(
        config, lambda each: replace(each, multipliers=multipliers(96, 3, 5, 1234))
    ),
    "tables of heads exchanged": lambda config: _with_ngrams(
        config, lambda each: replace(each, head_rows=each.head_rows[::-1])
    ),
}


@pytest.mark.control("Models compute what transformers computes")
@pytest.mark.parametrize("mistake", IN_CONFIG)
def test_comparison_detects_mistakes_of_configs(mistake: str):
    folder = qwen4_folder("qwen4")

    def mistaken(of: Path) -> list[Tensor]:
        config = IN_CONFIG[mistake](read_model_files(of).model_config)
        return run_rows([new_model(of, config=config)], ROWS)[0]

    assert is_noticed([folder], mistaken, lambda logits: worst_error("qwen4", logits) < 10 * TOLERANCE)


def _latest_first(embedding: Any, ids: Tensor, earlier: Tensor) -> Tensor:
    return RIGHT["ngrams"](embedding, ids, earlier.flip(1))


def _unrotated(indexer: Any, tokens: Any, *given: Any) -> Any:
    x, _, runs = tokens
    return RIGHT["write"](indexer, (x, None, runs), *given)


def _without_tail(chosen: Any, rows: Any) -> tuple[int, ...]:
    return (12,) * len(RIGHT["counts"](chosen, rows))


RIGHT: dict[str, Any] = {"ngrams": NgramEmbedding.forward, "write": RunIndexer.write, "counts": ChosenKeys._counts}
IN_LAYERS: Mapping[str, tuple[Any, str, Any]] = {
    "n-grams backwards": (NgramEmbedding, "forward", _latest_first),
    "queries of the indexer not rotated": (RunIndexer, "write", _unrotated),
    "tokens behind the last run unseen": (ChosenKeys, "_counts", _without_tail),
    "gates of streams not doubled": (streams_module, "sigmoid", lambda x: torch.sigmoid(x) / 2),
    "values of n-grams not gated": (ngrams_module, "sigmoid", torch.ones_like),
}


@pytest.mark.control("Models compute what transformers computes")
@pytest.mark.parametrize("mistake", IN_LAYERS)
def test_comparison_detects_mistakes_of_layers(mistake: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(*IN_LAYERS[mistake])
    assert worst_error("qwen4", our_logits(qwen4_folder("qwen4"))) > 10 * TOLERANCE


# ---- config.json ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", QWEN4_ROWS)
@pytest.mark.parametrize(
    "keys", [{}, {"num_hidden_layers": 6, "head_dim": 32, "ple_layer_ids": [1, 6]}], ids=["", "sizes"]
)
def test_omitted_keys_have_the_defaults_of_transformers(architecture: str, keys: dict[str, Any]):
    config = bare(architecture, eos_token_id=[3, 4], **keys)
    config_class = next(each for each, model_class, _ in QWEN4_CASES.values() if model_class == architecture)
    given = {key: value for key, value in config.items() if key != "architectures"}
    theirs = getattr(transformers, config_class)(**given).get_text_config()
    ours = model_config_of(config, Path("config.json"))
    kinds = {"delta": "linear_attention", "attention": "indexed_attention"}
    assert [kinds[layer.mixer] for layer in ours.layers] == theirs.layer_types
    full = next(layer for layer in ours.layers if layer.mixer == "attention")
    streams, experts = full.streams, full.experts
    assert streams is not None
    assert experts is not None
    assert (streams.num_streams, streams.rank) == (theirs.hc_count, theirs.hc_lowrank)
    assert (experts.num_experts, experts.num_chosen) == (theirs.num_experts, theirs.num_experts_per_tok)
    assert (experts.intermediate_size, experts.renormalises) == (theirs.moe_intermediate_size, theirs.norm_topk_prob)
    assert experts.shared_size == theirs.shared_expert_intermediate_size
    assert (full.num_kv_heads, full.head_size) == (theirs.num_key_value_heads, theirs.head_dim)
    assert ours.max_position_embeddings == theirs.max_position_embeddings
    assert ours.has_tied_embeddings == theirs.tie_word_embeddings
    assert [index + 1 for index, layer in enumerate(ours.layers) if layer.ngrams] == theirs.ple_layer_ids
    for number, ngrams in enumerate(layer.ngrams for layer in ours.layers if layer.ngrams is not None):
        with torch.device("meta"):
            embedding = modeling_qwen4_exp.Qwen4ExpTextNGramEmbedding(theirs, theirs.ple_embed_dim, 0, number)
        assert list(ngrams.head_rows) == embedding.head_vocab_sizes
        assert (ngrams.num_rows, ngrams.row_size) == tuple(embedding.ngram_embedding.weight.shape)
        assert (ngrams.end_token, ngrams.num_parts) == (3, theirs.split_ngram_parts)
        assert (ngrams.num_taps, ngrams.size) == (theirs.ple_conv_kernel_size, theirs.ngram_size)


BROKEN: Mapping[str, tuple[dict[str, Any], str]] = {
    "kind": ({"layer_types": ["conv"] * 4}, "must list 4 of linear_attention, full_attention, indexed_attention"),
    "streams": ({"hc_count": 1}, "hc_count=1 must be a whole number from 2 to 64"),
    "gate": ({"output_gate_type": "relu"}, "output_gate_type='relu' is not supported, only"),
    "no indexer": ({"indexer_budget": None}, "indexer_budget=None must be a whole number"),
    "heads": ({"indexer_kv_heads": 2}, "indexer_kv_heads=2 is not supported, only 1"),
    "budget": ({"indexer_budget": 9}, "indexer_budget=9 must be a multiple of indexer_compress_ratio, 2"),
    "rotated": ({"indexer_head_dim": 8}, "indexer_head_dim=8 must be at least the rotated part of a head, 64"),
    "list": ({"ple_layer_ids": 3}, "ple_layer_ids=3 must list layers"),
    "layer": ({"ple_layer_ids": [5]}, "ple_layer_ids=5 must be a whole number from 1 to 4"),
    "attention": ({"ple_layer_ids": [4]}, "must list layers of linear_attention alone"),
    "no end": ({"ple_layer_ids": [1]}, "eos_token_id=None must be a whole number"),
    "size": ({"ple_layer_ids": [1], "eos_token_id": 2, "ngram_size": 1}, "ngram_size=1 must be a whole number from 2"),
    "rows": ({"ple_layer_ids": [1], "eos_token_id": 2, "ple_embed_dim": 30}, "must be a multiple of the 16 heads"),
    "count": (
        {"ple_layer_ids": [1, 2], "eos_token_id": 2, "heads_per_ngram": 999},
        "heads_per_ngram=999 must be fewer",
    ),
    "base": (
        {"ple_layer_ids": [1], "eos_token_id": 2, "ngram_vocab_size_base": 10**12},
        "ngram_vocab_size_base=1000000000000 must be a whole number from 1 to 134217728",
    ),
    "ids": ({"ple_layer_ids": [1], "eos_token_id": 2, "vocab_size": 2**24 + 1}, "vocab_size=16777217 must be at most"),
    "taps": ({"ple_layer_ids": [1], "eos_token_id": 2, "ple_conv_kernel_size": 1}, "ple_conv_kernel_size=1 must be"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_config_error_names_key_and_rule(case: str):
    keys, message = BROKEN[case]
    check_rejected(bare("Qwen4ExpForCausalLM", **keys), message)


def test_parts_of_a_table_are_reported(tmp_path: Path):
    for word, change in (
        ("missing", lambda tensors, name: tensors.pop(name)),
        ("wrong", lambda tensors, name: tensors.update({name: tensors[name][:-1].contiguous()})),
    ):
        shutil.copytree(qwen4_folder("qwen4"), tmp_path / word)
        tensors = load_file(tmp_path / word / "model.safetensors")
        name = "model.layers.3.ple.ple_embedding.ngram_embedding.shard_4.weight"
        change(tensors, name)
        save_file(tensors, tmp_path / word / "model.safetensors", {"format": "pt"})
        with pytest.raises(CheckpointError, match="shard_4"):
            new_model(tmp_path / word)
    model = new_model(qwen4_folder("qwen4"))
    with pytest.raises(CheckpointError, match="has the shape"):
        model.load_weights([("model.layers.0.ple.ple_embedding.ngram_embedding.weight", torch.zeros(3, 8))])


def test_layers_for_speculation_and_images_are_skipped(tmp_path: Path):
    shutil.copytree(qwen4_folder("qwen4"), tmp_path / "other")
    tensors = load_file(tmp_path / "other" / "model.safetensors")
    extra = {"mtp.layers.0.mlp.up_proj.weight": torch.zeros(2, 2), "model.visual.merger.weight": torch.zeros(2)}
    save_file({**tensors, **extra}, tmp_path / "other" / "model.safetensors", {"format": "pt"})
    assert worst_error("qwen4", our_logits(tmp_path / "other")) < TOLERANCE
    assert "mtp" not in json.dumps(sorted(new_model(tmp_path / "other").weights.shapes))
