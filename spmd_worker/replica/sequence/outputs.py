"""What a caller gets back: requests and their completions, in the field's usual names."""

from dataclasses import dataclass, field
from typing import Final, Generic, NamedTuple, TypeVar

NON_FINITE_LOGITS: Final = "non_finite_logits"
"""`RequestOutput.error_code` where the model's logits were NaN or infinite."""

GRAMMAR_FAILED: Final = "grammar_failed"
"""`RequestOutput.error_code` where the form of an answer let no token follow, or took too much to say which."""
NON_FINITE_VECTOR: Final = "non_finite_vector"
"""The same where a row's vector was."""


class Logprob(NamedTuple):
    """Log-probability of one token, its rank (1 is the likeliest) and, when there is a tokenizer, its text and bytes.

    `decoded_token` is what it adds to the text before it, "" for the first parts of a character, and `token_bytes` are
    its own, as numbers. A token that is left out of the text (special ones that are skipped, what a stop string cut
    off) has its name and no bytes.
    """

    logprob: float
    rank: int
    decoded_token: str | None = None
    token_bytes: tuple[int, ...] | None = None


TokenLogprobs = dict[int, Logprob]
"""One position: token id -> Logprob. The sampled (or prompt) token comes first, then the likeliest in order."""


@dataclass(slots=True)
class RequestMetrics:
    """When things happened to a request, as the rank saw it that added it: vLLM's names. `arrival_time` is in seconds
    since the epoch, `first_token_latency` in seconds after it; the others are seconds of this process's monotonic
    clock, 0 for what has not happened.
    """

    num_generation_tokens: int = 0
    arrival_time: float = 0.0
    queued_ts: float = 0.0
    scheduled_ts: float = 0.0
    first_token_ts: float = 0.0
    last_token_ts: float = 0.0
    first_token_latency: float = 0.0


@dataclass(slots=True)
class CompletionOutput:
    """One of the `n` completions of a request. `finish_reason` is "stop", "length" or None while it runs.

    `cumulative_logprob` is None unless the row asked for log-probabilities or `best_of` ranked its samples.
    `stop_reason` is the stop string or stop token id that ended it, None for the end-of-sequence token.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    lora_request: None = None

    def finished(self) -> bool:
        """Whether it has ended."""
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestOutput:
    """A request with its completions. One that was refused, or could not be answered to its end, has `error`, what is
    the matter, `error_code`, its kind in one word, and no outputs. One that was pooled has `vector` in place of
    completions.

    `metrics` differ from run to run, so that outputs are compared without them; None where another rank's replica
    answered. `lora_request`, `encoder_prompt`, `encoder_prompt_token_ids` and `kv_transfer_params` are vLLM's names for
    what does not exist here.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput] = field(default_factory=list)
    finished: bool = False
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    num_cached_tokens: int = 0
    error: str | None = None
    error_code: str | None = None
    metrics: RequestMetrics | None = field(default=None, compare=False)
    lora_request: None = None
    encoder_prompt: None = None
    encoder_prompt_token_ids: None = None
    kv_transfer_params: None = None
    vector: list[float] | None = None


@dataclass(slots=True)
class PoolingOutput:
    """`LLM.encode`: the vector, or the scores, of one row."""

    data: list[float]


@dataclass(slots=True)
class EmbeddingOutput:
    """`LLM.embed`."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        """Numbers of the vector."""
        return len(self.embedding)


@dataclass(slots=True)
class ClassificationOutput:
    """`LLM.classify`: what the model's activation makes of a row's scores, one for each label."""

    probs: list[float]

    @property
    def num_classes(self) -> int:
        """Labels."""
        return len(self.probs)


@dataclass(slots=True)
class ScoringOutput:
    """`LLM.score`: of one pair of texts."""

    score: float


Pooled = TypeVar("Pooled", PoolingOutput, EmbeddingOutput, ClassificationOutput, ScoringOutput)


@dataclass(slots=True)
class PoolingRequestOutput(Generic[Pooled]):
    """A row that was pooled: vLLM's names. `num_cached_tokens` of its tokens were found in the prefix cache."""

    request_id: str
    outputs: Pooled
    prompt_token_ids: list[int]
    num_cached_tokens: int = 0
    finished: bool = True


@dataclass(slots=True)
class EmbeddingRequestOutput(PoolingRequestOutput[EmbeddingOutput]):
    """Of `LLM.embed`."""


@dataclass(slots=True)
class ClassificationRequestOutput(PoolingRequestOutput[ClassificationOutput]):
    """Of `LLM.classify`."""


@dataclass(slots=True)
class ScoringRequestOutput(PoolingRequestOutput[ScoringOutput]):
    """Of `LLM.score`."""
