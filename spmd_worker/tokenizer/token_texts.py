"""Texts and bytes of single tokens in the text of their sequence, for log-probabilities.

A token may be part of a character. The bytes are its own; the text is what the token adds to the text before it, so
that the last token of a character has the complete character and the earlier ones have "" (as vLLM corrects them). The
texts of a sequence, concatenated, are its text, and a token's offset is the length of those before it.

    token    <0xF0>  <0x9F>  <0x98>  <0x80>  ▁b
    text     ""      ""      ""      "😀"    " b"
    bytes    F0      9F      98      80      20 62

For a run of fallback bytes that is invalid UTF-8 the library makes one U+FFFD a byte, also for the valid ones in it,
and for others as UTF-8 decoders do. A token's text begins with those that it completes.
"""

import codecs
from collections.abc import Sequence
from typing import Final, NamedTuple

from spmd_worker.tokenizer.tokenizer import Tokenizer

_REPLACEMENT: Final = "\ufffd"
_NUM_CONTEXT_BYTES: Final = 8
"""Tokens of a prompt that may be part of its last character, and those that show where one begins."""
_MAX_BYTE_RUN: Final = 64


class TokenText(NamedTuple):
    """`text` is "" for part of a character; a skipped special token has its name, and no bytes."""

    text: str
    own_bytes: bytes


class TokenTexts:
    """Token texts of one sequence after `prompt_token_ids`. An alternative has the text that it would add instead."""

    __slots__ = ("_is_at_start", "_lead", "_num_given", "_pending", "_run", "_skips_special", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], skip_special_tokens: bool) -> None:
        self._tokenizer, self._skips_special = tokenizer, skip_special_tokens
        self._is_at_start = True
        self._pending = b""  # bytes of an unfinished character, of byte-level tokens
        self._lead = ""  # text not returned yet
        self._run = b""  # fallback bytes at the end so far
        self._num_given = 0  # characters of the run that were returned
        self._read_prompt(prompt_token_ids)

    def decode(self, positions: Sequence[Sequence[int]], *, is_last: bool) -> list[list[TokenText]]:
        """Texts of each position's token and of its alternatives. `is_last`: nothing follows the positions."""
        rests = self._rests(positions, is_last)
        return [self._decode(ids, *rest) for ids, rest in zip(positions, rests, strict=True)]

    def _decode(self, ids: Sequence[int], rest: bytes, ends: bool) -> list[TokenText]:
        before, others = self._state, []
        for token_id in ids[1:]:
            # The following bytes are known for the sampled token only.
            others.append(self._next(token_id, b"", False))
            self._state = before
        return [self._next(ids[0], rest, ends), *others]

    @property
    def _state(self) -> tuple[bool, bytes, str, bytes, int]:
        return self._is_at_start, self._pending, self._lead, self._run, self._num_given

    @_state.setter
    def _state(self, state: tuple[bool, bytes, str, bytes, int]) -> None:
        self._is_at_start, self._pending, self._lead, self._run, self._num_given = state

    def _next(self, token_id: int, rest: bytes, ends: bool) -> TokenText:
        tokenizer = self._tokenizer
        name = tokenizer.token_text(token_id)
        if not tokenizer.is_visible(token_id, self._skips_special):
            return TokenText(name, b"")
        if (fallback := tokenizer.fallback_byte(token_id)) is not None:
            return self._next_fallback(fallback, rest, ends)
        lead = self._lead + _REPLACEMENT * self._num_missing()
        self._lead, self._run, self._num_given = "", b"", 0
        own = tokenizer.level_bytes(token_id)
        if own is not None:
            text, self._pending = _decoded(self._pending + own)
            self._is_at_start = False
            return TokenText(lead + text, own)
        if self._is_at_start:
            name = tokenizer.decode([token_id], skip_special_tokens=False)
            self._is_at_start = False
        return TokenText(lead + name, name.encode("utf-8", "surrogatepass"))

    def _next_fallback(self, own: bytes, rest: bytes, ends: bool) -> TokenText:
        self._is_at_start = False
        lead, self._lead = self._lead, ""
        self._run += own
        following, tail = _decoded(self._run + rest)
        if _REPLACEMENT in following or (ends and tail):
            text = _REPLACEMENT * max(len(self._run) - self._num_given, 0)
        else:
            text = _decoded(self._run)[0][self._num_given :]
        self._num_given += len(text)
        return TokenText(lead + text, own)

    def _num_missing(self) -> int:
        """Number of characters of the run that were not returned and, now that it has ended, are invalid."""
        text, tail = _decoded(self._run)
        return max(len(self._run) - self._num_given, 0) if tail or _REPLACEMENT in text else 0

    def _rests(self, positions: Sequence[Sequence[int]], is_last: bool) -> list[tuple[bytes, bool]]:
        """Fallback bytes that follow each position, and whether they are known to end there."""
        found: list[tuple[bytes, bool]] = []
        rest, ends = b"", is_last
        for ids in reversed(positions):
            found.append((rest, ends))
            if (fallback := self._tokenizer.fallback_byte(ids[0])) is not None:
                rest = (fallback + rest)[:_MAX_BYTE_RUN]
            elif self._tokenizer.is_visible(ids[0], self._skips_special):
                rest, ends = b"", True
        found.reverse()
        return found

    def _read_prompt(self, token_ids: Sequence[int]) -> None:
        """Read the end of the prompt: an unfinished character belongs to the tokens after it."""
        visible: list[int] = []
        for token_id in reversed(token_ids):
            if len(visible) >= _NUM_CONTEXT_BYTES and self._tokenizer.fallback_byte(visible[-1]) is None:
                break
            if self._tokenizer.is_visible(token_id, self._skips_special) and len(visible) < _MAX_BYTE_RUN:
                visible.append(token_id)
        visible.reverse()
        content, self._run = b"", b""
        for token_id in visible:
            if (fallback := self._tokenizer.fallback_byte(token_id)) is not None:
                self._run += fallback
                continue
            self._run = b""
            content += self._tokenizer.level_bytes(token_id) or b""
        text, self._pending = _decoded(content)
        if text.endswith(_REPLACEMENT) and not self._pending and not self._run:
            self._lead = _REPLACEMENT
        run, tail = _decoded(self._run)
        self._num_given = 0 if tail or _REPLACEMENT in run else len(run)
        self._is_at_start = not visible


def _decoded(content: bytes) -> tuple[str, bytes]:
    """The text of UTF-8, and the bytes at its end that are the beginning of a character."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    text = decoder.decode(content)
    return text, decoder.getstate()[0]
