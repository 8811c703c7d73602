"""Rows with far too long texts are rejected without being encoded, and a job of several ranks continues."""

import json
from pathlib import Path
from typing import Any

import pytest
import ranks
from jobs_of_rows import answers_of_job, openai_row

from spmd_worker.tokenizer.tokenizer import Tokenizer

MODEL = ranks.REPOSITORY / "scripts" / "demo" / "model"
CHARACTERS = 1_000_000
TEXT = "word and more " * (CHARACTERS // 14)
ROWS: list[Any] = [
    {"prompt": TEXT},
    {"messages": [{"role": "user", "content": TEXT}]},
    openai_row("text", "/v1/completions", {"prompt": TEXT}),
    openai_row("list", "/v1/completions", {"prompt": [TEXT]}),
    openai_row("chat", "/v1/chat/completions", {"messages": [{"role": "user", "content": TEXT}]}),
]


def refuse_long_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    encode = Tokenizer.encode

    def short_alone(tokenizer: Tokenizer, text: str, *arguments: Any, **more: Any) -> Any:
        assert len(text) < CHARACTERS // 2, "a long text is encoded"
        return encode(tokenizer, text, *arguments, **more)

    monkeypatch.setattr(Tokenizer, "encode", short_alone)


@pytest.mark.finding(number="B1")
def test_too_long_row_is_not_encoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    refuse_long_texts(monkeypatch)
    *refused, answered = answers_of_job(tmp_path, MODEL, [*ROWS, {"prompt": "add 1 2 =", "max_tokens": 2}])
    for answer in refused:
        assert answer["error"]["code"] == "prompt_too_long"
        assert "tokens but model.max_model_len is 256" in answer["error"]["message"]
        assert "the prompt has at least " in answer["error"]["message"]
    assert answered["error"] is None


def test_truncated_row_is_encoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Its last tokens fit at any length."""
    text = "add 1 2 = " * 2000
    row = {"prompt": text, "truncate_prompt_tokens": 8, "max_tokens": 2}
    (cut,) = answers_of_job(tmp_path, MODEL, [row])
    assert (cut["error"], cut["usage"]["prompt_tokens"]) == (None, 8)
    # Negative control: such a row does need its text encoded.
    monkeypatch.setattr(Tokenizer, "encode", lambda *_, **more: pytest.fail("encoded"))
    (tmp_path / "again").mkdir()
    with pytest.raises(pytest.fail.Exception, match="encoded"):
        answers_of_job(tmp_path / "again", MODEL, [row])


@pytest.mark.finding(number="B1")
@pytest.mark.parametrize("is_cut", [True, False], ids=["cut", "without a bound"])
def test_text_taking_long_to_encode_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_cut: bool):
    """Whatever its tokens are: all of them are made to be counted, or to keep the last."""
    refuse_long_texts(monkeypatch)
    monkeypatch.setattr(Tokenizer, "min_num_tokens", lambda tokenizer, text: 0)
    more = {"truncate_prompt_tokens": 8} if is_cut else {}
    text = "word and more " * 300_000
    rows = [
        {"prompt": text, **more},
        openai_row("text", "/v1/completions", {"prompt": text, **more}),
    ]
    for answer in answers_of_job(tmp_path, MODEL, rows):
        assert answer["error"]["code"] == "prompt_too_long"
        assert "the prompt has 4200000 characters, more than the limit of 4194304" in answer["error"]["message"]


LAUNCH = str(ranks.REPOSITORY / "launch.py")
SLOW_ENCODING = """
import sys, time
import launch
from spmd_worker.tokenizer.tokenizer import Tokenizer

encode = Tokenizer.encode

def encode_slowly(self, text, *given, **named):
    if len(text) > 500_000:
        time.sleep(200)
    return encode(self, text, *given, **named)

Tokenizer.encode = encode_slowly
sys.exit(launch.main())
"""


def run_on_two_ranks(
    folder: Path, num_rows: int, *more: str, script: str = LAUNCH
) -> tuple[list[Any], dict[str, Any], str]:
    """Answers and metrics of `num_rows` rows of a megabyte under tensor parallelism."""
    with open(folder / "rows.jsonl", "w") as file:
        for index in range(num_rows):
            file.write(json.dumps({"prompt": f"{index} {TEXT}"}) + "\n")
    done = ranks.run_forked(
        [
            *(script, f"model.path={MODEL}", "device=cpu", "parallel.tensor_parallel_size=2"),
            *(f"job.input={folder / 'rows.jsonl'}", f"job.output={folder / 'out.jsonl'}", *more),
        ],
        2,
        timeout_s=600,
    ).checked()
    answers = [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()]
    metrics = json.loads((folder / "out.jsonl.run" / "metrics.json").read_text())
    return answers, metrics, done.output


@pytest.mark.finding(number="B1")
def test_job_of_long_rows_outlives_its_timeout(tmp_path: Path):
    """Their encoding took longer than the other rank waits for a step: here one text's alone does."""
    script = tmp_path / "slow_encoding.py"
    script.write_text(SLOW_ENCODING)
    keys = ("executor.timeout_s=60", "cache.num_blocks=64")
    answers, metrics, _ = run_on_two_ranks(tmp_path, 16, *keys, script=str(script))
    assert [answer["error"]["code"] for answer in answers] == ["prompt_too_long"] * 16
    assert metrics["peak_memory_bytes"] < 2 << 30


@pytest.mark.stress
@pytest.mark.finding(number="B1")
def test_rows_of_a_megabyte_are_all_error_rows(tmp_path: Path):
    """Input: 420 rows."""
    answers, metrics, _ = run_on_two_ranks(tmp_path, 420)
    assert [answer["error"]["code"] for answer in answers] == ["prompt_too_long"] * 420
    assert metrics["peak_memory_bytes"] < 2 << 30
    print(f"LONG ROWS {metrics['generate_s']:.1f} s, {metrics['peak_memory_bytes'] >> 20} MiB in all")


@pytest.mark.stress
@pytest.mark.finding(number="B1")
def test_job_of_unbounded_texts_outlives_its_timeout(tmp_path: Path):
    """Each is encoded, a second and more: steps are taken in between."""
    script = tmp_path / "unbounded.py"
    script.write_text(
        "import sys\n"
        "from spmd_worker.tokenizer.tokenizer import Tokenizer\n"
        "Tokenizer.min_num_tokens = lambda tokenizer, text: 0\n"
        "import launch\n"
        "sys.exit(launch.main())\n"
    )
    rows = [{"prompt": f"{index} {TEXT}"} for index in range(40)]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    command = [
        *(script, f"model.path={MODEL}", "device=cpu", "parallel.tensor_parallel_size=2", "executor.timeout_s=10"),
        *("cache.num_blocks=64", f"job.input={tmp_path / 'rows.jsonl'}", f"job.output={tmp_path / 'out.jsonl'}"),
    ]
    ranks.run_forked(command, 2, timeout_s=600, env={"PYTHONPATH": str(ranks.REPOSITORY)}).checked()
    assert (tmp_path / "out.jsonl").read_text().count('"prompt_too_long"') == 40
