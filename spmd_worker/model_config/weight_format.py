"""Storage formats of quantised weights, as data: the parsed `quantization_config` of config.json (`quantization.py`).

A weight [outputs, inputs] is stored as small numbers, of which each rectangle shares a scale and perhaps a zero point:
w = (q - zero) * scale. Needs no torch.
"""

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

CLASS_OF_ALL: Final = "Linear"
"""A target that means every quantised module."""
REGEX: Final = "re:"
"""Prefix of a name that is a regular expression, matched from the beginning of a module's name."""


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """Storage format of one weight.

    `layout` decides the tensors (`model/weights/quantised_weight.py`): "scaled" (one stored number an element),
    "packed" (compressed-tensors' int32), "gptq", "awq" or "mxfp4". `number` is the type of a stored number: "e4m3",
    "int" or "e2m1", of `bits` bits. A scale covers `block_rows` outputs and `block_columns` inputs, 0 for all of them;
    both None: as the scale's shape implies. `has_zeros`: zero points are stored. `has_order`: a tensor has the group of
    each input. `zero_offset` is added to a stored zero point. `is_symmetric`: the zero point is the middle.
    """

    layout: str
    number: str
    bits: int
    block_rows: int | None
    block_columns: int | None
    has_zeros: bool = False
    has_order: bool = False
    zero_offset: int = 0
    is_symmetric: bool = False

    @property
    def words(self) -> str:
        numbers = {"e4m3": "FP8", "e2m1": "FP4"}.get(self.number, f"{self.bits}-bit integers")
        match self.block_rows, self.block_columns:
            case None, None:
                return f"{numbers} with one scale a tensor or a row"
            case 0, 0:
                return f"{numbers} with one scale a tensor"
            case 1, 0:
                return f"{numbers} with one scale a row"
            case 1, columns:
                order = " (act-order)" if self.has_order else ""
                return f"{numbers} in groups of {columns}{order}"
            case rows, columns:
                return f"{numbers} in blocks of {rows} x {columns}"


@dataclass(frozen=True, slots=True)
class FormatGroup:
    """Modules, by `targets` (names, regular expressions or `CLASS_OF_ALL`), whose weights are stored in one format."""

    targets: tuple[str, ...]
    format: WeightFormat


@dataclass(frozen=True, slots=True)
class Quantization:
    """Formats of a checkpoint. `method` is config.json's name, `ignored` the modules whose weights are plain.

    `sizes_key` is the key with the group sizes, for errors.
    """

    method: str
    groups: tuple[FormatGroup, ...]
    ignored: tuple[str, ...] = ()
    sizes_key: str = "quant_method"

    @property
    def words(self) -> str:
        kinds = dict.fromkeys(group.format.words for group in self.groups)
        return f"{' and '.join(kinds)} ({self.method})"

    @property
    def has_4_bits(self) -> bool:
        """Whether weights are stored in 4 bits: all that are quantised, or some."""
        return any(group.format.bits == 4 for group in self.groups)

    def format_of(self, *names: str) -> WeightFormat | None:
        """Format of a module's weight, given all its names; None if it is plain. Names precede regular expressions,
        which are in alphabetical order, and `CLASS_OF_ALL` comes last, whatever the order of groups: as in
        compressed-tensors.
        """
        if any(_is_listed(name, self.ignored) for name in names):
            return None
        plain, expressions = _by_kind(self.groups)
        for targets, format_ in (*plain, *expressions):
            if any(_is_listed(name, targets) for name in names):
                return format_
        return next((group.format for group in self.groups if CLASS_OF_ALL in group.targets), None)


_Targets = tuple[tuple[tuple[str, ...], WeightFormat], ...]


@lru_cache(maxsize=64)
def _by_kind(groups: tuple[FormatGroup, ...]) -> tuple[_Targets, _Targets]:
    """Targets and their format: names by group, and regular expressions one by one."""
    plain = tuple(
        (tuple(each for each in group.targets if not each.startswith(REGEX)), group.format) for group in groups
    )
    expressions = [(each, group.format) for group in groups for each in group.targets if each.startswith(REGEX)]
    return plain, tuple(((each,), format_) for each, format_ in sorted(expressions, key=lambda pair: pair[0]))


def _is_listed(name: str, patterns: tuple[str, ...]) -> bool:
    """Whether a pattern is the module, contains it (`model.visual`), or is the end of its name (`lm_head`)."""
    names, expressions = _sorted_out(patterns)
    words = name.split(".")
    parts = (".".join(part) for index in range(len(words)) for part in (words[: index + 1], words[index:]))
    return any(part in names for part in parts) or any(each.match(name) for each in expressions)


@lru_cache(maxsize=64)
def _sorted_out(patterns: tuple[str, ...]) -> tuple[dict[str, None], tuple[re.Pattern[str], ...]]:
    """Plain names, of which there may be thousands, and regular expressions."""
    expressions = [pattern.removeprefix(REGEX) for pattern in patterns if pattern.startswith(REGEX)]
    return dict.fromkeys(patterns), tuple(re.compile(each) for each in expressions)
