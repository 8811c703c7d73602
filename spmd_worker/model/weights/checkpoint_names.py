"""Names of a model's weights, both ways, by the family's table (`Names`), for one stage of a pipeline.

Ours -> the checkpoint's: layers describe their weights with Llama's names and count from 0 in each stage. Here a name
becomes the checkpoint's, a tensor that a checkpoint keeps inside another becomes rows of that, and a matrix that it
keeps the other way round is marked so. Given -> the checkpoint's (`parts`): files and trainers may leave out a prefix,
have the names of another release, or stack experts. Names and shapes only: knows nothing of tensors, files or ranks.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Final

from spmd_worker.base.errors import CheckpointError
from spmd_worker.model.layers.checkpoint_layer import CheckpointLayer
from spmd_worker.model.layers.weight_slice import ModelTensor, Place, WeightSlice, nothing_of
from spmd_worker.model_config.families.family import NORM_POSITIONS, Names
from spmd_worker.model_config.layer_config import ExpertsConfig, LayerConfig
from spmd_worker.model_config.model_config import ModelConfig
from spmd_worker.model_config.pooling import PoolingConfig
from spmd_worker.ranks.topology import Stage

_LAYER: Final = re.compile(r"model\.layers\.(\d+)\.")
_EXPERT: Final = re.compile(r"mlp\.experts\.(\d+)\.(\w+)")
_IN_MEMORY: Final = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
"""What transformers stacks in memory of separate experts, as [experts, outputs, inputs] below `mlp.experts`."""


class CheckpointNames:
    """What a stage's weights are called in the checkpoint."""

    def __init__(self, model_config: ModelConfig, stage: Stage) -> None:
        self._model_config, self._stage, self._names = model_config, stage, model_config.names
        names = self._names
        pooling = model_config.pooling
        self._has_score = pooling is not None and pooling.has_score_weight
        self._has_head = pooling is None or bool(pooling.label_token_ids)
        self._is_tied = model_config.has_tied_embeddings
        self._head = f"{names.head}.weight"
        self.tied = (f"{names.embedding}.weight", self._head) if self._has_head and self._is_tied else None
        """The embedding, and the head for tokens, or for some of them, which it is too; None where it is not."""
        self.is_last_stage = stage.is_last
        self._tops = {
            "model.embed_tokens": names.embedding,
            "model.embed_positions": names.positions,
            "model.embed_token_types": names.token_types,
            "model.embedding_norm": names.embedding_norm,
            "model.norm": names.norm,
            "model.project_in": names.project_in,
            "model.project_out": names.project_out,
            "lm_head": names.embedding if self._is_tied else names.head,
            "pooler": names.classifier,
            "pooler.dense": names.head_dense,
            "pooler.norm": names.head_norm,
        }
        self._top_modules = {top for top in (*self._tops.values(), names.head) if top}
        has_own_head = self._has_score and pooling is not None and pooling.head is not None
        self._head_modules = (names.head_dense, names.head_norm, names.classifier) if has_own_head else ()
        norms = {ours: theirs for ours, theirs in zip(NORM_POSITIONS, names.norms) if theirs}
        self._parts = {**norms, **names.parts}
        self._fused = {ours: fused for fused, parts in names.fused.items() for ours in parts}
        self._stacked = {part: (each, each.parts.index(part)) for each in names.stacked for part in each.parts}
        self._layer = re.compile(rf"{re.escape(names.layers)}\.(\d+)\.")
        self._numbers = model_config.layer_numbers
        self._indices = {number: index for index, number in enumerate(self._numbers)}
        # Backbones alone are written without the name of what holds them; heads are beside them.
        own_prefix = f"{names.layers.partition('.')[0]}." if pooling is not None else ""
        self._optional_prefix = names.optional_prefix or own_prefix
        self._besides = (f"{names.head}.", f"{names.classifier}.")

    def slices(self, layers: Mapping[str, CheckpointLayer]) -> list[WeightSlice]:
        """Slices of checkpoint tensors that this rank holds, and where, as its layers, by our name, say it."""
        return [
            replace(piece, is_float32=True) if layer.is_float32 else piece
            for name, layer in layers.items()
            for own in layer.weight_slices(name)
            for piece in self._pieces(own)
        ]

    def _layer_prefix(self, index: int) -> str:
        """What names of the tensors of a layer begin with, by its place in the model."""
        return f"{self._names.layers}.{self._numbers[index]}."

    def _layer_of(self, name: str) -> tuple[int, str] | None:
        """The place in the model of the layer that a tensor is of, and what follows; None for what is of no layer of
        the model.
        """
        found = self._layer.match(name)
        index = None if found is None else self._indices.get(int(found[1]))
        return None if found is None or index is None else (index, name[found.end() :])

    def _pieces(self, piece: WeightSlice) -> Iterator[WeightSlice]:
        """The slice of a layer, in the checkpoint's words: several where a tensor goes by key-value heads."""
        module, _, leaf = piece.checkpoint_name.rpartition(".")
        found = _LAYER.match(piece.checkpoint_name)
        if found is None:
            # What the head has of its own where its weight is the embedding's.
            is_bias_of_head = module == "lm_head" and leaf == "bias"
            top = self._names.head if is_bias_of_head else self._tops[module]
            yield replace(piece, checkpoint_name=f"{top}.{leaf}")
            return
        index, part = int(found[1]) + self._stage.start, module[found.end() :]
        expert = _EXPERT.fullmatch(part)
        if expert is not None:
            yield self._of_expert(piece, index, int(expert[1]), expert[2], leaf)
            return
        prefix, whole_name = self._layer_prefix(index), self._parts.get(f"{part}.{leaf}")
        if whole_name is not None:
            yield replace(piece, checkpoint_name=prefix + whole_name)
            return
        if "{}" in self._parts.get(part, ""):
            yield from _row_by_row(piece, f"{prefix}{self._parts[part]}.{leaf}")
            return
        fused = self._fused.get(part)
        inside = (piece,) if fused is None else self._inside(piece, part, fused, self._model_config.layers[index])
        name = f"{prefix}{fused or self._parts.get(part, part)}.{leaf}"
        is_turned = self._names.are_transposed and len(piece.checkpoint_shape) == 2
        for each in inside:
            named = replace(each, checkpoint_name=name)
            yield transposed(named) if is_turned else named

    def _of_expert(self, piece: WeightSlice, index: int, number: int, matrix: str, leaf: str) -> WeightSlice:
        """A separate tensor, or a slice of one that stacks those of all experts."""
        prefix = self._layer_prefix(index)
        if matrix not in self._stacked:
            ours = f"mlp.experts.{{}}.{matrix}"
            return replace(piece, checkpoint_name=f"{prefix}{self._parts.get(ours, ours).format(number)}.{leaf}")
        (stacked, part), experts = self._stacked[matrix], self._model_config.layers[index].experts
        assert experts is not None, piece
        rows, *inputs = piece.checkpoint_shape
        (start, stop), *columns = piece.source
        first, name = part * rows, prefix + (stacked.name if leaf == "weight" else stacked.bias)
        shape = (experts.num_experts, rows * len(stacked.parts), *inputs)
        source = ((number, number + 1), (first + start, first + stop), *columns)
        is_turned = stacked.is_transposed and leaf == "weight"
        if is_turned:
            shape, source = (shape[0], *shape[:0:-1]), (source[0], *source[:0:-1])
        if piece.parameter_name == "":
            return nothing_of(name, shape)
        return replace(piece, checkpoint_name=name, checkpoint_shape=shape, source=source, is_transposed=is_turned)

    def parts(self, given_name: str, shape: Sequence[int]) -> dict[str, Place | None]:
        """The checkpoint tensors, by the table's name, that a tensor is which a file or a trainer calls `given_name`,
        or that are inside it; None where it is that tensor. Raises CheckpointError for a stack of experts of another
        shape.
        """
        name = self._own_name(given_name)
        if self._is_turned(name, shape):
            return {name: Place(given_name)}
        inside = self._in_memory(name, shape)
        return {part: Place(given_name, number, rows) for part, number, rows in inside} or {name: None}

    def _own_name(self, given_name: str) -> str:
        """The table's name of a tensor that transformers may call otherwise, or files without their prefix."""
        name = self._names.canonical(given_name)
        whole_name = name if name.startswith(self._besides) else self._optional_prefix + name
        return whole_name if self._is_ours(whole_name) and not self._is_ours(name) else name

    def _is_ours(self, name: str) -> bool:
        """Whether the tensor is of a module of the model, perhaps a part of a quantised weight, or derived."""
        module = name.rpartition(".")[0]
        return module in self._top_modules or self._layer_of(name) is not None or self.is_derived(name)

    def _in_memory(self, name: str, shape: Sequence[int]) -> list[tuple[str, int, tuple[int, int]]]:
        """Where `name` is what transformers has in memory of experts that files keep apart: the checkpoint's name of
        each matrix, its expert, and its rows. Empty for other tensors.
        """
        found = self._layer_of(name)
        if found is None or self._names.stacked:
            return []
        index, inside = found
        module, _, stack = inside.rpartition(".")
        experts, parts = self._model_config.layers[index].experts, _IN_MEMORY.get(stack, ())
        patterns = [self._parts.get(ours, ours) for ours in (f"mlp.experts.{{}}.{part}" for part in parts)]
        if experts is None or not parts or module != patterns[0].partition(".{}")[0]:
            return []
        if len(shape) != 3 or shape[0] != experts.num_experts or shape[1] % len(parts):
            raise CheckpointError(
                f"{name}: has the shape {list(shape)}, and this layer of the model has {experts.num_experts} experts"
            )
        rows = shape[1] // len(parts)
        return [
            (f"{self._layer_prefix(index)}{pattern.format(number)}.weight", number, (place * rows, (place + 1) * rows))
            for number in range(experts.num_experts)
            for place, pattern in enumerate(patterns)
        ]

    def _is_turned(self, name: str, shape: Sequence[int]) -> bool:
        """Whether `name` is a stack of experts that is the other way round than the table's; see `StackedTensor`."""
        found = self._layer_of(name)
        if found is None:
            return False
        index, inside = found
        stack = next((each for each in self._names.stacked if each.name == inside), None)
        experts, hidden_size = self._model_config.layers[index].experts, self._model_config.hidden_size
        if stack is None or not stack.may_be_transposed or experts is None:
            return False
        rows, inputs = len(stack.parts) * experts.intermediate_size, hidden_size
        if stack.parts == ("down_proj",):
            rows, inputs = inputs, rows
        return rows != inputs and tuple(shape) == (experts.num_experts, inputs, rows)

    def _inside(self, piece: WeightSlice, part: str, fused: str, layer: LayerConfig) -> Iterator[WeightSlice]:
        """Rows of the tensor with the part: all of the part follow each other, or those of each key-value head."""
        parts, sizes = self._names.fused[fused], _part_sizes(layer)
        assert piece.checkpoint_shape[0] == sizes[part], (piece, sizes[part])
        num_groups = layer.num_kv_heads if fused in self._names.by_kv_head else 1
        firsts = dict(zip(parts, accumulate((sizes[each] // num_groups for each in parts), initial=0)))
        total, size = sum(sizes[each] for each in parts), sizes[part] // num_groups
        (start, stop), *others = piece.source
        (to, _), *to_others = piece.destination
        for group in range(start // size, -(-stop // size)) if start < stop else (0,):
            first, last = max(start, group * size), min(stop, (group + 1) * size)
            shift = group * (total // num_groups) + firsts[part] - group * size
            yield replace(
                piece,
                checkpoint_shape=(total, *piece.checkpoint_shape[1:]),
                source=((first + shift, last + shift), *others),
                destination=((to + first - start, to + last - start), *to_others),
            )

    def is_derived(self, name: str) -> bool:
        """Whether the tensor says nothing of the model that others of the checkpoint do not say: rotary frequencies,
        masks, a head that is the embedding, what is for other input than text.
        """
        if name.rpartition(".")[0] in self._head_modules:
            return False
        is_ignored = name.endswith(self._names.ignored) or name.startswith(self._names.ignored_prefixes)
        has_no_head = self._is_tied or not self._has_head
        is_head = name == self._head or (not self._has_head and name == f"{self._names.head}.bias")
        return is_ignored or (has_no_head and is_head) or self._is_of_other_layer(name)

    def tensors(
        self, own: Sequence[WeightSlice], slices_like: Callable[[int], Sequence[WeightSlice]]
    ) -> dict[str, ModelTensor]:
        """The checkpoint's tensors by name, those of other stages too; `own` are this stage's slices. There are dense
        layers and sparse ones, and some lack a norm: `slices_like` gives those of a layer of which this stage has no
        other of the kind.
        """
        config, stage = self._model_config, self._stage
        of_kind: dict[tuple[ExpertsConfig | None, tuple[bool, ...]], dict[str, ModelTensor]] = {}
        kinds = [(layer.experts, layer.norms) for layer in config.layers]
        for index in (*range(stage.start, stage.stop), *range(len(kinds))):
            if kinds[index] not in of_kind:
                is_own, prefix = stage.start <= index < stage.stop, self._layer_prefix(index)
                of_kind[kinds[index]] = {
                    piece.checkpoint_name.removeprefix(prefix): piece.tensor
                    for piece in (own if is_own else slices_like(index))
                    if piece.checkpoint_name.startswith(prefix)
                }
        found = _tensors_besides_layers(config, self._head if self._has_head and not self._is_tied else "")
        for index, kind in enumerate(kinds):
            found |= {self._layer_prefix(index) + name: tensor for name, tensor in of_kind[kind].items()}
        held = {piece.checkpoint_name: piece.checkpoint_shape for piece in own}
        shapes = {name: tensor.shape for name, tensor in found.items()}
        assert held.items() <= shapes.items(), held.items() - shapes.items()
        return found

    def _is_of_other_layer(self, name: str) -> bool:
        """Of one that looks at images, or of one beyond the model's where files may have such."""
        layer = self._layer.match(name)
        if layer is None:
            return False
        number, config = int(layer[1]), self._model_config
        is_beyond = number >= config.num_layers + len(config.image_layers)
        return number in config.image_layers or (self._names.ignores_later_layers and is_beyond)


def _tensors_besides_layers(config: ModelConfig, own_head: str) -> dict[str, ModelTensor]:
    """`own_head` is the name of a head for tokens that is not the embedding, "" for none."""
    names, pooling, hidden = config.names, config.pooling, config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {f"{names.embedding}.weight": (config.num_embeddings, config.embedding_size)}
    if config.num_positions:
        shapes[f"{names.positions}.weight"] = (config.num_positions, hidden)
    if config.num_token_types:
        shapes[f"{names.token_types}.weight"] = (config.num_token_types, hidden)
    leaves = {"weight": config.norm.has_weight, "bias": config.norm.has_bias}
    norms = {names.norm: config.has_last_norm, names.embedding_norm: config.has_embedding_norm}
    for norm in [name for name, is_there in norms.items() if is_there]:
        shapes |= {f"{norm}.{leaf}": (hidden,) for leaf, is_there in leaves.items() if is_there}
    if config.num_projection_parameters:
        shapes[f"{names.project_in}.weight"] = (hidden, config.embedding_size)
        shapes[f"{names.project_out}.weight"] = (config.embedding_size, hidden)
    if config.has_head_bias and pooling is None:
        shapes[f"{names.head}.bias"] = (config.vocab_size,)
    if own_head:
        shapes[own_head] = (config.vocab_size, config.embedding_size)
    scores = {} if pooling is None or not pooling.has_score_weight else head_shapes(pooling, names)
    # A head of which a classifier takes rows is held by it alone.
    is_float32 = {name: pooling is not None and name == own_head for name in shapes} | dict.fromkeys(scores, True)
    return {name: ModelTensor(shape, is_float32=is_float32[name]) for name, shape in (shapes | scores).items()}


def head_shapes(pooling: PoolingConfig, names: Names) -> dict[str, tuple[int, ...]]:
    """The tensors of a model that has scores, behind its layers."""
    hidden, head = pooling.hidden_size, pooling.head
    shapes: dict[str, tuple[int, ...]] = {f"{names.classifier}.weight": (pooling.num_labels, hidden)}
    if pooling.has_score_bias:
        shapes[f"{names.classifier}.bias"] = (pooling.num_labels,)
    if head is not None:
        shapes[f"{names.head_dense}.weight"] = (hidden, hidden)
        has_bias = {names.head_dense: head.has_bias, names.head_norm: head.norm is not None and head.norm.has_bias}
        shapes |= {f"{module}.bias": (hidden,) for module, is_there in has_bias.items() if is_there}
        if head.norm is not None:
            shapes[f"{names.head_norm}.weight"] = (hidden,)
    return shapes


def _row_by_row(piece: WeightSlice, pattern: str) -> Iterator[WeightSlice]:
    """Each row of a matrix that the checkpoint has as so many tensors, named by number."""
    (num_rows, *shape), ((start, stop), *columns) = piece.checkpoint_shape, piece.source
    (first, _), *others = piece.destination
    for row in range(num_rows):
        name, at = pattern.format(row), first + row - start
        if not start <= row < stop:
            yield nothing_of(name, tuple(shape))
            continue
        yield replace(
            piece,
            checkpoint_name=name,
            checkpoint_shape=tuple(shape),
            source=tuple(columns),
            destination=((at, at + 1), *others),
        )


def transposed(piece: WeightSlice) -> WeightSlice:
    """The slice of a matrix that the checkpoint has as [inputs, outputs]."""
    return replace(piece, checkpoint_shape=piece.checkpoint_shape[::-1], source=piece.source[::-1], is_transposed=True)


def _part_sizes(layer: LayerConfig) -> dict[str, int]:
    """Outputs of what may be fused, of the whole layer."""
    query, key_value = layer.num_heads * layer.head_size, layer.num_kv_heads * layer.head_size
    return {
        "self_attn.q_proj": query,
        "self_attn.k_proj": key_value,
        "self_attn.v_proj": key_value,
        "mlp.gate_proj": layer.intermediate_size,
        "mlp.up_proj": layer.intermediate_size,
        **({} if layer.experts is None else dict.fromkeys(_SHARED_GATES, layer.experts.shared_size)),
    }


_SHARED_GATES: Final = ("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj")
