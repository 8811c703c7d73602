"""The packages' source as syntax trees: modules, every import in them wherever it stands, and what a name stands for.

Runs nothing of what it reads. Knows nothing of the rules.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from house import ENTRY_POINTS, PACKAGES


@dataclass(frozen=True, slots=True)
class Module:
    """One file. `name` is the dotted module, without `.__init__`; `path` is relative to the tree's root."""

    name: str
    path: Path
    text: str
    tree: ast.Module

    @property
    def is_init(self) -> bool:
        return self.path.name == "__init__.py"

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


def read_modules(root: Path) -> dict[str, Module]:
    """Every module of the packages and launch.py under `root`, by dotted name, in the order of their paths."""
    paths = sorted(path for package in PACKAGES for path in (root / package).rglob("*.py"))
    paths += [path for name in ENTRY_POINTS if (path := root / f"{name}.py").is_file()]
    modules = [_read_module(root, path) for path in paths]
    return {module.name: module for module in modules}


def imports_of(module: Module) -> list[Import]:
    """Every import of an absolute name, `importlib.import_module("literal")` among them."""
    aliases = aliases_of(module)
    return [found for node, runs in _walk(module.tree, True) for found in _imports_at(node, runs, aliases)]


def aliases_of(module: Module) -> dict[str, str]:
    """What the module's imports bind: local name -> dotted name."""
    aliases = {}
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                first = alias.name.split(".")[0]
                aliases[alias.asname or first] = alias.name if alias.asname else first
        elif isinstance(node, ast.ImportFrom) and node.module:
            aliases.update({alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names})
    return aliases


def dotted_name(node: ast.AST, aliases: dict[str, str]) -> str | None:
    """`np.random.rand` -> `numpy.random.rand`; None where the chain does not start at an imported name."""
    if isinstance(node, ast.Attribute):
        owner = dotted_name(node.value, aliases)
        return f"{owner}.{node.attr}" if owner else None
    return aliases.get(node.id) if isinstance(node, ast.Name) else None


def bound_names(module: Module) -> dict[str, None]:
    """The names that the module itself binds: assigned, defined or taken as a parameter."""
    bound: dict[str, None] = {}
    for node in ast.walk(module.tree):
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


def _walk(node: ast.AST, runs_on_import: bool) -> Iterator[tuple[ast.AST, bool]]:
    yield node, runs_on_import
    for child in ast.iter_child_nodes(node):
        is_deferred = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        is_for_types = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test) and child in node.body
        yield from _walk(child, runs_on_import and not is_deferred and not is_for_types)


def _imports_at(node: ast.AST, runs: bool, aliases: dict[str, str]) -> list[Import]:
    if isinstance(node, ast.Import):
        return [Import(node, alias.name, None, runs) for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
        return [Import(node, node.module, alias.name, runs) for alias in node.names]
    argument = import_module_argument(node, aliases)
    if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
        return [Import(node, argument.value, None, runs)]
    return []
