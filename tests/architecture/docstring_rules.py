"""The rule of docstrings: every module has one, which says what the module is."""

import ast
import tokenize
from collections.abc import Callable, Iterator
from pathlib import Path

from source_tree import module_paths


def missing_docstrings(root: Path) -> list[str]:
    """The modules under `root` that say nothing of themselves."""
    return [
        f"{path.relative_to(root)}:1: no module docstring: say what it is"
        for path in module_paths(root)
        if path.stat().st_size and not _has_docstring(path)
    ]


def _has_docstring(path: Path) -> bool:
    """Whether the first statement is a string that says something. What comes behind it is not read."""
    with tokenize.open(path) as file:
        tokens = _statement_tokens(file.readline)
        first, second = next(tokens), next(tokens, None)
    is_string = first.type == tokenize.STRING and (second is None or second.type == tokenize.NEWLINE)
    return is_string and bool(ast.literal_eval(first.string).strip())


def _statement_tokens(readline: Callable[[], str]) -> Iterator[tokenize.TokenInfo]:
    return (each for each in tokenize.generate_tokens(readline) if each.type not in (tokenize.COMMENT, tokenize.NL))
