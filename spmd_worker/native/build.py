"""Compiles the C++ of this folder at first use and keeps the result for the next process.

The library goes to `$XDG_CACHE_HOME/spmd-worker/kernels/<hash>/`, where the hash covers sources, flags, compiler and
CPU; for a user without a home it goes to a folder of the temporary directory. Ranks that start together wait for the
first to finish. Whoever may write a file may make us run it, so a folder or file that is not ours alone is not used:
then the library is built in a private folder for this process. Knows compilers and files; knows nothing about what is
compiled.
"""

import contextlib
import fcntl
import hashlib
import os
import platform
import shlex
import shutil
import stat
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from spmd_worker.base.files import rename_durably, sync_stream

LIBRARY_NAME = "libspmd_kernels.so"
_SOURCE_FOLDER = Path(__file__).parent
_LOCK_TIMEOUT_S = 120.0
_COMPILE_TIMEOUT_S = 300.0
_NUM_LAST_LINES, _MAX_LINE = 12, 300
"""Lines, and characters of each, that are kept of a failed compiler's output."""

# Sums and products are fused only where the source says so, and never reordered: bits must not depend on the optimizer.
_FLAGS = (
    *("-std=c++17", "-O3", "-fPIC", "-shared", "-pthread"),
    *("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"),
)
_OPTIONAL_FLAGS = (("-march={architecture}",), ())


@dataclass(frozen=True, slots=True)
class Built:
    """A library on disk. `is_private`: in a folder of this process alone, to be removed once it is loaded."""

    path: Path
    is_private: bool


def build(architecture: str = "native", cache_folder: Path | None = None) -> Built | str:
    """The library, compiled now if it is not there; or why there is none, in words.

    `architecture` is the compiler's -march. Safe to call from several processes at once.
    """
    try:
        compilers = _compilers()
    except ValueError as error:
        return f"CXX={os.environ['CXX']!r} is no command: {error}"
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
    """`$CXX` alone if set, else what is in PATH. Raises ValueError for quotes that do not end."""
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


def _run(command: Sequence[str]) -> "subprocess.CompletedProcess[str]":
    """With its output as text, whatever its bytes are."""
    return subprocess.run(
        command, capture_output=True, text=True, errors="replace", timeout=_COMPILE_TIMEOUT_S, check=False
    )


def _sources() -> list[Path]:
    return sorted(path for path in _SOURCE_FOLDER.iterdir() if path.suffix in (".cpp", ".h"))


def _key(sources: Sequence[Path], parts: Sequence[str]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    texts = [*parts, *_FLAGS, repr(_OPTIONAL_FLAGS), _cpu(), *(source.name for source in sources)]
    for content in (*(text.encode() for text in texts), *(source.read_bytes() for source in sources)):
        digest.update(len(content).to_bytes(8, "little") + content)
    return digest.hexdigest()


def _cpu() -> str:
    """What -march=native looks at: model and instruction sets of the first processor."""
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
    # The XDG specification: a relative path is to be ignored.
    root = base if os.path.isabs(base) else os.path.expanduser("~/.cache")
    if os.path.isabs(root):
        return Path(root) / "spmd-worker" / "kernels" / key
    # A user without a home, as in many containers. One level deep: of what lies directly in the temporary directory
    # nobody else can replace what is ours.
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
    except OSError:  # no space, no locks on this file system, or the other process never ends
        return _compile_privately(compiler, sources, architecture)


def is_ours(path: Path) -> bool:
    """A file or folder, not a link, that belongs to us and that nobody else may write."""
    try:
        status = path.lstat()
    except OSError:
        return False
    is_plain = stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)
    return is_plain and status.st_uid == os.geteuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Holds the lock file; the system lets go of it when a process dies. Raises TimeoutError, an OSError."""
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
    """Under another name, renamed when whole: a reader sees all of it or nothing. Raises OSError where it cannot be
    written.
    """
    descriptor, name = tempfile.mkstemp(prefix=".building-", suffix=".so", dir=library.parent)
    os.close(descriptor)
    unfinished = Path(name)
    try:
        reason = _run_compiler(compiler, sources, architecture, unfinished)
        if reason is not None:
            return reason
        unfinished.chmod(0o700)
        with open(unfinished, "rb") as stream:
            # So that a crash of the machine leaves no empty library behind.
            sync_stream(stream)
        rename_durably(unfinished, library)
        return Built(library, is_private)
    finally:
        unfinished.unlink(missing_ok=True)


def _run_compiler(compiler: Sequence[str], sources: Sequence[Path], architecture: str, output: Path) -> str | None:
    """None, or why it failed. What a compiler may lack, native code, is tried first and then done without."""
    names = [str(source) for source in sources if source.suffix == ".cpp"]
    message = ""
    for optional in _OPTIONAL_FLAGS:
        flags = [flag.format(architecture=architecture) for flag in optional]
        command = [*compiler, *_FLAGS, *flags, *names, "-o", str(output)]
        try:
            result = _run(command)
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"{shlex.join(compiler)}: {error}"
        if result.returncode == 0:
            return None
        # The last try's: nothing was optional in it.
        message = result.stderr.strip() or message
    return f"{shlex.join(compiler)} fails: {_last_lines(message) or 'no message'}"


def _last_lines(message: str) -> str:
    """The end of a compiler's output names what it stopped at; it may begin with warnings, or a chain of includes."""
    lines = [line if len(line) <= _MAX_LINE else f"{line[:_MAX_LINE]}..." for line in message.splitlines()]
    return "\n".join((["..."] if len(lines) > _NUM_LAST_LINES else []) + lines[-_NUM_LAST_LINES:])
