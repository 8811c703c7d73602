"""Rows of the table of families with one entry as the plain row has it, to see that each is noticed."""

from dataclasses import fields, is_dataclass, replace
from typing import Any


def entries(row: Any, plain: Any, *skipped: str, prefix: str = "") -> list[tuple[str, Any]]:
    """The row with one entry as in `plain`, by the entry's name: of its parts entry by entry, and without a part that
    the plain row does not have. What begins as one of `skipped` is left out.
    """
    found: list[tuple[str, Any]] = []
    for spec in fields(row):
        own, other, name = getattr(row, spec.name), getattr(plain, spec.name), prefix + spec.name
        # Towers have tests of their own, with images.
        if own == other or name in (*skipped, "vision"):
            continue
        if not is_dataclass(own) or other is None:
            found.append((name, replace(row, **{spec.name: other})))
        if is_dataclass(own) and f"{name}." not in skipped:
            of_part = entries(own, type(own)() if other is None else other, *skipped, prefix=f"{name}.")
            found += [(what, replace(row, **{spec.name: part})) for what, part in of_part]
    return found
