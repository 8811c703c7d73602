"""The rule of strings: nothing in a wing names a module, a file or a class of a wing below it in house.py's order.

`string_violations` returns what breaks it, as `path:line: what`. A name in a string hides a dependency, and goes stale
when the file it names is moved: a path of a file that is not there is found too. Docstrings, which are for people, are
left out, and so are class names within a sentence, which is a message. Knows the house only through house.py.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import house
from source_tree import Module, read_modules

_FILE = re.compile(r"[\w/]*/\w+\.py\b|\w+\.py\b")
_DOTTED = re.compile(rf"\b(?:{'|'.join(house.PACKAGES)})(?:\.\w+)+")


def string_violations(root: Path) -> list[str]:
    """Every string under `root` that names what stands below its own module, in the order of paths and lines."""
    modules = read_modules(root)
    classes = _classes(modules)
    return [
        module.at(node, problem)
        for module in modules.values()
        if (wing := house.wing_index(module.name)) is not None
        for node, text in _strings(module)
        if (problem := _problem(text, wing, modules, classes))
    ]


def _problem(text: str, wing: int, modules: dict[str, Module], classes: dict[str, list[str]]) -> str | None:
    for path in _FILE.findall(text):
        named = [name for name, each in modules.items() if f"/{each.path}".endswith(f"/{path.lstrip('/')}")]
        if not named and "/" in path:
            return f"{path} is not there"
        if named and all(_is_below(name, wing) for name in named):
            return f"{path} is of {named[0]}, which stands below"
    for name in _DOTTED.findall(text):
        if _is_below(name, wing):
            return f"{name} stands below"
    owners = classes.get(text.rpartition(".")[2], [])
    if owners and all(_is_below(name, wing) for name in owners):
        return f"the class {text} is of {owners[0]}, which stands below"
    return None


def _is_below(name: str, wing: int) -> bool:
    """Whether a module, or a name in one, stands in a later wing than this."""
    index = house.wing_index(name)
    return index is not None and index > wing


def _strings(module: Module) -> Iterator[tuple[ast.Constant, str]]:
    """Every string, parts of formatted ones too, but those that are only there to be read: docstrings."""
    nodes = [node for node, _ in module.nodes]
    docstrings = {node.value for node in nodes if isinstance(node, ast.Expr)}
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in docstrings:
            yield node, node.value


def _classes(modules: dict[str, Module]) -> dict[str, list[str]]:
    """The modules that define a class of this name."""
    found: dict[str, list[str]] = {}
    for module in modules.values():
        for node in module.tree.body:
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, []).append(module.name)
    return found
