"""Threads and cores of the ranks of one node, for what a node, a launcher and a user can say."""

import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import ranks

from spmd_worker.config import ConfigError
from spmd_worker.parallel import cores
from spmd_worker.parallel.cores import CoreShare, Node, look_at_node, named_values, parse_quota, share_cores, take_share

EIGHT = Node(cores=tuple(range(8)), launcher_cores=tuple(range(8)), launcher_variables={})
TORCHRUNS = {"OMP_NUM_THREADS": "1"}


def test_ranks_share_the_cores_and_each_has_its_own():
    shares = [share_cores(EIGHT, rank, 2, TORCHRUNS) for rank in range(2)]
    assert [(share.num_threads, share.cores) for share in shares] == [(4, (0, 1, 2, 3)), (4, (4, 5, 6, 7))]
    assert shares[0].reason == "2 ranks share 8 cores: 4 threads each, on cores of their own"
    assert share_cores(EIGHT, 2, 3, {}).cores == (4, 5)


def test_two_ranks_on_two_cores_have_one_thread_each():
    node = Node(cores=(4, 9), launcher_cores=(4, 9), launcher_variables={})
    assert [share_cores(node, rank, 2, TORCHRUNS).cores for rank in range(2)] == [(4,), (9,)]
    assert share_cores(node, 0, 2, TORCHRUNS).num_threads == 1


def test_more_ranks_than_cores_have_one_thread_each_and_share_all_cores():
    share = share_cores(replace(EIGHT, cores=(0, 1), launcher_cores=(0, 1)), 3, 4, {})
    assert (share.num_threads, share.cores) == (1, None)


def test_a_containers_quota_counts_as_so_many_cores():
    assert share_cores(replace(EIGHT, quota=4.5), 0, 2, {}).num_threads == 2
    assert share_cores(replace(EIGHT, quota=0.5), 0, 2, {}).num_threads == 1
    alone = share_cores(replace(EIGHT, quota=2.0), 0, 1, {})
    assert (alone.num_threads, alone.cores) == (2, None)


def test_a_rank_alone_keeps_what_it_has():
    share = share_cores(EIGHT, 0, 1, {})
    assert (share.num_threads, share.cores) == (None, None)


def test_a_users_own_number_of_threads_wins():
    assert share_cores(EIGHT, 0, 2, {"OMP_NUM_THREADS": "3"}).num_threads is None
    share = share_cores(EIGHT, 0, 2, {"SPMD_WORKER_THREADS": "5", "OMP_NUM_THREADS": "1"})
    assert (share.num_threads, share.cores) == (5, None)


def test_the_1_that_torchrun_sets_is_told_from_a_users_own():
    """torchrun changes its own environment after its start, so what it was started with tells who set the 1."""
    users = replace(EIGHT, launcher_variables={"OMP_NUM_THREADS": "1"})
    assert share_cores(users, 0, 2, TORCHRUNS).num_threads is None
    assert share_cores(EIGHT, 0, 2, TORCHRUNS).num_threads == 4
    assert share_cores(replace(EIGHT, launcher_variables=None), 0, 2, TORCHRUNS).num_threads == 4


def test_ranks_that_were_bound_to_cores_stay_there_and_use_all_of_them():
    share = share_cores(replace(EIGHT, cores=(2, 3, 4)), 0, 2, TORCHRUNS)
    assert (share.num_threads, share.cores) == (3, None)


@pytest.mark.parametrize("value", ["0", "-1", "two", "1.5", "\u0661"])
def test_a_number_of_threads_that_is_none_is_refused(value: str):
    with pytest.raises(ConfigError, match=f"SPMD_WORKER_THREADS={value} must be a whole number"):
        share_cores(EIGHT, 0, 2, {"SPMD_WORKER_THREADS": value})


def test_a_quota_is_read_as_the_kernel_writes_it():
    assert parse_quota("max", "100000") is None
    assert parse_quota("-1", "100000") is None
    assert parse_quota("250000", "100000") == 2.5


def test_a_share_is_taken_as_far_as_the_system_allows(monkeypatch: pytest.MonkeyPatch):
    threads: list[int] = []
    bound: list[tuple[int, ...]] = []
    monkeypatch.setattr(cores.os, "sched_setaffinity", lambda pid, own: bound.append(own))
    take_share(CoreShare(None, None, ""), threads.append, binds=True)
    take_share(CoreShare(2, (4, 5), ""), threads.append, binds=False)
    assert (threads, bound) == ([2], [])
    take_share(CoreShare(3, (4, 5), ""), threads.append, binds=True)
    assert (threads, bound) == ([2, 3], [(4, 5)])

    def forbid(pid: int, own: tuple[int, ...]) -> None:
        raise PermissionError

    monkeypatch.setattr(cores.os, "sched_setaffinity", forbid)
    take_share(CoreShare(4, (4, 5), ""), threads.append, binds=True)
    assert threads == [2, 3, 4]


def test_this_node_is_seen_as_it_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    node = look_at_node()
    assert node.cores == tuple(sorted(os.sched_getaffinity(0)))
    assert node.launcher_variables is not None
    assert named_values(["A=1", "B=x=y", ""]) == {"A": "1", "B": "x=y"}
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    monkeypatch.setattr(cores, "_QUOTA_FILES", {str(tmp_path / "cpu.max"): cores._read_v2})
    assert look_at_node().quota == 1.5
    (tmp_path / "cpu.cfs_quota_us").write_text("200000\n")
    (tmp_path / "cpu.cfs_period_us").write_text("100000\n")
    monkeypatch.setattr(
        cores,
        "_QUOTA_FILES",
        {str(tmp_path / "nosuch"): cores._read_v2, str(tmp_path / "cpu.cfs_quota_us"): cores._read_v1},
    )
    assert look_at_node().quota == 2.0


SOURCE = """
import os
import torch
from spmd_worker.parallel.cores import look_at_node, share_cores, take_share

share = share_cores(look_at_node(), int(os.environ["LOCAL_RANK"]), 2, os.environ)
take_share(share, torch.set_num_threads, binds=True)
own = sorted(os.sched_getaffinity(0))
os.write(1, f"{torch.get_num_threads()} {len(own)} {own[0]}\\n".encode())
"""


def test_under_torchrun_ranks_have_their_cores_unless_the_user_said_otherwise(tmp_path: Path):
    script = tmp_path / "script.py"
    script.write_text(SOURCE)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    num_cores = len(os.sched_getaffinity(0))
    done = ranks.run_command(["env", "-u", "OMP_NUM_THREADS", *launcher], 60.0)
    assert done.returncode == 0, done.output
    lines = [tuple(map(int, line.split())) for line in done.stdout.splitlines()]
    assert [line[0] for line in lines] == [max(num_cores // 2, 1)] * 2, done.output
    assert [line[1] for line in lines] == [num_cores // 2 or 1] * 2
    assert num_cores < 2 or lines[0][2] != lines[1][2]
    done = ranks.run_command(launcher, 60.0, {"OMP_NUM_THREADS": "1"})
    assert [line.split()[:2] for line in done.stdout.splitlines()] == [["1", str(num_cores)]] * 2, done.output
