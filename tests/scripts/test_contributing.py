"""CONTRIBUTING.md names files that exist, apart from those of the made-up acme, and stays short."""

import re
from collections.abc import Iterator
from pathlib import Path

from ranks import REPOSITORY

PAGE = (REPOSITORY / "CONTRIBUTING.md").read_text(encoding="utf-8")
FOLDERS = ("spmd_worker", "kv_cache", "tests", "scripts", "docs")


def missing_paths(page: str, root: Path) -> Iterator[str]:
    """Paths in backticks, and targets of links, that are not below `root`."""
    paths = [path for path in re.findall(r"`([\w./-]+)`", page) if path.split("/")[0] in FOLDERS]
    for path in [*paths, *re.findall(r"\]\(([^)#:]+)", page)]:
        if "acme" not in path and not (root / path).exists():
            yield path


def test_contributing_names_existing_files():
    assert list(missing_paths(PAGE, REPOSITORY)) == []


def test_path_check_detects_missing_file_and_link():
    page = "`spmd_worker/none.py`, [a page](docs/none.md), `tests/integrations/test_acme.py`, `kv_cache/block.py`"
    assert list(missing_paths(page, REPOSITORY)) == ["spmd_worker/none.py", "docs/none.md"]


def test_contributing_is_short():
    assert len(PAGE.splitlines()) <= 200
