"""Names of the modules of the tests: no two are the same."""

from collections import Counter
from pathlib import Path

from planting import REPOSITORY


def names_of_two_modules(tests: Path) -> list[str]:
    """Names that two modules below `tests` share, conftest.py apart."""
    names = Counter(path.name for path in tests.rglob("*.py"))
    return sorted(name for name, count in names.items() if count > 1 and name != "conftest.py")


def test_modules_of_tests_have_unique_names():
    """Every folder of tests is a place to import from: of two modules with one name, the second cannot be imported."""
    assert names_of_two_modules(REPOSITORY / "tests") == []


def test_name_check_detects_helper_with_duplicate_name(tmp_path: Path):
    for path in (
        "histories.py",
        "scheduler/histories.py",
        "mirror/step_histories.py",
        "conftest.py",
        "mirror/conftest.py",
    ):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).touch()
    assert names_of_two_modules(tmp_path) == ["histories.py"]
