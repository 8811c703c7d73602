"""The lists of the files that run first name files that exist; no test of the stress tier asks for too much time."""

import ast
from collections.abc import Iterator
from pathlib import Path

import stress_tier
from conftest import LONGEST_FILES, TESTS


def test_every_file_that_runs_first_exists():
    assert [name for name in (*LONGEST_FILES, *stress_tier.LONGEST) if not (Path(TESTS) / name).is_file()] == []


def limits_beyond(root: Path, most_s: float) -> Iterator[str]:
    """Every `pytest.mark.timeout` of more seconds, or of some that are no number, as `path:line`."""
    for path in sorted(root.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)) if "mark.timeout" in text else ():
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.timeout":
                seconds = node.args[0].value if node.args and isinstance(node.args[0], ast.Constant) else most_s + 1
                if seconds > most_s:
                    yield f"{path.relative_to(root)}:{node.lineno}"


def test_limit_of_every_test_is_twenty_minutes(tmp_path: Path):
    assert stress_tier.LIMIT_S == 20 * 60
    (tmp_path / "test_x.py").write_text(
        "import pytest\nA = pytest.mark.timeout(1200)\nB = pytest.mark.timeout(1201)\nC = pytest.mark.timeout(LONG)\n"
    )
    assert list(limits_beyond(tmp_path, stress_tier.LIMIT_S)) == ["test_x.py:3", "test_x.py:4"]
    ours = [each for each in limits_beyond(Path(TESTS), stress_tier.LIMIT_S) if "test_run_order" not in each]
    assert ours == ["support/stress_tier.py:" + str(line) for line in lines_of("mark.timeout(LIMIT_S)")]


def lines_of(code: str) -> list[int]:
    """Of support/stress_tier.py: where every stress test without a limit gets its own."""
    lines = Path(stress_tier.__file__).read_text().splitlines()
    return [number for number, line in enumerate(lines, 1) if code in line]
