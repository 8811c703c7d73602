"""GGUF files of small checkpoints, as llama.cpp's converter writes them: names by the `gguf` package's own map.

Knows nothing of the runtime under test.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.constants import MODEL_ARCH_NAMES
from safetensors.numpy import load_file

ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "mixtral": "llama",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "gemma3_text": "gemma3",
}
"""transformers' model types whose names in GGUF differ."""
_PERMUTED = ("llama", "smollm3", "granite")
_EXPERT = re.compile(r"(.*\.experts\.)(\d+)\.(.*)")
_NUMBERS = {
    "sliding_window": ("attention.sliding_window", int),
    "attn_logit_softcapping": ("attn_logit_softcapping", float),
    "final_logit_softcapping": ("final_logit_softcapping", float),
    "attention_multiplier": ("attention.scale", float),
    "embedding_multiplier": ("embedding_scale", float),
    "residual_multiplier": ("residual_scale", float),
    "logits_scaling": ("logit_scale", float),
    "moe_intermediate_size": ("expert_feed_forward_length", int),
    "shared_expert_intermediate_size": ("expert_shared_feed_forward_length", int),
    "num_experts": ("expert_count", int),
    "num_local_experts": ("expert_count", int),
    "num_experts_per_tok": ("expert_used_count", int),
}
_OF_ARCHITECTURE = {
    "sliding_window": ("gemma2", "gemma3", "phi3"),
    "attn_logit_softcapping": ("gemma2",),
    "final_logit_softcapping": ("gemma2", "gemma3"),
}


def write_gguf(
    source: Path,
    path: Path,
    kind: str = "F32",
    *,
    permutes: bool = True,
    norm_offset: float = 1.0,
    metadata: dict[str, Any] | None = None,
    splits: bool = False,
    rope_factors: np.ndarray | None = None,
    types: Mapping[str, str] | None = None,
) -> Path:
    """The GGUF of a checkpoint whose matrices have this type; vectors have float32. `types` are those of tensors with a
    word in their name, of the first that fits; of types that the package does not write blocks are random. `permutes`
    and `norm_offset` are what a converter does, and what it must not leave out. `splits` writes two parts;
    `rope_factors` take the place of those of the checkpoint.
    """
    config = json.loads((source / "config.json").read_text())
    name = ARCHITECTURES.get(config["model_type"], config["model_type"])
    writer = GGUFWriter(path, name, split_max_tensors=20 if splits else 0)
    tensors = _tensors(source, config, name, permutes, norm_offset)
    _write_metadata(writer, name, config, metadata or {})
    for tensor_name, values in _rope_tensors(config).items():
        values = values if rope_factors is None else rope_factors
        writer.add_tensor(tensor_name, values)
    for tensor_name, values in tensors.items():
        own = next((each for word, each in (types or {}).items() if word in tensor_name), kind)
        type_ = GGMLQuantizationType[own if values.ndim > 1 else "F32"]
        fits = values.shape[-1] % gguf.GGML_QUANT_SIZES[type_][0] == 0
        type_ = type_ if fits else GGMLQuantizationType.F32
        writer.add_tensor(tensor_name, _quantised(values, type_, len(tensor_name)), raw_dtype=type_)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _quantised(values: np.ndarray, type_: GGMLQuantizationType, seed: int) -> np.ndarray:
    """Bytes of these values, or of random ones of their size."""
    if type_.name not in _STEPS:
        return gguf.quants.quantize(values, type_)
    block, num_bytes = gguf.GGML_QUANT_SIZES[type_]
    generator = np.random.default_rng(seed)
    raw = generator.integers(0, 256, (*values.shape[:-1], values.shape[-1] // block, num_bytes), np.uint8)
    for place in _STEPS[type_.name]:
        steps = generator.uniform(-1e-4, 1e-4, raw.shape[:-1]).astype(np.float16)
        raw[..., place : place + 2] = steps[..., None].view(np.uint8)
    return raw.reshape(*values.shape[:-1], -1)


_STEPS = {"Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,), "IQ4_XS": (0,)}
"""Places of the float16 in blocks of types that the package only reads."""


def checkpoint_tensors(source: Path) -> dict[str, np.ndarray]:
    """Tensors of a folder's files, stacks of experts as experts."""
    found: dict[str, np.ndarray] = {}
    for each in sorted(source.glob("*.safetensors")):
        found |= load_file(each)
    stacks = [name for name, values in found.items() if values.ndim == 3]
    for name in stacks:
        stack, module = found.pop(name), name.rpartition(".")[0]
        for expert, matrix in enumerate(stack):
            halves = np.split(matrix, 2) if name.endswith("gate_up_proj") else [matrix]
            words = ["gate_proj", "up_proj"] if name.endswith("gate_up_proj") else ["down_proj"]
            found |= {f"{module}.{expert}.{word}.weight": half for word, half in zip(words, halves)}
    return found


def permuted(values: np.ndarray, heads: int) -> np.ndarray:
    """Rows of each head as pairs of neighbours."""
    halves = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(values.shape))


def _tensors(source: Path, config: dict[str, Any], name: str, permutes: bool, norm_offset: float) -> dict[str, Any]:
    architecture = next(each for each, word in MODEL_ARCH_NAMES.items() if word == name)
    names = gguf.get_tensor_name_map(architecture, config["num_hidden_layers"])
    found: dict[str, np.ndarray] = {}
    stacks: dict[str, dict[int, np.ndarray]] = {}
    for hub_name, values in checkpoint_tensors(source).items():
        if hub_name == "lm_head.weight" and config.get("tie_word_embeddings"):
            continue
        expert = _EXPERT.fullmatch(hub_name)
        if expert is not None:
            stacks.setdefault(f"{expert[1]}{expert[3]}", {})[int(expert[2])] = values
            continue
        found[_name(names, hub_name)] = _changed(values, hub_name, config, name, permutes, norm_offset)
    for hub_name, experts in stacks.items():
        found[_name(names, hub_name)] = np.stack([experts[number] for number in sorted(experts)])
    return found


def _changed(
    values: np.ndarray, hub_name: str, config: dict[str, Any], name: str, permutes: bool, norm_offset: float
) -> np.ndarray:
    if name in _PERMUTED and permutes:
        for word, key in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
            if word in hub_name:
                return permuted(values, config[key])
    if name.startswith("gemma") and hub_name.endswith("norm.weight"):
        return values + np.float32(norm_offset)
    if hub_name.endswith("shared_expert_gate.weight"):
        return values[0]
    return values


def _name(names: Any, hub_name: str) -> str:
    found = names.get_name(hub_name, try_suffixes=(".weight", ".bias"))
    assert found is not None, hub_name
    return str(found)


def _write_metadata(writer: GGUFWriter, name: str, config: dict[str, Any], metadata: dict[str, Any]) -> None:
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    head_size = config.get("head_dim") or hidden // heads
    rope = config.get("rope_parameters") or {}
    rope = rope.get("full_attention", rope)
    partial = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    values: dict[str, Any] = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": hidden,
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": heads,
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": head_size,
        "attention.value_length": head_size,
        "rope.freq_base": float(rope.get("rope_theta", config.get("rope_theta", 10000.0))),
        "rope.dimension_count": int(head_size * partial),
    }
    if "norm_epsilon" in config:
        values["attention.layer_norm_epsilon"] = config["norm_epsilon"]
    else:
        values["attention.layer_norm_rms_epsilon"] = config["rms_norm_eps"]
    for key, (word, type_) in _NUMBERS.items():
        if config.get(key) is not None and name in _OF_ARCHITECTURE.get(key, (name,)):
            values[word] = type_(config[key])
    kind = rope.get("rope_type", "default")
    if kind in ("linear", "yarn"):
        values |= {"rope.scaling.type": kind, "rope.scaling.factor": float(rope["factor"])}
    original = rope.get("original_max_position_embeddings") or config.get("original_max_position_embeddings")
    if kind in ("yarn", "longrope", "llama3") and original:
        values["rope.scaling.original_context_length"] = original
    for key, value in values.items():
        _add(writer, f"{name}.{key}", value)
    ids = {"bos": config.get("bos_token_id"), "eos": config.get("eos_token_id"), "padding": config.get("pad_token_id")}
    ids = {f"tokenizer.ggml.{key}_token_id": value for key, value in ids.items() if isinstance(value, int)}
    for key, value in (ids | metadata).items():
        _add(writer, key, value)


def _rope_tensors(config: dict[str, Any]) -> dict[str, np.ndarray]:
    rope = config.get("rope_parameters") or {}
    kind = rope.get("rope_type", "default")
    if kind == "longrope":
        words = {"short_factor": "rope_factors_short.weight", "long_factor": "rope_factors_long.weight"}
        return {name: np.array(rope[key], np.float32) for key, name in words.items()}
    if kind != "llama3":
        return {}
    size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    frequencies = 1.0 / rope["rope_theta"] ** (np.arange(0, size, 2) / size)
    wavelengths, original = 2 * np.pi / frequencies, rope["original_max_position_embeddings"]
    low, high, factor = rope["low_freq_factor"], rope["high_freq_factor"], rope["factor"]
    smooth = (original / wavelengths - low) / (high - low)
    factors = 1 / ((1 - smooth) / factor + smooth)
    factors[wavelengths < original / high] = 1
    factors[wavelengths > original / low] = factor
    return {"rope_freqs.weight": factors.astype(np.float32)}


def _add(writer: GGUFWriter, key: str, value: Any) -> None:
    """Types as converters choose them."""
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def tokenizer_metadata(folder: Path, pre: str = "gpt-2") -> dict[str, Any]:
    """The metadata of a folder's tokenizer: BPE of bytes that `pre` splits, or a SentencePiece model with scores."""
    content = json.loads((folder / "tokenizer.json").read_text())
    model = content["model"]
    vocabulary = model["vocab"] | {each["content"]: each["id"] for each in content["added_tokens"]}
    tokens = sorted(vocabulary, key=lambda token: vocabulary[token])
    added = {each["id"]: 3 if each["special"] else 4 for each in content["added_tokens"]}
    types = [added.get(number, 6 if re.fullmatch("<0x..>", token) else 1) for number, token in enumerate(tokens)]
    found = {"tokens": tokens, "token_type": types}
    merges = [" ".join(each) if isinstance(each, list) else each for each in model["merges"]]
    if model["byte_fallback"]:
        ranks = {each.replace(" ", ""): rank for rank, each in reversed(list(enumerate(merges)))}
        found |= {"model": "llama", "scores": [-float(ranks.get(token, 1e6)) for token in tokens]}
        found["unknown_token_id"] = model["vocab"][model["unk_token"]]
    else:
        found |= {"model": "gpt2", "pre": pre, "merges": merges}
    for key in ("bos", "eos"):
        name = json.loads((folder / "tokenizer_config.json").read_text()).get(f"{key}_token")
        if name is not None:
            found[f"{key}_token_id"] = tokens.index(name)
    return {f"tokenizer.ggml.{key}": value for key, value in found.items()}
