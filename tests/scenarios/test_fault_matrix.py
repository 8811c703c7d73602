"""Faults of one rank at any moment: every rank ends within seconds, as failed, and the terminal names the cause.

Under torchrun, and on forked ranks. In the stress tier SPMD_WORKER_FAULT_REPEATS sets the number of runs of each cell,
each at another moment, the first with fresh interpreters; it ends with the figures.
"""

import contextlib
import json
import os
import random
import re
import secrets
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import ranks
from faults import HANG, LOOP, SURE_S, heard_file
from fork_server import ForkedProcess, fork_server
from shared_names import living_pids, shared_names
from stress_seed import SEED
from waiting import wait_until

SCRIPT = ranks.SUPPORT / "faults.py"
MODEL = ranks.REPOSITORY / "scripts" / "demo" / "model"
REPEATS = int(os.environ.get("SPMD_WORKER_FAULT_REPEATS", "10"))
TIMEOUT_S = 5.0
LONG_S = 600.0
"""The timeout where nobody looks at the time: a rank that is slow is not taken for a silent one."""
MAX_S = 10.0
LIMIT_S = 240.0
HEADING = "rank status at the last heartbeats:"
SEEN = r"(last seen in step \d+, phase [\w ]+, \d+\.\d s ago|no heartbeat since the start)"

WORDS = {
    "SIGKILL": rf"rank {{rank}} is (gone|silent): {SEEN}",
    "SIGSTOP": rf"rank {{rank}} is silent: {SEEN}",
    "SIGTERM": r"rank {rank} received SIGTERM from outside the job",
    "exception in forward": r"rank {rank} raised ValueError at step \d+: planted",
    "exception while loading": r"rank {rank} raised (ValueError|KeyError) while loading the model: '?planted'?",
    "exit in the sampler": rf"rank {{rank}} is gone: {SEEN}",
    "full disk": r"rank 0 raised OSError at step \d+: (.*: )?No space left on device: finished rows are kept",
    HANG: r"rank {rank} is stuck: step \d+, phase execute, for \d+\.\d s, at running_worker.py",
    LOOP: r"rank {rank} is busy while others waited for too long: step \d+, phase execute, for ",
}
"""By fault: how the terminal names the culprit."""

SILENT = ("SIGSTOP", HANG, LOOP)
"""Faults that are none until the timeout."""

ONLY_STRESS = ("SIGKILL", "SIGTERM", "exception while loading", "exit in the sampler", HANG, LOOP)
"""Faults that the gate leaves out here: a stopped rank is waited for as one that hangs, one that fails while loading is
in ranks/test_int8_on_ranks.py, and one killed under torchrun ends as one that is asked to, or exits.
"""
ALL = [
    pytest.param(fault, int(fault != "full disk"), marks=getattr(pytest.mark, tier))
    for fault in WORDS
    for tier in ("stress" if fault in ONLY_STRESS else "matrix",)
]
"""Faults, and which of two ranks has them."""
FIGURES: dict[tuple[str, int], list[float]] = {}
"""Seconds from the fault to the end of all, by fault and number of ranks."""


@pytest.fixture(scope="module", autouse=True)
def _figures() -> Iterator[None]:
    yield
    for (fault, num_ranks), seconds in FIGURES.items():
        figures = f"median {statistics.median(seconds):.1f} s, most {max(seconds):.1f} s"
        print(f"\nFAULTS {fault}, {num_ranks} ranks, {len(seconds)} times: {figures}", end="")


def test_killed_rank_is_named_by_us_and_torchrun(tmp_path: Path):
    break_a_rank(tmp_path, "SIGKILL", 2, 0, SURE_S, is_fresh=False)


@pytest.mark.guarantee("A rank fails: all end, the culprit is named")
@pytest.mark.parametrize(("fault", "victim"), ALL)
def test_fault_of_one_rank_ends_both_with_name(tmp_path: Path, fault: str, victim: int):
    break_a_rank(tmp_path, fault, 2, victim, SURE_S, under_torchrun=False, silence_s=3.0)


@pytest.mark.guarantee("Ranks end with torchrun")
@pytest.mark.matrix
def test_ranks_end_soon_when_launcher_is_killed(tmp_path: Path):
    with started(tmp_path, "full disk, rank 0 last", 2) as (launcher, token):
        steps = tmp_path / "run" / "steps.csv"
        wait_until(lambda: steps.exists() and len(steps.read_bytes().splitlines()) > 20)
        # Ranks that have no heartbeat of each other yet would both report.
        wait_until(lambda: all(heard_file(tmp_path, rank).exists() for rank in range(2)))
        launcher.kill()
        launcher.wait()
        wait_until(lambda: not ranks.processes_of(token))
    text = (tmp_path / "stderr").read_text()
    assert text.count(HEADING) == 1, text
    assert "error: the launcher is gone: torchrun's process has ended\n" in text


@pytest.mark.control("A rank fails: all end, the culprit is named")
@pytest.mark.stress
def test_stopped_rank_blocks_others_without_watchdog(tmp_path: Path):
    """Negative control: torchrun asks the stopped process to end, which it cannot hear, for half a minute."""
    with started(tmp_path, "SIGSTOP, unwatched", 1, SURE_S, timeout_s=TIMEOUT_S) as (launcher, token):
        wait_until((tmp_path / "struck").exists)
        time.sleep(TIMEOUT_S + MAX_S)
        assert launcher.poll() is None
        assert ranks.processes_of(token)
    assert HEADING not in (tmp_path / "stderr").read_text()


@pytest.mark.stress
def test_full_disk_is_reported_also_by_doctor(tmp_path: Path):
    """A file system of 32 KiB for the run directory, in a mount namespace of its own."""
    (tmp_path / "run").mkdir()
    mount = f"mount -t tmpfs -o size=32k none {tmp_path / 'run'}"
    if subprocess.run(["unshare", "--mount", "sh", "-c", mount], capture_output=True, check=False).returncode != 0:
        pytest.skip("may not mount here")
    launcher = ranks.torchrun(2)
    words = shlex.join(map(str, [*launcher, *command_of(tmp_path, "full disk", 2, 2, 0.0)]))
    doctor = f"{sys.executable} -m spmd_worker.tools.doctor {tmp_path / 'run'}"
    script = f"{mount} && {{ {words}; code=$?; {doctor}; exit $code; }}"
    done = ranks.run_command(["unshare", "--mount", "sh", "-c", script], LIMIT_S)
    assert done.returncode == 1, done.output
    assert re.search(r"\nerror: rank 0 raised OSError at step \d+: (.*: )?No space left on device: fini", done.stderr)
    assert done.stderr.count(HEADING) == 1, done.output
    assert root_cause(done) == 0, done.output
    assert "What to do: The disk is full" in done.stdout, done.output


@pytest.mark.stress
@pytest.mark.timed
@pytest.mark.parametrize("repeat", range(REPEATS))
@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("fault", WORDS)
def test_fault_at_any_moment_ends_every_rank(tmp_path: Path, fault: str, num_ranks: int, repeat: int):
    chance = random.Random(f"{fault}, {num_ranks} ranks, {repeat + REPEATS * (SEED - 1)}")
    victim = 0 if fault == "full disk" else chance.randrange(num_ranks)
    # Interpreters that import torch by themselves take longer to start than the fault takes to strike.
    moment = chance.uniform(0, 5)
    seconds = break_a_rank(tmp_path, fault, num_ranks, victim, moment, is_fresh=repeat == 0, timeout_s=TIMEOUT_S)
    assert seconds < MAX_S + (TIMEOUT_S if fault in SILENT else 0)


@pytest.mark.stress
@pytest.mark.matrix
def test_job_without_fault_leaves_no_record(tmp_path: Path):
    """Negative control."""
    done = run(tmp_path, "exception in forward", 2, 2, 0.0, "job.max_rows=8").checked()
    assert HEADING not in done.output
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [
        "lock",
        "manifest.json",
        "metrics.json",
        "provenance.json",
        "steps.csv",
    ]


# Helpers.


def break_a_rank(
    folder: Path,
    fault: str,
    num_ranks: int,
    victim: int,
    moment: float,
    *,
    under_torchrun: bool = True,
    is_fresh: bool = True,
    timeout_s: float = LONG_S,
    silence_s: float = TIMEOUT_S,
) -> float:
    """Returns the seconds from the fault to the end of all. With the long timeout a silent fault is noticed after
    `silence_s` all the same, a timeout that begins with the fault.
    """
    shared_memory = set(os.listdir("/dev/shm"))
    how = f", limit {silence_s:g}" if fault in SILENT and timeout_s == LONG_S else ""
    # Raises for processes left behind.
    command = command_of(folder, f"{fault}{how}", num_ranks, victim, moment, timeout_s)
    if under_torchrun:
        done = ranks.run_torchrun(command, num_ranks, LIMIT_S, is_fresh=is_fresh)
    else:
        done = ranks.run_forked(command, num_ranks, LIMIT_S)
    struck = folder / "struck"
    assert struck.exists(), done.output
    seconds = time.monotonic() - float(struck.read_text())
    FIGURES.setdefault((fault, num_ranks), []).append(seconds)
    print(f"{fault}, {num_ranks} ranks, rank {victim}, moment {moment:.2f}: {seconds:.1f} s", flush=True)
    assert done.returncode != 0, done.output
    # The ranks have ended: what a process still uses is of others, and what they leave goes too.
    left = set(os.listdir("/dev/shm")) - shared_memory - shared_names(living_pids())
    wait_until(lambda: left.isdisjoint(os.listdir("/dev/shm")))
    is_sure = moment >= SURE_S or fault not in ("SIGKILL", "SIGTERM", "SIGSTOP")
    if is_sure or HEADING in done.output:
        check_words(folder, done, WORDS[fault].format(rank=victim), num_ranks)
    assert not under_torchrun or root_cause(done) == victim, done.output
    return seconds


def check_words(folder: Path, done: ranks.CompletedRanks, words: str, num_ranks: int) -> None:
    assert done.output.count(HEADING) == 1, done.output
    lines = done.stderr.splitlines()
    place = lines.index(HEADING)
    for rank, line in enumerate(lines[place + 1 : place + 1 + num_ranks]):
        assert re.match(rf"  rank {rank}  ", line), done.output
    error = lines[place + 1 + num_ranks]
    assert re.match(f"error: {words}", error), (words, done.output)
    records = [json.loads(path.read_text()) for path in (folder / "run").glob("error.rank*.json")]
    assert error.removeprefix("error: ") in [record["diagnosis"]["text"] for record in records], done.output


def root_cause(done: ranks.CompletedRanks) -> int:
    """The rank that torchrun's summary names."""
    summary = done.stderr.partition("Root Cause")[2]
    match = re.search(r"rank +: (\d+) ", summary)
    assert match is not None, done.output
    return int(match[1])


@contextlib.contextmanager
def started(
    folder: Path, fault: str, victim: int, moment: float = 0.0, timeout_s: float = LONG_S
) -> Iterator[tuple[ForkedProcess, str]]:
    """A job on two ranks that nobody waits for: its launcher, and the token of its processes, which end with this."""
    token = secrets.token_hex(16)
    environment = ranks.environment(token, {})
    command = [*ranks.forked_torchrun(2), *map(str, command_of(folder, fault, 2, victim, moment, timeout_s))]
    with open(folder / "stderr", "wb") as stderr, open(os.devnull, "wb") as nothing:
        process = fork_server().fork(command, environment, folder, nothing, stderr)
    try:
        yield process, token
    finally:
        ranks.kill_all(token)
        process.wait()


def run(folder: Path, fault: str, num_ranks: int, victim: int, moment: float, *arguments: str) -> ranks.CompletedRanks:
    command = [*command_of(folder, fault, num_ranks, victim, moment), *arguments]
    return ranks.run_torchrun(command, num_ranks, LIMIT_S)


def command_of(
    folder: Path, fault: str, num_ranks: int, victim: int, moment: float, timeout_s: float = LONG_S
) -> list[str | Path]:
    """A job of minutes; no rank breaks where there is no rank `victim`."""
    rows = [{"prompt": f"add {index} 7 =", "max_tokens": 100, "ignore_eos": True} for index in range(3000)]
    (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return [
        *(SCRIPT, fault, str(victim), str(moment), folder),
        *(f"model.path={MODEL}", "device=cpu", "cache.num_blocks=512", "scheduler.max_num_seqs=8"),
        *(f"parallel.tensor_parallel_size={num_ranks}", f"executor.timeout_s={timeout_s:g}"),
        *(f"job.input={folder / 'rows.jsonl'}", f"job.output={folder / 'out.jsonl'}", f"job.run_dir={folder / 'run'}"),
    ]
