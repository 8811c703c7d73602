"""vLLM's `speculative_config`, and the keywords it had before, as keys of our group of that name."""

import dataclasses
import json
import os
from collections.abc import Mapping
from typing import Any, Final

from spmd_worker.base.config.plain_values import shown
from spmd_worker.base.config.speculation import METHODS, SpeculativeConfig
from spmd_worker.base.errors import ConfigError
from spmd_worker.base.names import hint

OLD_KEYWORDS: Final[Mapping[str, str]] = {
    "spec_method": "method",
    "spec_model": "model",
    "spec_tokens": "num_speculative_tokens",
    "speculative_model": "model",
    "num_speculative_tokens": "num_speculative_tokens",
    "ngram_prompt_lookup_max": "prompt_lookup_max",
    "ngram_prompt_lookup_min": "prompt_lookup_min",
    "speculative_draft_tensor_parallel_size": "draft_tensor_parallel_size",
}
"""Keyword of `LLM(...)` -> the key of `speculative_config` that it sets."""

_MTP_FAMILIES: Final = (
    *("deepseek", "dots3_note", "mimo", "mimo_v2", "glm4_moe", "glm4_moe_lite", "glm_ocr"),
    *("ernie", "nemotron_h", "exaone_moe", "exaone4_5", "qwen3_next", "qwen4_exp", "qwen3_5"),
    *("longcat_flash", "bailing_hybrid_v3", "minimax_m3", "bailing_hybrid", "kimi_k3", "pangu_ultra_moe", "step3p5"),
    *("hy_v3", "hy_v4", "gemma4", "inkling", "glm5_next", "nemotron3_5_transcribe", "step5"),
)
METHOD_ALIASES: Final[Mapping[str, str]] = {"[ngram]": "ngram", **{f"{family}_mtp": "mtp" for family in _MTP_FAMILIES}}
"""Other names of vLLM's for a method; whether a checkpoint has layers for `mtp` is checked when it is read."""

KEYS_WITHOUT_EFFECT: Final[Mapping[str, str]] = {
    **dict.fromkeys(
        ("enforce_eager", "moe_backend", "attention_backend", "draft_load_config", "use_local_argmax_reduction"),
        "drafts are computed as the model is",
    ),
    **dict.fromkeys(("disable_padded_drafter_batch", "disable_mqa_scorer"), "batches are not padded"),
    **dict.fromkeys(
        ("disable_eagle_block_drop", "disable_lookahead_block_hashes"),
        "blocks of the prefix cache are named when their tokens are verified",
    ),
    "disable_logprobs": "log-probabilities are those of decoding without drafts",
    "suffix_decoding_corpus_tokens": "suffix_decoding_max_cached_requests bounds the trees",
    "disable_log_stats": "drafts are counted in any case",
    "code_revision": "no code is loaded",
}
"""Key of vLLM's -> why it has no effect here, whatever its value."""

REJECTED_KEYS: Final[Mapping[str, str]] = {
    "tensor_parallel_size": "give draft_tensor_parallel_size, or leave it out",
    "quantization": "the draft model's config.json defines it: leave it out",
    "kv_cache_dtype": "the draft model's cache follows the engine's kv_cache_dtype: leave it out",
    "max_model_len": "drafts end with the model's own length: leave it out",
    "revision": "give the folder of that revision as model",
    "use_heterogeneous_vocab": "drafts are ids of the model's own tokenizer: give a draft model with the same one",
    "parallel_drafting": "drafts follow each other: leave it out",
    "index_share_for_mtp_iteration": "config.json defines it: leave it out",
    **dict.fromkeys(
        ("num_speculative_tokens_per_batch_size", "disable_by_batch_size", "enable_adaptive_verification"),
        "drafts fill a step up to max_step_tokens and follow what the row accepted: give max_step_tokens",
    ),
    **dict.fromkeys(
        ("rejection_sample_method", "acceptance_method", "draft_sample_method"),
        "a draft is accepted where it is the id that is sampled without it: leave it out",
    ),
    **dict.fromkeys(
        ("synthetic_acceptance_rates", "synthetic_acceptance_length"),
        "drafts that were not sampled are never accepted: leave it out",
    ),
    **dict.fromkeys(
        (
            *("posterior_threshold", "typical_acceptance_sampler_posterior_threshold"),
            *("posterior_alpha", "typical_acceptance_sampler_posterior_alpha"),
            *("fly_window_size", "fly_entropy_threshold", "fly_entropy_top_k"),
        ),
        "drafts that are merely typical change answers: leave it out",
    ),
    "draft_decode_context_parallel_size": "drafts are divided as the model is: leave it out",
    "draft_lm_head_quantization": "drafts share the model's head as it is: leave it out",
    **dict.fromkeys(("xpress_topc", "speculator_options"), "an option of methods that are not supported: leave it out"),
    "speculative_token_tree": "a row drafts one path: leave it out",
    "dspark_draft_topk": "dspark is not supported: leave it out",
}
"""Key of vLLM's -> why it is rejected, and the alternative; values of `_NEUTRAL` and None are accepted."""
_NEUTRAL: Final = (None, False, "standard", "rejection_sampler", "greedy", "auto")
_EXAMPLE: Final = '{"method": "suffix"}'
_KEYS: Final = tuple(each.name for each in dataclasses.fields(SpeculativeConfig))


def speculative_values(given: Mapping[str, Any]) -> dict[str, Any]:
    """Values of our group for the keywords of `LLM(...)`; empty where there is no speculation.

    Raises ConfigError for an unknown or rejected key or method, and for two values of one key.
    """
    values = _mapping(given.get("speculative_config"))
    own = {key: value for key, value in values.items() if value is not None and _is_ours(key, value)}
    for keyword, key in OLD_KEYWORDS.items():
        value = given.get(keyword)
        if value is None:
            continue
        if own.setdefault(key, value) != value:
            raise ConfigError(
                f"{keyword}={shown(value)} and speculative_config's {key}={shown(own[key])} are one setting: "
                f"give speculative_config alone"
            )
    return _with_method(own) if own else {}


def _mapping(value: Any) -> Mapping[str, Any]:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            raise ConfigError(
                f"speculative_config={shown(value)} is not JSON: give a dict, such as {_EXAMPLE}"
            ) from None
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ConfigError(f"speculative_config={shown(value)} must be a dict, such as {_EXAMPLE}")
    return value


def _is_ours(key: str, value: Any) -> bool:
    if key in REJECTED_KEYS and not any(value is each or value == each for each in _NEUTRAL):
        raise ConfigError(f"speculative_config has {key}={shown(value)}, which is rejected: {REJECTED_KEYS[key]}")
    if key in _KEYS or key in KEYS_WITHOUT_EFFECT or key in REJECTED_KEYS:
        return key in _KEYS
    raise ConfigError(f"speculative_config has the unknown key {key!r}{hint(key, _KEYS)}")


def _with_method(own: dict[str, Any]) -> dict[str, Any]:
    """The values with one of our methods: without a method, a model is a draft model."""
    method, model = own.get("method"), own.get("model")
    if isinstance(model, str | os.PathLike):
        model = os.path.expanduser(os.fspath(model))
        own = {**own, "model": model}
    if method is None:
        method = "ngram" if model in ("ngram", "[ngram]") else "draft_model" if model is not None else None
    method = METHOD_ALIASES.get(method, method) if isinstance(method, str) else method
    if method is None:
        raise ConfigError(f"speculative_config={shown(own)} has no method: give one of {', '.join(METHODS)}")
    # vLLM's name of a model that there is not.
    if method in ("ngram", "suffix") and model in (method, f"[{method}]"):
        own = {key: value for key, value in own.items() if key != "model"}
    return {**own, "method": method}
