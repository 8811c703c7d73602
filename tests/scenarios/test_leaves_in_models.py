"""Logits have the same bits on 1, 2, 4 and 8 ranks, in every family, both dtypes, whole prompts and chunks.

Ranks are threads, with the CPU's kernels; on one rank layers are joined where they can be. Each mistake that would make
a sum depend on the number of ranks is found.
"""

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from leaf_models import CASES, EXPERTS, leaf_folder
from leaf_runs import prompts
from leaf_shards import logits_on
from torch import Tensor

from spmd_worker.model.decoder_layer import DecoderLayer
from spmd_worker.model.layers import linear
from spmd_worker.model.layers.experts import SparseFeedForward
from spmd_worker.model.layers.linear import RowParallelLinear
from spmd_worker.model_config.model_config import read_model_files
from spmd_worker.ranks import communicator
from spmd_worker.ranks.expert_layout import ExpertLayout
from spmd_worker.ranks.leaves import leaf_ends, num_leaves

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
QUICK = ("granite float32", "qwen2_moe bfloat16", "gpt_oss float32", "falcon_h1 bfloat16")
"""Multipliers and biases; experts, a shared one with its gate, and a dense layer; clamped gates, biases of experts,
sinks and windows; two mixers in a layer.
"""


def each_model(*quick: str) -> pytest.MarkDecorator:
    """All cases in both dtypes; all but `quick` in the stress tier."""
    pairs = [(name, dtype) for name in CASES for dtype in DTYPES]
    return pytest.mark.parametrize(
        ("name", "dtype"),
        [
            pytest.param(*pair, id=" ".join(pair), marks=[] if " ".join(pair) in quick else pytest.mark.stress)
            for pair in pairs
        ],
    )


def rows_of(name: str, *lengths: int) -> list[list[int]]:
    vocab_size = json.loads((leaf_folder(name) / "config.json").read_text())["vocab_size"]
    return [each["prompt_token_ids"] for each in prompts(vocab_size, lengths)]


def logits(size: int, name: str, dtype: str, chunk: int | None = None, **options: Any) -> list[Tensor]:
    return logits_on(size, leaf_folder(name), DTYPES[dtype], rows_of(name, 1, 17, 40, 70), chunk, **options)


def num_different(one: list[Tensor], other: list[Tensor]) -> int:
    """Numbers that differ; a number that is none differs."""
    return sum(int((mine != theirs).sum()) for mine, theirs in zip(one, other, strict=True))


@pytest.mark.gate("gpt_oss float32", "falcon_h1 bfloat16")
@pytest.mark.guarantee("The same bits on 1, 2, 4, 8 tensor-parallel ranks")
@each_model(*QUICK)
def test_logits_have_same_bits_on_ranks(name: str, dtype: str):
    whole, count = logits(1, name, dtype), num_leaves(read_model_files(leaf_folder(name)).model_config, 8)
    assert num_different(whole, logits(1, name, dtype, 7)) == 0
    for size in (2, 4, 8):
        if count % size == 0:
            assert num_different(whole, logits(size, name, dtype, 7 if size == 2 else None)) == 0, size
    print(f"LOGITS COMPARED {name} {dtype} {sum(each.numel() for each in whole)}")


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param(name, dtype, marks=[] if (name, dtype) == ("qwen2_moe", "bfloat16") else pytest.mark.stress)
        for name in EXPERTS
        for dtype in DTYPES
    ],
)
def test_experts_of_ranks_have_bits_of_columns(name: str, dtype: str):
    config = read_model_files(leaf_folder(name)).model_config
    whole = logits(1, name, dtype)
    num_experts = max(layer.experts.num_experts for layer in config.layers if layer.experts is not None)
    for size in (1, 2, 4):
        owners = tuple(index % size for index in range(num_experts))
        layout = ExpertLayout((owners,) * len(config.layers), is_exact=True)
        assert num_different(whole, logits(size, name, dtype, layout=layout)) == 0, size


def _moved_leaf(input_range: tuple[int, int], num_inputs: int, count: int) -> tuple[int, ...]:
    """The first leaf of the first rank has 32 inputs more."""
    first, *others = leaf_ends(input_range, num_inputs, count)
    # Leaves of output projections are one granule.
    is_struck = others and first > 32 and input_range[0] == 0
    return (first + 32 * bool(is_struck), *others)


def _multiplied_parts(layer: DecoderLayer, part: Tensor, *_: Any) -> Tensor:
    return part * layer._multiplier


def _shared_part(experts: SparseFeedForward, *arguments: Any, **options: Any) -> Tensor:
    """Weighted before it is summed."""
    experts._sums_each = False
    return _FORWARD(experts, *arguments, **options).float()


_FORWARD: Callable[..., Tensor] = SparseFeedForward.forward
MISTAKES: dict[str, tuple[str, Any, str, Any]] = {
    "a leaf ends 32 inputs later": ("unequal_leaves", linear, "leaf_ends", _moved_leaf),
    "parts are added in rank order": ("llama", communicator, "tree_sum", lambda parts: sum(parts[1:], parts[0])),
    "every rank adds the bias": ("llama_biases", RowParallelLinear, "rank_bias", property(lambda self: self.bias)),
    "parts are multiplied": ("granite", DecoderLayer, "_added", _multiplied_parts),
    "experts' parts are weighted": ("qwen2_moe", SparseFeedForward, "forward", _shared_part),
}


@pytest.mark.gate("parts are added in rank order", "a leaf ends 32 inputs later")
@pytest.mark.control("The same bits on 1, 2, 4, 8 tensor-parallel ranks")
@pytest.mark.parametrize("mistake", MISTAKES)
def test_comparison_detects_mistake_on_ranks(mistake: str, monkeypatch: pytest.MonkeyPatch):
    name, owner, attribute, wrong = MISTAKES[mistake]
    whole = logits(1, name, "float32")
    monkeypatch.setattr(owner, attribute, wrong)
    assert num_different(whole, logits(4, name, "float32")) > 0


@pytest.mark.stress
@pytest.mark.parametrize("size", [3, 5, 6, 7])
def test_other_sizes_have_bits_of_their_own(size: int):
    """They are independent of chunks too, and near one rank's."""
    name = {3: "9_heads", 5: "10_heads", 6: "12_heads", 7: "14_key_heads"}[size]
    one, found = logits(1, name, "float32"), logits(size, name, "float32")
    assert num_different(found, logits(size, name, "float32", 7)) == 0
    assert num_different(one, found) > 0
    assert all(torch.allclose(mine, theirs, atol=1e-4) for mine, theirs in zip(one, found, strict=True))
