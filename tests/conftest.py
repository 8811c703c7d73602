"""Settings for every test: one thread a process, property tests that repeat, helpers of tests/ importable by name.

TESTS_ORDER, a number, has the files run in an order that is drawn from it: no file may need another.

Imports no torch, so that the tests of torch-free code do not wait for it.
"""

import os
import random
import shutil
import sys
import tempfile
from pathlib import Path

import pytest
import run_folder
from hypothesis import HealthCheck, settings

# Read by torch when it is imported. Ranks share the cores, and one thread is how torchrun starts them.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")

TESTS = str(Path(__file__).resolve().parent)
if TESTS not in sys.path:
    # pytest's default import mode does the same; with this, `import ranks` holds under the others too.
    sys.path.append(TESTS)

settings.register_profile("house", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("house")


def pytest_configure(config: pytest.Config) -> None:
    """The processes of a run share a folder for what takes long to make, and inherit its name."""
    if not hasattr(config, "workerinput"):
        os.environ[run_folder.VARIABLE] = tempfile.mkdtemp(prefix="tests-run-")


def pytest_unconfigure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        shutil.rmtree(os.environ.pop(run_folder.VARIABLE), ignore_errors=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The tests of a file stay together: they share what takes long to make."""
    order = os.environ.get("TESTS_ORDER")
    if order:
        paths = list(dict.fromkeys(item.path for item in items))
        random.Random(int(order)).shuffle(paths)
        items.sort(key=lambda item: paths.index(item.path))
