"""Every module has a docstring, and no more docstrings than today begin with a question word or a preposition."""

import re
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
from docstring_rules import missing_docstrings
from planting import REPOSITORY, plant
from source_tree import no_garbage


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(REPOSITORY / "scripts"))
    return import_module("structure_figures")


def num_openings(figures: ModuleType, root: Path) -> int:
    # Few files have such a word behind a quote, and reading all takes seconds.
    may_begin = re.compile(f"[\"']{figures.OPENINGS.pattern}")
    files = {path: text for path, text in figures.read_tree(root).items() if may_begin.search(text)}
    with no_garbage():
        modules = figures.parse(files).values()
        return figures.docstring_openings(module for module in modules if module.is_product).total()


def test_every_module_has_a_docstring():
    assert missing_docstrings(REPOSITORY) == []


def test_docstring_check_detects_module_without_one(tmp_path: Path):
    plant(tmp_path, {"kv_cache/block_ops.py": "x = 1\n"})
    assert missing_docstrings(tmp_path) == ["kv_cache/block_ops.py:1: no module docstring: say what it is"]


def test_docstrings_begin_with_their_subject(figures: ModuleType):
    found = num_openings(figures, REPOSITORY)
    assert found == 0, f"{found} docstrings begin with a question word or a preposition: subject first"


def test_opening_count_detects_question_word(figures: ModuleType, tmp_path: Path):
    """Negative control."""
    before = num_openings(figures, plant(tmp_path, {}))
    pool = '"""Of blocks."""\nclass Pool:\n    """Pool: what it is."""\n    def f(self):\n        """What it is."""\n'
    plant(tmp_path, {"kv_cache/block_pool.py": pool, "scripts/measure.py": '"""How long."""\n'})
    assert num_openings(figures, tmp_path) == before + 2
