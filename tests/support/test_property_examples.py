"""Property tests of the gate with all of their examples, and the number that they have."""

import re
import sys

import pytest
import ranks
from property_examples import VARIABLE, num_examples, part_of

TESTS = ranks.REPOSITORY / "tests"
USES = re.compile(r"^from property_examples import", re.MULTILINE)
FILES = sorted(
    path.relative_to(TESTS).as_posix()
    for path in TESTS.rglob("test_*.py")
    if path.name != "test_property_examples.py" and USES.search(path.read_text(encoding="utf-8"))
)


def test_gate_draws_a_fifth_of_examples(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    assert [num_examples(count) for count in (600, 40, 15, 4)] == [120, 10, 10, 4]
    assert [part_of("abcdefg", turn) for turn in range(4)] == ["adg", "be", "cf", "adg"]
    monkeypatch.setenv(VARIABLE, "1")
    assert [num_examples(count) for count in (600, 40, 15, 4)] == [600, 40, 15, 4]
    assert part_of("abcdefg", 1) == "abcdefg"
    assert len(FILES) > 5


@pytest.mark.stress
@pytest.mark.parametrize("name", FILES)
def test_properties_hold_in_all_examples(name: str):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(TESTS / name)]
    ranks.run_command([*command, "-m", "not stress and not gpu"], 1000.0, {VARIABLE: "1"}).checked()
