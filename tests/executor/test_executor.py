"""What an engine may ask of an executor of one: classes by name, calls by name, futures, health, failure."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from ranks import REPOSITORY

from spmd_worker.base.config.parallel import ParallelConfig
from spmd_worker.base.config.schema import CacheConfig, ModelOptions, RunConfig
from spmd_worker.base.errors import ConfigError
from spmd_worker.executor.executor import MAX_CALL_S, Executor
from spmd_worker.executor.external_launcher import ExternalLauncherExecutor
from spmd_worker.executor.multiproc import MultiprocExecutor
from spmd_worker.executor.uniproc import UniProcExecutor
from spmd_worker.ranks.environment import RankEnvironment
from spmd_worker.replica.sequence.step import StepPlan
from spmd_worker.resolved import resolve_run

MODEL = REPOSITORY / "scripts" / "demo" / "model"
ALONE = RankEnvironment()


def new_executor(tensor_parallel_size: int = 1) -> UniProcExecutor:
    config = RunConfig(
        model=ModelOptions(path=str(MODEL)),
        parallel=ParallelConfig(tensor_parallel_size),
        cache=CacheConfig(num_blocks=32),
        device="cpu",
    )
    return UniProcExecutor(resolve_run(config, "cpu"), ALONE)


@pytest.fixture
def executor() -> Iterator[UniProcExecutor]:
    started = new_executor()
    started.start()
    started.load_model()
    started.initialize_from_config(32, 0)
    yield started
    started.shutdown()


@pytest.mark.finding(number="D8")
def test_auto_backend_follows_the_launcher():
    launched = RankEnvironment(is_launched=True)
    assert Executor.get_class("auto", ALONE) is UniProcExecutor
    assert Executor.get_class("auto", ALONE, 2) is MultiprocExecutor
    assert Executor.get_class("auto", launched, 2) is ExternalLauncherExecutor
    assert Executor.get_class("auto", launched) is ExternalLauncherExecutor
    assert Executor.get_class("uniproc", launched) is UniProcExecutor
    assert Executor.get_class("spmd_worker.executor.uniproc.UniProcExecutor", ALONE) is UniProcExecutor


@pytest.mark.parametrize(
    ("backend", "message"),
    [
        (
            "ray",
            "executor.backend=ray is not one of auto, external_launcher, uniproc, multiproc, nor the qualified name of "
            "a class",
        ),
        (
            "no_such.Thing",
            "executor.backend: 'no_such.Thing' cannot be imported: No module named 'no_such': install it, or add its "
            "folder to PYTHONPATH",
        ),
        (
            "builtins.dict",
            "executor.backend: 'builtins.dict' is not a subclass of spmd_worker.executor.executor.Executor",
        ),
    ],
)
def test_unknown_backend_is_rejected(backend: str, message: str):
    with pytest.raises(ConfigError) as refused:
        Executor.get_class(backend, ALONE)
    assert str(refused.value) == message


def test_uniproc_rejects_two_ranks():
    with pytest.raises(ConfigError) as refused:
        new_executor(tensor_parallel_size=2).start()
    assert str(refused.value) == (
        "executor.backend=uniproc runs one rank but the layout has 2: "
        "start them with torchrun and executor.backend=external_launcher, or on this node with "
        "executor.backend=multiproc"
    )


def test_calls_accept_names_and_callables(executor: UniProcExecutor):
    assert executor.collective_rpc("get_cache_block_size_bytes") == [4 * 2 * 4 * 16 * 4 * 16]
    assert executor.collective_rpc(lambda worker, factor: worker.vocab_size * factor, args=(2,)) == [576]
    assert executor.collective_rpc(lambda worker, *, plus: worker.max_model_len + plus, kwargs={"plus": 1}) == [257]
    count = executor.collective_rpc("apply_model", args=(lambda model: sum(p.numel() for p in model.parameters()),))
    assert count[0] > 400_000


def test_unknown_method_error_names_it(executor: UniProcExecutor):
    with pytest.raises(AttributeError, match=r"^rank 0: .* no method 'no_such_method'"):
        executor.collective_rpc("no_such_method")
    assert not executor.is_failed


def test_calls_run_on_the_workers_device(executor: UniProcExecutor, monkeypatch: pytest.MonkeyPatch):
    """A callable ran on whatever device was the process's current one."""
    current: list[str] = []

    @contextmanager
    def on_device() -> Iterator[None]:
        current.append("the worker's")
        yield
        current.pop()

    monkeypatch.setattr(executor.driver_worker.worker, "on_device", on_device)
    monkeypatch.setattr(executor.driver_worker.worker, "check_health", lambda: list(current))
    assert executor.collective_rpc("check_health") == [["the worker's"]]
    assert executor.collective_rpc(lambda worker: list(current)) == [["the worker's"]]
    (future,) = executor.collective_rpc(lambda worker: list(current), non_block=True)
    assert future.result() == ["the worker's"]
    assert current == []


def test_non_blocking_call_returns_completed_futures(executor: UniProcExecutor):
    (future,) = executor.collective_rpc("get_kv_cache_spec", non_block=True)
    assert future.result(timeout=0) == executor.get_kv_cache_specs()[0]
    (future,) = executor.collective_rpc("no_such_method", non_block=True)
    assert isinstance(future.exception(timeout=0), AttributeError)


@pytest.mark.parametrize(
    ("timeout", "error", "words"),
    [
        (math.inf, ValueError, r"^timeout=inf must .*9\.22337e\+09"),
        (math.nan, ValueError, r"^timeout=nan must "),
        (-1, ValueError, "timeout=-1 must be"),
        (1e300, ValueError, "timeout=1e\\+300 must be"),
        (10**400, ValueError, "timeout=1000"),
        (True, TypeError, r"^timeout is .*bool"),
        ("1", TypeError, "timeout is a str"),
        (torch.tensor(1.0), TypeError, "timeout is a Tensor"),
    ],
)
@pytest.mark.parametrize("non_block", [False, True])
def test_invalid_timeout_is_rejected_before_the_call(
    executor: UniProcExecutor, timeout: Any, error: type[Exception], words: str, non_block: bool
):
    """An infinite one was an OverflowError of the interpreter's, while the call went on."""
    called: list[object] = []
    with pytest.raises(error, match=words):
        executor.collective_rpc(called.append, timeout=timeout, non_block=non_block)
    assert called == []


@pytest.mark.parametrize("method", [(1, 2), 3, None, torch.zeros(2), b"add"])
def test_method_must_be_a_name_or_callable(executor: UniProcExecutor, method: Any):
    """Its first letters were asked for: an AttributeError without words."""
    with pytest.raises(TypeError, match=rf"^method is a {type(method).__name__}: give the name"):
        executor.collective_rpc(method)


@pytest.mark.parametrize("timeout", [None, 1000, 1000.5, MAX_CALL_S])
def test_call_with_timeout_returns_the_same(executor: UniProcExecutor, timeout: float | None):
    assert executor.collective_rpc(lambda worker: 7, timeout=timeout) == [7]


def test_what_the_engine_asks_at_the_start(executor: UniProcExecutor):
    assert executor.determine_num_available_blocks() == (32, 4096)
    assert executor.max_concurrent_batches == 1
    assert executor.get_kv_cache_specs()[0].block_size == 16
    executor.check_health()


def test_a_step_without_sequences_is_a_step(executor: UniProcExecutor):
    assert executor.execute_model(StepPlan(step=1)).step == 1
    future = executor.execute_model(StepPlan(step=2), non_block=True)
    assert future.result(timeout=0).step == 2


def test_failure_callbacks_run_once(executor: UniProcExecutor, monkeypatch: pytest.MonkeyPatch):
    called: list[str] = []
    executor.register_failure_callback(lambda: called.append("first"))
    executor.register_failure_callback(lambda: called.append("second"))
    executor.execute_model(StepPlan(step=1))
    assert called == []

    def break_down(*_: object) -> None:
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(executor.driver_worker.worker, "execute_model", break_down)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"^the device .*gone"):
            executor.execute_model(StepPlan(step=2))
    assert called == ["first", "second"]
    executor.register_failure_callback(lambda: called.append("late"))
    assert called == ["first", "second", "late"]
    with pytest.raises(RuntimeError, match=r"^the executor .*failed:"):
        executor.check_health()


def test_health_is_checked_by_computing(executor: UniProcExecutor, monkeypatch: pytest.MonkeyPatch):
    executor.check_health()
    monkeypatch.setattr(torch, "ones", lambda *_, **__: torch.zeros(2))
    with pytest.raises(RuntimeError, match=r"rank 0: cpu computes 1 \+ 1 = 0\.0"):
        executor.check_health()


def test_the_shard_can_be_read_by_people(executor: UniProcExecutor):
    (text,) = executor.collective_rpc("get_model_inspection")
    lines = text.splitlines()
    assert lines[0] == "DecoderForCausalLM"
    assert "      0-3: DecoderLayer" in lines
    assert "          qkv_proj: ColumnParallelLinear weight [256, 128] float32" in lines
    assert len(lines) < 20


def test_shutdown_twice_frees_the_model(executor: UniProcExecutor):
    executor.shutdown()
    executor.shutdown()
    with pytest.raises(AssertionError, match="load_model comes first"):
        executor.collective_rpc("get_model")
