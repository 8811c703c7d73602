"""The packages' source as syntax trees: modules, every import in them wherever it stands, and what a name stands for.

Runs nothing of what it reads. Knows nothing of the rules.
"""

import ast
import functools
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from house import COMMANDS, PACKAGES
from planting import REPOSITORY


@dataclass(frozen=True)
class Module:
    """One file. `name` is the dotted module, without `.__init__`; `path` is relative to the tree's root.

    The tree is walked once, on the first question about it.
    """

    name: str
    path: Path
    text: str
    tree: ast.Module

    @property
    def is_init(self) -> bool:
        return self.path.name == "__init__.py"

    @cached_property
    def nodes(self) -> "list[tuple[ast.AST, bool]]":
        """Each node, in the order of the text, and whether it runs on import: see `Import`."""
        with no_garbage():
            return list(_walk(self.tree))

    @cached_property
    def importing(self) -> "list[tuple[ast.AST, bool]]":
        """The few of `nodes` that may import something, which are asked about again and again."""
        return [(node, runs) for node, runs in self.nodes if isinstance(node, _IMPORTING)]

    @cached_property
    def aliases(self) -> dict[str, str]:
        """What the module's imports bind: local name -> dotted name."""
        return dict(pair for node, _ in self.importing for pair in _aliases_at(node))

    @cached_property
    def imports(self) -> "list[Import]":
        """Every import of an absolute name, `importlib.import_module("literal")` among them."""
        return [found for node, runs in self.importing for found in _imports_at(node, runs, self.aliases)]

    def at(self, node: ast.AST, message: str) -> str:
        """A violation as people read it: `path:line: message`."""
        return f"{self.path}:{getattr(node, 'lineno', 1)}: {message}"


@dataclass(frozen=True, slots=True)
class Import:
    """One imported name: `from a.b import c` is (`a.b`, `c`), `import a.b` is (`a.b`, None)."""

    node: ast.AST
    module: str
    name: str | None
    runs_on_import: bool
    """False inside a function and under TYPE_CHECKING."""

    @property
    def dotted(self) -> str:
        return f"{self.module}.{self.name}" if self.name else self.module


@contextmanager
def no_garbage() -> Iterator[None]:
    """Syntax trees are many objects without a cycle: looking for one takes longer than reading them."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def read_modules(
    root: Path, packages: tuple[str, ...] = PACKAGES, entry_points: tuple[str, ...] = COMMANDS
) -> dict[str, Module]:
    """Every module of the packages and launch.py under `root`, by dotted name, in the order of their paths."""
    return dict(
        _modules_of_repository(packages, entry_points) if root == REPOSITORY else _read(root, packages, entry_points)
    )


@functools.cache
def _modules_of_repository(packages: tuple[str, ...], entry_points: tuple[str, ...]) -> dict[str, Module]:
    """Parsed and walked once a process: no test changes it."""
    with no_garbage():
        modules = _read(REPOSITORY, packages, entry_points)
        assert all(module.nodes for module in modules.values())
        # They stay: no collection of a later test looks through them.
        gc.freeze()
    return modules


def _read(root: Path, packages: tuple[str, ...], entry_points: tuple[str, ...]) -> dict[str, Module]:
    with no_garbage():
        modules = [_read_module(root, path) for path in module_paths(root, packages, entry_points)]
    return {module.name: module for module in modules}


def module_paths(
    root: Path, packages: tuple[str, ...] = PACKAGES, entry_points: tuple[str, ...] = COMMANDS
) -> list[Path]:
    """The files that `read_modules` reads."""
    folders = [root / package.replace(".", "/") for package in packages]
    paths = sorted(path for folder in folders for path in folder.rglob("*.py"))
    return paths + [path for name in entry_points if (path := root / f"{name}.py").is_file()]


def dotted_name(node: ast.AST, aliases: dict[str, str]) -> str | None:
    """`np.random.rand` -> `numpy.random.rand`; None where the chain does not start at an imported name."""
    if isinstance(node, ast.Attribute):
        owner = dotted_name(node.value, aliases)
        return f"{owner}.{node.attr}" if owner else None
    return aliases.get(node.id) if isinstance(node, ast.Name) else None


def bound_names(module: Module) -> dict[str, None]:
    """The names that the module itself binds: assigned, defined or taken as a parameter."""
    bound: dict[str, None] = {}
    for node, _ in module.nodes:
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            bound[node.id] = None
        elif isinstance(node, ast.arg):
            bound[node.arg] = None
    return bound


def import_module_argument(node: ast.AST, aliases: dict[str, str]) -> ast.expr | None:
    """The argument of a call of `importlib.import_module`, or None for every other node."""
    if isinstance(node, ast.Call) and dotted_name(node.func, aliases) == "importlib.import_module":
        return node.args[0] if node.args else node.keywords[0].value
    return None


def _read_module(root: Path, path: Path) -> Module:
    relative = path.relative_to(root)
    parts = relative.with_suffix("").parts
    text = path.read_text(encoding="utf-8")
    name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
    return Module(name, relative, text, ast.parse(text, filename=str(relative)))


_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_IMPORTING = (ast.Import, ast.ImportFrom, ast.Call)
_LEAVES = (ast.Name, ast.Constant)
"""Two thirds of all nodes: of them, and of others, the contexts are read as attributes and not listed."""


def _walk(tree: ast.Module) -> Iterator[tuple[ast.AST, bool]]:
    left: list[tuple[ast.AST, bool]] = [(tree, True)]
    while left:
        node, runs_on_import = left.pop()
        yield node, runs_on_import
        if isinstance(node, _LEAVES):
            continue
        runs = runs_on_import and not isinstance(node, _FUNCTIONS)
        is_late = runs and isinstance(node, ast.If) and _names_type_checking(node.test)
        first = len(left)
        # `ast.iter_child_nodes`, which asks each node for each of its fields twice as slowly.
        for field in node._fields:
            if field == "ctx":
                continue
            value = getattr(node, field, None)
            children = value if isinstance(value, list) else (value,)
            runs_here = runs and not (is_late and field == "body")
            left += [(child, runs_here) for child in children if isinstance(child, ast.AST)]
        left[first:] = left[first:][::-1]


def _names_type_checking(test: ast.expr) -> bool:
    names = (each.attr if isinstance(each, ast.Attribute) else getattr(each, "id", None) for each in ast.walk(test))
    return "TYPE_CHECKING" in names


def _aliases_at(node: ast.AST) -> Iterator[tuple[str, str]]:
    if isinstance(node, ast.Import):
        for alias in node.names:
            first = alias.name.split(".")[0]
            yield alias.asname or first, alias.name if alias.asname else first
    elif isinstance(node, ast.ImportFrom) and node.module:
        for alias in node.names:
            yield alias.asname or alias.name, f"{node.module}.{alias.name}"


def _imports_at(node: ast.AST, runs: bool, aliases: dict[str, str]) -> list[Import]:
    if isinstance(node, ast.Import):
        return [Import(node, alias.name, None, runs) for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
        return [Import(node, node.module, alias.name, runs) for alias in node.names]
    argument = import_module_argument(node, aliases)
    if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
        return [Import(node, argument.value, None, runs)]
    return []
