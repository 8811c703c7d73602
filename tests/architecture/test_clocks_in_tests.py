"""No test compares a clock but those that run with nothing beside them, and each way of doing so is found."""

from pathlib import Path

import pytest
from clock_rules import clock_violations, timed_outside_the_stress_tier
from planting import REPOSITORY

PLANTED = {
    "a clock": "import time\ndef test():\n    assert time.monotonic() < 5\n",
    "a difference": "import time\ndef test():\n    start = time.time()\n    assert time.time() - start < 1\n",
    "a name": "import time\ndef test():\n    now = time.time()\n    took = now - 3\n    assert 1 < took\n",
    "an imported clock": "from time import monotonic\ndef test():\n    assert monotonic() < 5\n",
    "a loop": "import time\ndef test():\n    end = time.time() + 5\n    while time.time() < end: pass\n",
    "a function": (
        "import time\ndef seconds():\n    began = time.monotonic()\n    return time.monotonic() - began\n"
        "def test():\n    took = seconds()\n    assert took < 2\n"
    ),
    "several at once": (
        "import time\ndef seconds():\n    return time.monotonic(), 1\ndef test():\n    took, one = seconds()\n"
        "    assert took < 2\n"
    ),
    "the time of a run": "def test():\n    done = run()\n    assert done.wall_s < 9\n",
    "a script": 'SCRIPT = """\n    import time\n    began = time.time()\n    assert time.time() - began < 3\n"""\n',
    "a script with a number": 'SCRIPT = f"""\nfrom time import time\nend = time() + {3}\nassert time() < end\n"""\n',
}
ALLOWED = """
import time
import pytest
from waiting import at_least, wait_until

def test(done):
    time.sleep(0.1)
    print(time.monotonic())
    with at_least(0.3):
        wait_until(lambda: True)
    assert done.timeout == 5
    assert done.time < 5
    assert run("x", time=5) < 4

@pytest.mark.stress
@pytest.mark.timed
def test_a_figure():
    began = time.perf_counter()
    assert time.perf_counter() - began < 1
"""
BESIDE_OTHERS = """
import time
import pytest

@pytest.mark.stress
def test_a_figure():
    began = time.perf_counter()
    assert time.perf_counter() - began < 1

@pytest.mark.timed
def test_of_the_gate():
    assert time.perf_counter() < 1

@pytest.mark.stress
@pytest.mark.parametrize("many", [1, pytest.param(9, marks=pytest.mark.timed)])
def test_a_figure_of_some(many):
    assert time.perf_counter() < many
"""


def test_clocks_are_compared_only_in_timed_tests():
    """Timed tests are of the stress tier."""
    assert clock_violations(REPOSITORY / "tests") == []
    assert timed_outside_the_stress_tier(REPOSITORY / "tests") == []


def test_clock_check_detects_untimed_comparison_and_gate_test(tmp_path: Path):
    (tmp_path / "test_x.py").write_text(BESIDE_OTHERS)
    assert clock_violations(tmp_path) == [
        "test_x.py:8: time.perf_counter() - began < 1",
        "test_x.py:17: time.perf_counter() < many",
    ]
    assert timed_outside_the_stress_tier(tmp_path) == ["test_x.py:11: test_of_the_gate"]


def test_clock_check_ignores_waits_and_similar_names(tmp_path: Path):
    (tmp_path / "test_x.py").write_text(ALLOWED)
    (tmp_path / "waiting.py").write_text(PLANTED["a loop"])
    assert clock_violations(tmp_path) == []


@pytest.mark.parametrize("name", PLANTED)
def test_clock_check_detects_comparison_at_its_line(tmp_path: Path, name: str):
    (tmp_path / "test_x.py").write_text(PLANTED[name])
    (found,) = clock_violations(tmp_path)
    path, line, code = found.split(":", 2)
    assert path == "test_x.py"
    assert code.strip() in PLANTED[name].splitlines()[int(line) - 1]
