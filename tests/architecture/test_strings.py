"""No floor knows a later one by a string, and each way of naming one is found."""

from pathlib import Path

import pytest
from planting import CLEAN_HOUSE, REPOSITORY, plant
from string_rules import string_violations

CONFIG, SCHEDULER = "spmd_worker/base/config/schema.py", "spmd_worker/replica/scheduler/scheduler.py"
HOUSE = {"spmd_worker/frontends/batch/job.py": '"""A job."""\n\n\nclass JobRun:\n    """One."""\n'}

PLANTED = [
    (CONFIG, "PLACES = ('/batch/job.py',)", "/batch/job.py is of spmd_worker.frontends.batch.job, which stands below"),
    (CONFIG, "PLACE = 'see job.py'", "job.py is of spmd_worker.frontends.batch.job, which stands below"),
    (CONFIG, "PLACE = '/scheduler/queues.py'", "/scheduler/queues.py is not there"),
    (CONFIG, "def f(x):\n    return f'{x}/batch/job.py'", "stands below"),
    (CONFIG, "NAME = 'spmd_worker.frontends.batch.job'", "spmd_worker.frontends.batch.job stands below"),
    (CONFIG, "NAME = 'spmd_worker.frontends.batch.job.JobRun'", "spmd_worker.frontends.batch.job.JobRun stands below"),
    (CONFIG, "NAMES = ('JobRun',)", "the class JobRun is of spmd_worker.frontends.batch.job, which stands below"),
    (SCHEDULER, "NAME = 'batch.job.JobRun'", "the class batch.job.JobRun is of spmd_worker.frontends.batch.job"),
]

ALLOWED = [
    (SCHEDULER, "NAME = 'spmd_worker.replica.sequence.request'"),
    (SCHEDULER, "PLACE = '/sequence/request.py'"),
    (SCHEDULER, "NAME = 'another.py'"),
    (CONFIG, "TEXT = 'this JobRun was closed: make a new one'"),
    (CONFIG, "def f():\n    '''What spmd_worker.frontends.batch.job takes.'''"),
    ("spmd_worker/frontends/batch/input/row_reader.py", "NAME = 'JobRun'"),
]


def test_floors_name_no_later_floor():
    assert string_violations(REPOSITORY) == []


@pytest.mark.parametrize(("path", "code", "words"), PLANTED, ids=lambda value: str(value)[:50])
def test_string_check_detects_name_at_its_line(tmp_path: Path, path: str, code: str, words: str):
    found = string_violations(plant(tmp_path, {**HOUSE, path: f"+\n{code}\n"}))
    line = CLEAN_HOUSE[path].count("\n") + 2 + code.count("\n")
    assert len(found) == 1
    assert found[0].startswith(f"{path}:{line}: ")
    assert words in found[0]


@pytest.mark.parametrize(("path", "code"), ALLOWED, ids=lambda value: str(value)[:50])
def test_earlier_floors_and_texts_are_no_violation(tmp_path: Path, path: str, code: str):
    assert string_violations(plant(tmp_path, {**HOUSE, path: f"+\n{code}\n"})) == []
