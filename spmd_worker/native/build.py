"""Compiles the C++ of this folder at first use and caches the library on disk.

The library goes to `$XDG_CACHE_HOME/spmd-worker/kernels/<hash>/`, where the hash covers sources, flags, compiler and
CPU; for a user without a home directory it goes to a folder of the temporary directory. Ranks that start together wait
for the first to finish. A library that another user can write could run anything, so a folder or file that other users
own or can write is not used: then the library is built in a private folder for this process.
"""

import contextlib
import fcntl
import hashlib
import logging
import os
import platform
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from spmd_worker.base.files import rename_durably, sync_stream

logger = logging.getLogger(__name__)

LIBRARY_NAME = "libspmd_kernels.so"
_SOURCE_FOLDER = Path(__file__).parent
_LOCK_TIMEOUT_S = 120.0
_COMPILE_TIMEOUT_S = 300.0
_MAX_COMPILERS = 4
"""That run at once: each takes up to 0.4 GB, and the longest source takes a quarter of the time."""
_NUM_LAST_LINES, _MAX_LINE = 12, 300
"""Lines of a failed compiler's output that are reported, and characters of each."""

# Multiplications and additions are fused only explicitly, and never reordered: the optimizer must not change bits.
_FLAGS = (
    *("-std=c++17", "-O3", "-fPIC", "-pthread"),
    *("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"),
)
_OPTIONAL_FLAGS = (("-march={architecture}",), ())


@dataclass(frozen=True, slots=True)
class Built:
    """A library on disk. `is_private`: in a folder of this process, to be removed after loading."""

    path: Path
    is_private: bool


def build(architecture: str = "native", cache_folder: Path | None = None) -> Built | str:
    """The library, compiled if it is not cached; or the reason if that fails.

    `architecture` is the compiler's -march. Safe to call from several processes at once.
    """
    try:
        compilers = _compilers()
    except ValueError as error:
        return f"CXX={os.environ['CXX']!r} is not a command: {error}"
    if not compilers:
        return "no C++ compiler: neither g++ nor clang++ is in PATH, and CXX is not set"
    sources = _sources()
    reasons: list[str] = []
    for compiler in compilers:
        version = _version(compiler)
        if version is None:
            reasons.append(f"{shlex.join(compiler)} --version fails")
            continue
        key = _key(sources, (*compiler, version, architecture))
        try:
            folder = _library_folder(cache_folder, key)
        except OSError as error:
            return f"no folder to compile in: {error}"
        built = _find_or_compile(compiler, sources, architecture, folder)
        if isinstance(built, Built):
            return built
        reasons.append(built)
    return "; ".join(reasons)


def _compilers() -> list[list[str]]:
    """`$CXX` alone if set, else the compilers in PATH. Raises ValueError for unbalanced quotes."""
    named = shlex.split(os.environ.get("CXX", ""))
    if named:
        return [named]
    return [[path] for path in map(shutil.which, ("g++", "clang++")) if path is not None]


def _version(compiler: Sequence[str]) -> str | None:
    try:
        result = _run([*compiler, "--version"])
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout if result.returncode == 0 else None


def _run(command: Sequence[str], timeout_s: float = _COMPILE_TIMEOUT_S) -> "subprocess.CompletedProcess[str]":
    """Run a command with its output as text."""
    return subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=timeout_s, check=False)


def _sources() -> list[Path]:
    return sorted(path for path in _SOURCE_FOLDER.iterdir() if path.suffix in (".cpp", ".h"))


def _key(sources: Sequence[Path], parts: Sequence[str]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    texts = [*parts, *_FLAGS, repr(_OPTIONAL_FLAGS), _cpu(), *(source.name for source in sources)]
    for content in (*(text.encode() for text in texts), *(source.read_bytes() for source in sources)):
        digest.update(len(content).to_bytes(8, "little") + content)
    return digest.hexdigest()


def _cpu() -> str:
    """Inputs of -march=native: model and instruction sets of the first processor."""
    try:
        first = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").split("\n\n")[0]
    except OSError:
        return platform.processor()
    wanted = ("vendor_id", "cpu family", "model", "stepping", "flags", "Features", "CPU part", "CPU implementer")
    return "\n".join(line for line in first.splitlines() if line.partition(":")[0].strip() in wanted)


def _library_folder(cache_folder: Path | None, key: str) -> Path:
    if cache_folder is not None:
        return cache_folder / key
    base = os.environ.get("XDG_CACHE_HOME", "")
    # By the XDG specification a relative path is ignored.
    root = base if os.path.isabs(base) else os.path.expanduser("~/.cache")
    if os.path.isabs(root):
        return Path(root) / "spmd-worker" / "kernels" / key
    # A user without a home directory, as in many containers. One level deep: other users cannot replace our entries
    # directly in the temporary directory.
    return Path(tempfile.gettempdir()) / f"spmd-worker-kernels-{os.geteuid()}-{key}"


def _find_or_compile(compiler: Sequence[str], sources: Sequence[Path], architecture: str, folder: Path) -> Built | str:
    library = folder / LIBRARY_NAME
    if is_ours(folder) and is_ours(library):
        return Built(library, is_private=False)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError:
        return _compile_privately(compiler, sources, architecture)
    if not is_ours(folder) or not os.access(folder, os.W_OK):
        return _compile_privately(compiler, sources, architecture)
    try:
        with _locked(folder / "lock"):
            if is_ours(library):
                return Built(library, is_private=False)
            return _compile(compiler, sources, architecture, library, is_private=False)
    except OSError:  # disk full, no locks on this file system, or the other process does not finish
        return _compile_privately(compiler, sources, architecture)


def is_ours(path: Path) -> bool:
    """Whether a path is a file or folder, not a link, that we own and other users cannot write."""
    try:
        status = path.lstat()
    except OSError:
        return False
    is_plain = stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)
    return is_plain and status.st_uid == os.geteuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Holds a lock file, which the system releases when the process exits. Raises TimeoutError, an OSError."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        deadline = time.monotonic() + _LOCK_TIMEOUT_S
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{path} was held by another process for {_LOCK_TIMEOUT_S} s") from None
                time.sleep(0.02)
        yield
    finally:
        os.close(descriptor)


def _compile_privately(compiler: Sequence[str], sources: Sequence[Path], architecture: str) -> Built | str:
    try:
        folder = Path(tempfile.mkdtemp(prefix="spmd-worker-kernels-"))  # mode 0700
    except OSError as error:
        return f"no folder to compile in: {error}"
    try:
        built = _compile(compiler, sources, architecture, folder / LIBRARY_NAME, is_private=True)
    except OSError as error:
        built = f"the compiled kernels cannot be written to {folder}: {error}"
    if isinstance(built, str):
        shutil.rmtree(folder, ignore_errors=True)
    return built


def _compile(
    compiler: Sequence[str], sources: Sequence[Path], architecture: str, library: Path, is_private: bool
) -> Built | str:
    """Compile under another name and rename: a reader sees the complete library or none. Raises OSError if it cannot
    be written.
    """
    descriptor, name = tempfile.mkstemp(prefix=".building-", suffix=".so", dir=library.parent)
    os.close(descriptor)
    unfinished = Path(name)
    # A person who waits sees it also where the program shows no logs of lower levels.
    level = logging.WARNING if sys.stderr is not None and sys.stderr.isatty() else logging.INFO
    logger.log(level, "compiling the CPU's kernels with %s, once: about half a minute", compiler[0])
    try:
        reason = _run_compiler(compiler, sources, architecture, unfinished)
        if reason is not None:
            return reason
        unfinished.chmod(0o700)
        with open(unfinished, "rb") as stream:
            # A crash of the machine must not leave an empty library.
            sync_stream(stream)
        rename_durably(unfinished, library)
        return Built(library, is_private)
    finally:
        unfinished.unlink(missing_ok=True)


def _run_compiler(compiler: Sequence[str], sources: Sequence[Path], architecture: str, output: Path) -> str | None:
    """None, or the reason of the failure. Optional flags (native code) are tried first, then left out."""
    message = ""
    for optional in _OPTIONAL_FLAGS:
        command = [*compiler, *_FLAGS, *(flag.format(architecture=architecture) for flag in optional)]
        try:
            failure = _compile_and_link(command, [source for source in sources if source.suffix == ".cpp"], output)
        except subprocess.TimeoutExpired as error:
            return f"{shlex.join(compiler)}: {error}"
        if failure is None:
            return None
        # Of the last attempt, without optional flags.
        message = failure.strip() or message
    return f"{shlex.join(compiler)} fails: {_last_lines(message) or 'no message'}"


def _compile_and_link(command: Sequence[str], sources: Sequence[Path], output: Path) -> str | None:
    """None, or what the compiler wrote when it failed. Each source has a compiler of its own, several at a time."""
    deadline_s = time.monotonic() + _COMPILE_TIMEOUT_S

    def run(*arguments: str | Path) -> str | None:
        try:
            result = _run([*command, *map(str, arguments)], max(deadline_s - time.monotonic(), 0.0))
        except OSError as error:
            return str(error)
        return None if result.returncode == 0 else result.stderr

    with tempfile.TemporaryDirectory(prefix=".objects-", dir=output.parent) as folder:
        objects = [Path(folder) / f"{source.stem}.o" for source in sources]
        with ThreadPoolExecutor(min(len(os.sched_getaffinity(0)), _MAX_COMPILERS)) as pool:
            failures = pool.map(lambda pair: run("-c", pair[0], "-o", pair[1]), zip(sources, objects, strict=True))
            # After the first one no other compiler is started.
            failure = next((each for each in failures if each is not None), None)
            pool.shutdown(cancel_futures=True)
        return run("-shared", *objects, "-o", output) if failure is None else failure


def _last_lines(message: str) -> str:
    """The end of a compiler's output, which has the error; warnings or a chain of includes may precede it."""
    lines = [line if len(line) <= _MAX_LINE else f"{line[:_MAX_LINE]}..." for line in message.splitlines()]
    return "\n".join((["..."] if len(lines) > _NUM_LAST_LINES else []) + lines[-_NUM_LAST_LINES:])
