"""The rope of a GGUF model in config.json's words: its base, its scaling, and factors that are stored as tensors.

Llama 3's scaling is a tensor of factors in GGUF, from which its numbers follow; other factors are LongRoPE's.
"""

import math
import struct
from typing import Any, Final

from spmd_worker.base.errors import ModelConfigError
from spmd_worker.base.files import describe_os_error, open_regular_file
from spmd_worker.model_config.config_reader import checked_integer
from spmd_worker.model_config.gguf.header import decimal
from spmd_worker.model_config.gguf.model import GgufModel

_FREQUENCIES, _LONG, _SHORT = "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"
_ORIGINAL: Final = "original_max_position_embeddings"
_LLAMA3: Final = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
_LLAMA3_LENGTH: Final = 8192
"""The values of all Llama 3, which are not in the metadata."""
_TOLERANCE: Final = 1e-4
"""Largest relative difference of a computed factor from the stored float32."""
_YARN: Final = {"yarn_beta_fast": "beta_fast", "yarn_beta_slow": "beta_slow", "attn_factor": "attention_factor"}


def rope_settings(model: GgufModel, head_size: int) -> dict[str, Any]:
    """Keys of config.json about the rope of heads of this size. Raises ModelConfigError."""
    metadata, key = model.metadata, f"{model.key}.rope"
    theta = metadata.number(f"{key}.freq_base", 10000.0)
    found: dict[str, Any] = {"rope_theta": theta}
    rotated = model.optional_number("rope.dimension_count")
    if model.architecture.may_be_partial and rotated not in (None, head_size):
        found["partial_rotary_factor"] = rotated / head_size
    scaling = _scaling(model)
    if model.has(_FREQUENCIES):
        if scaling is not None:
            raise metadata.error(f"{key}.scaling.type", f"is not supported beside the tensor {_FREQUENCIES!r}")
        scaling = _of_frequencies(model, theta, head_size)
    elif model.has(_LONG) or model.has(_SHORT):
        original = model.whole_number("rope.scaling.original_context_length")
        found[_ORIGINAL] = original
        scaling = {"rope_type": "longrope", _ORIGINAL: original, **_attention_factor(model)}
        scaling |= {"short_factor": _vector(model, _SHORT), "long_factor": _vector(model, _LONG)}
    return found if scaling is None else found | {"rope_scaling": scaling}


def _scaling(model: GgufModel) -> dict[str, Any] | None:
    """The scaling of the metadata, but LongRoPE's, whose factors are tensors."""
    metadata, key = model.metadata, f"{model.key}.rope"
    kind = metadata.get(f"{key}.scaling.type", "linear" if f"{key}.scale_linear" in metadata.config else "none")
    if kind in ("none", "longrope"):
        return None
    factor_key = f"{key}.scale_linear" if f"{key}.scale_linear" in metadata.config else f"{key}.scaling.factor"
    # 0 and 1 are of no effect.
    if kind == "linear" and metadata.get(factor_key, 0) in (0, 1):
        return None
    found: dict[str, Any] = {"rope_type": metadata.choice(f"{key}.scaling.type", ("linear", "yarn"), kind)}
    found["factor"] = metadata.number(factor_key)
    if kind == "linear":
        return found
    found[_ORIGINAL] = model.whole_number("rope.scaling.original_context_length")
    given = {name: metadata.get(f"{key}.scaling.{word}") for word, name in _YARN.items()}
    return found | {name: value for name, value in given.items() if value}


def _attention_factor(model: GgufModel) -> dict[str, Any]:
    key = f"{model.key}.rope.scaling.attn_factor"
    return {"attention_factor": model.metadata.number(key)} if model.metadata.get(key) else {}


def _of_frequencies(model: GgufModel, theta: float, head_size: int) -> dict[str, Any] | None:
    """The scaling by stored factors: Llama 3's if they are its, else LongRoPE's; None if all are 1."""
    factors = _vector(model, _FREQUENCIES)
    if all(factor == 1.0 for factor in factors):
        return None
    key = f"{model.key}.rope.scaling.original_context_length"
    original = checked_integer(model.metadata.get(key, _LLAMA3_LENGTH), model.metadata.where(key), 1, 2**31 - 1)
    llama3 = {"rope_type": "llama3", "factor": max(factors), **_LLAMA3, _ORIGINAL: original}
    computed = [_llama3_factor(llama3, theta ** (2 * pair / head_size)) for pair in range(head_size // 2)]
    if len(computed) == len(factors) and all(
        abs(ours - stored) <= _TOLERANCE * stored for ours, stored in zip(computed, factors)
    ):
        return llama3
    # Both lists are the same, so that rows of all lengths have it.
    length = model.whole_number("context_length")
    return {
        "rope_type": "longrope",
        "short_factor": factors,
        "long_factor": factors,
        "attention_factor": 1.0,
        "factor": 1.0,
        _ORIGINAL: length,
    }


def _llama3_factor(llama3: dict[str, Any], pair_theta: float) -> float:
    """The number by which Llama 3 divides the frequency 1 / `pair_theta`."""
    low, high, factor = llama3["low_freq_factor"], llama3["high_freq_factor"], llama3["factor"]
    wavelength, original = 2 * math.pi * pair_theta, llama3[_ORIGINAL]
    if wavelength < original / high:
        return 1.0
    if wavelength > original / low:
        return float(factor)
    smooth = (original / wavelength - low) / (high - low)
    return float(1 / ((1 - smooth) / factor + smooth))


def _vector(model: GgufModel, name: str) -> list[float]:
    """A tensor of factors. Raises ModelConfigError unless it is one of float32, above 0, for a head's pairs."""
    found = model.find(name)
    if found is None:
        raise ModelConfigError(f"{model.headers[0].path}: has no tensor {name!r}: download the model again")
    header, tensor = found
    if tensor.type.name != "F32" or len(tensor.shape) != 1 or tensor.shape[0] > 1 << 16:
        raise ModelConfigError(f"{header.path}: tensor {name!r} must be a vector of float32: download the model again")
    try:
        with open_regular_file(header.path) as file:
            file.seek(tensor.begin)
            content = file.read(tensor.end - tensor.begin)
    except OSError as error:
        raise ModelConfigError(f"{header.path} cannot be read: {describe_os_error(error)}") from None
    if len(content) != tensor.end - tensor.begin:
        raise ModelConfigError(f"{header.path}: truncated in tensor {name!r}: copy or download it again")
    factors = [decimal(each) for each in struct.unpack(f"<{tensor.shape[0]}f", content)]
    if not all(math.isfinite(factor) and factor > 0 for factor in factors):
        raise ModelConfigError(f"{header.path}: tensor {name!r} must have numbers above 0: download the model again")
    return factors
