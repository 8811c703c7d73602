"""Rows read ahead: their order, the size of chunks, and the bounds of the window."""

from collections.abc import Iterator

import pytest

from spmd_worker.frontends.batch import row_window
from spmd_worker.frontends.batch.row_source import InputRow
from spmd_worker.frontends.batch.row_window import RowWindow, expected_length
from spmd_worker.frontends.openai.row import ChatPrompt, Row, RowError, TextPrompt, TokensPrompt
from spmd_worker.replica.sequence.sampling_params import SamplingParams

SAMPLING = SamplingParams(max_tokens=None)


def row_of(index: int, length: int) -> InputRow:
    return InputRow(b"x" * length, Row(index, None, "plain", TokensPrompt((7,) * length), SAMPLING))


class Source:
    """The part of `JobInput` that a window reads; None means that no row is available yet."""

    def __init__(self, rows: Iterator[InputRow | None]) -> None:
        self._rows = rows
        self.has_ended = False
        self.lost: set[int] = set()

    def is_lost(self, index: int) -> bool:
        return index in self.lost

    def next_row(self) -> InputRow | None:
        try:
            return next(self._rows)
        except StopIteration:
            self.has_ended = True
            return None


def window_of(rows: Iterator[InputRow | None]) -> tuple[RowWindow, list[RowError]]:
    refused: list[RowError] = []
    return RowWindow(Source(rows), refused.append), refused


def take_all(window: RowWindow, num_replicas: int, most: int) -> list[list[int]]:
    chunks = []
    while not window.is_empty:
        window.read_on()
        chunks.append([each.index for each in window.take(num_replicas, most)])
    return chunks


def test_longest_rows_come_first_and_chunks_shrink():
    lengths = [5, 9, 1, 9, 3, 2, 8, 4]
    window, _ = window_of(row_of(index, length) for index, length in enumerate(lengths))
    assert take_all(window, 2, 3) == [[1, 3], [6], [0], [7], [4], [5], [2]]


def test_lost_rows_are_in_no_chunk():
    """Regression: rows of a lost lease that waited in the window were sent to replicas."""
    window, _ = window_of(row_of(index, length) for index, length in enumerate([5, 9, 1, 9, 3, 2, 8, 4]))
    window._source.lost = {1, 0, 2}  # type: ignore[attr-defined]  # the test's source
    assert take_all(window, 2, 3) == [[3, 6], [7], [4], [5], []]
    window, _ = window_of(row_of(index, 1) for index in range(4))
    window._source.lost = {0, 1, 2, 3}  # type: ignore[attr-defined]  # the test's source
    assert take_all(window, 2, 3) == [[]]


def test_chunk_has_full_size_while_rows_remain():
    window, _ = window_of(row_of(index, 1) for index in range(2000))
    window.read_on()
    chunks = [[each.index for each in window.take(2, 3)] for _ in range(3)]
    assert chunks == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert sum(len(chunk) for chunk in take_all(window, 2, 3)) == 2000 - 9


def test_invalid_rows_are_rejected_while_reading():
    def rows() -> Iterator[InputRow]:
        for index in range(3):
            yield row_of(index, 2)
            yield InputRow(b"bad", RowError(10 + index, None, "plain", "invalid_json", "bad"))

    window, refused = window_of(rows())
    assert [index for chunk in take_all(window, 1, 9) for index in chunk] == [0, 1, 2]
    assert [each.index for each in refused] == [10, 11, 12]
    assert window.is_empty


def test_held_rows_are_bounded_by_count_and_bytes(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(row_window, "_MAX_ROWS", 300)
    monkeypatch.setattr(row_window, "_MAX_BYTES", 5000)
    for length, most_read in ((1, 300), (100, 50)):
        num_read = 0

        def rows(length: int = length) -> Iterator[InputRow]:
            nonlocal num_read
            for index in range(1000):
                num_read += 1
                yield row_of(index, length)

        window, _ = window_of(rows())
        for _ in range(5):
            window.read_on()
        assert num_read == most_read
        taken = take_all(window, 2, 64)
        assert sorted(index for chunk in taken for index in chunk) == list(range(1000))


def test_window_has_no_rows_before_reading():
    window, _ = window_of(iter([]))
    assert window.take(2, 5) == []
    assert not window.is_empty
    window.read_on()
    assert window.is_empty
    assert window.take(2, 5) == []


def test_window_read_returns_when_row_is_not_ready():
    num_asked = 0

    def rows() -> Iterator[InputRow | None]:
        nonlocal num_asked
        for index in range(3):
            num_asked += 1
            yield None
            yield row_of(index, 1)

    window, _ = window_of(rows())
    for number in range(3):
        window.read_on()
        assert num_asked == number + 1, "it was asked again in the same turn"
        assert not window.is_empty
    assert [index for chunk in take_all(window, 1, 9) for index in chunk] == [0, 1, 2]


def test_row_length_covers_prompt_and_its_samples():
    text, tokens = TextPrompt("x" * 40), TokensPrompt((1,) * 10)
    chat = ChatPrompt(({"role": "user", "content": "y" * 40},))
    limited = SamplingParams(max_tokens=20, n=3)
    rows = [
        Row(0, None, "plain", prompt, sampling) for prompt in (text, tokens, chat) for sampling in (SAMPLING, limited)
    ]
    assert [expected_length(row) for row in rows] == [10, 70] * 3


def alike(index: int, length: int, beginning: str) -> InputRow:
    return row_of(index, length)._replace(key=f"{beginning * 100}{index}".encode())


def test_rows_that_begin_alike_are_one_chunk():
    """Also where it is larger than a chunk of others; beginnings with the longest rows come first."""
    rows = [alike(0, 2, "a"), alike(1, 5, "a"), row_of(2, 4), alike(3, 1, "b"), alike(4, 9, "b"), row_of(5, 3)]
    window, _ = window_of(iter([*rows, *[row_of(6 + index, 1) for index in range(60)]]))
    window.read_on()
    chunks = [[each.index for each in window.take(2, 1, 8)] for _ in range(4)]
    assert chunks == [[4, 3], [1, 0], [2], [5]]


def test_chunk_holds_several_small_groups():
    rows = [alike(index, 9 - index // 3, "abc"[index // 3]) for index in range(9)]
    window, _ = window_of(iter([*rows, *[row_of(9 + index, 1) for index in range(90)]]))
    window.read_on()
    chunks = [[each.index for each in window.take(2, 7, 7)] for _ in range(2)]
    assert chunks == [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11, 12]]


def test_large_group_is_cut_into_equal_adjacent_chunks():
    window, _ = window_of(alike(index, 1 + index % 2, "a") for index in range(400))
    window.read_on()
    chunks = [[each.index for each in window.take(2, 4, 60)] for _ in range(5)]
    assert [len(chunk) for chunk in chunks] == [52, 52, 52, 52, 48]
    assert sorted(index for chunk in chunks for index in chunk) == list(range(256))


def test_common_system_prompt_leaves_groups_together():
    """The system prompt of all rows is half of each; three documents are most of the rest."""
    keys = [f"{'s' * 200}{document * 160}{row}" for document in "abc" for row in range(4)]
    rows = [row_of(index, 1)._replace(key=key.encode()) for index, key in enumerate(keys)]
    window, _ = window_of(iter([*rows, *[row_of(12 + index, 1) for index in range(60)]]))
    window.read_on()
    chunks = [[each.index for each in window.take(1, 4, 5)] for _ in range(3)]
    assert chunks == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
