"""Kernels compiled ahead, for a GPU that is not there: its driver notes what is loaded and launched."""

import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ranks
import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler.errors import CompilationError
from triton.runtime import driver

from spmd_worker.ops.kernels.triton.compile_ahead import compiling

CPU = torch.device("cpu")


@triton.jit
def scale(x, out, BLOCK: tl.constexpr):
    places = tl.arange(0, BLOCK)
    tl.store(out + places, tl.load(x + places) * 2)


@triton.jit
def faulty(x, BLOCK: tl.constexpr):
    tl.static_assert(BLOCK == 0)
    tl.store(x, 1)


class FakeDriver:
    """The driver of one H100."""

    def __init__(self) -> None:
        self.loaded: list[str] = []
        self.launched: list[str] = []
        self.utils = SimpleNamespace(
            get_device_properties=lambda device: {"max_shared_mem": 227 * 1024},
            load_binary=self._load,
        )

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        return lambda *arguments: self.launched.append(metadata.name)

    def _load(self, name: str, *others: Any) -> tuple[Any, ...]:
        self.loaded.append(name)
        return object(), object(), 32, 0, 1024


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeDriver]:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    fake = FakeDriver()
    monkeypatch.setattr(driver, "_active", fake)
    yield fake
    for kernel in (scale, faulty):
        kernel.device_caches.clear()


def launch_sizes() -> None:
    for size in (64, 128, 64):
        scale[(1,)](torch.ones(size), torch.zeros(size), BLOCK=size)


def test_launches_compile_ahead_and_compute_nothing(gpu: FakeDriver):
    run = triton.runtime.jit.JITFunction.run
    with compiling(CPU, 2) as compiled:
        launch_sizes()
    assert (gpu.launched, gpu.loaded) == ([], ["scale", "scale"])
    assert str(compiled) == "2 compiled, 0 cached"
    assert triton.runtime.jit.JITFunction.run is run
    launch_sizes()
    assert (gpu.launched, gpu.loaded) == (["scale"] * 3, ["scale", "scale"])
    assert len(compiled.cache_hits) == 2


@pytest.mark.parametrize("is_inference", [False, True])
def test_memory_of_outputs_is_zero(gpu: FakeDriver, monkeypatch: pytest.MonkeyPatch, is_inference: bool):
    """They may be used as indices. torch fills what it allocates with its worst here."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    was = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)

    def outputs() -> list[torch.Tensor]:
        x = torch.ones(4, dtype=torch.int64)
        with torch.inference_mode(is_inference):
            return [torch.empty(4, dtype=torch.int64), x.new_empty(4), torch.empty_like(x), x.new_empty(2, 2)]

    try:
        with compiling(CPU, 1):
            assert not any(each.any() for each in outputs())
        assert all(each.all() for each in outputs()), "control"
    finally:
        torch.use_deterministic_algorithms(was)


def test_second_start_compiles_nothing(gpu: FakeDriver):
    found = []
    for _ in range(2):
        with compiling(CPU, 2) as compiled:
            launch_sizes()
        found.append(str(compiled))
        scale.device_caches.clear()
    assert found == ["2 compiled, 0 cached", "0 compiled, 2 cached"]


def test_launch_without_compiling_ahead_compiles(gpu: FakeDriver):
    """Control of the two above."""
    with compiling(CPU, 2) as compiled:
        pass
    assert str(compiled) == "0 compiled, 0 cached"
    launch_sizes()
    assert (gpu.launched, gpu.loaded) == (["scale"] * 3, ["scale", "scale"])


def test_other_threads_launch_as_always(gpu: FakeDriver):
    """A trainer's, in the same process."""
    with compiling(CPU, 2):
        launch_sizes()
        other = threading.Thread(target=launch_sizes)
        other.start()
        other.join()
    assert gpu.launched == ["scale"] * 3


def test_faulty_kernel_fails_when_it_is_launched(gpu: FakeDriver):
    """Not ahead: steps may replace it by another, or never launch it."""
    x = torch.zeros(16)
    with compiling(CPU, 2):
        faulty[(1,)](x, BLOCK=4)
        launch_sizes()
    with pytest.raises(CompilationError):
        faulty[(1,)](x, BLOCK=4)
    assert gpu.loaded == ["scale", "scale"]


def test_error_among_launches_ends_compiling(gpu: FakeDriver):
    run = triton.runtime.jit.JITFunction.run

    def fail() -> None:
        with compiling(CPU, 2):
            launch_sizes()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert triton.runtime.jit.JITFunction.run is run
    launch_sizes()
    assert gpu.launched == ["scale"] * 3


@pytest.mark.stress
def test_allocations_are_zeroed_without_torchs_compiler():
    """A mode of dispatch imported it: two seconds of each start."""
    program = (
        "import sys, torch\n"
        "from spmd_worker.ops.kernels.triton.compile_ahead import ZeroedMemory\n"
        "with ZeroedMemory():\n"
        "    made = torch.empty(3), torch.zeros(1).new_empty(3), torch.empty_like(torch.ones(3))\n"
        "print(*(each.tolist() for each in made), 'torch._dynamo' in sys.modules)\n"
    )
    done = ranks.run_command([sys.executable, "-c", program], timeout_s=100)
    assert done.stdout.split() == ["[0.0,", "0.0,", "0.0]"] * 3 + ["False"], done.output
