"""How far one row has come in its form: a function of the form and the row's own output tokens.

A row's state goes on by the tokens that the row has more than it had, wherever it was meanwhile (waiting, preempted,
swapped), and one that is new takes them all, doing for each what the first one did.

Where only one text can follow, the tokens are those that the tokenizer gives for it, as far as they are the same
whatever comes behind: these are forced, each by a mask that leaves it alone, and may be taken several at a time.
"""

import re
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice, takewhile
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

BITS: Final = 32
"""Of a word of a mask: bit b of word w is token 32 w + b."""

MOST_FORCED_BYTES: Final = 4096
"""Of a text that alone can follow. The engine works through all of it at once (`a{1000000}`), as far as the items that
the parser may make for it reach: in a row that has come to a longer one nothing is forced any more.
"""

_MOST_SPELLINGS: Final = 64
"""Where only one text can follow, so many tokens at most begin it. Where more may follow, none is looked for."""

_NO_TOKEN: Final = "no token can follow"
_STOPS: Final = {
    "NoExtensionBias": "no text has this form: a rule or $ref refers back to itself without end, or allows nothing",
    "NoExtension": _NO_TOKEN,
    "MaxTokensTotal": "the form ends after a number of tokens",
    "MaxTokensParser": "the form ends after a number of tokens",
    "EndOfSentence": "the answer has ended",
    "LexerTooComplex": "the form is too large for the limits of a row",
    "ParserTooComplex": "the form is too large for the limits of a row",
    "InternalError": "the grammar engine failed",
    "Cancelled": "the grammar engine was stopped",
}
"""The engine's names of why it stopped, which are all that it says of some forms."""
_EMPTY: Final = re.compile(r"Regex is empty: .*", re.DOTALL)
_LOOKING: Final = re.compile(r"lookarounds not supported yet; \w+ in regex")
_STOP: Final = re.compile(rf"\b(?:{'|'.join(_STOPS)})\b")
_SPECIAL: Final = b"\xff"
"""Stands in the engine's bytes before a token that has no text."""


class RowGrammar:
    """`new_matcher` makes an `llguidance.LLMatcher` with a lexer of its own; it never raises, but ends in an error, and
    stays there. It is given whether tokens will be forced, and bounds what is worked through for that. `table` is its
    `LLTokenizer`; of its tokens those from `vocab_size` on are not the model's.

    `eos_token_ids` are given where some of them spell text too: as text they are forbidden then, so that they end the
    row and nothing else. `can_force`: whether tokens are forced. Once false, it stays.
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
        self._taken: list[int] = []
        self._is_looked_at = False
        self._forced: deque[int] = deque()
        self.problem = ""
        """Why no token can be chosen, in the engine's words; empty while one can. It stays."""

    def take(self, output_token_ids: Sequence[int]) -> None:
        """The row has these tokens by now; those taken before are the first of them."""
        for token_id in output_token_ids[len(self._taken) :]:
            if not self._is_looked_at and not self.problem:
                self._look(np.zeros(-(-max(self._vocab_size, self._table.vocab_size) // BITS), dtype=np.int32))
            if self.problem:
                return
            self._consume(token_id)
            self._taken.append(token_id)
            if self._forced and self._forced.popleft() != token_id:
                self._forced.clear()
            self._is_looked_at = bool(self._forced)

    def fill(self, bits: NDArray[np.int32]) -> None:
        """Which tokens may follow, a bit each, into int32 [tokens / 32]; sets `problem` where none may."""
        if not self.problem and not self._forced:
            self._look(bits)
        if self.problem or self._forced:
            bits[:] = 0
        if self._forced and not self.problem:
            _set(bits, self._forced[0], True)

    def forced(self, most: int) -> tuple[int, ...]:
        """After `fill`: the tokens that follow whatever is sampled, the next `most` of them."""
        return tuple(islice(self._forced, most))

    def _consume(self, token_id: int) -> None:
        if not self._matcher.consume_token(token_id):
            self.problem = in_words(self._matcher.get_error()) or f"token {token_id} does not follow"

    def _look(self, bits: NDArray[np.int32]) -> None:
        """What may follow the tokens taken, once for each number of them: it uses up what the engine may use."""
        self._is_looked_at = True
        if not self._mask(bits):
            if self.can_force and self._matcher.is_error():
                # The mask took more than a row that forces may use: it may fit the limits of one that does not.
                self._stop_forcing(bits)
            return
        num_allowed = int(np.bitwise_count(bits.view(np.uint32)).sum())
        if not self.can_force or num_allowed > _MOST_SPELLINGS or self._matcher.is_accepting():
            return
        if not self._force():
            # What was worked out for it counts against the row's own limits: the copy has the same lexer.
            self._stop_forcing(bits)

    def _stop_forcing(self, bits: NDArray[np.int32]) -> None:
        """Become the state that a row has in which nothing was ever forced, and look again."""
        self.can_force, self.problem, self._matcher = False, "", self._new_matcher(False)
        for token_id in self._taken:
            self._consume(token_id)
            # As when they were taken: what the lexer may work out is bounded from one look to the next.
            if self.problem or not self._mask(bits):
                return
        self._mask(bits)

    def _mask(self, bits: NDArray[np.int32]) -> bool:
        """Whether any token may follow."""
        self._matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        if self._matcher.is_error():
            self.problem = in_words(self._matcher.get_error()) or _NO_TOKEN
            return False
        _clear_from(bits, self._vocab_size)
        for token_id in self._eos_token_ids:
            _set(bits, token_id, self._matcher.is_accepting())
        if not bits.any():
            self.problem = _NO_TOKEN
        return not self.problem

    def _force(self) -> bool:
        """Find what is forced; false where that is too much."""
        ahead = self._matcher.deep_copy()
        text = ahead.compute_ff_bytes()
        if ahead.is_error() or len(text) > MOST_FORCED_BYTES:
            return False
        token_ids, _ = self._table.tokenize_partial(text.partition(_SPECIAL)[0])
        usable = [*takewhile(lambda each: each < self._vocab_size and each not in self._eos_token_ids, token_ids)]
        # Of a text that is an added token (`<tool_call>` in a choice) that token is none of those that spell it.
        self._forced.extend(usable[: self._matcher.validate_tokens(usable)] if usable else ())
        return True


def in_words(message: str) -> str:
    """An error of the engine's for people."""
    message = _EMPTY.sub("no text has all of its patterns, lengths and formats", message)
    message = _LOOKING.sub("^ and $ inside a pattern, and word boundaries, are not supported: regex", message)
    return _STOP.sub(lambda found: _STOPS[found[0]], message)


def _set(bits: NDArray[np.int32], token_id: int, value: bool) -> None:
    words, bit = bits.view(np.uint32), np.uint32(1 << (token_id % BITS))
    word = token_id // BITS
    words[word] = words[word] & ~bit | (bit if value else np.uint32(0))


def _clear_from(bits: NDArray[np.int32], first: int) -> None:
    """The bits of token `first` and of all after it."""
    word, bit = divmod(first, BITS)
    if word < len(bits):
        bits.view(np.uint32)[word] &= np.uint32((1 << bit) - 1)
        bits[word + 1 :] = 0
