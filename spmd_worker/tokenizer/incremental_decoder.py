"""Decodes a sequence's tokens into text as they appear."""

from collections.abc import Iterable, Sequence
from typing import Final

from spmd_worker.tokenizer.tokenizer import Tokenizer

_REPLACEMENT: Final = "\ufffd"

_NUM_CONTEXT_TOKENS: Final = 8
"""Tokens decoded before new ones. Six suffice: three bytes to synchronise with UTF-8, three of an open character."""

_MAX_HELD_TOKENS: Final = 16
"""Maximum number of tokens without a complete character: then the bytes are invalid, and the window moves on."""

_MAX_BYTE_RUN: Final = 64
_MAX_RUN_SHOWN: Final = 256
"""Tokens: a run is decoded again for each of its bytes."""


class IncrementalDecoder:
    """Decodes one sequence as its tokens appear, and never returns part of a character.

    The results of `append` and `flush`, concatenated, are the text of `decode(context + output)` after that of the
    context, where the context is the end of the prompt. An unfinished character at the end of the prompt belongs to the
    output. With `skip_special_tokens` special tokens leave no trace, as in `decode`, except those of `kept_ids`.

    A window of a few tokens is decoded each time: its beginning gives the context that leading spaces and cleaning-up
    depend on (the idea of text-generation-inference and vLLM). Two kinds of text are held back: a last character that
    is U+FFFD, which more bytes may complete, and an entire run of fallback bytes (SentencePiece), because one invalid
    byte at its end changes how all of it decodes. Work per token is constant over a sequence.
    """

    __slots__ = (
        *("_is_flushed", "_kept_ids", "_num_characters_given", "_num_tokens_read", "_skips_special", "_tokenizer"),
        "_window",
    )

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int],
        skip_special_tokens: bool = True,
        kept_ids: Sequence[int] = (),
    ) -> None:
        self._tokenizer = tokenizer
        self._skips_special, self._kept_ids = skip_special_tokens, kept_ids
        self._window = _prompt_context(tokenizer, prompt_token_ids, skip_special_tokens)
        self._num_tokens_read = len(self._window)
        self._num_characters_given = _prompt_length(tokenizer, self._window)
        self._is_flushed = False

    def append(self, token_ids: Iterable[int]) -> str:
        """The text that the new tokens make certain, often "" and sometimes of earlier tokens."""
        assert not self._is_flushed
        visible = self._visible(token_ids)
        pieces = []
        # Token by token, so that the text does not depend on how tokens are grouped into calls.
        for token_id in visible:
            self._window.append(token_id)
            if self._tokenizer.fallback_byte(token_id) is None:
                pieces.append(self._release())
        return "".join(pieces)

    def held(self) -> str:
        """The held-back text as it decodes now; "" while that is invalid, or longer than any stop string."""
        num_held = len(self._window) - self._num_tokens_read
        if not 0 < num_held <= _MAX_RUN_SHOWN:
            return ""
        text = self._decode(self._window)[self._num_characters_given :]
        return "" if _REPLACEMENT in text else text

    def flush(self) -> str:
        """The rest of the text, once, when no more tokens come: held-back tokens as they decode."""
        assert not self._is_flushed
        self._is_flushed = True
        return self._decode(self._window)[self._num_characters_given :]

    def finish(self, token_ids: Iterable[int]) -> str:
        """`append` and `flush` in one, for a complete sequence: decodes once."""
        assert not self._is_flushed
        self._window += self._visible(token_ids)
        return self.flush()

    def _visible(self, token_ids: Iterable[int]) -> list[int]:
        tokenizer, kept = self._tokenizer, self._kept_ids
        return [i for i in token_ids if i in kept or tokenizer.is_visible(i, self._skips_special)]

    def _release(self) -> str:
        text = self._decode(self._window)
        num_certain = len(text) - text.endswith(_REPLACEMENT)
        new_text = text[self._num_characters_given : num_certain]
        self._num_characters_given = max(self._num_characters_given, num_certain)
        num_held = len(text) - num_certain
        if num_held == 0 or len(self._window) - self._num_tokens_read > _MAX_HELD_TOKENS:
            self._move_window(num_held)
        return new_text

    def _move_window(self, num_held: int) -> None:
        self._window = self._window[-_NUM_CONTEXT_TOKENS:]
        self._num_tokens_read = len(self._window)
        self._num_characters_given = len(self._decode(self._window)) - num_held

    def _decode(self, token_ids: Sequence[int]) -> str:
        # Invisible tokens are removed already; the remaining special ones are wanted.
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)


def _prompt_context(tokenizer: Tokenizer, token_ids: Sequence[int], skip_special_tokens: bool) -> list[int]:
    """The last visible tokens of a prompt, from an index where no run of fallback bytes is cut."""
    context: list[int] = []
    for token_id in reversed(token_ids):
        is_enough = len(context) >= _NUM_CONTEXT_TOKENS
        if is_enough and (len(context) > _MAX_BYTE_RUN or tokenizer.fallback_byte(context[-1]) is None):
            break
        if tokenizer.is_visible(token_id, skip_special_tokens):
            context.append(token_id)
    context.reverse()
    return context


def num_unfinished(tokenizer: Tokenizer, prompt_token_ids: Sequence[int], skip_special_tokens: bool) -> int:
    """Number of characters at the end of a prompt's text that are of an unfinished one, which belongs to the output."""
    context = _prompt_context(tokenizer, prompt_token_ids, skip_special_tokens)
    return len(tokenizer.decode(context, skip_special_tokens=False)) - _prompt_length(tokenizer, context)


def _prompt_length(tokenizer: Tokenizer, context: Sequence[int]) -> int:
    """Number of characters of the context that belong to the prompt: all but an unfinished one at the end."""
    text = tokenizer.decode(context, skip_special_tokens=False)
    if not text.endswith(_REPLACEMENT):
        return len(text)
    num_bytes = 0
    while num_bytes < len(context) and tokenizer.fallback_byte(context[-1 - num_bytes]) is not None:
        num_bytes += 1
    return len(text) - max(num_bytes, 1)
