"""Kernels that the triton backend compiles before any step runs: all of the warm-up, and nothing is computed."""

import inspect
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import triton.compiler
from ranks import REPOSITORY
from started_workers import started_workers
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from spmd_worker.base.config.schema import ExecutorConfig, ModelOptions, RunConfig
from spmd_worker.ops.attention.triton import TritonBackend
from spmd_worker.ops.kernels.triton import attention_kernels, matmul_kernels, row_kernels, sampling_kernels
from spmd_worker.ops.kernels.triton.compile_ahead import ZeroedMemory
from spmd_worker.ops.kernels.triton.kernels import TritonKernels
from spmd_worker.worker import start
from spmd_worker.worker.backends.backend import Operations
from spmd_worker.worker.backends.triton import TritonDevice
from spmd_worker.worker.runner.dummy_steps import warm_up_steps
from spmd_worker.worker.worker import Worker

MODEL = REPOSITORY / "scripts" / "demo" / "model"


class FakeGpu:
    """A driver and a compiler: kernels compute nothing."""

    def __init__(self) -> None:
        self.compiled: list[str] = []
        self.launched: list[str] = []

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def compile(self, source: Any, **options: Any) -> Any:
        name = source.fn.__name__
        self.compiled.append(name)
        return SimpleNamespace(
            run=lambda *arguments: self.launched.append(name),
            launch_metadata=lambda *arguments: None,
            function=None,
            packed_metadata=None,
        )


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGpu]:
    fake = FakeGpu()
    # Of which the model's rows pass several.
    monkeypatch.setattr(attention_kernels, "SEGMENT", 64)
    monkeypatch.setattr(driver, "_active", fake)
    monkeypatch.setattr(triton.compiler, "compile", fake.compile)
    monkeypatch.setattr(TritonDevice, "operations", lambda self: Operations(TritonKernels(), TritonBackend()))
    monkeypatch.setattr(TritonDevice, "compiles_ahead", True)
    forget_kernels()
    yield fake
    forget_kernels()


def forget_kernels() -> None:
    """Kernels as in a new process."""
    for module in (attention_kernels, sampling_kernels, matmul_kernels, row_kernels):
        for _, kernel in inspect.getmembers(module, lambda each: isinstance(each, JITFunction)):
            kernel.device_caches.clear()


@pytest.fixture
def new_worker() -> Iterator[Callable[[], Worker]]:
    model = ModelOptions(path=str(MODEL), dtype="bfloat16")
    config = RunConfig(model=model, executor=ExecutorConfig(device_backend="triton"), device="cpu")
    with started_workers() as start_worker:
        yield lambda: start_worker(config)


def compute(worker: Worker, is_ahead: bool) -> None:
    """The warm-up's steps, after what is compiled ahead."""
    loaded, spec = worker.loaded, worker.get_kv_cache_spec()
    if is_ahead:
        start.compile_ahead(loaded, spec)
    engine = loaded.new_cache_engine(spec, 16, 0)
    with start.prepared_step(loaded.model, engine, loaded.new_runner), ZeroedMemory():
        runner = loaded.new_runner(engine)
        for number, scheduled in enumerate(warm_up_steps(65, 200, spec.block_size, 16)):
            runner.forward(number, scheduled)
            runner.sample()


def test_steps_compile_nothing_after_compiling_ahead(gpu: FakeGpu, new_worker: Callable[[], Worker]):
    worker = new_worker()
    compute(worker, is_ahead=True)
    assert {*gpu.compiled} >= {"attend", "join_partials", "linear", "gated_linear", "add_rms_norm", "rotate_and_write"}
    assert {*gpu.compiled} >= {"forbid", "filter_logits", "draw", "prob_sums"}
    # The steps themselves launched them, and nothing else was compiled for them.
    num_compiled, gpu.compiled[:] = len(gpu.compiled), []
    compute(worker, is_ahead=False)
    assert (gpu.compiled, num_compiled > 6) == ([], True)
    assert {*gpu.launched} >= {"attend", "join_partials", "linear"}


def test_compiling_ahead_launches_nothing(gpu: FakeGpu, new_worker: Callable[[], Worker]):
    worker = new_worker()
    words = start.compile_ahead(worker.loaded, worker.get_kv_cache_spec())
    assert "compiled" in words
    assert (gpu.launched, len(gpu.compiled) > 6) == ([], True)


def test_steps_compile_without_compiling_ahead(gpu: FakeGpu, new_worker: Callable[[], Worker]):
    """Negative control."""
    compute(new_worker(), is_ahead=False)
    assert {*gpu.compiled} >= {"attend", "join_partials", "linear", "gated_linear"}


def test_failure_ahead_is_a_warning(
    gpu: FakeGpu, new_worker: Callable[[], Worker], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    worker = new_worker()
    monkeypatch.setattr(TritonDevice, "warm_up", lambda self, *arguments: 1 / 0)
    assert start.compile_ahead(worker.loaded, worker.get_kv_cache_spec()) == ""
    assert "compiled one by one" in caplog.text
    compute(worker, is_ahead=False)
    assert "attend" in gpu.launched
