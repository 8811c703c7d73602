"""Measuring while others use the same memory: figures stay sane whatever they do, and only this process's count."""

import mmap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
import torch

from kv_cache.cache_sizing import MemoryMeasurement
from spmd_worker.ranks.communicator import single_group
from spmd_worker.worker.memory import host
from spmd_worker.worker.memory.device import (
    DeviceReading,
    is_on_any_rank,
    measure_cuda,
    measure_host,
    outside_bytes,
    profile_host,
)

MIB, GIB = 2**20, 2**30
DEVICE = torch.device("cuda", 0)


@contextmanager
def step(run: Callable[[], None], own_bytes: int = 0) -> Iterator[Callable[[], None]]:
    """As `prepared_step`: `own_bytes` are held while the step is prepared."""
    with fresh_memory(own_bytes):
        yield run


def grow(num_bytes: int) -> Callable[[], None]:
    def run() -> None:
        with fresh_memory(num_bytes):
            pass

    return run


@contextmanager
def fresh_memory(num_bytes: int) -> Iterator[None]:
    """Pages of the system's own: what a process has freed, and kept, it would otherwise use again."""
    if num_bytes == 0:
        yield
        return
    with mmap.mmap(-1, num_bytes) as held:
        for place in range(0, num_bytes, mmap.PAGESIZE):
            held[place] = 1
        yield


# The host.


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def set_machine(**figures: int) -> None:
        for name, figure in figures.items():
            monkeypatch.setattr(host, name, lambda figure=figure: figure)

    return set_machine


def test_host_share_includes_resident_memory(machine: Callable[..., None]):
    machine(total_bytes=64 * GIB, available_bytes=30 * GIB, resident_bytes=5 * GIB)
    measured = measure_host(4 * GIB, 100, local_world_size=2)
    assert measured == MemoryMeasurement(20 * GIB, 4 * GIB, 100, GIB, "estimated")
    assert measure_host(4 * GIB, 100, local_world_size=30).total_bytes == 6 * GIB


@pytest.mark.parametrize("available", [0, 1, 10 * MIB, 10 * GIB, 2**50])
@pytest.mark.parametrize("resident", [0, 10 * MIB, 3 * GIB])
def test_host_measurement_tolerates_co_tenant(machine: Callable[..., None], available: int, resident: int):
    """Part of the weights may have been swapped out: this process then holds less than its weights."""
    machine(total_bytes=16 * GIB, available_bytes=available, resident_bytes=resident)
    measured = measure_host(GIB, 100, local_world_size=1)
    assert 0 <= measured.total_bytes <= 16 * GIB
    assert measured.non_torch_bytes == max(0, resident - GIB)


def test_profile_measures_growth_of_the_step():
    if not host.restart_peak():
        pytest.skip("this kernel lets no process set back its peak")
    before = MemoryMeasurement(GIB, 2, 3, 4, "estimated")
    measured = profile_host(before, step(grow(40 * MIB), own_bytes=80 * MIB))
    assert 35 * MIB < measured.activation_bytes < 50 * MIB
    assert measured == MemoryMeasurement(GIB, 2, measured.activation_bytes, 4, "measured")
    # What the preparation took would count if it came with the step.
    together = profile_host(before, step(grow(120 * MIB)))
    assert 115 * MIB < together.activation_bytes < 130 * MIB


def test_a_profile_is_never_below_nothing(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(host, "restart_peak", lambda: True)
    monkeypatch.setattr(host, "resident_bytes", lambda: 9 * GIB)
    monkeypatch.setattr(host, "peak_since_restart_bytes", lambda: 8 * GIB)
    measured = profile_host(MemoryMeasurement(GIB, 2, 3, 4), step(grow(0)))
    assert measured.activation_bytes == 0


def test_step_runs_when_peak_is_unreadable(monkeypatch: pytest.MonkeyPatch):
    """The other ranks of the step's collectives wait for this one."""
    monkeypatch.setattr(host, "restart_peak", lambda: False)
    runs = []
    measured = profile_host(MemoryMeasurement(GIB, 2, 3, 4, "estimated"), step(lambda: runs.append(1)))
    assert runs == [1]
    assert measured == MemoryMeasurement(GIB, 2, 3, 4, "estimated: /proc does not let this process see its peak")


def test_a_rank_that_is_alone_decides_alone():
    assert is_on_any_rank(single_group(), True)
    assert not is_on_any_rank(single_group(), False)


# CUDA, as torch reports it.


@dataclass
class FakeCuda:
    """80 GiB of which a co-tenant has some; `during_step` is what it takes (or frees) while the step runs."""

    cotenant: int = 20 * GIB
    outside: int = GIB // 2
    allocated: int = 16 * GIB
    activations: int = 3 * GIB
    peak: int = 0
    during_step: int = 0
    calls: list[str] = field(default_factory=list)

    def run_step(self) -> None:
        self.calls.append("step")
        self.peak = self.allocated + self.activations
        self.cotenant += self.during_step

    def free(self, device: torch.device | None = None) -> tuple[int, int]:
        return 80 * GIB - self.cotenant - self.outside - self.reserved(), 80 * GIB

    def reserved(self, device: torch.device | None = None) -> int:
        return max(self.allocated, self.peak)

    def reset_peak(self, device: torch.device | None = None) -> None:
        self.peak = self.allocated

    def empty_cache(self) -> None:
        self.calls.append("emptied")
        self.peak = self.allocated


def measure(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, cotenant_before: int, trainers: int = 0
) -> MemoryMeasurement:
    """`trainers` bytes were reserved in this process before."""
    fakes = {
        "synchronize": lambda device: None,
        "reset_peak_memory_stats": cuda.reset_peak,
        "memory_allocated": lambda device: cuda.allocated,
        "max_memory_allocated": lambda device: cuda.peak,
        "memory_reserved": cuda.reserved,
        "mem_get_info": cuda.free,
        "empty_cache": cuda.empty_cache,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)

    @contextmanager
    def prepared() -> Iterator[Callable[[], None]]:
        cuda.allocated += GIB
        yield cuda.run_step
        cuda.allocated -= GIB
        cuda.calls.append("left")

    at_start = DeviceReading(80 * GIB - cotenant_before - trainers, trainers)
    return measure_cuda(DEVICE, 16 * GIB, [at_start], prepared())


def test_cuda_measurement_on_quiet_device(monkeypatch: pytest.MonkeyPatch):
    cuda = FakeCuda()
    measured = measure(cuda, monkeypatch, cotenant_before=20 * GIB)
    # The gibibyte that the step's own cache took is no activation, and is given back before the real cache comes.
    assert measured == MemoryMeasurement(60 * GIB, 16 * GIB, 3 * GIB, GIB // 2, "measured")
    assert cuda.calls == ["step", "left", "emptied"]


def test_cuda_measurement_with_trainers_reserved_memory(monkeypatch: pytest.MonkeyPatch):
    """It was free for nobody at the start: taken off once more, NCCL's buffers vanished from the sum."""
    cuda = FakeCuda(allocated=(16 + 10) * GIB)
    measured = measure(cuda, monkeypatch, cotenant_before=20 * GIB, trainers=10 * GIB)
    assert measured == MemoryMeasurement(50 * GIB, 16 * GIB, 3 * GIB, GIB // 2, "measured")


def test_co_tenants_allocation_reduces_the_cache(monkeypatch: pytest.MonkeyPatch):
    measured = measure(FakeCuda(during_step=10 * GIB), monkeypatch, cotenant_before=20 * GIB)
    assert measured == MemoryMeasurement(60 * GIB, 16 * GIB, 3 * GIB, 10 * GIB + GIB // 2, "measured")


@pytest.mark.parametrize("freed", [GIB // 4, 10 * GIB, 20 * GIB])
def test_co_tenants_free_hides_nothing_of_ours(monkeypatch: pytest.MonkeyPatch, freed: int):
    """Regression: what a co-tenant gave back during the step was taken off our NCCL buffers, down to 0."""
    measured = measure(FakeCuda(during_step=-freed), monkeypatch, cotenant_before=20 * GIB)
    assert measured == MemoryMeasurement(60 * GIB, 16 * GIB, 3 * GIB, GIB // 2, "measured")


@pytest.mark.parametrize(
    ("outside", "expected"),
    [
        ((0, 0, 0), 0),
        ((7, 8, 8, 10), 3),
        # A co-tenant takes 20 and keeps it, or gives it back.
        ((0, 20, 23, 23), 23),
        ((0, 20, 3, 3), 20),
        # It gives back 20 before or after our 3, or between two parts of them.
        ((30, 10, 13), 3),
        ((30, 33, 13), 3),
        ((30, 31, 11, 13), 2),
    ],
)
def test_outside_memory_is_the_largest_rise(outside: tuple[int, ...], expected: int):
    """Torch's own memory, which comes and goes, is no part of it."""
    reserved = (5, 40, 25, 60)
    readings = [DeviceReading(200 - used - own, own) for used, own in zip(outside, reserved)]
    assert outside_bytes(readings) == expected


def test_comparison_detects_first_reading_against_last():
    readings = [DeviceReading(200 - used, 0) for used in (30, 33, 13)]
    assert max(readings[0].free - readings[-1].free, 0) != outside_bytes(readings)
