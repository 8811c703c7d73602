"""A worker sizes its cache: by an estimate where that is enough, else by running the largest step, and never fails."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import cycle
from pathlib import Path

import pytest
from started_workers import started_workers

from kv_cache.cache_sizing import MemoryMeasurement
from spmd_worker import LLM, SamplingParams
from spmd_worker.base.config.schema import CacheConfig, ModelOptions, RunConfig, SchedulerConfig
from spmd_worker.base.errors import ConfigError
from spmd_worker.model_config.model_config import read_model_files
from spmd_worker.ranks.topology import RankLayout
from spmd_worker.worker import start
from spmd_worker.worker.memory import device, host
from spmd_worker.worker.memory.estimate import activation_bytes
from spmd_worker.worker.runner import dummy_steps as max_step
from spmd_worker.worker.worker import Worker

MODEL = Path(__file__).resolve().parents[3] / "scripts/demo/model"
MIB, GIB = 2**20, 2**30
SCHEDULER = SchedulerConfig(max_num_seqs=32, max_num_batched_tokens=512)
NUM_USEFUL = 32 * 8  # 32 sequences of 128 tokens in blocks of 16
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.fixture
def new_worker() -> Iterator[Callable[..., Worker]]:
    model = ModelOptions(path=str(MODEL), dtype="float32", max_model_len=128)
    with started_workers() as start:
        yield lambda **cache: start(
            RunConfig(model=model, scheduler=SCHEDULER, cache=CacheConfig(**cache), device="cpu")
        )


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of layers of each largest step that ran."""
    seen: list[int] = []

    def prepared_step(model, engine, *others):
        seen.append(engine.spec.num_layers)
        return max_step.prepared_step(model, engine, *others)

    monkeypatch.setattr(start, "prepared_step", prepared_step)
    return seen


def estimate() -> int:
    return activation_bytes(read_model_files(MODEL).model_config, RankLayout(1), 0, "float32", 512, 32)


def leave(num_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """This much for activations and cache."""

    def measure_host(weights: int, activations: int, local_world_size: int) -> MemoryMeasurement:
        total = int((num_bytes + weights) / 0.9) + 2
        return MemoryMeasurement(total, weights, activations, 0, "estimated")

    monkeypatch.setattr(start, "measure_host", measure_host)


def measure_as(num_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step runs and is measured; but its bytes, on a model this small, are mostly the allocator's whims."""
    profile_host = device.profile_host
    monkeypatch.setattr(
        start, "profile_host", lambda *arguments: replace(profile_host(*arguments), activation_bytes=num_bytes)
    )


def test_estimate_suffices_when_memory_is_plentiful(
    new_worker: Callable[..., Worker], steps: list[int], monkeypatch: pytest.MonkeyPatch
):
    worker = new_worker()
    leave(NUM_USEFUL * worker.get_cache_block_size_bytes() + 2 * estimate(), monkeypatch)
    assert worker.determine_num_available_blocks() == (NUM_USEFUL, 0)
    assert not steps
    assert "activations of the largest step" in worker.sizing.reason
    assert "(estimated)" in worker.sizing.reason
    assert "limited by need: 32 sequences" in worker.sizing.reason


def test_step_is_profiled_when_memory_is_scarce(
    new_worker: Callable[..., Worker], steps: list[int], monkeypatch: pytest.MonkeyPatch
):
    worker = new_worker()
    leave(NUM_USEFUL * worker.get_cache_block_size_bytes() + 2 * estimate() - 8, monkeypatch)
    measure_as(2 * estimate(), monkeypatch)
    num_blocks, _ = worker.determine_num_available_blocks()
    assert steps == [2]
    assert "(measured)" in worker.sizing.reason
    assert num_blocks == NUM_USEFUL - 1
    assert len(worker.get_model().model.layers) == worker.model_config.num_layers > 2, "the model has its layers again"


def test_choice_of_keys_is_added_to_the_measured_step(
    new_worker: Callable[..., Worker], monkeypatch: pytest.MonkeyPatch
):
    """The step has short rows, whose tokens see all keys."""
    monkeypatch.setattr(start, "choice_bytes", lambda model_config, dtype_bytes, num_ranks: 7 * MIB)
    measure_as(2 * MIB, monkeypatch)
    leave(0, monkeypatch)
    worker = new_worker()
    worker.determine_num_available_blocks()
    assert "activations of the largest step 9.0 MiB (measured)" in worker.sizing.reason


def test_given_num_blocks_needs_no_measurement(
    new_worker: Callable[..., Worker], steps: list[int], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(start, "measure_host", None)
    worker = new_worker(num_blocks=40, swap_space_gib=1.0)
    # A gibibyte of swap space is more than the sequences can use.
    assert worker.determine_num_available_blocks() == (40, NUM_USEFUL)
    assert not steps


def test_estimate_bounds_measured_activations(
    new_worker: Callable[..., Worker], steps: list[int], monkeypatch: pytest.MonkeyPatch
):
    """Twice the estimate is what decides whether to look, so it must not be passed. The allocator's noise is."""
    if not host.restart_peak():
        pytest.skip("this kernel lets no process set back its peak")
    worker = new_worker()
    leave(0, monkeypatch)
    seen = []
    profile_host = device.profile_host

    def noting(*arguments):
        seen.append(profile_host(*arguments))
        return seen[-1]

    monkeypatch.setattr(start, "profile_host", noting)
    worker.determine_num_available_blocks()
    assert seen[0].activation_bytes < 2 * estimate() + 8 * MIB


def test_profile_does_not_change_outputs(monkeypatch: pytest.MonkeyPatch, steps: list[int]):
    keywords = {"device": "cpu", "max_model_len": 128, "max_num_seqs": 32, "max_num_batched_tokens": 512}
    with LLM(MODEL, num_blocks=64, **keywords) as llm:
        expected = [each.outputs[0].token_ids for each in llm.generate(["1+2=", "9+9="], GREEDY, use_tqdm=False)]
    leave(2 * estimate(), monkeypatch)
    measure_as(estimate(), monkeypatch)
    with LLM(MODEL, **keywords) as llm:
        answers = [each.outputs[0].token_ids for each in llm.generate(["1+2=", "9+9="], GREEDY, use_tqdm=False)]
    assert steps == [2]
    assert answers == expected


# A co-tenant meanwhile.


@pytest.mark.parametrize(
    "readings",
    [[8 * GIB, 100 * MIB, 0], [100 * MIB, 8 * GIB, 2**50], [0, 8 * GIB, 0, 8 * GIB]],
    ids=["takes", "frees", "takes and frees"],
)
def test_co_tenant_between_measurements_is_tolerated(
    new_worker: Callable[..., Worker], monkeypatch: pytest.MonkeyPatch, readings: list[int]
):
    """What is available changes at every reading. `resident_bytes` too: the kernel may have taken pages back."""
    available, resident = cycle(readings), cycle([5 * MIB, 0, 3 * GIB])
    monkeypatch.setattr(host, "available_bytes", lambda: next(available))
    monkeypatch.setattr(host, "resident_bytes", lambda: next(resident))
    worker = new_worker(swap_space_gib=0.005)
    for _ in range(6):
        num_blocks, num_host_blocks = worker.determine_num_available_blocks()
        assert 0 <= num_blocks <= NUM_USEFUL
        assert num_host_blocks == 0.005 * GIB // worker.get_cache_block_size_bytes()
    worker.initialize_cache(max(num_blocks, 8), num_host_blocks)
    worker.check_health()


def test_co_tenant_without_free_memory_is_rejected(new_worker: Callable[..., Worker], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(host, "available_bytes", lambda: 0)
    worker = new_worker(gpu_memory_utilization=0.1)
    num_blocks, num_host_blocks = worker.determine_num_available_blocks()
    assert num_blocks == 0
    with pytest.raises(ConfigError, match=r" 0 cache blocks.*cache\.gpu_memory_utilization"):
        worker.initialize_cache(num_blocks, num_host_blocks)
