"""Tensors of a GGUF model under the hub's names: where each is, and how it differs from the hub's."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from spmd_worker.base.errors import ModelConfigError
from spmd_worker.model_config.gguf.architectures import Architecture
from spmd_worker.model_config.gguf.header import GgufHeader, GgufTensor

EMBEDDING: Final = "token_embd.weight"
HEAD: Final = "output.weight"
_OUTSIDE: Final = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
OF_ROPE: Final = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors that are settings of the rope."""
_ROTATED: Final = {"attn_q": "attention.head_count", "attn_k": "attention.head_count_kv"}
_GATE: Final = "ffn_gate_inp_shexp"
_MAX_EXPERTS: Final = 4096


@dataclass(frozen=True, slots=True)
class HubTensor:
    """A tensor of `header`, or one matrix of a stack, as the hub has it: `tensor` is its place and the shape there.

    With `num_heads` above 0, rows of each head are stored as pairs of neighbours, (0, half, 1, half + 1, ...) of the
    hub's. `offset` was added to its values.
    """

    header: GgufHeader
    tensor: GgufTensor
    num_heads: int = 0
    offset: float = 0.0


def hub_tensors(headers: Sequence[GgufHeader], architecture: Architecture, key_prefix: str) -> dict[str, HubTensor]:
    """Tensors by the hub's names; those of no known name keep their own. `key_prefix` is that of the architecture's
    metadata. Raises ModelConfigError for two of one name, and heads that do not divide their rows.
    """
    found: dict[str, HubTensor] = {}
    for header in headers:
        for stored, tensor in header.tensors.items():
            if stored in OF_ROPE:
                continue
            for name, each in _parts(HubTensor(header, tensor), stored, architecture):
                if name in found:
                    raise ModelConfigError(f"{header.path}: has the tensor {stored!r} twice: download the model again")
                found[name] = _with_heads(each, stored, architecture, headers[0].metadata, key_prefix)
    return found


def _parts(whole: HubTensor, stored: str, architecture: Architecture) -> Iterator[tuple[str, HubTensor]]:
    """The hub's names of one tensor, of each matrix of a stack."""
    module, _, leaf = stored.rpartition(".")
    block, _, rest = module.partition(".")
    if module in _OUTSIDE:
        yield f"{_OUTSIDE[module]}.{leaf}", _without_offset(whole, module, architecture)
        return
    layer, _, part = rest.partition(".")
    # int() takes other digits too, and numbers of any length.
    if block != "blk" or not (layer.isascii() and layer.isdecimal()):
        yield stored, whole
    elif part in architecture.experts and leaf == "weight" and _is_stack(whole.tensor):
        yield from _experts(whole, f"model.layers.{layer}.{architecture.experts[part]}.{leaf}")
    elif part in architecture.layer_names:
        name = f"model.layers.{layer}.{architecture.layer_names[part]}.{leaf}"
        if part == _GATE and len(whole.tensor.shape) == 1:
            whole = replace(whole, tensor=replace(whole.tensor, shape=(1, *whole.tensor.shape)))
        yield name, _without_offset(whole, part, architecture)
    else:
        yield stored, whole


def _is_stack(tensor: GgufTensor) -> bool:
    return len(tensor.shape) == 3 and tensor.shape[0] <= _MAX_EXPERTS


def _experts(whole: HubTensor, name: str) -> Iterator[tuple[str, HubTensor]]:
    """The experts of a stack, one behind the other in the file."""
    tensor = whole.tensor
    size = (tensor.end - tensor.begin) // tensor.shape[0]
    for expert in range(tensor.shape[0]):
        begin = tensor.begin + expert * size
        each = replace(tensor, shape=tensor.shape[1:], begin=begin, end=begin + size)
        yield name.format(expert), replace(whole, tensor=each)


def _without_offset(each: HubTensor, part: str, architecture: Architecture) -> HubTensor:
    return replace(each, offset=architecture.norm_offset) if part.endswith("_norm") else each


def _with_heads(
    each: HubTensor, stored: str, architecture: Architecture, metadata: Mapping[str, object], key_prefix: str
) -> HubTensor:
    part = stored.split(".")[2:3]
    if not architecture.permutes or not part or part[0] not in _ROTATED:
        return each
    key = f"{key_prefix}.{_ROTATED[part[0]]}"
    heads = metadata.get(key, metadata.get(f"{key_prefix}.{_ROTATED['attn_q']}"))
    # Lists of equal numbers are one, as `settings.py` has checked.
    heads = heads[0] if isinstance(heads, list) and heads else heads
    num_rows = each.tensor.shape[0]
    if not isinstance(heads, int) or heads < 1 or num_rows % heads or num_rows // heads % 2:
        raise ModelConfigError(
            f"{each.header.path}: tensor {stored!r} has {num_rows} rows, which are not {key}={heads!r} heads of an "
            f"even size: download the model again"
        )
    return replace(each, num_heads=heads)
