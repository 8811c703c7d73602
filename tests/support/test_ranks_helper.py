"""The helper that starts ranks: output, exit codes, a hang that is ended, processes left behind that are noticed."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import ranks
from fork_server import fork_server
from waiting import wait_until

# torchrun imports torch before it starts a rank, which takes long where cores are shared.
START_S = 240.0

WAYS = {
    "torchrun": {"under_torchrun": True, "is_fresh": True},
    "forked torchrun": {"under_torchrun": True},
    "ours": {"under_torchrun": False},
}
LISTED = ranks.ABOUT_TORCHRUN
every_launcher = pytest.mark.parametrize(
    "way", [pytest.param(way, marks=pytest.mark.stress if way == "torchrun" else []) for way in WAYS]
)


@pytest.mark.gate("ours")
@every_launcher
def test_every_rank_runs_and_its_output_is_captured(way: str):
    done = ranks.run_ranks(
        """
        import os, sys
        # Each line in one piece: torchrun's ranks are unbuffered and share a pipe, and print writes its newline apart.
        os.write(1, f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']} got {sys.argv[1]}\\n".encode())
        os.write(2, f"threads {os.environ['OMP_NUM_THREADS']}\\n".encode())
        os.write(2, f"name servers {os.environ['RES_OPTIONS']}\\n".encode())
        """,
        nproc=2,
        timeout_s=START_S,
        arguments=["words"],
        **WAYS[way],
    ).checked()
    assert sorted(done.stdout.splitlines()) == ["rank 0 of 2 got words", "rank 1 of 2 got words"]
    assert done.stderr.count("threads 1") == 2
    # A rank would wait for a name server that does not answer: see conftest.py.
    assert done.stderr.count("name servers attempts:0") == 2


def test_ranks_import_repository_and_helpers_from_any_folder(tmp_path: Path):
    source = "import kv_cache, spmd_worker.replica.sequence, ranks\nprint(spmd_worker.replica.sequence.__file__)"
    done = ranks.run_ranks(source, nproc=1, timeout_s=START_S, cwd=tmp_path).checked()
    assert done.stdout.strip() == str(ranks.REPOSITORY / "spmd_worker" / "replica" / "sequence" / "__init__.py")


@pytest.mark.gate("ours")
@every_launcher
def test_failing_rank_ends_run_and_keeps_its_output(way: str):
    source = """
        import os, sys, time
        if os.environ["RANK"] == "1":
            sys.exit("rank 1 gives up")
        time.sleep(600)
        """
    done = ranks.run_ranks(source, nproc=2, timeout_s=START_S, **WAYS[way])
    assert done.returncode == 1, done.output
    assert "rank 1 gives up" in done.stderr


@pytest.mark.stress
def test_forked_torchrun_gives_its_ranks_what_torchrun_gives(tmp_path: Path):
    """Parent, session, group, arguments, streams, path and variables; the parent is torchrun, which can end them."""
    source = """
        import json, os, signal, sys
        from pathlib import Path
        import torch
        parent = Path(f"/proc/{os.getppid()}")
        shown = {
            "parent": [parent.joinpath("comm").read_text(), parent.joinpath("environ").read_bytes().count(b"ADDED=it")],
            "is leader": os.getsid(0) == os.getpgid(0) == os.getpid(),
            "arguments": sys.argv[1:],
            "path": list(dict.fromkeys(entry for entry in sys.path if "site-packages" not in entry)),
            "threads": torch.get_num_threads(),
            "environment": sorted(os.environ),
            "own environment": Path("/proc/self/environ").read_bytes().count(b"LOCAL_RANK="),
            "signals": [str(signal.getsignal(number)) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGPIPE)],
            "folder": os.getcwd(),
            "main": [__name__, Path(__file__).name],
            "restarts": os.environ["TORCHELASTIC_RESTART_COUNT"],
        }
        path = Path(sys.argv[1], os.environ["RANK"] + "." + sys.argv[2])
        path.write_text(json.dumps(shown))
        """
    shown = {}
    for way in ("torchrun", "forked torchrun"):
        ranks.run_ranks(source, 2, START_S, [tmp_path, way], {"ADDED": "it"}, tmp_path, **WAYS[way]).checked()
        texts = [(tmp_path / f"{rank}.{way}").read_text() for rank in (0, 1)]
        shown[way] = [json.loads(re.sub(r"/tmp/ranks-\w+|(forked )?torchrun", "X", text)) for text in texts]
    assert shown["forked torchrun"] == shown["torchrun"]


ENDINGS = ["", "sys.exit()", "sys.exit(7)", "sys.exit(300)", "sys.exit('words')", "raise ValueError('words')"]
AT_THE_END = """
import atexit, sys, threading, time, weakref

class Held:
    pass

held = Held()
weakref.finalize(held, print, "a finalizer")
atexit.register(print, "a handler")
print("a line, and a part of one", end=" ")
print("errors", end="", file=sys.stderr)
threading.Thread(target=lambda: (time.sleep(0.1), print("a thread"))).start()
"""


@pytest.mark.gate("", "raise *", "sys.exit(7)", "sys.exit('words')")
@pytest.mark.parametrize("ending", ENDINGS)
def test_forked_script_ends_like_a_fresh_interpreter(tmp_path: Path, ending: str):
    """Though nothing is taken apart at its end: threads, handlers, finalizers, what is in a stream, exit code."""
    script, output, errors = (tmp_path / name for name in ("script.py", "output", "errors"))
    script.write_text(AT_THE_END + ending + "\n")
    fresh = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=START_S, check=False)
    with open(output, "wb") as stdout, open(errors, "wb") as stderr:
        process = fork_server().fork([str(script)], dict(os.environ), tmp_path, stdout, stderr)
    assert process.wait(START_S) == fresh.returncode
    lines = output.read_text().splitlines()
    # The server has had finalizers before, so they come after handlers.
    assert lines[0] == "a line, and a part of one a thread"
    assert sorted(lines) == sorted(fresh.stdout.splitlines())
    assert len(lines) == 3
    # A traceback shows the server's own lines too.
    assert errors.read_text().splitlines()[-1:] == fresh.stderr.splitlines()[-1:]


def test_plain_commands_exit_code_passes_through_unchanged():
    done = ranks.run_command(["bash", "-c", "echo words; exit 70"], timeout_s=START_S)
    assert (done.returncode, done.stdout, done.stderr) == (70, "words\n", "")


def test_outer_torchrun_settings_do_not_reach_the_ranks(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MASTER_PORT", "1")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "outer")
    command = ["bash", "-c", "echo ${MASTER_PORT:-none} ${TORCHELASTIC_RUN_ID:-none} $ADDED"]
    done = ranks.run_command(command, timeout_s=START_S, env={"ADDED": "added"})
    assert done.stdout == "none none added\n"


@pytest.mark.matrix
def test_hanging_ranks_are_killed_and_located_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """No process is left. Their time begins when they hang."""
    source = f"""
        import os, pathlib, signal, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print("about to hang", flush=True)
        def the_hanging_line():
            pid = pathlib.Path({str(tmp_path)!r}, os.environ["RANK"])
            pid.with_suffix(".partial").write_text(str(os.getpid()))
            pid.with_suffix(".partial").rename(pid)
            time.sleep(600)
        the_hanging_line()
        """
    has_ended = ranks.ForkedRanks.has_ended

    def has_ended_since(self: ranks.ForkedRanks, timeout_s: float) -> bool:
        wait_until(lambda: all((tmp_path / rank).exists() for rank in ("0", "1")))
        return has_ended(self, timeout_s)

    monkeypatch.setattr(ranks.ForkedRanks, "has_ended", has_ended_since)
    with pytest.raises(ranks.RanksTimedOut) as error_result:
        ranks.run_ranks(source, nproc=2, timeout_s=0.5)
    pids = [int((tmp_path / rank).read_text()) for rank in ("0", "1")]
    assert [pid for pid in pids if _is_running(pid)] == []
    assert str(error_result.value).count("about to hang") == 2
    assert "in the_hanging_line" in str(error_result.value)


def test_leftover_process_is_killed_and_named_in_error(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ranks, "GRACE_S", 1.0)
    # In a session of its own and without its parent, as a rank is whose torchrun was killed.
    # Named when it is what it is called.
    source = "setsid sleep 599 & until grep -qx sleep /proc/$!/comm; do :; done; echo $!"
    command = ["bash", "-c", source]
    with pytest.raises(ranks.RanksLeftBehind, match=r"\(sleep 599\)") as error_result:
        ranks.run_command(command, timeout_s=START_S)
    left_behind = int(str(error_result.value).split(f"{source}: ")[1].split(" ")[0])
    assert not _is_running(left_behind)


NAMING_TORCHRUN = (
    # The helpers, a reader of its options, and command lines that are only looked at.
    *(f"support/{name}.py" for name in ("fork_server", "forked_torchrun", "ranks", "test_ranks_helper")),
    *("scripts/test_job_files.py", "base/liveness/test_launcher_death.py"),
    "frontends/tools/test_torchrun_exit_codes.py",
)


def files_that_name_torchrun(tests: Path) -> list[str]:
    """Below `tests`, or a script that starts it."""
    words = ("torch.distributed" + ".run", "two_nodes" + ".sh")
    paths = [path for path in tests.rglob("*.py") if any(word in path.read_text() for word in words)]
    return sorted(str(path.relative_to(tests)) for path in paths)


def test_torchrun_is_started_by_the_listed_files_alone(tmp_path: Path):
    found = files_that_name_torchrun(ranks.REPOSITORY / "tests")
    assert {"scripts/test_packaging.py", "scenarios/test_two_nodes.py", "support/ranks.py"} <= {*found}
    assert [f"tests/{name}" for name in found if name not in NAMING_TORCHRUN and f"tests/{name}" not in LISTED] == []
    # Control.
    (tmp_path / "test_planted.py").write_text("command = ['-m', 'torch.distributed" + ".run']")
    assert files_that_name_torchrun(tmp_path) == ["test_planted.py"]


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    return state not in ("Z", "X")


def test_name_server_warnings_of_torch_are_left_out():
    said = "[W1125 18:11:02.22 socket.cpp:207] [c10d] The hostname of the client socket cannot be retrieved. err=-3"
    other = said.replace("err=-3", "err=-2")
    assert ranks.without_unanswered_names(f"a\n{said}\nb {said}\n{other}\n") == f"a\nb {said}\n{other}\n"
