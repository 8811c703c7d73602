"""MiniMax-M3 beside what all families with experts are tested for: planned bytes, the choice's too, and int8."""

from dataclasses import replace

import pytest
import torch
from allocated import peak_bytes
from expert_checkpoints import expert_folder
from expert_models import PROMPTS, worst_error
from family_checks import planned_models
from hybrid_runs import HybridRun
from model_configs import with_indexers
from our_model import load_model, prompt_logits

from spmd_worker.model.layers.choice_bytes import choice_bytes
from spmd_worker.model_config.model_config import read_model_files
from spmd_worker.ranks.topology import RankLayout
from spmd_worker.worker.memory.estimate import activation_bytes, weights_bytes


@pytest.mark.guarantee("The plan's bytes are those of the run")
def test_planned_bytes_equal_parameters():
    """Ranks have their heads' queries of the indexer, and its key."""
    config = read_model_files(expert_folder("minimax_m3")).model_config
    for layout, _, _, model in planned_models(config):
        indexer = model.model.layers[1].self_attn.indexer
        assert len(indexer.qk_proj.weight) == (2 // min(layout.tensor_parallel_size, 2) + 1) * 16


@pytest.mark.guarantee("The plan's bytes are those of the run")
@pytest.mark.parametrize(
    ("num_chosen", "num_tokens", "least"),
    [(8, 64, 0.8), *(pytest.param(*each, marks=pytest.mark.stress) for each in ((2048, 64, 0.7), (2048, 2048, 0.6)))],
)
def test_choice_of_heads_stays_below_the_plan(num_chosen: int, num_tokens: int, least: float):
    """The last tokens of a long row, beside a row that sees all of its keys."""
    folder, num_keys = expert_folder("minimax_m3"), 16_384
    config = replace(read_model_files(folder).model_config, max_position_embeddings=num_keys)
    config = with_indexers(config, num_chosen=num_chosen)
    run = HybridRun([load_model(folder, config)], [[3] * num_keys, [5] * 16])
    run.sequences[0].num_computed_tokens = num_keys - num_tokens
    most = peak_bytes(lambda: run.step(None))
    planned = activation_bytes(config, RankLayout(1), 0, "float32", num_tokens + 16, num_tokens + 16)
    assert least < most / planned < 1
    # Negative control: most of it is the choice's.
    assert planned - choice_bytes(config, 4) < most / 2


def test_int8_answers_stay_near_transformers_in_any_chunks():
    model = load_model(expert_folder("minimax_m3"), quantization="int8")
    assert model.model.layers[1].self_attn.indexer.qk_proj.weight.dtype == torch.int8
    planned = weights_bytes(model.model_config, RankLayout(1), 0, "float32", "cpu", "int8")
    assert planned == sum(each.nbytes for each in model.parameters())
    logits = prompt_logits(model, PROMPTS)
    # Other runs are chosen, and other experts.
    assert 1e-3 < worst_error("minimax_m3", logits) < 1.0
    assert all(map(torch.equal, prompt_logits(model, PROMPTS, 5), logits))
