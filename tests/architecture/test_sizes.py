"""Functions, classes and files stay short and every module says what it does; what is too long is found."""

from pathlib import Path

from planting import REPOSITORY, plant
from size_rules import function_length_violations, size_violations

POOL = "kv_cache/block_pool.py"


def long_function(name: str, num_lines: int) -> str:
    return f"def {name}():\n" + "    x = 1\n" * (num_lines - 1)


def test_no_class_and_no_file_is_long_and_every_module_has_a_docstring():
    assert size_violations(REPOSITORY) == []


def test_functions_are_short():
    assert function_length_violations(REPOSITORY) == []


def test_a_clean_house_has_no_violation(tmp_path: Path):
    plant(tmp_path, {POOL: '"""Pool."""\n' + "".join(long_function(f"f{i}", 12) for i in range(20))})
    assert size_violations(tmp_path) + function_length_violations(tmp_path) == []


def test_a_median_over_twelve_lines_is_found(tmp_path: Path):
    plant(tmp_path, {POOL: '"""Pool."""\n' + "".join(long_function(f"f{i}", 13) for i in range(20))})
    assert function_length_violations(tmp_path)[0].startswith("median of 22 functions is 13 lines, more than 12")


def test_a_tenth_of_the_functions_over_fifty_lines_is_found_and_the_longest_are_named(tmp_path: Path):
    short, long = "".join(long_function(f"f{i}", 3) for i in range(18)), long_function("giant", 51) * 2
    plant(tmp_path, {POOL: '"""Pool."""\n' + short + long})
    (found,) = function_length_violations(tmp_path)
    assert found.startswith("p95 of 22 functions is 51 lines, more than 50")
    assert "kv_cache/block_pool.py:107: giant (51)" in found


def test_a_long_class_a_long_file_and_a_missing_docstring_are_found(tmp_path: Path):
    plant(
        tmp_path,
        {
            POOL: '"""Pool."""\n@decorated\nclass Pool:\n' + "    x = 1\n" * 249,
            "kv_cache/block_table.py": '"""Table."""\n' + "x = 1\n" * 400,
            "kv_cache/block_ops.py": "x = 1\n",
        },
    )
    assert [violation.split(": ", 1) for violation in size_violations(tmp_path)] == [
        ["kv_cache/block_ops.py:1", "no module docstring: say what it does and what it knows nothing about"],
        ["kv_cache/block_pool.py:3", "class Pool has 251 lines, more than 250"],
        ["kv_cache/block_table.py:1", "401 lines, more than 400: this is two files"],
    ]
