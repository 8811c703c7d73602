"""README and docs match the code: every key and its default, every sampling key, every folder, rows that parse; and the
site has every page.
"""

import dataclasses
import json
import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml
from ranks import REPOSITORY

import launch
from spmd_worker.base.config.schema import RunConfig
from spmd_worker.replica.sequence.sampling_params import SAMPLING_KEYS

ANSWERS = REPOSITORY / "scripts" / "demo" / "answers.jsonl"
DOCS = REPOSITORY / "docs"
README = (REPOSITORY / "README.md").read_text(encoding="utf-8")
PAGE = (DOCS / "reference" / "configuration.md").read_text(encoding="utf-8")
GETTING_STARTED = (DOCS / "getting_started.md").read_text(encoding="utf-8")


def as_typed(value: object) -> str:
    if value is None:
        return "null"
    return f"{value:g}" if isinstance(value, float) else str(value).lower()


@pytest.mark.guarantee("The reference page has every key and its default")
def test_every_key_is_in_table_with_its_default():
    check_table(PAGE, RunConfig())
    assert "(docs/reference/configuration.md)" in README


def check_table(page: str, config: RunConfig) -> None:
    """That the tables of `page` are of these keys and values."""
    rows = re.finditer(r"(?m)^\| (?:\*\*)?`([a-z_.*]+)`(?:\*\*)? \| (\S+) \|", page)
    table = {match[1]: match[2] for match in rows}
    expected = {}
    for name, value in dataclasses.asdict(config).items():
        if isinstance(value, dict):
            expected |= {f"{name}.{key}": as_typed(default) for key, default in value.items()}
        else:
            expected[name] = as_typed(value)
    assert expected == table


@pytest.mark.control("The reference page has every key and its default")
@pytest.mark.parametrize(
    ("row", "broken"),
    [
        ("\n| **`seed`** | 0 |", "\n| **`seed`** | 1 |"),
        ("\n| **`model.dtype`** | auto |", "\n| **`model.data_type`** | auto |"),
        ("\n| **`cache.num_blocks`** | null |", "\n| cache.num_blocks | null |"),
        ("\n| **`seed`** | 0 |", "\n| `sead` | 0 | |\n| **`seed`** | 0 |"),
    ],
    ids=["another default", "another name", "no row", "a row too many"],
)
def test_comparison_detects_another_table(row: str, broken: str, control):
    """Negative control: of the page's and of the code's."""
    assert PAGE.count(row) == 1
    with control():
        check_table(PAGE.replace(row, broken), RunConfig())
    with control():
        check_table(PAGE, RunConfig(seed=1))


def test_every_sampling_key_is_named():
    page = (DOCS / "guides" / "batch.md").read_text(encoding="utf-8")
    assert [key for key in SAMPLING_KEYS if f"`{key}`" not in page] == []


def test_every_folder_has_its_line_in_the_tree():
    tree = (DOCS / "internals" / "architecture.md").read_text(encoding="utf-8")
    folders = [path.parent.name for path in (REPOSITORY / "spmd_worker").glob("*/__init__.py")]
    assert len(folders) > 10
    assert [folder for folder in folders if f"\n  {folder}/ " not in tree] == []
    named = re.findall(r"(?m)^  ([a-z_]+)/ ", tree)
    assert sorted(named) == sorted(folders)


def shown_rows(page: str) -> list[str]:
    return [line for block in re.findall(r"(?ms)^```jsonl\n(.*?)^```", page) for line in block.splitlines()]


def test_shown_job_writes_the_shown_lines(tmp_path: Path):
    rows = shown_rows(README)
    assert rows == shown_rows(GETTING_STARTED)
    (tmp_path / "rows.jsonl").write_text("".join(f"{row}\n" for row in rows), encoding="utf-8")
    files = [f"job.input={tmp_path / 'rows.jsonl'}", f"job.output={tmp_path / 'answers.jsonl'}"]
    assert launch.main([f"model.path={REPOSITORY / 'scripts' / 'demo' / 'model'}", "device=cpu", *files]) == 0
    written = (tmp_path / "answers.jsonl").read_text(encoding="utf-8").splitlines()
    shown = [line for line in README.splitlines() if '"outputs"' in line]
    assert shown == written[:1]
    assert [line for line in GETTING_STARTED.splitlines() if '"outputs"' in line] == written[:2]


def test_site_has_every_page():
    settings = yaml.safe_load((REPOSITORY / "mkdocs.yml").read_text(encoding="utf-8"))
    entries = [entry for each in settings["nav"] for entry in each.values()]
    shelves = [entry for entry in entries if isinstance(entry, list)]
    named = [each for each in entries if isinstance(each, str)]
    named += [path for shelf in shelves for page in shelf for path in page.values()]
    root_pages = ["CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"]
    assert sorted(named) == sorted([*root_pages, *(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))])
    assert [name for name in root_pages if not (REPOSITORY / name).is_file()] == []


@pytest.mark.parametrize(
    ("path", "markdown", "expected"),
    [
        ("docs/index.md", "[a](guides/batch.md#rows)", "[a](guides/batch.md#rows)"),
        ("docs/guides/batch.md", "[a](../index.md)", "[a](../index.md)"),
        ("docs/guides/batch.md", "[a](../../CONTRIBUTING.md#tests)", "[a](../CONTRIBUTING.md#tests)"),
        ("docs/guides/batch.md", "[a](../../README.md#install)", "[a](../index.md)"),
        ("CONTRIBUTING.md", "[a](docs/guides/batch.md), [b](CHANGELOG.md)", "[a](guides/batch.md), [b](CHANGELOG.md)"),
        ("docs/index.md", "[`launch.py`](../launch.py) and [x](../attic.py)", "`launch.py` and [x](../attic.py)"),
        ("docs/index.md", "[a](https://a.example), [b](#b)", "[a](https://a.example), [b](#b)"),
        ("docs/index.md", "```text\n[a](../launch.py)\n* b\n```\n", "```text\n[a](../launch.py)\n* b\n```\n"),
        ("docs/index.md", "words:\n* a\n  b\n* c\n\nd\n| e |", "words:\n\n* a\n  b\n* c\n\nd\n\n| e |"),
    ],
)
def test_site_keeps_links_and_lists(path: str, markdown: str, expected: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(REPOSITORY / "scripts"))
    assert import_module("site_hooks").for_site(markdown, path) == expected


DEMO_COMMAND = re.compile(r"`bash scripts/demo\.sh ((?:\S+=\S+ ?)+)`")
BESIDE = ("", "scheduler.preemption_mode=recompute", "cache.host_tier_gib=1")


def demo_metrics(folder: Path, words: str, *more: str) -> dict[str, Any]:
    """Of the command with what its line says beside it, as `scripts/demo.sh` starts it."""
    job = [f"job.run_dir={folder}/run", f"job.output={folder}/out.jsonl", "parallel.tensor_parallel_size=1"]
    code = launch.main(["experiment=demo", "device=cpu", *job, *words.split(), *more])
    assert code == 0
    metrics: dict[str, Any] = json.loads((folder / "run" / "metrics.json").read_text())
    return metrics


def check_preempted(folder: Path, beside: str, *more: str) -> None:
    (words,) = DEMO_COMMAND.findall(GETTING_STARTED)
    assert beside in GETTING_STARTED
    metrics = demo_metrics(folder, f"{words} {beside}", *more)
    is_swapped = "recompute" not in beside
    assert metrics["preemptions"] > 0
    assert metrics["preemptions_by_swap"] == (metrics["preemptions"] if is_swapped else 0)
    assert (metrics["recomputed_tokens"] > 0) == (not is_swapped)
    assert (metrics["tier_stored_blocks"] > 0) == ("tier" in beside)


@pytest.mark.gate("cache.host_tier_gib=1")
@pytest.mark.finding(number="D7")
@pytest.mark.parametrize("beside", BESIDE)
def test_small_cache_demo_preempts(tmp_path: Path, beside: str):
    check_preempted(tmp_path, beside, "job.max_rows=60")


@pytest.mark.stress
@pytest.mark.finding(number="D7")
@pytest.mark.parametrize("beside", BESIDE)
def test_small_cache_demo_preempts_with_all_rows(tmp_path: Path, beside: str):
    check_preempted(tmp_path, beside)
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    answers = {each["custom_id"]: each["answer"] for each in map(json.loads, ANSWERS.read_text().splitlines())}
    right = sum(row["outputs"][0]["text"].strip() == answers[row["custom_id"]].strip() for row in lines)
    assert right >= 0.99 * len(lines)


@pytest.mark.finding(number="D7")
def test_bigger_cache_demo_preempts_nothing(tmp_path: Path):
    """Negative control: a cache that suffices."""
    assert demo_metrics(tmp_path, "cache.num_blocks=40", "job.max_rows=60")["preemptions"] == 0
