"""Rows with adapters in one batch: each has the bits that it has alone, and rows without keep those of a model without.

Five adapters of several ranks and modules, and none; layers of a plain model are joined where no row has an adapter.
"""

from functools import cache

import pytest
import torch
from family_checkpoints import family_folder
from our_model import load_model, prompt_logits
from peft_adapters import Settings, adapter_folder, peft_logits, peft_model
from reference_models import random_prompt, relative_error
from thread_groups import on_ranks
from torch import Tensor

from spmd_worker.base.config.adapter_limits import AdapterLimits
from spmd_worker.model.adapters.loaded import LoadedAdapters
from spmd_worker.model.adapters.source import AdapterModule, AdapterSource, read_adapter
from spmd_worker.model.adapters.targets import TargetPart
from spmd_worker.model.layers.context import LayerContext
from spmd_worker.model.registry import build_model
from spmd_worker.model_config.model_config import read_model_files
from spmd_worker.ops.attention.sdpa import SdpaBackend
from spmd_worker.ops.kernels.int8 import Int8Kernels
from spmd_worker.ops.kernels.reference import ReferenceKernels

LIMITS = AdapterLimits(max_loras=8, max_lora_rank=64, max_cpu_loras=5)
PROMPTS = [random_prompt(length, 3, vocab_size=96) for length in (1, 17, 30, 9, 22, 5, 40)]
ADAPTERS: list[Settings] = [
    (),
    (("r", 20),),
    (("target_modules", ("q_proj", "o_proj")),),
    (("target_modules", ("up_proj",)), ("r", 1)),
    (("target_modules", ("k_proj", "down_proj", "gate_proj")),),
]
CASES = [
    ("seed_oss", "float32", None),
    ("seed_oss", "bfloat16", None),
    ("seed_oss", "bfloat16", "int8"),
    pytest.param("gemma2", "bfloat16", None, marks=pytest.mark.matrix),
]


@cache
def sources(family: str) -> list[AdapterSource]:
    return [read_adapter(adapter_folder(family, settings, seed)) for seed, settings in enumerate(ADAPTERS)]


@pytest.mark.gate("gemma2-bfloat16-None", "seed_oss-bfloat16-*")
@pytest.mark.parametrize(("family", "dtype", "quantization"), CASES)
def test_row_has_equal_bits_in_any_batch(family: str, dtype: str, quantization: str | None):
    model = load_model(family_folder(family), dtype=dtype, quantization=quantization)
    assert model.model.joined_layers is not None
    without = prompt_logits(model, PROMPTS)
    loaded, digests = LoadedAdapters(model, LIMITS), [0, *(source.digest for source in sources(family)), 0]
    for source in sources(family):
        loaded.commit(loaded.prepare(source))
    mixed = prompt_logits(model, PROMPTS, loaded=loaded, digests=digests)
    for chunk in (1, 7):
        assert all(map(torch.equal, prompt_logits(model, PROMPTS, chunk, (True, False), loaded, digests), mixed)), chunk
    for prompt, digest, logits, expected in zip(PROMPTS, digests, mixed, without, strict=True):
        assert torch.equal(prompt_logits(model, [prompt], loaded=loaded, digests=[digest])[0], logits)
        assert torch.equal(logits, expected) == (digest == 0)


def logits_on_ranks(family: str, size: int, *, is_quantised: bool = False) -> list[Tensor]:
    """Logits of all prompts with the first adapter, on ranks that are threads."""
    model_config, source = read_model_files(family_folder(family)).model_config, read_adapter(adapter_folder(family))

    def run(group) -> list[Tensor]:
        kernels = Int8Kernels(torch.float32) if is_quantised else ReferenceKernels()
        quantised = kernels if is_quantised else None
        parts = (group, kernels, SdpaBackend(), torch.float32, torch.device("cpu"))
        model = build_model(LayerContext(*parts, quantised=quantised), model_config)
        with model.weights.open(family_folder(family)) as checkpoint:
            model.weights.fill(checkpoint)
        model.pack_weights()
        loaded = LoadedAdapters(model, LIMITS)
        loaded.commit(loaded.prepare(source))
        logits = prompt_logits(model, PROMPTS, loaded=loaded, digests=[source.digest, 0] * 3 + [source.digest])
        return [each[:, : model.lm_head.shard.num_owned] for each in logits]

    return [torch.cat(shards, dim=1) for shards in zip(*on_ranks(size, run), strict=True)]


@pytest.mark.parametrize(("family", "size"), [("seed_oss", 2), ("gpt_neox", 2), ("phi3", 4), ("gpt2", 2)])
def test_logits_on_ranks_are_those_of_peft(family: str, size: int):
    found, reference = logits_on_ranks(family, size), peft_model(family)
    for prompt, logits in list(zip(PROMPTS, found, strict=True))[::2]:
        assert relative_error(logits, peft_logits(reference, prompt)) < 1e-4


def test_quantised_sums_get_adapters_of_all_ranks():
    (one, two), reference = (
        [logits_on_ranks("seed_oss", size, is_quantised=True) for size in (1, 2)],
        peft_model("seed_oss"),
    )
    for index, (prompt, alone, shared) in enumerate(zip(PROMPTS, one, two, strict=True)):
        expected = peft_logits(reference, prompt)
        if index % 2:
            assert torch.equal(alone, shared)
            assert relative_error(shared, expected) > 0.5
        else:
            assert relative_error(shared, alone) < 0.02
            assert relative_error(shared, expected) < 0.4


def test_comparison_detects_rows_of_other_outputs(monkeypatch: pytest.MonkeyPatch):
    right = TargetPart.matrices

    def shifted(part: TargetPart, module: AdapterModule, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        a, b = right(part, module, dtype)
        return a, b.roll(1, dims=0)

    monkeypatch.setattr(TargetPart, "matrices", shifted)
    logits, reference = logits_on_ranks("gpt_neox", 2)[0], peft_model("gpt_neox")
    assert relative_error(logits, peft_logits(reference, PROMPTS[0])) > 1e-2
