"""The prepared step: it runs on a cache of its own with the layers asked for, and leaves the model as it was."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from kv_cache.cache_engine import CacheEngine
from kv_cache.cache_spec import CacheSpec
from spmd_worker.runner.largest_step import largest_step, prepared_step

CPU = torch.device("cpu")


def new_engine(num_layers: int) -> CacheEngine:
    spec = CacheSpec(num_layers, num_kv_heads=1, head_size=4, dtype_bytes=4, block_size=2)
    return CacheEngine(spec, (16,), 3, 0, torch.float32, CPU)


class Runner:
    """Notes what the model looks like while a step runs."""

    def __init__(self, model, engine):
        self.model, self.engine, self.seen = model, engine, []

    def forward(self, step, scheduled):
        self.seen.append((step, len(scheduled), len(self.model.model.layers), self.engine.device_cache.shape[0]))

    def sample(self):
        self.seen.append("sampled")


@pytest.fixture
def model():
    return SimpleNamespace(model=SimpleNamespace(layers=nn.ModuleList(nn.Linear(1, 1) for _ in range(5))))


@pytest.mark.parametrize("num_layers", [2, 5])
def test_as_many_layers_run_as_the_cache_has_and_the_model_gets_all_of_them_back(model, num_layers):
    layers, engine = model.model.layers, new_engine(num_layers)
    runner = Runner(model, engine)
    with prepared_step(model, engine, lambda _: runner, largest_step(4, 4, 10, 2)) as run:
        assert engine.device_cache.shape[0] == num_layers
        run()
    assert runner.seen == [(0, 4, num_layers, num_layers), "sampled"]
    assert model.model.layers is layers
    with pytest.raises(AssertionError, match="not allocated"):
        _ = engine.device_cache


def test_a_step_that_fails_leaves_the_model_whole_and_no_cache(model):
    layers, engine = model.model.layers, new_engine(2)
    with pytest.raises(MemoryError), prepared_step(model, engine, lambda _: Runner(model, engine), ()):
        raise MemoryError
    assert model.model.layers is layers
    assert len(model.model.layers) == 5
    with pytest.raises(AssertionError, match="not allocated"):
        _ = engine.device_cache


def test_one_row_of_the_largest_step_is_filtered_and_all_report():
    samplings = [each.sequence.request.sampling for each in largest_step(64, 8, 100, 4)]
    assert [sampling.has_filters for sampling in samplings] == [True] + [False] * 7
    assert all(sampling.needs_logprobs for sampling in samplings)
