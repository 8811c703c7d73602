"""Layers whose experts stay in memory as the checkpoint has them, decided from config.json and the layout alone.

`model.quantization` decides what is multiplied: null, weights and activations in the run's dtype; int8 and fp8, W8A8.
Under null an expert's matrices in MXFP4 or FP8 may stay as the file has them, because kernels that decode a tile while
they load it compute the bits of the dequantised matrices: only memory and bandwidth differ. So no value of
`model.quantization` asks for it, and it happens wherever kernels can (GPUs with the Triton backend), unless
`model.dequantize_experts` is set, as updates of weights need. FP8 files of dense models are another matter: computed
with their own numbers under `model.quantization=fp8`, which quantises activations too, and dequantised otherwise.

A rank's share must begin and end where scales do. All ranks decide alike, for all of them, so that memory is shared
evenly. Nothing is read but config.json: files that do not match it are refused when they are loaded.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from spmd_worker.model_config.layer_config import ExpertsConfig
from spmd_worker.model_config.model_config import ModelConfig
from spmd_worker.model_config.stored_format import MX_GROUP, MXFP4, STEP, StoredFormat
from spmd_worker.model_config.weight_format import WeightFormat
from spmd_worker.ranks.leaves import column_range
from spmd_worker.ranks.topology import RankLayout

_MATRICES: Final = ("gate_proj", "up_proj", "down_proj")


class UnfitError(Exception):
    """Matrices cannot stay as they are stored. The message is the reason."""


@dataclass(frozen=True, slots=True)
class StoredExperts:
    """`formats` by index of the layer. `reason`: why experts of another layer, quantised too, are dequantised."""

    formats: Mapping[int, StoredFormat]
    reason: str = ""


NO_STORED_EXPERTS: Final = StoredExperts({})


def find_stored_experts(model_config: ModelConfig, layout: RankLayout) -> StoredExperts:
    """The layers whose experts' matrices, all of them on every rank, can stay as they are stored."""
    formats: dict[int, StoredFormat] = {}
    reason = ""
    for index, layer in enumerate(model_config.layers):
        if layer.experts is None:
            continue
        try:
            found = _format_in_files(model_config, index)
            if found is not None:
                _check_shares(found, layer.experts, layer.experts.latent_size or model_config.hidden_size, layout)
                formats[index] = found
        except UnfitError as error:
            reason = reason or str(error)
    return StoredExperts(formats, reason)


def expert_modules(model_config: ModelConfig, index: int) -> list[str]:
    """Names in the checkpoint of the matrices of a layer's first expert, or of the stacks of all of them."""
    names = model_config.names
    prefix = f"{names.layers}.{model_config.layer_numbers[index]}."
    if names.stacked:
        return [prefix + each.name for each in names.stacked]
    experts = model_config.layers[index].experts
    matrices = _MATRICES if experts is None or experts.is_gated else _MATRICES[1:]
    ours = [f"mlp.experts.{{}}.{matrix}" for matrix in matrices]
    return [prefix + names.parts.get(each, each).format(0) for each in ours]


def _format_in_files(model_config: ModelConfig, index: int) -> StoredFormat | None:
    """The format of a layer's experts; None if they are plain. Raises UnfitError for one that kernels do not read."""
    if model_config.quantization is None:
        return None
    found = {model_config.quantization.format_of(module) for module in expert_modules(model_config, index)}
    if found == {None}:
        return None
    # Stacks are no linear layers: other methods leave them plain, whatever they say of all linear layers.
    if model_config.names.stacked and not any(each is not None and each.layout == "mxfp4" for each in found):
        return None
    (first, *others) = found
    if others or first is None:
        raise UnfitError("the matrices of an expert are stored in several formats")
    return _stored_format(first)


def _stored_format(stored: WeightFormat) -> StoredFormat:
    """Raises UnfitError."""
    if stored.layout == "mxfp4":
        return MXFP4
    if stored.layout != "scaled" or stored.number != "e4m3" or stored.has_zeros or stored.has_order:
        raise UnfitError(f"kernels do not read {stored.words}")
    rows, inputs = stored.block_rows or 0, stored.block_columns or 0
    if inputs % STEP:
        raise UnfitError(f"kernels read scales of a multiple of {STEP} inputs, not {stored.words}")
    # One scale a tensor is held as one a row.
    return StoredFormat("e4m3", max(rows, 1), inputs)


def _check_shares(stored: StoredFormat, experts: ExpertsConfig, hidden_size: int, layout: RankLayout) -> None:
    """Raise UnfitError if a rank's share of a matrix would begin or end inside a scale's outputs or inputs."""
    total, size = experts.intermediate_size, 1 if layout.experts is not None else layout.tensor_parallel_size
    if stored.is_mxfp4 and (hidden_size % MX_GROUP or total % MX_GROUP):
        raise UnfitError(f"{hidden_size} and {total} inputs are not groups of {MX_GROUP}")
    # Clamped gates and ups alternate; others begin at a scale of their own.
    is_in_turns = experts.limit > 0
    for start, stop in (column_range(total, layout.num_leaves, size, rank) for rank in range(size)):
        is_cut = bool(stored.group_inputs) and start % stored.group_inputs > 0
        is_cut |= (2 * start if is_in_turns else start) % stored.group_rows > 0
        is_cut |= not is_in_turns and (stop - start) % stored.group_rows > 0
        if is_cut:
            raise UnfitError(
                f"columns {start} to {stop} of an expert's {total}, a rank's share with "
                f"parallel.tensor_parallel_size={layout.tensor_parallel_size}, do not begin and end at {stored.words} "
                f"scales of {max(stored.group_inputs, stored.group_rows)}"
                f"{': parallel.enable_expert_parallel=true keeps experts complete' if size > 1 else ''}"
            )
