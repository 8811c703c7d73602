"""Grammars compiled for one model's vocabulary by llguidance (https://github.com/guidance-ai/llguidance), with limits
that are counts, so that a grammar too large for one rank is too large for every rank.

Results about a grammar are cached by its content; each row compiles its own, about a millisecond next to a forward
pass: llguidance's copies share their lexer, whose states would be saved by, or charged to, other rows.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from spmd_worker.base.errors import ConfigError
from spmd_worker.replica.grammar.llguidance_input import GrammarError, engine_grammar, load_llguidance
from spmd_worker.replica.grammar.row_grammar import BITS, RowGrammar, readable_error
from spmd_worker.replica.sequence.structured_outputs import StructuredOutputsParams
from spmd_worker.tokenizer.encoder import is_panic
from spmd_worker.tokenizer.tokenizer import Tokenizer

LIMITS: Final = {
    # Items of the parser after one byte, and created for one mask.
    "max_items_in_row": 2_000,
    "step_max_items": 50_000,
    # Steps of the lexer: to build it, and for one mask (about 14,000 a millisecond).
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    # States of the lexer of one row, `LEXER_STATE_BYTES` each.
    "max_lexer_states": 10_000,
    # Symbols of all rules.
    "max_grammar_size": 500_000,
}
"""Limits of a grammar. All are counts: nothing depends on the speed of a rank."""

FORCING_ITEMS: Final = 2_000
"""Replaces `step_max_items` where tokens are forced: the bytes of a forced text are not counted but its items are, and
a text of 10,000 bytes repeated makes two items each time. So it is 12 MB at most, 0.5 s; masks of known grammars take
some 800 items, and a row where one takes more forces nothing.
"""

LEXER_STATE_BYTES: Final = 400
"""Measured: 9,900 states took 3.5 MB; rows of 200 tokens build 0.2 to 0.3 MB."""

NUM_COMPILED: Final = 256
"""Most grammars cached, least recently used evicted."""

_MAX_MESSAGE: Final = 400


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    """Key of an engine's token table, which also has a tokenizer's tokens from `size`, the model's, on."""

    fingerprint: str
    size: int
    eos_token_ids: tuple[int, ...]
    source: Tokenizer = field(compare=False)


_NewState = Callable[[bool], RowGrammar]
"""Factory of a valid grammar: makes a row's own state, before its first token; the argument: whether it may force."""


class GrammarCompiler:
    """Compiles grammars for one model. `open_tokenizer` is called once. Ids without a token are never allowed."""

    def __init__(
        self, open_tokenizer: Callable[[], Tokenizer | None], vocab_size: int, eos_token_ids: tuple[int, ...]
    ) -> None:
        self._open_tokenizer, self.vocab_size = open_tokenizer, vocab_size
        self.eos_token_ids = tuple([each for each in eos_token_ids if each < vocab_size])
        self._table: Any = None
        # A server checks requests in another thread than the engine's.
        self._lock = threading.Lock()
        self.num_checked_bytes = 0
        """`compile_bytes` of the grammars that `check` has compiled, each time that one was not cached."""
        self._compiled: dict[StructuredOutputsParams, _NewState | GrammarError] = {}

    def check(self, constraint: StructuredOutputsParams) -> None:
        """Raise GrammarError for a grammar that cannot constrain a row: one that the engine does not know or would not
        enforce completely, that exceeds `LIMITS` from its first token on, or that no answer matches.
        """
        self._compile(constraint, counts=True)

    def start(self, constraint: StructuredOutputsParams, may_force: bool = True) -> RowGrammar:
        """A row's own state, before its first token. Raises GrammarError. `may_force`: it may force tokens."""
        return self._compile(constraint)(may_force)

    def new_bits(self, num_rows: int) -> NDArray[np.int32]:
        """Zeroed masks for `num_rows` rows, of grammars that were compiled here."""
        num_tokens = self.vocab_size if self._table is None else self._table.vocab_size
        return np.zeros((num_rows, -(-num_tokens // BITS)), dtype=np.int32)

    def _compile(self, constraint: StructuredOutputsParams, *, counts: bool = False) -> _NewState:
        with self._lock:
            found = self._compiled.pop(constraint, None)
            if found is None:
                self.num_checked_bytes += constraint.compile_bytes * counts
                try:
                    found = self._compile_uncached(constraint)
                except GrammarError as error:
                    found = error
            self._compiled[constraint] = found
            if len(self._compiled) > NUM_COMPILED:
                del self._compiled[next(iter(self._compiled))]
        if isinstance(found, GrammarError):
            raise found
        return found

    def _compile_uncached(self, constraint: StructuredOutputsParams) -> _NewState:
        try:
            llguidance = load_llguidance()
        except ConfigError as error:
            raise GrammarError("extra_missing", str(error)) from None
        table = self._token_table()
        grammar = engine_grammar(constraint)

        def new_matcher(can_force: bool) -> Any:
            counts = LIMITS | ({"step_max_items": FORCING_ITEMS} if can_force else {})
            limits = llguidance.LLParserLimits(**counts, verbose_errors=False)
            return llguidance.LLMatcher(table, grammar, log_level=0, limits=limits)

        matcher = new_matcher(False)
        if matcher.is_error():
            raise _rejected(constraint, readable_error(matcher.get_error()))
        not_enforced = matcher.get_grammar_warnings()
        if not_enforced:
            raise _rejected(constraint, "; ".join(not_enforced))
        have_text = any(not table.is_special_token(each) for each in self.eos_token_ids)
        tokens = (table, self.vocab_size, self.eos_token_ids if have_text else ())
        first = RowGrammar(new_matcher, *tokens)
        first.fill(self.new_bits(1)[0])
        if first.problem:
            raise _rejected(constraint, first.problem)
        # A row that exceeds the forcing limits at its beginning exceeds them always.
        can_force = first.can_force
        return lambda may_force: RowGrammar(new_matcher, *tokens, can_force and may_force)

    def _token_table(self) -> Any:
        if self._table is None:
            tokenizer = self._open_tokenizer()
            if tokenizer is None:
                raise GrammarError("tokenizer_missing", "structured_outputs need a tokenizer.json in the model folder")
            if not self.eos_token_ids:
                message = "the model has no end-of-sequence token, which a constrained answer needs"
                raise GrammarError("grammar_refused", message)
            key = _Vocabulary(tokenizer.fingerprint(), self.vocab_size, self.eos_token_ids, tokenizer)
            table = _token_table(key)
            if isinstance(table, str):
                raise GrammarError("grammar_refused", table)
            self._table = table
        return self._table


@lru_cache(maxsize=2)
def _token_table(vocabulary: _Vocabulary) -> Any:
    """The table, or the error message. Once per process: about a second for 128,000 tokens, and a panic of the library
    prints to the terminal. Engine and worker of one process share it.
    """
    num_tokens = max(vocabulary.size, 1 + max(vocabulary.source.vocabulary().values(), default=0))
    try:
        return load_llguidance().LLTokenizer(
            vocabulary.source.to_json(),
            n_vocab=num_tokens,
            eos_token=list(vocabulary.eos_token_ids),
        )
    except BaseException as error:
        if not isinstance(error, ValueError) and not is_panic(error):
            raise
        return f"llguidance does not support this model's tokenizer: {error}"[:_MAX_MESSAGE]


def _rejected(constraint: StructuredOutputsParams, message: str) -> GrammarError:
    """Error with the engine's message on one line, without its placeholders."""
    lines = [line.strip() for line in message.splitlines() if line.strip() not in ("", "<non-verbose/>")]
    return GrammarError("grammar_refused", f"{constraint.kind}: {' '.join(lines)}"[:_MAX_MESSAGE])
