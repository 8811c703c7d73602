"""Leaves: how the inputs of row-parallel products are cut, so that results do not depend on the number of ranks.

A row-parallel product (output projection of a mixer, down projection of a feed-forward) sums over inputs that ranks
share. Its inputs are cut into L leaves at fixed places. Within a leaf the sum is one float32 chain; over leaves it is a
binary tree of neighbours, ((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7)), rounded once at the root. A bias is added to the
first leaf. A rank of a group whose size divides L has complete leaves, and so a subtree: its part is the subtree's sum,
in float32 whatever the dtype, and the exchange goes on with the tree in rank order. One rank computes the same tree.

L follows from the model and `parallel.max_leaves` alone, never from ranks, rows, threads or the CPU. It is the largest
power of two at which a leaf has complete heads, and columns of a feed-forward are cut at multiples of `GRANULE`; and at
which a rank's share of a column-parallel product, whose sums are complete anyway, is computed by the kernel that
computes the whole: one of panels of `PANEL` outputs, or not.

Other group sizes stay possible, with bits of their own: one leaf a rank, and a tree over ranks that need not be full.
Needs no torch.
"""

from collections.abc import Sequence
from typing import Final, TypeVar

from spmd_worker.model_config.int8_format import PANEL
from spmd_worker.model_config.layer_config import LayerConfig, LayerShare
from spmd_worker.model_config.layer_elements import LinearSizes, mixer_linears
from spmd_worker.model_config.model_config import ModelConfig

GRANULE: Final = 32
"""Leaves of inputs that are a multiple of this many begin and end at one: compiled kernels take such inputs."""


_Part = TypeVar("_Part")


def tree_sum(parts: Sequence[_Part]) -> _Part:
    """Sum of neighbours, level by level; of a number that is no power of two, the largest full tree first."""
    if len(parts) == 1:
        return parts[0]
    half = 1 << ((len(parts) - 1).bit_length() - 1)
    total: _Part = tree_sum(parts[:half]) + tree_sum(parts[half:])  # type: ignore[operator]  # numbers or tensors
    return total


def num_leaves(model_config: ModelConfig, most: int) -> int:
    """L of a model: 1 if its products cannot be cut. `most` is a power of two."""
    count = most
    for layer in dict.fromkeys(model_config.layers):
        while count > 1 and _obstacle(layer, model_config.hidden_size, count):
            count //= 2
    return count


def obstacle_to(model_config: ModelConfig, count: int) -> str:
    """Reason why products of a model cannot be cut into `count` leaves, a power of two; "" if they can."""
    obstacles = (_obstacle(layer, model_config.hidden_size, count) for layer in dict.fromkeys(model_config.layers))
    return next(filter(None, obstacles), "")


def leaf_bounds(num_inputs: int, count: int) -> tuple[int, ...]:
    """Starts of the leaves of so many inputs and the end of the last: `count` + 1 numbers, about equally far apart."""
    unit = GRANULE if num_inputs % GRANULE == 0 else max(num_inputs // count, 1)
    base, extra = divmod(num_inputs // unit, count)
    return tuple(unit * (leaf * base + min(leaf, extra)) for leaf in range(count + 1))


def column_range(num_columns: int, count: int, size: int, rank: int) -> tuple[int, int]:
    """Columns (start, stop) of a feed-forward that `rank` of `size` has, with `count` leaves: its leaves', or nearly
    equal parts, earlier ones bigger, if `size` does not divide them.
    """
    if count % size == 0 and count > 1:
        bounds, each = leaf_bounds(num_columns, count), count // size
        return bounds[rank * each], bounds[(rank + 1) * each]
    base, extra = divmod(num_columns, size)
    start = rank * base + min(rank, extra)
    return start, start + base + (rank < extra)


def leaf_ends(input_range: tuple[int, int], num_inputs: int, count: int) -> tuple[int, ...]:
    """Ends of a rank's leaves, counted from its first input: those of `leaf_bounds` in `input_range`, or one leaf if
    they are no subtree: it does not begin and end at leaves, or their number is no power of two.
    """
    start, stop = input_range
    bounds = leaf_bounds(num_inputs, count) if count > 1 else (0, num_inputs)
    if start not in bounds or stop not in bounds:
        return (stop - start,)
    ends = bounds[bounds.index(start) + 1 : bounds.index(stop) + 1]
    return tuple(end - start for end in ends) if len(ends).bit_count() == 1 else (stop - start,)


def feed_forward_columns(layer: LayerConfig) -> list[int]:
    """Columns of each feed-forward of the layer."""
    if not layer.has_feed_forward:
        return []
    dense = [layer.intermediate_size] if layer.has_dense else []
    experts = layer.experts
    return (
        dense
        if experts is None
        else [*dense, experts.intermediate_size, *([experts.shared_size] if experts.shared_size else [])]
    )


def _obstacle(layer: LayerConfig, hidden_size: int, count: int) -> str:
    """Reason why products of the layer cannot be cut into `count` leaves, a power of two; "" if they can."""
    for total in _split_heads(layer):
        if total % count:
            return f"layers have {total} heads"
    if layer.compressed is not None and layer.compressed.num_groups % count:
        return f"outputs of heads are projected in {layer.compressed.num_groups} groups"
    for total in _shared_heads(layer):
        if total % count and count % total:
            return f"layers have {total} key-value heads or groups"
    if layer.conv is not None and hidden_size % count:
        return f"convolutions have {hidden_size} channels"
    for columns in feed_forward_columns(layer):
        if columns % GRANULE or columns // GRANULE < count:
            return f"a feed-forward has {columns} columns, and leaves are multiples of {GRANULE}"
    wholes = mixer_linears(layer, hidden_size, _share(layer, 1))
    # All smaller powers of two are sizes of a group too.
    for size in (1 << power for power in range(1, count.bit_length())):
        for whole, part in zip(wholes, mixer_linears(layer, hidden_size, _share(layer, size)), strict=True):
            if share := _other_kernel(whole, part):
                return f"a rank of {size} would have {share}"
    return ""


def _other_kernel(whole: LinearSizes, part: LinearSizes) -> str:
    """The size for which a rank's share of a product is computed by another kernel than the whole; "" if none is."""
    outputs = ("outputs", PANEL, sum(whole.num_outputs), sum(part.num_outputs))
    for noun, unit, num_whole, num_own in (outputs, ("inputs", GRANULE, whole.num_inputs, part.num_inputs)):
        if (num_whole % unit == 0) != (num_own % unit == 0):
            return f"{num_own} of {num_whole} {noun} of a product, and compiled kernels take multiples of {unit}"
    return ""


def _share(layer: LayerConfig, size: int) -> LayerShare:
    """A rank's heads; mixers have no other sizes."""
    num_kv_heads = max(layer.num_kv_heads // size, min(layer.num_kv_heads, 1))
    return LayerShare(layer.num_heads // size, num_kv_heads, 0, num_ranks=size)


def _split_heads(layer: LayerConfig) -> list[int]:
    """Numbers of heads whose outputs are inputs of a row-parallel product."""
    delta, mamba, mamba1 = layer.delta, layer.mamba, layer.mamba1
    of_mamba = [*([mamba1.num_channels] if mamba1 else []), *([mamba.num_heads] if mamba else [])]
    return [layer.num_heads, *([delta.num_value_heads] if delta else []), *of_mamba]


def _shared_heads(layer: LayerConfig) -> list[int]:
    """Numbers of heads of which several ranks may have the same one."""
    found = [layer.num_kv_heads, *([layer.delta.num_key_heads] if layer.delta else [])]
    return [each for each in (*found, *([layer.mamba.num_groups] if layer.mamba else [])) if each]
