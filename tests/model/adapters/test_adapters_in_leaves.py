"""Models with adapters on ranks that are threads: with leaves, any number of ranks has one's bits, int8 models too."""

from functools import cache, partial
from pathlib import Path

import pytest
import torch
from adapter_folders import DEMO, write_adapter
from our_model import prompt_logits
from reference_models import random_prompt
from run_folder import made_once
from thread_groups import in_rank_order, on_ranks
from torch import Tensor

from spmd_worker.base.config.adapter_limits import AdapterLimits
from spmd_worker.model.adapters.loaded import LoadedAdapters
from spmd_worker.model.adapters.source import AdapterSource, read_adapter
from spmd_worker.model.layers import linear
from spmd_worker.model.layers.context import LayerContext
from spmd_worker.model.registry import build_model
from spmd_worker.model_config.model_config import read_model_files
from spmd_worker.ops.attention.sdpa import SdpaBackend
from spmd_worker.ops.kernels.int8 import Int8Kernels
from spmd_worker.ops.kernels.reference import ReferenceKernels
from spmd_worker.ranks.leaves import num_leaves

LIMITS = AdapterLimits(max_loras=3, max_lora_rank=20, max_cpu_loras=3)
PROMPTS = [random_prompt(length, 3, vocab_size=96) for length in (1, 17, 9, 22)]
ADAPTERS = (("o_proj", "down_proj"), 5), (("down_proj", "gate_proj"), 20), (("q_proj", "o_proj"), 7)
"""Targets and rank of each."""


@cache
def sources() -> list[AdapterSource]:
    def write(number: int, folder: Path) -> None:
        write_adapter(folder, DEMO, number, *ADAPTERS[number], scale=0.2)

    return [read_adapter(made_once(f"leaves {number}", partial(write, number))) for number in range(len(ADAPTERS))]


@cache
def logits_on_ranks(size: int, dtype: torch.dtype, *, is_quantised: bool = False) -> list[Tensor]:
    """Logits of all prompts: the first without an adapter, each other with one of its own."""
    model_config = read_model_files(DEMO).model_config
    count = num_leaves(model_config, 8)
    assert count == 4, count

    def run(group) -> list[Tensor]:
        kernels = Int8Kernels(dtype) if is_quantised else ReferenceKernels()
        parts = (group, kernels, SdpaBackend(), dtype, torch.device("cpu"))
        quantised = kernels if is_quantised else None
        model = build_model(LayerContext(*parts, quantised=quantised, num_leaves=count), model_config)
        with model.weights.open(DEMO) as checkpoint:
            model.weights.fill(checkpoint)
        model.pack_weights()
        loaded = LoadedAdapters(model, LIMITS)
        for source in sources():
            loaded.commit(loaded.prepare(source))
        digests = [0, *(source.digest for source in sources())]
        logits = prompt_logits(model, PROMPTS, loaded=loaded, digests=digests)
        return [each[:, : model.lm_head.shard.num_owned] for each in logits]

    shards = on_ranks(size, run, adds_by_tree=True)
    return [torch.cat(each, dim=1) for each in zip(*shards, strict=True)]


def is_equal(found: list[Tensor], expected: list[Tensor]) -> list[bool]:
    return list(map(torch.equal, found, expected))


CASES = {"float32": (torch.float32, False), "bfloat16": (torch.bfloat16, False), "int8": (torch.float32, True)}


@pytest.mark.gate("bfloat16", "int8")
@pytest.mark.parametrize(("dtype", "is_quantised"), CASES.values(), ids=CASES)
def test_any_number_of_ranks_has_equal_logits(dtype: torch.dtype, is_quantised: bool):
    one = logits_on_ranks(1, dtype, is_quantised=is_quantised)
    for size in (2, 4):
        assert all(is_equal(logits_on_ranks(size, dtype, is_quantised=is_quantised), one)), size


def test_control_sums_in_rank_order_are_found(monkeypatch: pytest.MonkeyPatch):
    one = logits_on_ranks(1, torch.float32, is_quantised=True)
    monkeypatch.setattr(linear, "tree_sum", in_rank_order)
    assert is_equal(logits_on_ranks.__wrapped__(4, torch.float32, is_quantised=True), one) == [
        True,
        False,
        False,
        False,
    ]


def test_control_one_chain_is_found(monkeypatch: pytest.MonkeyPatch):
    two = logits_on_ranks(2, torch.float32, is_quantised=True)
    leaf_ends = linear.leaf_ends
    monkeypatch.setattr(linear, "leaf_ends", lambda *of: leaf_ends(*of)[-1:])
    assert is_equal(logits_on_ranks.__wrapped__(1, torch.float32, is_quantised=True), two) == [
        True,
        False,
        False,
        False,
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_complete_sum_keeps_signs_of_zeros(dtype: torch.dtype):
    complete = torch.tensor([0.0, -0.0, 1.5, -3.0], dtype=dtype)

    def run(group) -> Tensor:
        return group.sum_parts(group.once(complete), dtype)

    for found in on_ranks(3, run, adds_by_tree=True):
        assert torch.equal(found.view(torch.uint8), complete.view(torch.uint8))
