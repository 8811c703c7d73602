"""Mistakes that a row with experts, windows of its own or gates could have: each is seen in the logits, float32.

Entries of rows one by one are in test_expert_rows.py and test_families.py; here what a model computes is changed, so
that the comparison with transformers cannot pass by what a file says alone.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from expert_checkpoints import CASES, expert_folder, expert_reference
from expert_models import new_model
from family_checkpoints import family_folder, family_reference
from model_configs import with_indexers, with_layers, with_ropes
from our_model import prompt_logits
from reference_models import greedy_without_cache, random_prompt, relative_error, their_logits
from thread_groups import on_ranks
from torch import Tensor
from two_stages import TwoStages

from spmd_worker import LLM, SamplingParams
from spmd_worker.model.decoder import DecoderForCausalLM
from spmd_worker.model_config.model_config import ModelConfig, read_model_files
from spmd_worker.ranks.communicator import GroupHandle

TOLERANCE = 1e-4
PROMPT = random_prompt(40, seed=7, vocab_size=96)


def with_experts(config: ModelConfig, **changes: Any) -> ModelConfig:
    """The experts of every sparse layer with other fields."""
    return replace(
        config,
        layers=tuple(
            layer if layer.experts is None else replace(layer, experts=replace(layer.experts, **changes))
            for layer in config.layers
        ),
    )


def with_one_rope(config: ModelConfig) -> ModelConfig:
    return with_layers(config, rope=0)


def without_sinks(model: DecoderForCausalLM) -> None:
    for layer in model.model.layers:
        if layer.self_attn.sinks is not None:
            layer.self_attn.sinks.scores.data.fill_(-1e4)


def with_open_gates(model: DecoderForCausalLM) -> None:
    for layer in model.model.layers:
        layer.self_attn.g_proj.weight.data.zero_()


def without_choice_biases(model: DecoderForCausalLM) -> None:
    for layer in model.sparse_layers.values():
        layer.gate.choice_bias.data.zero_()


def without_choice_queries(model: DecoderForCausalLM) -> None:
    for layer in model.model.layers:
        if layer.self_attn.indexer is not None:
            layer.self_attn.indexer.q_norm.weight.data.fill_(-1.0)


def without_head_bias(model: DecoderForCausalLM) -> None:
    model.lm_head.bias.data.zero_()


IN_CONFIG: list[tuple[str, str, Callable[[ModelConfig], ModelConfig]]] = [
    ("granite_swa", "one base for all layers", with_one_rope),
    ("granite_swa", "no window", lambda config: with_layers(config, window=0)),
    ("granite_moe_swa", "one base for all layers", with_one_rope),
    ("nanochat", "rotated forwards", lambda config: with_ropes(config, is_backward=False)),
    ("nanochat", "no norm of embeddings", lambda config: replace(config, has_embedding_norm=False)),
    ("nanochat", "no cap of logits", lambda config: replace(config, logit_cap=0.0)),
    ("hy_v3", "no scaling", lambda config: with_experts(config, scaling=1.0)),
    ("exaone_moe", "full layers rotated", with_one_rope),
    ("exaone_moe", "no groups", lambda config: with_experts(config, num_groups=1, num_chosen_groups=1)),
    ("ernie_moe", "halves rotated", lambda config: with_ropes(config, is_interleaved=False)),
    ("ernie_moe", "scores of a sigmoid", lambda config: with_experts(config, score="sigmoid")),
    ("ernie_moe_untied", "sums without a minimum", lambda config: with_experts(config, min_sum=0.0)),
    ("solar_open", "no groups", lambda config: with_experts(config, num_groups=1, num_chosen_groups=1)),
    ("hunyuan_moe", "norms before rotation", lambda config: with_layers(config, qk_norm="head")),
    ("hunyuan_moe", "one count in all layers", lambda config: with_experts(config, num_chosen=3)),
    ("flex_olmo", "weights divided", lambda config: with_experts(config, renormalises=True)),
    ("phimoe", "softmax of the chosen", lambda config: with_experts(config, score="softmax_chosen")),
    ("phimoe", "another jitter", lambda config: with_experts(config, jitter=0.01)),
    ("phimoe_long", "another factor", lambda config: with_ropes(config, short_mscale=1.0)),
    ("minimax_m3", "all keys", lambda config: with_indexers(config, num_chosen=128)),
    ("minimax_m3", "runs of half the tokens", lambda config: with_indexers(config, run_length=2)),
    ("minimax_m3", "gates of other families", lambda config: with_layers(config, activation="silu")),
    ("minimax_m3", "other bounds", lambda config: with_layers(config, bound=9.0)),
    ("minimax_m3", "other bounds of experts", lambda config: with_experts(config, bound=9.0)),
    ("minimax_m3_text", "one run near a token", lambda config: with_indexers(config, num_local=1)),
    ("step3p7", "no bounds", lambda config: with_layers(config, bound=0.0)),
    ("step3p7", "no bounds of experts", lambda config: with_experts(config, bound=0.0)),
    ("step3p7", "one base for all layers", with_one_rope),
    ("step3p7", "scale of the head size", lambda config: with_layers(config, scale=16**-0.5)),
    ("gpt_neo", "scale of the head size", lambda config: with_layers(config, scale=16**-0.5)),
    ("laguna", "gates of a sigmoid", lambda config: with_layers(config, gate_activation="sigmoid")),
    ("laguna", "one base for all layers", with_one_rope),
    ("laguna_per_element", "gates of a sigmoid", lambda config: with_layers(config, gate_activation="sigmoid")),
    ("cohere2_moe", "sum of experts", lambda config: with_layers(config, mlp_multipliers=(1.0, 1.0))),
    ("mimo_v2_flash", "values as projected", lambda config: with_layers(config, value_multiplier=1.0)),
    ("mimo_v2_flash", "one base for all layers", with_one_rope),
]
IN_WEIGHTS = [
    ("granite_swa", without_sinks),
    ("granite_moe_swa", without_sinks),
    *((name, with_open_gates) for name in ("step3p7", "afmoe", "laguna", "laguna_per_element")),
    ("mimo_v2_flash", without_sinks),
    *((name, without_choice_biases) for name in ("step3p7", "ernie_moe", "exaone_moe", "hy_v3", "solar_open")),
    *((name, without_choice_biases) for name in ("afmoe", "laguna", "mimo_v2_flash")),
    *(("minimax_m3", change) for change in (without_choice_biases, without_choice_queries)),
    ("ernie_moe", without_head_bias),
    ("phimoe", without_head_bias),
]
NAMES = tuple(dict.fromkeys(name for name, *_ in (*IN_CONFIG, *IN_WEIGHTS)))
QUICK = ("nanochat", "ernie_moe", "phimoe", "step3p7")


def folder_of(name: str) -> Path:
    return expert_folder(name) if name in CASES else family_folder(name)


def expected(name: str) -> Tensor:
    (logits,) = their_logits(expert_reference(name) if name in CASES else family_reference(name), [PROMPT])
    return logits


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.stress) for name in NAMES]
)
def test_comparison_detects_each_mistake_in_logits(name: str):
    folder, right = folder_of(name), expected(name)
    config = read_model_files(folder).model_config
    assert relative_error(prompt_logits(new_model(folder), [PROMPT])[0], right) < TOLERANCE
    for what, change in [(what, change) for each, what, change in IN_CONFIG if each == name]:
        changed = new_model(folder, config=change(config))
        assert relative_error(prompt_logits(changed, [PROMPT])[0], right) > 30 * TOLERANCE, what
    for change_weights in [change for each, change in IN_WEIGHTS if each == name]:
        model = new_model(folder)
        change_weights(model)
        assert relative_error(prompt_logits(model, [PROMPT])[0], right) > 30 * TOLERANCE, change_weights


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "step3p7" else pytest.mark.stress) for name in NAMES]
)
def test_greedy_ids_are_those_of_transformers(name: str):
    rows = [random_prompt(length, seed=3, vocab_size=96) for length in (3, 16, 40)]
    sampling = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    with LLM(folder_of(name), num_blocks=60, max_model_len=64) as llm:
        ours = [list(each.outputs[0].token_ids) for each in llm.generate(rows, sampling, use_tqdm=False)]
    theirs = expert_reference(name) if name in CASES else family_reference(name)
    assert ours == [greedy_without_cache(theirs, row, 8) for row in rows]


def test_ranks_and_stages_share_heads_that_differ():
    """Layers of Step 3.7 have other numbers of heads than their neighbours, each with a gate."""
    folder, right = folder_of("step3p7"), expected("step3p7")
    heads = [layer.num_heads for layer in read_model_files(folder).model_config.layers]
    assert heads == [4, 6, 4, 6]

    def run(group: GroupHandle) -> Tensor:
        model = new_model(folder, group)
        (logits,) = prompt_logits(model, [PROMPT])
        assert [len(layer.self_attn.g_proj.weight) for layer in model.model.layers] == [2, 3, 2, 3]
        return logits[:, : model.lm_head.shard.num_owned]

    assert relative_error(torch.cat(on_ranks(2, run), dim=1), right) < TOLERANCE
    one = prompt_logits(new_model(folder), [PROMPT], 7)
    staged = prompt_logits(TwoStages(folder, new_model), [PROMPT], 7)  # type: ignore[arg-type]  # as much of a model as is used
    assert all(map(torch.equal, staged, one))
