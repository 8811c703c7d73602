"""How long functions, classes and files are, and how many. Figures, no limits: a limit bends code.

    python tests/architecture/size_rules.py

Lines are counted from the first line of a definition, decorators and docstring included, to its last. One rule there
is: every module says in its docstring what it is.
"""

import ast
import math
import statistics
from pathlib import Path

from source_tree import Module, read_modules


def missing_docstrings(root: Path) -> list[str]:
    """The modules under `root` that say nothing of themselves."""
    return [
        module.at(module.tree, "no module docstring: say what it is")
        for module in read_modules(root).values()
        if module.text and not ast.get_docstring(module.tree)
    ]


def size_figures(root: Path) -> list[str]:
    """For people, a line each: files, functions and classes, with the longest of them."""
    modules = list(read_modules(root).values())
    files = sorted(((len(module.text.splitlines()), str(module.path)) for module in modules), reverse=True)
    functions = _definitions(modules, ast.FunctionDef, ast.AsyncFunctionDef)
    classes = _definitions(modules, ast.ClassDef)
    num_lines = sum(length for length, _ in files)
    return [f"{num_lines:,} lines"] + [
        _figure(name, found) for name, found in (("files", files), ("functions", functions), ("classes", classes))
    ]


def _definitions(modules: list[Module], *kinds: type) -> list[tuple[int, str]]:
    found = [
        (_num_lines(node), f"{module.path}:{node.lineno} {node.name}")
        for module in modules
        for node in ast.walk(module.tree)
        if isinstance(node, kinds)
    ]
    return sorted(found, reverse=True)


def _figure(name: str, found: list[tuple[int, str]]) -> str:
    lengths = sorted(length for length, _ in found)
    p95 = lengths[math.ceil(0.95 * len(lengths)) - 1]
    longest = ", ".join(f"{where} ({length})" for length, where in found[:3])
    return f"{len(found):,} {name}: median {statistics.median(lengths):g} lines, p95 {p95}; longest: {longest}"


def _num_lines(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> int:
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    return (node.end_lineno or node.lineno) - first + 1


if __name__ == "__main__":
    print("\n".join(size_figures(Path(__file__).resolve().parents[2])))
