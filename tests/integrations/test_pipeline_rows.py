"""Rows of pipelines: whatever batches and order a tool makes, every answer is the line of a job over the same rows."""

import asyncio
import json
from collections.abc import Callable, Iterator
from itertools import chain, repeat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas
import pyarrow
import pytest
from door_rows import MODEL, OPTIONS, SAMPLING, lines_of_job, mixed_rows, numbered, prompts, texts_of_job
from jobs_of_rows import openai_row

from spmd_worker.base.errors import ConfigError, StepMismatchError
from spmd_worker.frontends.serve.request_reader import content_name
from spmd_worker.integrations import row_engine
from spmd_worker.integrations.column_models import ColumnModel, Prompts
from spmd_worker.integrations.pipeline_rows import PipelineRows
from spmd_worker.integrations.row_engine import KeyedRow, PlacedRunner, RowEngine
from spmd_worker.integrations.row_queue import RowQueue
from spmd_worker.replica.scheduler.budget import MAX_COMPILE_BYTES


@pytest.fixture(scope="module")
def rows() -> Iterator[PipelineRows]:
    made = PipelineRows(MODEL, **OPTIONS)
    yield made
    made.close()


@pytest.fixture(scope="module")
def greedy() -> Iterator[PipelineRows]:
    made = PipelineRows(MODEL, prompt="question", sampling={"temperature": 0, "max_tokens": 12}, **OPTIONS)
    yield made
    made.close()


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return lines_of_job(tmp_path_factory.mktemp("job"), mixed_rows())


def check_equality(rows: PipelineRows, lines: list[str]) -> None:
    """That answers equal the job's lines in its order, and reversed in batches of 5 and of 1."""
    given = numbered(mixed_rows())
    assert rows.answer(given)["answer"] == lines
    for size in (5, 1):
        batches = [given[::-1][start : start + size] for start in range(0, len(given), size)]
        assert [line for batch in batches for line in rows.answer(batch)["answer"]] == lines[::-1]


@pytest.mark.guarantee("Answers of a pipeline equal a job's lines, in any batches and order")
def test_answers_equal_a_jobs_lines(rows: PipelineRows, lines: list[str]):
    check_equality(rows, lines)


class ByPosition(PipelineRows):
    """Rows whose key is their place in the batch."""

    def answer(self, rows: Any, first: int | None = None) -> Any:
        return super().answer([{**row, "index": place} for place, row in enumerate(rows)])


class OfOneSeed(PipelineRows):
    """Rows without their key, which share the job's seed."""

    def keyed(self, values: Any, number: int | None = None) -> KeyedRow:
        return super().keyed({**values, "seed": 0}, number)


@pytest.mark.control("Answers of a pipeline equal a job's lines, in any batches and order")
@pytest.mark.parametrize("kind", [ByPosition, OfOneSeed])
def test_lost_key_is_found(kind: type[PipelineRows], rows: PipelineRows, lines: list[str], control: Any):
    with control():
        check_equality(kind(rows.model, **rows.options), lines)


def test_columns_have_text_and_error(rows: PipelineRows, lines: list[str]):
    found = rows.answer(numbered(mixed_rows()))
    texts, errors = found["answer_text"], found["answer_error"]
    assert texts[0] == json.loads(lines[0])["outputs"][0]["text"]
    assert texts[5] == json.loads(lines[5])["response"]["body"]["choices"][0]["message"]["content"]
    assert [index for index, error in enumerate(errors) if error] == [4, 7, 10]
    assert [index for index, text in enumerate(texts) if text is None] == [4, 7, 10]
    assert errors[4].startswith("invalid_value: prompt=5 ")


@pytest.mark.parametrize(
    ("more", "is_answered"),
    [({}, False), ({"custom_id": "a"}, True), ({"seed": 3}, True), ({"temperature": 0}, True), ({"index": 2}, True)],
)
def test_random_row_needs_a_key(more: dict[str, Any], is_answered: bool, rows: PipelineRows):
    row = {"prompt": "add 1 2 =", **SAMPLING, **more}
    if is_answered:
        assert rows.answer([row])["answer_error"] == [None]
    else:
        with pytest.raises(
            ConfigError, match=r"^a row is sampled at random \(temperature=1.5\) and has no key: .* seed"
        ):
            rows.answer([{"prompt": "add 2 3 =", "temperature": 0, "max_tokens": 30}, row])
    # A call that raised leaves nothing behind.
    assert len(rows.answer(numbered(mixed_rows()))["answer"]) == 16


@pytest.mark.parametrize("key", [None, -1, "seven", 1.5, True, 2**63])
def test_invalid_key_is_an_error_row(key: Any, rows: PipelineRows):
    good, bad = rows.answer([{"prompt": "add 1 2 =", **SAMPLING, "index": value} for value in (0, key)])["answer_error"]
    assert good is None
    assert bad.startswith(f"invalid_key: index={key!r} is not a row's key")


def test_prompt_column_takes_every_kind(tmp_path: Path, rows: PipelineRows):
    talk = [{"role": "user", "content": "copy a b ="}]
    given = ["add 1 2 =", talk, [65, 66], None]
    names = ("prompt", "messages", "prompt_token_ids", "prompt")
    expected = lines_of_job(tmp_path, [{name: value, **SAMPLING} for name, value in zip(names, given, strict=True)])
    own = PipelineRows(MODEL, prompt="question", sampling=SAMPLING, output="said", **OPTIONS)
    # Columns that have a meaning in rows are left alone.
    table = [{"question": value, "n": 7, "answer": "x"} for value in given]
    try:
        assert own.answer(table, first=0)["said"] == expected
        keyed = PipelineRows(MODEL, prompt="question", key="id", sampling=SAMPLING, **OPTIONS)
        (named,) = keyed.answer([{"question": given[0], "id": "first"}])["answer_text"]
    finally:
        own.close()
    assert [named] == texts_of_job(tmp_path, [{"prompt": given[0], "custom_id": "first", **SAMPLING}])["first"]


@pytest.mark.parametrize(
    ("options", "row", "message"),
    [
        ({"prompt": "question"}, {"text": "a"}, r"^prompt='question' is not a column: the table has text"),
        ({}, {"question": "a"}, r"no column of a row's keys.*but question: name the column of prompts with prompt="),
        ({"key": "id"}, {"prompt": "a"}, r"^key='id' is not a column: the table has prompt"),
        ({}, {"prompt": "a", "answer_text": "b"}, r"^the table has a column 'answer_text' already: .* output="),
        ({}, {"prompt": {1, 2}}, r"^column 'prompt' has values of type set, which JSON lacks"),
        ({}, {"prompt": b"a"}, r"^column 'prompt' has values of type bytes, which only images and audio may have"),
        ({"prompt": "images"}, {"images": b"a"}, r"^column 'images' has values of type bytes"),
        ({"key": "id"}, {"prompt": "a", "id": b"a"}, r"^column 'id' has values of type bytes"),
    ],
)
def test_unusable_column_is_an_error(options: dict[str, Any], row: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        PipelineRows(MODEL, **options).keyed(row)


def test_wrong_default_names_the_argument_that_has_it():
    with pytest.raises(ConfigError, match=r"^sampling has the unsupported key 'temprature'"):
        PipelineRows(MODEL, sampling={"temprature": 0}).open()


def test_engine_is_refused_for_replicas_and_launchers(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(ConfigError, match=r"^data_parallel_size=2: a pipeline worker has one replica"):
        RowEngine(MODEL, data_parallel_size=2)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "1")
    with pytest.raises(ConfigError, match=r"^RANK and WORLD_SIZE are set"):
        RowEngine(MODEL)


def test_tables_and_frames_keep_their_columns(rows: PipelineRows, lines: list[str]):
    given = [{**row, "more": index} for index, row in enumerate(numbered(mixed_rows()[:2]))]
    table = rows.answer_table(pyarrow.Table.from_pylist(given[::-1]))
    assert table["answer"].to_pylist() == lines[1::-1]
    assert table["more"].to_pylist() == [1, 0]
    # The column `n` has a null, so its integer is a float in pandas; a job's Parquet reader reads them as integers.
    frame = pandas.DataFrame(given, index=[7, 9])
    found = list(rows.answer_frames(iter([frame, frame[:0]])))
    assert found[0]["answer"].tolist() == lines[:2]
    assert found[0].index.tolist() == [7, 9]
    assert list(found[1].columns) == list(found[0].columns)


def texts_and_errors(rows: PipelineRows, table: Any) -> list[tuple[str | None, str | None]]:
    """(text, error) of each row of a pandas frame or pyarrow table."""
    answered = rows.answer_frame(table) if isinstance(table, pandas.DataFrame) else rows.answer_table(table)
    columns = [pyarrow.array(answered[name], from_pandas=True).to_pylist() for name in rows.names[1:]]
    return list(zip(*columns, strict=True))


def test_other_columns_may_have_any_type(greedy: PipelineRows):
    """Regression: a column without a meaning that Python or pyarrow cannot read ended the call."""
    texts = pyarrow.array(["add 123 + 456 ="])
    # Not UTF-8, a time after the year 9999, two columns of one name.
    broken = pyarrow.Array.from_buffers(pyarrow.string(), 1, pyarrow.array([b"\xff"]).buffers())
    late = pyarrow.array([2**60], pyarrow.timestamp("s"))
    table = pyarrow.Table.from_arrays([texts, broken, late, late], ["question", "more", "at", "at"])
    assert texts_and_errors(greedy, table) == [(" 579", None)]
    frame = pandas.DataFrame([["add 123 + 456 =", object(), 1j], ["sort 42 17 99 =", 5, 2]])
    frame.columns = ["question", "more", "more"]
    assert texts_and_errors(greedy, frame) == [(" 579", None), (" 17 42 99", None)]
    for twice in (table.rename_columns(["question", "question", "a", "b"]), frame.set_axis(["question"] * 3, axis=1)):
        with pytest.raises(ConfigError, match=r"^[23] columns have the name 'question': rename them"):
            texts_and_errors(greedy, twice)


def test_value_of_a_wrong_type_is_an_error_row(greedy: PipelineRows):
    """Regression: conversations whose content is text here and parts there, and a number among texts, ended the call; a
    map, Spark's type of a dict, was no message.
    """
    talk = [{"role": "user", "content": "add 123 + 456 ="}]
    parts = [{"role": "user", "content": [{"type": "text", "text": "add 123 + 456 ="}]}]
    given = [talk, parts, "add 123 + 456 =", 5, float("nan"), pandas.NA, pandas.Timestamp(0), "add \ud800", b"add"]
    found = texts_and_errors(greedy, pandas.DataFrame({"question": pandas.Series(given, dtype=object)}))
    assert [text for text, _ in found] == ["579", "579", " 579", *[None] * 6]
    starts = ["invalid_value: prompt=5 must", *["missing_prompt: "] * 2, "invalid_value: column 'question' has values"]
    for (_, error), start in zip(
        found[3:], [*starts, "invalid_utf8: ", "invalid_value: column 'question'"], strict=True
    ):
        assert error is not None
        assert error.startswith(start)
    broken = pyarrow.Array.from_buffers(pyarrow.string(), 2, pyarrow.array([b"\xff", b"add 1 ="]).buffers())
    (_, error), (text, _) = texts_and_errors(greedy, pyarrow.table({"question": broken}))
    assert error is not None
    assert error.startswith("invalid_value: column 'question' has a value that cannot be read ('utf-8'")
    assert text is not None
    messages = pyarrow.list_(pyarrow.map_(pyarrow.string(), pyarrow.string()))
    table = pyarrow.table({"question": pyarrow.array([[list(talk[0].items())]], messages)})
    assert texts_and_errors(greedy, table) == [("579", None)]


class Failing(RowEngine):
    """Engine whose step raises, in each engine at step `at` as often as `times` says."""

    at, times, error = 3, 1, RuntimeError("planted")

    def _start(self) -> None:
        super()._start()
        execute, steps = self._engine.executor.execute_model, 0

        def planted(*args: Any, **options: Any) -> Any:
            nonlocal steps
            steps += 1
            if steps == self.at and self.times > 0:
                self.times -= 1
                raise self.error
            return execute(*args, **options)

        self._engine.executor.execute_model = planted  # type: ignore[method-assign]  # fails as planted


@pytest.fixture
def failing() -> Iterator[Callable[..., Failing]]:
    made = []

    def make(**more: Any) -> Failing:
        made.append(Failing(MODEL, **OPTIONS))
        vars(made[-1]).update(more)
        return made[-1]

    yield make
    for each in made:
        each.close()


def plant_turns(monkeypatch: pytest.MonkeyPatch, *ended: bool) -> None:
    """Time budgets whose first turns are over at once as `ended` says; no other is, however long rows take to admit."""
    turns = chain(ended, repeat(False))
    monkeypatch.setattr(row_engine, "TimeBudget", lambda timeout_s: SimpleNamespace(is_over=next(turns)))


@pytest.mark.parametrize("reason", ["time", "grammars"])
def test_turn_that_ends_at_once_loses_no_row(
    rows: PipelineRows, lines: list[str], monkeypatch: pytest.MonkeyPatch, reason: str
):
    """Regression: a pause of a second, or grammars of refused rows, before the first row was asked for, left every row
    without an answer.
    """
    plant_turns(monkeypatch, reason == "time")
    sizes = chain([0, MAX_COMPILE_BYTES] if reason == "grammars" else [], repeat(0))
    monkeypatch.setattr(PlacedRunner, "num_compile_bytes", property(lambda runner: next(sizes)))
    assert rows.answer(numbered(mixed_rows()))["answer"] == lines


@pytest.mark.guarantee("A pipeline's engine that fails is replaced, and every row is answered once")
def test_failed_engine_is_replaced(
    failing: Callable[..., Failing],
    lines: list[str],
    caplog: pytest.LogCaptureFixture,
    rows: PipelineRows,
    monkeypatch: pytest.MonkeyPatch,
):
    # All rows run when the engine fails.
    plant_turns(monkeypatch)
    engine, given = failing(), [rows.keyed(row) for row in numbered(mixed_rows())]
    found: list[tuple[int, bytes]] = []
    engine.run(enumerate(given), lambda place, answer: found.append((place, answer.line)))
    assert [(place, line.decode()[:-1]) for place, line in sorted(found)] == list(enumerate(lines))
    assert [each for each in caplog.messages if "a new one answers" in each] == [
        "the engine has failed, a new one answers 13 rows again: planted"
    ]


@pytest.mark.gate("wrong bits")
@pytest.mark.control("A pipeline's engine that fails is replaced, and every row is answered once")
@pytest.mark.parametrize(
    "more", [{"times": 99, "at": 1}, {"error": StepMismatchError("planted")}], ids=["again and again", "wrong bits"]
)
def test_engine_that_always_fails_raises(more: dict[str, Any], failing: Callable[..., Failing], rows: PipelineRows):
    with pytest.raises((RuntimeError, StepMismatchError), match="planted"):
        failing(**more).answer([rows.keyed(row) for row in numbered(mixed_rows())])


def test_concurrent_prompts_equal_a_jobs(tmp_path: Path):
    url = "/v1/chat/completions"
    bodies = [{"messages": [{"role": "user", "content": prompt}], **SAMPLING} for prompt in prompts(20)]
    expected = texts_of_job(tmp_path, [openai_row(content_name(url, body), url, body) for body in bodies])
    chats = Prompts(ColumnModel(MODEL, OPTIONS, dict(SAMPLING), raises=False))

    async def ask_all() -> list[Any]:
        return await asyncio.gather(*(chats.prompt((prompt,)) for prompt in [*prompts(20), "x" * 3000]))

    found = asyncio.run(ask_all())
    assert found == [texts[0] for texts in expected.values()] + [None]
    PipelineRows(MODEL, **OPTIONS).close()
    with pytest.raises(RuntimeError, match=r"^the engine of these rows was closed"):
        asyncio.run(chats.prompt(("add",)))


def test_queue_reports_errors_to_its_rows(rows: PipelineRows):
    waiting = RowQueue(rows.open())
    with pytest.raises(ConfigError, match="has no key"):
        asyncio.run(waiting.answer(KeyedRow(None, b'{"prompt": "add", "temperature": 1}')))
    line = b'{"prompt": "add", "temperature": 0, "max_tokens": 2}'
    assert asyncio.run(waiting.answer(KeyedRow(None, line))).error_code is None
