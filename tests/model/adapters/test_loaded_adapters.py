"""Adapters that a model has loaded: two phases, slots that are used again, and what does not fit a model."""

from typing import Any
from unittest import mock

import pytest
import torch
from expert_checkpoints import expert_folder
from family_checkpoints import family_folder
from our_model import load_model, prompt_logits
from torch import Tensor

from spmd_worker.base.config.adapter_limits import AdapterLimits
from spmd_worker.base.errors import AdapterError, ConfigError
from spmd_worker.model.adapters.loaded import LoadedAdapters
from spmd_worker.model.adapters.source import AdapterSource, adapter_from_tensors
from spmd_worker.model.decoder import DecoderForCausalLM

LIMITS = AdapterLimits(max_loras=2, max_lora_rank=8, max_cpu_loras=2)
PROMPT = [[5, 9, 40, 3]]
SIZES = {"q_proj": (64, 64), "v_proj": (32, 64), "up_proj": (96, 64), "down_proj": (64, 96)}


def source_of(modules: dict[str, tuple[int, int]], *, seed: int = 0, rank: int = 4, **config: Any) -> AdapterSource:
    """An adapter of these modules, by path, with their outputs and inputs."""
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for name, (outputs, inputs) in modules.items():
        prefix = f"base_model.model.{name}"
        tensors[f"{prefix}.lora_A.weight"] = torch.randn(rank, inputs, generator=generator) / 8
        tensors[f"{prefix}.lora_B.weight"] = torch.randn(outputs, rank, generator=generator)
    saved = {name: torch.ones(shape) for name, shape in config.pop("saved", {}).items()}
    return adapter_from_tensors({"peft_type": "LORA", "r": rank, "lora_alpha": 8, **config}, tensors | saved)


def llama_source(seed: int = 0, *names: str, **options: Any) -> AdapterSource:
    paths = {"q": "self_attn.q_proj", "v": "self_attn.v_proj", "up": "mlp.up_proj", "down": "mlp.down_proj"}
    chosen = [paths[name] for name in names or paths]
    return source_of(
        {f"model.layers.1.{path}": SIZES[path.rpartition(".")[2]] for path in chosen}, seed=seed, **options
    )


@pytest.fixture(scope="module")
def model() -> DecoderForCausalLM:
    return load_model(family_folder("seed_oss"))


def logits(loaded: LoadedAdapters, model: DecoderForCausalLM, digest: int) -> Tensor:
    return prompt_logits(model, PROMPT, loaded=loaded, digests=[digest])[0]


def test_prepared_adapter_changes_nothing_until_commit(model: DecoderForCausalLM, monkeypatch: pytest.MonkeyPatch):
    loaded, first, second = LoadedAdapters(model, LIMITS), llama_source(1), llama_source(2)
    plain = prompt_logits(model, PROMPT)[0]
    loaded.commit(loaded.prepare(first))
    with_first = logits(loaded, model, first.digest)
    assert not torch.equal(with_first, plain)
    loaded.discard(loaded.prepare(second))
    staged = loaded.prepare(second)
    assert loaded.digests == (first.digest,)
    assert torch.equal(logits(loaded, model, first.digest), with_first)
    assert torch.equal(logits(loaded, model, 0), plain)
    with monkeypatch.context() as patch:
        # Memory is full: what is prepared has all that it needs.
        patch.setattr(Tensor, "contiguous", None)
        patch.setattr(torch, "zeros", None)
        loaded.commit(staged)
    assert loaded.digests == (first.digest, second.digest)
    assert torch.equal(logits(loaded, model, first.digest), with_first)


def test_slot_of_a_removed_adapter_is_used_again(model: DecoderForCausalLM):
    loaded = LoadedAdapters(model, LIMITS)
    everywhere, kept, few = llama_source(1), llama_source(2), llama_source(3, "q")
    for source in (everywhere, kept):
        loaded.commit(loaded.prepare(source))
    with_kept = logits(loaded, model, kept.digest)
    staged = loaded.prepare(few)
    with pytest.raises(AssertionError, match="max_cpu_loras"):
        loaded.commit(staged)
    loaded.remove(everywhere.digest)
    loaded.commit(loaded.prepare(few))
    assert [loaded.slot_of(each.digest) for each in (few, kept)] == [0, 1]
    alone = LoadedAdapters(model, LIMITS)
    alone.commit(alone.prepare(few))
    expected = logits(alone, model, few.digest)
    again = LoadedAdapters(model, LIMITS)
    for source in (everywhere, kept):
        again.commit(again.prepare(source))
    again.remove(everywhere.digest)
    again.commit(again.prepare(few))
    assert torch.equal(logits(again, model, few.digest), expected)
    assert torch.equal(logits(again, model, kept.digest), with_kept)


def test_equal_contents_are_loaded_once(model: DecoderForCausalLM):
    loaded, source = LoadedAdapters(model, LIMITS), llama_source(1)
    staged = loaded.prepare(llama_source(1))
    loaded.commit(staged)
    with pytest.raises(AssertionError, match="is loaded"):
        loaded.commit(staged)
    loaded.remove(source.digest)
    assert loaded.digests == ()
    with pytest.raises(KeyError):
        loaded.slot_of(source.digest)


def test_adapters_without_room_name_their_keys(model: DecoderForCausalLM, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(model.model, "adapter_kernels", mock.Mock(new_stack=mock.Mock(side_effect=MemoryError("full"))))
    with pytest.raises(ConfigError, match=r"max_cpu_loras=2 adapters of rank model.max_lora_rank=8 .* them \(full"):
        LoadedAdapters(model, LIMITS)


def problems(model: DecoderForCausalLM, source: AdapterSource) -> str:
    with pytest.raises(AdapterError) as raised:
        LoadedAdapters(model, LIMITS).prepare(source)
    return str(raised.value)


def test_all_tensors_that_do_not_fit_are_listed(model: DecoderForCausalLM):
    wrong = {
        "model.layers.9.self_attn.q_proj": (64, 64),
        "model.layers.0.mlp.other_proj": (96, 64),
        "model.layers.0.mlp.experts.3.up_proj": (96, 64),
        "model.layers.0.self_attn.v_proj": (64, 64),
        "model.layers.0.self_attn.q_proj": (64, 64),
        "model.embed_tokens": (96, 64),
        "lm_head": (96, 64),
    }
    text = problems(model, source_of(wrong, fan_in_fan_out=True))
    assert "peft_config: fan_in_fan_out=true: the model's matrices are not transposed" in text
    assert "model.layers.9.self_attn.q_proj: the model has no such module" in text
    assert "model.layers.0.mlp.other_proj: the model has no such module" in text
    assert "model.layers.0.mlp.experts.3.up_proj: the model has no such module" in text
    assert "v_proj: lora_A [4, 64] and lora_B [64, 4], but the model's module has 64 inputs and 32 outputs" in text
    assert "model.embed_tokens: adapters of embeddings and token heads are not supported" in text
    assert "lm_head: adapters of embeddings" in text
    assert "layers.0.self_attn.q_proj" not in text
    assert "up_proj: has the rank 9, above model.max_lora_rank=8" in problems(model, llama_source(0, "up", rank=9))


def test_adapter_of_another_base_is_warned_of(model: DecoderForCausalLM, caplog: pytest.LogCaptureFixture):
    loaded = LoadedAdapters(model, LIMITS, "hub/small-model")
    cached = "/hub/models--hub--small-model/snapshots/0f3a"
    for name, num_warnings in (
        ("/data/small-model/", 0),
        (cached, 0),
        ("", 0),
        ("a/other-model", 1),
        ("a/other-model", 0),
    ):
        caplog.clear()
        loaded.prepare(llama_source(1, base_model_name_or_path=name))
        found = [each.message for each in caplog.records if "was trained for" in each.message]
        assert len(found) == num_warnings
        if found:
            assert "a/other-model, and this run's model is hub/small-model" in found[0]


def test_experts_are_refused_by_name():
    sparse = load_model(expert_folder("qwen2_moe"))
    layer = "model.layers.0"
    text = problems(
        sparse,
        source_of(
            {
                f"{layer}.self_attn.q_proj": (64, 64),
                f"{layer}.mlp.shared_expert.up_proj": (48, 64),
                f"{layer}.mlp.experts.3.up_proj": (32, 64),
                f"{layer}.mlp.experts": (512, 64),
                f"{layer}.mlp.gate": (9, 64),
            }
        ),
    )
    assert (
        f"{layer}.mlp.experts.3.up_proj, of 2 of experts: adapters of experts need room for all experts: set model"
        in text
    )
    assert f"{layer}.mlp.gate: lora_A [4, 64] and lora_B [9, 4], but the model's module has 64 inputs and 8" in text
    assert "q_proj" not in text
    assert "shared_expert" not in text
    loaded = LoadedAdapters(sparse, LIMITS)
    found = [prompt_logits(sparse, PROMPT)[0]]
    for name, outputs in (("self_attn.q_proj", 64), ("mlp.shared_expert.up_proj", 48)):
        source = source_of({f"{layer}.{name}": (outputs, 64)})
        loaded.commit(loaded.prepare(source))
        found.append(logits(loaded, sparse, source.digest))
    assert not torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


def test_numbers_too_large_for_the_dtype_are_named():
    half = load_model(family_folder("seed_oss"), dtype="bfloat16")
    text = problems(half, llama_source(0, "q", lora_alpha=1e39))
    assert "model.layers.1.self_attn.q_proj: has numbers that are too large for torch.bfloat16" in text


def test_full_weights_are_refused_by_key(model: DecoderForCausalLM):
    weights = {"base_model.model.lm_head.weight": (96, 64)}
    expected = "lm_head.weight (modules_to_save): full weights are replaced for rows only where they are scores"
    for config in ({"modules_to_save": ["lm_head"]}, {}):
        assert expected in problems(model, llama_source(0, saved=weights, **config))


def test_placeholder_needs_no_free_slot(model: DecoderForCausalLM):
    loaded = LoadedAdapters(model, LIMITS)
    with loaded.placeholder() as digest:
        assert loaded.digests == (digest,)
    sources = [llama_source(1), llama_source(2)]
    for source in sources:
        loaded.commit(loaded.prepare(source))
    before = logits(loaded, model, sources[0].digest)
    with loaded.placeholder() as digest:
        assert loaded.slot_of(digest) in range(LIMITS.max_cpu_loras)
    assert loaded.digests == tuple(source.digest for source in sources)
    assert torch.equal(logits(loaded, model, sources[0].digest), before)
