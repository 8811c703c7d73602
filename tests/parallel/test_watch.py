"""The board over torch's own store, and the watchdog of an engine in somebody else's process."""

import re

import pytest
import ranks
from plant_runner import free_port

from spmd_worker.observability.heartbeat import Beat
from spmd_worker.parallel import watch
from spmd_worker.parallel.environment import RankEnvironment
from spmd_worker.parallel.watch import open_board, watch_guest, watch_program

MODEL = ranks.REPOSITORY / "scripts" / "demo" / "model"


@pytest.fixture
def variables(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    own = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "TORCHELASTIC_RESTART_COUNT": "2"}
    for name, value in own.items():
        monkeypatch.setenv(name, value)
    return own


def test_ranks_find_each_other_on_the_board(variables: dict[str, str]):
    boards = [open_board(rank, is_host=rank == 0, variables=variables) for rank in range(2)]
    beat = Beat(1, "node", 7, 8, 1, 812, "execute")
    assert boards[0].find(1) is None
    boards[1].pin(beat)
    assert boards[0].find(1) == beat
    assert not boards[0].has_flag("alarm")
    boards[1].raise_flag("alarm")
    assert boards[0].has_flag("alarm")
    assert [board.count("speakers") for board in boards] == [1, 2]


def test_each_run_and_restart_has_a_board_of_its_own(variables: dict[str, str]):
    first = open_board(0, is_host=True, variables=variables)
    second = open_board(0, is_host=True, variables=variables)
    other = open_board(1, is_host=False, variables=variables)
    assert (first.prefix, second.prefix) == (
        "spmd_worker/watch/restart 2/run 1",
        "spmd_worker/watch/restart 2/run 2",
    )
    assert other.prefix == first.prefix


def test_only_a_program_of_ours_makes_a_store_where_there_is_none(variables, monkeypatch: pytest.MonkeyPatch):
    environment = RankEnvironment(rank=0, world_size=2, local_world_size=2, is_launched=True)
    assert watch._connector(environment, 2, may_host=True) is not None
    assert watch._connector(environment, 2, may_host=False) is None
    assert watch._connector(environment, 1, may_host=True) is None
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    assert watch._connector(environment, 2, may_host=False) is not None
    monkeypatch.delenv("MASTER_ADDR")
    assert watch._connector(environment, 2, may_host=True) is None


def test_an_engine_watches_its_own_ranks_and_a_program_all(variables, tmp_path):
    environment = RankEnvironment(rank=5, world_size=8, local_world_size=8, is_launched=True)
    guest = watch_guest(environment, 2, 60.0).watched
    assert (guest.ranks, guest.exits, guest.run_dir) == ((4, 5), False, None)
    program = watch_program(environment, 60.0, tmp_path).watched
    assert (program.ranks, program.exits, program.has_launcher) == (tuple(range(8)), True, False)
    assert (program.soft_limit_s, guest.soft_limit_s) == (12.0, 12.0)


def test_a_users_script_hears_which_rank_raised_and_lives_on():
    source = f"""
        import os, sys
        from spmd_worker import LLM, SamplingParams
        from spmd_worker.runner.model_runner import ModelRunner
        rank = int(os.environ["RANK"])
        right = ModelRunner.forward
        def forward(self, step, scheduled):
            if rank == 1 and step == 3:
                raise ValueError("planted")
            return right(self, step, scheduled)
        ModelRunner.forward = forward
        llm = LLM({str(MODEL)!r}, tensor_parallel_size=2, num_blocks=64, device="cpu", timeout_s=20)
        try:
            llm.generate(["add 1 2 ="], SamplingParams(max_tokens=9, ignore_eos=True), use_tqdm=False)
        except Exception as error:
            os.write(1, f"rank {{rank}} caught {{type(error).__name__}}: {{error}}\\n".encode())
        import time
        time.sleep(1)
        llm.close()
        """
    done = ranks.run_ranks(source, 2, 90.0)
    assert done.returncode == 0, done.output
    assert "rank 0 caught RankFailedError: rank 1 raised ValueError at step 3: planted" in done.stdout
    assert "rank 1 caught ValueError: planted" in done.stdout
    assert done.stderr.count("the ranks when they were last heard of:") == 1, done.output
    assert re.search(r"rank 1 raised ValueError at step 3: planted; the ranks when", done.stderr), done.output
    assert "  rank 1  step 3  execute" in done.stderr
