"""Sampling defaults: the run's configuration, then generation_config.json, then vLLM's defaults."""

from collections.abc import Mapping
from typing import Any, Final

from spmd_worker.base.config.schema import SamplingConfig
from spmd_worker.base.errors import ConfigError
from spmd_worker.replica.sequence.sampling_params import SamplingParams

_ADVISED_KEYS: Final = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def default_sampling(
    config: SamplingConfig,
    generation_config: Mapping[str, Any],
    max_tokens: int | None = None,
    advised_length: int | None = None,
) -> SamplingParams:
    """`do_sample: false` in generation_config.json means greedy. `advised_length` is the default of `max_tokens` by
    another key than `max_new_tokens` (`DecoderGeneration.max_tokens`). A default that `config` does not set is at most
    `max_tokens`, the run's limit. Raises ConfigError for a value out of range.
    """
    advised = {key: generation_config[key] for key in _ADVISED_KEYS if generation_config.get(key) is not None}
    if generation_config.get("do_sample") is False:
        # Like Hugging Face, which ignores temperature and filters then.
        advised = {key: value for key, value in advised.items() if key == "repetition_penalty"} | {"temperature": 0.0}
    if advised_length is not None:
        advised["max_tokens"] = advised_length
    if generation_config.get("max_new_tokens") is not None:
        advised["max_tokens"] = generation_config["max_new_tokens"]
    given = config.given()
    try:
        SamplingParams(**{key: value for key, value in advised.items() if key not in given})
    except ValueError as error:
        raise ConfigError(
            f"generation_config.json of the model: {error}: mend the file, or set sampling's key of that name"
        ) from None
    try:
        params = SamplingParams(**{**advised, **given})
    except ValueError as error:
        raise ConfigError(f"sampling.{error}") from None
    if config.max_tokens is None and max_tokens is not None and params.max_tokens is not None:
        params.max_tokens = min(params.max_tokens, max_tokens)
    return params
