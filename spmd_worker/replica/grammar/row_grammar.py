"""Grammar state of one row: a function of the constraint and the row's own output tokens.

A row's state advances by the tokens that it has not consumed, wherever the row was meanwhile (waiting, preempted,
swapped), and a new state consumes them all, with the same result as the first.

Where only one text can follow, the tokens are those that the tokenizer gives for it, as far as they do not depend on
what comes after: these are forced, each by a mask that allows only it, and several may be appended at a time.
"""

import re
from collections import deque
from collections.abc import Callable, Sequence
from copy import copy
from itertools import islice, takewhile
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

BITS: Final = 32
"""Bits in a word of a mask: bit b of word w is token 32 w + b."""

MAX_FORCED_BYTES: Final = 4096
"""Maximum length of a forced text. The engine processes all of it at once (`a{1000000}`), up to the parser's limit of
items: after a longer one, a row no longer forces tokens.
"""

_MAX_FIRST_TOKENS: Final = 64
"""Maximum number of allowed tokens for which a forced text is computed."""

_NO_TOKEN: Final = "no token can follow"
_STOPS: Final = {
    "NoExtensionBias": "no text matches: a rule or $ref refers back to itself without end, or allows nothing",
    "NoExtension": _NO_TOKEN,
    **dict.fromkeys(("MaxTokensTotal", "MaxTokensParser"), "the grammar ends after a number of tokens"),
    "EndOfSentence": "the answer has ended",
    **dict.fromkeys(("LexerTooComplex", "ParserTooComplex"), "the grammar is too large for the limits of a row"),
    "InternalError": "the grammar engine failed",
    "Cancelled": "the grammar engine was stopped",
}
"""The engine's stop reasons, which for some grammars are its only message."""
_EMPTY: Final = re.compile(r"Regex is empty: .*", re.DOTALL)
_LOOKAROUND: Final = re.compile(r"lookarounds not supported yet; \w+ in regex")
_STOP: Final = re.compile(rf"\b(?:{'|'.join(_STOPS)})\b")
_SPECIAL: Final = b"\xff"
"""Marks a token without text in the engine's bytes."""


class RowGrammar:
    """`new_matcher` makes an `llguidance.LLMatcher` with a lexer of its own; it never raises, but enters an error state
    and remains there. Its argument is whether tokens will be forced, which bounds the work for that. `table` is its
    `LLTokenizer`; tokens from `vocab_size` on are not the model's.

    `eos_token_ids` are given if some of them have text: as text they are forbidden then, so that they only end the row.
    `can_force`: whether tokens are forced. Once false, it remains so.
    """

    def __init__(
        self,
        new_matcher: Callable[[bool], Any],
        table: Any,
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
        can_force: bool = True,
    ) -> None:
        self._new_matcher, self._table = new_matcher, table
        self._vocab_size, self._eos_token_ids = vocab_size, eos_token_ids
        self.can_force = can_force and bool(table.is_canonical)
        self._matcher = new_matcher(self.can_force)
        self._consumed: list[int] = []
        self._has_mask = False
        self._forced: deque[int] = deque()
        self.problem = ""
        """Reason why no token is allowed, in the engine's words; empty while one is. It is permanent."""

    def copied(self) -> "RowGrammar":
        """A copy that goes on by itself. What it builds counts against the limits of this row too."""
        other = copy(self)
        other._matcher, other._consumed = self._matcher.deep_copy(), list(self._consumed)
        other._forced = deque(self._forced)
        return other

    def advance(self, output_token_ids: Sequence[int]) -> None:
        """Advance to the row's output tokens; those consumed before are the first of them."""
        for token_id in output_token_ids[len(self._consumed) :]:
            if not self._has_mask and not self.problem:
                self._fill(np.zeros(-(-max(self._vocab_size, self._table.vocab_size) // BITS), dtype=np.int32))
            if self.problem:
                return
            self._consume(token_id)
            self._consumed.append(token_id)
            if self._forced and self._forced.popleft() != token_id:
                self._forced.clear()
            self._has_mask = bool(self._forced)

    def fill(self, bits: NDArray[np.int32]) -> None:
        """Write the allowed tokens, a bit each, into int32 [tokens / 32]; set `problem` if none is allowed."""
        if not self.problem and not self._forced:
            self._fill(bits)
        if self.problem or self._forced:
            bits[:] = 0
        if self._forced and not self.problem:
            _set(bits, self._forced[0], True)

    def forced(self, max_tokens: int) -> tuple[int, ...]:
        """The next forced tokens; call after `fill`."""
        return tuple(islice(self._forced, max_tokens))

    def _consume(self, token_id: int) -> None:
        if not self._matcher.consume_token(token_id):
            self.problem = readable_error(self._matcher.get_error()) or f"token {token_id} does not follow"

    def _fill(self, bits: NDArray[np.int32]) -> None:
        """Compute the mask after the consumed tokens, once for each number of them: it uses up the engine's limits."""
        self._has_mask = True
        if not self._mask(bits):
            if self.can_force and self._matcher.is_error():
                # The mask exceeded the limits of a row that forces: it may fit those of one that does not.
                self._stop_forcing(bits)
            return
        num_allowed = int(np.bitwise_count(bits.view(np.uint32)).sum())
        if not self.can_force or num_allowed > _MAX_FIRST_TOKENS or self._matcher.is_accepting():
            return
        if not self._force():
            # Its work counts against the row's own limits: the copy has the same lexer.
            self._stop_forcing(bits)

    def _stop_forcing(self, bits: NDArray[np.int32]) -> None:
        """Switch to the state of a row that never forced, and recompute the mask."""
        self.can_force, self.problem, self._matcher = False, "", self._new_matcher(False)
        for token_id in self._consumed:
            self._consume(token_id)
            # A mask per token, as when they were consumed: the lexer's limit applies between masks.
            if self.problem or not self._mask(bits):
                return
        self._mask(bits)

    def _mask(self, bits: NDArray[np.int32]) -> bool:
        """Whether any token is allowed."""
        self._matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        if self._matcher.is_error():
            self.problem = readable_error(self._matcher.get_error()) or _NO_TOKEN
            return False
        word, bit = divmod(self._vocab_size, BITS)
        if word < len(bits):
            bits.view(np.uint32)[word] &= np.uint32((1 << bit) - 1)
            bits[word + 1 :] = 0
        for token_id in self._eos_token_ids:
            _set(bits, token_id, self._matcher.is_accepting())
        if not bits.any():
            self.problem = _NO_TOKEN
        return not self.problem

    def _force(self) -> bool:
        """Find the forced tokens; false where that exceeds the limits."""
        ahead = self._matcher.deep_copy()
        text = ahead.compute_ff_bytes()
        if ahead.is_error() or len(text) > MAX_FORCED_BYTES:
            return False
        token_ids, _ = self._table.tokenize_partial(text.partition(_SPECIAL)[0])
        usable = [*takewhile(lambda each: each < self._vocab_size and each not in self._eos_token_ids, token_ids)]
        # If the text is an added token (`<tool_call>` in a choice), that token is not among those that encode it.
        self._forced.extend(usable[: self._matcher.validate_tokens(usable)] if usable else ())
        return True


def readable_error(message: str) -> str:
    """The text of an engine's error, without its internal names."""
    message = _EMPTY.sub("no text has all of its patterns, lengths and formats", message)
    message = _LOOKAROUND.sub("^ and $ inside a pattern, and word boundaries, are not supported: regex", message)
    return _STOP.sub(lambda found: _STOPS[found[0]], message)


def _set(bits: NDArray[np.int32], token_id: int, value: bool) -> None:
    words, bit = bits.view(np.uint32), np.uint32(1 << (token_id % BITS))
    word = token_id // BITS
    words[word] = words[word] & ~bit | (bit if value else np.uint32(0))


def is_allowed(bits: NDArray[np.int32], token_id: int) -> bool:
    """Whether a mask allows a token."""
    word, bit = divmod(token_id, BITS)
    return bool(bits.view(np.uint32)[word] >> np.uint32(bit) & np.uint32(1))
