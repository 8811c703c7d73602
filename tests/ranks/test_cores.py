"""Threads and cores of the ranks of one node, for what a node, a launcher and a user can say."""

import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import ranks

from spmd_worker.base.errors import ConfigError
from spmd_worker.ranks import cores
from spmd_worker.ranks.cores import (
    CoreShare,
    Node,
    look_at_node,
    parse_quota,
    share_cores,
    take_share,
    waiting_variables,
)

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


def test_openmps_own_variables_of_binding_win():
    share = share_cores(EIGHT, 0, 2, TORCHRUNS | {"OMP_PROC_BIND": "close"})
    assert (share.num_threads, share.cores) == (4, None)


def test_cores_that_are_near_each_other_go_to_the_same_rank(tmp_path: Path):
    """Two processors of two cores of two threads, numbered as kernels do: a slice of numbers would span both."""
    for core in range(8):
        folder = tmp_path / f"cpu{core}" / "topology"
        folder.mkdir(parents=True)
        (folder / "physical_package_id").write_text(f"{core % 4 // 2}\n")
        (folder / "core_id").write_text(f"{core % 2}\n")
    near = tuple(sorted(range(8), key=lambda core: cores.place_of(core, str(tmp_path))))
    assert near == (0, 4, 1, 5, 2, 6, 3, 7)
    node = replace(EIGHT, cores=near)
    assert [share_cores(node, rank, 2, TORCHRUNS).cores for rank in range(2)] == [(0, 4, 1, 5), (2, 6, 3, 7)]
    assert cores.place_of(3, str(tmp_path / "nosuch")) == (0, 0, 3)


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
    assert sorted(node.cores) == sorted(os.sched_getaffinity(0))
    assert node.launcher_variables is not None
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
from spmd_worker.ranks.cores import look_at_node, share_cores, take_share

share = share_cores(look_at_node(), int(os.environ["LOCAL_RANK"]), 2, os.environ)
take_share(share, torch.set_num_threads, binds=True)
own = sorted(os.sched_getaffinity(0))
os.write(1, f"{torch.get_num_threads()} {len(own)} {own[0]}\\n".encode())
"""


def lines_of(launcher_arguments: list[str], variables: dict[str, str] | None = None) -> list[list[int]]:
    """Threads, number of cores and first core of each of two ranks."""
    launcher = ranks.torchrun(2)
    unset = [] if variables else ["env", "-u", "OMP_NUM_THREADS"]
    done = ranks.run_command([*unset, *launcher, *launcher_arguments], 60.0, variables)
    assert done.returncode == 0, done.output
    return [[int(number) for number in line.split()] for line in done.stdout.splitlines()]


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "script.py"
    path.write_text(SOURCE)
    return str(path)


@pytest.mark.parametrize("name", ["OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "KMP_LIBRARY"])
def test_how_torchs_threads_wait_is_the_users_own_word_first(name: str):
    assert waiting_variables({}) == waiting_variables({name: ""}) == {"OMP_WAIT_POLICY": "PASSIVE"}
    assert waiting_variables({name: "1000"}) == {}


@pytest.mark.matrix
def test_under_torchrun_ranks_have_their_cores_unless_the_user_said_otherwise(script: str):
    num_cores = len(os.sched_getaffinity(0))
    lines = lines_of([script])
    num_own = num_cores // 2 or 1
    assert [line[:2] for line in lines] == [[num_own, num_own]] * 2
    assert num_cores < 2 or lines[0][2] != lines[1][2]
    assert [line[:2] for line in lines_of([script], {"OMP_NUM_THREADS": "1"})] == [[1, num_cores]] * 2


@pytest.mark.matrix
def test_a_wrapper_around_each_rank_is_not_taken_for_torchrun(script: str, tmp_path: Path):
    """It inherits the 1 that torchrun has set, which would look like a user's own."""
    wrapper = tmp_path / "wrapper.sh"
    wrapper.write_text(f'{sys.executable} "$@"; exit $?\n')
    num_own = len(os.sched_getaffinity(0)) // 2 or 1
    assert [line[1] for line in lines_of(["--no-python", "bash", str(wrapper), script])] == [num_own] * 2
