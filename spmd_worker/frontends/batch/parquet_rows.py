"""Lines of an output as rows of a Parquet file: columns for what most readers want, and the complete line."""

import base64
import json
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from spmd_worker.frontends.openai.decimals import read_decimals


class VectorColumns(NamedTuple):
    """Columns with vectors, float32. `name` and `size` are those of a vector for each row, a list of fixed size; 0 for
    none. `token_size` is the length of the vectors for each token of a row, a list of such lists; 0 for none.
    """

    name: str
    size: int
    token_size: int = 0

    @property
    def token_name(self) -> str:
        """Name of the column of the tokens' vectors."""
        return "token_embeddings" if self.name == "embedding" else self.name


def parquet_row(index: int, line: bytes, vectors: VectorColumns | None = None) -> dict[str, Any]:
    """Columns of an output line of either format; `json` is the complete line."""
    numbers, rest = _cut_vector(line, vectors)
    answer = json.loads(rest)
    body = answer["response"]["body"] if answer.get("response") else answer
    usage = body.get("usage") or {}
    row = {
        "index": index,
        "custom_id": answer["custom_id"],
        "outputs": [_parquet_output(each) for each in body.get("outputs") or body.get("choices") or ()],
        "prompt_tokens": usage.get("prompt_tokens"),
        "completion_tokens": usage.get("completion_tokens"),
        "error": answer["error"],
    }
    found = {} if vectors is None else _vectors(body, vectors, numbers)
    # A lone surrogate, which JSON can escape and UTF-8 cannot encode, is replaced everywhere except in `json`.
    return {**_encodable(row), "json": line.decode("utf-8").rstrip("\n"), **found}


def _cut_vector(line: bytes, vectors: VectorColumns | None) -> tuple[NDArray[np.float32] | None, bytes]:
    """The numbers of a line with one vector of the column's length, and the line without them: a JSON parser would
    spend most of its time on them. None and the unchanged line for other lines.
    """
    # A quote inside a text follows a backslash, so this is a key.
    key = b"" if vectors is None else f'"{vectors.name}": ['.encode()
    if vectors is None or not vectors.size or line.count(key) != 1:
        return None, line
    start = line.index(key) + len(key)
    end = line.index(b"]", start)
    numbers = read_decimals(line[start:end], vectors.size)
    return (None, line) if numbers is None else (numbers, line[:start] + line[end:])


def _vectors(body: dict[str, Any], columns: VectorColumns, numbers: NDArray[np.float32] | None) -> dict[str, Any]:
    """Columns of a row's vector, which may be known as `numbers`, and of its tokens' vectors; None for other rows."""
    value = numbers if numbers is not None else _numbers(body, columns)
    if isinstance(value, str):
        value = _decoded(value, columns)
    is_of_tokens = isinstance(value, list) and value != [] and isinstance(value[0], list)
    row = {}
    if columns.size:
        is_right = value is not None and not is_of_tokens and len(value) == columns.size
        row[columns.name] = value if is_right else None
    if columns.token_size:
        is_right = is_of_tokens and all(len(each) == columns.token_size for each in value)
        row[columns.token_name] = value if is_right else None
    return row


def _numbers(body: dict[str, Any], columns: VectorColumns) -> Any:
    """The numbers of a row of one text; None for others."""
    data, given, names = body.get("data") or [], body, [columns.name, columns.token_name]
    if len(data) == 1:
        # Numbers have vLLM's names in bodies of /classify and /pooling.
        given, names = data[0], [*names, "probs", "data"]
    return next((given[each] for each in names if each in given), None)


def _decoded(value: str, columns: VectorColumns) -> list[Any]:
    """Numbers of base64: a vector if they have its length, else those of tokens, or of late chunks."""
    numbers = np.frombuffer(base64.b64decode(value), "<f4")
    size = columns.token_size
    is_of_tokens = size and len(numbers) not in (0, columns.size) and len(numbers) % size == 0
    found: list[Any] = (numbers.reshape(-1, size) if is_of_tokens else numbers).tolist()
    return found


def _parquet_output(output: dict[str, Any]) -> dict[str, Any]:
    stop_reason = output["stop_reason"]
    return {
        "index": output["index"],
        "text": output["message"]["content"] if "message" in output else output["text"],
        "token_ids": output.get("token_ids"),
        "finish_reason": output["finish_reason"],
        "stop_reason": None if stop_reason is None else str(stop_reason),
    }


def _encodable(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode("utf-8")
    if isinstance(value, dict):
        return {key: _encodable(item) for key, item in value.items()}
    return [_encodable(item) for item in value] if isinstance(value, list) else value
