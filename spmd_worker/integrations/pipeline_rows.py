"""Rows of tables in other tools' pipelines: columns -> a job's rows -> columns of answers.

A `PipelineRows` is pickled with its arguments only; the engine starts in the process that answers rows, once for equal
arguments. Columns are those of a job's row (`prompt`, `messages`, `max_tokens`, ..., or `custom_id`, `method`, `url`,
`body`), others are left alone; or one column has the prompts.
"""

import base64
import json
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

from spmd_worker.base.config.plain_values import plain_int
from spmd_worker.base.errors import ConfigError
from spmd_worker.frontends.batch.input.input_files import MEDIA_COLUMNS
from spmd_worker.frontends.openai.row_parser import ROW_KEYS
from spmd_worker.frontends.openai.row_writer import RowAnswer
from spmd_worker.integrations.row_engine import KeyedRow, RowEngine

INDEX: Final = "index"
"""Column of the rows' numbers, if no other is named."""
_MAX_EXACT_INTEGER: Final = 2**53
_MAX_INDEX: Final = 2**63 - 1
_engines: Final[dict[tuple[int, str], RowEngine]] = {}
"""Engines by process and arguments: a forked process uses none of its parent's."""
_opening: Final = threading.Lock()


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A table's value that no row can have: its row is an error row."""

    problem: str


class PipelineRows:
    """`prompt` is a column of texts, conversations (lists of messages) or lists of token ids; None: columns have the
    names of a row's keys. `key` is a column of integers, the rows' numbers in a job's input, or of texts, their
    custom_ids; None: `index`, if there is one. `sampling` are defaults for all rows (a job's `sampling.*`). Answers are
    columns with names that begin with `output`. `options` are `LLM`'s.
    """

    def __init__(
        self,
        model: str,
        *,
        prompt: str | None = None,
        key: str | None = None,
        sampling: Mapping[str, Any] | None = None,
        output: str = "answer",
        **options: Any,
    ) -> None:
        self.prompt, self.key, self.output = prompt, key, output
        self.model = os.fspath(model)
        defaults = {} if sampling is None else {"override_generation_config": dict(sampling)}
        self.options = dict(sorted((options | defaults).items()))

    @property
    def names(self) -> tuple[str, str, str]:
        """Columns of answers: the job's output line, its first text (None for rows without), its error (None)."""
        return self.output, f"{self.output}_text", f"{self.output}_error"

    @property
    def num_ranks(self) -> int:
        """Ranks of an engine: GPUs that it needs, or cores."""
        return (self.options.get("tensor_parallel_size") or 1) * (self.options.get("pipeline_parallel_size") or 1)

    @property
    def is_open(self) -> bool:
        """Whether this process has the engine."""
        return self._engine_name() in _engines

    def open(self) -> RowEngine:
        """This process's engine, started at the first call. Raises the errors of `LLM` and `RowEngine`."""
        name = self._engine_name()
        with _opening:
            if name not in _engines:
                with sampling_by_name():
                    _engines[name] = RowEngine(self.model, **self.options)
            return _engines[name]

    def close(self) -> None:
        """End this process's engine, also that of other objects with the same arguments. Idempotent."""
        with _opening:
            engine = _engines.pop(self._engine_name(), None)
        if engine is not None:
            engine.close()

    def _engine_name(self) -> tuple[int, str]:
        return os.getpid(), json.dumps([self.model, self.options], default=str)

    def answer(self, rows: Iterable[Mapping[str, Any]], first: int | None = None) -> dict[str, list[str | None]]:
        """Columns of answers to rows, in their order. `first`: rows without a key column are numbered from it. Raises
        ConfigError for columns that are missing or would be overwritten, or values that JSON lacks.
        """
        numbered = enumerate(rows)
        return self.columns_of([self.keyed(row, None if first is None else first + number) for number, row in numbered])

    def columns_of(self, rows: Iterable[KeyedRow]) -> dict[str, list[str | None]]:
        """Columns of answers to keyed rows."""
        given = list(rows)
        answers = [self.values_of(answer) for answer in self.open().answer(given)] if given else []
        return {name: [each[name] for each in answers] for name in self.names}

    def answer_table(self, table: Any) -> Any:
        """A pyarrow table with columns of answers."""
        import pyarrow

        rows = self._rows_of(table.column_names, table.num_rows, lambda place, name: array_values(name, table[place]))
        for name, values in self.answer(rows).items():
            table = table.append_column(name, pyarrow.array(values, pyarrow.string()))
        return table

    def answer_frame(self, frame: Any) -> Any:
        """A pandas frame with columns of answers, and with its index."""
        names = [str(name) for name in frame.columns]
        rows = self._rows_of(names, len(frame), lambda place, name: series_values(name, frame.iloc[:, place]))
        return frame.assign(**self.answer(rows))

    def _rows_of(
        self, names: Sequence[str], num_rows: int, values_of: Callable[[int, str], list[Any]]
    ) -> list[dict[str, Any]]:
        """Rows of a table. Values of columns without a meaning are not read: they may be of any type."""
        read = {name: place for place, name in enumerate(names) if self._reads(name)}
        for name, count in Counter(names).items():
            if count > 1 and name in read:
                raise ConfigError(f"{count} columns have the name {name!r}: rename them, or leave them out")
        rows = [dict.fromkeys(names) for _ in range(num_rows)]
        for name, place in read.items():
            for row, value in zip(rows, values_of(place, name), strict=True):
                row[name] = value
        return rows

    def _reads(self, name: str) -> bool:
        if name == (self.key or INDEX):
            return True
        return name in ROW_KEYS if self.prompt is None else name in (self.prompt, "custom_id")

    def answer_frames(self, frames: Iterable[Any]) -> Iterator[Any]:
        """pandas frames with columns of answers: a function for Spark's `mapInPandas`."""
        yield from map(self.answer_frame, frames)

    def values_of(self, answer: RowAnswer) -> dict[str, str | None]:
        """Columns of one answer."""
        record = json.loads(answer.line)
        error = record["error"]
        values = (
            answer.line.decode().rstrip("\n"),
            first_text(record),
            error and f"{error['code']}: {error['message']}",
        )
        return dict(zip(self.names, values, strict=True))

    def keyed(self, values: Mapping[str, Any], number: int | None = None) -> KeyedRow:
        """The row of a table's row, of number `number` if it has no key column."""
        for name in self.names:
            if name in values:
                raise ConfigError(f"the table has a column {name!r} already: name the answers' with output=")
        key = self.key or INDEX
        if self.key is not None and key not in values:
            raise ConfigError(f"key={self.key!r} is not a column: the table has {', '.join(values)}")
        unreadable = [value for value in values.values() if isinstance(value, Unreadable)]
        if unreadable:
            return KeyedRow(number, b"{}", unreadable[0].problem, "invalid_value")
        fields, index, problem = self._fields(values), number, ""
        if key in values:
            given = _plain(values[key], key)
            index = plain_int(given)
            if isinstance(given, str) and self.key is not None:
                fields["custom_id"] = given
            elif index is None or not 0 <= index <= _MAX_INDEX:
                way_out = "give a number from 0, below 2**63, or a text with key="
                index, problem = None, f"{key}={given!r} is not a row's key: {way_out}"
        return KeyedRow(index, json.dumps(fields, ensure_ascii=False).encode("utf-8", "surrogatepass"), problem)

    def _fields(self, values: Mapping[str, Any]) -> dict[str, Any]:
        if self.prompt is None:
            if not any(name in values for name in ROW_KEYS):
                raise ConfigError(
                    f"the table has no column of a row's keys, such as 'prompt' or 'messages', but "
                    f"{', '.join(values)}: name the column of prompts with prompt="
                )
            found = {name: values[name] for name in ROW_KEYS if values.get(name) is not None}
        elif self.prompt not in values:
            raise ConfigError(f"prompt={self.prompt!r} is not a column: the table has {', '.join(values)}")
        else:
            # Of no media column, whatever its name.
            given = _plain(values[self.prompt], self.prompt, "prompt")
            first = given[0] if isinstance(given, list) and given else None
            name = "messages" if isinstance(first, dict) else "prompt_token_ids" if isinstance(first, int) else "prompt"
            found = {name: given, "custom_id": values.get("custom_id")}
        return {name: _plain(value, name) for name, value in found.items() if value is not None}

    def __getstate__(self) -> dict[str, Any]:
        return dict(sorted(vars(self).items()))


def has_engine() -> bool:
    """True if this process has an engine, of any arguments."""
    return any(process == os.getpid() for process, _ in list(_engines))


@contextmanager
def sampling_by_name() -> Iterator[None]:
    """Errors of `LLM` about defaults of sampling have the name of the argument that gave them."""
    try:
        yield
    except ConfigError as error:
        error.args = (str(error).replace("override_generation_config", "sampling"),)
        raise


def first_text(record: Mapping[str, Any]) -> str | None:
    """Text of the first sample in an output line; None for an error row, and for vectors and scores."""
    response = record.get("response")
    body = record if response is None else response["body"]
    if isinstance(body, str):
        return body
    choices = body.get("outputs") or body.get("choices") or [body]
    text = choices[0].get("text", (choices[0].get("message") or {}).get("content"))
    return text if isinstance(text, str) else None


def array_values(name: str, column: Any) -> list[Any]:
    """Values of a column of pyarrow; those that Python cannot have are `Unreadable`."""
    try:
        return list(column.to_pylist())
    except (UnicodeDecodeError, ValueError, OverflowError):
        return [_array_value(name, value) for value in column]


def _array_value(name: str, value: Any) -> Any:
    try:
        return value.as_py()
    except (UnicodeDecodeError, ValueError, OverflowError) as error:
        return Unreadable(f"column {name!r} has a value that cannot be read ({error})")


def series_values(name: str, series: Any) -> list[Any]:
    """Values of a column of pandas, without its missing ones, as a file of pyarrow would have them. Where values have
    different types, which pyarrow lacks, those that JSON lacks are `Unreadable`.
    """
    import pyarrow

    try:
        return array_values(name, pyarrow.array(series, from_pandas=True))
    except (pyarrow.ArrowException, ValueError, TypeError, OverflowError):
        given = zip(series.isna().tolist(), series.astype(object).tolist(), strict=True)
        return [None if is_missing else _object_value(name, value) for is_missing, value in given]


def _object_value(name: str, value: Any) -> Any:
    try:
        return _plain(value, name)
    except ConfigError as error:
        return Unreadable(str(error))


def _plain(value: Any, name: str, path: str | None = None) -> Any:
    """Value of a line of JSON, as a job reads it from Parquet: without null members, bytes of media as data URLs,
    floats that are integers as such. Arrays become lists, a map of texts an object. `name` is the column's, `path` its
    place in a row. Raises ConfigError for other types.
    """
    path = name if path is None else path
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return int(value) if value.is_integer() and abs(value) <= _MAX_EXACT_INTEGER else value
    if isinstance(value, bytes) and MEDIA_COLUMNS.fullmatch(path):
        return f"data:application/octet-stream;base64,{base64.b64encode(value).decode('ascii')}"
    if isinstance(value, Mapping):
        return {key: _plain(item, name, f"{path}.{key}") for key, item in value.items() if item is not None}
    if isinstance(value, list | tuple):
        if value and all(isinstance(each, tuple) and len(each) == 2 and isinstance(each[0], str) for each in value):
            # A map of pyarrow, Spark's type of a dict.
            return _plain(dict(value), name, path)
        return [_plain(item, name, f"{path}[]") for item in value]
    if hasattr(value, "tolist") and not isinstance(value, bytes):
        return _plain(value.tolist(), name, path)
    lacks = "which only images and audio may have" if isinstance(value, bytes) else "which JSON lacks"
    raise ConfigError(
        f"column {name!r} has values of type {type(value).__name__}, {lacks}: cast it to text, numbers, lists or "
        f"structs, or leave it out"
    )
