"""What a row asks of the sampler, checked on construction.

Knows nothing about logits, tokenizers or ranks: whether a token id lies inside the vocabulary is checked at admission,
where the vocabulary is known (`check_vocabulary`).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Final

from spmd_worker.sequence.record_checks import INT64, Integer65

GREEDY_TEMPERATURE: Final = 1e-5
"""At or below this temperature sampling is greedy: dividing by less would overflow float32 logits."""

MAX_LOGPROBS: Final = 64
"""The most alternatives `logprobs` and `prompt_logprobs` may ask for."""

_MAX_SAMPLES: Final = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the tokens of one row are chosen and when they end. Names and meanings follow vLLM's.

    `temperature` 0 is greedy. `top_k` 0 and -1, `top_p` 1, `min_p` 0 switch their filter off. `seed` names the row's
    own random stream; without it the job's seed and the row's key do. `logprobs` k returns the log-probability of the
    sampled token and of the k likeliest.

    `best_of` samples run and the `n` of the highest cumulative log-probability are returned, best first; of equal ones
    the earlier sample is better. None, or the same number as `n`, chooses nothing: `n` samples in their own order.
    """

    n: int = 1
    best_of: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: Integer65 | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = field(default=())
    detokenize: bool = True
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        """Normalise lists and mappings to tuples, then check every rule; ValueError names key, value and rule."""
        object.__setattr__(self, "stop", _as_stop_strings(self.stop))
        object.__setattr__(self, "stop_token_ids", _as_token_ids("stop_token_ids", self.stop_token_ids))
        object.__setattr__(self, "logit_bias", _as_logit_bias(self.logit_bias))
        for name in ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"):
            object.__setattr__(self, name, _as_float(name, getattr(self, name)))
        self._check_types()
        self._check_ranges()

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is taken and no random number is drawn."""
        return self.temperature <= GREEDY_TEMPERATURE

    @property
    def num_sequences(self) -> int:
        """How many samples run."""
        return self.n if self.best_of is None else self.best_of

    @property
    def is_ranked(self) -> bool:
        """Whether more samples run than are returned, so that their log-probabilities choose."""
        return self.best_of is not None and self.best_of > self.n

    @property
    def needs_logprobs(self) -> bool:
        """Whether the log-probabilities of sampled tokens are computed: to be returned, or to rank the samples."""
        return self.logprobs is not None or self.is_ranked

    @property
    def has_penalties(self) -> bool:
        """Whether the logits depend on which tokens came before."""
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0

    @property
    def has_filters(self) -> bool:
        """Whether top-k, top-p or min-p cut the distribution."""
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise ValueError where a token id lies outside `[0, vocab_size)`."""
        for name, ids in (("stop_token_ids", self.stop_token_ids), ("logit_bias", [i for i, _ in self.logit_bias])):
            for token_id in ids:
                if token_id >= vocab_size:
                    raise ValueError(f"{name}: token id {token_id} is outside the vocabulary of {vocab_size} tokens")

    def _check_types(self) -> None:
        integers = ("n", "top_k", "min_tokens")
        optional_integers = ("best_of", "seed", "max_tokens", "logprobs", "prompt_logprobs")
        for name in integers + optional_integers:
            value = getattr(self, name)
            if value is None and name in optional_integers:
                continue
            if isinstance(value, bool) or not isinstance(value, int):
                raise ValueError(f"{name}={value!r} must be a whole number")
            if name != "seed" and value not in INT64:
                raise ValueError(f"{name}={value} must fit 64 bits")
        for name in ("ignore_eos", "detokenize", "skip_special_tokens", "include_stop_str_in_output"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}={getattr(self, name)!r} must be true or false")

    def _check_ranges(self) -> None:
        for name, is_valid, rule in self._rules():
            if not is_valid:
                raise ValueError(f"{name}={getattr(self, name)} {rule}")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens={self.min_tokens} must not exceed max_tokens={self.max_tokens}")
        if self.stop and not self.detokenize:
            raise ValueError(f"stop={list(self.stop)!r} needs detokenize=true: stop strings are found in the text")

    def _rules(self) -> tuple[tuple[str, bool, str], ...]:
        return (
            ("n", 1 <= self.n <= _MAX_SAMPLES, f"must be from 1 to {_MAX_SAMPLES}"),
            ("best_of", self.num_sequences >= self.n, f"must be at least n={self.n}: {_BEST_OF_HINT}"),
            ("best_of", self.num_sequences <= _MAX_SAMPLES, f"must be at most {_MAX_SAMPLES}"),
            ("temperature", self.temperature >= 0.0, "must be 0 (greedy) or more"),
            ("top_p", 0.0 < self.top_p <= 1.0, "must be above 0 and at most 1"),
            ("top_k", self.top_k >= -1, "must be -1 or 0 (off) or a positive number"),
            ("min_p", 0.0 <= self.min_p <= 1.0, "must be from 0 to 1"),
            ("seed", self.seed is None or -(2**63) <= self.seed < 2**64, "must fit 64 bits"),
            ("max_tokens", self.max_tokens is None or self.max_tokens >= 1, "must be 1 or more"),
            ("min_tokens", self.min_tokens >= 0, "must be 0 or more"),
            ("logprobs", self.logprobs is None or 0 <= self.logprobs <= MAX_LOGPROBS, _LOGPROBS_RULE),
            (
                "prompt_logprobs",
                self.prompt_logprobs is None or 0 <= self.prompt_logprobs <= MAX_LOGPROBS,
                _LOGPROBS_RULE,
            ),
            ("presence_penalty", -2.0 <= self.presence_penalty <= 2.0, "must be from -2 to 2"),
            ("frequency_penalty", -2.0 <= self.frequency_penalty <= 2.0, "must be from -2 to 2"),
            ("repetition_penalty", self.repetition_penalty > 0.0, "must be above 0"),
        )


_LOGPROBS_RULE: Final = f"must be from 0 to {MAX_LOGPROBS}"
_BEST_OF_HINT: Final = "raise best_of, lower n, or leave best_of out, which runs n samples and returns them all"

SAMPLING_KEYS: Final = tuple(spec.name for spec in fields(SamplingParams))
"""Every key of a row that is a sampling parameter, in declaration order."""


def _as_float(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name}={value!r} must be a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"{name}={value!r} must be a finite number")
    return number


def _as_stop_strings(value: Any) -> tuple[str, ...]:
    strings = (value,) if isinstance(value, str) else value if value is not None else ()
    if not isinstance(strings, list | tuple) or not all(isinstance(item, str) and item for item in strings):
        raise ValueError(f"stop={value!r} must be a non-empty string or a list of non-empty strings")
    for item in strings:
        try:
            item.encode("utf-8")
        except UnicodeEncodeError:
            raise ValueError(f"stop: {item!r} holds half of a surrogate pair, which UTF-8 cannot say") from None
    return tuple(strings)


def _as_token_ids(name: str, value: Any) -> tuple[int, ...]:
    ids = value if value is not None else ()
    if not isinstance(ids, list | tuple):
        raise ValueError(f"{name}={value!r} must be a list of token ids")
    for item in ids:
        if isinstance(item, bool) or not isinstance(item, int) or item < 0 or item not in INT64:
            raise ValueError(f"{name}: {item!r} must be a token id, a whole number from 0 to {INT64[-1]}")
    return tuple(ids)


def _as_logit_bias(value: Any) -> tuple[tuple[int, float], ...]:
    """Pairs sorted by token id; OpenAI's form has the ids as strings."""
    if value is None:
        return ()
    pairs = list(value.items()) if isinstance(value, Mapping) else value
    if not isinstance(pairs, list | tuple) or not all(
        isinstance(pair, list | tuple) and len(pair) == 2 for pair in pairs
    ):
        raise ValueError(f"logit_bias={value!r} must map token ids to numbers from -100 to 100")
    biases: dict[int, float] = {}
    for key, bias in pairs:
        token_id = _as_bias_token(key)
        number = _as_float(f"logit_bias[{token_id}]", bias)
        if not -100.0 <= number <= 100.0:
            raise ValueError(f"logit_bias[{token_id}]={bias} must be from -100 to 100")
        biases[token_id] = number
    return tuple(sorted(biases.items()))


def _as_bias_token(key: Any) -> int:
    if isinstance(key, str) and key.isascii() and key.isdigit() and len(key) <= 10:
        return int(key)
    return _as_token_ids("logit_bias", (key,))[0]
