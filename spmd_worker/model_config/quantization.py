"""Reads `quantization_config` of a config.json: the storage format of each weight.

Unknown settings are rejected by name, with the key and the way out, rather than misread. Scales of activations and of
the key-value cache change nothing here: activations are computed, and cached, in the run's dtype.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from spmd_worker.base.config.plain_values import shown
from spmd_worker.base.errors import ModelConfigError
from spmd_worker.model_config.bounded_patterns import MAX_PATTERN, MAX_REPEATS, is_bounded
from spmd_worker.model_config.config_reader import ConfigReader
from spmd_worker.model_config.gguf.tensor_types import TENSOR_TYPES
from spmd_worker.model_config.stored_format import MX_GROUP
from spmd_worker.model_config.weight_format import (
    ANY_END,
    CLASS_OF_ALL,
    GGUF,
    REGEX,
    FormatGroup,
    Quantization,
    WeightFormat,
)

QUANTIZATION_KEYS: Final = ("quantization_config", "compression_config")
"""Keys of config.json, of which older files have the second."""
MODELOPT_FILE: Final = "hf_quant_config.json"
"""ModelOpt's file, which counts if config.json says nothing of quantisation."""
_WAY_OUT: Final = "give a float32, bfloat16 or float16 checkpoint of the model"
_DEQUANTISE: Final = "load it with transformers, call model.dequantize(), save_pretrained, and give that folder"
_UNSUPPORTED: Final = {
    **dict.fromkeys(("aqlm", "bitnet", "eetq", "exl2", "exl3", "fouroversix", "fp_quant", "gemma", "hqq"), _WAY_OUT),
    **dict.fromkeys(("metal", "mxfp8", "quanto", "quark", "quip", "sinq", "spqr", "torchao", "vptq"), _WAY_OUT),
    "higgs": _DEQUANTISE,
    "auto-round": "export it as auto_gptq or auto_awq, or " + _WAY_OUT,
    "marlin": "give the GPTQ checkpoint that it was made from",
    "nvfp4": "give the bfloat16 checkpoint, or one in NVFP4 by compressed-tensors or modelopt",
}
"""Known but unsupported methods, with the way out."""
_EXPERTS: Final = "expert_dtype"
_ROUTED: Final = rf"{REGEX}.*\.experts\.\d+\."
"""Matrices of routed experts."""
_MAX_GROUP: Final = 1 << 20
_MAX_NAMES: Final = 100_000
_MAX_NAME: Final = 80


def read_quantization(config: Mapping[str, Any], path: Path) -> Quantization | None:
    """Quantization in the contents of `path`, which is used in errors alone, with those of `MODELOPT_FILE`, if they
    count, under its name; None if the weights are plain. Raises ModelConfigError.
    """
    found, way_out = _described_in(config), f": {_WAY_OUT}"
    if found is None:
        other = config.get(MODELOPT_FILE)
        if not isinstance(other, Mapping):
            return None
        section = ConfigReader(other, path.parent / MODELOPT_FILE, way_out=way_out).object("quantization")
        read = _read_modelopt(section)
        return None if read is None else replace(read, file=MODELOPT_FILE)
    owner = ConfigReader(found[0], path, way_out=way_out)
    section = owner.object(found[1])
    is_older = section.get("quant_method") is None and section.get("config_groups") is not None
    method = "compressed-tensors" if is_older else section.get("quant_method")
    if not isinstance(method, str) or method not in _READERS:
        name = method.removeprefix("intel/") if isinstance(method, str) else ""
        reason = f"is not supported: {_UNSUPPORTED[name]}" if name in _UNSUPPORTED else f"is unknown: {_WAY_OUT}"
        raise section.error("quant_method", f"{reason}; supported are {', '.join(READ_METHODS)}")
    read = _READERS[method](section)
    if method != "fp8" or read is None:
        return read
    return _with_experts(read, owner if section.get(_EXPERTS) is None else section)


def _with_experts(read: Quantization, reader: ConfigReader) -> Quantization:
    """FP8 whose matrices of routed experts may be FP4, as `reader` says (DeepSeek V4)."""
    if reader.choice(_EXPERTS, ("fp8", "fp4"), "fp8") == "fp8":
        return read
    return replace(read, groups=(*read.groups, FormatGroup((_ROUTED,), WeightFormat("fp4", "e2m1", 4, 1, MX_GROUP))))


def describes_quantization(config: Mapping[str, Any]) -> bool:
    """Whether a config.json says how weights are quantised."""
    return _described_in(config) is not None


def _described_in(config: Mapping[str, Any]) -> tuple[Mapping[str, Any], str] | None:
    """Object that has the description, and its key."""
    text = config.get("text_config")
    objects = (config, text if isinstance(text, Mapping) else {})
    return next(((each, key) for each in objects for key in QUANTIZATION_KEYS if each.get(key)), None)


def _group_size(section: ConfigReader, default: Any = None) -> int:
    """Inputs that share a scale, 0 for all (-1 in the file)."""
    value = section.get("group_size", default)
    if type(value) is not int or not (value == -1 or 1 <= value <= _MAX_GROUP):
        raise section.error("group_size", f"must be -1 (all inputs) or a whole number from 1 to {_MAX_GROUP}")
    return max(value, 0)


def _block_size(section: ConfigReader, key: str) -> tuple[int, int]:
    """Outputs and inputs that share a scale."""
    value = section.get(key)
    is_pair = isinstance(value, list) and len(value) == 2
    if not is_pair or any(type(size) is not int or not 1 <= size <= _MAX_GROUP for size in value):
        raise section.error(key, f"must list two whole numbers from 1 to {_MAX_GROUP}")
    return value[0], value[1]


def _listed_names(section: ConfigReader, key: str, default: tuple[str, ...]) -> list[str]:
    names = section.get(key, list(default))
    if not isinstance(names, list) or len(names) > _MAX_NAMES or not all(isinstance(name, str) for name in names):
        raise ModelConfigError(f"{section.where(key)} must list names of modules, {_MAX_NAMES} at most")
    return names


def _module_names(section: ConfigReader, key: str, default: tuple[str, ...] = ()) -> tuple[str, ...]:
    """Names of modules, and regular expressions that can be matched in little time.

    transformers uses every name as a pattern of full words, compressed-tensors those that begin with `re:`.
    """
    names, where = _listed_names(section, key, default), section.where(key)
    checked = []
    for name in names:
        is_pattern = name.startswith(REGEX) or re.search(r"[*+?()|[\]\\]", name)
        pattern = _checked_pattern(name.removeprefix(REGEX), where) if is_pattern else name
        checked.append(name if name.startswith(REGEX) or not is_pattern else rf"{REGEX}(?:{pattern})(?:\.|$)")
    return tuple(checked)


def _read_fp8(section: ConfigReader) -> Quantization:
    section.choice("fmt", ("e4m3", "float8_e4m3fn"), "e4m3")
    key = "weight_block_size"
    block = (None, None) if section.get(key) is None else _block_size(section, key)
    ignored = _module_names(section, "modules_to_not_convert") + _module_names(section, "ignored_layers")
    format_ = WeightFormat("scaled", "e4m3", 8, *block)
    return _one_format("fp8", format_, ignored, "weight_block_size")


def _read_fixed(section: ConfigReader) -> Quantization:
    """Quantization of a method with one storage format."""
    method = section.get("quant_method")
    return _one_format(method, _FIXED_FORMATS[method], _module_names(section, "modules_to_not_convert"))


_FIXED_FORMATS: Final = {
    "fbgemm_fp8": WeightFormat("scaled", "e4m3", 8, 1, 0),
    "mxfp4": WeightFormat("mxfp4", "e2m1", 4, 1, 32),
}


def _read_gptq(section: ConfigReader) -> Quantization:
    bits = section.choice("bits", (4, 8))
    key = "checkpoint_format" if section.get("checkpoint_format") is not None else "format"
    is_second = section.choice(key, ("gptq", "gptq_v2"), "gptq") == "gptq_v2"
    section.choice("is_marlin_format", (False,), False)
    has_order = section.choice("desc_act", (False, True), False)
    is_symmetric = section.choice("sym", (False, True), True)
    format_ = WeightFormat(
        *("gptq", "int", bits, 1, _group_size(section, -1)),
        has_zeros=True,
        has_order=has_order,
        zero_offset=0 if is_second else 1,
        is_symmetric=is_symmetric,
    )
    return _one_format(
        "gptq", format_, _module_names(section, "modules_to_not_convert") + _skipped(section), "bits and group_size"
    )


def _skipped(section: ConfigReader) -> tuple[str, ...]:
    """Modules that gptqmodel's `dynamic` leaves plain; other storage formats in it are rejected."""
    rules = section.object("dynamic").config
    others = [
        rule
        for rule, changes in rules.items()
        if not rule.startswith("-:")
        and not (isinstance(changes, Mapping) and all(section.get(key) == changes[key] for key in changes))
    ]
    if others:
        raise ModelConfigError(
            f"{section.where('dynamic')} has {shown(others[0])}, a format of its own for some modules, which is not "
            f"supported, only rules that begin with -: are: {_WAY_OUT}"
        )
    patterns = tuple(rule.removeprefix("-:") for rule in rules if rule.startswith("-:"))
    return tuple(REGEX + _checked_pattern(pattern, section.where("dynamic")) for pattern in patterns)


def _read_awq(section: ConfigReader) -> Quantization:
    bits = section.choice("bits", (4,))
    key = "version" if section.get("version") is not None else "format"
    version = section.get(key, "gemm")
    if not isinstance(version, str) or version.lower() != "gemm":
        raise section.error(key, f"is not supported, only gemm: {_WAY_OUT}")
    section.choice("zero_point", (True,), True)
    format_ = WeightFormat("awq", "int", bits, 1, _group_size(section, 128), has_zeros=True)
    return _one_format("awq", format_, _module_names(section, "modules_to_not_convert"), "bits and group_size")


def _read_bitsandbytes(section: ConfigReader) -> Quantization:
    """Formats of `load_in_4bit` and `load_in_8bit`. Files themselves say which weights have them: what
    `llm_int8_skip_modules` means differs between releases of transformers.
    """
    has_four, has_eight = (section.choice(key, (False, True), False) for key in ("load_in_4bit", "load_in_8bit"))
    if has_four == has_eight:
        raise section.error("load_in_4bit", f"and load_in_8bit={str(has_eight).lower()}: one of them must be true")
    if has_eight:
        section.choice("llm_int8_has_fp16_weight", (False,), False)
        return _one_format("bitsandbytes", WeightFormat("bnb8", "int", 8, 1, 0), (), "load_in_8bit")
    kind = section.choice("bnb_4bit_quant_type", ("nf4", "fp4"), "fp4")
    section.choice("bnb_4bit_use_double_quant", (False, True), False)
    section.choice("bnb_4bit_quant_storage", _STORAGE_DTYPES, "uint8")
    return _one_format("bitsandbytes", WeightFormat("bnb4", kind, 4, None, None), (), "load_in_4bit")


_STORAGE_DTYPES: Final = ("uint8", "int8", "float16", "bfloat16", "float32", "float64")
"""Dtypes whose bytes have the numbers of 4 bits, two a byte."""

_COMPRESSED: Final = {
    "float-quantized": ("scaled", "float", (8,)),
    "int-quantized": ("scaled", "int", (8,)),
    "naive-quantized": ("scaled", None, (8,)),
    "pack-quantized": ("packed", "int", (4, 8)),
    "nvfp4-pack-quantized": ("nvfp4_packed", "float", (4,)),
}
"""`format` -> the layout, the required `weights.type`, and the bits."""


def _read_compressed_tensors(section: ConfigReader) -> Quantization:
    for key in ("sparsity_config", "transform_config"):
        inner = section.object(key).config
        if inner and inner.get("format") != "dense":
            raise ModelConfigError(f"{section.where(key)} is not supported: {_WAY_OUT}")
    section.choice("quantization_status", ("compressed", "frozen"), "compressed")
    groups = section.object("config_groups")
    if not groups.config:
        raise section.error("config_groups", "must describe how weights are stored")
    read = [_read_group(groups.object(name), section) for name in groups.config]
    return Quantization("compressed-tensors", tuple(read), _module_names(section, "ignore"), "config_groups")


def _read_group(group: ConfigReader, section: ConfigReader) -> FormatGroup:
    """Format of a group; that of `section` if the group has none of its own."""
    name = (group if group.get("format") is not None else section).choice("format", tuple(_COMPRESSED))
    layout, wanted, bits = _COMPRESSED[name]
    weights = group.object("weights")
    if not weights.config:
        raise group.error("weights", "must describe how weights are stored")
    kind = weights.choice("type", ("float", "int") if wanted is None else (wanted,), "int")
    num_bits = weights.choice("num_bits", bits, 8)
    if layout == "nvfp4_packed":
        weights.choice("strategy", ("tensor_group",))
        weights.choice("symmetric", (True,), True)
        weights.choice("group_size", (_NVFP4_GROUP,))
        return FormatGroup(_module_names(group, "targets", (CLASS_OF_ALL,)), replace(_NVFP4, layout=layout))
    is_symmetric = weights.choice("symmetric", (True, False), True)
    block = _block(weights)
    order = weights.choice("actorder", (None, True, False, "group", "weight", "static", "dynamic"))
    format_ = WeightFormat(
        *(layout, "e4m3" if kind == "float" else "int", num_bits, *block),
        has_zeros=not is_symmetric,
        has_order=order in (True, "group", "dynamic"),
        is_symmetric=is_symmetric,
    )
    return FormatGroup(_module_names(group, "targets", (CLASS_OF_ALL,)), format_)


def _block(weights: ConfigReader) -> tuple[int, int]:
    default = "group" if weights.get("group_size") is not None else "tensor"
    strategy = weights.choice("strategy", ("tensor", "channel", "group", "block"), default)
    if strategy == "block":
        return _block_size(weights, "block_structure")
    return {"tensor": (0, 0), "channel": (1, 0)}.get(strategy) or (1, _group_size(weights))


_NVFP4_GROUP: Final = 16
_NVFP4: Final = WeightFormat("nvfp4", "e2m1", 4, 1, _NVFP4_GROUP)
_MODELOPT: Final = {
    "FP8": WeightFormat("scaled", "e4m3", 8, 0, 0),
    "FP8_PER_CHANNEL_PER_TOKEN": WeightFormat("scaled", "e4m3", 8, 1, 0),
    "FP8_PB_WO": WeightFormat("scaled", "e4m3", 8, 128, 128),
    **dict.fromkeys(("NVFP4", "W4A16_NVFP4"), _NVFP4),
}
"""Formats by `quant_algo`. Those with AWQ in their name scale inputs too."""
_MIXED: Final = "MIXED_PRECISION"


def _read_modelopt(section: ConfigReader) -> Quantization | None:
    """Formats of TensorRT Model Optimizer's `quantization`, in config.json or in its own file; None if it is of a plain
    model, of which its exports say null.
    """
    inner = section.object("quantization")
    section = inner if inner.config else section
    algorithm = section.get("quant_algo")
    if algorithm is None and any(section.get(key) is not None for key in ("kv_cache_quant_algo", "kv_cache_scheme")):
        return Quantization("modelopt", ())
    if algorithm is None and "quant_algo" in section.config:
        return None
    ignored = _wildcards(section, "ignore") + _wildcards(section, "exclude_modules")
    if isinstance(algorithm, str) and algorithm.upper() == _MIXED:
        return Quantization("modelopt", _formats_of_layers(section), ignored, "quantized_layers")
    return _one_format("modelopt", _algorithm(section), ignored, "quant_algo")


def _algorithm(section: ConfigReader) -> WeightFormat:
    """Format of `quant_algo`, which may be in small letters."""
    value = section.get("quant_algo")
    found = _MODELOPT.get(value.upper()) if isinstance(value, str) else None
    if found is None:
        raise section.error("quant_algo", f"is not supported, only {', '.join(_MODELOPT)} and {_MIXED}: {_WAY_OUT}")
    if found is _NVFP4:
        section.choice("group_size", (_NVFP4_GROUP,), _NVFP4_GROUP)
    return found


def _formats_of_layers(section: ConfigReader) -> tuple[FormatGroup, ...]:
    """Groups of the modules in `quantized_layers`, each with a `quant_algo` of its own. Others are plain."""
    layers = section.object("quantized_layers")
    if not layers.config or len(layers.config) > _MAX_NAMES:
        raise section.error("quantized_layers", f"must have the formats of 1 to {_MAX_NAMES} modules")
    of_format: dict[WeightFormat, list[str]] = {}
    for name in layers.config:
        target = _wildcard(name, section.where("quantized_layers"))
        of_format.setdefault(_algorithm(layers.object(name)), []).append(target)
    return tuple(FormatGroup(tuple(names), format_) for format_, names in of_format.items())


def _wildcards(section: ConfigReader, key: str) -> tuple[str, ...]:
    """Names of modules, which may have wildcards."""
    return tuple(_wildcard(name, section.where(key)) for name in _listed_names(section, key, ()))


def _wildcard(name: str, where: str) -> str:
    """A name in which `*` stands for any characters, mostly at the end, as a pattern of `Quantization`."""
    beginning, *others = name.split(ANY_END)
    if others in ([], [""]) and not name.startswith(REGEX):
        return name
    expression = ".*".join(map(re.escape, (beginning, *others)))
    pattern = name.removeprefix(REGEX) if name.startswith(REGEX) else rf"{expression}(?:\.|$)"
    return REGEX + _checked_pattern(pattern, where)


def _read_gguf(section: ConfigReader) -> Quantization:
    """Types of the modules of a GGUF, in the folder that was made of it (`gguf/settings.py`). Others' folders with the
    method have none.
    """
    types, known = section.object("types"), {each.name: each for each in TENSOR_TYPES.values() if not each.is_plain}
    if not types.config:
        raise section.error(
            "quant_method",
            "is not supported without the types of a GGUF's tensors: give model.path its GGUF file, or the "
            "safetensors checkpoint that it was made from",
        )
    groups = []
    for name in types.config:
        if name not in known:
            raise types.error(name, f"is no type of GGUF's tensors, only {', '.join(known)} are")
        modules = _listed_names(types, name, ())
        if any(each.startswith(REGEX) or each.endswith(ANY_END) for each in modules):
            raise types.error(name, "must list names of modules, no patterns")
        type_ = known[name]
        bits = type_.block_bytes * 8 // type_.block
        groups.append(FormatGroup(tuple(modules), WeightFormat(GGUF, name, bits, 1, type_.block)))
    return Quantization(GGUF, tuple(groups), sizes_key="types")


_READERS: Final[dict[str, Callable[[ConfigReader], Quantization | None]]] = {
    "fp8": _read_fp8,
    "fbgemm_fp8": _read_fixed,
    "compressed-tensors": _read_compressed_tensors,
    "gptq": _read_gptq,
    "awq": _read_awq,
    "mxfp4": _read_fixed,
    "bitsandbytes": _read_bitsandbytes,
    "modelopt": _read_modelopt,
    GGUF: _read_gguf,
}

READ_METHODS: Final = tuple(method for method in _READERS if method != GGUF)
"""Supported values of `quant_method` of checkpoints; a GGUF's is written here."""


def _one_format(
    method: str, format_: WeightFormat, ignored: tuple[str, ...], sizes_key: str = "quant_method"
) -> Quantization:
    return Quantization(method, (FormatGroup((CLASS_OF_ALL,), format_),), ignored, sizes_key)


def _checked_pattern(pattern: str, where: str) -> str:
    """`pattern`. Rejects those that may take years to match, as in an untrusted file: repeated groups, many repeats."""
    if not is_bounded(pattern):
        raise ModelConfigError(
            f"{where} has the pattern {shown(pattern)}: a pattern must be a regular expression of {MAX_PATTERN} "
            f"characters and {MAX_REPEATS} repeats at most, none of a group"
        )
    return pattern
