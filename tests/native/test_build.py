"""Building at first use: once for all processes, safely, and with a reason in words when it cannot be done.

A shell script stands for the compiler where only its behaviour matters; it counts in a file how often it was given the
first source.
"""

import errno
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import NoReturn

import pytest

from spmd_worker.native import build as build_module
from spmd_worker.native.build import LIBRARY_NAME, Built, build, is_ours
from spmd_worker.native.library import NativeLibrary, load

COMPILER = """#!/bin/sh
case "$*" in *--version*) echo "{version}"; exit 0;; esac
case "$*" in *" -c "*adapters.cpp*) echo called >> {log};; esac
{action}
"""
COMPILE = 'while [ "$1" != -o ]; do shift; done; echo library > "$2"'
SLOW_COMPILE = f'case "$*" in *-shared*) sleep 0.3;; esac; {COMPILE}'


@pytest.fixture
def compiler(tmp_path, monkeypatch):
    """Installs a stand-in as CXX and returns a function that says how often it was called. For two of the sources."""

    def install(action: str = COMPILE, version: str = "stand-in 1"):
        script, log = tmp_path / "compiler", tmp_path / "calls"
        script.write_text(COMPILER.format(version=version, log=log, action=action))
        script.chmod(0o755)
        monkeypatch.setenv("CXX", str(script))
        first_two = [path for path in build_module._sources() if path.suffix == ".cpp"][:2]
        monkeypatch.setattr(build_module, "_sources", lambda: first_two)
        return lambda: len(log.read_text().split()) if log.exists() else 0

    return install


def built_at(result) -> Path:
    assert isinstance(result, Built), result
    return result.path


def test_a_library_is_compiled_once_and_found_afterwards(compiler, tmp_path):
    num_calls = compiler()
    first = build(cache_folder=tmp_path / "cache")
    assert first == build(cache_folder=tmp_path / "cache")
    assert num_calls() == 1
    path = built_at(first)
    assert path.read_text() == "library\n"
    assert path.parent.parent == tmp_path / "cache"
    assert sorted(entry.name for entry in path.parent.iterdir()) == [LIBRARY_NAME, "lock"]
    assert path.parent.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("is_terminal", [True, False])
def test_compiling_is_announced_once_on_a_terminal(compiler, tmp_path, monkeypatch, caplog, is_terminal: bool):
    """The first script of a new user seemed to hang."""
    compiler()
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal, raising=False)
    for _ in range(2):
        build(cache_folder=tmp_path / "cache")
    assert [record.levelname for record in caplog.records] == ["WARNING"] * is_terminal


def test_another_compiler_or_architecture_has_another_library(compiler, tmp_path):
    compiler()
    first = built_at(build(cache_folder=tmp_path))
    compiler(version="stand-in 2")
    second = built_at(build(cache_folder=tmp_path))
    third = built_at(build("x86-64-v3", cache_folder=tmp_path))
    assert len({first, second, third}) == 3


def test_processes_that_build_at_once_compile_once(compiler, tmp_path):
    num_calls = compiler(SLOW_COMPILE)
    program = (
        "import sys; from pathlib import Path; from spmd_worker.native.build import build;"
        "print(build(cache_folder=Path(sys.argv[1])).path)"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "cache")]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    paths = {process.communicate(timeout=240)[0] for process in processes}
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert len(paths) == 1
    assert num_calls() == 1


def test_without_the_lock_all_of_them_would_compile(compiler, tmp_path, monkeypatch):
    """Negative control, in threads: locks of one process exclude each other as those of several do."""
    for is_locked in (True, False):
        # Without the lock each compilation takes until all three have begun.
        all_compile = f"for i in $(seq 2400); do [ $(wc -l < {tmp_path}/calls) -ge 4 ] && break; sleep 0.05; done; "
        num_calls = compiler(SLOW_COMPILE if is_locked else all_compile + COMPILE)
        before = num_calls()
        if not is_locked:
            monkeypatch.setattr(build_module.fcntl, "flock", lambda descriptor, operation: None)
        cache = tmp_path / f"cache-{is_locked}"
        threads = [threading.Thread(target=build, kwargs={"cache_folder": cache}) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert num_calls() - before == (1 if is_locked else 3)


def test_who_waits_too_long_builds_in_private(compiler, tmp_path, monkeypatch):
    compiler()
    monkeypatch.setattr(build_module, "_LOCK_TIMEOUT_S", 0.05)
    folder = built_at(build(cache_folder=tmp_path)).parent
    (folder / LIBRARY_NAME).unlink()
    with build_module._locked(folder / "lock"):
        result = build(cache_folder=tmp_path)
    assert isinstance(result, Built)
    assert result.is_private
    assert result.path.parent.stat().st_mode & 0o777 == 0o700
    assert not (folder / LIBRARY_NAME).exists()
    load(result)
    assert not result.path.parent.exists()


def test_unwritable_cache_is_skipped(compiler, tmp_path):
    compiler()
    (tmp_path / "file").write_text("not a folder")
    result = build(cache_folder=tmp_path / "file" / "cache")
    assert isinstance(result, Built)
    assert result.is_private
    load(result)


def test_no_space_for_library_is_a_reason(compiler, tmp_path, monkeypatch):
    """Neither in the cache nor in private, though a folder can be made."""
    compiler()
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)

    def full(stream: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(build_module, "sync_stream", full)
    reason = build(cache_folder=tmp_path / "cache")
    assert "No space left on device" in str(reason)
    assert isinstance(reason, str)
    assert not list(tmp_path.glob("spmd-worker-kernels-*"))
    assert not list(tmp_path.rglob("*.so"))


def test_folder_writable_by_others_is_not_used(compiler, tmp_path):
    compiler()
    folder = built_at(build(cache_folder=tmp_path)).parent
    folder.chmod(0o777)
    result = build(cache_folder=tmp_path)
    assert isinstance(result, Built)
    assert result.is_private
    load(result)


def test_link_instead_of_library_is_replaced(compiler, tmp_path):
    num_calls = compiler()
    path = built_at(build(cache_folder=tmp_path))
    path.unlink()
    (tmp_path / "elsewhere").write_text("planted")
    path.symlink_to(tmp_path / "elsewhere")
    assert not is_ours(path)
    assert built_at(build(cache_folder=tmp_path)) == path
    assert num_calls() == 2
    assert not path.is_symlink()
    assert (tmp_path / "elsewhere").read_text() == "planted"


@pytest.mark.finding(number="D17")
def test_failed_compile_says_its_last_lines(compiler, tmp_path):
    """The first 500 characters were of warnings, and of the way to the file."""
    said = 'for i in $(seq 200); do echo "warning: number $i of many that are no reason" >&2; done; '
    said += "echo 'kernels.cpp:7: fatal error: omp.h: No such file or directory' >&2; "
    said += "head -c 5000 /dev/zero | tr '\\0' x >&2; echo >&2; echo 'compilation terminated.' >&2; exit 1"
    compiler(action=said)
    reason = build(cache_folder=tmp_path / "cache")
    assert isinstance(reason, str)
    assert "fatal error: omp.h: No such file or directory" in reason
    assert reason.splitlines()[-1] == "compilation terminated."
    assert "number 1 of many" not in reason
    assert len(reason) < 2000


def test_failing_compiler_is_reported_with_its_output(compiler, tmp_path):
    num_calls = compiler(action="echo 'error: no such thing' >&2; exit 1")
    reason = build(cache_folder=tmp_path / "cache")
    assert isinstance(reason, str)
    assert "compiler fails: error: no such thing" in reason
    assert num_calls() == 2  # with everything, without native code
    assert not list((tmp_path / "cache").rglob("*.so"))


def test_compiler_without_march_native_is_used(compiler, tmp_path):
    compiler(action=f'case "$*" in *-march=*) exit 1;; esac; {COMPILE}')
    assert built_at(build(cache_folder=tmp_path)).exists()


def test_compiler_that_does_not_start_is_reported(tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", str(tmp_path / "nothing"))
    assert "--version fails" in str(build(cache_folder=tmp_path))


def test_unbalanced_quotes_in_cxx_are_reported(tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", "g++ '-O2")
    reason = str(build(cache_folder=tmp_path))
    assert "CXX" in reason
    assert "g++ '-O2" in reason
    assert "quotation" in reason


def test_compiler_output_with_other_bytes_is_read(compiler, tmp_path):
    """Messages of a compiler in Latin-1, where this process takes all text for UTF-8."""
    compiler(action="printf 'error: Fehler f\\374r dich' >&2; exit 1", version="stand-in $(printf '\\374') 1")
    reason = str(build(cache_folder=tmp_path / "cache"))
    assert "compiler fails: error: Fehler f\ufffdr dich" in reason


def test_no_compiler_at_all_is_a_reason(tmp_path, monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "neither g++ nor clang++" in str(build(cache_folder=tmp_path))


def test_file_that_is_not_a_library_is_reported(compiler, tmp_path):
    compiler()
    result = build(cache_folder=tmp_path)
    assert isinstance(result, Built)
    assert "do not load" in str(load(result))


def test_the_cache_is_where_the_user_says(compiler, tmp_path, monkeypatch):
    compiler()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "mine"))
    assert built_at(build()).is_relative_to(tmp_path / "mine" / "spmd-worker" / "kernels")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative/is/ignored")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert built_at(build()).is_relative_to(tmp_path / "home" / ".cache")


@pytest.fixture
def homeless(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container whose user has no entry in the password file and no HOME."""

    def nobody(_: object) -> NoReturn:
        raise KeyError("getpwuid(): uid not found")

    for key in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(key, raising=False)
    monkeypatch.setattr("pwd.getpwuid", nobody)


def test_library_goes_to_temporary_directory_without_home(compiler, homeless, tmp_path, monkeypatch):
    compiler()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    first = build()
    folder = built_at(first).parent
    assert folder.parent == tmp_path / "temporary"
    assert folder.stat().st_mode & 0o777 == 0o700
    assert isinstance(first, Built)
    assert not first.is_private, "the next process finds it"
    assert build() == first
    assert not list((tmp_path / "here").iterdir()), "no folder of the name ~"
    # Negative control: what others may write is not used.
    folder.chmod(0o777)
    second = build()
    assert isinstance(second, Built)
    assert second.is_private
    shutil.rmtree(second.path.parent)


def test_missing_folder_is_a_reason_without_traceback(compiler, homeless, monkeypatch):
    """A read-only root: not even a temporary directory."""
    compiler()

    def nowhere() -> NoReturn:
        raise FileNotFoundError(2, "No usable temporary directory found in ['/tmp']")

    monkeypatch.setattr("tempfile.gettempdir", nowhere)
    assert str(build()) == "no folder to compile in: [Errno 2] No usable temporary directory found in ['/tmp']"


def check_loads_from_a_private_folder(result) -> None:
    assert isinstance(result, Built)
    assert result.is_private
    library = load(result)
    assert isinstance(library, NativeLibrary)
    assert "attend_bfloat16" in library.functions
    assert not os.path.exists(result.path)


def test_a_real_library_loads_from_a_private_folder(compiler, tmp_path):
    """That the tests use is compiled once; the stand-in copies it."""
    compiler(action=f'while [ "$1" != -o ]; do shift; done; cp {built_at(build())} "$2"')
    (tmp_path / "file").write_text("not a folder")
    check_loads_from_a_private_folder(build(cache_folder=tmp_path / "file"))


@pytest.mark.stress
def test_private_library_builds_and_loads(tmp_path):
    (tmp_path / "file").write_text("not a folder")
    check_loads_from_a_private_folder(build(cache_folder=tmp_path / "file"))
