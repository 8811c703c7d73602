"""How far one row has come in its form: a function of the form and the row's own output tokens.

A row's state goes on by the tokens that the row has more than it had, wherever it was meanwhile (waiting, preempted,
swapped), and one that is new takes them all.
"""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

BITS: Final = 32
"""Of a word of a mask: bit b of word w is token 32 w + b."""

_NO_TOKEN: Final = "no token can follow"


class RowGrammar:
    """`matcher` is an `llguidance.LLMatcher`, which never raises: it ends in an error instead, and stays there. Of its
    tokens those from `vocab_size` on are not the model's.

    `eos_token_ids` are given where some of them spell text too: as text they are forbidden then, so that they end the
    row and nothing else.
    """

    def __init__(self, matcher: Any, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        self._matcher, self._vocab_size, self._eos_token_ids = matcher, vocab_size, eos_token_ids
        self._num_taken = 0
        self.problem = ""
        """Why no token can be chosen, in the engine's words; empty while one can. It stays."""

    def copy(self) -> "RowGrammar":
        """Another state, which shares nothing with this one."""
        made = RowGrammar(self._matcher.deep_copy(), self._vocab_size, self._eos_token_ids)
        made._num_taken, made.problem = self._num_taken, self.problem
        return made

    def take(self, output_token_ids: Sequence[int]) -> None:
        """The row has these tokens by now; those taken before are the first of them."""
        for token_id in output_token_ids[self._num_taken :]:
            if self.problem:
                return
            if not self._matcher.consume_token(token_id):
                self.problem = self._matcher.get_error() or f"token {token_id} does not follow"
            self._num_taken += 1

    def fill(self, bits: NDArray[np.int32]) -> None:
        """Which tokens may follow, a bit each, into int32 [tokens / 32]; sets `problem` where none may."""
        if not self.problem:
            self._matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
            if self._matcher.is_error():
                self.problem = self._matcher.get_error() or _NO_TOKEN
        if self.problem:
            bits[:] = 0
            return
        _clear_from(bits, self._vocab_size)
        if self._eos_token_ids:
            self._set_eos(bits, self._matcher.is_accepting())
        if not bits.any():
            self.problem = _NO_TOKEN

    def _set_eos(self, bits: NDArray[np.int32], may_end: bool) -> None:
        words = bits.view(np.uint32)
        for token_id in self._eos_token_ids:
            bit = np.uint32(1 << (token_id % BITS))
            words[token_id // BITS] = words[token_id // BITS] & ~bit | (bit if may_end else np.uint32(0))


def _clear_from(bits: NDArray[np.int32], first: int) -> None:
    """The bits of token `first` and of all after it."""
    word, bit = divmod(first, BITS)
    if word < len(bits):
        bits.view(np.uint32)[word] &= np.uint32((1 << bit) - 1)
        bits[word + 1 :] = 0


def forbidden_of(bits: NDArray[np.int32], vocab_size: int) -> NDArray[np.bool_]:
    """Bool [rows, vocabulary]: the tokens of the vocabulary whose bit is not set."""
    unpacked = np.unpackbits(bits.view(np.uint8), axis=1, bitorder="little")[:, :vocab_size]
    return np.logical_not(unpacked)
