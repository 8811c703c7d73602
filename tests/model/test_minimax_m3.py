"""MiniMax-M3 beside what all families with experts are tested for: heads that choose runs of keys, planned bytes,
adapters, int8, and what is not supported.
"""

from dataclasses import replace

import pytest
from allocated import peak_bytes
from expert_checkpoints import expert_folder, expert_reference
from family_checks import planned_models
from hybrid_runs import HybridRun
from our_model import load_model
from reference_models import Oracle, random_prompt

from spmd_worker.model.layers.choice_bytes import choice_bytes
from spmd_worker.model_config.model_config import read_model_files
from spmd_worker.ranks.topology import RankLayout
from spmd_worker.worker.memory.estimate import activation_bytes, weights_bytes

ROWS = [random_prompt(length, seed=7, vocab_size=96) for length in (70, 5, 33)]
oracle = Oracle(expert_reference, ROWS)


@pytest.mark.guarantee("The plan's bytes are those of the run")
def test_planned_bytes_equal_parameters():
    """Ranks have their heads' queries of the indexer, and its key."""
    config = read_model_files(expert_folder("minimax_m3")).model_config
    for layout, _, _, model in planned_models(config):
        indexer = model.model.layers[1].self_attn.indexer
        assert len(indexer.qk_proj.weight) == (2 // min(layout.tensor_parallel_size, 2) + 1) * 16
    model = load_model(expert_folder("minimax_m3"), quantization="int8")
    planned = weights_bytes(config, RankLayout(1), 0, "float32", "cpu", "int8")
    assert planned == sum(each.nbytes for each in model.parameters())


@pytest.mark.guarantee("The plan's bytes are those of the run")
@pytest.mark.parametrize("num_chosen", [8, 2048])
@pytest.mark.parametrize("num_tokens", [64, 2048])
def test_choice_of_heads_stays_below_the_plan(num_chosen: int, num_tokens: int):
    """The last tokens of a long row, beside a row that sees all of its keys."""
    folder, num_keys = expert_folder("minimax_m3"), 16_384
    config = replace(read_model_files(folder).model_config, max_position_embeddings=num_keys)
    layers = [
        each if each.indexer is None else replace(each, indexer=replace(each.indexer, num_chosen=num_chosen))
        for each in config.layers
    ]
    config = replace(config, layers=tuple(layers))
    run = HybridRun([load_model(folder, config)], [[3] * num_keys, [5] * 16])
    run.sequences[0].num_computed_tokens = num_keys - num_tokens
    most = peak_bytes(lambda: run.step(None))
    planned = activation_bytes(config, RankLayout(1), 0, "float32", num_tokens + 16, num_tokens + 16)
    print("PEAK", most, planned, most / planned, choice_bytes(config, 4))
