"""A cache whose layers' blocks have two shapes: each shape's blocks move as in a cache of that shape alone."""

import pytest
import torch

from kv_cache import block_memory
from kv_cache.block_memory import CacheBlocks
from kv_cache.block_ops import BlockOps
from kv_cache.cache_engine import CacheEngine
from kv_cache.cache_spec import BlockLayer, CacheSpec
from kv_cache.host_tier_engine import HostTierEngine

NARROW, WIDE = BlockLayer(2, 4, 4), BlockLayer(1, 12, 12)
SHAPES = {NARROW: (2, 2, 2, 4), WIDE: (48,)}
LAYERS = (NARROW, None, WIDE, NARROW)
NUM_BLOCKS, NUM_HOST_BLOCKS, CPU = 5, 3, torch.device("cpu")
OPS = (
    BlockOps(swap_out=((0, 2), (1, 0)), copy=((0, 3), (1, 4), (4, 1)), swap_in=((1, 0),)),
    BlockOps(copy=((3, 1), (1, 3)), swap_in=((2, 2), (0, 4))),
)


def new_engine(layers: tuple[BlockLayer | None, ...] = LAYERS) -> CacheEngine:
    spec = CacheSpec(layers, dtype_bytes=4, block_size=2)
    shapes = [SHAPES[each] for each in spec.shapes]
    engine = CacheEngine(spec, shapes, NUM_BLOCKS, NUM_HOST_BLOCKS, torch.float32, CPU)
    engine.allocate()
    return engine


def filled_engine(layers: tuple[BlockLayer | None, ...] = LAYERS) -> CacheEngine:
    """Each layer with numbers of its own, the same in a cache of fewer layers."""
    engine = new_engine(layers)
    for tensor in engine.tensors:
        values = torch.arange(tensor.numel(), dtype=torch.float32).view_as(tensor)
        tensor.copy_(values)
    return engine


def test_each_layer_finds_its_own_cache():
    engine = filled_engine()
    narrow, wide = engine.tensors
    assert (narrow.shape, wide.shape) == ((2, NUM_BLOCKS, 2, 2, 2, 4), (1, NUM_BLOCKS, 48))
    found = [engine.layer_cache(layer) for layer in range(4)]
    places = [None if each is None else each.data_ptr() for each in found]
    assert places == [narrow[0].data_ptr(), None, wide[0].data_ptr(), narrow[1].data_ptr()]
    assert isinstance(engine.layer_caches, tuple)
    assert len(engine.layer_caches) == 4


def test_alike_layers_are_one_tensor():
    engine = new_engine((NARROW, NARROW))
    assert isinstance(engine.layer_caches, torch.Tensor)
    assert engine.layer_caches.data_ptr() == engine.tensors[0].data_ptr()
    assert isinstance(new_engine((NARROW, None)).layer_caches, tuple)


def test_blocks_of_all_shapes_move_together():
    engine = filled_engine()
    alone = [filled_engine((NARROW, NARROW)), filled_engine((WIDE,))]
    for ops in OPS:
        for each in (engine, *alone):
            each.execute(ops)
    for tensor, expected in zip(engine.tensors, (each.tensors[0] for each in alone), strict=True):
        assert torch.equal(tensor, expected)
    assert engine.num_host_bytes == sum(each.num_host_bytes for each in alone)


def test_release_frees_all_shapes():
    engine = filled_engine()
    engine.release()
    with pytest.raises(AssertionError, match="not allocated"):
        _ = engine.layer_caches
    engine.allocate()
    assert not any(tensor.any() for tensor in engine.tensors)


@pytest.mark.parametrize("is_on_host", [True, False])
def test_bytes_of_all_shapes_return(is_on_host: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(block_memory, "indices", lambda block_ids, device: torch.tensor(block_ids))
    engine = filled_engine()
    blocks, before = CacheBlocks(engine), [tensor.clone() for tensor in engine.tensors]
    blocks._is_on_host = is_on_host
    contents = [bytes(each) for each in blocks.read([2, 0])]
    assert [len(each) for each in contents] == [engine.spec.block_bytes] * 2
    blocks.write([1, 3], contents)
    for tensor, old in zip(engine.tensors, before, strict=True):
        assert torch.equal(tensor[:, [1, 3]], old[:, [2, 0]])
        assert torch.equal(tensor[:, [0, 2, 4]], old[:, [0, 2, 4]])
    with pytest.raises(AssertionError):
        blocks.write([1], [contents[0][:-4]])


def test_host_tier_keeps_all_shapes():
    engine = filled_engine()
    tier, before = HostTierEngine(engine, num_slots=2), [tensor.clone() for tensor in engine.tensors]
    tier.store(1, ((4, 1), (0, 0)))
    for tensor in engine.tensors:
        tensor.zero_()
    tier.load(1, ((1, 2), (0, 3)))
    for tensor, old in zip(engine.tensors, before, strict=True):
        assert torch.equal(tensor[:, [2, 3]], old[:, [4, 0]])


def test_cache_without_blocks_moves_nothing():
    """A pipeline stage may have no layer with keys and values."""
    engine = new_engine((None, None))
    for ops in OPS:
        engine.execute(ops)
    tier, blocks = HostTierEngine(engine, num_slots=2), CacheBlocks(engine)
    tier.store(1, ((0, 1),))
    tier.load(1, ((1, 0),))
    assert [bytes(each) for each in blocks.read([0, 1])] == [b"", b""]
    blocks.write([1], [b""])
    assert (engine.tensors, engine.layer_caches, engine.num_host_bytes) == ((), (None, None), 0)
