"""The rules of size: short functions, no long class, no long file, a docstring in every module.

Lines are counted from the first line of a definition, decorators and docstring included, to its last.
"""

import ast
import math
import statistics
from collections.abc import Iterator
from pathlib import Path

import house
from source_tree import Module, read_modules


def size_violations(root: Path) -> list[str]:
    """Long classes and files and modules without a docstring under `root`."""
    return [violation for module in read_modules(root).values() for violation in _module_violations(module)]


def function_length_violations(root: Path) -> list[str]:
    """Whether the median or the 95th percentile of all functions' lines under `root` is too high; names the longest."""
    functions = sorted(
        (_num_lines(node), module.at(node, node.name))
        for module in read_modules(root).values()
        for node in ast.walk(module.tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    )
    lengths = [length for length, _ in functions]
    if not lengths:
        return []
    longest = ", ".join(f"{where} ({length})" for length, where in functions[:-6:-1])
    median, p95 = statistics.median(lengths), lengths[math.ceil(0.95 * len(lengths)) - 1]
    limits = (("median", median, house.MAX_MEDIAN_FUNCTION_LINES), ("p95", p95, house.MAX_P95_FUNCTION_LINES))
    return [
        f"{name} of {len(lengths)} functions is {value:g} lines, more than {limit}; the longest: {longest}"
        for name, value, limit in limits
        if value > limit
    ]


def _module_violations(module: Module) -> Iterator[str]:
    num_lines = len(module.text.splitlines())
    if num_lines > house.MAX_FILE_LINES:
        yield module.at(module.tree, f"{num_lines} lines, more than {house.MAX_FILE_LINES}: this is two files")
    if module.text and not ast.get_docstring(module.tree):
        yield module.at(module.tree, "no module docstring: say what it does and what it knows nothing about")
    for node in ast.walk(module.tree):
        if isinstance(node, ast.ClassDef) and _num_lines(node) > house.MAX_CLASS_LINES:
            yield module.at(node, f"class {node.name} has {_num_lines(node)} lines, more than {house.MAX_CLASS_LINES}")


def _num_lines(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> int:
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    return (node.end_lineno or node.lineno) - first + 1
