"""Formats output rows and writes them in input order to a file that appears only when it is complete.

Knows the two output shapes and files. Knows nothing about engines or the journal of a run.
"""

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Final

from spmd_worker.batch.openai_body import (
    JsonObject,
    chat_body,
    completion_body,
    logprob_records,
    prompt_logprob_records,
    usage,
)
from spmd_worker.batch.row import EncodedRow, RowError, shape_of
from spmd_worker.sequence.outputs import CompletionOutput, RequestOutput

_LINE_BREAKS: Final = {ord(character): f"\\u{ord(character):04x}" for character in "\x85\u2028\u2029"}
"""Characters at which some readers end a line; JSON allows them in strings, JSONL is better without."""


def format_result(row: EncodedRow, output: RequestOutput, model_name: str = "") -> bytes:
    """The output line, with its line end, of a row that ran. `model_name` is named when the row's body names none."""
    if output.error is not None:
        shape = shape_of(row.kind)
        return format_error(RowError(row.index, row.custom_id, shape, "request_refused", output.error))
    if row.kind == "plain":
        return _line(_plain_result(row, output))
    build = completion_body if row.kind == "completion" else chat_body
    response = {"status_code": 200, "request_id": f"req-{row.index}", "body": build(row, output, model_name)}
    return _line({"id": f"batch-{row.index}", "custom_id": row.custom_id, "response": response, "error": None})


def format_error(row: RowError) -> bytes:
    """The output line, with its line end, of a row that did not run: an error and no outputs."""
    error = {"code": row.code, "message": row.message}
    if row.shape == "plain":
        return _line({"custom_id": row.custom_id, "index": row.index, "error": error})
    return _line({"id": f"batch-{row.index}", "custom_id": row.custom_id, "response": None, "error": error})


def _plain_result(row: EncodedRow, output: RequestOutput) -> JsonObject:
    result: JsonObject = {
        "custom_id": row.custom_id,
        "index": row.index,
        "outputs": [_plain_output(completion) for completion in output.outputs],
        "usage": usage(output),
        "error": None,
    }
    if output.prompt_logprobs is not None:
        result["prompt_logprobs"] = prompt_logprob_records(output)
    return result


def _plain_output(completion: CompletionOutput) -> JsonObject:
    record: JsonObject = {
        "index": completion.index,
        "text": completion.text,
        "token_ids": list(completion.token_ids),
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
    }
    if completion.logprobs is not None:
        record["logprobs"] = [logprob_records(position) for position in completion.logprobs]
    return record


def _line(record: Any) -> bytes:
    """UTF-8 as it is, for people; half of a surrogate pair has no UTF-8, and makes its line all escapes."""
    text = json.dumps(record, ensure_ascii=False, allow_nan=False).translate(_LINE_BREAKS)
    try:
        return text.encode("utf-8") + b"\n"
    except UnicodeEncodeError:
        return json.dumps(record, allow_nan=False).encode("ascii") + b"\n"


@dataclass(slots=True)
class OrderedWriter:
    """Takes lines in any order, writes them in order of their index, and names the file when it is complete.

    Lines go to `<name>.partial` beside the output, which `close` renames. Lines that wait for an earlier one are held
    in memory: how far rows may run ahead is the caller's to bound (`num_waiting`). As a context manager it closes on
    success and, on an exception, leaves neither output nor partial file.
    """

    path: Path
    _stream: BinaryIO
    next_index: int = 0
    _waiting: dict[int, bytes] = field(default_factory=dict)

    @staticmethod
    def open(path: Path) -> "OrderedWriter":
        """Begin the file. Raises OSError where it cannot be created, and FileExistsError for what is not a file."""
        path = Path(path)
        if path.exists() and not path.is_file():
            raise FileExistsError(f"{path} exists and is not a regular file: choose another output")
        return OrderedWriter(path, open(_partial(path), "wb"))

    @property
    def num_waiting(self) -> int:
        """Lines that wait for an earlier one."""
        return len(self._waiting)

    def write(self, index: int, line: bytes) -> None:
        """Take the line of row `index`; every index from 0 comes exactly once."""
        assert index >= self.next_index, (index, self.next_index)
        assert index not in self._waiting, index
        assert line.find(b"\n") == len(line) - 1, line[:100]
        self._waiting[index] = line
        while self.next_index in self._waiting:
            self._stream.write(self._waiting.pop(self.next_index))
            self.next_index += 1

    def close(self) -> None:
        """Make the file durable and give it its name. No line may be missing."""
        assert not self._waiting, f"row {self.next_index} is missing, {len(self._waiting)} later ones wait"
        self._stream.flush()
        os.fsync(self._stream.fileno())
        self._stream.close()
        os.replace(_partial(self.path), self.path)
        _sync_folder(self.path.parent)

    def discard(self) -> None:
        """Remove what was written; a file that had the output's name before stays as it was."""
        self._stream.close()
        _partial(self.path).unlink(missing_ok=True)

    def __enter__(self) -> "OrderedWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.discard()


def _partial(path: Path) -> Path:
    return path.with_name(path.name + ".partial")


def _sync_folder(folder: Path) -> None:
    """A rename is durable once the folder is."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
