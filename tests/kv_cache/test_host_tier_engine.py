"""The half of the host tier that moves bytes."""

import pytest
import torch
from cache_specs import uniform_spec

from kv_cache.cache_engine import CacheEngine
from kv_cache.host_tier_engine import HostTierEngine

SPEC = uniform_spec(num_layers=3, num_kv_heads=1, head_size=4, dtype_bytes=4, block_size=2)


@pytest.fixture
def engine() -> CacheEngine:
    made = CacheEngine(SPEC, [(2, 2, 4)], 4, 0, torch.float32, torch.device("cpu"))
    made.allocate()
    made.tensors[0].copy_(torch.arange(made.tensors[0].numel()).view_as(made.tensors[0]))
    return made


def test_stored_block_loads_bit_for_bit_elsewhere(engine: CacheEngine):
    tier = HostTierEngine(engine, num_slots=2)
    before = engine.tensors[0].clone()
    tier.store(1, ((1, 0), (2, 1)))
    tier.load(1, ())
    assert tier.finished() == (1,)
    engine.tensors[0].zero_()
    tier.store(2, ())
    tier.load(2, ((0, 3), (1, 0)))
    assert tier.finished() == (2,)
    assert tier.finished() == ()
    assert torch.equal(engine.tensors[0][:, [3, 0]], before[:, [1, 2]])
    assert not engine.tensors[0][:, [1, 2]].any()


def test_step_without_transfers_finishes_none(engine: CacheEngine):
    tier = HostTierEngine(engine, num_slots=2)
    tier.store(0, ())
    tier.load(0, ())
    assert tier.finished() == ()


@pytest.mark.parametrize("place", [-1, 2])
def test_unknown_slot_is_rejected_before_anything_moves(engine: CacheEngine, place: int):
    tier = HostTierEngine(engine, num_slots=2)
    before = engine.tensors[0].clone()
    with pytest.raises(ValueError, match=rf"slot {place} .*host tier .*\b2$"):
        tier.store(1, ((0, 0), (1, place)))
    with pytest.raises(ValueError, match=rf"slot {place} .*host tier .*\b2$"):
        tier.load(1, ((0, 1), (place, 2)))
    assert torch.equal(engine.tensors[0], before)
