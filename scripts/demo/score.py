"""Score the runtime's output rows against the right answers, for people to read.

    python scripts/demo/score.py OUTPUT.jsonl [--metrics RUN_DIR/metrics.json] [--at-least 0.99]

Reads plain output rows only. An answer is right when its text, without surrounding whitespace, is the expected text.
Exits with 1 when the share right is below --at-least, when rows are missing, unknown or repeated, or when a file is
malformed.
"""

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MAX_WRONG_SHOWN = 3
MAX_IDS_NAMED = 5


class ScoreError(Exception):
    """The files cannot be scored; the message says which line or row, and why."""


@dataclass(frozen=True, slots=True)
class ScoredRow:
    """One output row beside what it should have said; `found` is None for a row with an error."""

    custom_id: str
    task: str
    expected: str
    found: str | None
    problem: str

    @property
    def is_right(self) -> bool:
        return self.found == self.expected


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSON Lines file; raises ScoreError naming the line that is not an object."""
    rows = []
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        if line.strip():
            rows.append(parse_object(line, f"{path}:{number}"))
    return rows


def read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ScoreError(f"cannot read {path}: {error}") from error


def parse_object(text: str, where: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ScoreError(f"{where}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ScoreError(f"{where}: a JSON object was expected, not {type(value).__name__}")
    return value


def index_rows(rows: list[dict[str, Any]], path: Path) -> dict[str, dict[str, Any]]:
    """Rows by custom_id; raises ScoreError for a row without one and for a repeated one."""
    indexed: dict[str, dict[str, Any]] = {}
    for number, row in enumerate(rows, start=1):
        custom_id = row.get("custom_id")
        if not isinstance(custom_id, str):
            raise ScoreError(f"{path}: row {number} has no custom_id")
        if custom_id in indexed:
            raise ScoreError(f"{path}: row {number} repeats custom_id {custom_id}")
        indexed[custom_id] = row
    return indexed


def require_same_ids(expected: dict[str, Any], found: dict[str, Any]) -> None:
    missing = [custom_id for custom_id in expected if custom_id not in found]
    unknown = [custom_id for custom_id in found if custom_id not in expected]
    if missing:
        raise ScoreError(f"{len(missing)} of {len(expected)} rows are missing from the output: {name_some(missing)}")
    if unknown:
        raise ScoreError(f"{len(unknown)} output rows have no answer to compare with: {name_some(unknown)}")


def name_some(custom_ids: list[str]) -> str:
    more = len(custom_ids) - MAX_IDS_NAMED
    return ", ".join(custom_ids[:MAX_IDS_NAMED]) + (f" and {more} more" if more > 0 else "")


def output_text(row: dict[str, Any]) -> tuple[str | None, str]:
    """The text of the row's first output and no problem, or None and the problem."""
    if row.get("error") is not None:
        return None, f"error row: {json.dumps(row['error'])}"
    try:
        text = row["outputs"][0]["text"]
    except (KeyError, IndexError, TypeError):
        return None, "no outputs[0].text in this row: is it a plain output row?"
    return (text.strip(), "") if isinstance(text, str) else (None, f"outputs[0].text is {json.dumps(text)}")


def score_rows(answers: dict[str, dict[str, Any]], outputs: dict[str, dict[str, Any]]) -> list[ScoredRow]:
    """One scored row per answer, in the order of the answers."""
    require_same_ids(answers, outputs)
    scored = []
    for custom_id, answer in answers.items():
        found, problem = output_text(outputs[custom_id])
        scored.append(ScoredRow(custom_id, answer["task"], answer["answer"], found, problem))
    return scored


def table_line(name: str, rows: list[ScoredRow]) -> str:
    num_right = sum(row.is_right for row in rows)
    return f"{name:<10} {len(rows):>6} {num_right:>6} {100 * num_right / len(rows):>8.2f}"


def print_table(rows: list[ScoredRow]) -> None:
    print(f"{'task':<10} {'rows':>6} {'right':>6} {'percent':>8}")
    for task in dict.fromkeys(row.task for row in rows):
        print(table_line(task, [row for row in rows if row.task == task]))
    print(table_line("total", rows))


def print_wrong(rows: list[ScoredRow]) -> None:
    for row in [row for row in rows if not row.is_right][:MAX_WRONG_SHOWN]:
        print(f"wrong: {row.custom_id}: expected {row.expected!r}, " + (row.problem or f"found {row.found!r}"))


def print_speed(path: Path) -> None:
    """Rows and tokens per second from the runtime's metrics.json."""
    metrics = parse_object(read_text(path), str(path))
    absent = [key for key in ("rows", "output_tokens", "generate_s", "load_s", "wall_s") if key not in metrics]
    if absent:
        raise ScoreError(f"{path}: no {', '.join(absent)}: is this the runtime's metrics.json?")
    tokens, generate_s = metrics["output_tokens"], metrics["generate_s"]
    rate = f"{tokens / generate_s:.0f} tokens/s" if generate_s > 0 else "too short to time"
    print(f"{metrics['rows']} rows, {tokens} output tokens in {generate_s:.2f} s of generation: {rate}")
    print(f"load {metrics['load_s']:.2f} s, whole job {metrics['wall_s']:.2f} s")


def run(arguments: argparse.Namespace) -> None:
    """Score and print; raises ScoreError when the rows cannot be scored or too few are right."""
    answers = index_rows(read_json_lines(arguments.answers), arguments.answers)
    if not answers:
        raise ScoreError(f"{arguments.answers} holds no answers")
    rows = score_rows(answers, index_rows(read_json_lines(arguments.output), arguments.output))
    print_table(rows)
    print_wrong(rows)
    if arguments.metrics is not None:
        print_speed(arguments.metrics)
    share = sum(row.is_right for row in rows) / len(rows)
    if share < arguments.at_least:
        raise ScoreError(f"{100 * share:.2f} % right is below the {100 * arguments.at_least:.2f} % of --at-least")


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path, help="the runtime's output rows, JSON Lines")
    parser.add_argument("--answers", type=Path, default=Path(__file__).parent / "answers.jsonl")
    parser.add_argument("--metrics", type=Path, help="the run's metrics.json: prints tokens per second too")
    parser.add_argument("--at-least", type=float, default=0.99, metavar="SHARE", help="least share right, 0 to 1")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    try:
        run(parse_arguments(arguments))
    except ScoreError as error:
        print(f"score.py: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
