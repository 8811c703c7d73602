"""The window of rows that wait: its order, its bounds, and what does not wait in it."""

import random
from collections.abc import Iterable
from itertools import groupby
from types import SimpleNamespace
from typing import Any

import pytest

from spmd_worker.base.config.schema import CacheConfig, JobConfig, RunConfig
from spmd_worker.frontends.batch import prefix_window
from spmd_worker.frontends.batch.prefix_window import PrefixWindow, in_prefix_order
from spmd_worker.frontends.batch.row_source import InputRow
from spmd_worker.frontends.openai.row import Row, RowError, TextPrompt
from spmd_worker.replica.sequence.sampling_params import SamplingParams

SAMPLING = SamplingParams()


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The window's clock, in seconds, which only a test moves: a slow machine must not end its calls."""
    now = [0.0]
    monkeypatch.setattr(prefix_window, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


class Source:
    """Rows of texts; None: nothing is ready yet. `num_read` rows were read."""

    def __init__(self, texts: Iterable[str | None], priorities: Iterable[int] = ()) -> None:
        self._texts, self._priorities = list(texts), list(priorities)
        self.num_read = self._next = 0
        self.keys: dict[int, int] = {}
        self.lost: set[int] = set()
        self.num_rows_by_adapter: dict[str, int] = {}
        self.has_ended = self._is_silent = False

    def may_read(self) -> bool:
        return True

    def is_ready(self) -> bool:
        return not self._is_silent

    def is_lost(self, index: int) -> bool:
        return index in self.lost

    def next_row(self) -> InputRow | None:
        if self._next == len(self._texts):
            self.has_ended = True
            return None
        text = self._texts[self._next]
        self._next += 1
        self._is_silent = text is None
        if text is None:
            return None
        index, self.num_read = self.num_read, self.num_read + 1
        if text == "bad":
            return InputRow(b"", RowError(index, None, "plain", "invalid_json", ""))
        priority = self._priorities[index] if self._priorities else 0
        row = Row(index, None, "plain", TextPrompt(text), SAMPLING, priority=priority)
        return InputRow(text.encode(), row)


def take_all(window: PrefixWindow) -> list[InputRow]:
    found = []
    while not window.has_ended:
        row = window.next_row()
        if row is not None:
            found.append(row)
    return found


def texts_of(rows: Iterable[InputRow]) -> list[str]:
    return [row.line.decode() for row in rows]


def shuffled(num_rows: int, num_beginnings: int) -> list[str]:
    texts = [f"{number % num_beginnings:04d} {number}" for number in range(num_rows)]
    random.Random(1).shuffle(texts)
    return texts


def num_visits(texts: Iterable[str]) -> int:
    """How often another beginning comes next."""
    return len(list(groupby(text[:4] for text in texts)))


def test_rows_in_one_window_come_in_order_of_texts():
    texts = shuffled(500, 20)
    assert texts_of(take_all(PrefixWindow(Source(texts), 1000))) == sorted(texts)


def test_window_passes_find_rows_of_twice_its_size():
    """A window of 400 rows of 50 beginnings, emptied before it is filled again, would find 8 of each: 500 visits."""
    texts = shuffled(4000, 50)
    found = texts_of(take_all(PrefixWindow(Source(texts), 400)))
    assert sorted(found) == sorted(texts)
    assert 250 <= num_visits(found) <= 330
    # The control: the order of the file.
    assert num_visits(texts) > 3500


def test_equal_texts_keep_their_order():
    rows = take_all(PrefixWindow(Source(["same"] * 50), 8))
    assert [row.row.index for row in rows] == list(range(50))


def test_lower_priority_number_comes_first():
    window = PrefixWindow(Source(["c", "b", "a", "d"], [0, 1, 1, 0]), 9)
    assert texts_of(take_all(window)) == ["c", "d", "a", "b"]


def test_urgent_row_read_in_a_pass_comes_next():
    texts = [*(f"m {number}" for number in range(4)), "a urgent", "b urgent"]
    found = texts_of(take_all(PrefixWindow(Source(texts, [5] * 4 + [0] * 2), 3)))
    assert found == ["m 0", "m 1", "a urgent", "b urgent", "m 2", "m 3"]


def test_rare_row_does_not_wait_for_the_input_to_end():
    """All others are ahead of the pass that has passed it."""
    texts = ["z"] * 8 + ["a"] + ["z"] * 400
    found = texts_of(take_all(PrefixWindow(Source(texts), 8)))
    assert sorted(found) == sorted(texts)
    assert found.index("a") <= 8 + prefix_window._WINDOWS_PER_PASS * 8


def test_error_rows_do_not_wait():
    window = PrefixWindow(Source(["b", "bad", "a"]), 9)
    assert texts_of(take_all(window)) == ["", "a", "b"]


def test_row_of_silent_stream_is_handed_out():
    window = PrefixWindow(Source(["b", None, "a", None, "c"]), 9)
    found = [window.next_row() for _ in range(5)]
    assert [None if row is None else row.line for row in found] == [b"b", b"a", b"c", None, None]
    assert window.has_ended


def test_lost_rows_are_not_handed_out():
    """Regression: rows of a lost lease that waited in the window were computed."""
    source = Source(["b", "a", "b", "bad", "a", "c"])
    window = PrefixWindow(source, 10)
    source.lost = {0, 1, 5}
    assert sorted(found.row.index for found in take_all(window)) == [2, 3, 4]
    source = Source(["a"])
    source.lost = {0}
    assert take_all(PrefixWindow(source, 10)) == []


def test_first_row_waits_for_many_then_window_fills():
    source = Source(shuffled(9000, 50))
    window = PrefixWindow(source, 2000)
    num_calls = next(number for number in range(1, 99) if window.next_row() is not None)
    assert source.num_read == prefix_window._FIRST_ROWS
    assert num_calls == prefix_window._FIRST_ROWS // prefix_window._ROWS_PER_CALL
    for _ in range(400):
        window.next_row()
    assert source.num_read == 1 + 400 + 2000 - 1


def test_rows_behind_many_done_ones_are_read_by_turns(monkeypatch: pytest.MonkeyPatch, clock: list[float]):
    """A resumed job skips done rows before each: 256 of these took 25 s, and its ranks were not stepped meanwhile."""
    source = Source(shuffled(9000, 50))

    def next_row() -> InputRow | None:
        clock[0] += 0.09
        return Source.next_row(source)

    monkeypatch.setattr(source, "next_row", next_row)
    window = PrefixWindow(source, 2000)
    assert window.next_row() is None
    assert source.num_read == 2


@pytest.mark.parametrize(("max_rows", "max_bytes", "num_read"), [(7, 1 << 20, 7), (1000, 500, 11)])
def test_window_is_bounded_by_rows_and_bytes(monkeypatch: pytest.MonkeyPatch, max_rows: int, max_bytes: int, num_read):
    monkeypatch.setattr(prefix_window, "_MAX_BYTES", max_bytes)
    source = Source("x" * 22 for _ in range(50))
    window = PrefixWindow(source, max_rows)
    assert window.next_row() is not None
    assert source.num_read == num_read
    assert len(take_all(window)) == 49


@pytest.mark.parametrize(
    ("job", "cache", "is_window"),
    [({}, {}, True), ({"window_rows": 1}, {}, False), ({"window_rows": 0}, {}, False), ({}, {"enable": False}, False)],
)
def test_file_order_is_kept_without_window_or_cache(job: dict[str, Any], cache: dict[str, Any], is_window: bool):
    caching = CacheConfig(enable_prefix_caching=cache.get("enable", True))
    source, config = Source([]), RunConfig(job=JobConfig(**job), cache=caching)
    assert (in_prefix_order(source, config) is not source) is is_window
