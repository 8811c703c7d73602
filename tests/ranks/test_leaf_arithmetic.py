"""Leaves of known models, and where leaves of any size begin and end."""

from itertools import pairwise
from typing import Any

import pytest

from spmd_worker.model_config.model_config import model_config_of
from spmd_worker.ranks.leaves import GRANULE, column_range, leaf_bounds, leaf_ends, num_leaves, tree_sum

LLAMA: dict[str, Any] = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1, "vocab_size": 96}
QWEN2: dict[str, Any] = {**LLAMA, "architectures": ["Qwen2ForCausalLM"]}
QWEN3: dict[str, Any] = {**LLAMA, "architectures": ["Qwen3ForCausalLM"], "head_dim": 128}


def sizes(hidden: int, intermediate: int, heads: int, kv_heads: int) -> dict[str, int]:
    return {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
    }


KNOWN: dict[str, tuple[dict[str, Any], int]] = {
    "Llama 3 8B": ({**LLAMA, **sizes(4096, 14336, 32, 8)}, 8),
    "Llama 3 70B": ({**LLAMA, **sizes(8192, 28672, 64, 8)}, 8),
    "Llama 2 7B": ({**LLAMA, **sizes(4096, 11008, 32, 32)}, 8),
    "SmolLM2 135M": ({**LLAMA, **sizes(576, 1536, 9, 3)}, 1),
    "SmolLM2 360M": ({**LLAMA, **sizes(960, 2560, 15, 5)}, 1),
    "Qwen2.5 0.5B": ({**QWEN2, **sizes(896, 4864, 14, 2)}, 2),
    "Qwen2.5 1.5B": ({**QWEN2, **sizes(1536, 8960, 12, 2)}, 4),
    "Qwen2.5 3B": ({**QWEN2, **sizes(2048, 11008, 16, 2)}, 8),
    "Qwen2.5 7B": ({**QWEN2, **sizes(3584, 18944, 28, 4)}, 4),
    "Qwen2.5 72B": ({**QWEN2, **sizes(8192, 29568, 64, 8)}, 8),
    "Qwen3 0.6B": ({**QWEN3, **sizes(1024, 3072, 16, 8)}, 8),
    "Qwen3 8B": ({**QWEN3, **sizes(4096, 12288, 32, 8)}, 8),
    "Qwen3 30B A3B": (
        {
            **QWEN3,
            **sizes(2048, 6144, 32, 4),
            "architectures": ["Qwen3MoeForCausalLM"],
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
        },
        8,
    ),
    "gpt-oss 20B": (
        {
            **LLAMA,
            **sizes(2880, 2880, 64, 8),
            "architectures": ["GptOssForCausalLM"],
            "head_dim": 64,
            "num_local_experts": 32,
            "num_experts_per_tok": 4,
        },
        8,
    ),
    "columns of no granule": ({**LLAMA, **sizes(64, 90, 4, 4)}, 1),
    "two granules": ({**LLAMA, **sizes(256, 64, 8, 8)}, 2),
}
SIZES = [32, 64, 96, 256, 352, 1408, 2880, 4864, 10944, 14336, 29568]


@pytest.mark.parametrize("name", KNOWN)
def test_known_model_has_leaves(name: str, tmp_path: Any):
    config, expected = KNOWN[name]
    model_config = model_config_of(config, tmp_path / "config.json")
    assert num_leaves(model_config, 8) == expected
    assert [num_leaves(model_config, most) for most in (1, 2, 4)] == [min(most, expected) for most in (1, 2, 4)]


@pytest.mark.parametrize("num_inputs", SIZES)
def test_leaves_cover_inputs_at_granules(num_inputs: int):
    for count in (each for each in (1, 2, 4, 8) if num_inputs // GRANULE >= each):
        bounds = leaf_bounds(num_inputs, count)
        lengths = [stop - start for start, stop in pairwise(bounds)]
        assert (bounds[0], bounds[-1], len(lengths)) == (0, num_inputs, count)
        assert all(length % GRANULE == 0 for length in lengths)
        assert max(lengths) - min(lengths) in (0, GRANULE)


def test_unequal_leaves_begin_with_longer_ones():
    assert leaf_bounds(1408, 8) == (0, 192, 384, 576, 768, 928, 1088, 1248, 1408)
    assert [column_range(1408, 8, 4, rank) for rank in range(4)] == [(0, 384), (384, 768), (768, 1088), (1088, 1408)]
    assert leaf_ends((384, 768), 1408, 8) == (192, 384)


@pytest.mark.parametrize("num_columns", SIZES)
def test_ranks_have_consecutive_complete_leaves(num_columns: int):
    for count in (each for each in (2, 4, 8) if num_columns // GRANULE >= each):
        inner = set(leaf_bounds(num_columns, count))
        for size in (each for each in (1, 2, 4, 8) if each <= count):
            ranges = [column_range(num_columns, count, size, rank) for rank in range(size)]
            assert [start for start, _ in ranges] == [0, *(stop for _, stop in ranges[:-1])]
            assert ranges[-1][1] == num_columns
            ends = [start + end for start, stop in ranges for end in leaf_ends((start, stop), num_columns, count)]
            assert ends == list(leaf_bounds(num_columns, count))[1:]
            assert {start for start, _ in ranges} <= inner


@pytest.mark.parametrize("size", [3, 5, 6, 7, 9, 16])
def test_other_sizes_have_one_leaf_a_rank(size: int):
    ranges = [column_range(1408, 8, size, rank) for rank in range(size)]
    assert [start for start, _ in ranges] == [0, *(stop for _, stop in ranges[:-1])]
    assert ranges[-1][1] == 1408
    lengths = [stop - start for start, stop in ranges]
    assert max(lengths) - min(lengths) <= 1
    first, *_ = ranges
    assert leaf_ends((first[0], first[1]), 1408, 8) == (lengths[0],)


@pytest.mark.parametrize("num_columns", [288, 576, 1152])
def test_three_leaves_of_a_rank_are_one(num_columns: int):
    """The last of three ranks begins at a leaf, by chance."""
    start, stop = column_range(num_columns, 8, 3, 2)
    assert {start, stop} <= set(leaf_bounds(num_columns, 8))
    assert leaf_ends((start, stop), num_columns, 8) == (stop - start,)


class _Named(str):
    def __add__(self, other: str) -> "_Named":
        return _Named(f"({self} {other})")


def test_tree_adds_neighbours_and_largest_full_tree_first():
    def of(count: int) -> str:
        return tree_sum([_Named(index) for index in range(count)])

    assert of(1) == "0"
    assert of(8) == "(((0 1) (2 3)) ((4 5) (6 7)))"
    assert of(3) == "((0 1) 2)"
    assert of(6) == "(((0 1) (2 3)) (4 5))"
