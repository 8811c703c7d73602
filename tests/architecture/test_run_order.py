"""The list of the files that run first names files that exist."""

from pathlib import Path

from conftest import LONGEST_FILES, TESTS


def test_every_file_that_runs_first_exists():
    assert [name for name in LONGEST_FILES if not (Path(TESTS) / name).is_file()] == []
