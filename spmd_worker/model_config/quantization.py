"""Reads `quantization_config` of a config.json: the storage format of each weight.

Unknown settings are rejected by name, with the key and the way out, rather than misread. Scales of activations and of
the key-value cache change nothing here: activations are computed, and cached, in the run's dtype.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from spmd_worker.base.errors import ModelConfigError
from spmd_worker.model_config.config_reader import shown
from spmd_worker.model_config.weight_format import CLASS_OF_ALL, REGEX, FormatGroup, Quantization, WeightFormat

_KEYS: Final = ("quantization_config", "compression_config")
_WAY_OUT: Final = "give a float32, bfloat16 or float16 checkpoint of the model"
_DEQUANTISE: Final = "load it with transformers, call model.dequantize(), save_pretrained, and give that folder"
_REFUSED: Final = {
    "aqlm": _WAY_OUT,
    "auto-round": "export it as auto_gptq or auto_awq, or " + _WAY_OUT,
    "bitnet": _WAY_OUT,
    "bitsandbytes": _DEQUANTISE,
    "eetq": _WAY_OUT,
    "exl2": _WAY_OUT,
    "exl3": _WAY_OUT,
    "fouroversix": _WAY_OUT,
    "fp_quant": _WAY_OUT,
    "gemma": _WAY_OUT,
    "gguf": "give the safetensors checkpoint that it was made from",
    "higgs": _DEQUANTISE,
    "hqq": _WAY_OUT,
    "marlin": "give the GPTQ checkpoint that it was made from",
    "metal": _WAY_OUT,
    "modelopt": "give the bfloat16 checkpoint, or one in FP8 by compressed-tensors",
    "mxfp8": _WAY_OUT,
    "nvfp4": "give the bfloat16 checkpoint, or one in FP8",
    "quanto": _WAY_OUT,
    "quark": _WAY_OUT,
    "quip": _WAY_OUT,
    "sinq": _WAY_OUT,
    "spqr": _WAY_OUT,
    "torchao": _WAY_OUT,
    "vptq": _WAY_OUT,
}
"""Known but unsupported methods, with the way out."""
_MOST_GROUP: Final = 1 << 20
_MOST_NAMES: Final = 100_000
_MOST_NAME: Final = 80
_MOST_PATTERN: Final = 500
_MOST_REPEATS: Final = 4


@dataclass(frozen=True, slots=True)
class _Section:
    """An object of config.json. `path` is its file and key, for errors."""

    values: Mapping[str, Any]
    path: str

    def get(self, key: str, default: Any = None) -> Any:
        """The value; `default` for null and missing keys."""
        value = self.values.get(key)
        return default if value is None else value

    def error(self, key: str, rule: str) -> ModelConfigError:
        """An error about a key, with its value."""
        return ModelConfigError(f"{self.path}.{key}={shown(self.values.get(key))} {rule}")

    def choice(self, key: str, known: tuple[Any, ...], default: Any = None) -> Any:
        """One of `known`."""
        value = self.get(key, default)
        # 4.0 and True are equal to integers in Python.
        if not any(value == each and type(value) is type(each) for each in known):
            words = " or ".join(str(each).lower() if isinstance(each, bool) else str(each) for each in known)
            raise self.error(key, f"is not read, only {words}: {_WAY_OUT}")
        return value

    def section(self, key: str) -> "_Section":
        """An object inside."""
        value = self.get(key, {})
        if not isinstance(value, Mapping):
            raise self.error(key, "must be an object")
        is_name = key.isprintable() and len(key) < _MOST_NAME
        return _Section(value, f"{self.path}.{key if is_name else shown(key)}")

    def group_size(self, key: str, default: Any = None) -> int:
        """Inputs that share a scale, 0 for all (-1 in the file)."""
        value = self.get(key, default)
        if type(value) is not int or not (value == -1 or 1 <= value <= _MOST_GROUP):
            raise self.error(key, f"must be -1 (all inputs) or a whole number from 1 to {_MOST_GROUP}")
        return max(value, 0)

    def block(self, key: str) -> tuple[int, int] | None:
        """Outputs and inputs that share a scale; None if it is missing."""
        value = self.get(key)
        if value is None:
            return None
        is_pair = isinstance(value, list) and len(value) == 2
        if not is_pair or any(type(size) is not int or not 1 <= size <= _MOST_GROUP for size in value):
            raise self.error(key, f"must list two whole numbers from 1 to {_MOST_GROUP}")
        return value[0], value[1]

    def names(self, key: str, default: tuple[str, ...] = ()) -> tuple[str, ...]:
        """Names of modules, and regular expressions that can be matched in little time."""
        value = self.get(key, list(default))
        is_list = isinstance(value, list) and len(value) <= _MOST_NAMES
        if not is_list or not all(isinstance(name, str) for name in value):
            raise ModelConfigError(f"{self.path}.{key} must list names of modules, {_MOST_NAMES} at most")
        return tuple(self._checked(name, key) for name in value)

    def _checked(self, name: str, key: str) -> str:
        """transformers uses every name as a pattern of full words, compressed-tensors those that begin with re:."""
        if not name.startswith(REGEX) and not re.search(r"[*+?()|[\]\\]", name):
            return name
        pattern = name.removeprefix(REGEX)
        _check_pattern(pattern, f"{self.path}.{key}")
        return name if name.startswith(REGEX) else rf"{REGEX}(?:{pattern})(?:\.|$)"


def read_quantization(config: Mapping[str, Any], path: Path) -> Quantization | None:
    """Quantization in the contents of `path`, which is used in errors alone; None if the weights are plain. Raises
    ModelConfigError.
    """
    text = config.get("text_config")
    places = (config, text if isinstance(text, Mapping) else {})
    found = [(place[key], key) for place in places for key in _KEYS if place.get(key)]
    if not found:
        return None
    (value, key), *_ = found
    if not isinstance(value, Mapping):
        raise ModelConfigError(f"{path}: {key} must be an object")
    section = _Section(value, f"{path}: {key}")
    is_older = section.get("quant_method") is None and section.get("config_groups") is not None
    method = "compressed-tensors" if is_older else section.get("quant_method")
    if not isinstance(method, str) or method not in _READERS:
        raise section.error("quant_method", _refusal(method))
    return _READERS[method](section)


def _refusal(method: Any) -> str:
    name = method.removeprefix("intel/") if isinstance(method, str) else method
    why = f"is known and not read: {_REFUSED[name]}" if isinstance(name, str) and name in _REFUSED else None
    return f"{why or 'is not known: ' + _WAY_OUT}; read are {', '.join(_READERS)}"


def _read_fp8(section: _Section) -> Quantization:
    section.choice("fmt", ("e4m3", "float8_e4m3fn"), "e4m3")
    block = section.block("weight_block_size") or (None, None)
    ignored = section.names("modules_to_not_convert") + section.names("ignored_layers")
    format_ = WeightFormat("scaled", "e4m3", 8, *block)
    return _one_format("fp8", format_, ignored, "weight_block_size")


def _read_fbgemm_fp8(section: _Section) -> Quantization:
    format_ = WeightFormat("scaled", "e4m3", 8, 1, 0)
    return _one_format("fbgemm_fp8", format_, section.names("modules_to_not_convert"))


def _read_mxfp4(section: _Section) -> Quantization:
    format_ = WeightFormat("mxfp4", "e2m1", 4, 1, 32)
    return _one_format("mxfp4", format_, section.names("modules_to_not_convert"))


def _read_gptq(section: _Section) -> Quantization:
    bits = section.choice("bits", (4, 8))
    key = "checkpoint_format" if section.get("checkpoint_format") is not None else "format"
    is_second = section.choice(key, ("gptq", "gptq_v2"), "gptq") == "gptq_v2"
    section.choice("is_marlin_format", (False,), False)
    has_order = section.choice("desc_act", (False, True), False)
    is_symmetric = section.choice("sym", (False, True), True)
    format_ = WeightFormat(
        *("gptq", "int", bits, 1, section.group_size("group_size", -1)),
        has_zeros=True,
        has_order=has_order,
        zero_offset=0 if is_second else 1,
        is_symmetric=is_symmetric,
    )
    return _one_format(
        "gptq", format_, section.names("modules_to_not_convert") + _skipped(section), "bits and group_size"
    )


def _skipped(section: _Section) -> tuple[str, ...]:
    """Modules that gptqmodel's `dynamic` leaves plain; other storage formats in it are rejected."""
    rules = section.section("dynamic").values
    others = [
        rule
        for rule, changes in rules.items()
        if not rule.startswith("-:")
        and not (isinstance(changes, Mapping) and all(section.get(key) == changes[key] for key in changes))
    ]
    if others:
        raise ModelConfigError(
            f"{section.path}.dynamic has {shown(others[0])}, a format of its own for some modules, which is not read, "
            f"only rules that begin with -: are: {_WAY_OUT}"
        )
    patterns = tuple(rule.removeprefix("-:") for rule in rules if rule.startswith("-:"))
    for pattern in patterns:
        _check_pattern(pattern, f"{section.path}.dynamic")
    return tuple(REGEX + pattern for pattern in patterns)


def _read_awq(section: _Section) -> Quantization:
    bits = section.choice("bits", (4,))
    key = "version" if section.get("version") is not None else "format"
    version = section.get(key, "gemm")
    if not isinstance(version, str) or version.lower() != "gemm":
        raise section.error(key, f"is not read, only gemm: {_WAY_OUT}")
    section.choice("zero_point", (True,), True)
    format_ = WeightFormat("awq", "int", bits, 1, section.group_size("group_size", 128), has_zeros=True)
    return _one_format("awq", format_, section.names("modules_to_not_convert"), "bits and group_size")


_COMPRESSED: Final = {
    "float-quantized": ("scaled", "float", (8,)),
    "int-quantized": ("scaled", "int", (8,)),
    "naive-quantized": ("scaled", None, (8,)),
    "pack-quantized": ("packed", "int", (4, 8)),
}
"""`format` -> the layout, the required `weights.type`, and the bits."""


def _read_compressed_tensors(section: _Section) -> Quantization:
    for key in ("sparsity_config", "transform_config"):
        inner = section.section(key).values
        if inner and inner.get("format") != "dense":
            raise ModelConfigError(f"{section.path}.{key} is not read: {_WAY_OUT}")
    section.choice("quantization_status", ("compressed", "frozen"), "compressed")
    groups = section.section("config_groups")
    if not groups.values:
        raise section.error("config_groups", "must name how weights are stored")
    read = [_read_group(groups.section(name), section) for name in groups.values]
    return Quantization("compressed-tensors", tuple(read), section.names("ignore"), "config_groups")


def _read_group(group: _Section, whole: _Section) -> FormatGroup:
    """Format of a group; that of `whole` if the group has none of its own."""
    place = group if group.get("format") is not None else whole
    name = place.choice("format", tuple(_COMPRESSED))
    layout, wanted, bits = _COMPRESSED[name]
    weights = group.section("weights")
    if not weights.values:
        raise group.error("weights", "must say how weights are stored")
    kind = weights.choice("type", ("float", "int") if wanted is None else (wanted,), "int")
    num_bits = weights.choice("num_bits", bits, 8)
    is_symmetric = weights.choice("symmetric", (True, False), True)
    block = _block(weights)
    order = weights.choice("actorder", (None, True, False, "group", "weight", "static", "dynamic"))
    format_ = WeightFormat(
        *(layout, "e4m3" if kind == "float" else "int", num_bits, *block),
        has_zeros=not is_symmetric,
        has_order=order in (True, "group", "dynamic"),
        is_symmetric=is_symmetric,
    )
    return FormatGroup(group.names("targets", (CLASS_OF_ALL,)), format_)


def _block(weights: _Section) -> tuple[int, int]:
    default = "group" if weights.get("group_size") is not None else "tensor"
    strategy = weights.choice("strategy", ("tensor", "channel", "group", "block"), default)
    if strategy == "block":
        block = weights.block("block_structure")
        if block is None:
            raise weights.error("block_structure", "must list two whole numbers: strategy is block")
        return block
    return {"tensor": (0, 0), "channel": (1, 0)}.get(strategy) or (1, weights.group_size("group_size"))


_READERS: Final[dict[str, Callable[[_Section], Quantization]]] = {
    "fp8": _read_fp8,
    "fbgemm_fp8": _read_fbgemm_fp8,
    "compressed-tensors": _read_compressed_tensors,
    "gptq": _read_gptq,
    "awq": _read_awq,
    "mxfp4": _read_mxfp4,
}

READ_METHODS: Final = tuple(_READERS)
"""Supported values of `quant_method`."""


def _one_format(
    method: str, format_: WeightFormat, ignored: tuple[str, ...], sizes_key: str = "quant_method"
) -> Quantization:
    return Quantization(method, (FormatGroup((CLASS_OF_ALL,), format_),), ignored, sizes_key)


def _check_pattern(pattern: str, where: str) -> None:
    """Reject patterns that may take years to match, as an untrusted file may have: repeated groups and many repeats."""
    num_repeats = len(re.findall(r"(?<!\\)[*+{]", pattern))
    has_repeated_group = re.search(r"\)[*+{]|\\\d", pattern) is not None
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError):
        is_pattern = False
    else:
        is_pattern = True
    if not is_pattern or has_repeated_group or num_repeats > _MOST_REPEATS or len(pattern) > _MOST_PATTERN:
        raise ModelConfigError(
            f"{where} has the pattern {shown(pattern)}: a pattern must be a regular expression of {_MOST_PATTERN} "
            f"characters and {_MOST_REPEATS} repeats at most, none of a group"
        )
