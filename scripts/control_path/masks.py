"""What the masks of forms cost a step: sequences that decode, all with a form and all without, in turns."""

import argparse
import json
import statistics
import time
from typing import Any
from unittest import mock

from spmd_worker import LLM, SamplingParams
from spmd_worker.replica.grammar import step_masks
from spmd_worker.replica.grammar.step_masks import MAX_FORCED_TOKENS

ITEM = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "email": {"type": "string", "pattern": "^[a-z.]{1,30}@[a-z]{1,20}[.](com|org)$"},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 8}, "maxItems": 5},
        "kind": {"enum": ["person", "company", "other"]},
        "more": {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]},
    },
    "required": ["name", "age", "email", "tags", "kind", "more"],
    "additionalProperties": False,
}
FORM = {"json": {"type": "array", "items": ITEM, "minItems": 32}, "disable_any_whitespace": True}
NUM_PROMPT_TOKENS = 8
MOST_A_STEP = 8
"""Tokens of a row, on average: room is made for so many."""


def bench_masks(options: argparse.Namespace) -> int:
    """What the masks of forms cost a step.

    `rows` sequences decode `steps` steps at temperature 1, all of them with a JSON Schema of six fields, or none of
    them, in turns. `ratio` is the median over the turns of a constrained step's median time by an unconstrained one's.
    Both compute one token a row and step: `ratio_forced` is of a step in which rows take all that is forced, and
    `tokens_a_step` what those are a row.
    """
    settings: dict[str, Any] = dict(key.split("=", 1) for key in options.keys)
    length = NUM_PROMPT_TOKENS + (options.steps + 3) * MOST_A_STEP
    given = {"num_blocks": options.rows * (length // 16 + 2), "max_num_seqs": options.rows, **settings}
    given.setdefault("max_num_batched_tokens", options.rows * MOST_A_STEP)
    found: dict[str, list[tuple[float, float]]] = {"free": [], "masked": [], "forced": []}
    with LLM(options.model, device="cpu", **{name: _number(value) for name, value in given.items()}) as llm:
        print("ms a step      free   masked   forced")
        for turn in range(options.turns):
            # Which is first changes, because the machine warms up, or something else starts on it.
            for kind in list(found) if turn % 2 == 0 else [*found][::-1]:
                found[kind].append(_time_steps(llm, kind, options.rows, options.steps))
            print(" " * 10, "".join(f"{1000 * found[kind][-1][0]:9.2f}" for kind in found))
    ratios = {
        kind: [mine[0] / free[0] for mine, free in zip(found[kind], found["free"], strict=True)]
        for kind in ("masked", "forced")
    }
    result = {
        "rows": options.rows,
        "steps": options.steps,
        "ms": {kind: [round(1000 * seconds, 3) for seconds, _ in each] for kind, each in found.items()},
        "ratio": round(statistics.median(ratios["masked"]), 4),
        "ratio_forced": round(statistics.median(ratios["forced"]), 4),
        "tokens_a_step": round(statistics.median([tokens for _, tokens in found["forced"]]), 3),
    }
    print(json.dumps(result))
    return 0


def _time_steps(llm: LLM, kind: str, num_rows: int, num_steps: int) -> tuple[float, float]:
    """Median seconds of a step in which all rows decode, and tokens that a row takes in one."""
    with mock.patch.object(step_masks, "MAX_FORCED_TOKENS", MAX_FORCED_TOKENS if kind == "forced" else 1):
        return _time_steps_as_set(llm, kind, num_rows, num_steps)


def _time_steps_as_set(llm: LLM, kind: str, num_rows: int, num_steps: int) -> tuple[float, float]:
    engine = llm.llm_engine
    form = None if kind == "free" else FORM
    numbers = []
    for index in range(num_rows):
        prompt = [5 + (index + place) % 50 for place in range(NUM_PROMPT_TOKENS)]
        sampling = SamplingParams(
            temperature=1.0, max_tokens=None, seed=index, ignore_eos=form is None, structured_outputs=form
        )
        numbers.append(engine.add_request(prompt, sampling))
    # Prompts, and the first tokens, before which forms are compiled.
    for _ in range(3):
        engine.step()
    num_tokens = engine.counters.num_output_tokens
    seconds = []
    for _ in range(num_steps):
        start = time.perf_counter()
        engine.step()
        seconds.append(time.perf_counter() - start)
    num_tokens = engine.counters.num_output_tokens - num_tokens
    if engine.get_num_unfinished_requests() != num_rows:
        raise SystemExit("rows ended while they were measured: ask for fewer --steps, or a longer model.max_model_len")
    engine.abort_request(numbers)
    while engine.has_unfinished_requests():
        engine.step()
    return statistics.median(seconds), num_tokens / num_rows / num_steps


def _number(value: Any) -> Any:
    return int(value) if isinstance(value, str) and value.isdecimal() else value
