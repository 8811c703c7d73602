"""Pooling parameters of a row: it returns a vector or scores instead of tokens.

A pooling row is a request like others: scheduled, chunked and preempted as a prompt is. At its end nothing is sampled:
the last stage computes its vector, whose digest replaces the sampled id, so that ranks agree on vectors as they do on
ids, and a log contains them.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from hashlib import blake2b
from typing import Any, Final

from spmd_worker.base.config.plain_values import plain_bool, plain_int, plain_text, shown
from spmd_worker.base.names import with_keyword_hints
from spmd_worker.model_config.pooling import PoolingConfig
from spmd_worker.replica.sequence.record_checks import INT64
from spmd_worker.replica.sequence.sampling_params import SamplingParams

TASKS: Final = ("embed", "classify", "score", "reward")
"""Supported values of vLLM's `pooling_task`."""

_NUMBERS: Final = ("dimensions", "truncate_prompt_tokens", "num_first_tokens")
_FLAGS: Final = ("normalize", "use_activation", "skip_reading_prefix_cache")
_OTHER_TASKS: Final = ("token_embed", "token_classify", "plugin")


_FOR_TOKENS: Final = "one vector for each row is given, not one for each token: leave it out"
_NOT_HERE: Final = {
    "__init__": {
        **dict.fromkeys(("activation", "softmax"), "its newer name is use_activation"),
        **dict.fromkeys(("step_tag_id", "returned_token_ids", "late_interaction_params"), _FOR_TOKENS),
        "requires_token_ids": "it is vLLM's own: leave it out",
        "extra_kwargs": "nothing here reads it: leave it out",
        "output_kind": "a row that is pooled has one output: leave it out",
    }
}
"""Keywords of vLLM, and the alternative."""


@with_keyword_hints(_NOT_HERE)
@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingParams:
    """Pooling of one row. Names and meanings follow vLLM's.

    `task` is one of `TASKS`; None is the model's own. `dimensions` cuts a vector to its first numbers, before it is
    normalised. `normalize` and `use_activation` default to the model's own. `truncate_prompt_tokens` k keeps the last k
    tokens, -1 as many as the model accepts; of an encoder's texts the first ones, special tokens included.
    `skip_reading_prefix_cache`: the row uses nothing from the cache. `num_first_tokens`: the row is a pair of texts,
    for a model with token types: this many tokens, before truncation, belong to the first text.
    """

    task: str | None = None
    dimensions: int | None = None
    normalize: bool | None = None
    use_activation: bool | None = None
    truncate_prompt_tokens: int | None = None
    skip_reading_prefix_cache: bool | None = None
    num_first_tokens: int | None = None

    def __post_init__(self) -> None:
        """Raises ValueError naming field, value and rule."""
        for names, plain in ((("task",), plain_text), (_NUMBERS, plain_int), (_FLAGS, plain_bool)):
            for name in names:
                value = getattr(self, name)
                found = plain(value)
                object.__setattr__(self, name, value if found is None else found)
        if self.task is not None and self.task not in TASKS:
            hint = ": one vector for each row is given, not one for each token" if self.task in _OTHER_TASKS else ""
            raise ValueError(f"task={shown(self.task)} must be one of {', '.join(TASKS)}{hint}")
        for name in _NUMBERS:
            value = getattr(self, name)
            if value is not None and type(value) is not int:
                raise ValueError(f"{name}={shown(value)} must be a whole number")
            if value is not None and value not in INT64:
                raise ValueError(f"{name}={shown(value)} must fit 64 bits")
        for name in _FLAGS:
            if not isinstance(getattr(self, name), bool | None):
                raise ValueError(f"{name}={shown(getattr(self, name))} must be true, false or null")
        if self.dimensions is not None and not 1 <= self.dimensions < 2**31:
            raise ValueError(f"dimensions={self.dimensions} must be 1 or more")
        if self.num_first_tokens is not None and not 0 <= self.num_first_tokens < 2**31:
            raise ValueError(f"num_first_tokens={self.num_first_tokens} must be 0 or more")
        length = self.truncate_prompt_tokens
        if length is not None and length != -1 and not 1 <= length < 2**31:
            raise ValueError(f"truncate_prompt_tokens={length} must be a number of tokens, or -1 for the model's")

    @property
    def is_taken(self) -> bool:
        """Whether every field is set, as `taken_pooling` leaves it."""
        return self.task in ("embed", "classify") and None not in (self.normalize, self.use_activation)


def check_task(task: str, config: PoolingConfig | None) -> None:
    """Raise ValueError for a task that this run does not support, naming the runner that does."""
    if config is None:
        raise ValueError(
            f"{task} is refused: this run generates (model.runner=generate): set model.runner=pooling to "
            f"have rows pooled"
        )
    if task not in config.tasks:
        raise ValueError(f"{task} is refused: this model does {', '.join(config.tasks)}")


def taken_pooling(params: PoolingParams, config: PoolingConfig | None) -> PoolingParams:
    """`params` with every default resolved. Raises ValueError for a task that this run does not support."""
    task = params.task or (config.task if config is not None else "embed")
    check_task(task, config)
    assert config is not None, "of a run that pools"
    if params.num_first_tokens is not None and not config.has_token_types:
        raise ValueError(f"num_first_tokens={params.num_first_tokens} is refused: this model has no types of tokens")
    if params.dimensions is not None:
        _check_dimensions(params.dimensions, config)
    for name, other in (("normalize", "classify"), ("use_activation", "embed")):
        if getattr(params, name) is not None and config.task == other:
            raise ValueError(f"{name}={getattr(params, name)} is refused: this model does {', '.join(config.tasks)}")
    return replace(
        params,
        task=config.task,
        normalize=config.is_normalized if params.normalize is None else params.normalize,
        use_activation=task != "reward" if params.use_activation is None else params.use_activation,
        truncate_prompt_tokens=None,
    )


def _check_dimensions(dimensions: int, config: PoolingConfig) -> None:
    if config.task != "embed":
        raise ValueError(f"dimensions={dimensions} is refused: this model does {', '.join(config.tasks)}")
    allowed = config.matryoshka_dimensions
    if dimensions > config.size:
        raise ValueError(f"dimensions={dimensions} is more than the {config.size} of this model")
    if allowed and dimensions not in allowed and not config.is_matryoshka:
        raise ValueError(f"dimensions={dimensions} must be one of {', '.join(map(str, allowed))}, as config.json says")
    if not allowed and not config.is_matryoshka and dimensions != config.size:
        raise ValueError(
            f"dimensions={dimensions} is refused: config.json does not say that this model was trained for it "
            f"(matryoshka_dimensions, is_matryoshka): set model.allow_any_dimensions=true"
        )


def pooled_sampling(params: PoolingParams, config: PoolingConfig) -> SamplingParams:
    """Stand-in for the sampling parameters of a pooling row: one row of work that samples nothing."""
    return _stand_in(config.needs_all_tokens or bool(params.skip_reading_prefix_cache))


@cache
def _stand_in(skips_cache: bool) -> SamplingParams:
    return SamplingParams(
        temperature=0.0, max_tokens=1, detokenize=False, skip_reading_prefix_cache=skips_cache or None
    ).frozen()


def truncated_row(token_ids: tuple[int, ...], length: int | None, max_model_len: int) -> tuple[int, ...]:
    """Last tokens of a row, by `truncate_prompt_tokens`."""
    if length is None:
        return token_ids
    return token_ids[-(max_model_len if length == -1 else length) :]


def vector_digest(vector: bytes) -> int:
    """Replacement of a sampled id: 63 bits of a digest of a vector's bytes, never negative."""
    digest = blake2b(vector, digest_size=8, person=b"spmd-vector").digest()
    return int.from_bytes(digest, "little") >> 1


def cosine(x: Sequence[float], y: Sequence[float]) -> float:
    """Cosine similarity of two vectors; 0 if one is zero. Double precision, from exact sums: the same everywhere."""
    product = math.fsum(map(float.__mul__, x, y))
    size = math.sqrt(math.fsum(map(float.__mul__, x, x)) * math.fsum(map(float.__mul__, y, y)))
    return product / size if size else 0.0


def similarity(name: str, x: Sequence[float], y: Sequence[float]) -> float:
    """Similarity of two vectors, by a `PoolingConfig.similarity`; a distance is negated: more is more alike."""
    if name == "cosine":
        return cosine(x, y)
    if name == "dot":
        return math.fsum(map(float.__mul__, x, y))
    differences = [a - b for a, b in zip(x, y, strict=True)]
    if name == "manhattan":
        return -math.fsum(map(abs, differences))
    return -math.sqrt(math.fsum(each * each for each in differences))


def check_pooling(pooling: Any) -> None:
    """Raise TypeError for anything but PoolingParams."""
    if not isinstance(pooling, PoolingParams):
        raise TypeError(f"pooling_params is a {type(pooling).__name__}: give PoolingParams")
