"""Write the held-out rows that ship with the demo model: prompts.jsonl for the runtime, answers.jsonl for score.py.

    python scripts/demo/make_prompts.py --out scripts/demo

Each task has as many rows as every other, in mixed order; one row in eight asks in the chat form. The files are the
same bytes on every machine.
"""

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tasks import TASK_NAMES, Instance, SplitMix64, held_out_instances

NUM_ROWS = 480
CHAT_ONE_IN = 8
MAX_TOKENS = 64
SEED = 2_024


def request_row(custom_id: str, prompt: str, *, is_chat: bool) -> dict[str, Any]:
    asked = {"messages": [{"role": "user", "content": prompt}]} if is_chat else {"prompt": prompt}
    return {"custom_id": custom_id, **asked, "max_tokens": MAX_TOKENS, "temperature": 0}


def answer_row(custom_id: str, instance: Instance) -> dict[str, Any]:
    return {"custom_id": custom_id, "task": instance.task, "answer": instance.answer}


def shuffled_rows(num_rows: int) -> list[tuple[int, Instance]]:
    """Each instance with its number within its task, from 1, the tasks mixed."""
    instances = held_out_instances(SEED, num_rows)
    numbered = [(index // len(TASK_NAMES) + 1, instance) for index, instance in enumerate(instances)]
    order = SplitMix64(SEED + 1).distinct(range(num_rows), num_rows)
    return [numbered[index] for index in order]


def demo_rows(num_rows: int = NUM_ROWS) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The rows of prompts.jsonl and of answers.jsonl, in the same order."""
    requests, answers = [], []
    for number, instance in shuffled_rows(num_rows):
        custom_id = f"{instance.task}-{number:04d}"
        requests.append(request_row(custom_id, instance.prompt, is_chat=number % CHAT_ONE_IN == 0))
        answers.append(answer_row(custom_id, instance))
    return requests, answers


def write_json_lines(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the folder to write the two files to")
    folder = parser.parse_args().out
    requests, answers = demo_rows()
    write_json_lines(folder / "prompts.jsonl", requests)
    write_json_lines(folder / "answers.jsonl", answers)


if __name__ == "__main__":
    main()
