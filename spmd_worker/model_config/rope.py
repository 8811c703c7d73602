"""Rotary embedding in config.json: the base, its scaling, and the rotated part of a head.

`rope_parameters` is the newer format, one object or one for each kind of layer; `rope_scaling` with a separate
`rope_theta` the older. With both, transformers uses the older.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from spmd_worker.base.config.plain_values import shown
from spmd_worker.base.errors import ModelConfigError
from spmd_worker.model_config.config_reader import MAX_INT, ConfigReader, checked_integer, checked_number

ROPE_TYPES: Final = ("default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional")
NOT_ROTATED: Final = "none"
"""`RopeParameters.rope_type` of queries that grow and are not rotated."""

STRETCHED_ROPE_TYPES: Final = ("linear", "dynamic", "yarn")
"""Scalings whose `max_position_embeddings` may be the unscaled length: `factor` then multiplies it."""


@dataclass(frozen=True, slots=True)
class RopeParameters:
    """Rotary embedding: the head size, the base and its scaling. Fields a type does not use keep their neutral value.
    `proportional`: the frequencies are those of a full head, and pairs after the first `partial_factor` have none.

    `attention_factor` None lets YaRN (https://arxiv.org/abs/2309.00071) and LongRoPE (https://arxiv.org/abs/2402.13753)
    derive it; lengths are in tokens. The first `partial_factor` of a head's `size` elements is rotated. LongRoPE
    divides frequencies by `short_factors` or `long_factors`, one for each pair of dimensions, and with `short_mscale`
    and `long_mscale` above 0 cosines and sines are multiplied by these, not by the factor. `is_interleaved`: pairs are
    neighbours, not the elements at equal offsets of two halves. With `query_growth` above 0, queries are multiplied by
    (1 + `query_growth` * log(1 + floor((position + `growth_offset`) / original length))). `is_backward`: angles are
    negative. `rounding` lists the values rounded to the model's dtype: "each step" (cosines, sines, multiplications and
    additions), "angles" (cosines and sines, and the result), or "result", the result alone; the others are float32.

    `sections`, if there are any, are the numbers of pairs that turn by a token's position in time, its line and its
    column (https://arxiv.org/abs/2409.12191), which differ in images: one section after another or, with
    `interleaves_sections`, a pair of each in turn as far as section and head go, and time's behind.

    `has_learned_factors`: frequencies are multiplied by exponentials of numbers that the files have, one for each pair.
    `gives_lengths`: layers read the logarithm of each token's number of tokens up to it.
    """

    size: int
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
    partial_factor: float = 1.0
    is_interleaved: bool = False
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    query_growth: float = 0.0
    growth_offset: int = 0
    rounding: str = "each step"
    is_backward: bool = False
    short_mscale: float = 0.0
    long_mscale: float = 0.0
    sections: tuple[int, ...] = ()
    interleaves_sections: bool = False
    has_learned_factors: bool = False
    gives_lengths: bool = False

    @property
    def takes_three_positions(self) -> bool:
        """Whether the frequencies are those of all positions, so that a token's may differ among pairs."""
        return self.rope_type not in ("dynamic", "longrope") and not self.query_growth

    @property
    def pair_axes(self) -> tuple[int, ...]:
        """Position that turns each pair: 0 time, 1 line, 2 column. Empty without sections."""
        if not self.interleaves_sections:
            return tuple([axis for axis, count in enumerate(self.sections) for _ in range(count)])
        axes = [0] * (self.rotary_size // 2)
        for axis in (1, 2):
            for pair in range(axis, min(3 * self.sections[axis], len(axes)), 3):
                axes[pair] = axis
        return tuple(axes)

    @property
    def rotary_size(self) -> int:
        """Number of rotated elements of a head, some by no angle if it is `proportional`."""
        if self.rope_type == NOT_ROTATED:
            return 0
        return self.size if self.rope_type == "proportional" else int(self.size * self.partial_factor)

    def regime(self, num_prompt_tokens: int, most_tokens: int, max_positions: int) -> int:
        """Implements `ModelConfig.rope_regime` for one rope."""
        if self.rope_type == "dynamic" and num_prompt_tokens > max_positions:
            return num_prompt_tokens
        if self.rope_type == "longrope":
            return int(most_tokens > self.original_max_position_embeddings)
        return 0


def read_rope(
    reader: ConfigReader, max_positions: int, head_size: int, rotary_size_key: str = "", *, may_be_partial: bool
) -> RopeParameters:
    """The one rope of a model. Raises ModelConfigError."""
    given, key = given_rope(reader), "partial_rotary_factor"
    if rotary_size_key and reader.get(rotary_size_key) is not None and given.get(key) is None:
        given = {**given, key: reader.get(key, reader.count(rotary_size_key) / head_size)}
    return rope_of(given, reader, max_positions, head_size, may_be_partial=may_be_partial)


def given_rope(reader: ConfigReader) -> Mapping[str, Any]:
    """Settings of the file's one rope. Raises ModelConfigError."""
    key = "rope_scaling" if reader.get("rope_scaling") else "rope_parameters"
    given = reader.get(key) or {}
    if not isinstance(given, Mapping):
        raise ModelConfigError(f"{reader.where(key)}={shown(given)} must be an object")
    return given


def with_sections(
    rope: RopeParameters, reader: ConfigReader, default: Sequence[int], *, interleaves: bool
) -> RopeParameters:
    """The rope with `mrope_section`, or the class's own sections where a file has none and they fit. Raises
    ModelConfigError.
    """
    given, num_pairs = given_rope(reader), rope.rotary_size // 2
    sections, key = given.get("mrope_section"), f"{reader.path}: rope mrope_section"
    if given.get("mrope_interleaved", interleaves) is not interleaves:
        raise ModelConfigError(
            f"{reader.path}: rope mrope_interleaved={shown(given['mrope_interleaved'])} must be "
            f"{str(interleaves).lower()}: models of this architecture are computed that way alone"
        )
    if sections is None:
        fits = interleaves or sum(default) == num_pairs
        return replace(rope, sections=tuple(default), interleaves_sections=interleaves) if fits else rope
    if not isinstance(sections, list) or len(sections) != 3:
        raise ModelConfigError(f"{key}={shown(sections)} must list three numbers of pairs: time, line and column")
    sections = tuple([checked_integer(each, key, 0, MAX_INT) for each in sections])
    if not interleaves and sum(sections) != num_pairs:
        raise ModelConfigError(f"{key}={list(sections)} must add up to {num_pairs}, the rotated pairs of a head")
    return replace(rope, sections=sections, interleaves_sections=interleaves)


def with_alpha(rope: RopeParameters, reader: ConfigReader, head_size: int) -> RopeParameters:
    """The rope with `alpha` of `dynamic` scaling applied to its base, once and for all. Raises ModelConfigError."""
    given = given_rope(reader)
    if rope.rope_type != "dynamic" or not given.get("alpha"):
        return rope
    alpha = checked_number(given["alpha"], f"{reader.path}: rope dynamic alpha")
    if head_size < 4:
        raise ModelConfigError(f"{reader.where('head_dim')}={head_size} must be 4 or more where the rope has an alpha")
    return replace(
        rope, rope_type="default", factor=1.0, rope_theta=rope.rope_theta * alpha ** (head_size / (head_size - 2))
    )


def ntk_rope(reader: ConfigReader, max_positions: int, head_size: int) -> RopeParameters:
    """The rope with the scaling `ntk` of GTE's authors, if the file has it: the base times the factor, then all
    frequencies divided by factor ** (2 / head size). The file's length is that with scaling, so the rope has no
    original one. Raises ModelConfigError.
    """
    given = given_rope(reader)
    key, kind = "rope_scaling", given.get("type", given.get("rope_type", "default"))
    if kind == "default":
        return read_rope(reader, max_positions, head_size, may_be_partial=False)
    where = reader.where(key if reader.get(key) else "rope_parameters")
    if kind != "ntk" or given.get("mixed_b") is not None:
        rule = "is not supported, only type=ntk without mixed_b"
        raise ModelConfigError(f"{where} type={shown(kind)}, mixed_b={shown(given.get('mixed_b'))} {rule}")
    factor = checked_number(given.get("factor"), f"{where} factor")
    if factor < 1:
        raise ModelConfigError(f"{where} factor={factor:g} must be 1 or more")
    theta = checked_number(reader.number("rope_theta") * factor, f"{where} factor times rope_theta")
    return RopeParameters(head_size, "linear", theta, factor ** (2 / head_size))


def with_theta_of(key: str) -> Callable[[RopeParameters, ConfigReader, int], RopeParameters]:
    """An adjustment: the rope with the base that the file has under this key, whatever it has elsewhere."""

    def adjusted(rope: RopeParameters, reader: ConfigReader, head_size: int) -> RopeParameters:
        del head_size
        theta = reader.get(key)
        return rope if theta is None else replace(rope, rope_theta=checked_number(theta, reader.where(key)))

    return adjusted


def with_query_growth(rope: RopeParameters, reader: ConfigReader, head_size: int) -> RopeParameters:
    """The rope with `llama_4_scaling_beta`, if the file has it. Raises ModelConfigError."""
    del head_size
    given = given_rope(reader)
    beta, key = given.get("llama_4_scaling_beta"), f"{reader.path}: rope llama_4_scaling_beta"
    return replace(rope, query_growth=checked_number(beta, key)) if beta else rope


def with_mscales(rope: RopeParameters, reader: ConfigReader, head_size: int) -> RopeParameters:
    """The rope with the factors that Phi-3.5-MoE has instead of LongRoPE's. Raises ModelConfigError."""
    del head_size
    if rope.rope_type == "default":
        return rope
    if rope.rope_type != "longrope":
        raise ModelConfigError(
            f"{reader.path}: rope_type={shown(rope.rope_type)} is not supported, only default and longrope"
        )
    given, where = given_rope(reader), f"{reader.path}: rope longrope"
    short, long = (checked_number(given.get(key), f"{where} {key}") for key in ("short_mscale", "long_mscale"))
    return replace(rope, short_mscale=short, long_mscale=long)


def rotated_layers(reader: ConfigReader, rule: str, windows: Sequence[int]) -> Sequence[bool]:
    """Whether each layer rotates queries and keys, by the rule of `families.family.Rope`, of layers with these windows.
    Raises ModelConfigError.
    """
    if rule == "all" or (rule == "sliding_or_all" and reader.get("sliding_window") is None):
        return [True] * len(windows)
    if rule != "listed":
        return [window > 0 for window in windows]
    if reader.get("no_rope_layers") is None:
        interval = reader.count("no_rope_layer_interval")
        return [(layer + 1) % interval != 0 for layer in range(len(windows))]
    return [bool(flag) for flag in reader.bits("no_rope_layers", len(windows))]


def read_local_rope(
    reader: ConfigReader, max_positions: int, head_size: int, *, may_be_partial: bool = False
) -> tuple[RopeParameters, RopeParameters]:
    """The ropes of full and of sliding layers: the older keys scale the first alone. Raises ModelConfigError."""
    by_kind = reader.get("rope_parameters") or {}
    if not isinstance(by_kind, Mapping):
        raise ModelConfigError(f"{reader.where('rope_parameters')} must be an object")
    if by_kind and "full_attention" not in by_kind and "sliding_attention" not in by_kind:
        by_kind = {"full_attention": by_kind}
    full, sliding = (by_kind.get(kind) or {} for kind in ("full_attention", "sliding_attention"))
    scaling = reader.get("rope_scaling") or {}
    if not all(isinstance(each, Mapping) for each in (full, sliding, scaling)):
        raise ModelConfigError(f"{reader.where('rope_parameters')} must be an object for each kind of layer")
    full_rope, local_rope = (
        rope_of(each, reader, max_positions, head_size, key, may_be_partial=may_be_partial)
        for each, key in (({**full, **scaling}, "rope_theta"), (sliding, "rope_local_base_freq"))
    )
    return full_rope, local_rope


def rope_of(
    given: Mapping[str, Any],
    reader: ConfigReader,
    max_positions: int,
    head_size: int,
    theta_key: str = "rope_theta",
    *,
    may_be_partial: bool = False,
) -> RopeParameters:
    """The rope of one object of config.json; outside of it the base has `theta_key`. Raises ModelConfigError."""
    rope_type = given.get("rope_type", given.get("type", "default"))
    # LongRoPE's name when Phi-3 was released.
    is_longrope = rope_type == "su" or (rope_type == "yarn" and "long_factor" in given)
    rope_type = "longrope" if is_longrope else rope_type
    # Positions in an image are three numbers, which are equal for text: then it is plain.
    rope_type = "default" if rope_type == "mrope" and "mrope_section" in given else rope_type
    if rope_type not in ROPE_TYPES:
        raise ModelConfigError(
            f"{reader.path}: rope_type={shown(rope_type)} is not known; known are {', '.join(ROPE_TYPES)}"
        )
    truncate = given.get("truncate", True)
    if not isinstance(truncate, bool):
        raise ModelConfigError(f"{reader.path}: rope truncate={shown(truncate)} must be true or false")
    is_outside = given.get("rope_theta") is None
    theta_where = reader.where(theta_key) if is_outside else f"{reader.path}: rope rope_theta"
    theta = checked_number(reader.get(theta_key, 10000.0) if is_outside else given["rope_theta"], theta_where)
    partial = _partial_factor(given, reader, head_size, rope_type, may_be_partial)
    numbers = _numbers(given, rope_type, reader, max_positions)
    if rope_type == "yarn" and theta <= 1.0:
        raise ModelConfigError(f"{theta_where}={theta:g} must be above 1 with rope_type yarn: its logarithm divides")
    _check_numbers(numbers, rope_type, reader)
    if rope_type == "longrope":
        numbers |= _longrope_factors(given, reader, int(head_size * partial) // 2)
    return RopeParameters(
        head_size, rope_type=rope_type, rope_theta=theta, truncate=truncate, partial_factor=partial, **numbers
    )


def _check_numbers(numbers: Mapping[str, Any], rope_type: str, reader: ConfigReader) -> None:
    """Check values that depend on each other, so that nothing is divided by zero."""
    key = "original_max_position_embeddings"
    if rope_type == "llama3" and numbers["high_freq_factor"] < numbers["low_freq_factor"]:
        raise ModelConfigError(
            f"{reader.path}: rope llama3 high_freq_factor={numbers['high_freq_factor']:g} must be "
            f"low_freq_factor={numbers['low_freq_factor']:g} or more"
        )
    if rope_type == "longrope" and numbers[key] < 2:
        raise ModelConfigError(f"{reader.path}: {key}={numbers[key]} must be 2 or more with rope_type longrope")


def _partial_factor(
    given: Mapping[str, Any], reader: ConfigReader, head_size: int, rope_type: str, may_be_partial: bool
) -> float:
    value = given.get("partial_rotary_factor")
    value = reader.get("partial_rotary_factor", 1.0) if value is None else value
    is_proportional = rope_type == "proportional"
    if value != 1.0 and not (may_be_partial or is_proportional):
        raise ModelConfigError(f"{reader.path}: partial_rotary_factor other than 1 is not supported")
    partial = checked_number(value, f"{reader.path}: partial_rotary_factor")
    num_rotated = 2 * int(head_size * partial / 2) if is_proportional else int(head_size * partial)
    if partial > 1 or num_rotated % 2 or num_rotated < 2:
        raise ModelConfigError(
            f"{reader.path}: partial_rotary_factor={partial:g} of head_dim={head_size} rotates "
            f"{num_rotated} elements: they must be an even number, from 2 to all"
        )
    return partial


_REQUIRED: Final = {"default": (), "proportional": (), "llama3": ("factor", "low_freq_factor", "high_freq_factor")}
_OPTIONAL: Final = {
    "yarn": ("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor"),
    "longrope": ("attention_factor",),
    "proportional": ("factor",),
}


def _numbers(given: Mapping[str, Any], rope_type: str, reader: ConfigReader, max_positions: int) -> dict[str, Any]:
    key = "original_max_position_embeddings"
    original = checked_integer(reader.get(key, given.get(key) or max_positions), f"{reader.path}: {key}", 1, MAX_INT)
    if rope_type in ("yarn", "longrope") and given.get("factor") is None:
        given = {**given, "factor": max_positions / original}
    numbers: dict[str, Any] = {key: original}
    for each in _REQUIRED.get(rope_type, ("factor",)):
        numbers[each] = checked_number(given.get(each), f"{reader.path}: rope {rope_type} {each}")
    for each in _OPTIONAL.get(rope_type, ()):
        if given.get(each):
            numbers[each] = checked_number(given[each], f"{reader.path}: rope {rope_type} {each}")
    return numbers


def _longrope_factors(given: Mapping[str, Any], reader: ConfigReader, num_pairs: int) -> dict[str, tuple[float, ...]]:
    factors = {}
    for key in ("short_factor", "long_factor"):
        values, where = given.get(key), f"{reader.path}: rope longrope {key}"
        if not isinstance(values, list) or len(values) != num_pairs:
            raise ModelConfigError(f"{where} must list {num_pairs} numbers, one for each pair of rotated elements")
        factors[f"{key}s"] = tuple(checked_number(value, where) for value in values)
    return factors
