"""Texts of Omni models against transformers: logits from files of the complete model and of the thinker, shards, and
each entry of a row.
"""

from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from family_checks import joined_logits, without_each
from family_mutants import entries
from hearing_models import NUM_MEL_BINS, recording
from media_models import noise
from omni_models import KINDS, Given, omni_folder, omni_reference, text_of, their_inputs, thinker_folder
from our_model import is_noticed, load_model, prompt_logits
from peft_adapters import write_adapter
from plain_models import new_model
from quantised_files import quantise
from reference_models import random_prompt, relative_error
from torch import Tensor

from spmd_worker import LLM, SamplingParams
from spmd_worker.base.errors import AdapterError, SpmdError
from spmd_worker.media.prepared import AudioFeatures
from spmd_worker.model.decoder import DecoderForCausalLM
from spmd_worker.model_config.families.family import Family
from spmd_worker.model_config.families.table import FAMILIES
from spmd_worker.model_config.model_config import ModelConfig, model_config_of, read_model_files
from spmd_worker.replica.sequence.lora_request import LoRARequest

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


@pytest.mark.gate("qwen3_omni")
@pytest.mark.parametrize("kind", KINDS)
def test_shard_logits_equal_transformers(kind: str):
    new = partial(new_model, omni_folder(kind))
    assert worst_error(kind, joined_logits(2, new, lambda model: prompt_logits(model, PROMPTS))) < TOLERANCE


def minimal(kind: str, **text: Any) -> ModelConfig:
    """The reading of a file with these keys of the text alone; heads of the class of Qwen3-Omni are odd."""
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
    """Configs of minimal files, or the reasons why they are rejected."""
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


@pytest.mark.stress
@pytest.mark.parametrize("name", ["fp8_block", "gptq_order", "w4a16", "nf4_nested", "bnb_int8"])
@pytest.mark.parametrize("kind", KINDS)
def test_dequantised_models_are_bit_identical_to_plain_files(kind: str, name: str, tmp_path: Path):
    """Layers of the text and of the recordings' tower, and what is left out, are quantised."""
    quantised, plain = quantise(omni_folder(kind), tmp_path, name)
    ours, theirs, before = (load_model(folder) for folder in (quantised, plain, omni_folder(kind)))
    found = [[*prompt_logits(model, PROMPTS), heard_rows(model)] for model in (ours, theirs, before)]
    assert all(map(torch.equal, found[0], found[1]))
    # Negative control: they are others than those that were quantised.
    assert not any(map(torch.equal, found[0], found[2]))


@torch.inference_mode()
def heard_rows(model: DecoderForCausalLM) -> Tensor:
    assert model.tower is not None
    features = np.random.default_rng(0).normal(size=(NUM_MEL_BINS, 130)).astype(np.float32)
    rows: Tensor = model.tower(AudioFeatures(features)).rows
    return rows


@pytest.mark.stress
@pytest.mark.parametrize("kind", KINDS)
def test_adapters_are_those_of_peft(kind: str, tmp_path: Path):
    """Adapters of a tower that runs are rejected, and left out of the text alone."""
    base = type(omni_reference(kind)).from_pretrained(thinker_folder(kind), dtype=torch.float32).eval()
    settings = (("target_modules", ("q_proj", "k_proj", "v_proj", "o_proj")), ("exclude_modules", r".*audio_tower.*"))
    write_adapter(base, tmp_path / "text", settings)
    media: list[Given] = [("audio", recording(20_000, 1)), ("image", noise(97, 61, 3))]
    given = their_inputs(kind, media)
    with torch.no_grad():
        ids = base.generate(**given, max_new_tokens=8, do_sample=False)[0, given["input_ids"].shape[1] :].tolist()
    prompt = {"prompt": text_of(kind, media), "multi_modal_data": dict(media)}
    greedy = SamplingParams(temperature=0, max_tokens=8)
    options: dict[str, Any] = {"dtype": "float32", "num_blocks": 64, "enable_lora": True, "max_lora_rank": 4}
    with LLM(str(omni_folder(kind)), **options) as llm:
        found = [
            list(llm.generate(prompt, greedy, lora_request=request, use_tqdm=False)[0].outputs[0].token_ids)
            for request in (LoRARequest("text", 1, str(tmp_path / "text")), None)
        ]
        assert found[0] == ids != found[1]
    base = type(omni_reference(kind)).from_pretrained(thinker_folder(kind), dtype=torch.float32)
    write_adapter(base, tmp_path / "all", (("target_modules", ("q_proj", "fc1", "qkv")),))
    with LLM(str(omni_folder(kind)), **options) as llm, pytest.raises(AdapterError, match="of the model's tower"):
        llm.llm_engine.add_lora(LoRARequest("all", 1, str(tmp_path / "all")))
    with LLM(str(omni_folder(kind)), **options, max_images=0, max_audios=0) as llm:
        llm.llm_engine.add_lora(LoRARequest("all", 1, str(tmp_path / "all")))
