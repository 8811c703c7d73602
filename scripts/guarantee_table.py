"""Writes docs/lab/guarantees.md, what is promised and what holds it, from the markers of the tests.

python scripts/guarantee_table.py [OUT.md]

`@pytest.mark.guarantee("WORDS")` marks a test that fails where the promise is broken, `@pytest.mark.control("WORDS")`
its negative control, which breaks the promise and sees the test's check fail. A test that breaks it itself is
`guarantee("WORDS", is_control_inside=True)`. Reads syntax: nothing of the tests is imported.
"""

import argparse
import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TARGET = ROOT / "docs" / "lab" / "guarantees.md"
HEAD = """# Guarantees

<!-- Written by `python scripts/guarantee_table.py` from the tests' markers: do not edit. -->

Every guarantee with the test that fails where it is broken and the negative control that breaks it, for contributors.
Files are below `tests/`; (s) is the stress tier. `pytest -m "guarantee or control"` runs them all; see
[Testing](../internals/testing.md).

| guarantee | test | control |
| --- | --- | --- |
"""


@dataclass(slots=True)
class Guarantee:
    """A promise's tests and negative controls, as `file::name`."""

    tests: list[str] = field(default_factory=list)
    controls: list[str] = field(default_factory=list)
    is_control_inside: bool = False


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("output", type=Path, nargs="?", default=TARGET, metavar="OUT.md", help="the page to write")
    parser.parse_args().output.write_text(document(guarantees(ROOT / "tests")), encoding="utf-8")


def document(found: dict[str, Guarantee]) -> str:
    """The page, its guarantees in the order of their first tests' files."""
    return HEAD + "".join(_row(words, found[words]) for words in sorted(found, key=lambda words: found[words].tests))


def guarantees(tests: Path) -> dict[str, Guarantee]:
    """Guarantees that the files below `tests` mark, by their words."""
    found: dict[str, Guarantee] = {}
    for path in sorted(tests.rglob("test_*.py")):
        text = path.read_text(encoding="utf-8")
        if "mark.guarantee(" not in text and "mark.control(" not in text:
            continue
        tree = ast.parse(text, filename=str(path))
        is_stress_file = any(_is_stress_of_file(node) for node in tree.body)
        for node in (node for node in tree.body if isinstance(node, ast.FunctionDef)):
            decorators = [ast.unparse(each) for each in node.decorator_list]
            is_stress = is_stress_file or "pytest.mark.stress" in decorators
            name = f"{path.relative_to(tests).as_posix()}::{node.name}{' (s)' if is_stress else ''}"
            for kind, words, is_inside in _marks(node):
                guarantee = found.setdefault(words, Guarantee())
                (guarantee.tests if kind == "guarantee" else guarantee.controls).append(name)
                guarantee.is_control_inside |= is_inside
    return found


def faults(found: dict[str, Guarantee]) -> list[str]:
    """Guarantees that lack a test or a control."""
    without_test = [f"{words}: no test has this guarantee" for words, each in found.items() if not each.tests]
    bare = [words for words, each in found.items() if not each.controls and not each.is_control_inside]
    return without_test + [f"{words}: no negative control" for words in bare]


def _is_stress_of_file(node: ast.stmt) -> bool:
    return (
        isinstance(node, ast.Assign)
        and "pytestmark" in map(ast.unparse, node.targets)
        and "stress" in ast.unparse(node)
    )


def _marks(node: ast.FunctionDef) -> Iterator[tuple[str, str, bool]]:
    for each in node.decorator_list:
        if isinstance(each, ast.Call) and ast.unparse(each.func) in ("pytest.mark.guarantee", "pytest.mark.control"):
            is_inside = any(keyword.arg == "is_control_inside" for keyword in each.keywords)
            yield ast.unparse(each.func).rpartition(".")[2], ast.literal_eval(each.args[0]), is_inside


def _row(words: str, guarantee: Guarantee) -> str:
    controls = [*(["in the test"] if guarantee.is_control_inside else []), *_short(guarantee.controls, guarantee.tests)]
    return f"| {words} | {'<br>'.join(_short(guarantee.tests, []))} | {'<br>'.join(controls)} |\n"


def _short(names: list[str], before: list[str]) -> list[str]:
    """`::name` alone where the file is that of the name before it."""
    short, file = [], before[-1].partition("::")[0] if before else ""
    for name in names:
        own, _, rest = name.partition("::")
        short.append(f"::{rest}" if own == file else name)
        file = own
    return short


if __name__ == "__main__":
    main()
