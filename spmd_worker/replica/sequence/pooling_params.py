"""Pooling parameters of a row: it returns a vector or scores, of the row or of each token, instead of tokens.

A pooling row is a request like others: scheduled, chunked and preempted as a prompt is. At its end nothing is sampled:
the last stage computes its vector, whose digest replaces the sampled id, so that ranks agree on vectors as they do on
ids, and a log contains them.
"""

from dataclasses import dataclass, replace
from functools import cache
from hashlib import blake2b
from typing import Any, Final

from spmd_worker.base.config.plain_values import plain_bool, plain_int, plain_text, shown
from spmd_worker.base.names import with_keyword_hints
from spmd_worker.model_config.late_interaction import INPUT_TYPES
from spmd_worker.model_config.pooling import TOKEN_TASKS, VECTORS, PoolingConfig
from spmd_worker.replica.sequence.late_chunking import LateChunkingParams, as_late_chunking
from spmd_worker.replica.sequence.record_checks import INT64
from spmd_worker.replica.sequence.sampling_params import SamplingParams

TASKS: Final = ("embed", "classify", "score", "reward", *TOKEN_TASKS)
"""Supported values of vLLM's `pooling_task`."""

MAX_TOKEN_NUMBERS: Final = 1 << 24
"""Most numbers that all tokens of a row have together, 64 MiB: they are in one message between ranks, and in a line of
JSON.
"""

MAX_STEP_NUMBERS: Final = 1 << 27
"""Most numbers of the tokens of a step, 512 MiB. Those that end in it and one row's earlier ones are in one message."""

_NUMBERS: Final = ("dimensions", "truncate_prompt_tokens", "num_first_tokens", "num_attended_tokens")
_FLAGS: Final = ("normalize", "use_activation", "skip_reading_prefix_cache")
_TYPES: Final = (
    *[(name, plain_int, "a whole number") for name in _NUMBERS],
    *[(name, plain_bool, "true, false or null") for name in _FLAGS],
)

_FOR_TOKENS: Final = "a row has the numbers of all its tokens: leave it out"
_UNSUPPORTED: Final = {
    "__init__": {
        **dict.fromkeys(("activation", "softmax"), "its newer name is use_activation"),
        **dict.fromkeys(("step_tag_id", "returned_token_ids", "late_interaction_params"), _FOR_TOKENS),
        "requires_token_ids": "it is vLLM's own: leave it out",
        "extra_kwargs": "it has no effect: leave it out",
        "output_kind": "a pooling row has one output: leave it out",
    }
}
"""Keywords of vLLM, and the alternative."""


@with_keyword_hints(_UNSUPPORTED)
@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingParams:
    """Pooling of one row. Names and meanings follow vLLM's.

    `task` is one of `TASKS`; None is the model's own. `dimensions` cuts a vector to its first numbers, before it is
    normalised. `normalize` and `use_activation` default to the model's own. `truncate_prompt_tokens` k keeps the last k
    tokens, -1 as many as the model accepts; of an encoder's texts the first ones, special tokens included.
    `skip_reading_prefix_cache`: the row uses nothing from the cache. `num_first_tokens`: the row is a pair of texts,
    for a model with token types: this many tokens, before truncation, belong to the first text.

    `input_type`, "query" or "document", is for models whose tokens' vectors are compared (late interaction): the text
    is written as the model's queries or documents are; None leaves it as it is. `num_attended_tokens`: the row is a
    query of token ids for such a model, whose tokens attend to its first so many.

    `late_chunking_params`, with token_embed: the row has a vector for each chunk of so many tokens, the mean of their
    states, which is then cut and normalised; a mapping too.
    """

    task: str | None = None
    dimensions: int | None = None
    normalize: bool | None = None
    use_activation: bool | None = None
    truncate_prompt_tokens: int | None = None
    skip_reading_prefix_cache: bool | None = None
    num_first_tokens: int | None = None
    input_type: str | None = None
    num_attended_tokens: int | None = None
    late_chunking_params: LateChunkingParams | None = None

    def __post_init__(self) -> None:
        """Raises ValueError naming field, value and rule."""
        if self.task is not None:
            task = plain_text(self.task)
            if task not in TASKS:
                raise ValueError(f"task={shown(self.task)} must be one of {', '.join(TASKS)}")
            object.__setattr__(self, "task", task)
        if self.input_type is not None:
            given = plain_text(self.input_type)
            if given not in INPUT_TYPES:
                raise ValueError(f"input_type={shown(self.input_type)} must be one of {', '.join(INPUT_TYPES)}")
            object.__setattr__(self, "input_type", given)
        object.__setattr__(self, "late_chunking_params", as_late_chunking(self.late_chunking_params))
        for name, plain, rule in _TYPES:
            value = getattr(self, name)
            found = plain(value)
            if found is None and value is not None:
                raise ValueError(f"{name}={shown(value)} must be {rule}")
            object.__setattr__(self, name, found)
        for name in _NUMBERS:
            if getattr(self, name) is not None and getattr(self, name) not in INT64:
                raise ValueError(f"{name}={shown(getattr(self, name))} must fit 64 bits")
        if self.dimensions is not None and not 1 <= self.dimensions < 2**31:
            raise ValueError(f"dimensions={self.dimensions} must be 1 or more")
        if self.num_first_tokens is not None and not 0 <= self.num_first_tokens < 2**31:
            raise ValueError(f"num_first_tokens={self.num_first_tokens} must be 0 or more")
        if self.num_attended_tokens is not None and not 1 <= self.num_attended_tokens < 2**31:
            raise ValueError(f"num_attended_tokens={self.num_attended_tokens} must be 1 or more")
        length = self.truncate_prompt_tokens
        if length is not None and length != -1 and not 1 <= length < 2**31:
            raise ValueError(f"truncate_prompt_tokens={length} must be a number of tokens, or -1 for the model's")

    @property
    def is_for_tokens(self) -> bool:
        """Whether the row has a vector, or scores, for each of its tokens, or a vector for each chunk of them."""
        return self.task in TOKEN_TASKS

    def num_vectors(self, num_tokens: int) -> int:
        """Number of the vectors of a row of so many tokens that is for tokens."""
        size = 1 if self.late_chunking_params is None else self.late_chunking_params.chunk_size
        return -(-num_tokens // size)

    @property
    def is_resolved(self) -> bool:
        """Whether every field is set, as `resolve_pooling` leaves it."""
        return self.task in ("embed", "classify", *TOKEN_TASKS) and None not in (self.normalize, self.use_activation)


def check_task(task: str, config: PoolingConfig | None) -> None:
    """Raise ValueError for a task that this run does not support, naming the runner that does."""
    if config is None:
        raise ValueError(
            f"{task} is not supported: this run generates text (model.runner=generate): set model.runner=pooling"
        )
    if task not in config.tasks:
        needed = {
            "token_classify": "; scores of tokens need a model whose config.json names a *ForTokenClassification",
            "token_embed": "; vectors of tokens need an embedding model, or one that generates",
        }
        does = ", ".join(config.tasks)
        raise ValueError(f"{task} is not supported: this model does {does}{needed.get(task, '')}")


def resolve_pooling(params: PoolingParams, config: PoolingConfig | None) -> PoolingParams:
    """`params` with every default resolved. Raises ValueError for a task that this run does not support."""
    task = params.task or (config.task if config is not None else "pooling")
    check_task(task, config)
    assert config is not None, task
    if params.num_first_tokens is not None and not config.has_token_types:
        raise ValueError(f"num_first_tokens={params.num_first_tokens} is not supported: this model has no token types")
    if params.late_chunking_params is not None:
        given = f"late_chunking_params.chunk_size={params.late_chunking_params.chunk_size}"
        if task != "token_embed":
            raise ValueError(f"{given} is for token_embed, and the task is {task}: set task, or leave it out")
        if params.input_type is not None or params.num_attended_tokens is not None:
            raise ValueError(f"{given} with a query or a document: their vectors are of tokens: leave one out")
    for name in ("input_type", "num_attended_tokens"):
        if getattr(params, name) is not None and config.late is None:
            raise ValueError(
                f"{name}={shown(getattr(params, name))} is not supported: this model does not compare vectors of "
                f"tokens (late interaction): leave it out"
            )
    if params.num_attended_tokens is not None and not config.is_encoder:
        raise ValueError(f"num_attended_tokens={params.num_attended_tokens} is not supported: the model is a decoder")
    if params.dimensions is not None:
        _check_dimensions(params.dimensions, task, config)
    for name, other in (("normalize", "scores"), ("use_activation", "vectors")):
        if getattr(params, name) is not None and (config.task in VECTORS) == (other == "vectors"):
            raise ValueError(f"{name}={getattr(params, name)} is not supported: this model gives {other}: leave it out")
    is_normalized = config.is_normalized or (params.task == "token_embed" and config.task == "embed")
    return replace(
        params,
        task=params.task if params.is_for_tokens else config.task,
        normalize=is_normalized if params.normalize is None else params.normalize,
        use_activation=task != "reward" if params.use_activation is None else params.use_activation,
        truncate_prompt_tokens=None,
    )


def _check_dimensions(dimensions: int, task: str, config: PoolingConfig) -> None:
    if task in TOKEN_TASKS and config.late is None:
        raise ValueError(f"dimensions={dimensions} is not supported with {task}, which gives all numbers: leave it out")
    if config.task not in VECTORS:
        raise ValueError(f"dimensions={dimensions} is not supported: this model does {', '.join(config.tasks)}")
    allowed = config.matryoshka_dimensions
    if dimensions > config.size:
        raise ValueError(f"dimensions={dimensions} is more than the {config.size} of this model")
    if config.is_matryoshka or dimensions in (allowed or (config.size,)):
        return
    if allowed:
        raise ValueError(f"dimensions={dimensions} must be one of {', '.join(map(str, allowed))} (config.json)")
    raise ValueError(
        f"dimensions={dimensions} is not supported: config.json does not say that this model was trained for it "
        f"(matryoshka_dimensions, is_matryoshka): set model.allow_any_dimensions=true"
    )


def pooled_sampling(params: PoolingParams, config: PoolingConfig) -> SamplingParams:
    """Placeholder for the sampling parameters of a pooling row: one row of work that samples nothing."""
    needs_all_tokens = config.needs_all_tokens or params.is_for_tokens
    return _placeholder(needs_all_tokens or bool(params.skip_reading_prefix_cache))


@cache
def _placeholder(skips_cache: bool) -> SamplingParams:
    skips = skips_cache or None
    return SamplingParams(temperature=0.0, max_tokens=1, detokenize=False, skip_reading_prefix_cache=skips).frozen()


def truncated_row(token_ids: tuple[int, ...], length: int | None, max_length: int) -> tuple[int, ...]:
    """Last tokens of a row, by `truncate_prompt_tokens`."""
    return token_ids if length is None else token_ids[-(max_length if length == -1 else length) :]


def vector_digest(vector: bytes) -> int:
    """Replacement of a sampled id: 63 bits of a digest of a vector's bytes, never negative."""
    digest = blake2b(vector, digest_size=8, person=b"spmd-vector").digest()
    return int.from_bytes(digest, "little") >> 1


def check_pooling(pooling: Any) -> None:
    """Raise TypeError for anything but PoolingParams."""
    if not isinstance(pooling, PoolingParams):
        raise TypeError(f"pooling_params is a {type(pooling).__name__}: give PoolingParams")
