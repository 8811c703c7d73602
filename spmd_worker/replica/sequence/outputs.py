"""Outputs of the API: requests and their completions, in vLLM's names."""

from dataclasses import dataclass, field
from typing import Any, Final, Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from spmd_worker.replica.sequence.late_chunking import LateChunkingMetadata
from spmd_worker.replica.sequence.lora_request import LoRARequest
from spmd_worker.replica.sequence.prompt_scores import PromptScores
from spmd_worker.replica.sequence.sampling_mask import SamplingMask

NON_FINITE_LOGITS: Final = "non_finite_logits"
"""`RequestOutput.error_code` if the model's logits were NaN or infinite."""

GRAMMAR_FAILED: Final = "grammar_failed"
"""`RequestOutput.error_code` if an answer's grammar allowed no token, or exceeded its limits."""
NON_FINITE_VECTOR: Final = "non_finite_vector"
"""`RequestOutput.error_code` if a row's vector was NaN or infinite."""


class Logprob(NamedTuple):
    """Log-probability of one token, its rank (1 is the most probable) and, with a tokenizer, its text and bytes.

    `decoded_token` is its addition to the preceding text, "" for the first parts of a character, and `token_bytes` are
    its own bytes, as numbers. A token that is left out of the text (skipped special tokens, text cut off by a stop
    string) has its name and no bytes.
    """

    logprob: float
    rank: int
    decoded_token: str | None = None
    token_bytes: tuple[int, ...] | None = None


TokenLogprobs = dict[int, Logprob]
"""One position: token id -> Logprob. The sampled (or prompt) token comes first, then the top-k in order."""


@dataclass(slots=True)
class RequestMetrics:
    """Times of a request, measured by the rank that added it, in vLLM's names. `arrival_time` is in seconds since the
    epoch, `first_token_latency` in seconds after it; the others are seconds of this process's monotonic clock, 0 for
    events that have not happened.
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
    """One of the `n` completions of a request. `finish_reason` is "stop", "length" or None while it is running.

    `cumulative_logprob` is None unless the row asked for log-probabilities or `best_of` ranked its samples.
    `stop_reason` is the stop string or stop token id that ended it, None for the end-of-sequence token.
    `weight_versions` are spans (first of `token_ids`, version of the weights that sampled it and those after it).
    `sampling_mask` has the ids that could have been sampled at each token, if the row asked. `routed_experts`, if it
    asked, are the experts of all tokens but the last, which no layer has computed: uint8, or uint16 of more than 256,
    [tokens - 1, sparse layers, experts of a token]; None before the end. Outputs are compared without versions and
    experts.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    lora_request: LoRARequest | None = None
    weight_versions: list[tuple[int, int]] = field(default_factory=list, compare=False)
    sampling_mask: SamplingMask | None = None
    routed_experts: NDArray[Any] | None = field(default=None, compare=False)

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestOutput:
    """A request with its completions. A rejected request, or one that could not be completed, has `error` (a sentence),
    `error_code` (its kind) and no outputs. A pooling request has `vector` instead of completions, or `token_vectors`,
    float32 [tokens of the prompt, numbers of each].

    `metrics` differ from run to run, so outputs are compared without them; None where another rank's replica answered.
    `lora_request` is the adapter of the call. `prompt` and `prompt_token_ids` of an encoder-decoder model are those of
    its decoder; the text that its encoder reads is `encoder_prompt`, None for audio. `num_cached_tokens` are of both.
    `kv_transfer_params` is vLLM's name for a feature that does not exist here. `prompt_weight_versions` are spans
    (first prompt token, version) of the weights that computed `prompt_logprobs`, or the vector; None without either.
    `prompt_scores` are log-probabilities of the prompt as arrays (`prompt_logprob_token_ids`, `prompt_logprob_start`).
    `prompt_routed_experts` are the experts of its tokens, as `CompletionOutput.routed_experts`. `continued` is the text
    of the message that the answer continues (`continue_final_message` of `LLM.chat`), None if it begins one.
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
    lora_request: LoRARequest | None = None
    encoder_prompt: str | None = None
    encoder_prompt_token_ids: list[int] | None = None
    kv_transfer_params: None = None
    vector: list[float] | None = None
    token_vectors: NDArray[np.float32] | None = field(default=None, compare=False)
    prompt_weight_versions: list[tuple[int, int]] | None = field(default=None, compare=False)
    prompt_scores: PromptScores | None = None
    prompt_routed_experts: NDArray[Any] | None = field(default=None, compare=False)
    continued: str | None = field(default=None, compare=False)

    @property
    def prompt_token_id_logprobs(self) -> NDArray[np.float32] | None:
        """vLLM's name for the log-probabilities of `prompt_logprob_token_ids`, [rows, ids]."""
        return None if self.prompt_scores is None else self.prompt_scores.candidate_logprobs

    @property
    def pooled(self) -> list[Any]:
        """Numbers of a pooling request that has ended without an error: of the row, or a list for each token."""
        if self.token_vectors is not None:
            numbers: list[Any] = self.token_vectors.tolist()
            return numbers
        assert self.vector is not None, self.request_id
        return self.vector

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt, with those of a text that an encoder reads."""
        return len(self.encoder_prompt_token_ids or ()) + len(self.prompt_token_ids)


@dataclass(slots=True)
class PoolingOutput:
    """`LLM.encode`: the vector, or the scores, of one row; for `token_embed` and `token_classify` a list of them, one
    for each token of the prompt.
    """

    data: list[Any]


@dataclass(slots=True)
class EmbeddingOutput:
    """Embedding of a row (`LLM.embed`)."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        return len(self.embedding)


@dataclass(slots=True)
class ClassificationOutput:
    """`LLM.classify`: a row's scores, one per label, after the model's activation."""

    probs: list[float]

    @property
    def num_classes(self) -> int:
        return len(self.probs)


@dataclass(slots=True)
class ScoringOutput:
    """Score of one pair of texts (`LLM.score`)."""

    score: float


Pooled = TypeVar("Pooled", PoolingOutput, EmbeddingOutput, ClassificationOutput, ScoringOutput)


@dataclass(slots=True)
class PoolingRequestOutput(Generic[Pooled]):
    """Output of a pooling row, in vLLM's names. `num_cached_tokens` of its tokens were found in the prefix cache;
    `late_chunking` are the ranges of its vectors.
    """

    request_id: str
    outputs: Pooled
    prompt_token_ids: list[int]
    num_cached_tokens: int = 0
    finished: bool = True
    late_chunking: LateChunkingMetadata | None = None


@dataclass(slots=True)
class EmbeddingRequestOutput(PoolingRequestOutput[EmbeddingOutput]):
    """Output of `LLM.embed`."""


@dataclass(slots=True)
class ClassificationRequestOutput(PoolingRequestOutput[ClassificationOutput]):
    """Output of `LLM.classify`."""


@dataclass(slots=True)
class ScoringRequestOutput(PoolingRequestOutput[ScoringOutput]):
    """Output of `LLM.score`."""
