"""Storage formats of quantised weights, as data: the parsed `quantization_config` of config.json (`quantization.py`).

A weight [outputs, inputs] is stored as small numbers, of which each rectangle shares a scale and perhaps a zero point:
w = (q - zero) * scale. Needs no torch.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from spmd_worker.model_config.stored_format import GGUF_FORMATS

CLASS_OF_ALL: Final = "Linear"
"""A target that means every quantised module."""
REGEX: Final = "re:"
"""Prefix of a name that is a regular expression, matched from the beginning of a module's name."""
ANY_END: Final = "*"
"""End of a name that is the beginning of modules' names."""
GGUF: Final = "gguf"
"""Method and layout of a GGUF's weights."""
_NUMBERS: Final = {"e4m3": "FP8", "e2m1": "FP4", "nf4": "NF4", "fp4": "FP4"}


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """Storage format of one weight.

    `layout` decides the tensors (`model/weights/quantised_weight.py`): "scaled" (one stored number an element),
    "packed" (compressed-tensors' int32), "gptq", "awq", "mxfp4", "fp4" (the same numbers in matrices of their own),
    "nvfp4", "nvfp4_packed" (compressed-tensors'), "bnb4" or "bnb8" (bitsandbytes), or "gguf". `number` is the type of
    a stored number: "e4m3", "int", "e2m1", "nf4" and "fp4", which the file has tables of, or of a GGUF's tensor, of
    `bits` bits. A scale covers `block_rows` outputs and `block_columns` inputs, 0 for all of them; both None: as the
    file says. `has_zeros`: zero points are stored. `has_order`: a tensor has the group of each input. `zero_offset` is
    added to a stored zero point. `is_symmetric`: the zero point is the middle.
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
        if self.layout == GGUF:
            return self.number
        numbers = _NUMBERS.get(self.number, f"{self.bits}-bit integers")
        match self.block_rows, self.block_columns:
            case None, None if self.layout == "bnb4":
                return f"{numbers} in blocks"
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

    @property
    def can_stay_as_stored(self) -> bool:
        """Whether CPUs hold such weights as they are stored: those of 4 bits and of FP8, and most types of GGUF."""
        if self.layout == GGUF:
            return self.number in GGUF_FORMATS
        return self.bits == 4 or self.number == "e4m3"


@dataclass(frozen=True, slots=True)
class FormatGroup:
    """Modules, by `targets` (names, regular expressions or `CLASS_OF_ALL`), whose weights are stored in one format."""

    targets: tuple[str, ...]
    format: WeightFormat


@dataclass(frozen=True, slots=True)
class Quantization:
    """Formats of a checkpoint; none of weights if only its key-value cache is quantised. `method` is config.json's
    name, `ignored` the modules whose weights are plain.

    `sizes_key` is the key with the group sizes, and `file` the file that has it, for errors.
    """

    method: str
    groups: tuple[FormatGroup, ...]
    ignored: tuple[str, ...] = ()
    sizes_key: str = "quant_method"
    file: str = "config.json"

    @property
    def words(self) -> str:
        kinds = dict.fromkeys(group.format.words for group in self.groups)
        return f"{' and '.join(kinds) or 'plain weights'} ({self.method})"

    @property
    def key_words(self) -> str:
        """The key as messages call it."""
        section = "quantization_config" if self.file == "config.json" else "quantization"
        return f"{section}.{self.sizes_key} of {self.file}"

    @property
    def can_stay_as_stored(self) -> bool:
        """Whether CPUs hold weights, all that are quantised or some, as they are stored."""
        return any(group.format.can_stay_as_stored for group in self.groups)

    def format_of(self, *names: str) -> WeightFormat | None:
        """Format of a module's weight, given all its names; None if it is plain."""
        return self.matcher().format_of(*names)

    def matcher(self) -> "FormatMatcher":
        """The patterns, made ready once. For many modules: there may be as many names in a pattern's list."""
        return _matcher(self)


class FormatMatcher:
    """Formats of modules by their names. Names precede regular expressions, which are in alphabetical order, and
    `CLASS_OF_ALL` comes last, whatever the order of groups: as in compressed-tensors.
    """

    def __init__(self, quantization: Quantization) -> None:
        groups = quantization.groups
        self._ignored = _Patterns(quantization.ignored)
        plain = [([each for each in group.targets if not each.startswith(REGEX)], group.format) for group in groups]
        expressions = [([each], group.format) for group in groups for each in group.targets if each.startswith(REGEX)]
        ordered = [*plain, *sorted(expressions, key=lambda pair: pair[0])]
        self._formats = [(_Patterns(targets), format_) for targets, format_ in ordered]
        self._of_all = next((group.format for group in groups if CLASS_OF_ALL in group.targets), None)

    def format_of(self, *names: str) -> WeightFormat | None:
        """`Quantization.format_of`."""
        if any(self._ignored.has(name) for name in names):
            return None
        found = (format_ for targets, format_ in self._formats if any(targets.has(name) for name in names))
        return next(found, self._of_all)


class _Patterns:
    """Plain names, of which there may be thousands, beginnings of names, and regular expressions."""

    def __init__(self, patterns: Iterable[str]) -> None:
        self._names = dict.fromkeys(patterns)
        expressions = [each.removeprefix(REGEX) for each in self._names if each.startswith(REGEX)]
        self._expressions = [re.compile(each) for each in expressions]
        plain = [each for each in self._names if not each.startswith(REGEX)]
        self._beginnings = tuple(each.removesuffix(ANY_END) for each in plain if each.endswith(ANY_END))

    def has(self, name: str) -> bool:
        """Whether a pattern is the module, contains it (`model.visual`), is the end of its name (`lm_head`), or its
        beginning.
        """
        # Slices, without a generator: plans of large models ask for tens of thousands of names.
        dots = [index for index, letter in enumerate(name) if letter == "."]
        parts = [name, *[part for dot in dots for part in (name[:dot], name[dot + 1 :])]]
        is_named = not self._names.keys().isdisjoint(parts) or name.startswith(self._beginnings)
        return is_named or any(each.match(name) for each in self._expressions)


@lru_cache(maxsize=8)
def _matcher(quantization: Quantization) -> FormatMatcher:
    return FormatMatcher(quantization)
