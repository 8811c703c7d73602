"""Relative bias: buckets against transformers' own function, and a rank's table of distances."""

import pytest
import torch
from transformers.models.t5.modeling_t5 import T5Attention

from spmd_worker.model.layers.context import LayerContext
from spmd_worker.model.layers.relative_bias import RelativeBiasTable, buckets_of
from spmd_worker.model.layers.weight_slice import full_rectangle
from spmd_worker.model_config.layer_config import RelativeBias
from spmd_worker.ops.attention.sdpa import SdpaBackend
from spmd_worker.ops.kernels.reference import ReferenceKernels
from spmd_worker.ranks.communicator import GroupHandle, single_group

SIZES = [(32, 128), (32, 32), (64, 256), (8, 20), (12, 1000), (6, 7), (33, 100)]


def their_buckets(distances: torch.Tensor, bias: RelativeBias, *, sees_later: bool) -> torch.Tensor:
    return T5Attention._relative_position_bucket(distances, sees_later, bias.num_buckets, bias.max_distance)


@pytest.mark.parametrize("sees_later", [False, True])
@pytest.mark.parametrize(("num_buckets", "max_distance"), SIZES)
def test_buckets_are_those_of_transformers(num_buckets: int, max_distance: int, sees_later: bool):
    bias, distances = RelativeBias(num_buckets, max_distance), torch.arange(-1000, 1001)
    expected = their_buckets(distances, bias, sees_later=sees_later)
    assert torch.equal(buckets_of(distances, bias, sees_later=sees_later), expected)
    # A table up to the largest distance says everything.
    bounded = distances.clamp(-max_distance, max_distance)
    assert torch.equal(buckets_of(bounded, bias, sees_later=sees_later), expected)
    assert not torch.equal(buckets_of(distances, bias, sees_later=not sees_later), expected), "negative control"


def table_of(group: GroupHandle, *, sees_later: bool = True, dtype: torch.dtype = torch.float32) -> RelativeBiasTable:
    context = LayerContext(group, ReferenceKernels(), SdpaBackend(), dtype, torch.device("cpu"))
    return RelativeBiasTable(context, RelativeBias(8, 20), 6, sees_later=sees_later)


def filled(layer: RelativeBiasTable, weight: torch.Tensor) -> RelativeBiasTable:
    """As a loader does it: by the slices."""
    (piece,) = layer.weight_slices("relative_bias")
    assert (piece.checkpoint_name, piece.checkpoint_shape) == ("relative_bias.weight", (8, 6))
    values = weight[tuple(slice(*bounds) for bounds in piece.source)]
    layer.write_region("weight", piece.destination, values)
    return layer


@pytest.mark.parametrize("sees_later", [False, True])
def test_tables_of_ranks_are_columns_of_heads(sees_later: bool):
    weight = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))
    whole = filled(table_of(single_group(), sees_later=sees_later), weight).table()
    assert (whole.shape, whole.dtype, whole.is_contiguous()) == ((6, 41), torch.float32, True)
    buckets = their_buckets(torch.arange(-20, 21), RelativeBias(8, 20), sees_later=sees_later)
    assert torch.equal(whole, weight.t()[:, buckets])
    ranks = [
        filled(table_of(GroupHandle((0, 1), rank, None), sees_later=sees_later), weight).table() for rank in range(2)
    ]
    assert torch.equal(torch.cat(ranks), whole)


def test_tables_are_computed_once_a_weight():
    layer = table_of(single_group(), dtype=torch.bfloat16)
    weight = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))
    first = filled(layer, weight).table()
    assert layer.table() is first
    layer.write_region("weight", full_rectangle((8, 6)), 2 * weight)
    assert torch.equal(layer.table(), 2 * first)
