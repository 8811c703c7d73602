"""TokenRules: tokens that may be sampled at each position of an answer, by rules of a generation_config.json.

The rules are a function of the record and the row's own tokens, so chunks, preemption, replay and a resumed job change
nothing. `replica/grammar/rule_masks.py` makes masks of them, and the sampler compares timestamps with text.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any, Final

from spmd_worker.base.config.plain_values import plain_int, shown
from spmd_worker.base.names import with_keyword_hints
from spmd_worker.replica.sequence.record_checks import INT64


@with_keyword_hints()
@dataclass(frozen=True, slots=True)
class TimestampRules:
    """Whisper's rules (https://arxiv.org/abs/2212.04356): the answer begins with a timestamp, timestamps come in pairs
    or before the end, and never decrease; and one is sampled where all of them together are more probable than every
    text token.

    Tokens from `first_token_id` on are timestamps, and the one before it is `<|notimestamps|>`. Tokens below
    `end_token_id`, which ends an answer, are text. The first timestamp is at most number `max_initial_index`.
    """

    first_token_id: int
    end_token_id: int
    max_initial_index: int | None = None

    def __post_init__(self) -> None:
        for name in ("first_token_id", "end_token_id", "max_initial_index"):
            object.__setattr__(self, name, _number(name, getattr(self, name), is_optional=name == "max_initial_index"))
        if self.first_token_id <= self.end_token_id:
            raise ValueError(f"first_token_id={self.first_token_id} must be above end_token_id={self.end_token_id}")


@with_keyword_hints()
@dataclass(frozen=True, slots=True)
class ThinkingRules:
    """Reasoning has at most `budget` tokens between `begin_token_ids` and `end_token_ids`: then the end follows,
    whatever its probability. `num_open`: the prompt begins it and has so many of the tokens; None: it does not.
    """

    budget: int
    begin_token_ids: tuple[int, ...]
    end_token_ids: tuple[int, ...]
    num_open: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "budget", _number("budget", self.budget))
        for name in ("begin_token_ids", "end_token_ids"):
            ids = _token_ids(name, getattr(self, name))
            if not ids:
                raise ValueError(f"{name} is empty: give the token ids of the marker")
            object.__setattr__(self, name, ids)
        object.__setattr__(self, "num_open", _number("num_open", self.num_open, is_optional=True))

    @property
    def least_outputs(self) -> int:
        """Tokens of an answer before which the budget cannot be used up."""
        return self.budget + (len(self.begin_token_ids) if self.num_open is None else -self.num_open)


@with_keyword_hints()
@dataclass(frozen=True, slots=True)
class TokenRules:
    """Rules of one row's answer. Positions count from its first token.

    `first_tokens`: the first token is the most probable of these (the languages, where the model detects one), and
    `forced_tokens` follow, whatever their probability. After them the answer proper begins: `begin_suppress_tokens`
    are not its first token, `suppress_tokens` none of its tokens. `forced_eos_token_id` is the last of `max_tokens`.
    `min_new_tokens`: no end-of-sequence token comes before.
    `no_repeat_ngram_size` n: no n tokens in a row occur twice in prompt and answer. `timestamps`: Whisper's rules.
    `thinking`: the budget of reasoning (`SamplingParams.thinking_token_budget`).

    `num_beam_tokens` None: no beam. A beam's row has its answer so far as the last of its prompt's tokens, this many;
    its log-probabilities are the model's own, of allowed tokens alone, and its last token is not forced.

    Most names are transformers'. A rule that would leave no token to sample is ignored. A record without rules takes
    those of a model's folder away, where None keeps them.
    """

    first_tokens: tuple[int, ...] = ()
    forced_tokens: tuple[int, ...] = ()
    suppress_tokens: tuple[int, ...] = ()
    begin_suppress_tokens: tuple[int, ...] = ()
    forced_eos_token_id: int | None = None
    min_new_tokens: int = 0
    no_repeat_ngram_size: int = 0
    timestamps: TimestampRules | None = None
    num_beam_tokens: int | None = None
    thinking: ThinkingRules | None = None

    def __post_init__(self) -> None:
        for name in _LISTS:
            object.__setattr__(self, name, _token_ids(name, getattr(self, name)))
        for name in ("forced_eos_token_id", "num_beam_tokens"):
            object.__setattr__(self, name, _number(name, getattr(self, name), is_optional=True))
        for name in ("min_new_tokens", "no_repeat_ngram_size"):
            object.__setattr__(self, name, _number(name, getattr(self, name) or 0))
        object.__setattr__(self, "timestamps", _record("timestamps", self.timestamps, TimestampRules))
        object.__setattr__(self, "thinking", _record("thinking", self.thinking, ThinkingRules))

    def __len__(self) -> int:
        """Number of token ids that rules name."""
        return len(self.token_ids)

    @property
    def begin_index(self) -> int:
        """Position of the first token of the answer proper."""
        return bool(self.first_tokens) + len(self.forced_tokens)

    @property
    def needs_output_ids(self) -> bool:
        """Whether the next token depends on which tokens the answer has, not only on how many."""
        return self.timestamps is not None or self.no_repeat_ngram_size > 0 or self.thinking is not None

    @property
    def needs_prompt_ids(self) -> bool:
        """Whether the next token depends on tokens of the prompt."""
        return self.no_repeat_ngram_size > 0 or bool(self.num_beam_tokens)

    def allows_all(self, num_outputs: int) -> bool:
        """Whether no rule can apply to an answer that has at most so many tokens."""
        return self.thinking is not None and num_outputs < self.thinking.least_outputs and _is_thinking_alone(self)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Every token id that a rule names."""
        stamps = () if self.timestamps is None else (self.timestamps.first_token_id, self.timestamps.end_token_id)
        last = () if self.forced_eos_token_id is None else (self.forced_eos_token_id,)
        markers = () if self.thinking is None else (self.thinking.begin_token_ids, self.thinking.end_token_ids)
        lists = (*[getattr(self, name) for name in _LISTS], *markers)
        return (*[token_id for each in lists for token_id in each], *last, *stamps)


_LISTS: Final = ("first_tokens", "forced_tokens", "suppress_tokens", "begin_suppress_tokens")


def as_token_rules(value: Any) -> TokenRules | None:
    """The record from itself, a mapping or None. Raises ValueError naming the field."""
    rules: TokenRules | None = _record("token_rules", value, TokenRules)
    return rules


def _record(name: str, value: Any, record: Any) -> Any:
    if value is None or isinstance(value, record):
        return value
    known = [spec.name for spec in fields(record)]
    if not isinstance(value, Mapping):
        raise ValueError(f"{name}={shown(value)} must be a mapping with some of {', '.join(known)}")
    unknown = [key for key in value if key not in known]
    if unknown:
        raise ValueError(f"{name}: unknown key {shown(unknown[0])}. Known keys: {', '.join(known)}")
    try:
        return record(**value)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{name}.{error}") from None


def _token_ids(name: str, value: Any) -> tuple[int, ...]:
    ids = () if value is None else value
    if not isinstance(ids, list | tuple):
        raise ValueError(f"{name}={shown(value)} must be a list of token ids")
    return tuple([_number(name, each) for each in ids])


def _number(name: str, value: Any, is_optional: bool = False) -> Any:
    number = plain_int(value)
    if number is None and value is None and is_optional:
        return None
    if number is None or not 0 <= number <= INT64[-1]:
        raise ValueError(f"{name}={shown(value)} must be a whole number from 0 to {INT64[-1]}")
    return number


@lru_cache(maxsize=64)
def _is_thinking_alone(rules: TokenRules) -> bool:
    return replace(rules, thinking=None) == NO_RULES


NO_RULES: Final = TokenRules()
