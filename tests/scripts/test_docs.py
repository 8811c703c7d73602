"""README, CONTRIBUTING, CHANGELOG and docs/: sizes, links, rows and commands that are valid, programs that run."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

import pytest
from looped import looped
from ranks import REPOSITORY, run_script

from spmd_worker.base.config.compose import compose_run
from spmd_worker.base.errors import ConfigError
from spmd_worker.frontends.openai.row import Row
from spmd_worker.frontends.openai.row_parser import parse_row
from spmd_worker.replica.sequence.sampling_params import SamplingParams

DOCS = REPOSITORY / "docs"
PAGES = [
    *(REPOSITORY / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")),
    REPOSITORY / "examples" / "README.md",
    *sorted(DOCS.rglob("*.md")),
]
GENERATED = ("configuration.md", "models.md", "vllm_names.md", "guarantees.md")
MAX_COLUMNS, MAX_LINES = 120, 200
ROOTS = (REPOSITORY, REPOSITORY / "spmd_worker", REPOSITORY / "tests")

BLOCK = re.compile(r"(?ms)^```(\w*)[^\n]*\n(.*?)^```$")
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"(?m)^#+ (.*)$")
OVERRIDE = re.compile(r"[a-z_]+(\.[a-z_]+)*=.*")
PROGRAM = re.compile(r"(?:^|/)(launch\.py|spmd-worker)$")


SOURCE = re.compile(r"`((?:[\w.-]+/)+[\w-]+\.(?:py|sh|cpp|h|md|yaml|jsonl|svg|toml|sbatch))`")
MADE_UP = ("acme", "my_", "NAME", "FOLDER")


def name_of(path: Path) -> str:
    return str(path.relative_to(REPOSITORY))


@dataclass(frozen=True, slots=True)
class Block:
    """A code block and its language."""

    language: str
    text: str


def blocks(text: str) -> list[Block]:
    return [Block(match[1], match[2]) for match in BLOCK.finditer(text)]


def prose(text: str) -> str:
    return re.sub(r"`[^`\n]*`", "", BLOCK.sub("", text))


def anchors(text: str) -> set[str]:
    """Anchors of the headings, as GitHub makes them."""
    titles = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title) for title in HEADING.findall(BLOCK.sub("", text))]
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def broken_links(page: Path, text: str) -> list[str]:
    """Links of the page to files and headings that do not exist."""
    broken = []
    for link in LINK.findall(prose(text)):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = unquote(link).partition("#")
        target = (page.parent / path).resolve() if path else page
        exists = target.exists() and target.is_relative_to(REPOSITORY)
        if not exists or (anchor and anchor not in anchors(text if target == page else target.read_text("utf-8"))):
            broken.append(link)
    return broken


@pytest.mark.guarantee("Every link of the documentation resolves")
@looped("page", PAGES)
def test_links_resolve(page: Path):
    assert broken_links(page, page.read_text("utf-8")) == []


@pytest.mark.control("Every link of the documentation resolves")
@pytest.mark.parametrize("link", ["nothing.md", "../README.md#no-such-heading", "#nowhere", "../../outside.md"])
def test_broken_link_is_found(link: str):
    assert broken_links(DOCS / "index.md", f"# Title\n\n[text]({link}) [here](#title)\n") == [link]


def missing_files(text: str) -> list[str]:
    """Files that the page names by a path and that are neither in the repository nor in the package."""
    named = [path for path in SOURCE.findall(text) if not any(word in path for word in MADE_UP)]
    return [path for path in named if not any((root / path).exists() for root in ROOTS)]


@looped("page", [page for page in PAGES if page.name != "CHANGELOG.md"])
def test_named_files_exist(page: Path):
    assert missing_files(page.read_text("utf-8")) == []


def test_missing_file_is_found():
    text = "`spmd_worker/none.py`, `tests/integrations/test_acme.py`, `kv_cache/block.py`, `frontends/batch/job.py`"
    assert missing_files(text) == ["spmd_worker/none.py"]


@looped("page", [page for page in PAGES if page.name not in GENERATED])
def test_pages_have_readable_sizes(page: Path):
    """Rows of tables, JSON objects and lines with a long address may be longer."""
    lines = page.read_text("utf-8").splitlines()
    assert len(lines) <= (150 if page == REPOSITORY / "README.md" else MAX_LINES)
    wide = [line for line in lines if len(line) > MAX_COLUMNS and not line.lstrip().startswith(("|", "{"))]
    assert [line for line in wide if not re.search(r"https?://\S{60}", line)] == []


def test_changelog_has_sixty_lines_a_version():
    versions = re.split(r"(?m)^## ", (REPOSITORY / "CHANGELOG.md").read_text("utf-8"))[1:]
    assert len(versions) >= 2
    assert [version.splitlines()[0] for version in versions if len(version.strip().splitlines()) > 60] == []


# Rows and commands.


@looped("page", PAGES)
def test_shown_rows_parse(page: Path):
    lines = [
        line for each in blocks(page.read_text("utf-8")) if each.language == "jsonl" for line in each.text.split("\n")
    ]
    rows = [(line, parse_row(0, line.encode(), SamplingParams())) for line in lines if line]
    assert [(line, row) for line, row in rows if not isinstance(row, Row)] == []


def commands(text: str) -> Iterator[list[str]]:
    """Arguments of each `launch.py` and `spmd-worker` in blocks of shell commands."""
    for block in blocks(text):
        if block.language not in ("bash", "sh"):
            continue
        for line in block.text.replace("\\\n", " ").splitlines():
            words = shlex.split(line.removeprefix("$ "), comments=True)
            program = next((index for index, word in enumerate(words) if PROGRAM.search(word)), None)
            if program is not None:
                yield words[program + 1 :]


def check_commands(text: str) -> int:
    """That the overrides of the commands are valid. Returns their number."""
    overrides = [[word for word in words if OVERRIDE.fullmatch(word)] for words in commands(text)]
    for each in overrides:
        compose_run(REPOSITORY / "conf", [word for word in each if "$" not in word])
    return sum(map(len, overrides))


@pytest.mark.guarantee("Shown commands have valid keys and values")
@pytest.mark.usefixtures("files_composed_once")
def test_shown_commands_compose():
    assert sum(check_commands(page.read_text("utf-8")) for page in PAGES) > 30


@pytest.mark.control("Shown commands have valid keys and values")
@pytest.mark.parametrize(
    "override", ["cache.blocks=3", "scheduler.max_num_seqs=many", "parallel.tensor_parallel_size=0"]
)
def test_invalid_command_is_found(override: str):
    with pytest.raises(ConfigError):
        check_commands(f"```bash\ntorchrun --nproc-per-node 2 launch.py \\\n    model.path=DIR {override}\n```\n")


# Programs.


def programs(text: str, language: str) -> list[str]:
    return [each.text for each in blocks(text) if each.language == language]


@looped("page", PAGES)
def test_python_excerpts_compile(page: Path):
    for text in programs(page.read_text("utf-8"), "py"):
        compile(text, str(page), "exec")


def page_with_program(page: Path) -> bool:
    return bool(programs(page.read_text("utf-8"), "python"))


def expected_lines(program: str) -> list[str]:
    return re.findall(r"(?m)^ *print\(.*\)  # (.*)$", program)


@pytest.mark.gate(
    "README.md",
    "docs/getting_started.md",
    "docs/guides/adapters.md",
    "docs/guides/data_pipelines.md",
    "docs/guides/kv_connectors.md",
    "docs/guides/pooling.md",
    "docs/guides/python.md",
    "docs/guides/saving.md",
    "docs/guides/self_checks.md",
    "docs/guides/speculation.md",
    "docs/guides/t*",
    "docs/guides/weight_updates.md",
)
@pytest.mark.guarantee("Programs of the documentation run and print what they show")
@pytest.mark.parametrize("page", list(filter(page_with_program, PAGES)), ids=name_of)
def test_shown_programs_run(page: Path, tmp_path: Path):
    check_program("\n".join(programs(page.read_text("utf-8"), "python")), tmp_path)


def check_program(program: str, folder: Path) -> None:
    """That it ends well and prints the lines that its comments show, in this order."""
    (folder / "shown.py").write_text(program)
    done = run_script([folder / "shown.py"], timeout_s=240).checked()
    printed = iter(done.stdout.splitlines())
    assert [line for line in expected_lines(program) if line not in printed] == []


@pytest.mark.control("Programs of the documentation run and print what they show")
@pytest.mark.parametrize("program", ["print(1 + 1)  # 3", "print('a', 'b')  # b", "raise SystemExit(2)"])
def test_wrong_program_is_found(program: str, tmp_path: Path, control):
    with control():
        check_program(program, tmp_path)
