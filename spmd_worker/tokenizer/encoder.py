"""Encodes texts with the tokenizers library: in this process, or in the one of `encoder_process.py`."""

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import tokenizers

from spmd_worker.base.errors import TokenizerError

_PARALLELISM: Final = "TOKENIZERS_PARALLELISM"
"""The library's variable: `false` keeps it from starting threads."""
_LONG_TEXT: Final = 10_000
"""Characters: shorter texts take less time than another thread would notice."""
_MAX_EXPLAINED: Final = 300


class Encoder:
    """Encodes in this process. All methods raise ValueError for a text that cannot be encoded."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        with library_errors("the text cannot be encoded"):
            if _releases_gil(text):
                return list(self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids)
            return list(self._backend.encode(text, add_special_tokens=add_special_tokens).ids)

    def encode_inside(
        self, first: str, second: str | None, max_tokens: int | None, truncation_side: str
    ) -> tuple[list[int], int | None]:
        encoding = self._inside(first, second, max_tokens, truncation_side)
        types = list(encoding.type_ids)
        num_first = types.index(1) if 1 in types else len(types)
        is_ordered = all(each == int(index >= num_first) for index, each in enumerate(types))
        return list(encoding.ids), num_first if is_ordered else None

    def encode_with_offsets(
        self, text: str, max_tokens: int | None, truncation_side: str
    ) -> tuple[list[int], list[tuple[int, int]]]:
        encoding = self._inside(text, None, max_tokens, truncation_side)
        return list(encoding.ids), list(encoding.offsets)

    def _inside(
        self, first: str, second: str | None, max_tokens: int | None, truncation_side: str
    ) -> tokenizers.Encoding:
        with library_errors("the text cannot be encoded"):
            encodings = [self._pieces(text) for text in ([first] if second is None else [first, second])]
            num_special = int(self._backend.num_special_tokens_to_add(second is not None))
        if max_tokens is not None:
            if max_tokens <= num_special:
                raise ValueError(f"{max_tokens} tokens leave none for text: {num_special} are special tokens")
            lengths = _truncated_lengths([len(encoding.ids) for encoding in encodings], max_tokens - num_special)
            for encoding, length in zip(encodings, lengths):
                encoding.truncate(length, direction=truncation_side)
        with library_errors("the text cannot be encoded"):
            return self._backend.post_process(encodings[0], encodings[1] if second is not None else None)

    def _pieces(self, text: str) -> tokenizers.Encoding:
        if _releases_gil(text):
            return self._backend.encode_batch([text], add_special_tokens=False)[0]
        return self._backend.encode(text, add_special_tokens=False)


def _releases_gil(text: str) -> bool:
    """Whether to use the library's batch call, which lets other threads run, though it starts threads by default."""
    return len(text) > _LONG_TEXT and os.environ.get(_PARALLELISM) == "false"


def opened(text: str, added: Sequence[Mapping[str, Any]]) -> tokenizers.Tokenizer:
    """The library's tokenizer, without truncation, padding and randomness. Raises TokenizerError."""
    with library_errors("the tokenizers library cannot read it"):
        backend = tokenizers.Tokenizer.from_str(text)
        backend.no_truncation()
        backend.no_padding()
        switch_off_sampling(backend)
        backend.add_tokens([tokenizers.AddedToken(**token) for token in added])
        return backend


def is_failure(error: BaseException) -> bool:
    """Whether the error is the library's."""
    return isinstance(error, Exception) or is_panic(error)


def is_panic(error: BaseException) -> bool:
    """Whether a library written in Rust panicked. Its exception derives from BaseException and cannot be imported."""
    return type(error).__name__ == "PanicException"


def switch_off_sampling(backend: tokenizers.Tokenizer) -> None:
    """Switch off BPE's dropout and Unigram's sampling: they make each encoding of a text random."""
    for name in ("dropout", "alpha", "nbest_size"):
        if getattr(backend.model, name, None) is not None:
            setattr(backend.model, name, None)


@contextlib.contextmanager
def library_errors(message: str) -> Iterator[None]:
    """Convert the library's errors to TokenizerError."""
    try:
        yield
    except BaseException as error:
        if not is_failure(error):
            raise
        why = " ".join(str(error).split())[:_MAX_EXPLAINED]
        raise TokenizerError(f"{message}: {why or type(error).__name__}") from None


def _truncated_lengths(lengths: list[int], most: int) -> list[int]:
    """Lengths of texts truncated to `most` tokens in total, the longest first, as the library does."""
    if len(lengths) == 1:
        return [min(lengths[0], most)]
    shorter, longer = sorted(lengths)
    if shorter + longer <= most:
        return lengths
    longer = shorter if shorter > most else max(shorter, most - shorter)
    if shorter + longer > most:
        shorter, longer = most // 2, most - most // 2
    return [longer, shorter] if lengths[0] > lengths[1] else [shorter, longer]
