"""The heartbeat store over torch's own store, and the watchdog of an engine in somebody else's process."""

import re
import secrets
from pathlib import Path

import pytest
import ranks
from fork_server import fork_server
from ranks import free_port
from waiting import LIMIT_S, wait_until

from spmd_worker import LLM, SamplingParams
from spmd_worker.base.liveness.heartbeat import BETWEEN_STEPS, CLOSING, RankHeartbeat
from spmd_worker.base.liveness.heartbeat_store import OVER
from spmd_worker.base.liveness.watched import Watched
from spmd_worker.ranks import rank_watchdog as watch
from spmd_worker.ranks.environment import RankEnvironment
from spmd_worker.ranks.rank_watchdog import open_heartbeat_store, watch_guest, watch_program

MODEL = ranks.REPOSITORY / "scripts" / "demo" / "model"


@pytest.fixture
def variables(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    own = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "TORCHELASTIC_RESTART_COUNT": "2"}
    for name, value in own.items():
        monkeypatch.setenv(name, value)
    return own


def test_ranks_meet_in_the_heartbeat_store(variables: dict[str, str]):
    stores = [open_heartbeat_store(rank, (0, 1), is_host=rank == 0, variables=variables) for rank in range(2)]
    heartbeats = [RankHeartbeat(rank, "node", 7, 8, 1, 812, "execute") for rank in range(2)]
    assert stores[0].find((1, 2)) == {}
    # torch's store does not confirm what it was told: another client may ask a moment too early.
    stores[1].publish(heartbeats[1])
    wait_until(lambda: stores[0].find((0, 1, 2)))
    assert stores[0].find((0, 1, 2)) == {1: heartbeats[1]}
    stores[0].publish(heartbeats[0])
    assert stores[0].find((0, 1), known=(0, 1)) == {0: heartbeats[0], 1: heartbeats[1]}
    assert not stores[0].has_flag("reported")
    stores[1].raise_flag("reported")
    wait_until(lambda: stores[0].has_flag("reported"))
    assert stores[0].count("alarms", 0) == 0
    assert [store.count("reporters") for store in stores] == [1, 2]


def test_each_run_has_its_own_heartbeat_store(variables: dict[str, str]):
    """Each restart has its own too."""
    first = open_heartbeat_store(0, (0, 1), is_host=True, variables=variables)
    second = open_heartbeat_store(0, (0, 1), is_host=True, variables=variables)
    other = open_heartbeat_store(1, (0, 1), is_host=False, variables=variables)
    assert (first.prefix, second.prefix) == (
        "spmd_worker/watch/restart 2/ranks 0 to 1/run 1",
        "spmd_worker/watch/restart 2/ranks 0 to 1/run 2",
    )
    assert other.prefix == first.prefix


def test_failed_attempt_of_one_rank_releases_its_name(variables: dict[str, str]):
    """The other rank counted on from there, and the two never met."""
    alone = open_heartbeat_store(1, (0, 1), is_host=True, variables=variables)
    alone.count("alarms")
    alone.raise_flag(OVER)
    both = [open_heartbeat_store(rank, (0, 1), is_host=False, variables=variables) for rank in range(2)]
    assert both[0].prefix == both[1].prefix != alone.prefix
    assert both[0].count("alarms", 0) == 0


def test_lost_store_is_reopened_under_its_name(variables: dict[str, str]):
    connect = watch._Connector(0, (0, 1), is_host=True)
    first = connect()
    again = connect()
    assert again.prefix == first.prefix
    other = watch._Connector(1, (0, 1), is_host=False)
    assert [other().prefix, other().prefix] == [first.prefix] * 2
    again.raise_flag("here")
    wait_until(lambda: other().has_flag("here"))


def test_lost_store_is_reopened_at_its_original_address(variables: dict[str, str], monkeypatch: pytest.MonkeyPatch):
    """Later changes of MASTER_ADDR and MASTER_PORT have no effect."""
    connects = [watch._Connector(rank, (0, 1), is_host=rank == 0) for rank in (0, 1)]
    first, other = connects[0](), connects[1]()
    monkeypatch.delenv("MASTER_ADDR")
    monkeypatch.setenv("MASTER_PORT", "1")
    assert connects[1]().prefix == other.prefix == first.prefix


def test_unreachable_store_prints_nothing(variables, capfd):
    """torch would print each attempt."""
    connect = watch._Connector(1, (0, 1), is_host=False)
    connect._prefix = "x"
    with pytest.raises(OSError, match="refused"):
        connect()
    assert capfd.readouterr().err == ""


def test_concurrent_engines_have_separate_heartbeat_stores(variables: dict[str, str]):
    """An alarm of one engine once alarmed all others, for good, and kept them from reporting."""
    first = open_heartbeat_store(0, (0, 1), is_host=True, variables=variables)
    second = open_heartbeat_store(2, (2, 3), is_host=False, variables=variables)
    first.count("alarms")
    assert second.count("alarms", 0) == 0


def test_store_is_hosted_only_by_our_program(variables, monkeypatch: pytest.MonkeyPatch):
    """A store of torchrun's needs no host."""
    watched = Watched(0, (0, 1), 60.0)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    assert watch._connector(watched, may_host=True) is not None
    assert watch._connector(watched, may_host=False) is None
    assert watch._connector(Watched(0, (0,), 60.0), may_host=True) is None
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    assert watch._connector(watched, may_host=False) is not None
    monkeypatch.delenv("MASTER_ADDR")
    assert watch._connector(watched, may_host=True) is None


def test_engine_watches_its_ranks_and_program_watches_all(variables, tmp_path):
    environment = RankEnvironment(rank=5, world_size=8, local_world_size=8, is_launched=True)
    guest = watch_guest(environment, 2, 60.0, spins=False).watched
    assert (guest.ranks, guest.exits, guest.run_dir, guest.spins) == ((4, 5), False, None, False)
    program = watch_program(environment, 60.0, tmp_path, spins=False).watched
    assert (program.ranks, program.exits, program.has_launcher) == (tuple(range(8)), True, False)
    assert (program.soft_limit_s, guest.soft_limit_s) == (12.0, 12.0)


def test_engine_is_between_steps_between_calls():
    """A trainer's own work once looked like a step that hangs."""
    with LLM(str(MODEL), num_blocks=64, device="cpu") as llm:
        heartbeat = llm.llm_engine.times.heartbeat
        assert heartbeat.now == (0, BETWEEN_STEPS)
        llm.generate(["add 1 2 ="], SamplingParams(max_tokens=3, ignore_eos=True), use_tqdm=False)
        assert heartbeat.now.step >= 3
        assert heartbeat.now.phase == BETWEEN_STEPS
    assert heartbeat.now.phase == CLOSING


DELETED_SCRIPT = f"""
import gc, sys, threading
from forks_of_a_script import fork_workers

fork_workers()
from spmd_worker import LLM, SamplingParams

def own_threads():
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("spmd-")]

llm = LLM({str(MODEL)!r}, num_blocks=64, device="cpu", **eval(sys.argv[1]))
assert own_threads() != []
if sys.argv[2] == "after a failure":
    llm.llm_engine.scheduler.schedule = None
    try:
        llm.generate(["add 1 2 ="], SamplingParams(max_tokens=3), use_tqdm=False)
    except TypeError as error:
        print("caught", error)
if sys.argv[2] == "not released":
    llm._release.detach()
del llm
gc.collect()
print("left:", own_threads())
"""
MULTIPROC = {"distributed_executor_backend": "multiproc", "tensor_parallel_size": 2}


@pytest.mark.parametrize(
    ("options", "how", "left"),
    [
        ({}, "idle", []),
        ({}, "after a failure", []),
        ({}, "not released", ["spmd-watchdog"]),
        pytest.param(MULTIPROC, "idle", [], marks=pytest.mark.matrix),
    ],
)
def test_deleted_llm_leaves_no_thread(tmp_path: Path, options: dict[str, object], how: str, left: list[str]):
    """The third is the control."""
    script = tmp_path / "deleted.py"
    script.write_text(DELETED_SCRIPT)
    done = ranks.run_script([script, repr(options), how], 240.0)
    assert f"left: {left}\n" in done.stdout, done.output


UNCLOSED_SCRIPT = f"""
import os
from spmd_worker import LLM, SamplingParams

llm = LLM({str(MODEL)!r}, tensor_parallel_size=2, num_blocks=64, device="cpu", timeout_s=120)
if os.environ["RANK"] == "0":
    try:
        llm.generate(["add 1 2 ="], SamplingParams(max_tokens=9), use_tqdm=False)
    except Exception as error:
        print(f"caught {{type(error).__name__}}: {{error}}", flush=True)
"""


def test_rank_left_unclosed_is_named_not_presumed_killed():
    done = ranks.run_ranks(UNCLOSED_SCRIPT, 2, 240.0)
    expected = (
        "caught RankFailedError: rank 1 has left without close(): its program ended, or its LLM was deleted; last"
    )
    assert expected in done.stdout, done.output
    assert done.returncode == 0, done.output


HEADING = "rank status at the last heartbeats:"
USERS_SCRIPT = f"""
import os, signal, sys, time
from spmd_worker import LLM, SamplingParams
from spmd_worker.worker.runner.model_runner import ModelRunner

rank, fault = int(os.environ["RANK"]), sys.argv[1]
right = ModelRunner.forward

def forward(self, step, *given, **named):
    if rank == 1 and step == 3:
        if fault == "raises":
            raise ValueError("planted")
        os.kill(os.getpid(), signal.Signals[fault])
    return right(self, step, *given, **named)

ModelRunner.forward = forward
# The time of one that is stopped is waited for.
timeout_s = 10 if fault == "SIGSTOP" else 120
llm = LLM({str(MODEL)!r}, tensor_parallel_size=2, num_blocks=64, device="cpu", timeout_s=timeout_s)
try:
    llm.generate(["add 1 2 ="], SamplingParams(max_tokens=9, ignore_eos=True), use_tqdm=False)
except Exception as error:
    print(f"rank {{rank}} caught {{type(error).__name__}}: {{error}}", flush=True)
if rank == 1:
    time.sleep(1)
llm.close()
print(f"rank {{rank}} goes on", flush=True)
"""
"""Ranks of somebody's own program, in which rank 1 fails in its third step."""


def test_user_script_survives_an_error_on_another_rank():
    done = ranks.run_ranks(USERS_SCRIPT, 2, 240.0, ["raises"])
    check_lives_on(done)
    assert re.search(r"rank 0 caught RankFailedError: rank 1 raised ValueError at step 3: planted", done.stdout)
    assert re.search(r"rank 1 caught ValueError: planted", done.stdout)
    # Not in the log where both close before all is known.
    assert done.stderr.count(HEADING) <= 1, done.output
    assert "Thread 0x" not in done.stderr


def check_lives_on(done: ranks.CompletedRanks) -> None:
    assert done.returncode == 0, done.output
    assert all(f"rank {rank} goes on" in done.stdout for rank in range(2)), done.output


ENDED = """
import signal
from functools import partial
from spmd_worker import LLM
from spmd_worker.ranks import rank_watchdog

rank_watchdog.Watched = partial(rank_watchdog.Watched, exits=True)
LLM.close = lambda self: signal.pause()
"""
"""A guest is watched as a program of ours is. The user's program has something else to do before it closes."""


@pytest.mark.stress
@pytest.mark.control("Your own script hears who failed and lives on")
@pytest.mark.matrix
def test_user_script_check_detects_ended_processes(control):
    """Negative control."""
    done = ranks.run_ranks(ENDED + USERS_SCRIPT, 2, 240.0, ["raises"])
    with control():
        check_lives_on(done)
    assert 1 in done.exit_codes, done.output
    assert "error: rank 1 raised ValueError at step 3: planted" in done.stderr, done.output


@pytest.mark.guarantee("Your own script hears who failed and lives on")
@pytest.mark.matrix
@pytest.mark.parametrize(
    ("fault", "what"), [("SIGKILL", "gone"), pytest.param("SIGSTOP", "silent", marks=pytest.mark.stress)]
)
def test_user_script_survives_a_dead_or_stopped_rank(tmp_path: Path, fault: str, what: str):
    """torchrun ends the others when one has died, so here each rank is forked by hand, with a store of ours."""
    script = tmp_path / "users.py"
    script.write_text(USERS_SCRIPT)
    token = secrets.token_hex(16)
    variables = ranks.environment(token, {})
    store = ranks.StoreHost(variables)
    with (tmp_path / "stdout").open("wb") as stdout, (tmp_path / "stderr").open("wb") as stderr:
        both = [
            fork_server().fork([str(script), fault], of_rank, ranks.REPOSITORY, stdout, stderr)
            for of_rank in (ranks.rank_variables(variables, rank, 2, store.port, True) for rank in range(2))
        ]
        try:
            code = both[0].wait(LIMIT_S)
        finally:
            ranks.kill_all(token)
    output, errors = (tmp_path / "stdout").read_text(), (tmp_path / "stderr").read_text()
    assert code == 0, (output, errors)
    found = re.search(r"rank 0 caught RankFailedError: (rank 1 .*)", output)
    assert found, (output, errors)
    assert f"rank 1 is {what}: last seen in step " in found[1]
    # Beside other work the stacks of a rank that waits long may come first; nothing else fills the terminal.
    assert "Traceback" not in errors, errors
    assert errors.count(HEADING) <= 1, errors
    assert "rank 0 goes on" in output
