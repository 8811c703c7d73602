"""The sizes everything below needs, read from a model folder's `config.json`.

One decoder architecture, of which every family states only its difference (`FAMILIES`). A model folder is data: code it
carries (`auto_map`) is never run, and quantised checkpoints are refused rather than misread.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final

from spmd_worker import files
from spmd_worker.errors import ModelConfigError

DTYPE_BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2}

ROPE_TYPES: Final = ("default", "linear", "dynamic", "llama3", "yarn")

STRETCHED_ROPE_TYPES: Final = ("linear", "dynamic", "yarn")
"""Scalings whose `max_position_embeddings` may be the unscaled length: `factor` then multiplies it."""


_MOST: Final = 2**31 - 1
_MOST_LAYERS: Final = 1_024
_MOST_AMOUNT: Final = 1e12
"""A config.json is data from anywhere: a count that no model has must not become a list of that length."""


@dataclass(frozen=True, slots=True)
class RopeParameters:
    """Rotary embedding: the base and how it is stretched. Fields a type does not use keep their neutral value.

    `attention_factor` None lets YaRN derive it (https://arxiv.org/abs/2309.00071); lengths are in tokens.
    """

    rope_type: str = "default"
    rope_theta: float = 10000.0
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None
    truncate: bool = True


@dataclass(frozen=True, slots=True)
class Family:
    """What one family of models does differently from the plain decoder.

    `*_bias` True is always, False never, None asks the named key of config.json (`attention_bias`, `mlp_bias`).
    `default_head_size` 0 means hidden size / heads. `sliding_window` says when the window applies: "never", "always",
    or "late_layers" (only with `use_sliding_window`, from layer `max_window_layers` on). `defaults` is what keys mean
    that config.json leaves out, where transformers takes another value than the plain decoder's.
    """

    qkv_bias: bool | None = None
    output_bias: bool | None = None
    mlp_bias: bool | None = None
    has_qk_norm: bool = False
    default_head_size: int = 0
    sliding_window: str = "never"
    defaults: Mapping[str, Any] = field(default_factory=dict)


_QWEN_DEFAULTS: Final = {"num_key_value_heads": 32, "max_position_embeddings": 32768, "sliding_window": 4096}
_MISTRAL_DEFAULTS: Final = {
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "sliding_window": 4096,
    "eos_token_id": 2,
}

FAMILIES: Final = {
    "LlamaForCausalLM": Family(defaults={"eos_token_id": 2}),
    "MistralForCausalLM": Family(
        qkv_bias=False, output_bias=False, mlp_bias=False, sliding_window="always", defaults=_MISTRAL_DEFAULTS
    ),
    "Qwen2ForCausalLM": Family(
        qkv_bias=True, output_bias=False, mlp_bias=False, sliding_window="late_layers", defaults=_QWEN_DEFAULTS
    ),
    "Qwen3ForCausalLM": Family(
        mlp_bias=False,
        has_qk_norm=True,
        default_head_size=128,
        sliding_window="late_layers",
        defaults=_QWEN_DEFAULTS,
    ),
}


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes of a decoder. `sliding_windows` has one entry a layer: the window in tokens, 0 for none."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope: RopeParameters
    has_tied_embeddings: bool
    has_qkv_bias: bool
    has_output_bias: bool
    has_mlp_bias: bool
    has_qk_norm: bool
    sliding_windows: tuple[int, ...]
    dtype: str
    eos_token_ids: tuple[int, ...]

    @property
    def max_model_len(self) -> int:
        """The longest sequence the model was made for, tokens, with rotary scaling counted."""
        if self.rope.rope_type not in STRETCHED_ROPE_TYPES:
            return self.max_position_embeddings
        base = (
            self.rope.original_max_position_embeddings
            if self.rope.rope_type == "yarn"
            else self.max_position_embeddings
        )
        return max(self.max_position_embeddings, int(base * self.rope.factor))

    def rope_regime(self, num_prompt_tokens: int) -> int:
        """What the rotary angles of a row depend on besides positions, as one number, fixed at admission.

        `dynamic` scaling: the prompt's length where that is more than the model's own, tokens: its tokens take the base
        of the whole prompt. 0 where positions say all.
        """
        is_stretched = self.rope.rope_type == "dynamic" and num_prompt_tokens > self.max_position_embeddings
        return num_prompt_tokens if is_stretched else 0

    @property
    def num_parameters(self) -> int:
        """Parameters of the whole model, tied embeddings counted once."""
        return self.num_embedding_parameters + self.num_layers * self.num_layer_parameters + self.hidden_size

    @property
    def num_embedding_parameters(self) -> int:
        """Embedding and head together."""
        return self.vocab_size * self.hidden_size * (1 if self.has_tied_embeddings else 2)

    @property
    def num_layer_parameters(self) -> int:
        """One decoder layer."""
        query, key_value = self.num_heads * self.head_size, self.num_kv_heads * self.head_size
        weights = 2 * self.hidden_size * (query + key_value) + 3 * self.hidden_size * self.intermediate_size
        biases = (query + 2 * key_value) * self.has_qkv_bias + self.hidden_size * self.has_output_bias
        biases += (2 * self.intermediate_size + self.hidden_size) * self.has_mlp_bias
        return weights + biases + 2 * self.hidden_size + 2 * self.head_size * self.has_qk_norm


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """What a model folder's `config.json` and `generation_config.json` say ({} without the second), and a digest of
    their bytes.
    """

    model_config: ModelConfig
    generation_config: Mapping[str, Any]
    digest: str


def read_model_files(model_folder: Path) -> ModelFiles:
    """Read each file once. The end-of-sequence ids of `generation_config.json` come before those of `config.json`.

    Raises ModelConfigError.
    """
    if not model_folder.is_dir():
        raise ModelConfigError(f"model.path={model_folder} is not a folder: give a Hugging Face model folder")
    path, generation_path = model_folder / "config.json", model_folder / "generation_config.json"
    if not path.exists():
        raise ModelConfigError(f"{path} does not exist: a model folder needs it")
    text = _content(path)
    generation_text = _content(generation_path) if generation_path.exists() else b""
    config = _json_object(text, path)
    _refuse_what_is_not_run(config, path)
    generation = _json_object(generation_text, generation_path) if generation_text else {}
    if "eos_token_id" in generation:
        config["eos_token_id"] = generation["eos_token_id"]
    digest = blake2b(b"%d\0%s%s" % (len(text), text, generation_text), digest_size=16).hexdigest()
    return ModelFiles(model_config_of(config, path), generation, digest)


def _content(path: Path) -> bytes:
    try:
        return files.read_regular_file(path)
    except OSError as error:
        raise ModelConfigError(f"{path} cannot be read: {error}") from None


def _json_object(text: bytes, path: Path) -> dict[str, Any]:
    """The object that `path` must hold. Raises ModelConfigError naming the file."""
    try:
        return files.parse_json_object(text, allows_nan=True)
    except files.JsonError as error:
        raise ModelConfigError(f"{path} {error}") from None


def model_config_of(config: Mapping[str, Any], path: Path) -> ModelConfig:
    """`config` is the content of `path`, which is only named in errors."""
    architecture = _architecture(config, path)
    family = FAMILIES[architecture]
    reader = _Reader({**family.defaults, **config}, path)
    num_layers, num_heads = reader.count("num_hidden_layers"), reader.count("num_attention_heads")
    hidden_size = reader.count("hidden_size")
    num_kv_heads = reader.count("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise ModelConfigError(
            f"{path}: num_attention_heads={num_heads} is not a multiple of num_key_value_heads={num_kv_heads}"
        )
    if reader.get("hidden_act", "silu") != "silu":
        raise ModelConfigError(f"{path}: hidden_act={reader.get('hidden_act', None)} is not supported; only silu is")
    max_positions = reader.count("max_position_embeddings", 2048)
    return ModelConfig(
        architecture=architecture,
        vocab_size=reader.count("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=reader.count("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=_head_size(reader, family, hidden_size, num_heads),
        rms_norm_eps=reader.number("rms_norm_eps", 1e-6),
        max_position_embeddings=max_positions,
        rope=_rope(reader, max_positions),
        has_tied_embeddings=reader.flag("tie_word_embeddings", False),
        has_qkv_bias=_bias(reader, family.qkv_bias, "attention_bias"),
        has_output_bias=_bias(reader, family.output_bias, "attention_bias"),
        has_mlp_bias=_bias(reader, family.mlp_bias, "mlp_bias"),
        has_qk_norm=family.has_qk_norm,
        sliding_windows=_sliding_windows(reader, family, num_layers),
        dtype=_checkpoint_dtype(reader),
        eos_token_ids=_eos_token_ids(reader, reader.count("vocab_size")),
    )


@dataclass(frozen=True, slots=True)
class _Reader:
    """Typed look-ups in config.json: null and absent are the same, but where the family has a default."""

    config: Mapping[str, Any]
    path: Path

    def get(self, key: str, default: Any) -> Any:
        value = self.config.get(key)
        return default if value is None else value

    def count(self, key: str, default: int | None = None) -> int:
        most = _MOST_LAYERS if key == "num_hidden_layers" else _MOST
        return _whole_number(self.get(key, default), f"{self.path}: {key}", 1, most)

    def number(self, key: str, default: float) -> float:
        return _positive_number(self.get(key, default), f"{self.path}: {key}")

    def flag(self, key: str, default: bool) -> bool:
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise ModelConfigError(f"{self.path}: {key}={value!r} must be true or false")
        return value


def _whole_number(value: Any, where: str, least: int, most: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ModelConfigError(f"{where}={value!r} must be a whole number from {least} to {most}")
    return value


def _positive_number(value: Any, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= _MOST_AMOUNT:
        raise ModelConfigError(f"{where}={value!r} must be a number above 0 and up to {_MOST_AMOUNT:g}")
    return float(value)


def _refuse_what_is_not_run(config: Mapping[str, Any], path: Path) -> None:
    if config.get("auto_map"):
        raise ModelConfigError(
            f"{path}: auto_map asks to run code from the model folder, which this runtime never does; "
            f"remove auto_map if the architecture is one of {', '.join(FAMILIES)}"
        )
    if config.get("quantization_config"):
        raise ModelConfigError(
            f"{path}: quantization_config is not supported; give a float32, bfloat16 or float16 checkpoint"
        )


def _architecture(config: Mapping[str, Any], path: Path) -> str:
    names = config.get("architectures")
    known = [family for family in FAMILIES if isinstance(names, list) and family in names]
    if not known:
        raise ModelConfigError(f"{path}: architectures={names!r} is not known; known are {', '.join(FAMILIES)}")
    return known[0]


def _head_size(reader: _Reader, family: Family, hidden_size: int, num_heads: int) -> int:
    head_size = reader.count("head_dim", family.default_head_size or max(hidden_size // num_heads, 1))
    if head_size % 2:
        raise ModelConfigError(f"{reader.path}: head_dim={head_size} must be even: rotary embedding turns pairs")
    return head_size


def _bias(reader: _Reader, fixed: bool | None, key: str) -> bool:
    return reader.flag(key, False) if fixed is None else fixed


def _sliding_windows(reader: _Reader, family: Family, num_layers: int) -> tuple[int, ...]:
    """Per layer, the newer `layer_types` list before the family's older rule."""
    if reader.get("sliding_window", None) is None or family.sliding_window == "never":
        return (0,) * num_layers
    if family.sliding_window == "late_layers" and not reader.flag("use_sliding_window", False):
        return (0,) * num_layers
    window = reader.count("sliding_window")
    layer_types = reader.get("layer_types", None)
    if layer_types is not None:
        _check_layer_types(layer_types, num_layers, reader.path)
        return tuple(window if kind == "sliding_attention" else 0 for kind in layer_types)
    first = 0
    if family.sliding_window == "late_layers":
        first = _whole_number(reader.get("max_window_layers", 28), f"{reader.path}: max_window_layers", 0, _MOST)
    return tuple(window if layer >= first else 0 for layer in range(num_layers))


def _check_layer_types(layer_types: Any, num_layers: int, path: Path) -> None:
    known = ("full_attention", "sliding_attention")
    if (
        not isinstance(layer_types, list)
        or len(layer_types) != num_layers
        or any(kind not in known for kind in layer_types)
    ):
        raise ModelConfigError(f"{path}: layer_types must list {num_layers} of {', '.join(known)}")


def _rope(reader: _Reader, max_positions: int) -> RopeParameters:
    """Newer `rope_parameters`, or the older `rope_scaling` with `rope_theta` beside it; with both, transformers takes
    the older.
    """
    given = reader.get("rope_scaling", None) or reader.get("rope_parameters", None) or {}
    if not isinstance(given, Mapping):
        raise ModelConfigError(f"{reader.path}: rope_parameters must be an object")
    rope_type = given.get("rope_type", given.get("type", "default"))
    if rope_type not in ROPE_TYPES:
        raise ModelConfigError(
            f"{reader.path}: rope_type={rope_type!r} is not known; known are {', '.join(ROPE_TYPES)}"
        )
    if (given.get("partial_rotary_factor") or reader.get("partial_rotary_factor", 1.0)) != 1.0:
        raise ModelConfigError(f"{reader.path}: partial_rotary_factor other than 1 is not supported")
    truncate = given.get("truncate", True)
    if not isinstance(truncate, bool):
        raise ModelConfigError(f"{reader.path}: rope truncate={truncate!r} must be true or false")
    theta = given.get("rope_theta") or reader.get("rope_theta", 10000.0)
    theta = _positive_number(theta, f"{reader.path}: rope_theta")
    numbers = _rope_numbers(given, rope_type, reader, max_positions)
    if rope_type == "yarn" and theta <= 1.0:
        raise ModelConfigError(
            f"{reader.path}: rope_theta={theta:g} must be above 1 with rope_type yarn: its logarithm divides"
        )
    return RopeParameters(rope_type=rope_type, rope_theta=theta, truncate=truncate, **numbers)


_ROPE_KEYS: Final = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
}
_YARN_OPTIONS: Final = ("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor")


def _rope_numbers(given: Mapping[str, Any], rope_type: str, reader: _Reader, max_positions: int) -> dict[str, Any]:
    key = "original_max_position_embeddings"
    original = _whole_number(reader.get(key, given.get(key) or max_positions), f"{reader.path}: {key}", 1, _MOST)
    if rope_type == "yarn" and given.get("factor") is None:
        given = {**given, "factor": max_positions / original}
    numbers: dict[str, Any] = {key: original}
    for key in _ROPE_KEYS[rope_type]:
        numbers[key] = _positive_number(given.get(key), f"{reader.path}: rope {rope_type} {key}")
    for key in _YARN_OPTIONS if rope_type == "yarn" else ():
        if given.get(key):
            numbers[key] = _positive_number(given[key], f"{reader.path}: rope yarn {key}")
    return numbers


def _checkpoint_dtype(reader: _Reader) -> str:
    dtype = reader.get("dtype", reader.get("torch_dtype", "float32"))
    name = str(dtype).removeprefix("torch.")
    return name if name in DTYPE_BYTES else "float32"


def _eos_token_ids(reader: _Reader, vocab_size: int) -> tuple[int, ...]:
    value = reader.get("eos_token_id", [])
    ids = value if isinstance(value, list) else [value]
    if not all(isinstance(token, int) and not isinstance(token, bool) for token in ids):
        raise ModelConfigError(f"{reader.path}: eos_token_id={value!r} must be a token id or a list of them")
    # Some models name an id that their vocabulary does not have. It can never be sampled, so nothing is lost.
    return tuple(token for token in ids if 0 <= token < vocab_size)
