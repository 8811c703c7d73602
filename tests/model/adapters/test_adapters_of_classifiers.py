"""Adapters of models that classify: scores that were trained along are the row's own, as PEFT computes them."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from encoder_models import encoder_folder
from our_model import encoder_states, load_model
from peft import LoraConfig, PeftModel, get_peft_model
from reference_models import random_prompt, relative_error
from torch import Tensor
from transformers import AutoModelForSequenceClassification, PreTrainedModel

from spmd_worker.base.config.adapter_limits import AdapterLimits
from spmd_worker.base.errors import AdapterError
from spmd_worker.model.adapters.loaded import LoadedAdapters
from spmd_worker.model.adapters.source import adapter_from_tensors, read_adapter
from spmd_worker.model.decoder import DecoderForCausalLM
from spmd_worker.replica.mirror.mirror import MirroredSequence, ScheduledSequence
from spmd_worker.replica.sequence.pooling_params import PoolingParams
from spmd_worker.replica.sequence.request import Request, RequestId
from spmd_worker.replica.sequence.sampling_params import SamplingParams
from spmd_worker.worker.runner.pooling import RowPooling

PROMPTS = [random_prompt(length, 3, vocab_size=96) for length in (12, 30, 12)]


def reference(name: str) -> PreTrainedModel:
    folder = encoder_folder(name)
    return AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")


def write_classifier(name: str, folder: Path, targets: list[str]) -> None:
    """An adapter as PEFT trains it for a classifier, whose scores are saved with it."""
    model = get_peft_model(reference(name), LoraConfig(task_type="SEQ_CLS", r=4, lora_alpha=8, target_modules=targets))
    generator = torch.Generator().manual_seed(2)
    for _, parameter in sorted(model.named_parameters()):
        if parameter.requires_grad:
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) / parameter.shape[-1] ** 0.5)
    model.save_pretrained(folder)


def scores(model: DecoderForCausalLM, loaded: LoadedAdapters, digests: list[int]) -> list[Tensor]:
    """Scores of all prompts, without their activation."""
    states = encoder_states(model, PROMPTS, loaded, digests)
    params = PoolingParams(task="classify", normalize=False, use_activation=False)
    scheduled, starts = [], [0]
    for index, (prompt, digest) in enumerate(zip(PROMPTS, digests, strict=True)):
        prompt_ids, sampling = tuple(prompt), SamplingParams(temperature=0.0)
        request = Request(RequestId(index), prompt_ids, sampling, index, pooling=params, adapter=digest)
        scheduled.append(ScheduledSequence(MirroredSequence(request, 0, [], [], 0, 1), len(prompt), 1))
        starts.append(starts[-1] + len(prompt))
    pooling = RowPooling(model.pooler, loaded.scores_of)
    _, vectors = pooling.pool(scheduled, starts, torch.cat(states))
    return [torch.frombuffer(bytearray(content), dtype=torch.float32) for _, content in vectors]


@pytest.mark.parametrize(
    ("name", "targets"),
    [
        ("roberta_labels", ["query", "value"]),
        ("modern_labels", ["Wqkv", "Wo"]),
        ("jina_labels", ["k_proj", "fc1"]),
        ("deberta_labels", ["query_proj", "value_proj"]),
    ],
)
def test_scores_are_those_of_peft(name: str, targets: list[str], tmp_path: Path):
    write_classifier(name, tmp_path, targets)
    theirs = PeftModel.from_pretrained(reference(name), tmp_path).eval()
    model = load_model(encoder_folder(name))
    loaded, source = LoadedAdapters(model, AdapterLimits(1, 64, 1)), read_adapter(tmp_path)
    assert source.config.saved == ("classifier", "score")
    loaded.commit(loaded.prepare(source))
    found, plain = (scores(model, loaded, digests) for digests in ([source.digest, source.digest, 0], [0, 0, 0]))
    with torch.no_grad():
        for ours, base, prompt in zip(found[:2], plain[:2], PROMPTS[:2], strict=True):
            expected = theirs(input_ids=torch.tensor([prompt])).logits[0]
            assert relative_error(ours, expected) < 1e-4
            assert relative_error(base, expected) > 1e-2
    assert torch.equal(found[2], plain[2])
    loaded.remove(source.digest)
    assert not loaded.scores_of(source.digest)


def test_scores_of_another_shape_are_refused():
    model = load_model(encoder_folder("modern_labels"))
    tensors = {"layers.0.attn.Wqkv.lora_A.weight": torch.ones(1, 64), "classifier.weight": torch.ones(2, 64)}
    tensors["layers.0.attn.Wqkv.lora_B.weight"] = torch.ones(192, 1)
    source = adapter_from_tensors({"peft_type": "LORA", "r": 1, "lora_alpha": 1}, tensors)
    with pytest.raises(AdapterError, match=r"classifier.weight \(modules_to_save\): has the shape \[2, 64\], but"):
        LoadedAdapters(model, AdapterLimits(1, 64, 1)).prepare(source)


@pytest.mark.parametrize("names", [("qkv_proj", "k_proj"), ("k_proj", "qkv_proj")])
def test_joined_module_and_its_part_are_refused(names: tuple[str, str]):
    """One of them had the other's place, without a word."""
    tensors: dict[str, torch.Tensor] = {}
    for name in names:
        at, outputs = f"gte.layers.0.self_attn.{name}", 192 if name == "qkv_proj" else 64
        tensors |= {f"{at}.lora_A.weight": torch.ones(1, 64), f"{at}.lora_B.weight": torch.ones(outputs, 1)}
    source = adapter_from_tensors({"peft_type": "LORA", "r": 1, "lora_alpha": 1}, tensors)
    first, second = (f"gte.layers.0.self_attn.{name}" for name in names)
    source = replace(source, modules={name: source.modules[name] for name in (first, second)})
    with pytest.raises(AdapterError) as caught:
        LoadedAdapters(load_model(encoder_folder("gte_labels")), AdapterLimits(1, 64, 1)).prepare(source)
    part = "gte.layers.0.self_attn.k_proj"
    assert f"{second}: has matrices of {part}, as {first} has: train with one of the two" in str(caught.value)


def test_score_given_twice_is_refused():
    """PEFT's name in memory, and that of its file."""
    one = {"layers.0.attn.Wo.lora_A.weight": torch.ones(1, 64), "layers.0.attn.Wo.lora_B.weight": torch.ones(64, 1)}
    saved = dict.fromkeys(("classifier.weight", "classifier.modules_to_save.default.weight"), torch.ones(3, 64))
    with pytest.raises(AdapterError, match=r"classifier.weight: a second classifier.weight: save"):
        adapter_from_tensors({"peft_type": "LORA", "r": 1, "lora_alpha": 1}, one | saved)
