"""Rotary scalings: a row's tokens and log-probabilities are bit-identical for keys computed cold, from the cache, in
chunks, after preemption or swapping, and from the host tier.

With some scalings a token's key depends on more than the tokens before it: on the regime of its row. The rows share a
prefix and differ in length, on both sides of the model's original length, and one passes it while it decodes. The
negative control shows that, without the regime in the names of cached blocks, rows would get each other's keys.
"""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from llm_calls import check_way_was_taken
from run_folder import made_once

import spmd_worker.replica.scheduler.allocator as allocator_module
from kv_cache.block_hash import root_hash
from spmd_worker import LLM, SamplingParams
from spmd_worker.model_config.rope import ROPE_TYPES

MAX_POSITIONS = 32
BLOCK_SIZE = 4
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=1)

SCALINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 8.0},
    "dynamic": {"factor": 8.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": MAX_POSITIONS,
    },
    # More than half of the rows may grow past the length from which on they take the long factors.
    "longrope": {
        "original_max_position_embeddings": 80,
        "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7],
        "long_factor": [2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0],
    },
    "yarn": {"factor": 8.0, "original_max_position_embeddings": MAX_POSITIONS},
}

# The longest row takes 34 blocks, all at once four times as many.
WAYS: dict[str, dict[str, Any]] = {
    "warm": {},
    "in chunks": {"max_num_batched_tokens": 7, "max_num_seqs": 7},
    "recomputed": {"num_blocks": 46, "preemption_mode": "recompute"},
    "swapped": {"num_blocks": 46, "preemption_mode": "swap", "swap_space": 0.01},
    "from the host tier": {"num_blocks": 46, "host_tier_gib": 0.01, "preemption_mode": "recompute"},
}

Answer = tuple[list[int], list[float]]


def prompts() -> list[list[int]]:
    """Two of each length, one of them the beginning of the next: 24 grows past 32, the last are far beyond."""
    generator = torch.Generator().manual_seed(8)
    head = torch.randint(3, 150, (128,), generator=generator).tolist()
    other = torch.randint(3, 150, (128,), generator=generator).tolist()
    return [head[:shared] + other[shared:length] for length in (24, 33, 64, 90, 124) for shared in (length, 20)]


@cache
def checkpoint(rope_type: str) -> Path:
    """A model without weights: the dummy ones are the same everywhere."""

    def write(folder: Path) -> None:
        config = {
            "architectures": ["LlamaForCausalLM"],
            "vocab_size": 160,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            # Scaled, all of them are as long as the rows.
            "max_position_embeddings": MAX_POSITIONS if rope_type in ("dynamic", "linear", "yarn") else 256,
            "rope_parameters": {"rope_type": rope_type, "rope_theta": 1000.0, **SCALINGS[rope_type]},
        }
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))

    return made_once(f"regime of {rope_type}", write)


def make(rope_type: str, **settings: Any) -> LLM:
    given = {
        "num_blocks": 400,
        "block_size": BLOCK_SIZE,
        "dtype": "float32",
        "device": "cpu",
        "max_model_len": 136,
        **settings,
    }
    return LLM(checkpoint(rope_type), load_format="dummy", **given)


def answers(llm: LLM, rows: list[list[int]]) -> list[Answer]:
    found = []
    for output in llm.generate(rows, GREEDY, use_tqdm=False):
        (each,) = output.outputs
        entries = [entry for step in each.logprobs or [] for entry in step.values()]
        found.append((each.token_ids, [entry.logprob for entry in entries]))
    return found


@cache
def cold(rope_type: str) -> list[Answer]:
    """Each row alone, nothing cached."""
    with make(rope_type, enable_prefix_caching=False) as llm:
        return [answers(llm, [row])[0] for row in prompts()]


QUICK = {("dynamic", "warm"), ("dynamic", "swapped"), ("longrope", "warm")}
# Of scalings that turn a position by the same angle in every row.
WAYS_OF_OTHERS = {
    "default": ("swapped", "from the host tier"),
    "linear": ("warm", "recomputed"),
    "llama3": ("in chunks", "swapped"),
    "yarn": ("warm", "from the host tier"),
}


def tier(rope_type: str, way: str) -> list[pytest.MarkDecorator]:
    """All ways of the scalings that have regimes, two ways of each other; the rest in the stress tier."""
    if way not in WAYS_OF_OTHERS.get(rope_type, WAYS):
        return [pytest.mark.stress]
    return [] if (rope_type, way) in QUICK else [pytest.mark.matrix]


@pytest.mark.gate("dynamic-warm", "dynamic-in chunks", "longrope-recomputed", "yarn-from the host tier")
@pytest.mark.guarantee("Rows whose rotary angles depend on length, too")
@pytest.mark.parametrize(
    ("rope_type", "way"),
    [pytest.param(rope_type, way, marks=tier(rope_type, way)) for rope_type in SCALINGS for way in WAYS],
)
def test_rope_row_is_independent_of_key_source(rope_type: str, way: str):
    rows = prompts()
    with make(rope_type, **WAYS[way]) as llm:
        assert answers(llm, rows) == cold(rope_type), "together"
        assert [answers(llm, [row])[0] for row in rows] == cold(rope_type), "one after the other, from what is cached"
        check_way_was_taken(llm, way)


def test_rows_share_keys_only_within_a_regime():
    """Beyond the model's own length a prompt shares with those of its length alone, below it with all."""
    head = list(range(3, 131))
    with make("dynamic") as llm:
        cached = [
            llm.generate([head[:length]], GREEDY, use_tqdm=False)[0].num_cached_tokens
            for length in (24, 32, 40, 64, 40, 64, 28)
        ]
    assert cached == [0, 24, 0, 0, 36, 60, 24]


@pytest.mark.control("Rows whose rotary angles depend on length, too")
@pytest.mark.parametrize("rope_type", ["dynamic", "longrope"])
def test_comparison_detects_names_without_regime(rope_type: str, monkeypatch: pytest.MonkeyPatch):
    """Negative control: names as they were, of tokens, weights and adapter alone."""
    monkeypatch.setattr(allocator_module, "root_hash", lambda weight_version, **others: root_hash(weight_version))
    rows = prompts()
    with make(rope_type) as llm:
        assert [answers(llm, [row])[0] for row in rows] != cold(rope_type)


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope"])
def test_completions_are_scored_in_their_sampling_regime(rope_type: str):
    rows = prompts()
    with make(rope_type) as llm:
        outputs = [output.outputs[0] for output in llm.generate(rows, GREEDY, use_tqdm=False)]
        tokens = [each.token_ids for each in outputs]
        reported = [
            [step[token].logprob for token, step in zip(each.token_ids, each.logprobs or [], strict=True)]
            for each in outputs
        ]
        assert llm.score_tokens(rows, tokens, GREEDY) == reported
        # Of a row that ended early; what it might have come to counts.
        assert llm.score_tokens(rows, [each[:3] for each in tokens], GREEDY) == [each[:3] for each in reported]
        if rope_type == "longrope":
            with pytest.raises(ValueError, match="give score_tokens its sampling_params"):
                llm.score_tokens(rows, tokens)
        else:
            assert llm.score_tokens(rows, tokens) == reported


def test_longrope_counts_the_tokens_that_are_computed():
    """The last one that is sampled is not. The original length is 80."""
    with make("longrope") as llm:
        found = [
            llm.llm_engine.requests.rope_regime(num_prompt, SamplingParams(max_tokens=max_tokens))
            for num_prompt, max_tokens in ((80, 1), (79, 2), (70, 11), (81, 1), (80, 2), (70, 12), (70, None))
        ]
    assert found == [0, 0, 0, 1, 1, 1, 1]


def test_each_scaling_that_is_known_is_tried():
    # A proportional one rotates fewer pairs, at any length.
    assert {*SCALINGS, "proportional"} == set(ROPE_TYPES)
