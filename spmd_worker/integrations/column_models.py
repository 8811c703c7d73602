"""Models of a column of texts, for tools that give a text and nothing more: chats, and vectors.

A chat's random stream has the name of its content, as a server's.
"""

import json
import logging
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from spmd_worker.frontends.serve.request_reader import content_name
from spmd_worker.integrations.pipeline_rows import PipelineRows
from spmd_worker.integrations.row_engine import KeyedRow
from spmd_worker.integrations.row_queue import RowQueue

logger = logging.getLogger(__name__)

_URL: Final = "/v1/chat/completions"


@dataclass
class ColumnModel:
    """`options` are `LLM`'s, `row` has the keys of all rows. A row with an error raises ValueError, or is null."""

    model: str
    options: dict[str, Any] = field(default_factory=dict)
    row: dict[str, Any] = field(default_factory=dict)
    raises: bool = True

    def open(self) -> PipelineRows:
        """This process's engine, started."""
        rows = PipelineRows(self.model, **self.options)
        rows.open()
        return rows

    def failed(self, error: str) -> None:
        """Raise, or log, a row's error."""
        if self.raises:
            raise ValueError(error)
        logger.warning("a row has no answer: %s", error)


class Prompts:
    """Chats of any number of coroutines in one engine. `return_format` is a class of pydantic."""

    def __init__(self, model: ColumnModel, system_message: str | None = None, return_format: Any = None) -> None:
        self._model, self._rows = model, model.open()
        self._system = [] if system_message is None else [{"role": "system", "content": system_message}]
        self._return_format = return_format
        self._queue = RowQueue(self._rows.open())

    async def prompt(self, messages: tuple[Any, ...]) -> Any:
        """The answer's text, or object of the return format, to texts of one user."""
        if not all(isinstance(message, str) for message in messages):
            return self._model.failed(f"messages are {', '.join(type(each).__name__ for each in messages)}: give text")
        body = {"messages": [*self._system, {"role": "user", "content": "\n".join(messages)}], **self._model.row}
        line = {"custom_id": content_name(_URL, body), "method": "POST", "url": _URL, "body": body}
        answer = await self._queue.answer(KeyedRow(None, json.dumps(line).encode()))
        _, text, error = self._rows.values_of(answer).values()
        if error is not None:
            return self._model.failed(error)
        try:
            return text if self._return_format is None else self._return_format.model_validate_json(text)
        except ValueError as invalid:
            return self._model.failed(
                f"the answer is not of the return format, such as one cut by max_tokens: {invalid}"
            )


class Embedder:
    """Vectors of lists of texts."""

    def __init__(self, model: ColumnModel) -> None:
        self._model, self._engine = model, model.open().open()

    def embed_text(self, text: list[str]) -> list[NDArray[np.float32] | None]:
        """A vector for each text, None for one with an error."""
        lines = [json.dumps({"embed": each, **self._model.row}).encode() for each in text]
        answers = self._engine.answer([KeyedRow(None, line) for line in lines])
        return [self._vector(json.loads(each.line)) for each in answers]

    def _vector(self, record: dict[str, Any]) -> NDArray[np.float32] | None:
        if record["error"] is not None:
            self._model.failed(f"{record['error']['code']}: {record['error']['message']}")
            return None
        return np.array(record["embedding"], dtype=np.float32)
