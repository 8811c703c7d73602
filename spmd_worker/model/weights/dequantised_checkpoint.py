"""A checkpoint that dequantises its quantised weights to float32 as they are read: a `WeightSource`, like `Checkpoint`.

The tensors of one weight are found by name and checked by shape before anything is read. Tensors of no weight keep
their names, so the comparison with the model's names finds them. Dequantised values are not cached.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final

import torch

from spmd_worker.base.errors import CheckpointError
from spmd_worker.model.layers.weight_slice import Rectangle, RecutRows, full_rectangle
from spmd_worker.model.weights.bitsandbytes_weight import Int8Weight, Nf4Weight
from spmd_worker.model.weights.checkpoint import Checkpoint, same_weight_error
from spmd_worker.model.weights.fp4_weight import Fp4Weight, Nvfp4Weight
from spmd_worker.model.weights.gguf_checkpoint import GgufCheckpoint
from spmd_worker.model.weights.gguf_weight import GgufWeight, gguf_weights
from spmd_worker.model.weights.quantised_weight import (
    AwqWeight,
    GptqWeight,
    MisfitError,
    Mxfp4Weight,
    PackedWeight,
    QuantisedWeight,
    ScaledWeight,
)
from spmd_worker.model.weights.recut_checkpoint import RecutCheckpoint, recut
from spmd_worker.model.weights.staging import HostStaging
from spmd_worker.model.weights.tensor_checks import WEIGHT_DTYPES
from spmd_worker.model_config.stored_format import StoredFormat
from spmd_worker.model_config.weight_format import FormatMatcher, Quantization, WeightFormat

logger = logging.getLogger(__name__)

_LAYOUTS: Final[dict[str, type[QuantisedWeight]]] = {
    "scaled": ScaledWeight,
    "packed": PackedWeight,
    "gptq": GptqWeight,
    "awq": AwqWeight,
    "mxfp4": Mxfp4Weight,
    "fp4": Fp4Weight,
    "nvfp4": Nvfp4Weight,
    "nvfp4_packed": Nvfp4Weight,
    "bnb4": Nf4Weight,
    "bnb8": Int8Weight,
}
_SCALES: Final = (".weight_scale_inv", ".weight_scale", ".scale")
"""Endings of scales of FP8 and int8, the last in DeepSeek V4's files."""
_ENDINGS: Final[dict[str, dict[str, tuple[str, ...]]]] = {
    "scaled": {
        "numbers": (".weight",),
        "scales": _SCALES,
        "zeros": (".weight_zero_point",),
        "order": (".weight_g_idx",),
    },
    "packed": {
        "numbers": (".weight_packed",),
        "scales": (".weight_scale",),
        "shape": (".weight_shape",),
        "zeros": (".weight_zero_point",),
        "order": (".weight_g_idx",),
    },
    "gptq": {"numbers": (".qweight",), "scales": (".scales",), "zeros": (".qzeros",), "order": (".g_idx",)},
    "awq": {"numbers": (".qweight",), "scales": (".scales",), "zeros": (".qzeros",)},
    "mxfp4": {"numbers": ("_blocks",), "scales": ("_scales",)},
    "fp4": {"numbers": (".weight",), "scales": _SCALES},
    "nvfp4": {"numbers": (".weight",), "scales": (".weight_scale",), "factor": (".weight_scale_2",)},
    "nvfp4_packed": {
        "numbers": (".weight_packed",),
        "scales": (".weight_scale",),
        "divisor": (".weight_global_scale",),
    },
    "bnb4": {
        "numbers": (".weight",),
        "scales": (".weight.absmax",),
        "values": (".weight.quant_map",),
        "state": (".weight.quant_state.bitsandbytes__nf4", ".weight.quant_state.bitsandbytes__fp4"),
        "steps": (".weight.nested_quant_map",),
        "nested": (".weight.nested_absmax",),
    },
    "bnb8": {"numbers": (".weight",), "scales": (".SCB",), "layout": (".weight_format",)},
    # A GGUF alone has such tensors.
    "gguf": {"numbers": ()},
}
"""Endings of the name of a part, by layout and role."""

_OUTPUTS_FIRST: Final = ("gptq", "bnb4", "bnb8")
"""Layouts in which all matrices are [outputs, inputs], those of GPT-2 too, which plain files have transposed."""

_UNUSED: Final = (
    *(".input_scale", ".input_scale_ub", ".input_zero_point", ".activation_scale", ".output_scale"),
    *(".input_global_scale",),
    *(".q_scale", ".k_scale", ".v_scale", ".prob_scale", ".k_zero_point", ".v_zero_point"),
    *(".kv_scale", ".q_zero_point", ".output_zero_point"),
)
"""Endings of names of scales and zero points of activations and the key-value cache."""


@dataclass(slots=True)
class DequantisedCheckpoint:
    """Use `open`. `weights` are the quantised weights, by their names in a plain checkpoint; `plain` has the other
    tensors.
    """

    files: Checkpoint
    plain: Checkpoint | RecutCheckpoint
    weights: dict[str, QuantisedWeight]
    _names: list[str]
    _turned: frozenset[str]

    @classmethod
    def open(
        cls,
        files: Checkpoint,
        quantization: Quantization,
        is_transposed: Callable[[str], bool] = lambda name: False,
        cuts: Mapping[str, RecutRows] = MappingProxyType({}),
    ) -> "DequantisedCheckpoint":
        """The weights of `files`, renamed by the family's table. `is_transposed`: whether plain files have a matrix as
        [inputs, outputs] (GPT-2). `cuts` are those of `RecutCheckpoint`, of tensors that are not quantised.

        Raises CheckpointError, before any data but shapes and tables is read, if parts of a weight are missing or do
        not match `quantization`.
        """
        weights, problems = _find_weights(files, quantization)
        if problems:
            more = f" (and {len(problems) - 1} similar)" if len(problems) > 1 else ""
            key, words = quantization.key_words, quantization.words
            raise CheckpointError(f"{files.folder}: the files do not match {key}, {words}: {problems[0]}{more}")
        used = {part for weight in weights.values() for part in weight.parts.values()}
        others = [name for name in files.names() if name not in used]
        unused = [name for name in others if name.endswith(_UNUSED)]
        if unused:
            logger.info(
                "%s: ignored %d scales of activations and caches, such as %s: both are computed in the run's dtype",
                *(files.folder, len(unused), unused[0]),
            )
        plain = [name for name in others if not name.endswith(_UNUSED)]
        twice = next((name for name in plain if name in weights), None)
        if twice is not None:
            numbers = weights[twice].parts["numbers"]
            raise same_weight_error(files.folder, files.stored_name(twice), files.stored_name(numbers))
        turned = [name for name in weights if weights[name].format.layout in _OUTPUTS_FIRST and is_transposed(name)]
        return cls(files, recut(files, cuts), weights, sorted([*plain, *weights]), frozenset(turned))

    @property
    def folder(self) -> Path:
        return self.files.folder

    @property
    def staging(self) -> HostStaging:
        return self.files.staging

    @property
    def num_bytes_read(self) -> int:
        """Stored bytes, before dequantisation."""
        return self.files.num_bytes_read

    def names(self) -> list[str]:
        """All weights and the tensors that are part of none, sorted."""
        return self._names

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self.weights:
            return self.plain.shape(name)
        shape = self.weights[name].shape
        return shape[::-1] if name in self._turned else shape

    def dtype(self, name: str) -> torch.dtype:
        return torch.float32 if name in self.weights else self.plain.dtype(name)

    def position(self, name: str) -> tuple[str, int]:
        return self.files.position(self.weights[name].parts["numbers"] if name in self.weights else name)

    def blocks(self, name: str, region: Rectangle, max_bytes: int) -> Iterator[Rectangle]:
        if name not in self.weights:
            return self.plain.blocks(name, region, max_bytes)
        weight, max_elements = self.weights[name], max_bytes // torch.float32.itemsize
        if name not in self._turned:
            return weight.blocks(region, max_elements)
        return (block[::-1] for block in weight.blocks(region[::-1], max_elements))

    def read(self, name: str, region: Rectangle) -> torch.Tensor:
        """`Checkpoint.read`: only the numbers and scales that the region needs are read."""
        if name not in self.weights:
            return self.plain.read(name, region)
        weight = self.weights[name]
        return weight.read(region[::-1]).t() if name in self._turned else weight.read(region)

    def row_scales(self, name: str, region: Rectangle) -> torch.Tensor | None:
        """`ScaledWeight.row_scales` of a weight; None if it has none."""
        weight = self.weights.get(name)
        return weight.row_scales(region) if type(weight) is ScaledWeight else None

    def is_stored_as(self, name: str, stored: StoredFormat) -> bool:
        """Whether `read_stored` reads a weight in this format."""
        weight = self.weights.get(name)
        return weight is not None and weight.is_stored_as(stored)

    def check_stored(self, name: str, stored: StoredFormat) -> None:
        """Raise CheckpointError unless a weight is stored in this format."""
        if self.is_stored_as(name, stored):
            return
        weight, found = self.weights.get(name), f"is not stored in {stored.words}"
        if isinstance(weight, GgufWeight):
            found = f"is {weight.format.number}, which {stored.words} do not hold"
        elif not stored.is_affine:
            found += " with the scales that quantization_config of config.json says"
        way_out = "give a GGUF of the types that were loaded, or " if stored.is_affine else ""
        raise CheckpointError(
            f"{self.folder / self.position(name)[0]}: {name} {found}: {way_out}set model.dequantize_weights=true"
        )

    def read_stored(self, name: str, region: Rectangle, stored: StoredFormat) -> tuple[torch.Tensor, torch.Tensor]:
        """`QuantisedWeight.read_stored` of a weight that `check_stored` has found in this format."""
        return self.weights[name].read_stored(region, stored)

    def is_unused(self, name: str) -> bool:
        """`WeightSource.is_unused`: older writers of GPTQ give layers without a bias one of zeros."""
        module, _, leaf = name.rpartition(".")
        if leaf != "bias" or f"{module}.weight" not in self.weights:
            return False
        return not self.files.read(name, full_rectangle(self.files.shape(name))).any()


def _find_weights(files: Checkpoint, quantization: Quantization) -> tuple[dict[str, QuantisedWeight], list[str]]:
    """Quantised weights by name, and problems of those whose parts do not match. A GGUF itself has their types."""
    if isinstance(files, GgufCheckpoint):
        return gguf_weights(files), []
    weights: dict[str, QuantisedWeight] = {}
    problems = []
    known, matcher = dict.fromkeys(files.names()), quantization.matcher()
    for name in known:
        module, format_ = _module_and_format(files, name, matcher, known)
        if format_ is None:
            continue
        try:
            parts = _parts(module, format_, known)
            weight = module if format_.layout == "mxfp4" else f"{module}.weight"
            weights[weight] = _LAYOUTS[format_.layout](files, format_, parts)
        except MisfitError as error:
            problems.append(str(error))
    return weights, problems


def _module_and_format(
    files: Checkpoint, name: str, matcher: FormatMatcher, known: dict[str, None]
) -> tuple[str, WeightFormat | None]:
    """Module and format of the weight whose numbers are the tensor `name`; None if it is not quantised."""
    for ending in (".qweight", ".weight_packed", "_blocks", ".weight"):
        if not name.endswith(ending):
            continue
        # bitsandbytes may call its bytes numbers of a weight's dtype.
        has_parts = f"{name}.absmax" in known or f"{name}.quant_map" in known
        if ending == ".weight" and files.kind(name) in WEIGHT_DTYPES and not has_parts:
            break
        module, stored = name.removesuffix(ending), files.stored_name(name).removesuffix(ending)
        format_ = matcher.format_of(module, stored)
        is_quantised = format_ is not None and ending in _ENDINGS[format_.layout]["numbers"]
        return module, format_ if is_quantised else None
    return "", None


def _parts(module: str, format_: WeightFormat, known: dict[str, None]) -> dict[str, str]:
    """Names by role. Raises MisfitError for a missing part."""
    parts = {}
    for role, endings in _ENDINGS[format_.layout].items():
        found = next((module + ending for ending in endings if module + ending in known), None)
        if found is not None and _is_used(role, format_):
            parts[role] = found
        elif format_.has_order if role == "order" else role not in _OPTIONAL and _is_used(role, format_):
            (first, *_) = _ENDINGS[format_.layout]["numbers"]
            raise MisfitError(f"{module}{first} has no {' or '.join(module + ending for ending in endings)}")
    return parts


_OPTIONAL: Final = ("steps", "nested", "layout")
"""Roles of parts that weights of a format may have."""


def _is_used(role: str, format_: WeightFormat) -> bool:
    if role == "zeros":
        return format_.has_zeros
    # GPTQ's files may have an order although the format has none: it is ascending then.
    return role != "order" or format_.has_order or format_.layout == "gptq"
