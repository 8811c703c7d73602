"""torchrun's real launcher ends with a code from which a queue knows preempted ranks from failed ones."""

import signal
from pathlib import Path

import pytest
import ranks

from spmd_worker.base.errors import DIVERGED_EXIT_CODE

LIMIT_S = 120.0
WAITING = "while kill -0 $PPID; do sleep 0.05; done"
"""A signal that comes too early finds a torchrun that does not yet know its ranks: these end by themselves, as ours."""
LAUNCHER = "spmd_worker.tools.torchrun"


@pytest.mark.gate("exit 143-*", "*-exit 70-70", "*-137")
@pytest.mark.parametrize(
    ("rank_0", "rank_1", "code"),
    [
        ("exit 0", "exit 0", 0),
        ("exit 1", WAITING, 1),
        (WAITING, f"exit {DIVERGED_EXIT_CODE}", DIVERGED_EXIT_CODE),
        # As the out-of-memory killer does.
        (WAITING, "kill -KILL $$", 128 + signal.SIGKILL),
        # A queue that signals the ranks, and one that signals their launcher.
        ("exit 143", "exit 143", 128 + signal.SIGTERM),
        (f"kill -TERM $PPID; {WAITING}", WAITING, 128 + signal.SIGTERM),
    ],
)
@pytest.mark.guarantee("a queue knows a preempted world from a failed one by its exit code")
def test_exit_code_names_how_ranks_ended(tmp_path: Path, rank_0: str, rank_1: str, code: int):
    done = run_ranks(LAUNCHER, tmp_path, rank_0, rank_1)
    assert done.returncode == code, done.output


@pytest.mark.stress
@pytest.mark.control("a queue knows a preempted world from a failed one by its exit code")
def test_plain_torchrun_exits_alike_for_all(tmp_path: Path):
    ends = ("exit 143", f"exit {DIVERGED_EXIT_CODE}")
    codes = {run_ranks("torch.distributed.run", tmp_path, end, WAITING).returncode for end in ends}
    assert codes == {1}


def test_launcher_under_nohup_outlives_its_terminal(tmp_path: Path):
    """torchrun handles the signal that nohup ignores."""
    scripts = {}
    for action in ("SIG_IGN", "SIG_DFL"):
        scripts[action] = str(tmp_path / f"{action}.py")
        Path(scripts[action]).write_text(
            "import signal, sys\n"
            f"signal.signal(signal.SIGHUP, signal.{action})\n"
            f"from {LAUNCHER} import main\n"
            "sys.exit(main())\n"
        )
    line = "kill -HUP $PPID; kill -HUP $$; exit 0"
    assert run_ranks(scripts["SIG_IGN"], tmp_path, line, line).returncode == 0
    # Negative control: a terminal that is closed, without nohup, which the tests themselves may run under.
    assert run_ranks(scripts["SIG_DFL"], tmp_path, "kill -HUP $PPID", WAITING).returncode == 128 + signal.SIGHUP


def run_ranks(launcher: str, folder: Path, *lines: str) -> ranks.CompletedRanks:
    """A module, or a script, with a line of shell on each rank. In files: torchrun replaces `$` in arguments."""
    for rank, line in enumerate(lines):
        (folder / f"rank{rank}.sh").write_text(line)
    (folder / "ranks.sh").write_text(f'. "{folder}/rank$LOCAL_RANK.sh"')
    options = ["--standalone", "--nproc-per-node", "2", "--no-python", "bash", str(folder / "ranks.sh")]
    started = [launcher] if launcher.endswith(".py") else ["-m", launcher]
    return ranks.run_script([*started, *options], LIMIT_S, env={"OMP_NUM_THREADS": "1"})
