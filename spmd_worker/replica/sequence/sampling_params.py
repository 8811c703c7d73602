"""Sampling parameters of a row, checked on construction and again when a request copies them.

Knows nothing about logits, tokenizers or ranks: whether a token id lies inside the vocabulary is checked at admission,
where the vocabulary is known (`check_vocabulary`).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import FrozenInstanceError, dataclass, field, fields, replace
from enum import Enum, IntEnum
from typing import Any, ClassVar, Final, cast

import numpy as np

from spmd_worker.base.config.plain_values import asks, plain_bool, plain_float, plain_int, shown
from spmd_worker.base.config.schema import MAX_LOGPROBS
from spmd_worker.base.names import hint, with_keyword_hints
from spmd_worker.replica.sequence.record_checks import INT64, INT65, NOT_SENT, Integer65, sent_fields
from spmd_worker.replica.sequence.repetition import RepetitionDetectionParams, as_repetition_detection
from spmd_worker.replica.sequence.structured_outputs import StructuredOutputsParams, as_structured_outputs
from spmd_worker.replica.sequence.token_rules import TokenRules, as_token_rules

GREEDY_TEMPERATURE: Final = 1e-5
"""Maximum temperature of greedy sampling: dividing by less would overflow float32 logits."""

ALL_LOGPROBS: Final = -1
"""Value for a number of alternatives: the complete vocabulary."""

MAX_SCORES: Final = 1024
"""Most candidates of a prompt position (`prompt_logprob_token_ids`), and most top tokens where they become arrays."""

MAX_LOGPROB_IDS: Final = 128
"""Most `logprob_token_ids`, as in vLLM."""

_MAX_SAMPLES: Final = 1024
_MAX_SALT: Final = 1024


class RequestOutputKind(IntEnum):
    """Output per step of a request that has not ended: everything so far, only the new part, or nothing."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


DIFFERENT_FIELDS: Final[Mapping[str, str]] = {
    "n": "at most 1024; a greedy row may have several, which are equal",
    "best_of": "only here, as in older vLLM: `best_of` samples run, and the `n` most probable are returned",
    "seed": "-1 is a seed like any other",
    "logprobs": f"at most {MAX_LOGPROBS}, or -1; the same of `prompt_logprobs`",
    "prompt_logprob_token_ids": "one list for all rows too; -1 fills up shorter lists of a row; "
    f"at most {MAX_SCORES} a row",
    "prompt_logprob_start": "with `prompt_logprobs` k too, which then gives arrays of the top k of each row "
    f"(at most {MAX_SCORES}); earlier rows are found in the prefix cache",
    "logprob_token_ids": "ranks are those in the vocabulary; a key of rows and bodies too",
    "return_sampling_mask": "a field of each row; needs top_k, top_p, min_p or allowed tokens, and no setting of the "
    "engine",
    "return_routed_experts": "a field of each row; needs no setting of the engine",
    "temperature": "has no upper end, and below 1e-5 is greedy",
    "stop": "kept as a tuple, as all lists are; as in vLLM it ends reasoning too, and `content` is null then",
    "bad_words": "forbidden also where they begin in the prompt, as in transformers",
    "bad_words_ids": "only here: bad words as token ids",
    "truncate_prompt_tokens": "as in older vLLM; -1 leaves space for `max_tokens`",
    "skip_reading_prefix_cache": "`prompt_logprobs` implies it",
    "cache_salt": "only here; in prompts and bodies too, as in vLLM",
    "structured_outputs": "a mapping too; needs the extra `structured`; the answer ends with an end-of-sequence token, "
    "allowed exactly where the grammar can end, also before `min_tokens` where nothing else is; not with `ignore_eos`; "
    "`structural_tag` is rejected",
    "guided_decoding": "the older name of `structured_outputs`, which it becomes",
    "repetition_detection": "a mapping too",
    "thinking_token_budget": "tokens between the markers of `model.reasoning_format`; harmony's: the analysis channel; "
    "the end comes only where `structured_outputs` allow it, which may be inside of a form without reasoning",
    "token_rules": "only here: rules of transformers' generation_config.json, such as `suppress_tokens` and Whisper's "
    "timestamps; a mapping too. Encoder-decoder models set them by themselves",
    "output_kind": "FINAL_ONLY unless asked for: `llm_engine.step` gives outputs of requests that have ended",
}
"""Differences of a field from vLLM's, as text."""

WITHOUT_EFFECT: Final[Mapping[str, str]] = {
    "extra_args": "kept for code of yours: nothing here reads it",
    "flat_logprobs": "log-probabilities are a list with a dict for each position",
    "spaces_between_special_tokens": "the tokenizers library decides, as in vLLM with a fast tokenizer",
    "stream_interval": "every step that has new tokens gives an output, where `output_kind` asks for it",
    "skip_clone": "a request always takes a copy",
}
"""Fields that a request does not read, and the reason."""

REJECTED: Final[Mapping[str, str]] = {
    "logits_processors": (
        "ranks must agree on every logit and a log must replay it, which code of the caller's cannot promise: use "
        "allowed_token_ids, bad_words or logit_bias"
    ),
    "use_beam_search": "call LLM.beam_search instead",
    "trace_decode_token_ids": "tokens are sampled, not given: score given ones with prompt_logprobs",
    "routed_experts_prompt_start": "return_routed_experts returns those of all prompt tokens: slice the result",
    "watermarking": "answers are not watermarked: leave it out",
}
"""Unsupported fields, which must not be set, and the reason and the alternative."""


class _Freezable:
    """Assignable until it is frozen; `_CONVERTERS` normalise a field's value."""

    __slots__ = ("_is_frozen",)

    def __setattr__(self, name: str, value: Any) -> None:
        if getattr(self, "_is_frozen", False):
            raise FrozenInstanceError(
                f"{name}={shown(value)}: these parameters belong to a request; change a clone() of them"
            )
        convert = _CONVERTERS.get(name)
        try:
            object.__setattr__(self, name, value if convert is None else convert(name, value))
        except AttributeError:
            known = [spec.name for spec in fields(SamplingParams)]
            raise AttributeError(f"{type(self).__name__} has no field {name!r}{hint(name, known)}") from None


@with_keyword_hints()
@dataclass(slots=True)
class SamplingParams(_Freezable):
    """Sampling and stop conditions of one row. Names and meanings follow vLLM's.

    `temperature` 0 is greedy. `top_k` 0 and -1, `top_p` 1, `min_p` 0 switch their filter off. `seed` names the row's
    own random stream; without it the job's seed and the row's key do. `logprobs` k returns the log-probability of the
    sampled token and of the top k, -1 of all. `logprob_token_ids` are returned instead of the top k, in this order;
    `logprobs`, if it is given too, is their number.

    `best_of` samples run and the `n` of the highest cumulative log-probability are returned, best first, the earlier
    one at a tie. None, or the same number as `n`, selects nothing: `n` samples in their own order.

    `allowed_token_ids` are the only tokens that may be sampled. `bad_words` never appear: neither alone nor after a
    space, as the model's tokenizer encodes them; `bad_words_ids` are the same as token ids, each a sequence whose last
    token is forbidden after the ones before it, in prompt and output. A rule that would leave no token to sample is
    ignored. `truncate_prompt_tokens` k keeps the last k tokens of the prompt, -1 as many as leave capacity for
    `max_tokens`. `skip_reading_prefix_cache`: the prompt uses nothing from the cache. With `cache_salt` only entries of
    rows of the same salt are found. `structured_outputs` is the grammar of the complete answer; no other parameter
    allows a token that the grammar forbids.

    `prompt_logprob_token_ids` are candidates whose log-probabilities are returned as an array: one list for all rows,
    or one for each; row i of the prompt predicts its token i + 1. `prompt_logprob_start` is the first row that is
    scored. `return_sampling_mask`: the ids that could have been sampled at each output token are returned.
    `return_routed_experts`: the experts of each token of prompt and answer are returned; the prompt uses nothing from
    the cache then.

    Fields may be assigned: a request makes a frozen copy, in which every rule is checked again. Fields in
    `WITHOUT_EFFECT` and `REJECTED` exist so that scripts for vLLM run, or get an error with the reason.
    """

    # vLLM's order, which matters for positional values; then fields that exist only here, or are older.
    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: Integer65 | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    prompt_logprob_token_ids: tuple[tuple[int, ...], ...] | None = None
    prompt_logprob_start: int | None = None
    logprob_token_ids: tuple[int, ...] | None = None
    flat_logprobs: bool = field(default=False, metadata=NOT_SENT)
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = field(default=True, metadata=NOT_SENT)
    include_stop_str_in_output: bool = False
    output_kind: RequestOutputKind = field(default=RequestOutputKind.FINAL_ONLY, metadata=NOT_SENT)
    stream_interval: int | None = field(default=None, metadata=NOT_SENT)
    skip_clone: bool = field(default=False, metadata=NOT_SENT)
    structured_outputs: StructuredOutputsParams | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    extra_args: dict[str, Any] | None = field(default=None, metadata=NOT_SENT)
    bad_words: tuple[str, ...] = ()
    skip_reading_prefix_cache: bool | None = None
    thinking_token_budget: int | None = None
    repetition_detection: RepetitionDetectionParams | None = None
    routed_experts_prompt_start: Any = field(default=0, metadata=NOT_SENT)
    trace_decode_token_ids: Any = field(default=None, metadata=NOT_SENT)
    watermarking: Any = field(default=None, metadata=NOT_SENT)
    best_of: int | None = None
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    truncate_prompt_tokens: int | None = None
    cache_salt: str | None = None
    token_rules: TokenRules | None = None
    return_sampling_mask: bool = False
    return_routed_experts: bool = False
    logits_processors: Any = field(default=None, metadata=NOT_SENT)
    guided_decoding: Any = field(default=None, metadata=NOT_SENT)
    use_beam_search: Any = field(default=False, metadata=NOT_SENT)

    __struct_fields__: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        self.check()

    @staticmethod
    def from_optional(*given: Any, **named: Any) -> "SamplingParams":
        """Parameters in which None means the default."""
        positional = dict(zip(SamplingParams.__struct_fields__, given))
        twice = next((name for name in named if name in positional), None)
        if twice is not None or len(given) > len(positional):
            raise TypeError(f"from_optional: {twice or 'a value'} is given twice, or there are more values than fields")
        values = {**positional, **named}
        return SamplingParams(**{name: value for name, value in values.items() if value is not None})

    def clone(self) -> "SamplingParams":
        """A copy that may be changed. Raises ValueError for an assigned field that breaks a rule."""
        return replace(self, extra_args=deepcopy(self.extra_args))

    def frozen(self) -> "SamplingParams":
        """An immutable copy of the fields that a request needs; itself if it is one. Raises ValueError as `check`."""
        if getattr(self, "_is_frozen", False):
            return self
        self.check()
        copy = object.__new__(SamplingParams)
        for name, value in [*_LOCAL_DEFAULTS, *[(name, getattr(self, name)) for name in _SENT]]:
            object.__setattr__(copy, name, value)
        object.__setattr__(copy, "_is_frozen", True)
        return copy

    def __reduce__(self) -> "tuple[Callable[..., SamplingParams], tuple[dict[str, Any]]]":
        """Support `copy` and `pickle`; the result may be changed."""
        return _from_fields, ({spec.name: getattr(self, spec.name) for spec in fields(self)},)

    @property
    def is_greedy(self) -> bool:
        return self.temperature <= GREEDY_TEMPERATURE

    @property
    def needs_argmax_only(self) -> bool:
        """Whether the argmax of the logits suffices, once there are `min_tokens`."""
        has_rules = self.structured_outputs is not None or self.token_rules is not None
        is_free = not has_rules and not self.has_masks and not self.has_penalties
        reports = self.needs_logprobs or self.return_sampling_mask
        return self.is_greedy and is_free and not self.logit_bias and not reports

    @property
    def num_sequences(self) -> int:
        """Number of samples that run."""
        return self.n if self.best_of is None else self.best_of

    @property
    def is_ranked(self) -> bool:
        """Whether more samples run than are returned, so that log-probabilities select."""
        return self.best_of is not None and self.best_of > self.n

    @property
    def needs_logprobs(self) -> bool:
        """Whether the log-probabilities of sampled tokens are computed: to be returned, or to rank the samples."""
        return self.returns_logprobs or self.is_ranked

    @property
    def returns_logprobs(self) -> bool:
        return self.logprobs is not None or self.logprob_token_ids is not None

    @property
    def num_top_logprobs(self) -> int:
        """Number of the most probable tokens that are returned; -1 is all."""
        return 0 if self.logprob_token_ids is not None else self.logprobs or 0

    @property
    def has_penalties(self) -> bool:
        """Whether the logits depend on which tokens came before."""
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0

    @property
    def needs_output_ids(self) -> bool:
        """Whether the next sample depends on which tokens the answer has, not only on how many."""
        return self.has_penalties or bool(self.bad_words_ids) or self.masks_need_output_ids

    @property
    def masks_need_output_ids(self) -> bool:
        """Whether the host needs the answer's tokens to know which may follow."""
        rules = self.token_rules
        return self.structured_outputs is not None or (rules is not None and rules.needs_output_ids)

    @property
    def forbids_tokens(self) -> bool:
        """Whether some tokens may not be sampled, or are made less likely, at some position of the answer."""
        waits = self.min_tokens > 0 and bool(self.stop_token_ids)
        has_rules = self.token_rules is not None
        return self.has_masks or has_rules or waits or any(bias < 0 for _, bias in self.logit_bias)

    @property
    def has_masks(self) -> bool:
        """Whether some tokens are forbidden at some position."""
        return self.allowed_token_ids is not None or bool(self.bad_words_ids)

    @property
    def reads_prefix_cache(self) -> bool:
        """Whether cached blocks of the prompt may be used. Log-probabilities of a prompt need it computed, from the
        first row on that is scored; experts of its tokens are known where they are computed.
        """
        is_scored = self.prompt_logprobs is not None and not self.has_score_arrays
        return not (is_scored or self.skip_reading_prefix_cache or self.return_routed_experts)

    @property
    def has_score_arrays(self) -> bool:
        """Whether log-probabilities of the prompt are returned as arrays, of rows from `first_scored_row` on."""
        return self.prompt_logprob_token_ids is not None or self.prompt_logprob_start is not None

    @property
    def first_scored_row(self) -> int:
        return self.prompt_logprob_start or 0

    @property
    def scores_prompt(self) -> bool:
        """Whether log-probabilities of the prompt are computed."""
        return self.prompt_logprobs is not None or self.has_score_arrays

    @property
    def has_filters(self) -> bool:
        """Whether top-k, top-p or min-p cut the distribution."""
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0

    @property
    def forbids_most(self) -> bool:
        """Whether a row names the tokens that it may get."""
        return self.allowed_token_ids is not None or self.structured_outputs is not None

    def check_scored_rows(self, num_tokens: int) -> None:
        """Raise ValueError unless a prompt of so many tokens has the rows to be scored, as many as lists of ids."""
        if not self.has_score_arrays:
            return
        first, num_rows = self.first_scored_row, num_tokens - 1 - self.first_scored_row
        if num_rows < 1:
            rule = f"so it must be at most {num_tokens - 2}" if num_tokens > 1 else "and one token predicts none"
            way_out = "give a smaller one, or a longer prompt" if num_tokens > 1 else "give a longer prompt"
            raise ValueError(
                f"prompt_logprob_start={first} of a prompt of {num_tokens} tokens: row i predicts token i + 1, {rule}: "
                f"{way_out}"
            )
        lists = self.prompt_logprob_token_ids
        if lists is not None and len(lists) not in (1, num_rows):
            raise ValueError(
                f"prompt_logprob_token_ids has {len(lists)} lists for {num_rows} rows ({num_tokens} tokens, from row "
                f"{first} on): give one list, or one for each row"
            )

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise ValueError for a token id outside `[0, vocab_size)`."""
        named = (
            ("stop_token_ids", self.stop_token_ids),
            ("logit_bias", [token_id for token_id, _ in self.logit_bias]),
            ("allowed_token_ids", self.allowed_token_ids or ()),
            ("bad_words_ids", [token_id for sequence in self.bad_words_ids for token_id in sequence]),
            ("token_rules", () if self.token_rules is None else self.token_rules.token_ids),
            ("logprob_token_ids", self.logprob_token_ids or ()),
            ("prompt_logprob_token_ids", [each for row in self.prompt_logprob_token_ids or () for each in row]),
        )
        for name, ids in named:
            outside = next((token_id for token_id in ids if token_id >= vocab_size), None)
            if outside is not None:
                raise ValueError(f"{name}: token id {outside} is outside the vocabulary of {vocab_size} tokens")
        if self.has_score_arrays and (self.prompt_logprobs or 0) > vocab_size:
            raise ValueError(
                f"prompt_logprobs={self.prompt_logprobs} is more than the vocabulary's {vocab_size} tokens"
            )

    def check(self) -> None:
        """Check every rule; ValueError names key, value and rule. A frozen record has been checked."""
        if getattr(self, "_is_frozen", False):
            return
        if self.guided_decoding is not None:
            if self.structured_outputs not in (None, self.guided_decoding):
                raise ValueError("structured_outputs and guided_decoding, its older name, differ: give one")
            self.structured_outputs, self.guided_decoding = self.guided_decoding, None
        for name, is_valid, rule in _RULES:
            value = getattr(self, name)
            if value is not None and not is_valid(value):
                raise ValueError(f"{name}={value} {rule}")
        if self.num_sequences < self.n:
            raise ValueError(
                f"best_of={self.best_of} must be at least n={self.n}: raise best_of, lower n, or leave best_of out, "
                f"which runs n samples and returns them all"
            )
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens={self.min_tokens} must not exceed max_tokens={self.max_tokens}")
        if self.return_sampling_mask and not (self.is_greedy or self.has_filters or self.forbids_most):
            raise ValueError(
                "return_sampling_mask=True without a filter keeps every id at each token: set top_k, top_p or min_p, "
                "or leave it out"
            )
        if self.has_score_arrays:
            if not 0 <= (self.prompt_logprobs or 0) <= MAX_SCORES:
                raise ValueError(
                    f"prompt_logprobs={self.prompt_logprobs} must be from 0 to {MAX_SCORES} in scores of a prompt "
                    f"(prompt_logprob_token_ids, prompt_logprob_start)"
                )
        elif self.prompt_logprobs is not None and not _is_num_logprobs(self.prompt_logprobs):
            raise ValueError(f"prompt_logprobs={self.prompt_logprobs} {_LOGPROBS_RULE}")
        if self.logprob_token_ids is not None and self.logprobs not in (None, len(self.logprob_token_ids)):
            raise ValueError(
                f"logprobs={self.logprobs} with {len(self.logprob_token_ids)} logprob_token_ids, which replace the top "
                f"tokens: leave logprobs out"
            )
        if self.stop and not self.detokenize:
            raise ValueError(f"stop={list(self.stop)!r} needs detokenize=true: stop strings are found in the text")
        if self.ignore_eos and self.structured_outputs is not None:
            raise ValueError(
                "ignore_eos=True with structured_outputs: a constrained answer ends with an end-of-sequence token; "
                "leave one out"
            )
        for name, reason in REJECTED.items():
            value = getattr(self, name)
            # Like None, 0, False and empty values ask for nothing.
            if asks(value):
                raise ValueError(f"{name}={shown(value)} is not supported: {reason}")


def _from_fields(values: dict[str, Any]) -> SamplingParams:
    return SamplingParams(**values)


def _is_num_logprobs(value: int) -> bool:
    return -1 <= value <= MAX_LOGPROBS


def _is_openai_penalty(value: float) -> bool:
    return -2.0 <= value <= 2.0


_LOGPROBS_RULE: Final = f"must be from 0 to {MAX_LOGPROBS}, or -1 for the complete vocabulary"
_LENGTH_RULE: Final = "must be a number of tokens, or -1 for as many as leave space for max_tokens"
_RULES: Final[tuple[tuple[str, Callable[[Any], bool], str], ...]] = (
    ("n", lambda n: 1 <= n <= _MAX_SAMPLES, f"must be from 1 to {_MAX_SAMPLES}"),
    ("best_of", lambda best_of: best_of <= _MAX_SAMPLES, f"must be at most {_MAX_SAMPLES}"),
    ("temperature", lambda temperature: temperature >= 0.0, "must be 0 (greedy) or more"),
    ("top_p", lambda top_p: 0.0 < top_p <= 1.0, "must be above 0 and at most 1"),
    ("top_k", lambda top_k: top_k >= -1, "must be -1 or 0 (off) or a positive number"),
    ("min_p", lambda min_p: 0.0 <= min_p <= 1.0, "must be from 0 to 1"),
    ("max_tokens", lambda num_tokens: num_tokens >= 1, "must be 1 or more"),
    ("min_tokens", lambda num_tokens: num_tokens >= 0, "must be 0 or more"),
    ("logprobs", _is_num_logprobs, _LOGPROBS_RULE),
    ("prompt_logprob_start", lambda row: row >= 0, "must be 0 or more"),
    ("truncate_prompt_tokens", lambda length: length == -1 or length >= 1, _LENGTH_RULE),
    ("thinking_token_budget", lambda budget: budget >= 0, "must be 0 or more, or -1 for none"),
    ("stream_interval", lambda num_steps: num_steps >= 1, "must be 1 or more"),
    ("presence_penalty", _is_openai_penalty, "must be from -2 to 2"),
    ("frequency_penalty", _is_openai_penalty, "must be from -2 to 2"),
    ("repetition_penalty", lambda penalty: penalty > 0.0, "must be above 0"),
)
"""Key, check and rule; None passes, where a field may be None."""

_INTEGERS: Final = ("n", "top_k", "min_tokens")
_OPTIONAL_INTEGERS: Final = (
    *("best_of", "seed", "max_tokens", "logprobs", "prompt_logprobs"),
    *("prompt_logprob_start", "truncate_prompt_tokens", "stream_interval", "thinking_token_budget"),
)
_FLAGS: Final = (
    *("ignore_eos", "detokenize", "skip_special_tokens", "include_stop_str_in_output"),
    *("flat_logprobs", "spaces_between_special_tokens", "skip_clone"),
    *("return_sampling_mask", "return_routed_experts"),
)
_FLOATS: Final = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")

SAMPLING_KEYS: Final = tuple(
    dict.fromkeys(("n", "best_of", *[spec.name for spec in sent_fields(SamplingParams)])),
)
"""Every key of a row that is a sampling parameter, in the order of declaration except `best_of`."""

_SENT: Final = SAMPLING_KEYS
_LOCAL_DEFAULTS: Final = tuple((spec.name, spec.default) for spec in fields(SamplingParams) if spec.name not in _SENT)

SamplingParams.__struct_fields__ = tuple(spec.name for spec in fields(SamplingParams))


def _as_float(name: str, value: Any) -> float:
    number = plain_float(value)
    if number is None:
        raise ValueError(f"{name}={shown(value)} must be a number")
    if not math.isfinite(number):
        raise ValueError(f"{name}={shown(value)} must be a finite number")
    return number


def _as_integer(name: str, value: Any) -> int | None:
    number = plain_int(value)
    if number is None and (value is not None or name in _INTEGERS):
        raise ValueError(f"{name}={shown(value)} must be a whole number")
    if number is not None and number not in (INT65 if name == "seed" else INT64):
        raise ValueError(f"{name}={shown(value)} must fit 64 bits")
    return number


def _as_budget(name: str, value: Any) -> int | None:
    number = _as_integer(name, value)
    return None if number == -1 else number


def _as_flag(name: str, value: Any) -> bool:
    flag = plain_bool(value)
    if flag is None:
        raise ValueError(f"{name}={shown(value)} must be true or false")
    return flag


def _as_optional_flag(name: str, value: Any) -> bool | None:
    flag = plain_bool(value)
    if flag is None and value is not None:
        raise ValueError(f"{name}={shown(value)} must be true, false or null")
    return flag


def _as_stop_strings(name: str, value: Any) -> tuple[str, ...]:
    strings = (value,) if isinstance(value, str) else value if value is not None else ()
    if not isinstance(strings, list | tuple) or not all(isinstance(item, str) and item for item in strings):
        raise ValueError(f"{name}={shown(value)} must be a non-empty string or a list of non-empty strings")
    return _plain_texts(name, strings)


def _plain_texts(name: str, texts: Sequence[str]) -> tuple[str, ...]:
    plain = tuple([str.__str__(item) for item in texts])
    for item in plain:
        try:
            item.encode("utf-8")
        except UnicodeEncodeError:
            raise ValueError(f"{name}: {item!r} contains a lone surrogate, which UTF-8 cannot encode") from None
    return plain


def _as_salt(name: str, value: Any) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str) or not 0 < len(value) <= _MAX_SALT:
        raise ValueError(f"{name}={shown(value)} must be text of 1 to {_MAX_SALT} characters")
    return _plain_texts(name, (value,))[0]


def _as_bad_words(name: str, value: Any) -> tuple[str, ...]:
    """Unique words, in order."""
    words = _as_stop_strings(name, value)
    if not all(map(str.strip, words)):
        raise ValueError(f"{name}={shown(value)} must be words, not spaces")
    return tuple(dict.fromkeys(words))


def _as_bad_words_ids(name: str, value: Any) -> tuple[tuple[int, ...], ...]:
    sequences = value if value is not None else ()
    if not isinstance(sequences, list | tuple) or not all(
        isinstance(each, list | tuple) and each for each in sequences
    ):
        raise ValueError(f"{name}={shown(value)} must be a list of non-empty lists of token ids")
    return tuple(dict.fromkeys([_as_token_ids(name, item) for item in sequences]))


def _as_candidates(name: str, value: Any) -> tuple[tuple[int, ...], ...] | None:
    """Lists of ids, one for all rows or one for each; numpy's arrays too. -1 fills up a list."""
    if value is None:
        return None
    rows = value.tolist() if isinstance(value, np.ndarray) else value
    if not isinstance(rows, list | tuple) or not rows:
        raise ValueError(f"{name}={shown(value)} must be a list of token ids, or one list for each row")
    if not any(isinstance(each, list | tuple) for each in rows):
        rows = [rows]
    if not all(isinstance(each, list | tuple) for each in rows):
        raise ValueError(f"{name}={shown(value)} must be a list of token ids, or one list for each row")
    lists = tuple([_as_token_ids(name, [each for each in row if each != -1]) for row in rows])
    longest = max(map(len, lists))
    if not 1 <= longest <= MAX_SCORES:
        raise ValueError(f"{name}: the longest list has {longest} ids: give from 1 to {MAX_SCORES}")
    return lists


def _as_logprob_token_ids(name: str, value: Any) -> tuple[int, ...] | None:
    """An empty list is None."""
    ids = _as_token_ids(name, value)
    if len(ids) > MAX_LOGPROB_IDS:
        raise ValueError(f"{name} has {len(ids)} ids: give at most {MAX_LOGPROB_IDS}")
    return ids or None


def _as_allowed_token_ids(name: str, value: Any) -> tuple[int, ...] | None:
    """Sorted, without duplicates."""
    if value is None:
        return None
    ids = _as_token_ids(name, value)
    if not ids:
        raise ValueError(f"{name} is empty: no token could be sampled; leave it out to allow all")
    return tuple(sorted(dict.fromkeys(ids)))


def _as_output_kind(name: str, value: Any) -> RequestOutputKind:
    """Accepts another library's enumeration with the same names."""
    if isinstance(value, Enum) and value.name in RequestOutputKind.__members__:
        return RequestOutputKind[value.name]
    number = plain_int(value)
    if number is None or number not in list(RequestOutputKind):
        known = ", ".join(RequestOutputKind.__members__)
        raise ValueError(f"{name}={shown(value)} must be a RequestOutputKind: {known}")
    return RequestOutputKind(number)


def _as_token_ids(name: str, value: Any) -> tuple[int, ...]:
    ids = value if value is not None else ()
    if not isinstance(ids, list | tuple):
        raise ValueError(f"{name}={shown(value)} must be a list of token ids")
    plain = tuple([plain_int(item) for item in ids])
    for item, number in zip(ids, plain, strict=True):
        if number is None or not 0 <= number <= INT64[-1]:
            raise ValueError(f"{name}: {shown(item)} must be a token id, a whole number from 0 to {INT64[-1]}")
    return cast("tuple[int, ...]", plain)


def _as_logit_bias(name: str, value: Any) -> tuple[tuple[int, float], ...]:
    """Pairs sorted by token id; OpenAI's format has the ids as strings."""
    pairs = list(value.items()) if isinstance(value, Mapping) else value if value is not None else ()
    if not isinstance(pairs, list | tuple) or not all(
        isinstance(each, list | tuple) and len(each) == 2 for each in pairs
    ):
        raise ValueError(f"{name}={shown(value)} must map token ids to numbers from -100 to 100")
    biases: dict[int, float] = {}
    for key, bias in pairs:
        is_digits = isinstance(key, str) and key.isascii() and key.isdigit() and len(key) <= 10
        token_id = int(key) if is_digits else _as_token_ids(name, (key,))[0]
        number = _as_float(f"{name}[{token_id}]", bias)
        if not -100.0 <= number <= 100.0:
            raise ValueError(f"{name}[{token_id}]={shown(bias)} must be from -100 to 100")
        biases[token_id] = number
    return tuple(sorted(biases.items()))


def _as_rules(_: str, value: Any) -> TokenRules | None:
    return as_token_rules(value)


def _as_constraint(_: str, value: Any) -> StructuredOutputsParams | None:
    return as_structured_outputs(value)


_CONVERTERS: Final[Mapping[str, Callable[[str, Any], Any]]] = {
    "stop": _as_stop_strings,
    "stop_token_ids": _as_token_ids,
    "logit_bias": _as_logit_bias,
    "bad_words": _as_bad_words,
    "bad_words_ids": _as_bad_words_ids,
    "allowed_token_ids": _as_allowed_token_ids,
    "cache_salt": _as_salt,
    "logprob_token_ids": _as_logprob_token_ids,
    "prompt_logprob_token_ids": _as_candidates,
    "output_kind": _as_output_kind,
    "structured_outputs": _as_constraint,
    "guided_decoding": _as_constraint,
    "token_rules": _as_rules,
    "repetition_detection": as_repetition_detection,
    "skip_reading_prefix_cache": _as_optional_flag,
    **dict.fromkeys((*_INTEGERS, *_OPTIONAL_INTEGERS), _as_integer),
    "thinking_token_budget": _as_budget,
    **dict.fromkeys(_FLAGS, _as_flag),
    **dict.fromkeys(_FLOATS, _as_float),
}
"""A field's value is normalised, or rejected with a ValueError, when it is set: `(name, value)` -> value."""
