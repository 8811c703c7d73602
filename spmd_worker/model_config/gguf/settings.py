"""config.json and generation_config.json of a GGUF model, from its metadata and the shapes of its tensors."""

from math import prod
from typing import Any, Final

from spmd_worker.base.config.plain_values import shown
from spmd_worker.base.errors import ModelConfigError
from spmd_worker.model_config.config_reader import MAX_LAYERS
from spmd_worker.model_config.gguf.model import GgufModel
from spmd_worker.model_config.gguf.rope import rope_settings
from spmd_worker.model_config.gguf.tensors import EMBEDDING, HEAD
from spmd_worker.model_config.gguf.tokens import end_ids, named_ids

_SAMPLING: Final = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
"""Defaults of sampling, `general.sampling.KEY`, by generation_config.json's names."""
_WIDER: Final = {("gemma2", 46): True, ("gemma3", 62): True}
"""The 27B models, whose scores are divided by the root of hidden size / heads, not of a head's size."""


def config_of(model: GgufModel) -> dict[str, Any]:
    """Contents of config.json. Raises ModelConfigError, naming the file and the key."""
    architecture, metadata, key = model.architecture, model.metadata, model.key
    heads, hidden = model.whole_number("attention.head_count"), model.whole_number("embedding_length")
    layers = model.whole_number("block_count", MAX_LAYERS)
    head_size = _head_size(model, hidden, heads)
    config: dict[str, Any] = {
        "architectures": [architecture.model],
        "model_type": architecture.model_type,
        "vocab_size": _vocab_size(model),
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": model.optional_number("attention.head_count_kv") or heads,
        "head_dim": head_size,
        "max_position_embeddings": model.whole_number("context_length"),
        architecture.eps_key[0]: metadata.number(f"{key}.{architecture.eps_key[1]}"),
        "tie_word_embeddings": not model.has(HEAD),
        "attention_bias": model.has("blk.0.attn_q.bias"),
        "mlp_bias": model.has("blk.0.ffn_up.bias"),
        "dtype": _dtype(model),
        **architecture.constants,
        **_numbers(model),
        **_window(model),
        **rope_settings(model, head_size),
    }
    if "intermediate_size" not in config:
        config["intermediate_size"] = model.whole_number("feed_forward_length")
    if architecture.model_type in ("gemma2", "gemma3_text"):
        config["query_pre_attn_scalar"] = hidden // heads if (key, layers) in _WIDER else head_size
    config |= named_ids(metadata) | {"eos_token_id": end_ids(metadata)}
    types = _types(model)
    return config | ({"quantization_config": {"quant_method": "gguf", "types": types}} if types else {})


def _types(model: GgufModel) -> dict[str, list[str]]:
    """Modules of quantised matrices by their type, as `quantization.py` reads them."""
    found: dict[str, list[str]] = {}
    for name, each in model.hub_tensors().items():
        module, _, leaf = name.rpartition(".")
        if leaf == "weight" and len(each.tensor.shape) > 1 and not each.tensor.type.is_plain:
            found.setdefault(each.tensor.type.name, []).append(module)
    return found


def generation_config_of(model: GgufModel) -> dict[str, Any]:
    """Contents of generation_config.json. Raises ModelConfigError."""
    metadata = model.metadata
    given = {name: metadata.get(f"general.sampling.{key}") for key, name in _SAMPLING.items()}
    sampling = {name: value for name, value in given.items() if value is not None}
    return sampling | named_ids(metadata) | {"eos_token_id": end_ids(metadata)}


def _head_size(model: GgufModel, hidden: int, heads: int) -> int:
    rotated = model.optional_number("rope.dimension_count")
    size = model.optional_number("attention.key_length") or hidden // heads
    of_values = model.optional_number("attention.value_length")
    if of_values not in (None, size):
        raise model.metadata.error(
            f"{model.key}.attention.value_length", f"must be the head size of keys, {size}: it is not supported else"
        )
    if rotated not in (None, size) and not model.architecture.may_be_partial:
        raise model.metadata.error(
            f"{model.key}.rope.dimension_count", f"must be the head size, {size}: a part of it is not supported"
        )
    return size


def _vocab_size(model: GgufModel) -> int:
    """Rows of the embedding, of which there may be more than tokens."""
    found = model.find(EMBEDDING)
    if found is None or len(found[1].shape) != 2:
        raise ModelConfigError(
            f"{model.headers[0].path}: has no matrix {EMBEDDING!r}: give the file, or the first part, of a model"
        )
    return found[1].shape[0]


def _numbers(model: GgufModel) -> dict[str, Any]:
    """Numbers that not all architectures have."""
    architecture, metadata = model.architecture, model.metadata
    required = {name: metadata.get(f"{model.key}.{key}") for key, name in architecture.numbers.items()}
    for key, name in architecture.numbers.items():
        if required[name] is None:
            raise ModelConfigError(f"{metadata.where(f'{model.key}.{key}')} is missing: download the model again")
    optional = {name: metadata.get(f"{model.key}.{key}") for key, name in architecture.optional.items()}
    found = {**required, **{name: value for name, value in optional.items() if value is not None}}
    for name, value in found.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ModelConfigError(f"{metadata.path}: the {name} of {model.key}, {shown(value)}, must be a number")
    return found


def _window(model: GgufModel) -> dict[str, Any]:
    key = f"{model.key}.attention.sliding_window"
    window, pattern = model.optional_number("attention.sliding_window"), model.metadata.get(f"{key}_pattern")
    if not model.architecture.has_window:
        if window is not None and window < model.whole_number("context_length"):
            raise model.metadata.error(key, "is not supported for this architecture: give the model's safetensors")
        return {}
    # Without it, a Gemma's is its class's.
    is_given = key in model.metadata.config or not _is_gemma(model)
    found: dict[str, Any] = {"sliding_window": window} if is_given else {}
    if pattern is None:
        return found
    if isinstance(pattern, list) and all(isinstance(each, bool) for each in pattern) and _is_gemma(model):
        words = ["sliding_attention" if each else "full_attention" for each in pattern]
        return found | {"layer_types": words}
    return found | {"sliding_window_pattern": model.whole_number("attention.sliding_window_pattern")}


def _is_gemma(model: GgufModel) -> bool:
    return model.key.startswith("gemma")


def _dtype(model: GgufModel) -> str:
    """Dtype of most elements of matrices; bfloat16 for quantised ones."""
    num_elements: dict[str, int] = {}
    for header in model.headers:
        for tensor in header.tensors.values():
            name = {"F32": "float32", "F16": "float16"}.get(tensor.type.name, "bfloat16")
            if len(tensor.shape) > 1:
                num_elements[name] = num_elements.get(name, 0) + prod(tensor.shape)
    return max(num_elements, key=lambda name: (num_elements[name], name), default="float32")
