"""Modules of a model that adapters may have matrices for, by the checkpoint's names, and their slices on this rank.

A column-parallel layer has all inputs of A and some outputs of B, a row-parallel one some inputs of A and all outputs
of B, so that each rank's part of a sum gets its part of the adapter's. A module of the checkpoint that fuses several of
ours is one part of the merged layer, unless its parts are separate in memory (`Names.separate`); modules that are
separate there are parts of their own.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from spmd_worker.base.errors import CheckpointError
from spmd_worker.model.adapters.expert_modules import module_of, module_sizes
from spmd_worker.model.adapters.source import AdapterModule
from spmd_worker.model.decoder import DecoderForCausalLM
from spmd_worker.model.layers.experts import Router, SparseFeedForward
from spmd_worker.model.layers.linear import AdaptableLayer, ColumnParallelLinear, RowParallelLinear
from spmd_worker.model.layers.weight_slice import WeightSlice, volume
from spmd_worker.model.weights.store import WeightStore
from spmd_worker.model_config.families.family import GATE_UP, QKV
from spmd_worker.model_config.pooling import VECTORS
from spmd_worker.ops.kernels.adapters import Matrices

_FEED_FORWARD: Final = (*GATE_UP, "mlp.down_proj")
_ROUTERS: Final = ("mlp.gate", "mlp.shared_expert_gate")
_LINEARS: Final = (
    *(*QKV, "self_attn.o_proj", "self_attn.g_proj", "self_attn.pos_q_proj", "self_attn.pos_k_proj"),
    *("conv.in_proj", "conv.out_proj"),
    *("mamba.in_z", "mamba.out_proj"),
    *(f"linear_attn.in_proj_{part}" for part in "qkvzba"),
    *(f"linear_attn.{each}" for each in ("z_latent", "z_proj", "a_latent", "a_proj", "out_proj")),
    *("self_attn.q_a_proj", "self_attn.q_b_proj", "self_attn.kv_a_proj_with_mqa"),
    *(f"self_attn.indexer.{each}" for each in ("wq_b", "wk", "q_proj", "k_proj", "q_b_proj")),
    "self_attn.kv_proj",
    *(f"self_attn.{at}compressor.{each}_proj" for at in ("", "indexer.") for each in ("kv", "gate")),
    *_FEED_FORWARD,
    *(each.replace("mlp.", "mlp.shared_expert.") for each in _FEED_FORWARD),
    *("mlp.fc1_latent_proj", "mlp.fc2_latent_proj"),
    *_ROUTERS,
    *("per_layer_input_gate", "per_layer_projection", "laurel.linear_left", "laurel.linear_right"),
)
"""Linear layers of a decoder layer, by our names."""
_LATENT_PROJECTION: Final = "self_attn.kv_b_proj"
_OF_GROUPS: Final = "self_attn.o_a_proj"
_EXPERTS: Final = "experts"
_POOLER: Final = "pooler."
_BY_OPTION: Final = "adapters of experts need room for all experts: set model.lora_experts=true, or merge the adapter"


@dataclass(frozen=True, slots=True)
class TargetPart:
    """This rank's share of one module, a part of a merged layer: outputs `start` to `stop` of the layer; `inputs` are
    columns of the full A, and each of `rows` a range of the full B and the first of the layer's outputs that it is.
    """

    module: str
    start: int
    stop: int
    inputs: tuple[int, int]
    rows: tuple[tuple[int, int, int], ...]

    def matrices(self, module: AdapterModule, dtype: torch.dtype) -> Matrices:
        """This rank's A [r, inputs] and B [outputs, r], which has the scaling, rounded once."""
        a = module.a[:, slice(*self.inputs)].to(dtype).contiguous()
        b = torch.zeros((self.stop - self.start, module.rank), dtype=dtype)
        for first, end, to in self.rows:
            b[to - self.start : to - self.start + end - first] = scaled(module, slice(first, end)).to(dtype)
        return a, b


def scaled(module: AdapterModule, rows: slice = slice(None)) -> Tensor:
    """Rows of B with the scaling, float32."""
    return module.b[rows].float() * module.scaling


class AdapterTargets:
    """All modules of the model, those of other stages too, and the layers of this rank."""

    def __init__(self, model: DecoderForCausalLM, *, of_experts: bool = False) -> None:
        """`of_experts`: experts are among them."""
        self._names, self._table = model.weights.names, model.model_config.names
        modules = dict(model.named_modules())
        self.sparse_layers = {name: each for name, each in modules.items() if isinstance(each, SparseFeedForward)}
        """Those of this rank that have experts."""
        has_experts = any(layer.experts is not None for layer in model.model_config.layers)
        self.why_no_experts = _BY_OPTION if has_experts and not of_experts else ""
        """Reason why the model's experts take no adapters, or nothing."""
        self.layers: dict[str, AdaptableLayer] = {
            name: each
            for name, each in modules.items()
            if isinstance(each, AdaptableLayer) and (_EXPERTS not in name.split(".") or not self.why_no_experts)
        }
        # Of joined modules those are adapted that are separate in memory (`text_part`).
        modules_of_files = (self._table.fused, self._table.separate)
        fused = {ours: name for modules in modules_of_files for name, parts in modules.items() for ours in parts}
        endings = [ending for ours in _LINEARS for ending in self._endings(fused.get(ours, ours))]
        tops = (self._table.project_in, self._table.project_out, self._table.layer_inputs[1])
        self._shapes = {
            name.removesuffix(".weight"): shape
            for name, shape in self._given_shapes(model.weights)
            if name.endswith(".weight") and len(shape) == 2
        }
        experts = {} if self.why_no_experts else module_sizes(self._names, model.weights.shapes)
        self._experts = frozenset(experts)
        self._shapes |= experts
        self.linears = dict.fromkeys(
            name for name in self._shapes if name in experts or name in tops or self._inside(name) in endings
        )
        self.parts = self._own_parts(model.weights.separate_slices)
        pooling = model.model_config.pooling
        has_scores = pooling is not None and pooling.task not in VECTORS and not pooling.label_token_ids
        tops = (self._table.classifier, self._table.head_dense, self._table.head_norm)
        self._score_modules = tuple(each for each in tops if each and has_scores)
        self._all_shapes = model.weights.shapes
        self._scores = {
            piece.checkpoint_name: piece.parameter_name.removeprefix(_POOLER)
            for piece in model.weights.slices
            if piece.parameter_name.startswith(_POOLER)
        }

    @staticmethod
    def _given_shapes(weights: WeightStore) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield from weights.shapes.items()
        for name in weights.separate:
            yield name, weights.given_shape(name)

    def _endings(self, ours: str) -> list[str]:
        """The checkpoint's names in a layer of a module: several if layers of ours have one number there."""
        name = self._table.parts.get(ours, ours)
        return [name.replace("#", str(half)) for half in range(self._table.layers_in_one)]

    def find(self, module: str) -> tuple[str, str]:
        """The checkpoint's name of a module that PEFT calls `module`, and the reason if it takes no adapter."""
        (name,) = self._names.parts(f"{module}.weight", ())
        name = name.removesuffix(".weight")
        if name in self.linears:
            return name, ""
        if _EXPERTS in name.split(".") and self.why_no_experts:
            return name, self.why_no_experts
        if name in self._shapes and self._inside(name) in self._endings(_LATENT_PROJECTION):
            return name, (
                "adapters of kv_b_proj are not supported, because its two parts are applied to queries and to sums of "
                "latents: target the other projections, or merge the adapter with model.lora_merge"
            )
        if name in self._shapes and self._inside(name) in self._endings(_OF_GROUPS):
            return name, (
                "adapters of o_a_proj are not supported, because each group of heads has a projection of its own: "
                "target the other projections, or merge the adapter with model.lora_merge"
            )
        if name in self._shapes:
            return name, "adapters of embeddings and token heads are not supported"
        return name, "the model has no such module"

    def find_score(self, given_name: str, shape: Sequence[int]) -> tuple[str, str]:
        """The checkpoint's name of a full weight that a file calls `given_name`, and the reason if it cannot be
        replaced for the rows of an adapter: only scores of a model that classifies, and the layers before them, can.
        """
        try:
            name = next(iter(self._names.parts(given_name, shape)))
        except CheckpointError as error:
            return given_name, str(error)
        if name.rpartition(".")[0] not in self._score_modules or name not in self._all_shapes:
            return name, "full weights are replaced for rows only where they are scores of a model that classifies"
        if tuple(shape) != self._all_shapes[name]:
            return name, f"has the shape {list(shape)}, but the model's has {list(self._all_shapes[name])}"
        return name, ""

    def scores(self, saved: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Parameters of the pooler by their names there, float32, from full weights by the checkpoint's names; none on
        a stage without a pooler.
        """
        return {self._scores[name]: each.float() for name, each in saved.items() if name in self._scores}

    def sizes(self, name: str) -> tuple[int, int]:
        """Outputs and inputs of a module on all ranks."""
        rows, columns = self._shapes[name]
        return (columns, rows) if self._is_transposed(name) else (rows, columns)

    @property
    def are_transposed(self) -> bool:
        """Whether the checkpoint has matrices as [inputs, outputs]."""
        return self._table.are_transposed

    def _is_transposed(self, name: str) -> bool:
        return self._table.are_transposed and self._inside(name) != "" and name not in self._experts

    def _inside(self, name: str) -> str:
        """Name of the module in its layer; "" for one of no layer."""
        if not name.startswith(f"{self._table.layers}."):
            return ""
        return name.removeprefix(f"{self._table.layers}.").partition(".")[2]

    def experts_of(self, name: str) -> tuple[str, str, str] | None:
        """The sparse layer, the expert and the matrix that one of `layers` is; None for one that is no expert's."""
        *owner, experts, expert, matrix = ("", "", *name.split("."))
        return (".".join(owner[2:]), expert, matrix) if experts == _EXPERTS else None

    def _own_parts(self, slices: Iterable[WeightSlice]) -> dict[str, tuple[TargetPart, ...]]:
        """Parts of each of `layers`, by its name, in the order of outputs."""
        found: dict[str, dict[str, list[WeightSlice]]] = {name: {} for name in self.layers}
        for piece in slices:
            layer, _, leaf = piece.parameter_name.rpartition(".")
            module = module_of(self._names, piece) or piece.checkpoint_name.removesuffix(".weight")
            if layer in found and leaf == "weight" and module in self.linears and volume(piece.source):
                found[layer].setdefault(module, []).append(piece)
        return {
            name: tuple(sorted((_part(*each) for each in of_layer.items()), key=lambda part: part.start))
            for name, of_layer in found.items()
            if of_layer
        }


def num_inputs(layer: AdaptableLayer) -> int:
    """Inputs of the layer on this rank."""
    if isinstance(layer, RowParallelLinear):
        return layer.input_range[1] - layer.input_range[0]
    assert isinstance(layer, ColumnParallelLinear | Router), type(layer)
    return layer.input_size


def _part(module: str, pieces: list[WeightSlice]) -> TargetPart:
    # Without the number of an expert in a stack.
    oriented = [piece.oriented(piece.source)[-2:] for piece in pieces]
    inputs = oriented[0][1]
    assert all(columns == inputs for _, columns in oriented), pieces
    rows = [(first, end, piece.destination[-2][0]) for piece, ((first, end), _) in zip(pieces, oriented, strict=True)]
    return TargetPart(
        module,
        min(to for _, _, to in rows),
        max(to + end - first for first, end, to in rows),
        inputs,
        tuple(rows),
    )
