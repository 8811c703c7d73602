"""docs/lab/guarantees.md is what the tests' markers say, and every guarantee has a test and a negative control."""

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from ranks import REPOSITORY

TESTS = REPOSITORY / "tests"


@pytest.fixture(scope="module")
def guarantee_table() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(REPOSITORY / "scripts"))
        yield import_module("guarantee_table")


@pytest.fixture(scope="module")
def found(guarantee_table: ModuleType) -> dict[str, Any]:
    """Guarantees that all tests name, read once: that takes seconds."""
    return guarantee_table.guarantees(TESTS)


def test_every_guarantee_has_a_test_and_a_control(guarantee_table: ModuleType, found: dict[str, Any]):
    assert len(found) >= 105
    assert guarantee_table.faults(found) == []


def test_page_is_current(guarantee_table: ModuleType, found: dict[str, Any]):
    written = (REPOSITORY / "docs" / "lab" / "guarantees.md").read_text(encoding="utf-8")
    assert written == guarantee_table.document(found), "run python scripts/guarantee_table.py"


def test_missing_test_or_control_is_reported(guarantee_table: ModuleType, tmp_path: Path, control):
    (tmp_path / "test_x.py").write_text(
        "import pytest\n"
        "@pytest.mark.guarantee('kept')\ndef test_kept(): ...\n"
        "@pytest.mark.stress\n@pytest.mark.control('kept')\ndef test_kept_broken(): ...\n"
        "@pytest.mark.guarantee('bare')\ndef test_bare(): ...\n"
        "@pytest.mark.guarantee('inside', is_control_inside=True)\ndef test_inside(): ...\n"
        "@pytest.mark.control('renamed')\ndef test_renamed(): ...\n"
    )
    found = guarantee_table.guarantees(tmp_path)
    assert guarantee_table.faults(found) == [
        "renamed: no test has this guarantee",
        "bare: no negative control",
    ]
    rows = guarantee_table.document(found).splitlines()[-4:]
    assert "| kept | test_x.py::test_kept | ::test_kept_broken (s) |" in rows
    assert "| inside | test_x.py::test_inside | in the test |" in rows
    with control("renamed"):
        assert guarantee_table.faults(found) == []
