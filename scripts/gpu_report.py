"""Results of gpu_check.py as lines for people, and as pages: docs/lab/gpu_figures.md, first line of benchmarks.md.

Knows nothing of torch, so that results are read on any machine.
"""

import json
import math
import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

PAGE, FIGURES_PAGE = (Path("docs") / "lab" / name for name in ("benchmarks.md", "gpu_figures.md"))
STATE, FIGURES = "gpu-state", "gpu-figures"
"""Names of the two pairs of markers in the page."""
NO_RUN = "No GPU has run this code: what the GPU sections say is of earlier commits, which they name."
Record = Mapping[str, Any]


def number(value: object) -> str:
    """Three digits that count, or all before the point."""
    if not isinstance(value, int | float) or not math.isfinite(value):
        return str(value)
    size = abs(value)
    return f"{value:.0f}" if size >= 100 else f"{value:.1f}" if size >= 10 else f"{value:.2f}"


def figures_of(record: Record) -> Sequence[Record]:
    """The figures of one part's line."""
    found: Sequence[Record] = record.get("figures") or []
    return found


def is_met(figure: Record) -> bool | None:
    """Whether the figure keeps its limit; None if it has none."""
    wanted = figure.get("wanted")
    if wanted is None:
        return None
    return bool(figure["value"] >= wanted if figure.get("is_least") else figure["value"] <= wanted)


def figure_line(figure: Record) -> str:
    """One figure for people."""
    words = [f"{figure['name']:<58}{number(figure['value']):>10} {figure['unit']:<8}"]
    words += [f"{name} {number(figure[name])}" for name in ("library", "floor") if figure.get(name) is not None]
    if (verdict := is_met(figure)) is not None:
        words.append(f"{_bound(figure)}: {'met' if verdict else 'MISSED'}")
    return "  ".join(words)


def _bound(figure: Record) -> str:
    return f"{'at least' if figure.get('is_least') else 'at most'} {number(figure['wanted'])}"


def last_run(lines: Sequence[str]) -> tuple[Record, list[Record]]:
    """Last run of a file to which runs were appended: the last run's description, and its parts."""
    about: Record = {}
    parts: list[Record] = []
    for line in lines:
        if not line.strip():
            continue
        record = json.loads(line)
        if "about" in record:
            about, parts = record["about"], []
        elif "summary" in record:
            about = {**about, "seconds": record["summary"]["seconds"]}
        else:
            parts.append(record)
    if not about:
        raise ValueError("no run is in this file: give one that gpu_check.py --out wrote")
    return about, parts


def rendered(about: Record, parts: Sequence[Record]) -> str:
    """The table of a run, in Markdown: figures with the library's and the floor, then what was asked and is right."""
    took = f", {about['seconds']:.0f} s" if "seconds" in about else ""
    commit = about.get("commit") or "unknown"
    lines = [
        f"`{about['command']}`, {about['device']}, {about['date']}, commit {commit}: torch {about['torch']}, triton",
        f"{about['triton']}, Python {about['python']}{took}.",
        "",
        "| figure | measured | library | floor | of the floor | wanted |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    timed = [figure for part in parts if part["kind"] != "warm" for figure in figures_of(part)]
    lines += [_row(figure) for figure in timed]
    lines += ["", "| part | result | seconds |", "| --- | --- | --- |"]
    for part in parts:
        if part["kind"] != "warm":
            why = f": {part['why']}" if part["why"] else ""
            result = f"{part['state']}{why}".replace("|", "\\|").replace("\n", " ")
            lines.append(f"| {part['part']} | {result} | {part['seconds']:.1f} |")
    return "\n".join(lines)


def _row(figure: Record) -> str:
    library, floor = figure.get("library"), figure.get("floor")
    share = "" if floor is None or not figure["value"] else f"{floor / figure['value'] * 100:.0f} %"
    cells = [figure["name"], f"{number(figure['value'])} {figure['unit']}"]
    cells += ["" if each is None else number(each) for each in (library, floor)]
    cells.append(share)
    verdict = is_met(figure)
    cells.append("" if verdict is None else f"{_bound(figure)}, {'met' if verdict else '**missed**'}")
    return f"| {' | '.join(cells)} |"


def state_line(about: Record | None, is_ancestor: bool) -> str:
    """The page's first line: whether a GPU ran an ancestor of the commit at hand."""
    if about is None:
        return NO_RUN
    relation = "an ancestor of this page's commit" if is_ancestor else "**no ancestor of this page's commit**"
    commit = str(about.get("commit") or "unknown")[:12]
    run = f"{about['device']}, {about['date']}, commit {commit}"
    return f"Last run on a GPU: {run}, {relation}\n([figures](gpu_figures.md))."


def with_section(page: str, name: str, text: str) -> str:
    """The page with this text between its markers. Raises ValueError for a page without them."""
    pattern = re.compile(rf"(<!-- {name} -->\n).*?(\n<!-- /{name} -->)", re.DOTALL)
    found, count = pattern.subn(lambda match: f"{match[1]}\n{text}\n{match[2]}", page)
    if count != 1:
        raise ValueError(f"{count} pairs of markers {name} are in the page, and one is meant")
    return found


def write_docs(root: Path, results: Path, commit: str | None = None) -> None:
    """The last run of `results` into the page of figures, and the first line of the benchmarks."""
    about, parts = last_run(results.read_text(encoding="utf-8").splitlines())
    if commit is not None:
        about = {**about, "commit": commit}
    state = state_line(about, is_ancestor(root, str(about.get("commit"))))
    for path, name, text in ((PAGE, STATE, state), (FIGURES_PAGE, FIGURES, rendered(about, parts))):
        page = (root / path).read_text(encoding="utf-8")
        (root / path).write_text(with_section(page, name, text), encoding="utf-8")


def is_ancestor(root: Path, commit: str) -> bool:
    """Whether this commit, unchanged, is the checkout's or one before it."""
    command = ["git", "merge-base", "--is-ancestor", commit, "HEAD"]
    return subprocess.run(command, cwd=root, capture_output=True, check=False).returncode == 0
