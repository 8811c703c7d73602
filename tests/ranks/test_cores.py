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


def test_ranks_share_the_cores_evenly():
    shares = [share_cores(EIGHT, rank, 2, TORCHRUNS) for rank in range(2)]
    assert [(share.num_threads, share.cores) for share in shares] == [(4, (0, 1, 2, 3)), (4, (4, 5, 6, 7))]
    assert shares[0].reason == "2 ranks share 8 cores: 4 threads each, on cores of their own"
    assert share_cores(EIGHT, 2, 3, {}).cores == (4, 5)


def test_two_ranks_on_two_cores_have_one_thread():
    node = Node(cores=(4, 9), launcher_cores=(4, 9), launcher_variables={})
    assert [share_cores(node, rank, 2, TORCHRUNS).cores for rank in range(2)] == [(4,), (9,)]
    assert share_cores(node, 0, 2, TORCHRUNS).num_threads == 1


def test_ranks_beyond_the_cores_share_all_of_them():
    """Each has one thread."""
    share = share_cores(replace(EIGHT, cores=(0, 1), launcher_cores=(0, 1)), 3, 4, {})
    assert (share.num_threads, share.cores) == (1, None)


def test_container_quota_limits_the_threads():
    assert share_cores(replace(EIGHT, quota=4.5), 0, 2, {}).num_threads == 2
    assert share_cores(replace(EIGHT, quota=0.5), 0, 2, {}).num_threads == 1
    alone = share_cores(replace(EIGHT, quota=2.0), 0, 1, {})
    assert (alone.num_threads, alone.cores) == (2, None)


def test_single_rank_keeps_its_cores():
    share = share_cores(EIGHT, 0, 1, {})
    assert (share.num_threads, share.cores) == (None, None)


def test_user_thread_count_overrides_the_share():
    assert share_cores(EIGHT, 0, 2, {"OMP_NUM_THREADS": "3"}).num_threads is None
    share = share_cores(EIGHT, 0, 2, {"SPMD_WORKER_THREADS": "5", "OMP_NUM_THREADS": "1"})
    assert (share.num_threads, share.cores) == (5, None)


def test_torchrun_thread_default_is_distinguished_from_user_setting():
    """torchrun changes its own environment after its start, so what it was started with tells who set the 1."""
    users = replace(EIGHT, launcher_variables={"OMP_NUM_THREADS": "1"})
    assert share_cores(users, 0, 2, TORCHRUNS).num_threads is None
    assert share_cores(EIGHT, 0, 2, TORCHRUNS).num_threads == 4
    assert share_cores(replace(EIGHT, launcher_variables=None), 0, 2, TORCHRUNS).num_threads == 4


def test_bound_ranks_keep_and_use_their_cores():
    share = share_cores(replace(EIGHT, cores=(2, 3, 4)), 0, 2, TORCHRUNS)
    assert (share.num_threads, share.cores) == (3, None)


def test_openmp_binding_variables_disable_our_binding():
    share = share_cores(EIGHT, 0, 2, TORCHRUNS | {"OMP_PROC_BIND": "close"})
    assert (share.num_threads, share.cores) == (4, None)


def test_neighbouring_cores_go_to_the_same_rank(tmp_path: Path):
    """Two processors of two cores of two threads, numbered as kernels do: a slice of numbers would span both."""
    for core in range(8):
        folder = tmp_path / f"cpu{core}" / "topology"
        folder.mkdir(parents=True)
        (folder / "physical_package_id").write_text(f"{core % 4 // 2}\n")
        (folder / "core_id").write_text(f"{core % 2}\n")
    near = tuple(sorted(range(8), key=lambda core: cores.core_order(core, str(tmp_path))))
    assert near == (0, 4, 1, 5, 2, 6, 3, 7)
    node = replace(EIGHT, cores=near)
    assert [share_cores(node, rank, 2, TORCHRUNS).cores for rank in range(2)] == [(0, 4, 1, 5), (2, 6, 3, 7)]
    assert cores.core_order(3, str(tmp_path / "nosuch")) == (0, 0, 3)


@pytest.mark.parametrize("value", ["0", "-1", "two", "1.5", "\u0661"])
def test_invalid_thread_count_is_rejected(value: str):
    with pytest.raises(ConfigError, match=rf"^SPMD_WORKER_THREADS={value} must .*whole number"):
        share_cores(EIGHT, 0, 2, {"SPMD_WORKER_THREADS": value})


def test_cpu_quota_is_parsed_like_the_kernel_format():
    assert parse_quota("max", "100000") is None
    assert parse_quota("-1", "100000") is None
    assert parse_quota("250000", "100000") == 2.5


def test_core_share_is_applied_as_permitted(monkeypatch: pytest.MonkeyPatch):
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


def test_node_description_matches_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    node = look_at_node()
    assert sorted(node.cores) == sorted(os.sched_getaffinity(0))
    assert node.launcher_variables is not None
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    monkeypatch.setattr(cores, "_QUOTA_FILES", [(tmp_path / "cpu.max",)])
    assert look_at_node().quota == 1.5
    (tmp_path / "cpu.cfs_quota_us").write_text("200000\n")
    (tmp_path / "cpu.cfs_period_us").write_text("100000\n")
    older = (tmp_path / "cpu.cfs_quota_us", tmp_path / "cpu.cfs_period_us")
    monkeypatch.setattr(cores, "_QUOTA_FILES", [(tmp_path / "nosuch",), older])
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
    done = ranks.run_command([*unset, *launcher, *launcher_arguments], 240.0, variables).checked()
    return [[int(number) for number in line.split()] for line in done.stdout.splitlines()]


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "script.py"
    path.write_text(SOURCE)
    return str(path)


@pytest.mark.parametrize("name", ["OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "KMP_LIBRARY"])
def test_wait_policy_of_the_user_is_kept(name: str):
    assert waiting_variables({}) == waiting_variables({name: ""}) == {"OMP_WAIT_POLICY": "PASSIVE"}
    assert waiting_variables({name: "1000"}) == {}


@pytest.mark.stress
def test_torchrun_ranks_have_their_own_cores(script: str):
    """A user's OMP_NUM_THREADS leaves them unbound."""
    num_cores = len(os.sched_getaffinity(0))
    lines = lines_of([script])
    num_own = num_cores // 2 or 1
    assert [line[:2] for line in lines] == [[num_own, num_own]] * 2
    assert num_cores < 2 or lines[0][2] != lines[1][2]
    assert [line[:2] for line in lines_of([script], {"OMP_NUM_THREADS": "1"})] == [[1, num_cores]] * 2


@pytest.mark.stress
def test_rank_wrapper_is_not_mistaken_for_torchrun(script: str, tmp_path: Path):
    """It inherits the 1 that torchrun has set, which would look like a user's own."""
    wrapper = tmp_path / "wrapper.sh"
    wrapper.write_text(f'{sys.executable} "$@"; exit $?\n')
    num_own = len(os.sched_getaffinity(0)) // 2 or 1
    assert [line[1] for line in lines_of(["--no-python", "bash", str(wrapper), script])] == [num_own] * 2
