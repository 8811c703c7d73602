"""Rows for the doors into other tools' pipelines, and the lines that a job answers them with.

Most are sampled at random: a door that loses a row's key, or whose answers depend on batches, gives others.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ranks
from jobs_of_rows import answers_of_job, openai_row

MODEL = str(ranks.REPOSITORY / "scripts" / "demo" / "model")
OPTIONS: dict[str, Any] = {"dtype": "float32", "device": "cpu", "num_blocks": 64, "max_num_seqs": 8}
SAMPLING = {"temperature": 1.5, "max_tokens": 6}


def prompts(num_rows: int = 40) -> list[str]:
    return [f"add {index} {3 * index % 7} =" for index in range(num_rows)]


def plain_rows(num_rows: int = 40, **more: Any) -> list[dict[str, Any]]:
    """Rows of one shape, as a table has them."""
    return [{"prompt": prompt, **SAMPLING, **more} for prompt in prompts(num_rows)]


def mixed_rows() -> list[dict[str, Any]]:
    """Rows of all shapes, and invalid ones."""
    chat = {"messages": [{"role": "user", "content": "copy a b ="}], "max_tokens": 5, "temperature": 1.2}
    rows = plain_rows(16)
    rows[1]["n"] = 3
    rows[2] = {"prompt_token_ids": [65, 66, 67], **SAMPLING}
    rows[4] = {"prompt": 5}
    rows[5] = openai_row("a chat", "/v1/chat/completions", chat)
    rows[6]["custom_id"] = "named"
    rows[7] = openai_row("a bad one", "/v1/completions", {"prompt": "add", "temperature": -1})
    rows[8]["seed"] = 4
    rows[9] = {"messages": chat["messages"], **SAMPLING, "temperature": 0.0}
    rows[10] = {"prompt": "add 1 " * 300}
    return rows


def lines_of_job(folder: Path, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The job's output lines."""
    answers_of_job(folder, Path(MODEL), rows)
    return (folder / "out.jsonl").read_text(encoding="utf-8").splitlines()


def texts_of_job(folder: Path, rows: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """Texts of the job's answers to plain rows, or rows of completions or chats, by custom_id."""
    found = {}
    for line in map(json.loads, lines_of_job(folder, rows)):
        answers = line["outputs"] if "outputs" in line else line["response"]["body"]["choices"]
        found[line["custom_id"]] = [each["text"] if "text" in each else each["message"]["content"] for each in answers]
    return found


def numbered(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The rows with their key."""
    return [{**row, "index": index} for index, row in enumerate(rows)]
