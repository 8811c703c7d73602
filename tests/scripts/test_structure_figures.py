"""scripts/structure_figures.py on a small tree whose figures are known, and on this one."""

import json
import re
import subprocess
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from ranks import REPOSITORY

FILES = {
    "launch.py": '"""Starts."""\n\n\ndef main():\n    from spmd_worker.batch.job import run\n',
    "kv_cache/__init__.py": "",
    "kv_cache/block.py": '"""Of a place: its wholePlace."""\n\n# A place.\nwhole_place = """\nWHOLE"""\n',
    "spmd_worker/__init__.py": "",
    "spmd_worker/batch/__init__.py": "",
    "spmd_worker/batch/row.py": '"""In-flight rows."""\n',
    "spmd_worker/batch/job.py": (
        '"""What runs."""\n\nimport json\nfrom typing import TYPE_CHECKING\n\n'
        "from spmd_worker.batch import row\nfrom spmd_worker.worker.worker import Worker\n\n"
        "if TYPE_CHECKING:\n    from kv_cache.block import BlockId\n\n\n"
        'def run():\n    """As asked."""\n    import_module("spmd_worker.llm")\n'
    ),
    "spmd_worker/llm.py": '"""LLM."""\n\nimport kv_cache.block\n',
    "spmd_worker/worker/worker.py": (
        '"""Worker."""\n\nimport kv_cache.block\n\n\n@decorated\nclass Worker:\n    """See it."""\n\n'
        + "    x: int = 1\n" * 248
        + '    """Field."""\n\n    def none_left(self):  # None\n        pass\n'
    ),
    "scripts/bench.py": '"""How fast."""\n\nimport launch\nfrom spmd_worker import LLM\n',
    "tests/test_it.py": '"""Whose."""\n\nimport spmd_worker.llm\n',
}
FIGURES = {
    "modules": 9,
    "lines": 290,
    "code lines": 266,
    "lines per file: median / p95 / max": [3, 261, 261],
    "lines per function: median / p95 / max": [2, 3, 3],
    "classes over 250 lines": 1,
    "their lines": "Worker 256",
    "rooms": 7,
    "floors": 5,
    "arrows": 8,
    "longest import chain": 4,
    "files under the worker": 2,
    "docstrings that begin with a question word or a preposition": 4,
    "of these, of modules": 2,
    "of these, of classes": 1,
    "of these, of functions": 1,
}


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(REPOSITORY / "scripts"))
    return import_module("structure_figures")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for path, text in FILES.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    return tmp_path


def git(root: Path, *arguments: str) -> None:
    who = ("-c", "user.name=Tester", "-c", "user.email=tester@example.org", "-c", "commit.gpgsign=false")
    subprocess.run(["git", "-C", str(root), *who, *arguments], check=True, capture_output=True)


def structure(figures: ModuleType, files: dict[str, str]) -> dict[str, Any]:
    return figures.structure(figures.parse(files))


def test_figures_of_small_tree_match_hand_count(figures: ModuleType, tree: Path):
    found = structure(figures, figures.read_tree(tree))
    assert {row: found[row] for row in FIGURES} == FIGURES


def test_words_are_counted_in_prose_and_names(figures: ModuleType, tree: Path):
    words = figures.word_counts(figures.parse(figures.read_tree(tree)).values())
    counted = {word: value for word, value in words.items() if value != [0, 0]}
    assert counted == {"place": [2, 1], "whole": [1, 1], "none, no X": [0, 1]}


def test_class_is_found_after_its_folder_moved(figures: ModuleType):
    moved = {path.replace("worker/worker/", "worker/devices/worker/"): text for path, text in FILES.items()}
    moved = {path: text.replace("_worker.worker.", "_worker.devices.worker.") for path, text in moved.items()}
    assert structure(figures, moved)["files under the worker"] == 2


def test_missing_class_is_named_in_its_cell(figures: ModuleType, tree: Path):
    found = structure(figures, figures.read_tree(tree))
    assert found["files under the runner"] == "ModelRunner is defined in 0 modules"
    assert found["files a row passes"].startswith("1; RowReader is defined in 0 modules; ")


def test_row_passes_the_files_between_stations(figures: ModuleType, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(figures, "STATIONS", ("Reader", "Writer|Output"))
    files = {
        "spmd_worker/a.py": "import spmd_worker.b\nimport spmd_worker.other\nclass Reader: pass\n",
        "spmd_worker/b.py": "import spmd_worker.c\n",
        "spmd_worker/c.py": "import spmd_worker.below\nclass Output: pass\n",
        "spmd_worker/below.py": "",
        "spmd_worker/other.py": "",
        "spmd_worker/above.py": "import spmd_worker.a\n",
    }
    assert structure(figures, files)["files a row passes"] == 3


def test_cycle_of_wings_is_printed_instead_of_floors(figures: ModuleType):
    files = {**FILES, "kv_cache/block.py": "from spmd_worker.llm import LLM\n"}
    assert structure(figures, files)["floors"].startswith("cycle: ")


def test_every_class_of_figures_is_in_this_tree(figures: ModuleType):
    """A renamed class is entered as `Old|New`."""
    names = (*figures.UNDER.values(), *figures.STATIONS)
    # The files that define something of such a name: reading all takes seconds.
    ends = [end.rpartition(".")[2] for name in names for end in name.split("|")]
    defines = re.compile(rf"^(?:class|def|async def) (?:{'|'.join(ends)})\b", re.MULTILINE)
    files = {path: text for path, text in figures.read_tree(REPOSITORY).items() if defines.search(text)}
    modules = figures.parse(files)
    assert [name for name in names if len(figures.modules_of(modules, name)) != 1] == []


def test_revisions_and_tree_are_printed_in_columns(
    figures: ModuleType, tree: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    git(tree, "init", "--quiet")
    git(tree, "add", ".")
    git(tree, "commit", "--quiet", "--message", "Tree")
    (tree / "spmd_worker/files.py").write_text('"""Files."""\n')
    monkeypatch.setattr(figures, "REPOSITORY", tree)
    figures.main(["HEAD", "--tree", "--json"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == ["| figure | HEAD | working tree |", "| --- | --- | --- |", "| modules | 9 | 10 |"]
    record = json.loads(lines[-1])
    assert record["HEAD"]["figures"]["arrows"] == FIGURES["arrows"]
    assert record["working tree"]["words"]["place"] == [2, 1]
