"""What the README promises stands in a table of docs/decisions.md, each line with its test and its negative control."""

import re
from pathlib import Path

from planting import REPOSITORY

TITLE = "### What the README promises"
NAMED = re.compile(r"([\w/]+\.py)?::(\w+?)(_\.\.\.)?(?![\w.])")


def rows_of(text: str) -> list[list[str]]:
    """Of the table below the title: guarantee, test, control."""
    section = text.partition(TITLE)[2].partition("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line[:1] == "|"]
    return rows[2:]


def faults_of(rows: list[list[str]], tests: Path) -> list[str]:
    """A cell that names no test, or one that is not there. `in it`: the control is in the test itself."""
    found = []
    for guarantee, *cells in rows:
        file = ""
        for cell, is_control in zip(cells, (False, True), strict=True):
            named = NAMED.findall(cell)
            if not named and not (is_control and cell == "in it"):
                found.append(f"{guarantee}: no {'control' if is_control else 'test'} is named")
            for path, name, is_cut in named:
                file = path or file
                source = (tests / file).read_text(encoding="utf-8") if (tests / file).is_file() else ""
                if len(re.findall(rf"def {name}{'_' if is_cut else '[(]'}", source)) != 1:
                    found.append(f"{guarantee}: {file}::{name}{is_cut}")
    return found


def test_each_guarantee_of_the_readme_has_its_test_and_its_control():
    rows = rows_of((REPOSITORY / "docs" / "decisions.md").read_text(encoding="utf-8"))
    assert len(rows) > 60
    assert faults_of(rows, REPOSITORY / "tests") == []


def test_that_table_is_held_against_the_tests(tmp_path: Path):
    """Negative control."""
    (tmp_path / "test_x.py").write_text("def test_one(): ...\ndef test_two_a(): ...\ndef test_two_b(): ...\n")
    text = f"{TITLE}\n\n| guarantee | test | control |\n| --- | --- | --- |\n"
    assert faults_of(rows_of(f"{text}| a | test_x.py::test_one | in it |\n\n## More\n| b | c | d |"), tmp_path) == []
    for test, control, fault in (
        ("test_x.py::test_one", "", "a: no control is named"),
        ("in it", "test_x.py::test_one", "a: no test is named"),
        ("test_x.py::test_one", "::test_gone", "a: test_x.py::test_gone"),
        ("test_x.py::test_two_...", "in it", "a: test_x.py::test_two_..."),
        ("test_y.py::test_one", "in it", "a: test_y.py::test_one"),
    ):
        assert faults_of(rows_of(f"{text}| a | {test} | {control} |"), tmp_path) == [fault]
