"""Processes of this machine, as they are seen."""

import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from waiting import wait_until

from spmd_worker.base import process
from spmd_worker.base.errors import ConfigError
from spmd_worker.base.process import (
    children_of,
    cpu_seconds_of,
    node_name,
    parent_of,
    start_time_of,
    state_of,
    variables_of,
)


def test_process_start_time_identifies_it_and_excludes_zombies():
    own = start_time_of(os.getpid())
    assert own is not None
    assert own > 0
    assert node_name() == node_name() != ""
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    assert parent_of(child.pid) == os.getpid()
    # Nobody has asked for its exit code yet.
    wait_until(lambda: start_time_of(child.pid) is None)
    child.wait()
    assert parent_of(child.pid) is None


def test_thread_cpu_time_is_measured_unless_gone():
    is_there, may_go = threading.Event(), threading.Event()
    idle = threading.Thread(target=lambda: (is_there.set(), may_go.wait()))
    idle.start()
    is_there.wait()
    before_s = cpu_seconds_of(threading.get_native_id())
    deadline_s = time.thread_time() + 0.1
    while time.thread_time() < deadline_s:
        continue
    assert 0.05 < cpu_seconds_of(threading.get_native_id()) - before_s < 1.0
    assert cpu_seconds_of(idle.native_id) < 0.05
    may_go.set()
    idle.join()
    assert cpu_seconds_of(2**22 + 1) is None


def test_unreadable_process_is_not_assumed_dead(monkeypatch: pytest.MonkeyPatch):
    """With too many files open /proc cannot be read, and every other rank would look dead."""

    def fail(*arguments: object, **options: object) -> str:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(process.Path, "read_text", fail)
    with pytest.raises(OSError, match=r"^\[Errno 24\]"):
        start_time_of(os.getpid())
    assert cpu_seconds_of(os.getpid()) is None


def test_child_process_reveals_variables_and_state():
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, env={"OURS": "a=b", "X": ""})
    try:
        # Until it is another program than this one.
        wait_until(lambda: variables_of(child.pid) == {"OURS": "a=b", "X": ""})
        assert child.pid in children_of(os.getpid())
        assert children_of(child.pid) == []
        wait_until(lambda: state_of(child.pid) == "S")
        child.send_signal(signal.SIGSTOP)
        wait_until(lambda: state_of(child.pid) == "T")
        child.send_signal(signal.SIGCONT)
    finally:
        child.communicate(b"\n")
    assert (state_of(child.pid), variables_of(child.pid)) == (None, None)


def test_node_name_is_empty_when_unreadable(monkeypatch: pytest.MonkeyPatch):
    """Two nodes without a name are not taken for one."""

    def fail(*arguments: object) -> str:
        raise OSError(13, "Permission denied")

    monkeypatch.setattr(process.os, "readlink", fail)
    assert node_name() == ""


@pytest.mark.parametrize(
    ("limit", "values", "message"),
    [
        (resource.RLIMIT_STACK, (256 * 1024, 8 << 20), "RLIMIT_STACK is 256 KiB, and a rank needs 1024 KiB"),
        (resource.RLIMIT_NOFILE, (64, 128), "RLIMIT_NOFILE is 128 open files, and a rank needs 256"),
    ],
)
def test_resource_limits_too_small_are_rejected(
    monkeypatch: pytest.MonkeyPatch, limit: int, values: tuple[int, int], message: str
):
    limits = {resource.RLIMIT_STACK: (8 << 20, resource.RLIM_INFINITY), resource.RLIMIT_NOFILE: (1024, 4096)}
    changed: list[tuple[int, tuple[int, int]]] = []
    monkeypatch.setattr(process.resource, "getrlimit", lambda which: limits[which])
    monkeypatch.setattr(process.resource, "setrlimit", lambda which, given: changed.append((which, given)))
    process.check_limits()
    assert changed == []
    limits[limit] = values
    with pytest.raises(ConfigError, match=re.escape(message)):
        process.check_limits()
    limits[limit] = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    process.check_limits()


def test_open_file_limit_is_raised_within_hard_limit(monkeypatch: pytest.MonkeyPatch):
    changed: list[tuple[int, tuple[int, int]]] = []
    limits = {resource.RLIMIT_STACK: (8 << 20, 8 << 20), resource.RLIMIT_NOFILE: (64, 4096)}
    monkeypatch.setattr(process.resource, "getrlimit", lambda which: limits[which])
    monkeypatch.setattr(process.resource, "setrlimit", lambda which, given: changed.append((which, given)))
    process.check_limits()
    assert changed == [(resource.RLIMIT_NOFILE, (256, 4096))]


@pytest.mark.parametrize("limits", ["ulimit -s 256", "ulimit -n 64"])
def test_command_reports_low_limits_instead_of_crashing(limits: str):
    command = f"{limits}; exec {sys.executable} {Path(__file__).resolve().parents[2] / 'launch.py'} --version"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("error: RLIMIT_")
    assert done.stderr.count("\n") == 1
