"""Rank layout: world = data x pipeline x tensor, tensor innermost.

Pure arithmetic, and the only code that checks the factorisation.
"""

from bisect import bisect_left
from dataclasses import dataclass
from typing import Final

from spmd_worker.base.config.parallel import ParallelConfig
from spmd_worker.base.errors import ConfigError
from spmd_worker.model_config.layer_config import ExpertShare, LayerConfig, LayerShare
from spmd_worker.model_config.model_config import ModelConfig
from spmd_worker.ranks.expert_layout import ExpertLayout
from spmd_worker.ranks.leaves import column_range

VOCABULARY_ALIGNMENT: Final = 64
"""Vocabulary shards are padded to a multiple of this many rows, which suits kernels and can be halved six times."""


@dataclass(frozen=True, slots=True)
class RankLayout:
    """Sizes of the three axes. Rank = (data * pipeline_size + pipeline) * tensor_size + tensor.

    `pipeline_layers` are the layers of each stage; empty for stages of about equally many bytes of weights. `experts`
    maps experts to tensor ranks; None: all share the columns of each. `num_leaves`: see leaves.py; 1: none.
    """

    tensor_parallel_size: int
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    pipeline_layers: tuple[int, ...] = ()
    experts: ExpertLayout | None = None
    num_leaves: int = 1

    @property
    def world_size(self) -> int:
        return self.tensor_parallel_size * self.pipeline_parallel_size * self.data_parallel_size

    def product(self) -> str:
        """The world size as a product of options, for error messages."""
        return (
            f"parallel.tensor_parallel_size={self.tensor_parallel_size} x parallel.pipeline_parallel_size="
            f"{self.pipeline_parallel_size} x parallel.data_parallel_size={self.data_parallel_size} is "
            f"{self.world_size}"
        )

    @property
    def has_leaves(self) -> bool:
        """Whether answers have the bits of one rank, as each rank has complete leaves."""
        return self.num_leaves % self.tensor_parallel_size == 0

    def columns(self, num_columns: int, tensor_rank: int) -> tuple[int, int]:
        """Columns (start, stop) of a feed-forward that a tensor rank has."""
        return column_range(num_columns, self.num_leaves, self.tensor_parallel_size, tensor_rank)

    def tensor_rank(self, rank: int) -> int:
        return rank % self.tensor_parallel_size

    def pipeline_rank(self, rank: int) -> int:
        return rank // self.tensor_parallel_size % self.pipeline_parallel_size

    def tensor_groups(self) -> list[list[int]]:
        """Ranks that share each layer's weights, one list a group, in order."""
        size = self.tensor_parallel_size
        return [list(range(start, start + size)) for start in range(0, self.world_size, size)]

    def pipeline_groups(self) -> list[list[int]]:
        """Ranks that hold the same shard of successive stages, one list a group."""
        stride, replica_size = self.tensor_parallel_size, self.tensor_parallel_size * self.pipeline_parallel_size
        return [
            list(range(start + offset, start + replica_size, stride))
            for start in range(0, self.world_size, replica_size)
            for offset in range(stride)
        ]


@dataclass(frozen=True, slots=True)
class Stage:
    """Layers [start, stop) of a model; the first stage has the embedding too, the last one the norm and the head."""

    start: int
    stop: int
    is_first: bool
    is_last: bool

    @property
    def num_layers(self) -> int:
        return self.stop - self.start

    @property
    def indices(self) -> range:
        """Indices of its layers in the model."""
        return range(self.start, self.stop)


def complete_model(model_config: ModelConfig) -> Stage:
    """The only stage of a model without a pipeline."""
    return Stage(0, model_config.num_layers, is_first=True, is_last=True)


def layout_of(parallel: ParallelConfig) -> RankLayout:
    """The layout of a configuration."""
    return RankLayout(
        parallel.tensor_parallel_size,
        parallel.pipeline_parallel_size,
        parallel.data_parallel_size,
        tuple(parallel.pipeline_layers or ()),
    )


def stage_of(layout: RankLayout, model_config: ModelConfig, rank: int) -> Stage:
    """A rank's stage of the pipeline; the layout has been checked against the model config."""
    stage = layout.pipeline_rank(rank)
    counts = layout.pipeline_layers or balanced_layers(model_config, layout.pipeline_parallel_size)
    start = sum(counts[:stage])
    return Stage(start, start + counts[stage], is_first=stage == 0, is_last=stage == len(counts) - 1)


def balanced_layers(model_config: ModelConfig, num_stages: int) -> tuple[int, ...]:
    """Layers of each stage, one at least, minimising the maximum share of weights.

    The first stage also holds the embedding and the last one the head, tied or not. Among equal shares the earlier
    stages get more layers.
    """
    in_one = model_config.layers_in_one
    table = model_config.vocab_size * model_config.embedding_size + model_config.num_projection_parameters
    extra = [0] * num_stages
    extra[0] += table
    extra[-1] += table
    each = model_config.layer_parameters
    layers = tuple([sum(each[start : start + in_one]) for start in range(0, len(each), in_one)])
    if len(set(layers)) > 1:
        # The smallest maximum share with which all layers fit.
        sizes = range(sum(layers) + sum(extra) + 1)
        least = bisect_left(sizes, True, key=lambda size: _filled(layers, extra, size) is not None)
        filled = _filled(layers, extra, least)
        assert filled is not None, "all layers fit in one stage"
        return tuple([count * in_one for count in filled])
    counts = [1] * num_stages
    for _ in range(len(layers) - num_stages):
        least = min(range(num_stages), key=lambda stage: extra[stage] + (counts[stage] + 1) * layers[0])
        counts[least] += 1
    return tuple([count * in_one for count in counts])


def _filled(layers: tuple[int, ...], extra: list[int], capacity: int) -> tuple[int, ...] | None:
    """Counts of layers if each stage takes as many as fit in `capacity`, at least one; None if layers are left over."""
    counts, index = [], 0
    for stage, available in enumerate(capacity - each for each in extra):
        end, num_later = index, len(extra) - stage - 1
        while end < len(layers) - num_later and sum(layers[index : end + 1]) <= available:
            end += 1
        if end == index:
            return None
        counts.append(end - index)
        index = end
    return tuple(counts) if index == len(layers) else None


def check_world_size(layout: RankLayout, world_size: int) -> None:
    """Raise ConfigError unless the launcher started as many ranks as the layout has."""
    if layout.world_size != world_size:
        replica_size = layout.tensor_parallel_size * layout.pipeline_parallel_size
        choices = [f"start {layout.world_size} (torchrun --nproc-per-node)"]
        if world_size % replica_size == 0:
            choices.append(f"set parallel.data_parallel_size to {world_size // replica_size}")
        if world_size % layout.pipeline_parallel_size == 0:
            size = world_size // layout.pipeline_parallel_size
            choices.append(f"set parallel.tensor_parallel_size to {size} (and parallel.data_parallel_size to 1)")
        ranks = "rank" if layout.world_size == 1 else "ranks"
        raise ConfigError(f"{layout.product()} {ranks}, but {world_size} were started: {', or '.join(choices)}")


def check_complete_engines(layout: RankLayout, world_size: int) -> None:
    """Raise ConfigError unless the started ranks make one or several complete engines of this layout."""
    if world_size % layout.world_size:
        raise ConfigError(
            f"{layout.product()} ranks per engine, but {world_size} were started: start a multiple of "
            f"{layout.world_size} (torchrun --nproc-per-node)"
        )


def in_every_engine(groups: list[list[int]], layout: RankLayout, world_size: int) -> list[list[int]]:
    """Groups of one engine, for each engine of the world: ranks k * size to (k + 1) * size are engine k."""
    starts = range(0, world_size, layout.world_size)
    return [[start + rank for rank in ranks] for start in starts for ranks in groups]


def check_divides(layout: RankLayout, model_config: ModelConfig) -> None:
    """Raise ConfigError unless the model divides evenly among ranks; the message lists the sizes that do.

    Query heads must divide. Key-value heads must divide or, when ranks outnumber them, each must serve an integral
    number of ranks. The feed-forward is cut into nearly equal parts and the vocabulary is padded, so these always
    divide.
    """
    _check_stages(layout, model_config)
    _check_images(layout, model_config)
    size = layout.tensor_parallel_size
    problem = _shard_problem(size, model_config, layout.experts)
    if problem:
        sizes = range(1, max(layer.num_heads for layer in model_config.layers) + 1)
        valid = [str(each) for each in sizes if not _shard_problem(each, model_config, layout.experts)]
        raise ConfigError(
            f"parallel.tensor_parallel_size={size} does not divide this model: {problem}; "
            f"sizes that do are {_listed(valid)}"
        )


def _check_stages(layout: RankLayout, model_config: ModelConfig) -> None:
    size, layers = layout.pipeline_parallel_size, layout.pipeline_layers
    in_one = model_config.layers_in_one
    most = model_config.num_layers // in_one
    if size > most:
        raise ConfigError(
            f"parallel.pipeline_parallel_size={size} is more than the model's {most} layers: each "
            f"stage has one at least; lower it to {most} or less"
        )
    reads_others = model_config.num_layer_inputs or any(
        layer.kv_layer is not None or layer.takes_choice for layer in model_config.layers
    )
    if size > 1 and reads_others:
        raise ConfigError(
            f"parallel.pipeline_parallel_size={size} is not supported for this model: its layers read keys of other "
            f"layers, or choices of keys, or inputs of each token id, which one stage alone has; set it to 1"
        )
    if not layers:
        return
    option = f"parallel.pipeline_layers=[{','.join(map(str, layers))}]"
    if len(layers) != size:
        raise ConfigError(
            f"{option} has {len(layers)} stages but parallel.pipeline_parallel_size is {size}: give one number "
            f"a stage, or leave it null"
        )
    if min(layers) < 1 or sum(layers) != model_config.num_layers:
        example = ",".join(map(str, balanced_layers(model_config, size)))
        raise ConfigError(
            f"{option} makes {sum(layers)} layers and the model has {model_config.num_layers}, of which each stage "
            f"takes one at least: give numbers that add up, such as [{example}], or leave it null"
        )
    if any(each % in_one for each in layers):
        example = ",".join(map(str, balanced_layers(model_config, size)))
        raise ConfigError(
            f"{option} divides layers that are one in this model, {in_one} each: give multiples of {in_one}, such as "
            f"[{example}], or leave it null"
        )


def _check_images(layout: RankLayout, model_config: ModelConfig) -> None:
    """Raise ConfigError for a model that takes images and cannot place their tokens, or add their rows to its first
    layers.
    """
    vision = model_config.vision
    if vision is None:
        return
    way_out = "set limits.max_images=0 to run it with text alone"
    first = stage_of(layout, model_config, 0)
    if vision.num_added > first.num_layers:
        raise ConfigError(
            f"parallel.pipeline_parallel_size={layout.pipeline_parallel_size} leaves {first.num_layers} layers to the "
            f"first stage, and rows of images are added behind the first {vision.num_added} (deepstack): give it "
            f"those with parallel.pipeline_layers, lower the number of stages, or {way_out}"
        )
    unplaced = [rope.rope_type for rope in model_config.ropes if not (rope.sections and rope.takes_three_positions)]
    if vision.has_three_positions and (unplaced or not model_config.ropes):
        raise ConfigError(
            f"tokens of images have three positions, which this model's rope of type {(unplaced or ['none'])[0]} has "
            f"no sections for, or does not scale for: {way_out}"
        )


def _shard_problem(size: int, model_config: ModelConfig, experts: ExpertLayout | None) -> str:
    for layer in dict.fromkeys(model_config.layers):
        if layer.attends and layer.num_heads % size:
            return f"it has {layer.num_heads} attention heads"
        if layer.attends and layer.num_kv_heads % size and size % layer.num_kv_heads:
            return f"it has {layer.num_kv_heads} key-value heads"
        if layer.compressed is not None and layer.compressed.num_groups % size:
            return f"its outputs of heads are projected in {layer.compressed.num_groups} groups"
        if layer.conv is not None and model_config.hidden_size % size:
            return f"its convolutions have {model_config.hidden_size} channels"
        if layer.delta is not None and layer.delta.num_value_heads % size:
            return f"its gated delta nets have {layer.delta.num_value_heads} value heads"
        if layer.delta is not None and layer.delta.num_key_heads % size and size % layer.delta.num_key_heads:
            return f"its gated delta nets have {layer.delta.num_key_heads} key heads"
        if layer.mamba1 is not None and layer.mamba1.num_channels % size:
            return f"its Mamba layers have {layer.mamba1.num_channels} channels"
        if layer.mamba is not None and layer.mamba.num_heads % size:
            return f"it has {layer.mamba.num_heads} Mamba heads"
        if layer.mamba is not None and layer.mamba.num_groups % size and size % layer.mamba.num_groups:
            return f"its Mamba heads are in {layer.mamba.num_groups} groups"
    columns = min((each for layer in model_config.layers for each in _split_columns(layer, experts)), default=size)
    if columns < size:
        return f"its feed-forward has {columns} columns"
    return ""


def _split_columns(layer: LayerConfig, layout: ExpertLayout | None) -> tuple[int, ...]:
    """Columns of each feed-forward that is split among the ranks of a group."""
    if not layer.has_feed_forward:
        return ()
    if layer.experts is None:
        return (layer.intermediate_size,)
    routed = () if layout is not None else (layer.experts.intermediate_size,)
    dense = (layer.intermediate_size,) if layer.has_dense else ()
    is_shared_split = layer.experts.shared_size > 0 and not (layout is not None and layout.is_exact)
    return (*routed, *dense, layer.experts.shared_size) if is_shared_split else (*routed, *dense)


def layer_share(layout: RankLayout, layer: LayerConfig, index: int, tensor_rank: int) -> LayerShare:
    """A tensor rank's share of layer `index`; the layout has been checked against the model config."""
    size = layout.tensor_parallel_size
    start, stop = layout.columns(layer.intermediate_size, tensor_rank)
    return LayerShare(
        num_heads=layer.num_heads // size,
        num_kv_heads=max(layer.num_kv_heads // size, min(layer.num_kv_heads, 1)),
        num_columns=stop - start,
        experts=expert_share(layout, layer, index, tensor_rank),
        num_ranks=size,
    )


def expert_share(layout: RankLayout, layer: LayerConfig, index: int, tensor_rank: int) -> ExpertShare | None:
    """A tensor rank's share of the experts of layer `index`; None for a dense one."""
    if layer.experts is None:
        return None
    experts = layer.experts
    start, stop = layout.columns(experts.shared_size, tensor_rank)
    if layout.experts is None:
        first, end = layout.columns(experts.intermediate_size, tensor_rank)
        return ExpertShare(experts.num_experts, end - first, stop - start)
    num_own = layout.experts.owners_of(index).count(tensor_rank)
    num_shared = experts.shared_size if layout.experts.is_exact else stop - start
    return ExpertShare(num_own, experts.intermediate_size, num_shared)


def _listed(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def shard_range(total: int, size: int, rank: int) -> tuple[int, int]:
    """The part (start, stop) of `total` items that `rank` of `size` owns: nearly equal parts, earlier ones bigger."""
    base, extra = divmod(total, size)
    start = rank * base + min(rank, extra)
    return start, start + base + (rank < extra)


def vocabulary_rows(vocab_size: int, num_shards: int) -> int:
    """Rows of each vocabulary shard: an equal part, padded to a multiple of `VOCABULARY_ALIGNMENT`."""
    per_shard = -(-vocab_size // num_shards)
    return -(-per_shard // VOCABULARY_ALIGNMENT) * VOCABULARY_ALIGNMENT
