"""The prepared step: it runs on a cache of its own with the layers asked for, and leaves the model as it was."""

from types import SimpleNamespace

import pytest
import torch
from cache_specs import uniform_spec
from torch import nn

from kv_cache.cache_engine import CacheEngine
from spmd_worker.worker.runner.dummy_steps import longest_chunk, max_step, prepared_step

CPU = torch.device("cpu")


def new_engine(num_layers: int) -> CacheEngine:
    spec = uniform_spec(num_layers, num_kv_heads=1, head_size=4, dtype_bytes=4, block_size=2)
    return CacheEngine(spec, [(16,)], 3, 0, torch.float32, CPU)


class Runner:
    """Notes what the model looks like while a step runs."""

    adapters = None

    def __init__(self, model, engine):
        self.model, self.engine, self.seen = model, engine, []

    def forward(self, step, scheduled):
        self.seen.append((step, len(scheduled), len(self.model.model.layers), self.engine.tensors[0].shape[0]))

    def sample(self):
        self.seen.append("sampled")


@pytest.fixture
def model():
    return SimpleNamespace(model=SimpleNamespace(layers=nn.ModuleList(nn.Linear(1, 1) for _ in range(5))))


@pytest.mark.parametrize("num_layers", [2, 5])
def test_prepared_step_runs_cache_layers_then_restores_model(model, num_layers):
    layers, engine = model.model.layers, new_engine(num_layers)
    runner = Runner(model, engine)
    with prepared_step(model, engine, lambda _: runner, max_step(4, 4, 10, 2)) as run:
        assert engine.tensors[0].shape[0] == num_layers
        run()
    assert runner.seen == [(0, 4, num_layers, num_layers), "sampled"]
    assert model.model.layers is layers
    with pytest.raises(AssertionError, match="not allocated"):
        _ = engine.tensors[0]


def test_several_steps_run_one_after_the_other(model):
    engine = new_engine(5)
    runner = Runner(model, engine)
    with prepared_step(model, engine, lambda _: runner, max_step(4, 4, 10, 2), longest_chunk(4, 10, 2, 3)) as run:
        run()
    assert runner.seen == [(0, 4, 5, 5), "sampled", (0, 1, 5, 5), "sampled"]


@pytest.mark.parametrize(("max_tokens", "max_len", "first"), [(64, 1000, 935), (2048, 50, 0), (1, 2, 0)])
def test_longest_chunk_ends_the_longest_row(max_tokens, max_len, first):
    (chunk,) = longest_chunk(max_tokens, max_len, block_size=16, num_blocks=3)
    sequence = chunk.sequence
    assert (sequence.num_computed_tokens, chunk.num_scheduled_tokens) == (first, max_len - 1 - first)
    assert len(sequence.block_ids) == -(-(max_len - 1) // 16)
    assert set(sequence.block_ids) <= {0, 1, 2}
    assert chunk.num_samples == 1


def test_failed_step_restores_model_and_frees_cache(model):
    layers, engine = model.model.layers, new_engine(2)
    with pytest.raises(MemoryError), prepared_step(model, engine, lambda _: Runner(model, engine), ()):
        raise MemoryError
    assert model.model.layers is layers
    assert len(model.model.layers) == 5
    with pytest.raises(AssertionError, match="not allocated"):
        _ = engine.tensors[0]


def test_max_step_filters_one_row_on_cpu():
    samplings = [each.sequence.request.sampling for each in max_step(64, 8, 100, 4)]
    assert [sampling.has_filters for sampling in samplings] == [True] + [False] * 7
    assert all(sampling.needs_logprobs for sampling in samplings)


@pytest.mark.parametrize(("num_seqs", "filtered"), [(8, [False] + [True] * 7), (1, [True])])
def test_max_step_filters_other_rows_off_cpu(num_seqs, filtered):
    """One was, while a step may sort as many as there are."""
    scheduled = max_step(64, num_seqs, 100, 4, all_filtered=True)
    samplings = [each.sequence.request.sampling for each in scheduled]
    assert [sampling.has_filters for sampling in samplings] == filtered
    assert [sampling.is_greedy for sampling in samplings] == [not each for each in filtered]
    assert all(sampling.needs_logprobs for sampling in samplings)
