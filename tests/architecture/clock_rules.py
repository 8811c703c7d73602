"""The rule of clocks in tests: no test compares a clock but the `timed` ones, which run with nothing beside them.

A machine that does something else as well is slow, and a comparison of elapsed time then fails by chance. What waits,
waits through `waiting.py`; what is a figure is `timed`, which is a part of the stress tier: `scripts/test.sh --stress`
runs the timed tests one after the other when all others have ended. `clock_violations` reads syntax: values that come
from a clock are followed through assignments, returns and attributes of a file, in the scripts that stand in strings
too. `timed_not_timed` finds timed tests that the gate would run.
"""

import ast
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

CLOCKS = ("monotonic", "perf_counter", "time", "monotonic_ns", "perf_counter_ns", "time_ns")
TIMES_OF_RUNS = ("wall_s",)
"""Attributes that are elapsed time wherever they stand."""
_MAY_COMPARE = re.compile(rf"\b(?:{'|'.join(CLOCKS)})\s*\(\s*\)|\b(?:{'|'.join(TIMES_OF_RUNS)})\b")
"""Words in a file that calls a clock or has the time of a run: one file in ten, and only these are parsed."""
WAITING = ("waiting.py", "fork_server.py", "hang_guard.py", "ranks.py")
"""Where limits are made: what is reached there hangs."""
PLANTED = ("test_clocks_in_tests.py",)
"""Whose scripts are there to be found."""
STRESS = "pytest.mark.stress"
TIMED = "pytest.mark.timed"


def clock_violations(root: Path) -> list[str]:
    """Every comparison of a clock in the Python files below `root`, as `path:line: code`."""
    paths = sorted(path for path in root.rglob("*.py") if path.name not in (*WAITING, *PLANTED))
    return [found for path in paths for found in _of_file(path, root)]


def timed_outside_the_stress_tier(root: Path) -> list[str]:
    """Every use of `timed` in the Python files below `root` that has no `stress` beside it, as `path:line: name`."""
    found = []
    for path in sorted(root.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text, filename=str(path))) if TIMED in text else ():
            marks = _marks_of(node)
            if TIMED in marks and STRESS not in marks:
                found.append(f"{path.relative_to(root)}:{node.lineno}: {getattr(node, 'name', 'pytestmark')}")
    return found


def _marks_of(node: ast.AST) -> str:
    """The decorators of a test, one a line, or what is assigned to `pytestmark`."""
    if isinstance(node, ast.Assign):
        return ast.unparse(node) if "pytestmark" in _names(node.targets[0]) else ""
    return "\n".join(ast.unparse(decorator) for decorator in getattr(node, "decorator_list", []))


def _of_file(path: Path, root: Path) -> Iterator[str]:
    text = path.read_text(encoding="utf-8")
    if not _MAY_COMPARE.search(text):
        return
    tree = ast.parse(text, filename=str(path))
    if any(TIMED in _marks_of(node) for node in tree.body if isinstance(node, ast.Assign)):
        return
    for line, code in _comparisons(tree):
        yield f"{path.relative_to(root)}:{line}: {code}"
    nodes = list(_not_timed(tree))
    parts = [part for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values]
    for node in (node for node in nodes if node not in parts):
        if script := _script(_text_of(node)):
            for line, code in _comparisons(script):
                yield f"{path.relative_to(root)}:{node.lineno + line - 1}: {code}"


def _text_of(node: ast.AST) -> str:
    """Of a string; what is formatted into it is a number, for all that matters here."""
    if isinstance(node, ast.JoinedStr):
        return "".join(_text_of(part) or "0" for part in node.values)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def _script(text: str) -> ast.Module | None:
    """A text that may be a program which reads a clock."""
    if not any(word in text for word in CLOCKS) or "\n" not in text:
        return None
    try:
        return ast.parse(textwrap.dedent(text))
    except SyntaxError:
        return None


def _comparisons(tree: ast.Module) -> Iterator[tuple[int, str]]:
    nodes = list(_not_timed(tree))
    tainted = _tainted_names(nodes)
    for node in nodes:
        if isinstance(node, ast.Compare) and any(_is_time(side, tainted) for side in (node.left, *node.comparators)):
            yield node.lineno, ast.unparse(node)


def _not_timed(node: ast.AST) -> Iterator[ast.AST]:
    yield node
    for child in ast.iter_child_nodes(node):
        # A mark of some of its parameters is none of the others.
        if TIMED not in _marks_of(child).split("\n"):
            yield from _not_timed(child)


def _tainted_names(nodes: list[ast.AST]) -> dict[str, None]:
    """Names, in the whole file, that hold times or are functions that return them."""
    tainted: dict[str, None] = {}
    while True:
        known = len(tainted)
        for node in nodes:
            if isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.NamedExpr)) and node.value is not None:
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                if _is_time(node.value, tainted):
                    tainted.update(dict.fromkeys(name for target in targets for name in _names(target)))
            elif isinstance(node, ast.FunctionDef):
                returned = (each.value for each in ast.walk(node) if isinstance(each, ast.Return) and each.value)
                if any(_is_time(value, tainted) for value in returned):
                    tainted[node.name] = None
        if len(tainted) == known:
            return tainted


def _names(target: ast.AST) -> list[str]:
    """What an assignment binds: names, and attributes by their name."""
    if isinstance(target, (ast.Tuple, ast.List)):
        return [name for element in target.elts for name in _names(element)]
    if isinstance(target, ast.Starred):
        return _names(target.value)
    return [target.id] if isinstance(target, ast.Name) else [target.attr] if isinstance(target, ast.Attribute) else []


def _is_time(node: ast.AST, tainted: dict[str, None]) -> bool:
    return any(_reads_a_clock(each) or _is_named(each, tainted) for each in ast.walk(node))


def _reads_a_clock(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call) or node.args:
        return False
    function = node.func
    if isinstance(function, ast.Attribute):
        return function.attr in CLOCKS
    return isinstance(function, ast.Name) and function.id in CLOCKS


def _is_named(node: ast.AST, tainted: dict[str, None]) -> bool:
    if isinstance(node, ast.Name):
        return node.id in tainted
    return isinstance(node, ast.Attribute) and (node.attr in TIMES_OF_RUNS or node.attr in tainted)
