"""What full collections of a job look at."""

import gc
import subprocess
import sys
from pathlib import Path

import pytest
from ranks import REPOSITORY, run_script
from waiting import LIMIT_S

from spmd_worker.worker.memory.garbage import hold_collections, resume_collections

_ALONE = """
import gc, importlib, weakref
from spmd_worker.worker.memory import garbage
settled_objects = importlib.reload(garbage).settled_objects
gc.disable()
gc.unfreeze()

class Cycle:
    def __init__(self):
        self.own = self
"""
"""Of the process that forks it nothing is left: it has counted its objects, and frozen them."""

_FREEZES = """
before = len(gc.callbacks)
with settled_objects():
    assert gc.get_freeze_count() == 0
    gc.collect(1)
    assert gc.get_freeze_count() == 0, "a lesser one has not looked at all"
    gc.collect()
    settled = gc.get_freeze_count()
    assert settled > 10_000
    gone = weakref.ref(Cycle())
    gc.collect()
    assert gone() is None, "what came after it is looked at"
    assert gc.get_freeze_count() <= settled
    assert len(gc.callbacks) == before
assert gc.get_freeze_count() == 0
"""

_ENDS_EARLY = """
before = len(gc.callbacks)
try:
    with settled_objects():
        raise KeyError
except KeyError:
    pass
assert (len(gc.callbacks), gc.get_freeze_count()) == (before, 0)
gc.collect()
assert gc.get_freeze_count() == 0
"""


_OF_CALLER = """
gc.collect()
gc.freeze()
frozen = gc.get_freeze_count()
assert frozen > 10_000
with settled_objects():
    ours = [Cycle() for _ in range(100)]
    gc.collect()
    # A frozen object goes like any other when nobody has it any more.
    assert frozen - 1_000 < gc.get_freeze_count() <= frozen
assert frozen - 1_000 < gc.get_freeze_count() <= frozen
assert len(ours) == 100
"""


@pytest.mark.parametrize(
    "program",
    [
        pytest.param(_FREEZES, id="first_collection_freezes_survivors"),
        pytest.param(_ENDS_EARLY, id="early_end_removes_callback"),
        pytest.param(_OF_CALLER, id="objects_frozen_by_caller_stay_frozen"),
    ],
)
def test_settled_objects_are_frozen_once(program: str, tmp_path: Path):
    """In a process that has the program's objects alone: here a collection looks at those of all tests, for seconds."""
    (tmp_path / "program.py").write_text(_ALONE + program)
    run_script([tmp_path / "program.py"], LIMIT_S).checked()


_COLLECTIONS = "sum(each['collections'] for each in gc.get_stats())"

_PROGRAM = f"""
import gc
from spmd_worker.worker.memory.garbage import hold_collections, resume_collections
HOLD
before = {_COLLECTIONS}
import asyncio, http.server, numpy, unittest.mock, xml.dom.minidom
print({_COLLECTIONS} - before)
resume_collections()
print(gc.isenabled(), gc.get_freeze_count() > 10_000)
"""


def test_no_collections_during_imports():
    assert _printed(_PROGRAM.replace("HOLD", "hold_collections()")) == ["0", "True", "True"]


@pytest.mark.stress
def test_collections_during_imports_are_counted():
    """Negative control."""
    num_collections, is_enabled, is_frozen = _printed(_PROGRAM.replace("HOLD", ""))
    assert int(num_collections) > 10
    assert (is_enabled, is_frozen) == ("True", "False")


_MODEL = REPOSITORY / "scripts" / "demo" / "model"
_JOB = [f"model.path={_MODEL}", "job.input=-", "job.output=-", "device=cpu"]
_SERVER = [f"model.path={_MODEL}", "serve.port=0", "device=cpu"]

_COMMAND = """
import gc, runpy, sys
from spmd_worker.frontends import rank_program
from spmd_worker.worker.memory import garbage
rank_program.run_rank = lambda *args: print(gc.isenabled(), gc.get_freeze_count() > 100_000) or 0
FORGET
sys.argv = {arguments}
{run}
"""
_FORGETS = "garbage.resume_collections = lambda: None"
_COMMANDS = pytest.mark.parametrize(
    ("arguments", "run"),
    [
        pytest.param(_JOB, f"runpy.run_path({str(REPOSITORY / 'launch.py')!r}, run_name='__main__')", id="job"),
        pytest.param(
            *(_SERVER, "runpy.run_module('spmd_worker.serve', run_name='__main__')"),
            marks=pytest.mark.stress,
            id="server",
        ),
    ],
)


def _seen_by_command(arguments: list[str], run: str, forget: str) -> list[str]:
    return _printed(_COMMAND.format(arguments=["command", *arguments], run=run).replace("FORGET", forget))


@_COMMANDS
def test_commands_resume_collections_before_loading(arguments: list[str], run: str):
    assert _seen_by_command(arguments, run, "") == ["True", "True"]


@pytest.mark.stress
@_COMMANDS
def test_commands_that_forget_collections_are_seen(arguments: list[str], run: str):
    """Negative control."""
    assert _seen_by_command(arguments, run, _FORGETS) == ["False", "False"]


def test_collections_disabled_by_caller_stay_disabled():
    gc.disable()
    try:
        frozen = gc.get_freeze_count()
        hold_collections()
        resume_collections()
        assert not gc.isenabled()
        assert gc.get_freeze_count() == frozen
    finally:
        gc.enable()


def _printed(program: str) -> list[str]:
    command = [sys.executable, "-c", program]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=240).stdout.split()
