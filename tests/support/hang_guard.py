"""A test that hangs says where: at its limit all its threads and its ranks' are dumped, its processes end, it fails.

A guard process watches over each process that runs tests, because a test may hang in a way in which no Python runs any
more (a deadlock of the interpreter did). pytest-timeout says when; at that moment the guard

    1. has the test process dump the stacks of its threads (faulthandler's own handler: no Python is needed);
    2. has each process that the test started dump its stacks, and ends it: fork servers alone stay;
    3. has the test process fail the test with all that. The run goes on.

Where the test process does not answer, it is killed: under pytest-xdist the test fails with its name, and another
process takes the rest over.

A plugin of pytest: `-p hang_guard`. Also the guard's own program.
"""

import faulthandler
import os
import signal
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO

import pytest

FORK_SERVER = "fork_server.py"
ANSWER_S = 10.0
STACKS_S, MOST_STACKS_S = 0.5, 20.0
STACKS_SIGNAL = signal.SIGRTMIN
FAIL_SIGNAL = signal.SIGRTMIN + 1
END_OF_REPORT = "That is all that is known of it.\n"
MAX_BYTES_A_FILE = 50_000


# In the process that runs tests.


class Guarded:
    """This end of the guard: what it is told, and the report that it leaves."""

    def __init__(self) -> None:
        self.report = tempfile.NamedTemporaryFile(prefix="hang-", suffix=".txt")  # noqa: SIM115  # until the run's end
        self.stacks = tempfile.NamedTemporaryFile(prefix="stacks-")  # noqa: SIM115  # the same
        faulthandler.register(STACKS_SIGNAL, self.stacks, all_threads=True)
        self._previous = signal.signal(FAIL_SIGNAL, self._fail)
        self._test = ""
        self._guard = subprocess.Popen(
            [sys.executable, __file__, str(os.getpid()), self.report.name, self.stacks.name],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )

    def start(self, test: str, limit_s: float) -> None:
        self._test = test
        self._tell(f"{limit_s} {test}")

    def cancel(self) -> None:
        self._test = ""
        self._tell("over")

    def close(self) -> None:
        self._guard.communicate()
        faulthandler.unregister(STACKS_SIGNAL)
        signal.signal(FAIL_SIGNAL, self._previous)

    def _tell(self, line: str) -> None:
        stream: IO[bytes] = self._guard.stdin
        stream.write(line.encode() + b"\n")
        stream.flush()

    def _fail(self, number: int, frame: object) -> None:
        # A test that has ended meanwhile was failed by `report_of`, and the next one has not hung.
        if self._test and (text := self.report_of(self._test)):
            self.report.truncate(0)
            pytest.fail(text, pytrace=False)

    def report_after(self, test: str) -> str:
        """`report_of` after the test's end, when it cannot be failed from within."""
        watched, self._test = self._test, ""
        text = self.report_of(test)
        if not text:
            self._test = watched
        return text

    def report_of(self, test: str) -> str:
        """The guard's report on a test that hung; empty for others."""
        for _ in range(100):
            # Asked three times a test, and nearly always empty.
            if not os.fstat(self.report.fileno()).st_size:
                return ""
            # Not through pathlib, which tests patch.
            with open(self.report.name, errors="replace") as report:
                text = report.read()
            if not text.startswith(f"{test} has hung"):
                return ""
            if text.endswith(END_OF_REPORT):
                break
            time.sleep(0.1)
        return text


GUARDED: list[Guarded] = []
"""The guard of this process, after its first test."""


def pytest_timeout_set_timer(item, settings) -> bool:
    """pytest-timeout's hook: instead of its own timer. With a debugger at work nothing is watched."""
    if not settings.timeout:
        return True
    if not GUARDED:
        GUARDED.append(Guarded())
    GUARDED[0].start(item.nodeid, settings.timeout)
    return True


def pytest_timeout_cancel_timer(item) -> bool:
    if GUARDED:
        GUARDED[0].cancel()
    return True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """A test that ends because its ranks were ended has hung all the same, whatever it makes of their end."""
    report = yield
    text = GUARDED[0].report_after(item.nodeid) if GUARDED else ""
    if text and report.passed:
        report.outcome, report.longrepr = "failed", text
        GUARDED[0].report.truncate(0)
    return report


def pytest_unconfigure(config) -> None:
    while GUARDED:
        GUARDED.pop().close()


# In the guard.


def watch(tests: int, report: Path, stacks: Path) -> None:
    """Watch until the process that runs tests has ended."""
    import select

    pending, deadline_s, test = b"", None, ""
    while True:
        left_s = None if deadline_s is None else max(deadline_s - time.monotonic(), 0.0)
        if not select.select([0], [], [], left_s)[0]:
            deadline_s = None
            end_what_hangs(tests, test, report, stacks)
            continue
        content = os.read(0, 1 << 16)
        if not content:
            return
        *lines, pending = (pending + content).split(b"\n")
        for line in lines:
            limit_s, _, test = line.decode(errors="replace").partition(" ")
            deadline_s = None if line == b"over" else time.monotonic() + float(limit_s)


def end_what_hangs(tests: int, test: str, report: Path, stacks: Path) -> None:
    import select

    text = [f"{test} has hung: it ran into its limit of time. Where it was:", ""]
    report.write_text("\n".join(text))
    text.append(stacks_of_tests(tests, stacks))
    started = [pid for pid in descendants_of(tests) if pid != os.getpid() and not is_fork_server(pid, tests)]
    text += [f"process {pid}: {command_line(pid)}" for pid in started]
    outputs = open_outputs(started)
    # The tests stand still meanwhile: they would end the other ranks when one has ended.
    send(tests, signal.SIGSTOP)
    # One after the other: what two write at once cannot be read.
    for pid in started:
        send(pid, signal.SIGABRT)
        wait_for_end(pid)
    for output in outputs:
        text += ["", f"--- written by those whose stderr is {output.name}", read_rest(output)]
    for pid in {*started, *descendants_of(tests)}:
        if pid != os.getpid() and not is_fork_server(pid, tests):
            send(pid, signal.SIGKILL)
    report.write_text("\n".join([*text, END_OF_REPORT]), errors="replace")
    send(tests, signal.SIGCONT)
    send(tests, FAIL_SIGNAL)
    if not select.select([0], [], [], ANSWER_S)[0]:
        print(f"\n{report.read_text()}\nThe process of the test does not answer: it is killed.", file=sys.stderr)
        send(tests, signal.SIGKILL)


def wait_for_end(pid: int) -> None:
    deadline_s = time.monotonic() + MOST_STACKS_S
    while time.monotonic() < deadline_s:
        state = proc_text(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()[:1]
        if state in ([], ["Z"], ["X"]):
            return
        time.sleep(0.01)


def stacks_of_tests(tests: int, stacks: Path) -> str:
    before = stacks.stat().st_size
    send(tests, STACKS_SIGNAL)
    # Until there is more than before, and no more comes.
    size, deadline_s = before, time.monotonic() + MOST_STACKS_S
    while time.monotonic() < deadline_s:
        time.sleep(STACKS_S)
        last, size = size, stacks.stat().st_size
        if before < last == size:
            break
    return stacks.read_bytes()[before:].decode(errors="replace")


def descendants_of(ancestor: int) -> list[int]:
    """Thread ids in the order of /proc."""
    parents = {}
    for folder in Path("/proc").glob("[0-9]*"):
        fields = proc_text(folder / "stat").rpartition(")")[2].split()
        if fields and fields[0] not in "ZX":
            parents[int(folder.name)] = int(fields[1])
    found, generation = [], [ancestor]
    while generation:
        generation = [pid for pid, parent in parents.items() if parent in generation]
        found += generation
    return sorted(found)


def is_fork_server(pid: int, tests: int) -> bool:
    """A server itself, which is a child of the tests; what it forked looks alike and is a grandchild."""
    parent = proc_text(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()[1:2]
    return parent == [str(tests)] and FORK_SERVER in command_line(pid)


def open_outputs(pids: list[int]) -> list[IO[bytes]]:
    """The files, each once and at its end, to which the processes write their stderr; no pipes."""
    found: dict[tuple[int, int], IO[bytes]] = {}
    for pid in pids:
        path = Path(f"/proc/{pid}/fd/2")
        try:
            status = path.stat()
            if stat.S_ISREG(status.st_mode) and (status.st_dev, status.st_ino) not in found:
                file = found[status.st_dev, status.st_ino] = path.open("rb")
                file.seek(0, os.SEEK_END)
        except OSError:
            continue
    return list(found.values())


def read_rest(output: IO[bytes]) -> str:
    with output:
        return output.read(MAX_BYTES_A_FILE).decode(errors="replace")


def command_line(pid: int) -> str:
    return proc_text(Path(f"/proc/{pid}/cmdline")).replace("\0", " ").strip()


def proc_text(path: Path) -> str:
    """Empty where the process has ended."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def send(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


if __name__ == "__main__":
    watch(int(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]))
