"""Speculation in turns, off and on: texts that repeat themselves, a full batch, and the last rows of a job.

    python scripts/bench_speculation.py FOLDER [--rows base32.jsonl] [--method suffix] [--turns 2] [--only NAMES]

FOLDER is a Llama checkpoint with random weights. Three workloads, with the ratio to look at:

* `one_row`, `eight_rows`: edits. A made model copies: each token has one successor, which the head finds from the
  embedding alone; all weights are multiplied, attention and MLP give zeros. A row's prompt is its answer with one token
  of 20 replaced, so a draft fails about there. Ratio: seconds without over seconds with speculation.
* `full_batch`: the rows of a file, with the checkpoint as it is, all of them at once. The same ratio.
* `last_tenth`: 60 short rows and 4 long ones of the made model; seconds from the end of nine tenths of the rows on.

Answers must be equal in all turns. Prints a line for each turn, and one JSON object at the end.
"""

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from spmd_worker import LLM, SamplingParams

PERIOD = 256
"""Tokens of a text of the made model; its successor of the last is the first."""
ONE_OF = 20
"""Tokens of a prompt of which one is replaced."""
WORKLOADS = ("one_row", "eight_rows", "full_batch", "last_tenth")

Row = tuple[list[int], int]
"""A prompt, and the number of tokens that it gets."""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="a Llama checkpoint with random weights")
    parser.add_argument("--rows", type=Path, help="JSONL with prompt_token_ids and max_tokens, for full_batch")
    parser.add_argument("--method", default="suffix", choices=("suffix", "ngram"))
    parser.add_argument("--turns", type=int, default=2, help="pairs of turns of each workload")
    parser.add_argument("--only", nargs="+", default=WORKLOADS, choices=WORKLOADS)
    return parser.parse_args()


def make_copying_model(source: Path, folder: Path) -> int:
    """Write the made model to `folder`; returns its number of texts."""
    config = json.loads((source / "config.json").read_text())
    tensors = load_file(source / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.zero_()
        if "norm" in name:
            tensor.fill_(1)
    embeddings = tensors["model.embed_tokens.weight"]
    num_texts = len(embeddings) // PERIOD
    tokens = torch.arange(num_texts * PERIOD)
    successors = tokens // PERIOD * PERIOD + (tokens + 1) % PERIOD
    head = torch.zeros_like(embeddings)
    head[successors] = embeddings[tokens]
    save_file({**tensors, "lm_head.weight": head}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    return num_texts


def edit(text: int, num_texts: int, num_tokens: int) -> Row:
    """A prompt of the made model, whose answer is the prompt without its mistakes."""
    chance = random.Random(text)
    first = text * PERIOD
    # The last token is right: the answer goes on from it.
    ids = [
        chance.randrange(num_texts * PERIOD) if chance.randrange(ONE_OF) == 0 else first + offset
        for offset in range(PERIOD - 1)
    ]
    return [*ids, first + PERIOD - 1], num_tokens


def rows_of_file(path: Path) -> list[Row]:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [(row["prompt_token_ids"], row["max_tokens"]) for row in rows]


def run(folder: Path, rows: list[Row], method: str | None) -> dict[str, Any]:
    """Seconds at which each row ended, ids of all rows, and the counts of drafts."""
    length = max(len(prompt) + num_tokens for prompt, num_tokens in rows)
    speculation = None if method is None else {"method": method}
    with LLM(folder, max_model_len=length, max_num_seqs=len(rows), speculative_config=speculation) as llm:
        engine = llm.llm_engine
        for number, (prompt, num_tokens) in enumerate(rows):
            params = SamplingParams(max_tokens=num_tokens, temperature=0, ignore_eos=True)
            engine.add_request(str(number), {"prompt_token_ids": prompt}, params)
        ends_s: list[float] = []
        ids: dict[str, list[int]] = {}
        began_s = time.perf_counter()
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.finished:
                    ends_s.append(time.perf_counter() - began_s)
                    ids[output.request_id] = list(output.outputs[0].token_ids)
        counters = engine.scheduler.counters
        drafts = (counters.num_drafts, counters.num_drafted_tokens, counters.num_accepted_tokens)
    return {"ends_s": ends_s, "ids": ids, "drafts": drafts}


def seconds_of_all(turn: dict[str, Any]) -> float:
    return turn["ends_s"][-1]


def seconds_of_last_tenth(turn: dict[str, Any]) -> float:
    ends_s = turn["ends_s"]
    return ends_s[-1] - ends_s[len(ends_s) * 9 // 10 - 1]


def measure(
    name: str, folder: Path, rows: list[Row], seconds: Callable[[dict[str, Any]], float], options: argparse.Namespace
) -> dict[str, Any]:
    """The workload off, on, off, on, ...: medians and their ratio."""
    found: dict[bool, list[float]] = {False: [], True: []}
    ids: list[dict[str, list[int]]] = []
    num_drafts, num_drafted, num_accepted = 0, 0, 0
    for turn in range(2 * options.turns):
        is_on = turn % 2 == 1
        result = run(folder, rows, options.method if is_on else None)
        found[is_on].append(seconds(result))
        ids.append(result["ids"])
        if is_on:
            num_drafts, num_drafted, num_accepted = result["drafts"]
        print(f"{name} {options.method if is_on else 'off'}: {found[is_on][-1]:.2f} s", flush=True)
    off_s, on_s = (statistics.median(found[is_on]) for is_on in (False, True))
    return {
        "off_s": round(off_s, 3),
        "on_s": round(on_s, 3),
        "ratio": round(off_s / on_s, 3),
        "drafted": num_drafted,
        "accepted": num_accepted,
        "mean_length": round(1 + num_accepted / num_drafts, 2) if num_drafts else None,
        "are_equal": all(each == ids[0] for each in ids),
    }


def main() -> int:
    options = arguments()
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as text:
        made = Path(text)
        num_texts = make_copying_model(options.folder, made)
        edits = [edit(each, num_texts, PERIOD) for each in range(8)]
        short = [edit(each, num_texts, 32) for each in range(60)]
        long = [edit(60 + each, num_texts, 2 * PERIOD) for each in range(4)]
        workloads: dict[str, tuple[Path, list[Row], Callable[[dict[str, Any]], float]]] = {
            "one_row": (made, edits[:1], seconds_of_all),
            "eight_rows": (made, edits, seconds_of_all),
            "last_tenth": (made, short + long, seconds_of_last_tenth),
        }
        if options.rows is not None:
            workloads["full_batch"] = (options.folder, rows_of_file(options.rows), seconds_of_all)
        for name, (folder, rows, seconds) in workloads.items():
            if name in options.only:
                figures[name] = measure(name, folder, rows, seconds, options)
                print(f"{name}: {figures[name]['ratio']:.2f} times as fast", flush=True)
    print(json.dumps({"method": options.method, "turns": options.turns, **figures}))
    return 0 if all(each["are_equal"] for each in figures.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
