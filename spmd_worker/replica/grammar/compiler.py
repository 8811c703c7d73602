"""Forms compiled for one model's vocabulary by llguidance (https://github.com/guidance-ai/llguidance), with limits that
are counts, so that what is too much on one rank is too much on every rank.

What is known of a form is kept by its content; each row has its form compiled anew, about a millisecond beside a
forward pass: copies of the engine's share their lexer, whose states would be spared, or charged to, other rows.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from spmd_worker.base.errors import ConfigError
from spmd_worker.replica.grammar.forms import GrammarError, engine_grammar, load_llguidance
from spmd_worker.replica.grammar.row_grammar import BITS, RowGrammar, in_words
from spmd_worker.replica.sequence.structured_outputs import StructuredOutputsParams
from spmd_worker.tokenizer.encoder import is_panic
from spmd_worker.tokenizer.tokenizer import Tokenizer

LIMITS: Final = {
    # Items of the parser after one byte, and made for one mask.
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
"""What a form may cost. All are counts: nothing depends on how fast a rank is."""

FORCING_ITEMS: Final = 2_000
"""In place of `step_max_items` where tokens are forced: no bytes of a text that alone can follow are counted, but what
it is made of, and one of 10,000 bytes repeated makes two items each time. So it is 12 MB at most, 0.5 s; masks of known
forms take some 800 items, and where one takes more nothing is forced in the row.
"""

LEXER_STATE_BYTES: Final = 400
"""Measured: 9,900 states took 3.5 MB, what rows of 200 tokens build 0.2 to 0.3 MB."""

NUM_COMPILED: Final = 256
"""Forms kept, those used last."""

_MOST_WORDS: Final = 400


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    """What an engine's token table depends on; equal where it is the same. `source` is read when there is none yet.

    `size` is the model's; a tokenizer may have more tokens, which the table has too.
    """

    fingerprint: str
    size: int
    eos_token_ids: tuple[int, ...]
    source: Tokenizer = field(compare=False)


_NewState = Callable[[bool], RowGrammar]
"""Of a form that was found to be one: makes a row's own state, before its first token, given whether it may force."""


class GrammarCompiler:
    """Of one model: `open_tokenizer` is called once, when the first form is compiled; `vocab_size` is the model's, of
    which ids without a token are never allowed.
    """

    def __init__(
        self, open_tokenizer: Callable[[], Tokenizer | None], vocab_size: int, eos_token_ids: tuple[int, ...]
    ) -> None:
        self._open_tokenizer, self.vocab_size = open_tokenizer, vocab_size
        self._eos_token_ids = tuple([each for each in eos_token_ids if each < vocab_size])
        self._table: Any = None
        # A server's requests are checked in another thread than the engine's.
        self._lock = threading.Lock()
        self.num_checked_bytes = 0
        """`compile_bytes` of the forms that `check` has compiled, each time that one was not kept."""
        self._compiled: dict[StructuredOutputsParams, _NewState | GrammarError] = {}

    def check(self, form: StructuredOutputsParams) -> None:
        """Raise GrammarError for a form in which no row can be answered: one that the engine does not know or would not
        enforce whole, that is beyond `LIMITS` from its first token on, or that no answer has.
        """
        with self._lock:
            self.num_checked_bytes += form.compile_bytes if form not in self._compiled else 0
            compiled = self._compile(form)
        if isinstance(compiled, GrammarError):
            raise compiled

    def start(self, form: StructuredOutputsParams, may_force: bool = True) -> RowGrammar:
        """A row's own state, before its first token. Without `may_force` no token is forced in it, and `FORCING_ITEMS`
        do not bound its masks. Raises GrammarError as `check` does.
        """
        with self._lock:
            compiled = self._compile(form)
        if isinstance(compiled, GrammarError):
            raise compiled
        return compiled(may_force)

    def new_bits(self, num_rows: int) -> NDArray[np.int32]:
        """Zeros for the masks of so many rows, of forms that were compiled here."""
        num_tokens = self.vocab_size if self._table is None else self._table.vocab_size
        return np.zeros((num_rows, -(-num_tokens // BITS)), dtype=np.int32)

    def _compile(self, form: StructuredOutputsParams) -> _NewState | GrammarError:
        found = self._compiled.pop(form, None)
        if found is None:
            try:
                found = self._compiled_anew(form)
            except GrammarError as error:
                found = error
        self._compiled[form] = found
        if len(self._compiled) > NUM_COMPILED:
            del self._compiled[next(iter(self._compiled))]
        return found

    def _compiled_anew(self, form: StructuredOutputsParams) -> _NewState:
        try:
            llguidance = load_llguidance()
        except ConfigError as error:
            raise GrammarError("extra_missing", str(error)) from None
        table = self._token_table()
        grammar = engine_grammar(form)

        def new_matcher(can_force: bool) -> Any:
            counts = LIMITS | ({"step_max_items": FORCING_ITEMS} if can_force else {})
            limits = llguidance.LLParserLimits(**counts, verbose_errors=False)
            return llguidance.LLMatcher(table, grammar, log_level=0, limits=limits)

        matcher = new_matcher(False)
        if matcher.is_error():
            raise _refused(form, in_words(matcher.get_error()))
        not_enforced = matcher.get_grammar_warnings()
        if not_enforced:
            raise _refused(form, "; ".join(not_enforced))
        spells_text = any(not table.is_special_token(each) for each in self._eos_token_ids)
        tokens = (table, self.vocab_size, self._eos_token_ids if spells_text else ())
        first = RowGrammar(new_matcher, *tokens)
        first.fill(self.new_bits(1)[0])
        if first.problem:
            raise _refused(form, first.problem)
        # What is too much to be forced at the beginning is so for every row.
        can_force = first.can_force
        return lambda may_force: RowGrammar(new_matcher, *tokens, can_force and may_force)

    def _token_table(self) -> Any:
        if self._table is None:
            tokenizer = self._open_tokenizer()
            if tokenizer is None:
                raise GrammarError("tokenizer_missing", "structured_outputs need a tokenizer.json in the model folder")
            if not self._eos_token_ids:
                raise GrammarError(
                    "grammar_refused", "the model names no end-of-sequence token, which an answer in a given form needs"
                )
            self._table = _token_table(
                _Vocabulary(tokenizer.fingerprint(), self.vocab_size, self._eos_token_ids, tokenizer)
            )
        return self._table


def _token_table(vocabulary: _Vocabulary) -> Any:
    table = _built(vocabulary)
    if isinstance(table, str):
        raise GrammarError("grammar_refused", table)
    return table


@lru_cache(maxsize=2)
def _built(vocabulary: _Vocabulary) -> Any:
    """The table, or why there is none. Once a process: a second or so for 128,000 tokens, and a panic of the library is
    shown on the terminal. Engine and worker of one process share it.
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
        return f"llguidance does not know this model's kind of tokenizer: {error}"[:_MOST_WORDS]


def _refused(form: StructuredOutputsParams, words: str) -> GrammarError:
    """In one line, without the parts of a message that are left out where it is not verbose."""
    lines = [line.strip() for line in words.splitlines() if line.strip() not in ("", "<non-verbose/>")]
    return GrammarError("grammar_refused", f"{form.kind}: {' '.join(lines)}"[:_MOST_WORDS])
