"""Keys and values of a draft: in tensors of their own that move with the target's blocks, and vouch for nothing."""

import torch

from kv_cache.block import BlockId
from kv_cache.block_memory import CacheBlocks
from kv_cache.block_ops import BlockOps
from kv_cache.byte_comparison import differing_blocks
from kv_cache.cache_engine import CacheEngine
from kv_cache.cache_spec import BlockLayer, CacheSpec

LAYER, WIDE, LATENT = BlockLayer(2, 4, 4), BlockLayer(1, 8, 8), BlockLayer(1, 6, 0)


def engine_of(*draft_layers: BlockLayer) -> CacheEngine:
    spec = CacheSpec((LAYER, LAYER), 4, 2, draft_layers=draft_layers)
    kinds = (*spec.shapes, *spec.draft_shapes)
    shapes = [(2 * layer.token_size,) for layer in kinds]
    engine = CacheEngine(spec, shapes, 5, 2, torch.float32, torch.device("cpu"))
    engine.allocate()
    return engine


def test_draft_has_tensors_of_its_own():
    engine = engine_of(LATENT, WIDE, LATENT)
    assert engine.spec.block_bytes == engine.spec.model_block_bytes + engine.spec.draft_block_bytes
    assert engine.spec.draft_block_bytes == 2 * 4 * (6 + 16 + 6)
    assert [tuple(each.shape) for each in engine.model_tensors] == [(2, 5, 32)]
    assert [None if each is None else tuple(each.shape) for each in engine.draft_caches] == [(5, 12), (5, 32), (5, 12)]
    assert isinstance(engine_of(WIDE, WIDE).draft_caches, torch.Tensor), "layers of one shape can be joined"
    assert len(engine_of().draft_caches) == 0


def test_draft_moves_with_the_block_and_is_not_compared():
    engine = engine_of(WIDE)
    engine.draft_caches[0][1] = 7.0
    assert differing_blocks(engine, [(BlockId(1), BlockId(2))]) is None
    memory = CacheBlocks(engine)
    assert memory.read([BlockId(1)])[0].nbytes == memory.block_bytes == engine.spec.model_block_bytes
    engine.execute(BlockOps(copy=((BlockId(1), BlockId(3)),), swap_out=((BlockId(1), BlockId(0)),)))
    engine.draft_caches[0][1] = 0.0
    engine.execute(BlockOps(swap_in=((BlockId(0), BlockId(4)),)))
    assert [float(each[0]) for each in engine.draft_caches[0]] == [0.0, 0.0, 0.0, 7.0, 7.0]
    engine.release()
