"""Weights that stay in memory as the checkpoint has them, decided from config.json and the layout alone.

`model.quantization` decides what is multiplied: null, weights and activations in the run's dtype; int8 and fp8, W8A8.
Under null a matrix may stay as the file has it, where kernels that decode it while they read it compute the bits of the
dequantised one: only memory and bandwidth differ. So no value of `model.quantization` asks for it, and it happens
wherever kernels can, unless `model.dequantize_weights` is set, as updates of weights need:

* GPUs (the Triton backend): experts in MXFP4 and FP8 (`find_stored_experts`). FP8 files of dense models are another
  matter: computed with their own numbers under `model.quantization=fp8`, which quantises activations too, and
  dequantised otherwise.
* CPUs (the compiled kernels, in bfloat16): matrices of 4 bits and of FP8 (`find_stored_panels`), of attention, dense
  feed-forwards and shared experts in FP8, GPTQ, AWQ, compressed-tensors' W4A16 and bitsandbytes' NF4, of routed experts
  in MXFP4 too; and those of most types of GGUF, the ones of 5, 6 and 8 bits as integers of 8. Of several such types
  that are multiplied together all are held in a format that holds each exactly. Other mixers, attention to an encoder's
  rows, towers, heads of drafts and the token head are dequantised.

A rank's share must begin and end where scales do. All ranks decide alike, for all of them, so that memory is shared
evenly. Nothing is read but config.json. Files may have some weights otherwise than it says, plain ones most often:
CPUs dequantise those when they are loaded (`WeightStore.fill`), GPUs refuse such files.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from spmd_worker.model_config.families.family import QKV
from spmd_worker.model_config.int8_format import PANEL, fits_panels
from spmd_worker.model_config.int8_format import STEP as PANEL_STEP
from spmd_worker.model_config.layer_config import ExpertsConfig, LayerConfig
from spmd_worker.model_config.layer_elements import mixer_linears
from spmd_worker.model_config.model_config import ModelConfig
from spmd_worker.model_config.stored_format import (
    EXPERTS,
    GGUF_FORMATS,
    MX_GROUP,
    MXFP4,
    NF4,
    STEP,
    LayerFormats,
    StoredFormat,
)
from spmd_worker.model_config.weight_format import GGUF, WeightFormat
from spmd_worker.ranks.leaves import column_range
from spmd_worker.ranks.topology import RankLayout, layer_share

_MATRICES: Final = ("gate_proj", "up_proj", "down_proj")
_INTEGER_BITS: Final = 8
"""Integers of so many bits are dequantised: int8 panels are multiplied with rows that are quantised too."""
_WHOLE_EXPERTS: Final = ": parallel.enable_expert_parallel=true keeps experts complete"


class UnfitError(Exception):
    """Matrices cannot stay as they are stored. The message is the reason."""


@dataclass(frozen=True, slots=True)
class StoredWeights:
    """`formats` of those that stay, `are_panels` on CPUs. `reason`: why others, quantised too, are dequantised."""

    formats: LayerFormats = field(default_factory=dict)
    reason: str = ""
    are_panels: bool = False

    @property
    def words(self) -> str:
        """The weights as messages call them."""
        names = {name for each in self.formats.values() for name in each}
        return "experts" if names == {EXPERTS} or not self.are_panels else "weights"


NOTHING_STORED: Final = StoredWeights()


@dataclass(frozen=True, slots=True)
class StoredLinear:
    """A linear layer of a rank that may stay as it is stored: `count` of them, if they are experts'. `name` is as in
    `LayerFormats`, `parts` are our names of its matrices. The rank has the `inputs` (start, stop). `is_gated`: rows are
    gate and up projections that kernels read in pairs of panels.
    """

    name: str
    parts: tuple[str, ...]
    num_outputs: int
    inputs: tuple[int, int]
    is_gated: bool = False
    count: int = 1

    @property
    def num_inputs(self) -> int:
        return self.inputs[1] - self.inputs[0]


def find_stored_experts(model_config: ModelConfig, layout: RankLayout) -> StoredWeights:
    """The layers whose experts' matrices, all of them on every rank, can stay as they are stored on GPUs."""
    formats: dict[int, dict[str, StoredFormat]] = {}
    reason = ""
    for index, layer in enumerate(model_config.layers):
        if layer.experts is None:
            continue
        try:
            found = _expert_format(model_config, index)
            if found is not None:
                stored = _decoded_format(found)
                _check_shares(stored, layer.experts, layer.experts.latent_size or model_config.hidden_size, layout)
                formats[index] = {EXPERTS: stored}
        except UnfitError as error:
            reason = reason or str(error)
    return StoredWeights(formats, reason)


def find_stored_panels(model_config: ModelConfig, layout: RankLayout) -> StoredWeights:
    """The matrices of 4 bits and of FP8 that can stay as they are stored, on every rank, on CPUs."""
    formats: dict[int, dict[str, StoredFormat]] = {}
    of_kind: dict[LayerConfig, dict[str, list[StoredLinear]]] = {}
    cuts_experts, reason = layout.experts is None and layout.tensor_parallel_size > 1, ""
    for index, layer in enumerate(model_config.layers):
        if layer not in of_kind:
            of_kind[layer] = _of_all_ranks(model_config, layout, index)
        for name, linears in of_kind[layer].items():
            try:
                found = _panel_format(model_config, index, linears)
                if found is not None:
                    formats.setdefault(index, {})[name] = found
            except UnfitError as error:
                hint = _WHOLE_EXPERTS if name == EXPERTS and cuts_experts else ""
                reason = reason or f"layer {model_config.layer_numbers[index]}, {name}: {error}{hint}"
    return StoredWeights(formats, reason, are_panels=True)


def _of_all_ranks(model_config: ModelConfig, layout: RankLayout, index: int) -> dict[str, list[StoredLinear]]:
    """Those of all tensor ranks in a layer, by name."""
    found: dict[str, list[StoredLinear]] = {}
    for rank in range(layout.tensor_parallel_size):
        for each in stored_linears(model_config, layout, index, rank):
            found.setdefault(each.name, []).append(each)
    return found


def stored_linears(
    model_config: ModelConfig, layout: RankLayout, index: int, tensor_rank: int
) -> Iterator[StoredLinear]:
    """The linear layers of a layer on a tensor rank that may be panels, with its share of them."""
    layer, hidden = model_config.layers[index], model_config.hidden_size
    share = layer_share(layout, layer, index, tensor_rank)
    if layer.mixer == "attention":
        qkv, output = mixer_linears(layer, hidden, share)[:2]
        yield StoredLinear(
            "self_attn.qkv_proj", QKV[: 1 + layer.num_key_projections], sum(qkv.num_outputs), (0, hidden)
        )
        start = tensor_rank * output.num_inputs
        inputs = (start, start + output.num_inputs)
        yield StoredLinear("self_attn.o_proj", ("self_attn.o_proj",), hidden, inputs)
    if layer.has_dense:
        prefix = "mlp" if layer.experts is None else "dense"
        yield from _feed_forward(layer, hidden, prefix, layout.columns(layer.intermediate_size, tensor_rank))
    experts, own = layer.experts, share.experts
    if experts is None or own is None:
        return
    if experts.shared_size:
        columns = layout.columns(experts.shared_size, tensor_rank)
        is_whole = layout.experts is not None and layout.experts.is_exact
        columns = (0, experts.shared_size) if is_whole else columns
        yield from _feed_forward(layer, hidden, "mlp.shared_expert", columns)
    size = experts.latent_size or hidden
    columns = (0, experts.intermediate_size)
    if layout.experts is None:
        columns = layout.columns(experts.intermediate_size, tensor_rank)
    num_columns = columns[1] - columns[0]
    is_gated = experts.is_gated and layer.activation == "silu" and not (experts.limit or experts.bound)
    num_outputs = num_columns * (1 + experts.is_gated)
    yield StoredLinear(EXPERTS, (), num_outputs, (0, size), is_gated, own.num_experts)
    yield StoredLinear(EXPERTS, (), size, columns, count=own.num_experts)


def stored_tensors(model_config: ModelConfig, formats: LayerFormats) -> dict[tuple[str, ...], StoredFormat]:
    """Formats of tensors of the checkpoint but for those of routed experts, by the names of a linear layer's."""
    return {
        tuple(f"{module}.weight" for module in _modules(model_config, index, each.parts)): formats[index][each.name]
        for index in formats
        for each in stored_linears(model_config, RankLayout(1), index, 0)
        if each.name in formats[index] and each.parts
    }


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


def _feed_forward(layer: LayerConfig, hidden: int, prefix: str, columns: tuple[int, int]) -> Iterator[StoredLinear]:
    """Those of a dense feed-forward or shared expert of which a rank has these columns."""
    num_outputs = (columns[1] - columns[0]) * (1 + layer.is_gated)
    parts = tuple(f"{prefix}.{each}" for each in (_MATRICES[:2] if layer.is_gated else _MATRICES[1:2]))
    name = f"{prefix}.gate_up_proj" if layer.is_gated else parts[0]
    yield StoredLinear(name, parts, num_outputs, (0, hidden), layer.pairs_gates)
    yield StoredLinear(f"{prefix}.down_proj", (f"{prefix}.down_proj",), hidden, columns)


def _modules(model_config: ModelConfig, index: int, parts: Sequence[str]) -> list[str]:
    """Names in the checkpoint of modules of a layer, by our names; of fused ones, of what they are fused to."""
    names = model_config.names
    fused = {ours: module for module, of_module in names.fused.items() for ours in of_module}
    number = model_config.layer_numbers[index]
    inside = [fused.get(each) or names.parts.get(each, each) for each in parts]
    return list(dict.fromkeys(f"{names.layers}.{number}.{names.in_layer(index, each)}" for each in inside))


def _formats_of(model_config: ModelConfig, modules: Sequence[str]) -> set[WeightFormat | None]:
    """Storage formats of modules; None of plain ones. config.json may have the names of other releases."""
    quantization, aliases = model_config.quantization, model_config.names.aliases
    if quantization is None:
        return {None}
    return {quantization.format_of(module, *_aliases_of(module, aliases)) for module in modules}


def _aliases_of(module: str, aliases: Mapping[str, str]) -> list[str]:
    return [theirs + module.removeprefix(ours) for theirs, ours in aliases.items() if module.startswith(ours)]


def _expert_format(model_config: ModelConfig, index: int) -> WeightFormat | None:
    """The format of a layer's experts; None if they are plain. Raises UnfitError if it is not one."""
    found = _formats_of(model_config, expert_modules(model_config, index))
    # Stacks are no linear layers: other methods leave them plain, whatever they say of all linear layers.
    if model_config.names.stacked and not any(each is not None and each.layout == "mxfp4" for each in found):
        return None
    return _only(found, "the matrices of an expert")


def _only(found: set[WeightFormat | None], words: str) -> WeightFormat | None:
    """Raises UnfitError for several formats."""
    (first, *others) = found
    if others:
        raise UnfitError(f"{words} are stored in several formats")
    return first


def _decoded_format(stored: WeightFormat) -> StoredFormat:
    """The format of experts that GPUs decode. Raises UnfitError."""
    if stored.layout == "mxfp4":
        return MXFP4
    if stored.layout != "scaled" or stored.number != "e4m3" or stored.has_zeros or stored.has_order:
        raise UnfitError(f"kernels do not read {stored.words}")
    rows, inputs = stored.block_rows or 0, stored.block_columns or 0
    if inputs % STEP:
        raise UnfitError(f"kernels read scales of a multiple of {STEP} inputs, not {stored.words}")
    # One scale a tensor is held as one a row.
    return StoredFormat("e4m3", max(rows, 1), inputs)


def _panel_format(model_config: ModelConfig, index: int, linears: Sequence[StoredLinear]) -> StoredFormat | None:
    """The format of linear layers of one name, on all ranks; None if they have neither 4 bits nor FP8.
    Raises UnfitError.
    """
    quantization = model_config.quantization
    is_gguf = quantization is not None and quantization.method == GGUF
    stored = (_gguf_format if is_gguf else _common_format)(model_config, index, linears[0])
    if stored is None:
        return None
    if model_config.names.are_transposed:
        raise UnfitError("kernels do not read matrices [inputs, outputs]")
    for each in linears:
        _check_panels(stored, each)
    return stored


def _common_format(model_config: ModelConfig, index: int, linear: StoredLinear) -> StoredFormat | None:
    """The one format of all matrices of a linear layer; None as in `_panel_format`. Raises UnfitError."""
    if linear.name == EXPERTS:
        found = _expert_format(model_config, index)
    else:
        formats = _formats_of(model_config, _modules(model_config, index, linear.parts))
        found = _only(formats, "matrices that are multiplied together")
    if found is None or (found.number == "int" and found.bits == _INTEGER_BITS):
        return None
    if found.layout == "mxfp4" and linear.name != EXPERTS:
        # It is of stacks of experts: files have linear layers plain, whatever config.json says of them.
        return None
    return _expanded_format(found)


def _gguf_format(model_config: ModelConfig, index: int, linear: StoredLinear) -> StoredFormat | None:
    """The smallest format that holds all of a linear layer's types; None if all are plain. Raises UnfitError."""
    is_experts = linear.name == EXPERTS
    modules = expert_modules(model_config, index) if is_experts else _modules(model_config, index, linear.parts)
    found = _formats_of(model_config, modules)
    types = sorted(each.number for each in found if each is not None)
    if not types:
        return None
    if None in found:
        raise UnfitError(f"of matrices that are multiplied together some are plain, and some {types[0]}")
    unknown = [each for each in types if each not in GGUF_FORMATS]
    if unknown:
        raise UnfitError(f"kernels do not read {unknown[0]}")
    return next(each for each in GGUF_FORMATS[types[0]] if all(each in GGUF_FORMATS[other] for other in types))


def _expanded_format(stored: WeightFormat) -> StoredFormat:
    """The format that CPUs expand. Raises UnfitError."""
    if stored.layout in ("mxfp4", "fp4"):
        return MXFP4
    if stored.number == "nf4":
        return NF4
    is_fp8 = stored.layout == "scaled" and stored.number == "e4m3" and not stored.has_zeros
    is_int4 = stored.layout in ("gptq", "awq", "packed") and stored.block_rows == 1
    if stored.has_order or not (is_fp8 or is_int4):
        raise UnfitError(f"kernels do not read {stored.words}")
    inputs = stored.block_columns or 0
    if inputs % PANEL_STEP:
        raise UnfitError(f"kernels read groups of a multiple of {PANEL_STEP} inputs, not {stored.words}")
    return StoredFormat("e4m3" if is_fp8 else "int4", 1, inputs)


def _check_panels(stored: StoredFormat, linear: StoredLinear) -> None:
    """Raise UnfitError if a rank's share is no panels, or begins or ends inside a scale's inputs."""
    unit = PANEL * (1 + linear.is_gated)
    if not fits_panels(linear.num_outputs, linear.num_inputs, is_gated=linear.is_gated):
        raise UnfitError(
            f"{linear.num_outputs} outputs and {linear.num_inputs} inputs, a rank's share, are not multiples of {unit} "
            f"and {PANEL_STEP}"
        )
    size = stored.group_inputs or PANEL_STEP
    if any(each % size for each in linear.inputs):
        start, stop = linear.inputs
        groups = f" in groups of {size}" if stored.number == "e4m3" else ""
        raise UnfitError(f"inputs {start} to {stop}, a rank's share, do not begin and end at {stored.words}{groups}")


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
                f"{_WHOLE_EXPERTS if size > 1 else ''}"
            )
