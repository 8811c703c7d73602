"""Rows with any damage through a job: one output object each, in order, and exit code 0.

Three sources: structures (values of the wrong kind, size and position in otherwise valid rows), bytes (valid rows with
bytes changed, cut, doubled), and hypothesis's JSON. A thousand rows in the gate, with a fixed seed; the stress tier
makes ten jobs of ten thousand, sampled with TESTS_SEED.
"""

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import ranks
from bad_rows import BAD_ROWS
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from stress_seed import SEED

MODEL = ranks.REPOSITORY / "scripts" / "demo" / "model"
LIMIT_S = 900.0
NUM_JOBS = 10

GOOD: tuple[dict[str, Any], ...] = (
    {"prompt": "add 1 2 =", "max_tokens": 2},
    {"prompt_token_ids": [220, 15, 21], "max_tokens": 2, "temperature": 0.7, "seed": 3},
    {"messages": [{"role": "user", "content": "add 1 2 ="}], "max_tokens": 2},
    {"prompt": "add 1 2 =", "max_tokens": 2, "stop": ["3", "\n"], "logprobs": 2, "top_p": 0.9, "logit_bias": {"5": 2}},
    {"custom_id": "c", "method": "POST", "url": "/v1/completions", "body": {"prompt": "add 1 2 =", "max_tokens": 2}},
    {
        "custom_id": "d",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2, "logprobs": True},
    },
)
ODD: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 64, 1023, 10**9, 2**31, 2**63, -(2**63), 10**30, 0.0, -0.0, 0.5, 1e-300, 1e300),
    *("", " ", "\x00", "é", "\ud800", "😀" * 50, "a" * 5000, "add 1 2 =", "../../etc/passwd", "{{ 1 }}", "%s%n", "\n"),
    *([], {}, [[]], [None], [1, 2, 3], ["a"], [[1]], {"a": 1}, {"role": "user", "content": "x"}, [{"role": "user"}]),
    *([1.5], [-1], [10**9], ["a"] * 200, {"5": 200}, {"x": 1}, list(range(500)), [{"type": "image_url"}], {"": ""}),
)
KEYS = (
    *("prompt", "prompt_token_ids", "messages", "custom_id", "method", "url", "body", "n", "best_of", "temperature"),
    *(
        "top_p",
        "top_k",
        "min_p",
        "seed",
        "max_tokens",
        "min_tokens",
        "stop",
        "stop_token_ids",
        "ignore_eos",
        "logprobs",
    ),
    *(
        "prompt_logprobs",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "logit_bias",
        "detokenize",
        "bad_words",
    ),
    *("skip_special_tokens", "chat_template_kwargs", "echo", "stream", "tools", "model", "user", "top_logprobs", "zzz"),
    *("tool_choice", "parallel_tool_calls", "response_format"),
)


def change(value: Any, chance: random.Random) -> Any:
    """The value with something in it taken away, added or replaced."""
    if isinstance(value, dict):
        changed = dict(value)
        key = chance.choice(list(changed)) if changed and chance.random() < 0.6 else chance.choice(KEYS)
        if chance.random() < 0.2:
            changed.pop(key, None)
        else:
            changed[key] = change(changed[key], chance) if key in changed and chance.random() < 0.4 else odd(chance)
        return changed
    if isinstance(value, list) and value and chance.random() < 0.7:
        place = chance.randrange(len(value))
        return [*value[:place], change(value[place], chance), *value[place + 1 :]]
    return odd(chance)


def odd(chance: random.Random) -> Any:
    value = chance.choice(ODD)
    # Few samples and tokens, or ten thousand rows would take the model an hour.
    return value if not isinstance(value, int) or not 64 <= value <= 1023 else 2


def structured(chance: random.Random) -> bytes:
    row: Any = chance.choice(GOOD)
    for _ in range(chance.randint(1, 3)):
        row = change(row, chance)
    # As Python writes it: NaN and Infinity too.
    return json.dumps(row, ensure_ascii=chance.random() < 0.5).encode("utf-8", "surrogatepass")


def mangled(chance: random.Random) -> bytes:
    line = bytearray(json.dumps(chance.choice(GOOD)).encode())
    for _ in range(chance.randint(1, 4)):
        place = chance.randrange(len(line))
        action = chance.randrange(5)
        if action == 0:
            line[place] = chance.randrange(256)
        elif action == 1:
            del line[place : place + chance.randint(1, 20)]
        elif action == 2:
            line[place:place] = bytes(chance.randrange(256) for _ in range(chance.randint(1, 6)))
        elif action == 3:
            line[place:place] = chance.choice(
                (b"[" * 300, b'{"a":' * 80, b"\\u0000", b"\xef\xbb\xbf", b"NaN", b"1e999")
            )
        else:
            line += line[place:]
        if not line:
            line = bytearray(b"{}")
    return bytes(line)


def hypothetical(count: int, number: int) -> list[bytes]:
    scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
    values = st.recursive(
        scalars,
        lambda inner: (
            st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(KEYS) | st.text(), inner, max_size=5)
        ),
        max_leaves=12,
    )
    rows: list[bytes] = []

    @seed(number)
    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        derandomize=False,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(st.dictionaries(st.sampled_from(KEYS), values, min_size=1, max_size=5) | values)
    def collect(value: Any) -> None:
        rows.append(json.dumps(value).encode())

    collect()
    return rows


@pytest.mark.guarantee("A bad row is an error row, the job goes on")
@pytest.mark.matrix
def test_fuzzed_rows_get_one_ordered_object_each(tmp_path: Path):
    check_rows(tmp_path, 1_000, 2)


@pytest.mark.stress
@pytest.mark.parametrize("number", range(NUM_JOBS))
def test_hundred_thousand_fuzzed_rows_get_one_object_each(tmp_path: Path, number: int):
    codes = check_rows(tmp_path, 10_000, NUM_JOBS * SEED + number)
    print(f"\nROWS of seed {SEED}, job {number}: 10,000 rows, {dict(codes.most_common())}", end="")


def check_rows(tmp_path: Path, num_rows: int, number: int) -> Counter[str]:
    """How many rows ended with which code. `number` draws the rows."""
    chance = random.Random(number)
    lines = hypothetical(num_rows // 5, number)
    lines += [make(number).encode() for number, make in enumerate(BAD_ROWS)]
    # One in twenty is not damaged at all, so that damage has good rows beside it whatever is drawn.
    lines += [json.dumps(GOOD[number % len(GOOD)]).encode() for number in range(num_rows // 20)]
    while len(lines) < num_rows:
        lines.append(chance.choice((structured, structured, mangled))(chance))
    # A row is a line that is not blank.
    lines = [line.replace(b"\n", b" ") for line in lines]
    lines = [line if line.strip(b" \t\r") else b"{}" for line in lines[:num_rows]]
    chance.shuffle(lines)
    (tmp_path / "rows.jsonl").write_bytes(b"\n".join(lines))
    command = [
        *(str(ranks.REPOSITORY / "launch.py"), f"model.path={MODEL}", "device=cpu", "model.dtype=float32"),
        *("cache.num_blocks=2048", "limits.max_n=4", "limits.max_tokens=8", "sampling.max_tokens=2"),
        *("limits.max_prompt_tokens=200", f"job.input={tmp_path / 'rows.jsonl'}"),
        f"job.output={tmp_path / 'out.jsonl'}",
    ]
    ranks.run_script(command, LIMIT_S).checked()
    answers = (tmp_path / "out.jsonl").read_bytes().splitlines()
    codes = codes_of(lines, answers)
    assert codes["well"] > num_rows // 20, codes
    assert len(codes) > 15, codes
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.jsonl", "out.jsonl.run", "rows.jsonl"]
    return codes


def codes_of(lines: list[bytes], answers: list[bytes]) -> Counter[str]:
    """Of answers that are one for each line, in their order, and well formed."""
    assert len(answers) == len(lines)
    codes: Counter[str] = Counter()
    for index, (line, answer) in enumerate(zip(lines, answers, strict=True)):
        value = json.loads(answer)
        is_plain = "index" in value
        assert value["index"] == index if is_plain else value["id"] == f"batch-{index}", (line, answer)
        assert (value["error"] is None) == bool(value.get("outputs") or value.get("response")), (line, answer)
        codes[value["error"]["code"] if value["error"] else "well"] += 1
    return codes


ANSWERS = [
    b'{"index": 0, "outputs": [{}], "error": null}',
    b'{"id": "batch-1", "response": {"body": {}}, "error": null}',
    b'{"index": 2, "error": {"code": "bad_json"}}',
]


@pytest.mark.control("Exit 0: every row has its line, in input order")
@pytest.mark.parametrize(
    "broken",
    [
        [ANSWERS[1], ANSWERS[0], ANSWERS[2]],
        [ANSWERS[0], ANSWERS[0], ANSWERS[2]],
        [*ANSWERS, ANSWERS[2]],
        ANSWERS[:2],
        [*ANSWERS[:2], b'{"index": 2, "error": null}'],
    ],
    ids=["exchanged", "instead of another", "twice", "lost", "neither answer nor error"],
)
def test_row_check_detects_answers_not_one_per_row(broken: list[bytes], control):
    """Negative control."""
    assert codes_of([b"{}"] * 3, ANSWERS) == {"well": 2, "bad_json": 1}
    with control():
        codes_of([b"{}"] * 3, broken)
