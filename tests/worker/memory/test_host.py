"""Memory as the kernel tells it: limits of control groups of both kinds, and the peak since a moment."""

import gc
import mmap
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
from forked_child import in_child

from spmd_worker.worker.memory import host

MIB = 2**20
NO_LIMIT_OF_OLD = 9223372036854771712


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A /proc and a /sys/fs/cgroup of our own, with 100 MiB available and no groups."""
    monkeypatch.setattr(host, "_PROC", tmp_path / "proc")
    monkeypatch.setattr(host, "_GROUPS", tmp_path / "cgroup")
    write(tmp_path / "proc/meminfo", "MemTotal: 999999 kB\nMemAvailable: 102400 kB\n")
    return tmp_path


def write(path: Path, text: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


def write_group(folder: Path, limit: object, used: int, inactive: int = 0) -> None:
    write(folder / "memory.max", limit)
    write(folder / "memory.current", used)
    write(folder / "memory.stat", f"anon 5\ninactive_file {inactive}")


def write_older_group(folder: Path, limit: int, used: int, inactive: int = 0) -> None:
    write(folder / "memory.limit_in_bytes", limit)
    write(folder / "memory.usage_in_bytes", used)
    write(folder / "memory.stat", f"inactive_file 3\ntotal_inactive_file {inactive}")


def test_available_bytes_without_control_groups(kernel: Path):
    assert host.available_bytes() == 100 * MIB
    assert host.total_bytes() == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def test_available_bytes_of_a_control_group(kernel: Path):
    write(kernel / "proc/self/cgroup", "0::/job/rank")
    write_group(kernel / "cgroup/job/rank", 60 * MIB, used=30 * MIB, inactive=10 * MIB)
    assert host.total_bytes() == 60 * MIB
    assert host.available_bytes() == 40 * MIB


def test_a_group_above_may_be_the_narrower_one(kernel: Path):
    write(kernel / "proc/self/cgroup", "0::/job/rank")
    write_group(kernel / "cgroup/job/rank", "max", used=5 * MIB)
    write_group(kernel / "cgroup/job", 50 * MIB, used=45 * MIB)
    assert host.available_bytes() == 5 * MIB


def test_groups_of_the_older_kind_are_read_too(kernel: Path):
    write(kernel / "proc/self/cgroup", "9:name=systemd:/\n4:cpu,memory:/job\n0::/")
    write_older_group(kernel / "cgroup/memory", NO_LIMIT_OF_OLD, used=0)
    assert host.available_bytes() == 100 * MIB
    write_older_group(kernel / "cgroup/memory/job", 70 * MIB, used=30 * MIB, inactive=20 * MIB)
    assert host.available_bytes() == 60 * MIB


def test_unmounted_group_path_uses_containers_root(kernel: Path):
    write(kernel / "proc/self/cgroup", "0::/docker/1234/../5678")
    write_group(kernel / "cgroup", 30 * MIB, used=10 * MIB)
    assert host.available_bytes() == 20 * MIB


def test_available_bytes_are_never_negative(kernel: Path):
    write(kernel / "proc/self/cgroup", "0::/")
    write_group(kernel / "cgroup", 30 * MIB, used=40 * MIB)
    assert host.available_bytes() == 0


def test_figures_that_are_missing_or_garbled_limit_nothing(kernel: Path):
    write(kernel / "proc/self/cgroup", "0::/")
    write(kernel / "cgroup/memory.max", "?")
    write(kernel / "proc/meminfo", "MemAvailable:\nMemAvailable: many kB")
    assert host.available_bytes() == host.total_bytes()


def hold_for_a_moment(size: int) -> None:
    """Map `size` bytes, touch every page and give them back; past malloc, which may have kept as much from earlier."""
    with mmap.mmap(-1, size) as held:
        held[:: mmap.PAGESIZE] = bytes(size // mmap.PAGESIZE)


def test_restart_peak_keeps_the_earlier_peak():
    # Garbage of earlier tests would be freed while memory is compared.
    gc.collect()
    hold_for_a_moment(96 * MIB)
    if not host.restart_peak():
        pytest.skip("this kernel lets no process set back its peak")
    resident, overall = host.resident_bytes(), host.peak_resident_bytes()
    assert overall >= resident + 90 * MIB
    assert host.peak_since_restart_bytes() < resident + 10 * MIB
    hold_for_a_moment(48 * MIB)
    assert 40 * MIB < host.peak_since_restart_bytes() - resident < 60 * MIB
    assert host.peak_resident_bytes() == overall


def test_forked_process_does_not_have_its_parents_peak(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(host, "_earlier_peak_bytes", 2**50)

    def check() -> None:
        assert host.peak_resident_bytes() < 2**50

    assert in_child(check) == 0
    assert host.peak_resident_bytes() == 2**50


def test_restart_peak_detects_missing_permission(kernel: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(host, "_PROC", kernel / "nowhere")
    assert not host.restart_peak()
    assert host.peak_since_restart_bytes() is None
    # Two readings of the kernel's would differ if this process grew between them.
    monkeypatch.setattr(host, "peak_resident_bytes", lambda: 7)
    assert host.resident_bytes() == 7


KEEPING = """
import ctypes, resource, sys
from spmd_worker.worker.memory.host import keep_freed_memory
import numpy as np
# Large pages, which some systems give unasked, would make of 24,576 faults a few dozen.
PR_SET_THP_DISABLE = 41
ctypes.CDLL(None).prctl(*map(ctypes.c_ulong, (PR_SET_THP_DISABLE, 1, 0, 0, 0)))
if sys.argv[1] == "keep":
    keep_freed_memory()
def work():
    # Four times 24 MiB, touched and freed again.
    arrays = [np.empty(24 << 20, dtype=np.uint8) for _ in range(4)]
    for array in arrays:
        array[::4096] = 1
work()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(8):
    work()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="it is glibc that can be told")
def test_freed_memory_is_reused():
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}

    def faults(how: str) -> int:
        command = [sys.executable, "-c", KEEPING, how]
        return int(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)

    assert faults("keep") < 100
    assert faults("as it comes") > 10_000, "the control"
