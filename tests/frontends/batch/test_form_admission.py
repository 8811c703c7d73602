"""Admission of rows stops at a limit of compiled grammar bytes, for the next step, and then continues."""

from types import SimpleNamespace
from typing import Any

import pytest

from spmd_worker.base.config.schema import JobConfig, RowLimits
from spmd_worker.engine import step_interval as between_steps
from spmd_worker.engine.step_interval import TimeBudget
from spmd_worker.frontends.batch import media_window, shared_job
from spmd_worker.frontends.batch.answer_rows import _admit
from spmd_worker.frontends.batch.media_window import MediaWindow
from spmd_worker.frontends.batch.row_source import InputRow
from spmd_worker.frontends.batch.row_window import NumberedLine, RowWindow
from spmd_worker.frontends.batch.shared_job import ReplicaWork
from spmd_worker.frontends.openai.row import Row, RowError, TextPrompt
from spmd_worker.replica.scheduler.budget import MAX_COMPILE_BYTES
from spmd_worker.replica.sequence.sampling_params import SamplingParams

FORM_BYTES = MAX_COMPILE_BYTES // 4


class Runner:
    """Accepts rows with a form of `form_bytes` each; a step answers them all. With `refuses` it rejects every row."""

    def __init__(self, form_bytes: int, refuses: bool = False) -> None:
        self.num_compile_bytes, self.form_bytes, self.refuses = 0, form_bytes, refuses
        self.admitted: list[Any] = []
        self.steps: list[int] = []
        self.num_requests = self.num_rows = self.num_sequences = self.num_media_bytes = 0

    def admit(self, row: Any, media: Any) -> Any:
        self.num_compile_bytes += self.form_bytes
        self.admitted.append(row)
        self.num_rows += not self.refuses
        return SimpleNamespace(num_output_tokens=0) if self.refuses else None

    def step(self) -> list[Any]:
        self.steps.append(self.num_rows)
        self.num_rows = 0
        return []


def text_row(index: int) -> Row:
    return Row(index, None, "plain", TextPrompt("a"), SamplingParams())


class Rows:
    def __init__(self, num_rows: int) -> None:
        self._rows = [InputRow(b"", text_row(number)) for number in range(num_rows)]

    @property
    def has_ended(self) -> bool:
        return not self._rows

    def is_lost(self, index: int) -> bool:
        return False

    def next_row(self) -> Any:
        return self._rows.pop(0)


@pytest.mark.parametrize(("form_bytes", "counts"), [(FORM_BYTES, [4, 4, 2]), (0, [10, 0, 0])])
def test_job_admits_limited_grammars_between_two_steps(form_bytes: int, counts: list[int]):
    rows, runner, found = Rows(10), Runner(form_bytes), []
    for _ in counts:
        before = len(runner.admitted)
        window, output = MediaWindow(None, 0), SimpleNamespace()
        _admit(rows, window, runner, output, 100, TimeBudget(1e9))  # type: ignore[arg-type]  # what is asked of them
        found.append(len(runner.admitted) - before)
    assert found == counts
    assert [row.index for row in runner.admitted] == list(range(10))


def replica_work(monkeypatch: pytest.MonkeyPatch, runner: Runner, num_chunks: int = 1) -> ReplicaWork:
    """Of a replica that claims `num_chunks` chunks of ten rows, then the end."""
    monkeypatch.setattr(shared_job, "RowRunner", lambda engine, name: runner)
    monkeypatch.setattr(shared_job, "num_wanted", lambda engine, num_unfinished: 1)
    chunks = [[NumberedLine(index, b'{"prompt": "a"}') for index in range(10)] for _ in range(num_chunks)]
    claimer = SimpleNamespace(has_ended=False)

    def claim() -> list[NumberedLine]:
        claimer.has_ended = not chunks
        return chunks.pop() if chunks else []

    claimer.claim = claim
    engine: Any = SimpleNamespace(
        default_sampling=SamplingParams(),
        config=SimpleNamespace(limits=RowLimits(), executor=SimpleNamespace(timeout_s=1e9), job=JobConfig()),
        limits=SimpleNamespace(images=None, encoder_prompts=None),
        counters=SimpleNamespace(num_output_tokens=0),
        channel=SimpleNamespace(size=1),
        close_followers=lambda: None,
    )
    round_: Any = SimpleNamespace(send_heartbeat=lambda: False, count=lambda number: None)
    return ReplicaWork(engine, round_, claimer, "model", lambda answers: None)  # type: ignore[arg-type]  # as above


@pytest.mark.parametrize(("form_bytes", "steps"), [(FORM_BYTES, [4, 4, 2]), (0, [10])])
def test_replica_keeps_fetched_rows_for_next_step(monkeypatch: pytest.MonkeyPatch, form_bytes: int, steps: list[int]):
    runner = Runner(form_bytes)
    work = replica_work(monkeypatch, runner)
    while not work.has_ended:
        work.advance()
    assert runner.steps == steps
    assert [row.index for row in runner.admitted] == list(range(10))


def test_replica_pauses_only_when_given_no_row(monkeypatch: pytest.MonkeyPatch):
    """Regression: it paused after each chunk of rejected rows, also with more rows to admit."""
    runner, num_admitted_at_pauses = Runner(FORM_BYTES, refuses=True), []

    def sleep(seconds: float) -> None:
        num_admitted_at_pauses.append(len(runner.admitted))

    monkeypatch.setattr(shared_job, "time", SimpleNamespace(monotonic=lambda: 0.0))
    monkeypatch.setattr(media_window.time, "sleep", sleep)
    work = replica_work(monkeypatch, runner, num_chunks=2)
    num_turns = 0
    while not work.has_ended:
        work.advance()
        num_turns += 1
    # Of each chunk four rows, four, two; then it is told that there are no more.
    assert (len(runner.admitted), num_turns, num_admitted_at_pauses) == (20, 7, [])
    assert work.counts.rows == 20
    # Negative control: with nothing claimed, and more to come, it pauses.
    claimer: Any = work._claimer
    work.has_ended = claimer.has_ended = False
    claimer.claim = list
    work.advance()
    assert num_admitted_at_pauses == [20]


class SlowRows:
    """Invalid rows; reading one advances the clock by `row_s`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, num_rows: int, row_s: float) -> None:
        self.now_s, self.row_s, self.num_left = 0.0, row_s, num_rows
        monkeypatch.setattr(between_steps, "time", SimpleNamespace(monotonic=lambda: self.now_s))

    @property
    def has_ended(self) -> bool:
        return not self.num_left

    def is_lost(self, index: int) -> bool:
        return False

    def next_row(self) -> Any:
        self.now_s += self.row_s
        self.num_left -= 1
        return InputRow(b"", RowError(self.num_left, None, "plain", "prompt_too_long", ""))


@pytest.mark.finding(number="B1")
@pytest.mark.parametrize(("timeout_s", "counts"), [(300.0, [4, 4, 2]), (2.0, [1, 1, 1])])
def test_admission_ends_with_its_turn(monkeypatch: pytest.MonkeyPatch, timeout_s: float, counts: list[int]):
    """Regression: 420 rows of a second each were all parsed before the next step, for which the other ranks waited."""
    rows, found, taken = SlowRows(monkeypatch, 10, 0.3), [], []
    output: Any = SimpleNamespace(add=taken.append)
    for _ in counts:
        before = rows.num_left
        window = MediaWindow(None, 0)
        _admit(rows, window, Runner(0), output, 512, TimeBudget(timeout_s))  # type: ignore[arg-type]  # as above
        found.append(before - rows.num_left)
    assert found == counts
    assert len(taken) == sum(counts)


@pytest.mark.finding(number="B1")
def test_window_reads_on_until_its_turn_ends(monkeypatch: pytest.MonkeyPatch):
    rows, refused = SlowRows(monkeypatch, 10, 0.3), []
    window, turn = RowWindow(rows, refused.append), TimeBudget(300.0)
    window.read_on(lambda: turn.is_over)
    assert len(refused) == 4


@pytest.mark.finding(number="B1")
def test_replica_admits_until_its_turn_ends(monkeypatch: pytest.MonkeyPatch):
    runner, rows = Runner(0), SlowRows(monkeypatch, 0, 0.3)

    def admit(row: Any, media: Any) -> None:
        rows.now_s += rows.row_s
        runner.num_rows += 1

    monkeypatch.setattr(runner, "admit", admit)
    work = replica_work(monkeypatch, runner)
    work._last_step_s = 0.0
    while not work.has_ended:
        work.advance()
    assert runner.steps == [4, 4, 2]
