"""Maps names of a model's weights by the family's table (`Names`), for one pipeline stage.

Ours -> the checkpoint's: layers describe their weights with Llama's names and count from 0 in each stage. The name is
replaced by the checkpoint's; a tensor that the checkpoint has inside another becomes rows of that; a matrix that it has
as [inputs, outputs] is marked. Given -> the checkpoint's (`parts`): files and trainers may omit a prefix, use the names
of another release, or stack experts. Knows names and shapes, not tensors, files or ranks.
"""

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Final

from spmd_worker.base.errors import CheckpointError
from spmd_worker.model.layers.checkpoint_layer import CheckpointLayer
from spmd_worker.model.layers.weight_slice import ModelTensor, RecutRows, TensorView, WeightSlice, empty_slice
from spmd_worker.model_config.encoder_part import EncoderPart
from spmd_worker.model_config.families.experts import StackedTensor
from spmd_worker.model_config.families.family import CROSS_NORM_POSITIONS, NORM_POSITIONS, Names
from spmd_worker.model_config.layer_config import DeltaConfig, ExpertsConfig, LayerConfig, MambaConfig
from spmd_worker.model_config.model_config import ModelConfig
from spmd_worker.model_config.stream_config import GatedStreamsConfig
from spmd_worker.ranks.topology import Stage

_LAYER: Final = re.compile(r"model\.layers\.(\d+)\.")
TOWER: Final = "tower."
"""The beginning of our names of a tower's parameters."""
_EXPERT: Final = re.compile(r"mlp\.experts\.(\d+)\.(\w+)")
_IN_MEMORY: Final = {"gate_up_proj": ("gate_proj", "up_proj"), "up_proj": ("up_proj",), "down_proj": ("down_proj",)}
"""Stacks that transformers makes in memory of separate experts, [experts, outputs, inputs], and their matrices. Those
without gates have a stack of their own.
"""
_EXPERT_MATRICES: Final = tuple(f"mlp.experts.{{}}.{part}" for parts in _IN_MEMORY.values() for part in parts)
_LAYER_INPUTS: Final = tuple(f"model.layer_inputs.{each}" for each in ("table", "projection", "norm"))
_LAST_MEAN: Final = ("hc_norm", "input_mix_weight_down", "input_mix_weight_up")
"""Modules of the last mean of several streams."""
_OUTER_STREAMS: Final = ("altup_projections", "altup_unembed_projections")
_NGRAM_TABLE: Final = "ple.ple_embedding.ngram_embedding.weight"
_SHARED_GATES: Final = ("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj")


class CheckpointNames:
    """Checkpoint names of a stage's weights."""

    def __init__(self, model_config: ModelConfig, stage: Stage) -> None:
        names, pooling = model_config.names, model_config.pooling
        self._model_config, self._stage, self._names = model_config, stage, names
        parts = () if model_config.vision is None else model_config.vision.parts
        self._towers = tuple([each.tower.names for each in parts if each.tower is not None])
        self._encoder = None if model_config.encoder_part is None else _names_of_encoder(model_config.encoder_part)
        self._has_head = pooling is None or bool(pooling.label_token_ids)
        self._is_tied = model_config.has_tied_embeddings
        self._head = f"{names.head}.weight"
        self.tied = (f"{names.embedding}.weight", self._head) if self._has_head and self._is_tied else None
        """Names of the embedding and of the token head that is tied to it, if it is."""
        self.is_last_stage = stage.is_last
        self._tops = {
            "model.embed_tokens": names.embedding,
            "model.embed_positions": names.positions,
            "model.embed_token_types": names.token_types,
            "model.embedding_norm": names.embedding_norm,
            "model.norm": names.norm,
            "model.rope_factors": names.rope_factors,
            "model.project_in": names.project_in,
            "model.project_out": names.project_out,
            "model.relative_bias": names.relative_bias,
            "model.distances": names.distances[0],
            "model.distance_norm": names.distances[1],
            **dict(zip(_LAYER_INPUTS, names.layer_inputs, strict=True)),
            **(_of_last_mean(names.norm) if isinstance(model_config.layers[0].streams, GatedStreamsConfig) else {}),
            **_outer_streams(model_config, names),
            "lm_head": names.embedding if self._is_tied else names.head,
            "pooler": names.classifier,
            "pooler.dense": names.head_dense,
            "pooler.norm": names.head_norm,
        }
        of_audio = (*names.audio.convolutions, names.audio.positions)
        self._top_modules = {top for top in (*self._tops.values(), names.head, *of_audio) if top}
        has_scores = pooling is not None and pooling.has_score_weight
        before = (names.head_dense, names.head_norm) if pooling is not None and pooling.head is not None else ()
        self._head_modules = tuple([each for each in (*before, names.classifier) if each]) if has_scores else ()
        norms = {ours: theirs for ours, theirs in zip(NORM_POSITIONS, names.norms) if theirs}
        norms |= {ours: theirs for ours, theirs in zip(CROSS_NORM_POSITIONS, names.cross_norms) if theirs}
        self._parts = {**norms, **names.parts}
        self._fused = {ours: fused for fused, parts in names.fused.items() for ours in parts}
        self._stacked = {part: (each, each.parts.index(part)) for each in names.stacked for part in each.parts}
        self._layer = re.compile(rf"{re.escape(names.layers)}\.(\d+)\.")
        self._numbers = model_config.layer_numbers
        # Of layers with one number the first.
        self._indices = {number: index for index, number in reversed([*enumerate(self._numbers)])}
        # Files of a backbone alone omit the name of the module that holds it; heads are outside of that module.
        backbone_prefix = f"{names.layers.partition('.')[0]}." if pooling is not None else ""
        self._optional_prefix = names.optional_prefix or backbone_prefix
        self._unprefixed = (f"{names.head}.", f"{names.classifier}.")

    def slices(self, layers: Mapping[str, CheckpointLayer]) -> list[WeightSlice]:
        """This rank's slices of checkpoint tensors. `layers` are those of the stage, by our names."""
        return [
            replace(piece, is_float32=True) if layer.is_float32 else piece
            for name, layer in layers.items()
            for own in layer.weight_slices(name)
            for piece in self._pieces(own)
        ]

    @property
    def are_transposed(self) -> bool:
        """Whether matrices of layers are [inputs, outputs]."""
        return self._names.are_transposed

    def is_transposed(self, name: str) -> bool:
        """Whether a matrix, by its checkpoint name, is [inputs, outputs]."""
        return self.are_transposed and self._layer_of(name) is not None

    def _layer_prefix(self, index: int) -> str:
        return f"{self._names.layers}.{self._numbers[index]}."

    def _in_layer(self, index: int, name: str) -> str:
        return self._layer_prefix(index) + self._names.in_layer(index, name)

    def _layer_of(self, name: str) -> tuple[int, str] | None:
        """Index of the layer of a tensor, and its name in the layer; None for a tensor of no layer of the model."""
        found = self._layer.match(name)
        index = None if found is None else self._indices.get(int(found[1]))
        return None if found is None or index is None else (index, name[found.end() :])

    def layer_of_expert(self, name: str) -> int | None:
        """Index of the layer of a matrix of experts, separate or a stack; None for other tensors."""
        found = self._layer_of(name)
        if found is None or self._model_config.layers[found[0]].experts is None:
            return None
        if self._names.stacked:
            is_matrix = found[1] in [each.name for each in self._names.stacked]
        else:
            patterns = [self._parts.get(each, each) for each in _EXPERT_MATRICES]
            is_matrix = re.sub(r"\.\d+\.", ".{}.", found[1]) in [f"{each}.weight" for each in patterns]
        return found[0] if is_matrix else None

    def expert_stack(self, name: str) -> StackedTensor | None:
        """The stack of experts that a matrix of experts is; None for one of a single expert."""
        found = self._layer_of(name)
        return None if found is None else next((each for each in self._names.stacked if each.name == found[1]), None)

    def _pieces(self, piece: WeightSlice) -> Iterator[WeightSlice]:
        if not piece.parameter_name.startswith(TOWER):
            yield from self.named(piece)
        elif self._encoder is not None and piece.checkpoint_name.startswith(TOWER):
            yield from self._encoder.named(replace(piece, checkpoint_name=piece.checkpoint_name.removeprefix(TOWER)))
        else:
            # Other layers of towers know the checkpoint's names.
            yield piece

    def named(self, piece: WeightSlice) -> Iterator[WeightSlice]:
        """A layer's slice with the checkpoint's names and shapes: several if a fused tensor has one part per head."""
        module, _, leaf = piece.checkpoint_name.rpartition(".")
        found = _LAYER.match(piece.checkpoint_name)
        if found is None and module == "model.stream_head":
            yield replace(piece, checkpoint_name=f"{self._names.stream_head}{leaf}")
            return
        if found is None:
            # A head whose weight is the embedding's still has its own bias.
            is_head_bias = module == "lm_head" and leaf == "bias"
            top = self._names.head if is_head_bias else self._tops[module]
            is_buffer = is_head_bias and self._names.head_bias != ""
            named = replace(piece, checkpoint_name=self._names.head_bias if is_buffer else f"{top}.{leaf}")
            yield replace(_as_row(named), is_buffer=True) if is_buffer else named
            return
        index, part = int(found[1]) + self._stage.start, module[found.end() :]
        expert = _EXPERT.fullmatch(part)
        if expert is not None:
            yield self._expert_piece(piece, index, int(expert[1]), expert[2], leaf)
            return
        full_name = self._parts.get(f"{part}.{leaf}")
        if full_name is not None:
            is_parameter = f"{part}.{leaf}" in self._names.as_parameters
            name = self._in_layer(index, full_name)
            named = replace(piece, checkpoint_name=name, is_buffer=piece.is_buffer and not is_parameter)
            yield _as_row(named) if f"{part}.{leaf}" in self._names.as_rows else named
            return
        if "{}" in self._parts.get(part, ""):
            yield from _row_by_row(piece, f"{self._layer_prefix(index)}{self._parts[part]}.{leaf}")
            return
        fused = self._fused.get(part)
        inside = (piece,) if fused is None else self._inside(piece, part, fused, self._model_config.layers[index])
        name = self._in_layer(index, f"{fused or self._parts.get(part, part)}.{leaf}")
        is_transposed = self._names.are_transposed and len(piece.checkpoint_shape) == 2
        for each in inside:
            shape, source = each.checkpoint_shape, each.source
            if is_transposed:
                shape, source = shape[::-1], source[::-1]
            yield replace(
                each, checkpoint_name=name, checkpoint_shape=shape, source=source, is_transposed=is_transposed
            )

    def _expert_piece(self, piece: WeightSlice, index: int, expert: int, matrix: str, leaf: str) -> WeightSlice:
        """A separate tensor, or a slice of the stacked tensor of all experts."""
        prefix = self._layer_prefix(index)
        if matrix not in self._stacked:
            ours = f"mlp.experts.{{}}.{matrix}"
            return replace(piece, checkpoint_name=f"{prefix}{self._parts.get(ours, ours).format(expert)}.{leaf}")
        (stacked, part), experts = self._stacked[matrix], self._model_config.layers[index].experts
        assert experts is not None, piece
        rows, *inputs = piece.checkpoint_shape
        (start, stop), *columns = piece.source
        first, name = part * rows, prefix + (stacked.name if leaf == "weight" else stacked.bias)
        shape = (experts.num_experts, rows * len(stacked.parts), *inputs)
        source = ((expert, expert + 1), (first + start, first + stop), *columns)
        is_transposed = stacked.is_transposed and leaf == "weight"
        if is_transposed:
            shape, source = (shape[0], *shape[:0:-1]), (source[0], *source[:0:-1])
        if stacked.is_flat:
            height, width = shape[1:]
            (begin, end), across = source[1:]
            shape = (experts.num_experts * height, width)
            source = ((expert * height + begin, expert * height + end), across)
        if piece.parameter_name == "":
            return empty_slice(name, shape)
        return replace(piece, checkpoint_name=name, checkpoint_shape=shape, source=source, is_transposed=is_transposed)

    def parts(self, given_name: str, shape: Sequence[int]) -> dict[str, TensorView | None]:
        """Names, by the table, of the checkpoint tensors in the tensor that a file or a trainer calls `given_name`:
        views of it, or None for the tensor itself. Raises CheckpointError for stacks and joined tensors of a wrong
        shape.
        """
        name = self._table_name(given_name)
        found = self._layer_of(name)
        if found is not None and found[1] in self._names.joined_rows:
            return self._joined_rows(*found, TensorView(given_name, has_slices=False), shape)
        if found is not None and found[1] == _NGRAM_TABLE:
            return self._ngram_parts(found[0], TensorView(given_name, has_slices=False), shape)
        experts = None if found is None else self._model_config.layers[found[0]].experts
        if found is None or experts is None:
            return {name: None}
        if self._names.stacked:
            is_transposed = self._is_transposed_stack(found[1], experts, shape)
            joined = self._joined_parts(*found, experts, TensorView(given_name), shape)
            return joined or {name: TensorView(given_name) if is_transposed else None}
        return self._stacked_parts(*found, experts, TensorView(given_name), shape) or {name: None}

    def joined_rows(self, given_name: str, shape: Sequence[int]) -> dict[str, tuple[int, int]]:
        """Names, by the table, and rows of the checkpoint tensors in one that is joined in memory, or of the tensors in
        memory that one of the checkpoint joins; none for any other. Raises CheckpointError for a wrong shape.
        """
        found = self._layer_of(name := self._table_name(given_name))
        if found is not None and (separate := self.separate_rows([name])):
            *_, (_, (_, stop)) = separate.values()
            if not shape or shape[0] != stop:
                raise CheckpointError(f"{name}: has the shape {list(shape)}, but this layer has {stop} rows")
            return {each: rows for each, (_, rows) in separate.items()}
        if found is None or found[1] not in self._names.joined_rows:
            return {}
        views = self._joined_rows(*found, TensorView(given_name, has_slices=False), shape)
        return {name: view.rows for name, view in views.items() if view is not None}

    def _table_name(self, given_name: str) -> str:
        """The table's name of a tensor, which may be given by an alias or without the prefix."""
        name = self._of_tower(self._by_mixer(self._names.canonical(given_name)))
        full_name = name if name.startswith(self._unprefixed) else self._optional_prefix + name
        return full_name if self._is_known(full_name) and not self._is_known(name) else name

    def _of_tower(self, name: str) -> str:
        """The table's name of a tower's tensor, which files may call otherwise."""
        for beginning, ours in [alias for each in self._towers for alias in each.aliases]:
            if name.startswith(beginning):
                return ours + name.removeprefix(beginning)
        return name if self._encoder is None else self._encoder.canonical(name)

    def canonical(self, name: str) -> str:
        """The table's name of a tensor, of which `name` may be an alias."""
        return self._names.canonical(name)

    def is_of_tower(self, given_name: str) -> bool:
        """Whether the tensor that a file or a trainer calls so is of a tower that runs, or should be."""
        return self._is_of_tower(self._table_name(given_name))

    def _is_of_tower(self, name: str) -> bool:
        """Whether the tensor is of a tower that runs, or should be."""
        if self._encoder is not None:
            return self._encoder.has_module(name) and not name.startswith(f"{self._names.embedding}.")
        towers = [each for each in self._towers if name.startswith(each.beginnings)]
        return any(not any(re.fullmatch(unused, name) for unused in each.unused) for each in towers)

    def _by_mixer(self, name: str) -> str:
        """The table's name of a tensor that transformers calls otherwise in layers with one mixer."""
        found = self._layer_of(name) if self._names.mixer_aliases else None
        if found is None:
            return name
        aliases = self._names.mixer_aliases.get(self._model_config.layers[found[0]].mixer, {})
        for beginning, ours in aliases.items():
            if found[1].startswith(beginning):
                return self._layer_prefix(found[0]) + ours + found[1].removeprefix(beginning)
        return name

    def _is_known(self, name: str) -> bool:
        """Whether the tensor is of a module of the model, perhaps a part of a quantised weight, or derived."""
        return self.has_module(name) or self._is_of_tower(name) or self.is_derived(name)

    def has_module(self, name: str) -> bool:
        """Whether the tensor is of a module of the stack."""
        is_head = self._names.stream_head != "" and name.startswith(self._names.stream_head)
        return is_head or name.rpartition(".")[0] in self._top_modules or self._layer_of(name) is not None

    def is_copy(self, name: str) -> bool:
        """Whether the tensor equals the embedding, which the model has once."""
        return name in self._names.embedding_copies

    def embedding_in(self, files: Collection[str]) -> tuple[str, str] | None:
        """Name of the embedding, and of its copy that files of these names have in its place, if they have one."""
        embedding = f"{self._names.embedding}.weight"
        copies = [name for name in (*self._names.embedding_copies, self._head) if name in files]
        return (embedding, copies[0]) if self._is_tied and copies and embedding not in files else None

    def _stacked_parts(
        self, index: int, inside: str, experts: ExpertsConfig, given: TensorView, shape: Sequence[int]
    ) -> dict[str, TensorView | None]:
        """Matrices of separate experts in a stack of `_IN_MEMORY`; empty for other tensors."""
        module, _, stack = inside.rpartition(".")
        parts = _IN_MEMORY.get(stack, ())
        patterns = [self._parts.get(ours, ours) for ours in (f"mlp.experts.{{}}.{part}" for part in parts)]
        if not parts or module != patterns[0].partition(".{}")[0]:
            return {}
        prefix = self._layer_prefix(index)
        # transformers' stacks may have room for experts without weights.
        counts = (experts.num_experts, experts.num_choices)
        if len(shape) != 3 or shape[0] not in counts or shape[1] % len(parts):
            raise CheckpointError(
                f"{prefix}{inside}: has the shape {list(shape)}, but this layer of the model has "
                f"{experts.num_experts} experts: a stack is [experts, outputs, inputs]"
            )
        rows = shape[1] // len(parts)
        return {
            f"{prefix}{pattern.format(expert)}.weight": replace(
                given, index=expert, rows=(part * rows, (part + 1) * rows)
            )
            for expert in range(experts.num_experts)
            for part, pattern in enumerate(patterns)
        }

    def _joined_parts(
        self, index: int, inside: str, experts: ExpertsConfig, given: TensorView, shape: Sequence[int]
    ) -> dict[str, TensorView | None]:
        """Stacks that are one in memory, [experts, outputs, inputs] (`Names.joined`); empty for other tensors."""
        names, prefix = self._names.joined.get(inside, ()), self._layer_prefix(index)
        if names and (len(shape) != 3 or shape[0] != experts.num_experts or shape[1] % len(names)):
            raise CheckpointError(
                f"{prefix}{inside}: has the shape {list(shape)}, but this layer of the model has "
                f"{experts.num_experts} experts: a stack is [experts, outputs, inputs]"
            )
        rows = shape[1] // len(names) if names else 0
        return {prefix + name: replace(given, rows=(part * rows, (part + 1) * rows)) for part, name in enumerate(names)}

    def _joined_rows(
        self, index: int, inside: str, given: TensorView, shape: Sequence[int]
    ) -> dict[str, TensorView | None]:
        """Tensors that are one in memory, by rows (`Names.joined_rows`)."""
        parts = self._names.joined_rows[inside]
        stops = list(accumulate(self._num_rows(index, parts)))
        prefix = self._layer_prefix(index)
        if not shape or shape[0] != stops[-1] or not stops[0]:
            raise CheckpointError(f"{prefix}{inside}: has the shape {list(shape)}, but this layer has {stops[-1]} rows")
        return {
            prefix + part: replace(given, rows=(start, stop))
            for part, start, stop in zip(parts, [0, *stops], stops, strict=False)
        }

    def _ngram_parts(self, index: int, given: TensorView, shape: Sequence[int]) -> dict[str, TensorView | None]:
        """Tensors of a table of n-grams, which is one in memory."""
        ngrams, name = self._model_config.layers[index].ngrams, self._layer_prefix(index) + _NGRAM_TABLE
        if ngrams is None:
            return {name: None}
        if tuple(shape) != (ngrams.num_rows, ngrams.row_size):
            expected = [ngrams.num_rows, ngrams.row_size]
            raise CheckpointError(f"{name}: has the shape {list(shape)}, but this layer's table is {expected}")
        stops = list(accumulate(ngrams.rows_of_parts))
        return {
            f"{name.removesuffix('weight')}shard_{part}.weight": replace(given, rows=rows)
            for part, rows in enumerate(zip([0, *stops], stops, strict=False))
        }

    def _num_rows(self, index: int, parts: Sequence[str]) -> list[int]:
        """Rows of tensors of a layer; 0 for those that it does not have."""
        ours = _part_sizes(self._model_config.layers[index])
        sizes = {self._parts.get(part, part): size for part, size in ours.items()}
        return [sizes.get(part.rpartition(".")[0], 0) for part in parts]

    def recut_rows(self, shapes: Mapping[str, Sequence[int]]) -> dict[str, RecutRows]:
        """Tensors of `Names.joined_rows` that files of these shapes cut elsewhere than the model, by name."""
        found: dict[str, RecutRows] = {}
        for index in range(len(self._model_config.layers)):
            for parts in self._names.joined_rows.values():
                names = tuple(self._layer_prefix(index) + part for part in parts)
                ours, theirs = self._num_rows(index, parts), [(*shapes.get(name, ()), 0)[0] for name in names]
                if ours != theirs and sum(ours) == sum(theirs) and all(theirs):
                    starts = accumulate([0, *ours])
                    found |= {name: RecutRows(start, rows, names) for name, start, rows in zip(names, starts, ours)}
        return found

    def _is_transposed_stack(self, inside: str, experts: ExpertsConfig, shape: Sequence[int]) -> bool:
        """Whether it is a stack of experts that is transposed compared to the table (`StackedTensor`)."""
        stack = next((each for each in self._names.stacked if each.name == inside), None)
        if stack is None or not stack.may_be_transposed:
            return False
        rows, inputs = len(stack.parts) * experts.intermediate_size, self._model_config.hidden_size
        if stack.parts == ("down_proj",):
            rows, inputs = inputs, rows
        return rows != inputs and tuple(shape) == (experts.num_experts, inputs, rows)

    def separate_rows(self, tensors: Collection[str]) -> dict[str, tuple[str, tuple[int, int]]]:
        """Tensors that are separate in memory (`Names.separate`) by name, each with the one of `tensors` whose rows it
        is, and which rows.
        """
        found: dict[str, tuple[str, tuple[int, int]]] = {}
        for index, layer in enumerate(self._model_config.layers if self._names.separate else ()):
            prefix, sizes = self._layer_prefix(index), _part_sizes(layer)
            for module, parts in self._names.separate.items():
                fused = self._fused[parts[0]]
                assert fused not in self._names.by_kv_head, fused
                before = self._names.fused[fused][: self._names.fused[fused].index(parts[0])]
                start = sum(sizes.get(part, 0) for part in before)
                rows = (start, start + sum(sizes.get(part, 0) for part in parts))
                for leaf in ("weight", "bias"):
                    if (joined := f"{prefix}{fused}.{leaf}") in tensors:
                        found[f"{prefix}{module}.{leaf}"] = (joined, rows)
        return found

    def _inside(self, piece: WeightSlice, part: str, fused: str, layer: LayerConfig) -> Iterator[WeightSlice]:
        """Rows of the fused tensor: one range of them, or one per key-value head."""
        parts, sizes = self._names.fused[fused], _part_sizes(layer)
        assert piece.checkpoint_shape[0] == sizes[part], (piece, sizes[part])
        num_groups = _num_key_heads(layer) if fused in self._names.by_kv_head else 1
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

    def is_beside_text(self, given_name: str) -> bool:
        """Whether the tensor that a file or a trainer calls so is of a module that text does not run: towers and layers
        for other input.
        """
        return self._is_beside_text(self._table_name(given_name))

    def _is_beside_text(self, name: str) -> bool:
        if name.rpartition(".")[0] in self._head_modules:
            return False
        layer = self._layer.match(name)
        is_for_images = layer is not None and int(layer[1]) in self._model_config.image_layers
        return is_for_images or name.startswith(self._names.ignored_prefixes)

    def is_derived(self, name: str) -> bool:
        """Whether the tensor is not needed: frequencies, masks, a tied head, later layers, other input than what the
        model takes, keys of layers that read those of others.
        """
        if name.rpartition(".")[0] in self._head_modules or self._is_of_tower(name):
            return False
        is_ignored = self.is_copy(name) or name.endswith(self._names.ignored) or self._is_beside_text(name)
        has_no_head = self._is_tied or not self._has_head
        biases = (f"{self._names.head}.bias", self._names.head_bias)
        is_head = name == self._head or (not self._has_head and name in biases)
        is_beside = self._is_of_later_layer(name) or self._is_of_keys(name) or self._is_of_identity(name)
        return is_ignored or (has_no_head and is_head) or is_beside

    def _is_of_keys(self, name: str) -> bool:
        """Whether it is of keys and values in a layer that reads those of another: files may have them still."""
        found = self._layer_of(name)
        if found is None or self._model_config.layers[found[0]].kv_layer is None:
            return False
        return found[1].startswith(("self_attn.k_", "self_attn.v_"))

    def _is_of_identity(self, name: str) -> bool:
        """Whether a tensor is of an expert without weights: transformers writes some."""
        found = self._layer_of(name)
        experts = None if found is None else self._model_config.layers[found[0]].experts
        number = None if found is None else _EXPERT.match(found[1])
        if experts is None or number is None:
            return False
        return experts.num_experts <= int(number[1]) < experts.num_choices

    def tensors(self, stage_slices: Callable[[Stage], Sequence[WeightSlice]]) -> dict[str, ModelTensor]:
        """All tensors of the checkpoint by name, of every stage, from the slices of a rank of any stage."""
        found: dict[str, ModelTensor] = {}
        end, layers = self._model_config.num_layers, self._model_config.layers
        for stage in (Stage(0, 0, is_first=True, is_last=False), Stage(end, end, is_first=False, is_last=True)):
            for piece in stage_slices(stage):
                # The tensor of a tied head is the embedding's, with its shape and dtype.
                tensor = found.setdefault(piece.checkpoint_name, piece.tensor)
                assert tensor.shape == piece.checkpoint_shape, (piece, tensor)
        # Layers of one kind have the same tensors.
        of_kind: dict[LayerConfig, dict[str, ModelTensor]] = {}
        for index, layer in enumerate(layers):
            prefix = self._layer_prefix(index)
            if layer not in of_kind:
                pieces = stage_slices(Stage(index, index + 1, is_first=False, is_last=False))
                # A table of all layers, which every stage has, may be inside the first one by its name.
                pieces = [each for each in pieces if each.checkpoint_name not in found]
                of_kind[layer] = {piece.checkpoint_name.removeprefix(prefix): piece.tensor for piece in pieces}
            found |= {prefix + name: tensor for name, tensor in of_kind[layer].items()}
        return found

    def _is_of_later_layer(self, name: str) -> bool:
        """Whether it is of a layer beyond the model's and files may have such."""
        layer, config = self._layer.match(name), self._model_config
        num_layers = config.num_layers + len(config.image_layers)
        return self._names.ignores_later_layers and layer is not None and int(layer[1]) >= num_layers


def _of_last_mean(theirs: str) -> dict[str, str]:
    return {f"model.norm.{each}": f"{theirs}.{each}" for each in _LAST_MEAN}


def _outer_streams(model_config: ModelConfig, names: Names) -> dict[str, str]:
    """Modules of the projections to and from further streams."""
    numbers = range(model_config.layers[0].num_streams - 1) if names.outer_streams[0] else ()
    return {
        f"model.{ours}.{number}": f"{theirs}.{number}"
        for ours, theirs in zip(_OUTER_STREAMS, names.outer_streams, strict=True)
        for number in numbers
    }


def _names_of_encoder(part: EncoderPart) -> CheckpointNames:
    return CheckpointNames(part.stack, Stage(0, part.stack.num_layers, is_first=True, is_last=True))


def _as_row(piece: WeightSlice) -> WeightSlice:
    """The slice of a tensor [n] that the checkpoint has as [1, n], a parameter in transformers."""
    shape, source = (1, *piece.checkpoint_shape), ((0, 1), *piece.source)
    return replace(piece, checkpoint_shape=shape, source=source, is_buffer=False)


def _row_by_row(piece: WeightSlice, pattern: str) -> Iterator[WeightSlice]:
    """Slices of a matrix of which the checkpoint has each row as a tensor, named by its index."""
    (num_rows, *shape), ((start, stop), *columns) = piece.checkpoint_shape, piece.source
    (first, _), *others = piece.destination
    for row in range(num_rows):
        name, at = pattern.format(row), first + row - start
        if not start <= row < stop:
            yield empty_slice(name, tuple(shape))
            continue
        yield replace(
            piece,
            checkpoint_name=name,
            checkpoint_shape=tuple(shape),
            source=tuple(columns),
            destination=((at, at + 1), *others),
        )


def _part_sizes(layer: LayerConfig) -> dict[str, int]:
    """Number of outputs of the modules that may be fused, over all ranks."""
    query, key_value = layer.num_heads * layer.head_size, layer.num_kv_heads * layer.head_size
    if layer.output_gate == "number":
        query *= 2
    return {
        "self_attn.q_proj": query,
        "self_attn.k_proj": key_value,
        "self_attn.v_proj": layer.num_kv_heads * layer.value_head_size,
        "mlp.gate_proj": layer.intermediate_size,
        "mlp.up_proj": layer.intermediate_size,
        **({} if layer.experts is None else dict.fromkeys(_SHARED_GATES, layer.experts.shared_size)),
        **({} if layer.delta is None else _delta_sizes(layer.delta)),
        **({} if layer.mamba1 is None else dict.fromkeys(("mamba.in_x", "mamba.in_z"), layer.mamba1.num_channels)),
        **({} if layer.mamba is None else _mamba_sizes(layer.mamba)),
    }


def _delta_sizes(delta: DeltaConfig) -> dict[str, int]:
    key, value = delta.num_key_heads * delta.key_size, delta.num_value_heads * delta.value_size
    gates = {f"in_proj_{part}": delta.num_value_heads for part in "ba"}
    mixed = {f"{part}_conv1d": size for part, size in (("q", key), ("k", key), ("v", value))}
    sizes = {"in_proj_q": key, "in_proj_k": key, "in_proj_v": value, "in_proj_z": value, **gates, **mixed}
    return {f"linear_attn.{name}": size for name, size in sizes.items()}


def _mamba_sizes(mamba: MambaConfig) -> dict[str, int]:
    inner, shared = mamba.num_heads * mamba.head_size, mamba.num_groups * mamba.state_size
    sizes = {"z": inner, "x": inner, "b": shared, "c": shared, "dt": mamba.num_heads}
    return {f"mamba.in_{name}": size for name, size in sizes.items()}


def _num_key_heads(layer: LayerConfig) -> int:
    """Key heads of the layer's mixer."""
    return layer.delta.num_key_heads if layer.delta is not None else layer.num_kv_heads
