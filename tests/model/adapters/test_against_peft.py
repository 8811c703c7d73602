"""Logits and greedy ids of rows with adapters are PEFT's, on checkpoints of several families in float32.

A token is the greedy one if it has the largest logit after the tokens before it, which are PEFT's.
"""

import shutil
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from encoder_models import ALONE, encoder_folder
from expert_checkpoints import expert_folder, open_experts
from family_checkpoints import WITH_IMAGES, family_folder
from our_model import encoder_states, load_model, prompt_logits
from peft import PeftModel
from peft_adapters import Settings, adapter_folder, peft_logits, peft_model, write_adapter
from reference_models import random_prompt, relative_error
from torch import Tensor
from transformers import AutoModel

from spmd_worker.base.config.adapter_limits import AdapterLimits
from spmd_worker.base.errors import AdapterError
from spmd_worker.model.adapters.loaded import LoadedAdapters
from spmd_worker.model.adapters.peft_config import PeftConfig
from spmd_worker.model.adapters.source import adapter_from_tensors, read_adapter
from spmd_worker.model.decoder import DecoderForCausalLM

PROMPTS = [random_prompt(length, 3, vocab_size=96) for length in (1, 7, 30)]
NUM_TOKENS = 5
PATTERNS: Settings = (
    ("rank_pattern", {"0.self_attn.q_proj": 2, "down_proj": 9, "proj": 3}),
    ("alpha_pattern", {r"layers\.1\.mlp\.up_proj": 30, "o_proj": 1, "proj": 99}),
)
CASES: dict[str, tuple[str, Settings]] = {
    "smollm3_q": ("smollm3_layers", (("target_modules", ("q_proj",)),)),
    "smollm3_all": ("smollm3_layers", ()),
    "smollm3_rank_stabilised": ("smollm3_layers", (("use_rslora", True),)),
    "smollm3_patterns": ("smollm3_layers", PATTERNS),
    "gpt2_all": ("gpt2", (("fan_in_fan_out", True),)),
    "phi3_all": ("phi3", ()),
    "gpt_neox_all": ("gpt_neox", ()),
    "falcon_all": ("falcon", ()),
    "opt_projected": ("opt_350m", ()),
    "gemma2_all": ("gemma2", ()),
    "gptj_all": ("gptj", ()),
    "gpt_neo_all": ("gpt_neo", ()),
    "persimmon_all": ("persimmon", ()),
    "gemma3_images": ("gemma3_images", ()),
}
"""Family and arguments of LoraConfig. Fused matrices are in rows, transposed, by key-value head, and with one head."""


@cache
def our_model(family: str) -> tuple[DecoderForCausalLM, LoadedAdapters]:
    model = load_model(family_folder(family), max_images=0)
    return model, LoadedAdapters(model, AdapterLimits(max_loras=8, max_lora_rank=64, max_cpu_loras=8))


def our_logits(family: str, settings: Settings, prompts: list[list[int]]) -> list[Tensor]:
    model, loaded = our_model(family)
    source = read_adapter(adapter_folder(family, settings))
    loaded.commit(loaded.prepare(source))
    try:
        return prompt_logits(model, prompts, loaded=loaded, digests=[source.digest] * len(prompts))
    finally:
        loaded.remove(source.digest)


def worst_error(family: str, settings: Settings) -> float:
    reference = peft_model(family, settings)
    pairs = zip(our_logits(family, settings, PROMPTS), PROMPTS, strict=True)
    return max(relative_error(ours, peft_logits(reference, prompt)) for ours, prompt in pairs)


@pytest.mark.gate("gemma3_images", "smollm3_all", "opt_projected", "gpt2_all", "gpt_neox_all")
@pytest.mark.parametrize("case", CASES)
def test_logits_and_greedy_ids_are_those_of_peft(case: str):
    family, settings = CASES[case]
    reference = peft_model(family, settings)
    prompt = list(PROMPTS[1])
    for _ in range(NUM_TOKENS):
        prompt.append(int(peft_logits(reference, prompt)[-1].argmax()))
    assert worst_error(family, settings) < 1e-4
    (logits,) = our_logits(family, settings, [prompt[:-1]])
    assert logits.argmax(-1).tolist()[-NUM_TOKENS:] == prompt[-NUM_TOKENS:]


@pytest.mark.parametrize("fault", ["alpha", "rank_stabilised", "pattern"])
def test_comparison_detects_wrong_scalings(fault: str, monkeypatch: pytest.MonkeyPatch):
    """PEFT's model has the file's."""
    right = PeftConfig.scaling_of
    wrong = {
        "alpha": lambda config, module: right(config, module) * 1.1,
        "rank_stabilised": lambda config, module: config.alpha / config.rank_of(module),
        "pattern": lambda config, module: config.alpha / config.rank_of(module),
    }
    settings = {"alpha": (), "rank_stabilised": (("use_rslora", True),), "pattern": PATTERNS}
    monkeypatch.setattr(PeftConfig, "scaling_of", wrong[fault])
    assert worst_error("smollm3_layers", settings[fault]) > 1e-3


def test_comparison_detects_rows_without_their_adapter():
    model, _ = our_model("gpt_neox")
    reference = peft_model("gpt_neox")
    assert relative_error(prompt_logits(model, [PROMPTS[2]])[0], peft_logits(reference, PROMPTS[2])) > 0.1
    assert not torch.equal(*our_logits("gpt_neox", (), [PROMPTS[2], PROMPTS[2][::-1]]))


def test_modules_beside_text_are_left_out(caplog: pytest.LogCaptureFixture):
    model, loaded = our_model("gemma3_images")
    source = read_adapter(adapter_folder("gemma3_images"))
    with caplog.at_level("INFO"):
        loaded.prepare(source)
    (words,) = [each.getMessage() for each in caplog.records if "left out" in each.getMessage()]
    tower = {name: each for name, each in source.modules.items() if "vision_tower" in name}
    assert f"{len(tower)} of {len(source.modules)} modules, such as {min(tower)}, are left out, as" in words
    unknown = {"model.language_model.layers.9.mlp.up_proj": next(iter(tower.values()))}
    with pytest.raises(AdapterError, match=r"layers\.9\.mlp\.up_proj: the model has no such module") as raised:
        loaded.prepare(replace(source, modules={**source.modules, **unknown}))
    assert "vision_tower" not in str(raised.value)
    convolution = replace(next(iter(tower.values())), a=torch.ones(4, 3, 2, 2), b=torch.ones(9, 4, 1, 1))
    weights = {f"{name}.lora_{each}.weight": getattr(convolution, each.lower()) for name in tower for each in "AB"}
    with pytest.raises(AdapterError, match=r"has only modules that no row of text runs, such as .*vision_tower"):
        loaded.prepare(adapter_from_tensors({"peft_type": "LORA", "r": 4}, weights))
    with pytest.raises(AdapterError, match=r"model.patch: is a convolution: only linear modules are adapted"):
        loaded.prepare(replace(source, modules={**source.modules, "model.patch": convolution}))
    merged = load_model(family_folder("gemma3_images"), lora_merge=adapter_folder("gemma3_images"), max_images=0)
    (found,) = prompt_logits(merged, PROMPTS[1:2])
    assert relative_error(found, peft_logits(peft_model("gemma3_images"), PROMPTS[1])) < 1e-4
    assert relative_error(found, prompt_logits(model, PROMPTS[1:2])[0]) > 1e-2


def test_modules_of_a_running_tower_are_refused(tmp_path: Path):
    folder, path = tmp_path / "with images", adapter_folder("gemma3_images")
    shutil.copytree(family_folder("gemma3_images"), folder)
    (folder / "preprocessor_config.json").write_text('{"size": {"height": 28, "width": 28}}')
    loaded = LoadedAdapters(load_model(folder), AdapterLimits(max_loras=1, max_lora_rank=64, max_cpu_loras=1))
    source = read_adapter(path)
    words = r"modules of the model's tower, such as .*vision_tower.*, which rows with images run"
    with pytest.raises(AdapterError, match=words):
        loaded.prepare(source)
    with pytest.raises(AdapterError, match=words):
        load_model(folder, lora_merge=path)
    text = {name: each for name, each in source.modules.items() if "language_model" in name}
    assert loaded.prepare(replace(source, modules=text)).packed


@pytest.mark.stress
@pytest.mark.parametrize("family", WITH_IMAGES)
def test_all_linear_of_models_with_images(family: str):
    assert worst_error(family, ()) < 1e-4


WITH_EXPERTS = {
    **dict.fromkeys(("laguna_per_element", "mimo_v2_flash"), r".*self_attn\.(q|v|o|g)_proj"),
    # Indexers too; gates and ups are one module in memory, and two tensors of files.
    "minimax_m3": r".*(vision.*|self_attn.*)(q|k|v|o)_proj|.*language.*(mlp|shared_experts)\.(gate_up|down)_proj",
}


@pytest.mark.stress
@pytest.mark.parametrize("name", WITH_EXPERTS)
def test_layers_beside_experts_take_adapters_as_peft(name: str, tmp_path: Path):
    folder = expert_folder(name)
    write_adapter(open_experts(folder), tmp_path, (("target_modules", WITH_EXPERTS[name]),))
    theirs = PeftModel.from_pretrained(open_experts(folder), tmp_path).eval()
    model, source = load_model(folder), read_adapter(tmp_path)
    loaded = LoadedAdapters(model, AdapterLimits(1, 64, 1))
    loaded.commit(loaded.prepare(source))
    found = prompt_logits(model, PROMPTS, loaded=loaded, digests=[source.digest] * len(PROMPTS))
    for ours, plain, prompt in zip(found, prompt_logits(model, PROMPTS), PROMPTS, strict=True):
        assert relative_error(ours, peft_logits(theirs, prompt)) < 1e-4
        assert relative_error(plain, ours) > 1e-2
    merged = prompt_logits(load_model(folder, lora_merge=tmp_path), PROMPTS)
    assert max(map(relative_error, merged, found)) < 1e-4


ENCODERS = {
    "bert": r"encoder\.layer\.\d\.(attention\.self\.(query|value)|.*dense)",
    "modern": r"layers\.\d\.(attn\.Wqkv|attn\.Wo|mlp\.Wi|mlp\.Wo)",
    "t5": r"encoder\.block\.\d\.layer\.\d\.(SelfAttention\.(q|v|o)|DenseReluDense\.w[io])",
    "deberta": r"encoder\.layer\.\d\.(attention\.self\.(query_proj|key_proj|value_proj)|.*dense)",
    "deberta_masked": r"encoder\.layer\.\d\.attention\.self\.(query_proj|pos_key_proj|pos_query_proj)",
    "debertav1": r"encoder\.layer\.\d\.(attention\.self\.(in_proj|pos_proj|pos_q_proj)|.*dense)",
    "mpnet": r"encoder\.layer\.\d\.(attention\.attn\.(q|v|o)|.*dense)",
}


@pytest.mark.gate("modern")
@pytest.mark.parametrize("name", ENCODERS)
def test_hidden_states_of_encoders_are_those_of_peft(name: str, tmp_path: Path):
    """The backbone alone: PEFT's paths lack the prefix of a model with a head."""
    options = {"dtype": torch.float32, "attn_implementation": "eager"}
    model_class = ALONE.get(name, AutoModel)
    reference = model_class.from_pretrained(encoder_folder(name), **options)
    write_adapter(reference, tmp_path, (("target_modules", ENCODERS[name]),))
    theirs = PeftModel.from_pretrained(model_class.from_pretrained(encoder_folder(name), **options), tmp_path).eval()
    model = load_model(encoder_folder(name))
    loaded, source = LoadedAdapters(model, AdapterLimits(1, 64, 1)), read_adapter(tmp_path)
    loaded.commit(loaded.prepare(source))
    prompts = [random_prompt(length, 3, vocab_size=96) for length in (12, 30)]
    found = encoder_states(model, prompts, loaded, [source.digest, 0])
    with torch.no_grad():
        for ours, prompt, context in zip(found, prompts, (nullcontext(), theirs.disable_adapter()), strict=True):
            with context:
                expected = theirs(input_ids=torch.tensor([prompt])).last_hidden_state[0]
            assert relative_error(ours, expected) < 1e-4
    (plain,) = encoder_states(model, prompts[:1])
    assert relative_error(plain, found[0]) > 1e-2
