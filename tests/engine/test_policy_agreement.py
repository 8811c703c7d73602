"""Ranks compare the numerical policies of all their workers before the first step."""

from types import SimpleNamespace
from typing import Any

import pytest

from spmd_worker.base.errors import RanksDisagreeError
from spmd_worker.base.numerical_policy import NumericalPolicy, Region, source_version
from spmd_worker.engine.startup import _check_kernels
from spmd_worker.replica.lockstep.agreement import canonical
from spmd_worker.worker.worker_base import WorkerReport

OWN = {"norm": Region("native", "1"), "row-parallel product": Region("native", "1", {"leaves": 4})}


def report(**changes: Region) -> WorkerReport:
    return WorkerReport(arithmetic="avx2", numerical_policy=NumericalPolicy({**OWN, **changes}).as_dict())


def check(*ranks: list[WorkerReport]) -> None:
    """Rank 0's check; each rank has some workers."""
    sent = [[{"arithmetic": each.arithmetic, **each.numerical_policy["regions"]} for each in rank] for rank in ranks]
    channel: Any = SimpleNamespace(gather=lambda own: [own, *map(canonical, sent[1:])])
    executor: Any = SimpleNamespace(reports=lambda: ranks[0])
    _check_kernels(executor, channel)


@pytest.mark.guarantee("Engines of equal numerical policies compute equal bits", is_control_inside=True)
def test_ranks_of_other_policies_are_refused() -> None:
    check([report()], [report()])
    check([report(), report()])
    other = report(norm=Region("native", "2"))
    for ranks in (([report()], [other]), ([report(), other],)):
        with pytest.raises(
            RanksDisagreeError,
            match=r"^ranks were given different kernels: norm\.version is .1. on rank 0, .2. on",
        ):
            check(*ranks)
    leaves = report(**{"row-parallel product": Region("native", "1", {"leaves": 2})})
    with pytest.raises(RanksDisagreeError, match=r"row-parallel product\.constants\.leaves is 4 on rank 0, 2 on"):
        check([report()], [leaves])


def test_version_follows_names_and_contents(tmp_path: Any) -> None:
    versions = []
    for name, content in (("a.py", "x"), ("a.py", "y"), ("b.py", "y")):
        folder = tmp_path / f"{len(versions)}" / "sources"
        folder.mkdir(parents=True)
        (folder / name).write_text(content)
        (folder / "notes.txt").write_text(content)
        versions.append(source_version(str(folder)))
    assert len(set(versions)) == 3
