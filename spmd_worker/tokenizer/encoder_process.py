"""Encodes in a process with limits (`bounded_process.py`) for a tokenizer with unknown components, whose regular
expressions may never end and whose normalizers may let a text grow without bound: then that text fails.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from spmd_worker.base.errors import TokenizerError
from spmd_worker.tokenizer.bounded_process import BoundedProcess, BoundedProcessError, pack, serve
from spmd_worker.tokenizer.encoder import Encoder, opened

CPU_S: Final = 5
MEMORY_BYTES: Final = 512 * 1024 * 1024
_MEMORY_PER_BYTE: Final = 16


class IsolatedEncoder:
    """`text` is a tokenizer.json, `added` the tokens that are added to it, as `AddedToken`'s arguments."""

    def __init__(self, text: str, added: Sequence[Mapping[str, Any]]) -> None:
        memory_bytes = MEMORY_BYTES + _MEMORY_PER_BYTE * len(text)
        start = {"tokenizer": text, "added": list(added)}
        self._process = BoundedProcess(__name__, start, CPU_S, memory_bytes)

    def check(self) -> None:
        """Open the tokenizer. Raises TokenizerError."""
        try:
            self._process.ask(pack({"text": "", "add_special_tokens": False}))
        except BoundedProcessError as error:
            raise TokenizerError(str(error)) from None

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return list(self._ask({"text": text, "add_special_tokens": add_special_tokens})["ids"])

    def encode_inside(
        self, first: str, second: str | None, max_tokens: int | None, truncation_side: str
    ) -> tuple[list[int], int | None]:
        answer = self._ask(
            {"first": first, "second": second, "max_tokens": max_tokens, "truncation_side": truncation_side}
        )
        return list(answer["ids"]), answer["num_first"]

    def encode_with_offsets(
        self, text: str, max_tokens: int | None, truncation_side: str
    ) -> tuple[list[int], list[tuple[int, int]]]:
        answer = self._ask({"located": text, "max_tokens": max_tokens, "truncation_side": truncation_side})
        return list(answer["ids"]), [(start, end) for start, end in answer["offsets"]]

    def _ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        try:
            return self._process.ask(pack(request))
        except BoundedProcessError as error:
            raise TokenizerError(f"the text cannot be encoded: {error}") from None


def _open(start: Mapping[str, Any]) -> Callable[[Mapping[str, Any]], Mapping[str, Any]]:
    try:
        encoder = Encoder(opened(start["tokenizer"], start["added"]))
    except TokenizerError as error:
        message = str(error)
        return lambda _: {"error": message}

    def answer(request: Mapping[str, Any]) -> Mapping[str, Any]:
        try:
            if "text" in request:
                return {"ids": encoder.encode(**request)}
            if "located" in request:
                text, *others = (request[key] for key in ("located", "max_tokens", "truncation_side"))
                ids, offsets = encoder.encode_with_offsets(text, *others)
                return {"ids": ids, "offsets": offsets}
            ids, num_first = encoder.encode_inside(**request)
            return {"ids": ids, "num_first": num_first}
        except ValueError as error:
            return {"error": str(error).removeprefix("the text cannot be encoded: ")}

    return answer


if __name__ == "__main__":
    sys.exit(serve(_open))
