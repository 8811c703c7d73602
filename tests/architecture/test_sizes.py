"""Every module says what it is; how long things are is counted as people read it."""

from collections import Counter
from pathlib import Path

from planting import REPOSITORY, plant
from size_rules import missing_docstrings, size_figures

POOL = "kv_cache/block_pool.py"


def test_every_module_says_what_it_is():
    assert missing_docstrings(REPOSITORY) == []


def test_a_module_that_says_nothing_is_found(tmp_path: Path):
    plant(tmp_path, {"kv_cache/block_ops.py": "x = 1\n"})
    assert missing_docstrings(tmp_path) == ["kv_cache/block_ops.py:1: no module docstring: say what it is"]


def test_functions_classes_and_files_are_counted_with_their_decorators(tmp_path: Path):
    plant(tmp_path, {POOL: '"""Pool."""\n@decorated\nclass Pool:\n' + "    x = 1\n" * 249 + "def f():\n    pass\n"})
    lines, files, functions, classes = size_figures(tmp_path)
    assert lines.endswith(" lines")
    assert f"longest: {POOL} (254)" in files
    assert f"{POOL}:253 f (2)" in functions
    assert f"1 classes: median 251 lines, p95 251; longest: {POOL}:3 Pool (251)" in classes


def names_of_two_modules(tests: Path) -> list[str]:
    """Names that two modules below `tests` share, conftest.py apart."""
    names = Counter(path.name for path in tests.rglob("*.py"))
    return sorted(name for name, count in names.items() if count > 1 and name != "conftest.py")


def test_no_two_modules_of_the_tests_have_one_name():
    """Every folder of tests is a place to import from: of two modules with one name, the second cannot be imported."""
    assert names_of_two_modules(REPOSITORY / "tests") == []


def test_a_helper_with_the_name_of_another_is_found(tmp_path: Path):
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
