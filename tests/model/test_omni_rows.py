"""Texts of Omni models against transformers: logits from files of the complete model and of the thinker, shards, and
each entry of a row.
"""

from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from family_checks import joined_logits, without_each
from family_mutants import entries
from omni_models import KINDS, omni_folder, omni_reference, thinker_folder
from our_model import is_noticed, prompt_logits
from plain_models import new_model
from reference_models import random_prompt, relative_error
from torch import Tensor

from spmd_worker.base.errors import SpmdError
from spmd_worker.model_config.families.family import Family
from spmd_worker.model_config.families.table import FAMILIES
from spmd_worker.model_config.model_config import ModelConfig, model_config_of, read_model_files

TOLERANCE = 1e-4
# Around a block of 16, and beyond the window.
PROMPTS = [random_prompt(length, seed=7, vocab_size=256) for length in (1, 17, 40)]
NAMES = {"qwen2_5_omni": "Qwen2_5Omni", "qwen3_omni": "Qwen3OmniMoe"}


@cache
def expected(kind: str) -> list[Tensor]:
    with torch.no_grad():
        return [omni_reference(kind)(torch.tensor([prompt])).logits[0] for prompt in PROMPTS]


def worst_error(kind: str, logits: list[Tensor]) -> float:
    return max(map(relative_error, logits, expected(kind)))


def logits_of(folder: Path) -> list[Tensor]:
    return prompt_logits(new_model(folder, config=read_model_files(folder).model_config), PROMPTS)


@pytest.mark.guarantee("Models compute what transformers computes")
@pytest.mark.parametrize("folder", [omni_folder, thinker_folder])
@pytest.mark.parametrize("kind", KINDS)
def test_logits_equal_transformers(kind: str, folder: Any):
    assert worst_error(kind, logits_of(folder(kind))) < TOLERANCE


@pytest.mark.parametrize("kind", KINDS)
def test_shard_logits_equal_transformers(kind: str):
    new = partial(new_model, omni_folder(kind))
    assert worst_error(kind, joined_logits(2, new, lambda model: prompt_logits(model, PROMPTS))) < TOLERANCE


def minimal(kind: str, **text: Any) -> ModelConfig:
    """What a file says that leaves out all but these keys of the text; heads of the class of Qwen3-Omni are odd."""
    text = text if kind == "qwen2_5_omni" else {"num_attention_heads": 32, **text}
    config = {"architectures": [f"{NAMES[kind]}ForConditionalGeneration"], "thinker_config": {"text_config": text}}
    return model_config_of(config, Path("config.json"))


@pytest.mark.parametrize("kind", KINDS)
def test_defaults_of_omitted_keys_equal_transformers(kind: str):
    given = {} if kind == "qwen2_5_omni" else {"num_attention_heads": 32}
    theirs = getattr(transformers, f"{NAMES[kind]}ThinkerConfig")(text_config=given).text_config
    ours = minimal(kind)
    (layer,) = {*ours.layers}
    sizes = ("vocab_size", "hidden_size", "max_position_embeddings")
    assert [getattr(ours, key) for key in sizes] == [getattr(theirs, key) for key in sizes]
    found = (ours.num_layers, ours.num_heads, ours.num_kv_heads, ours.norm.eps, ours.ropes[0].rope_theta)
    keys = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "rms_norm_eps")
    assert found == (*[getattr(theirs, key) for key in keys], theirs.rope_parameters["rope_theta"])
    assert (layer.intermediate_size, ours.has_tied_embeddings) == (theirs.intermediate_size, False)
    if layer.experts is not None:
        names = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob")
        experts = layer.experts
        given = (experts.num_experts, experts.num_chosen, experts.intermediate_size, experts.renormalises)
        assert given == tuple([getattr(theirs, name) for name in names])
    windows = {each.window for each in minimal(kind, use_sliding_window=True, max_window_layers=0).layers}
    assert windows == ({0} if kind == "qwen3_omni" else {theirs.to_dict().get("sliding_window") or 32768})


def readings(kind: str) -> list[Any]:
    """What minimal files say, or why they are rejected."""
    found: list[Any] = []
    biased, sparse = {"attention_bias": True, "mlp_bias": True}, {"decoder_sparse_step": 2, "num_hidden_layers": 3}
    for text in ({}, {"use_sliding_window": True, "max_window_layers": 0}, biased, sparse):
        try:
            found.append(minimal(kind, **text))
        except SpmdError as error:
            found.append(str(error))
    return found


@pytest.mark.stress
@pytest.mark.control("Models compute what transformers computes")
@pytest.mark.parametrize("kind", KINDS)
def test_comparison_detects_each_row_entry_set_to_llama(kind: str, monkeypatch: pytest.MonkeyPatch):
    architecture = f"{NAMES[kind]}ForConditionalGeneration"
    row, right = FAMILIES[architecture], readings(kind)
    # Other towers, aliases and three positions have tests of their own (test_omni_towers.py).
    unseen = ("models", "defaults", "audio", "names.aliases", "rope.sections", "rope.interleaves_sections")
    silent = []
    for what, mutant in entries(row, Family(), *unseen) + without_each(row, "defaults"):
        monkeypatch.setitem(FAMILIES, architecture, mutant)
        is_seen = is_noticed([omni_folder(kind)], logits_of, lambda logits: worst_error(kind, logits) < TOLERANCE)
        if readings(kind) == right and not is_seen:
            silent.append(what)
    assert not silent, silent
