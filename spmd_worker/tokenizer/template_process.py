"""Renders chat templates in a small process of its own, whose memory and computing time the kernel bounds.

A template comes with a model folder and is not trusted. The bounds of `chat_template.py` end the mistakes and say what
they are; what gets past them ends here, as one row's error, after `CPU_S` or with `MEMORY_BYTES` at most, whatever it
does. The process imports Jinja and nothing else of size, is started for the first conversation and again when it has
ended, and ends with its owner, whose end of the pipe it reads. A signal for the owner's whole group is not for it: what
ends a job must not become the error of a row.

A message is a line of JSON with the length of a second one, which follows.
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
from collections.abc import Mapping, Sequence
from typing import Any, BinaryIO, Final

from spmd_worker.errors import ChatTemplateError
from spmd_worker.tokenizer.chat_template import ChatTemplate, explained

CPU_S: Final = 5
MEMORY_BYTES: Final = 512 * 1024 * 1024
LARGE_BYTES: Final = 64 * 1024
"""Of a conversation that small ones do not wait for."""
_WALL_S: Final = 120.0
"""For a machine so busy that five seconds of computing take as long, and a process that was stopped."""
_PIECE_BYTES: Final = 1 << 16
_FOR_THE_OWNER: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
"""Terminals, launchers and batch systems send these to all processes of a group: the owner decides what they mean."""


class IsolatedTemplate:
    """One template; `variables` are the special tokens by name (`bos_token`, ...). Not shared with forked processes:
    each starts a process of its own. Several threads take turns, but for large conversations, which take long: those
    have a process of their own, for which small ones do not wait.
    """

    def __init__(self, source: str, variables: Mapping[str, str]) -> None:
        self.source = source
        self._variables = dict(variables)
        self._lock = threading.Lock()
        self._renderers: list[_Renderer] = []
        self._for_large: IsolatedTemplate | None = None
        # When the template is forgotten, or the interpreter ends.
        weakref.finalize(self, _end_all, self._renderers)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
        content_format: str | None = "auto",
    ) -> str:
        """As `ChatTemplate.render`. Raises ChatTemplateError."""
        given = {
            "messages": messages,
            "add_generation_prompt": add_generation_prompt,
            "variables": variables,
            "content_format": content_format,
        }
        try:
            request = _pack(given)
        except (TypeError, ValueError, RecursionError) as error:
            raise ChatTemplateError(explained(error)) from None
        taken = self
        if len(request) > LARGE_BYTES:
            self._for_large = taken = self._for_large or IsolatedTemplate(self.source, self._variables)
        with taken._lock:
            return taken._ask(request)

    def _ask(self, request: bytes) -> str:
        try:
            try:
                answer = self._renderer_here().ask(request)
            except _IsTooEarlyError:
                # The next one is started behind the signal.
                _end_all(self._renderers)
                answer = self._renderer_here().ask(request)
        except _HasEndedError as ended:
            _end_all(self._renderers)
            raise ChatTemplateError(f"chat template: {ended}") from None
        except BaseException:
            # Halfway through a message.
            _end_all(self._renderers)
            raise
        if "text" in answer:
            return str(answer["text"])
        if answer["is_short_of_memory"]:
            _end_all(self._renderers)
        raise ChatTemplateError(str(answer["error"]))

    def _renderer_here(self) -> "_Renderer":
        if not self._renderers or not self._renderers[0].is_usable:
            _end_all(self._renderers)
            self._renderers.append(_Renderer(self.source, self._variables))
        return self._renderers[0]


class _HasEndedError(Exception):
    """The process has ended, or had to be; the message says why."""


class _IsTooEarlyError(_HasEndedError):
    """A signal for the owner has ended the process, which did not look away yet."""


class _Renderer:
    """The process, from its owner's side."""

    def __init__(self, source: str, variables: Mapping[str, str]) -> None:
        paths = [os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))), *sys.path]
        self._owner = os.getpid()
        self._process = subprocess.Popen(
            # Not the working directory's modules.
            [sys.executable, "-P", "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path)},
        )
        assert self._process.stdin is not None, "a pipe"
        assert self._process.stdout is not None, "a pipe"
        self._input, self._output = self._process.stdin, self._process.stdout
        limits = {"cpu_s": CPU_S, "memory_bytes": MEMORY_BYTES}
        self._start = _pack({"source": source, "variables": variables, **limits})
        self._answered = select.poll()
        self._answered.register(self._output, select.POLLIN)

    @property
    def is_usable(self) -> bool:
        """Whether it runs, and is this process's."""
        return self._owner == os.getpid() and self._process.poll() is None

    def ask(self, request: bytes) -> dict[str, Any]:
        """Send it and wait. Raises _HasEndedError."""
        # It may have ended in the middle of a conversation that is too large for it, and have said so before.
        with contextlib.suppress(BrokenPipeError):
            self._input.write(self._start + request)
            self._input.flush()
        self._start = b""
        deadline_s = time.monotonic() + _WALL_S
        length = int(self._read_until(b"\n", deadline_s))
        return dict(json.loads(self._read(length, deadline_s)))

    def end(self) -> None:
        """At once. A forked process leaves its parent's alone."""
        if self._owner != os.getpid():
            return
        self._process.kill()
        self._process.wait()
        for pipe in (self._input, self._output):
            try:
                pipe.close()
            except BrokenPipeError:
                continue

    def _read_until(self, end: bytes, deadline_s: float) -> bytes:
        content = b""
        while not content.endswith(end):
            content += self._read(1, deadline_s)
        return content

    def _read(self, num_bytes: int, deadline_s: float) -> bytes:
        content = bytearray()
        while len(content) < num_bytes:
            left_s = max(deadline_s - time.monotonic(), 0.0)
            if not self._answered.poll(left_s * 1000):
                raise _HasEndedError(f"it has not ended for {_WALL_S:g} s")
            piece = os.read(self._output.fileno(), min(num_bytes - len(content), _PIECE_BYTES))
            if not piece:
                raise self._ended()
            content += piece
        return bytes(content)

    def _ended(self) -> _HasEndedError:
        is_early = -self._process.wait() in _FOR_THE_OWNER
        return (_IsTooEarlyError if is_early else _HasEndedError)(self._ending())

    def _ending(self) -> str:
        code = self._process.wait()
        if code == -signal.SIGXCPU:
            return f"it took more than {CPU_S} s of computing"
        if code < 0:
            return f"it ended its process by {signal.Signals(-code).name}, as what takes more memory than there is does"
        return f"its process could not be started (exit code {code}): {sys.executable} must be a Python with jinja2"


def _end_all(renderers: list[_Renderer]) -> None:
    while renderers:
        renderers.pop().end()


# In the process.


def main() -> int:
    """Until there are no more requests. Returns the exit code."""
    for number in _FOR_THE_OWNER:
        signal.signal(number, signal.SIG_IGN)
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    start = _unpack(requests)
    if start is None:
        return 0
    template = ChatTemplate(start["source"], start["variables"])
    most = int(start["memory_bytes"])
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    while True:
        _allow_computing(int(start["cpu_s"]))
        try:
            request = _unpack(requests)
            if request is None:
                return 0
            answer = _answer(template, request)
        except MemoryError:
            # The conversation itself is too large. What may be left of the message is not read.
            answers.write(_short_of_memory())
            answers.flush()
            return 0
        answers.write(answer)
        answers.flush()


def _answer(template: ChatTemplate, request: Mapping[str, Any]) -> bytes:
    try:
        return _pack({"text": template.render(**request)})
    except ChatTemplateError as error:
        if not isinstance(error.__cause__, MemoryError):
            return _pack({"error": str(error), "is_short_of_memory": False})
    except MemoryError:
        # Where the answer is put together.
        pass
    return _short_of_memory()


def _short_of_memory() -> bytes:
    text = f"chat template: it takes more than {MEMORY_BYTES >> 20} MiB of memory"
    return _pack({"error": text, "is_short_of_memory": True})


def _allow_computing(cpu_s: int) -> None:
    """So much from now on: the kernel counts since the process began, and ends it by SIGXCPU."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    _, most = resource.getrlimit(resource.RLIMIT_CPU)
    limit = int(used.ru_utime + used.ru_stime) + cpu_s + 1
    if most != resource.RLIM_INFINITY:
        limit = min(limit, most)
    resource.setrlimit(resource.RLIMIT_CPU, (limit, most))


# On both sides.


def _pack(value: Mapping[str, Any]) -> bytes:
    content = json.dumps(value, default=_refuse).encode("ascii")
    return b"%d\n%s" % (len(content), content)


def _refuse(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"a conversation holds plain JSON values, not {type(value).__name__}")


def _unpack(stream: BinaryIO) -> dict[str, Any] | None:
    """The next message; None at the end."""
    length = stream.readline()
    content = stream.read(int(length)) if length else b""
    return dict(json.loads(content)) if content else None


if __name__ == "__main__":
    sys.exit(main())
