"""A rank of our command ends with its launcher, in whatever phase; a rank of somebody else's program is left alone."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import ranks
from waiting import wait_until

from spmd_worker.base.process import end_with_launcher, start_time_of

MODEL = ranks.REPOSITORY / "scripts" / "demo" / "model"
# What torchrun's agent does, as far as its rank can see.
LAUNCHER = """
import subprocess, sys, time
process = subprocess.Popen([sys.executable, *sys.argv[1:]])
print(process.pid, flush=True)
time.sleep(3600)
"""
DEATH_SIGNAL = """
import ctypes, sys
from spmd_worker.base.process import end_with_launcher, outlive_parent

def death_signal():
    number = ctypes.c_int()
    ctypes.CDLL(None).prctl(2, ctypes.byref(number), 0, 0, 0)
    return number.value
"""


def variables(num_ranks: int, port: int) -> dict[str, str]:
    """Environment of rank 0, whose other rank never comes."""
    place = ranks.rank_variables({ranks.TOKEN_VARIABLE: "none"}, 0, num_ranks, port, has_agent_store=True)
    inherited = {name: value for name, value in os.environ.items() if name not in ranks.LAUNCHER_VARIABLES}
    return {**inherited, **place, "PYTHONPATH": str(ranks.REPOSITORY)}


def start_rank(tmp_path: Path, num_ranks: int, port: int) -> tuple[subprocess.Popen[str], int]:
    """The launcher, and the process id of the rank: of two, or of one that waits for a row."""
    (tmp_path / "rows.jsonl").write_text('{"prompt": "add 1 2 ="}\n')
    command = [sys.executable, "-c", LAUNCHER, str(ranks.REPOSITORY / "launch.py"), f"model.path={MODEL}"]
    rows = f"{tmp_path}/rows.jsonl" if num_ranks > 1 else "-"
    command += [f"parallel.tensor_parallel_size={num_ranks}", f"job.input={rows}", f"job.output={tmp_path}/out"]
    nothing = subprocess.DEVNULL
    streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": nothing}
    launcher = subprocess.Popen([*command, "cache.num_blocks=64"], **streams, text=True, env=variables(num_ranks, port))
    assert launcher.stdout is not None
    return launcher, int(launcher.stdout.readline())


def does(tmp_path: Path, doing: str) -> bool:
    path = tmp_path / "out.run" / "lock"
    return path.exists() and doing in path.read_text()


@pytest.mark.gate("imports")
@pytest.mark.parametrize(
    ("num_ranks", "doing"),
    [(2, ""), (2, "joins the other ranks"), pytest.param(1, "answers rows", marks=pytest.mark.matrix)],
    ids=["imports", "joining", "the only rank"],
)
def test_rank_ends_with_its_launcher(tmp_path: Path, num_ranks: int, doing: str):
    """The only rank of a job went on alone: its watchdog leaves all but a hang to the main thread."""
    with socket.socket() as store:
        store.bind(("127.0.0.1", 0))
        if doing:
            # It does not answer: where nothing listens a rank that joins ends of itself.
            store.listen()
        check_end_with_launcher(tmp_path, *start_rank(tmp_path, num_ranks, store.getsockname()[1]), doing)


def check_end_with_launcher(tmp_path: Path, launcher: subprocess.Popen[str], pid: int, doing: str) -> None:
    with launcher:
        try:
            if doing:
                wait_until(lambda: does(tmp_path, doing))
                assert start_time_of(pid) is not None
            launcher.send_signal(signal.SIGKILL)
            launcher.wait()
            wait_until(lambda: start_time_of(pid) is None)
        finally:
            launcher.kill()
            if start_time_of(pid) is not None:
                os.kill(pid, signal.SIGKILL)


def death_signals(source: str, **environment: str) -> list[int]:
    done = ranks.run_ranks(DEATH_SIGNAL + source, 1, 240, [MODEL], environment).checked()
    return [int(line) for line in done.stdout.split()]


@pytest.mark.guarantee("Ranks end with torchrun")
def test_death_signal_is_set_by_our_command_only():
    ours = death_signals("end_with_launcher(); print(death_signal()); outlive_parent(); print(death_signal())")
    assert ours == [signal.SIGKILL, 0]
    theirs = death_signals("""
import launch
from spmd_worker import LLM
with LLM(sys.argv[1], num_blocks=64):
    print(death_signal())
""")
    assert theirs == [0]


def test_launcher_is_recognised_only_under_torchrun(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("spmd_worker.base.process.end_with_parent", lambda parent: pytest.fail("the parent is watched"))
    end_with_launcher({})
    end_with_launcher({"RANK": "0", "WORLD_SIZE": "2", "SLURM_PROCID": "0", "OMPI_COMM_WORLD_RANK": "0"})
    with pytest.raises(pytest.fail.Exception):
        end_with_launcher({"TORCHELASTIC_RUN_ID": "none"})


@pytest.mark.parametrize(
    ("command", "is_orphan"), [("/sbin/init splash", True), ("python3 -m torch.distributed.run", False)]
)
def test_orphaned_rank_exits_at_once(monkeypatch: pytest.MonkeyPatch, command: str, is_orphan: bool):
    """Adopted by the first process of the machine, which in a container may be torchrun itself."""
    monkeypatch.setattr("spmd_worker.base.process.os.getppid", lambda: 1)
    monkeypatch.setattr("spmd_worker.base.process.command_of", lambda pid: command)
    ends: list[str] = []
    monkeypatch.setattr("spmd_worker.base.process.os._exit", lambda code: ends.append("exits"))
    monkeypatch.setattr("spmd_worker.base.process.end_with_parent", lambda parent: ends.append("goes on"))
    end_with_launcher({"TORCHELASTIC_RUN_ID": "none"})
    assert ends[0] == ("exits" if is_orphan else "goes on")
