"""Compiles the test modules and what they import as pytest does, once for all processes that collect them; and has
Hypothesis look for the characters of UTF-8.

    python tests/support/compile_tests.py

pytest rewrites the assertions of a test module when it is first imported, which takes half of the time of a collection
in a fresh clone, in each of the processes that begin at once.
"""

import compileall
import os
import re
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from _pytest.assertion import rewrite
from hypothesis.internal import charmap

REPOSITORY = Path(__file__).resolve().parents[2]
PLAIN = ("kv_cache", "spmd_worker", "scripts", "tests")
NO_TRACE: Any = SimpleNamespace(trace=lambda text: None)
DEFAULTS: Any = None
"""Of pytest's settings none changes how assertions are rewritten here."""


def compiled_by_pytest(module: Path) -> Path:
    """The file in which pytest looks for a test module with rewritten assertions."""
    return rewrite.get_cache_dir(module) / f"{module.stem}{rewrite.PYC_TAIL}"


def rewrite_assertions(modules: Iterable[Path]) -> None:
    """Of those that pytest has not rewritten yet, or that have changed."""
    for module in modules:
        path = compiled_by_pytest(module)
        if rewrite._read_pyc(module, path) is None:
            path.parent.mkdir(exist_ok=True)
            source_hash, code = rewrite._rewrite_test(module, DEFAULTS)
            rewrite._write_pyc(NO_TRACE, code, source_hash, path)


def main() -> None:
    for folder in PLAIN:
        # Test modules are read in pytest's form alone.
        compileall.compile_dir(str(REPOSITORY / folder), quiet=2, rx=re.compile(r"/test_\w+\.py$"))
    rewrite_assertions(sorted((REPOSITORY / "tests").rglob("test_*.py")))
    # Kept on disk by Hypothesis: each process that draws texts would take over a second to find them.
    os.chdir(REPOSITORY)
    charmap.intervals_from_codec("utf-8")


if __name__ == "__main__":
    main()
