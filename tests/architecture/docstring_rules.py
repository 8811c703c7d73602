"""The rule of docstrings: every module has one, which says what the module is."""

import ast
from pathlib import Path

from source_tree import read_modules


def missing_docstrings(root: Path) -> list[str]:
    """The modules under `root` that say nothing of themselves."""
    return [
        module.at(module.tree, "no module docstring: say what it is")
        for module in read_modules(root).values()
        if module.text and not ast.get_docstring(module.tree)
    ]
