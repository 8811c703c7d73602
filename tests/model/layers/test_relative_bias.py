"""Relative bias: buckets against transformers' own function, and a rank's table of distances."""

import pytest
import torch
from transformers import T5Config
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor
from transformers.models.t5.modeling_t5 import T5Attention

from spmd_worker.model.layers.context import LayerContext
from spmd_worker.model.layers.relative_bias import AlibiTable, RelativeBiasTable, alibi_slopes, buckets_of
from spmd_worker.model.layers.weight_slice import full_rectangle
from spmd_worker.model_config.layer_config import RelativeBias
from spmd_worker.ops.attention.backend import AttentionBackend
from spmd_worker.ops.attention.cpu import cpu_backend_or_reason
from spmd_worker.ops.attention.metadata import AttentionMetadata
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


@pytest.mark.parametrize("num_heads", [1, 2, 3, 6, 12, 14, 16, 32, 71, 112])
def test_slopes_are_those_of_transformers(num_heads: int):
    ours = torch.tensor(alibi_slopes(num_heads))
    bloom = build_alibi_tensor(torch.ones(1, 3, dtype=torch.int64), num_heads, torch.float32)
    assert torch.allclose(ours, bloom[:, 0, 1], rtol=1e-5)
    assert torch.allclose(ours, -build_mpt_alibi_tensor(num_heads, 3)[:, 0, 1], rtol=1e-5)
    other = torch.tensor([2.0 ** (-8 * head / num_heads) for head in range(1, num_heads + 1)])
    assert torch.allclose(ours, other) == (num_heads.bit_count() == 1), "negative control: one progression"


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_slopes_of_ranks_are_those_of_their_heads(num_ranks: int):
    whole = AlibiTable(context_of(single_group()), 0.5, 12, 40).table()
    assert whole.shape == (12, 81)
    assert torch.equal(whole[:, 40 - 7], -3.5 * torch.tensor(alibi_slopes(12)))
    groups = [GroupHandle(tuple(range(num_ranks)), rank, None) for rank in range(num_ranks)]
    parts = [AlibiTable(context_of(group), 0.5, 12, 40).table() for group in groups]
    assert torch.equal(torch.cat(parts), whole)


def context_of(group: GroupHandle, dtype: torch.dtype = torch.float32) -> LayerContext:
    return LayerContext(group, ReferenceKernels(), SdpaBackend(), dtype, torch.device("cpu"))


def table_of(group: GroupHandle, *, sees_later: bool = True, dtype: torch.dtype = torch.float32) -> RelativeBiasTable:
    return RelativeBiasTable(context_of(group, dtype), RelativeBias(8, 20), 6, sees_later=sees_later)


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


def their_attention(*, sees_later: bool) -> T5Attention:
    config = T5Config(d_model=64, d_kv=16, num_heads=4, is_decoder=not sees_later, attn_implementation="eager")
    torch.manual_seed(5)
    attention = T5Attention(config, has_relative_attention_bias=True, layer_idx=0).eval().double()
    attention.relative_attention_bias.weight.data.normal_(0.0, 2.0)
    return attention


@torch.inference_mode()
def attended(backend: AttentionBackend, module: T5Attention, x: torch.Tensor, chunk: int, table: torch.Tensor | None):
    """Our attention of transformers' projections: float32 [length, hidden_size]."""
    length, sees_later = len(x), not module.is_decoder
    cache = torch.full((12, *backend.block_shape(4, 16, 16)), torch.nan)
    blocks = torch.tensor([7, 2, 9, 4, 11, 0, 5, 8, 1, 10])
    query, key, value = (each(x).view(length, 4, 16).float() for each in (module.q, module.k, module.v))
    outputs = []
    for start in range(0, length, chunk):
        at = torch.arange(start, min(start + chunk, length))
        metadata = AttentionMetadata(
            (0, len(at)), (int(at[-1]) + 1,), blocks[None], blocks[at // 16], at % 16, sees_later=sees_later
        )
        backend.write(key[at], value[at], cache, metadata)
        outputs.append(backend.attend(query[at], cache, metadata, 1.0, 0, distance_bias=table))
    return torch.cat(outputs).flatten(1) @ module.o.weight.t().float()


@pytest.mark.parametrize("is_native", [False, True])
@pytest.mark.parametrize("sees_later", [False, True])
@torch.inference_mode()
def test_attention_is_that_of_transformers(sees_later: bool, is_native: bool):
    """Over the largest distance of the table; the oracle computes in float64."""
    module, x = their_attention(sees_later=sees_later), torch.randn(150, 64).double()
    mask = None if sees_later else torch.full((150, 150), -torch.inf).double().triu(1)[None, None]
    expected = module(x[None], mask)[0][0]
    layer = RelativeBiasTable(context_of(single_group()), RelativeBias(32, 128), 4, sees_later=sees_later)
    layer.write_region("weight", full_rectangle((32, 4)), module.relative_attention_bias.weight)
    backend = cpu_backend_or_reason(torch.float32, (16,), 16) if is_native else SdpaBackend()
    assert not isinstance(backend, str), backend
    for chunk in (150,) if sees_later else (150, 40):
        found = attended(backend, module, x, chunk, layer.table())
        assert (found - expected).abs().max() < 2e-5 * expected.abs().max(), chunk
    unbiased = attended(backend, module, x, 150, None)
    assert (unbiased - expected).abs().max() > 0.1 * expected.abs().max(), "negative control"
