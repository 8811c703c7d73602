"""Power loss during a job: the same command ends with the same bytes from any state of the disk.

A preloaded library records the file operations of a job; a simulation (power_loss.py) derives every state that a crash
after each call may leave, by POSIX's rule (`any order`) and by that of a file system with one journal (`in order`). The
stress tier resumes from hundreds of them and prints the figures, the gate from a few.
"""

import json
import os
import random
import sys
import textwrap
from pathlib import Path
from typing import Any

import preloaded
import pytest
import ranks
from power_loss import Disk, Operation, Tree, crashes, parts_of, snapshot
from stress_seed import SEED

SCRIPT = ranks.SUPPORT / "power_loss_job.py"
CASES = ["jsonl", "parquet", "resumed", "next run"]
CASES_OF_GATE = ["jsonl"]

RIGHT_AND_PLANTED = f"""
    import sys
    from unittest import mock
    sys.path.insert(0, {str(SCRIPT.parent)!r})
    import power_loss_job
    power_loss_job.main()
    sys.argv[2:] = ["0", sys.argv[3], "jsonl, any order"]
    from spmd_worker.frontends.batch import output_file
    from spmd_worker.frontends.batch.run_dir import journal

    def records_first(self, offset):
        calls = []
        write = lambda *arguments: calls.append((write_all, *arguments))
        sync = lambda *arguments: calls.append((right_sync, *arguments))
        write_all, right_sync = journal._write_all, self._sync
        with mock.patch.object(journal, "_write_all", write), mock.patch.object(self, "_sync", sync):
            write_pending(self, offset)
        for call, *arguments in calls[2:] + calls[:2]:
            call(*arguments)

    write_pending = journal.RowJournal._write_pending
    power_loss_job.STOPS = True
    with mock.patch.dict(power_loss_job.RULES, {{"any order": {{"has_syncs": False}}}}):
        power_loss_job.main()
    with mock.patch.object(output_file, "sync_stream", lambda stream: stream.flush()):
        power_loss_job.main()
    with mock.patch.object(journal.RowJournal, "_write_pending", records_first):
        power_loss_job.main()
    """


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return preloaded.build("recorded_io", tmp_path_factory.mktemp("recorder"))


def run(library: Path, script: Path, folder: Path, count: int, *cases: str) -> tuple[list[dict[str, Any]], str]:
    """The findings by case, and the output."""
    # A fresh interpreter: what is preloaded is loaded when a program starts.
    command = [sys.executable, str(script), str(folder), str(count), str(SEED), *cases]
    path = os.pathsep.join(ranks.IMPORT_PATH)
    done = ranks.run_command(command, 1200.0, {"LD_PRELOAD": str(library), "PYTHONPATH": path})
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    for each in found:
        print(f"\nPOWER LOSS, seed {SEED}: {json.dumps(each)}", end="")
    return found, done.output


@pytest.fixture(scope="module")
def right_and_planted(library: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], str]:
    """Findings of the cases of the gate, then of the planted faults, and the output: one process imports all once."""
    folder = tmp_path_factory.mktemp("losses")
    (folder / "script.py").write_text(textwrap.dedent(RIGHT_AND_PLANTED))
    return run(library, folder / "script.py", folder, 2, *(f"{case}, any order" for case in CASES_OF_GATE))


@pytest.mark.guarantee("Durable; output has its name when complete")
@pytest.mark.matrix
def test_power_loss_keeps_committed_rows_and_resumes(right_and_planted: tuple[list[dict[str, Any]], str]):
    found, output = right_and_planted
    assert [each["case"] for each in found[: len(CASES_OF_GATE)]] == CASES_OF_GATE, output
    for each in found[: len(CASES_OF_GATE)]:
        assert not each["troubles"], output
        assert each["resumed"] == 2
        assert each["states"] > 100


@pytest.mark.stress
@pytest.mark.parametrize("rule", ["any order", "in order"])
@pytest.mark.parametrize("case", CASES)
def test_job_resumes_from_random_power_loss_states(library: Path, tmp_path: Path, case: str, rule: str):
    """All are looked at. Gone on from are all of the first job, and those that are drawn of the others. What may be
    left where names are kept in order may be left in any order as well.
    """
    count = 100 if rule == "in order" else 0 if case == CASES[0] else 200
    (found,), output = run(library, SCRIPT, tmp_path, count, f"{case}, {rule}")
    assert not found["troubles"], output
    assert found["resumed"] == (count or found["states"])
    assert not found["refused"], output


@pytest.mark.control("Durable; output has its name when complete")
@pytest.mark.matrix
def test_power_loss_test_detects_wrong_write_order(right_and_planted: tuple[list[dict[str, Any]], str]):
    """Negative controls: syncs that do nothing, an output that is renamed before it is synced, records before lines."""
    found, output = right_and_planted
    unsynced, unsynced_output, records_first = (str(each["some"]) for each in found[len(CASES_OF_GATE) :])
    assert "rows were committed and 0 are there" in unsynced, output
    assert "something else than an output has its name" in unsynced_output, output
    assert "a record names a line that is not there" in records_first, output


# The simulation.


def states(folder: Path, operations: list[Operation], **rule: bool) -> list[Tree]:
    """Possible states after all operations, which name the folder's inode 0 and new inodes by any number."""
    disk = Disk(snapshot(folder), **rule)
    for operation in operations:
        inode = folder.stat().st_ino if operation.inode == 0 else operation.inode
        disk.apply(operation._replace(inode=inode))
    return [tree for _, tree in crashes(disk, random.Random(1), 4)]


WRITTEN = [Operation("create", -1, path="new"), Operation("write", -1, data=b"x" * 600)]
RENAMED = Operation("rename", -1, path="new", other="name")
SYNCED, FOLDER_SYNCED = Operation("sync", -1), Operation("sync", 0)


@pytest.mark.parametrize("rule", [{}, {"is_ordered": True}])
def test_unsynced_file_may_be_lost_or_truncated(tmp_path: Path, rule: dict[str, bool]):
    found = [tree.get("new") for tree in states(tmp_path, WRITTEN, **rule)]
    for content in (None, b"", bytes(600), b"x" * 512, bytes(512) + b"x" * 88, b"x" * 600):
        assert content in found
    assert all(len(content) in (0, 512, 600) for content in found if content is not None)


def test_synced_file_keeps_content_under_any_name(tmp_path: Path):
    (tmp_path / "name").write_bytes(b"old")
    found = states(tmp_path, [*WRITTEN, SYNCED, RENAMED])
    assert {tree.get("name") for tree in found} == {b"old", b"x" * 600}
    assert {tree.get("new") for tree in found} == {None, b"x" * 600}


def test_rename_before_sync_may_leave_empty_file(tmp_path: Path):
    (tmp_path / "name").write_bytes(b"old")
    found = [tree.get("name") for tree in states(tmp_path, [*WRITTEN, RENAMED, FOLDER_SYNCED])]
    assert b"" in found
    assert b"old" not in found


def test_folder_sync_makes_names_durable_in_order(tmp_path: Path):
    operations = [Operation("mkdir", -2, path="folder"), Operation("create", -1, path="folder/new"), SYNCED]
    assert {} in states(tmp_path, operations)
    assert {"folder": None} in states(tmp_path, [*operations, FOLDER_SYNCED])
    assert states(tmp_path, operations, is_ordered=True) == [{"folder": None, "folder/new": b""}] * 4
    assert {} in states(tmp_path, [*operations, FOLDER_SYNCED], has_syncs=False)


def test_later_names_alone_survive_only_without_ordering(tmp_path: Path):
    operations = [Operation("create", -1, path="first"), Operation("create", -2, path="second")]
    assert {"second": b""} in states(tmp_path, operations)
    assert {"second": b""} not in states(tmp_path, operations, is_ordered=True)
    assert {"first": b""} in states(tmp_path, operations, is_ordered=True)


def test_writes_are_cut_where_the_files_sectors_end():
    parts = parts_of(Operation("write", 1, 500, data=b"x" * 20))
    assert [part.end for part in parts if not part.grows] == [12]
    assert [part.begin for part in parts if part.begin] == [12]
