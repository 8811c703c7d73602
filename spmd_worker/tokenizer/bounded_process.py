"""A small process for untrusted work, whose memory and computing time the kernel limits.

Parts of a model folder (a chat template, a tokenizer with unknown components) may compute for ever or use all memory.
That ends as one request's error, after `cpu_s` or at `memory_bytes`.
The process is started for the first request and again when it has ended, and ends with its owner, whose end of the pipe
it reads. It ignores signals for the owner's process group: a signal that ends a job must not become the error of a row.

A message is a line with two lengths, then JSON, then bytes: the value of the key `payload`, where there is one.
"""

import contextlib
import json
import os
import resource
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO, Final

PAYLOAD: Final = "payload"
_WALL_S: Final = 120.0
_WALL_FACTOR: Final = 10
"""Limits for a process that was stopped. On a busy machine seconds of computing may take as many times longer."""
_MOST_S: Final = 24 * 3600
"""Maximum of the seconds of computing: limits that a user sets beyond any file would not fit a timer."""
_MOST_BYTES: Final = 1 << 62
_ONE_THREAD: Final = {"OPENBLAS_NUM_THREADS": "1"}
"""Address space that numpy reserves for each thread would count as memory."""
_PIECE_BYTES: Final = 1 << 16
_FOR_THE_OWNER: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
"""Terminals, launchers and batch systems send these to all processes of a group: the owner decides what they mean."""


class BoundedProcessError(Exception):
    """The process answered with an error, ended, or had to be ended; the message gives the reason."""


class BoundedProcess:
    """Runs `python -m module`, which calls `serve`; `start` is the argument of its `open_`. Not shared with forked
    processes: each starts a process of its own. Threads take turns.
    """

    def __init__(self, module: str, start: Mapping[str, Any], cpu_s: int, memory_bytes: int) -> None:
        self._module = module
        limits = {"cpu_s": min(cpu_s, _MOST_S), "memory_bytes": min(memory_bytes, _MOST_BYTES)}
        self._start = {"start": start, **limits}
        self._lock = threading.Lock()
        self._children: list[_Child] = []
        # At garbage collection, or when the interpreter ends.
        weakref.finalize(self, _end_all, self._children)

    @property
    def pid(self) -> int | None:
        """Id of the running process; None without one."""
        return self._children[0].process.pid if self._children else None

    def close(self) -> None:
        """End the process; another one is started for a later request."""
        with self._lock:
            _end_all(self._children)

    def ask(self, request: bytes) -> dict[str, Any]:
        """Send a message of `pack` and wait for the answer. Raises BoundedProcessError."""
        with self._lock:
            try:
                try:
                    answer = self._running_child().ask(request)
                except _IsTooEarlyError:
                    # The next one is started after the signal.
                    _end_all(self._children)
                    answer = self._running_child().ask(request)
            except BaseException:
                # The process has ended, or is halfway through a message.
                _end_all(self._children)
                raise
            if answer.get("is_short_of_memory"):
                _end_all(self._children)
        if "error" in answer:
            raise BoundedProcessError(str(answer["error"]))
        return answer

    def _running_child(self) -> "_Child":
        if not self._children or not self._children[0].is_usable:
            _end_all(self._children)
            self._children.append(_Child(self._module, self._start))
        return self._children[0]


class _IsTooEarlyError(BoundedProcessError):
    """A signal for the owner has ended the process before it ignored signals."""


class _Child:
    """The owner's side of the process."""

    def __init__(self, module: str, start: Mapping[str, Any]) -> None:
        paths = [os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))), *sys.path]
        self._owner = os.getpid()
        self.process = subprocess.Popen(
            # Not the working directory's modules.
            [sys.executable, "-P", "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, **_ONE_THREAD, "PYTHONPATH": os.pathsep.join(path for path in paths if path)},
        )
        assert self.process.stdin is not None, "a pipe"
        assert self.process.stdout is not None, "a pipe"
        self._input, self._output = self.process.stdin, self.process.stdout
        self._cpu_s = int(start["cpu_s"])
        self._wall_s = _WALL_S + _WALL_FACTOR * self._cpu_s
        self._start = pack(start)
        self._answered = select.poll()
        self._answered.register(self._output, select.POLLIN)

    @property
    def is_usable(self) -> bool:
        return self._owner == os.getpid() and self.process.poll() is None

    def ask(self, request: bytes) -> dict[str, Any]:
        # It may have ended within a conversation too big for it, after it answered with an error.
        with contextlib.suppress(BrokenPipeError):
            self._input.write(self._start + request)
            self._input.flush()
        self._start = b""
        deadline_s = time.monotonic() + self._wall_s
        line = b""
        while not line.endswith(b"\n"):
            line += self._read(1, deadline_s)
        num_bytes, num_payload = map(int, line.split())
        content = self._read(num_bytes, deadline_s)
        return _value(content, self._read(num_payload, deadline_s))

    def end(self) -> None:
        """End it at once. A forked process leaves its parent's child alone."""
        if self._owner != os.getpid():
            return
        self.process.kill()
        self.process.wait()
        for pipe in (self._input, self._output):
            try:
                pipe.close()
            except BrokenPipeError:
                continue

    def _read(self, num_bytes: int, deadline_s: float) -> bytes:
        content = bytearray()
        while len(content) < num_bytes:
            left_s = max(deadline_s - time.monotonic(), 0.0)
            if not self._answered.poll(left_s * 1000):
                raise BoundedProcessError(f"it did not end within {self._wall_s:g} s")
            piece = os.read(self._output.fileno(), min(num_bytes - len(content), _PIECE_BYTES))
            if not piece:
                raise self._ended(self.process.wait())
            content += piece
        return bytes(content)

    def _ended(self, exit_code: int) -> BoundedProcessError:
        if -exit_code in _FOR_THE_OWNER:
            return _IsTooEarlyError(f"its process was ended by {signal.Signals(-exit_code).name}")
        if exit_code in (-signal.SIGPROF, -signal.SIGXCPU):
            return BoundedProcessError(f"it took more than {self._cpu_s} s of computing")
        if exit_code < 0:
            name = signal.Signals(-exit_code).name
            return BoundedProcessError(f"its process was ended by {name}, for example for lack of memory")
        return BoundedProcessError(
            f"its process could not be started (exit code {exit_code}): {sys.executable} must be a Python that has "
            f"this package and its requirements"
        )


def _end_all(children: list[_Child]) -> None:
    while children:
        children.pop().end()


# In the process.


def serve(open_: Callable[[Mapping[str, Any]], Callable[[Mapping[str, Any]], Mapping[str, Any]]]) -> int:
    """Open the start message, and answer requests until there are no more. An answer has the key `error` for a request
    that cannot be answered; `open_` and its result may raise MemoryError. Returns the exit code.
    """
    for number in _FOR_THE_OWNER:
        signal.signal(number, signal.SIG_IGN)
    # An owner may ignore it, and a started process ignores what its owner does.
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    start = _unpack(requests)
    if start is None:
        return 0
    most = int(start["memory_bytes"])
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    _allow_computing(int(start["cpu_s"]))
    answer_of = None
    while True:
        try:
            request = _unpack(requests)
            if request is None:
                return 0
            answer_of = answer_of or open_(start["start"])
            answer = pack(answer_of(request))
        except MemoryError:
            # The request itself is too big. The rest of the message is not read.
            text = f"it takes more than {most >> 20} MiB of memory"
            answers.write(pack({"error": text, "is_short_of_memory": True}))
            answers.flush()
            return 0
        answers.write(answer)
        answers.flush()
        _allow_computing(int(start["cpu_s"]))


def _allow_computing(cpu_s: int) -> None:
    """Allow `cpu_s` seconds of computing from now on: then a timer ends the process by SIGPROF.

    Behind it stands the kernel's limit, which ends it by SIGXCPU: it counts whole seconds since the process began.
    """
    signal.setitimer(signal.ITIMER_PROF, cpu_s)
    used = resource.getrusage(resource.RUSAGE_SELF)
    _, most = resource.getrlimit(resource.RLIMIT_CPU)
    limit = int(used.ru_utime + used.ru_stime) + cpu_s + 1
    if most != resource.RLIM_INFINITY:
        limit = min(limit, most)
    resource.setrlimit(resource.RLIMIT_CPU, (limit, most))


# On both sides.


def pack(value: Mapping[str, Any]) -> bytes:
    """A message as bytes; `payload` may be bytes. Raises TypeError for other values that are not plain JSON."""
    payload = value.get(PAYLOAD, b"")
    plain = {key: each for key, each in value.items() if key != PAYLOAD}
    content = json.dumps(plain, default=_plain_mapping).encode("ascii")
    return b"%d %d\n%s%s" % (len(content), len(payload), content, payload)


def _plain_mapping(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"a conversation holds plain JSON values, not {type(value).__name__}")


def _unpack(stream: BinaryIO) -> dict[str, Any] | None:
    """The next message; None at the end of the stream."""
    line = stream.readline()
    if not line:
        return None
    num_bytes, num_payload = map(int, line.split())
    content = stream.read(num_bytes)
    return _value(content, stream.read(num_payload)) if content else None


def _value(content: bytes, payload: bytes) -> dict[str, Any]:
    value = dict(json.loads(content))
    return {**value, PAYLOAD: payload} if payload else value
