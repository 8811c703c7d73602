"""Blocks as bytes: the same on the host and by way of a device's copies, in any dtype."""

import pytest
import torch
from cache_specs import uniform_spec

from kv_cache import block_memory
from kv_cache.block_memory import CacheBlocks
from kv_cache.cache_engine import CacheEngine

SPEC = uniform_spec(num_layers=3, num_kv_heads=1, head_size=4, dtype_bytes=2, block_size=2)


@pytest.fixture
def engine() -> CacheEngine:
    made = CacheEngine(SPEC, [(2, 2, 4)], 4, 0, torch.bfloat16, torch.device("cpu"))
    made.allocate()
    made.tensors[0].copy_(torch.arange(made.tensors[0].numel()).view_as(made.tensors[0]))
    return made


@pytest.fixture(params=["on the host", "by copies"])
def blocks(request: pytest.FixtureRequest, engine: CacheEngine, monkeypatch: pytest.MonkeyPatch) -> CacheBlocks:
    """The second takes the way of a GPU, two blocks at once, on a cache in host memory."""
    made = CacheBlocks(engine)
    if request.param == "by copies":
        monkeypatch.setattr(block_memory, "indices", lambda block_ids, device: torch.tensor(block_ids))
        monkeypatch.setattr(block_memory, "_TURN_BYTES", 2 * SPEC.block_bytes)
        made._is_on_host = False
    return made


def test_blocks_move_bit_for_bit(blocks: CacheBlocks, engine: CacheEngine):
    before = engine.tensors[0].clone()
    contents = [bytes(each) for each in blocks.read([2, 0, 3])]
    assert [len(each) for each in contents] == [blocks.block_bytes] * 3
    engine.tensors[0].zero_()
    blocks.write([1, 2, 0], [contents[0], bytearray(contents[1]), memoryview(contents[2])])
    assert torch.equal(engine.tensors[0][:, [1, 2, 0]], before[:, [2, 0, 3]])
    assert not engine.tensors[0][:, 3].any()
    assert [bytes(each) for each in blocks.read([1, 2, 0])] == contents
    assert blocks.read([]) == []


def test_bytes_are_the_layers_one_after_another(blocks: CacheBlocks, engine: CacheEngine):
    (content,) = blocks.read([1])
    assert bytes(content) == bytes(engine.tensors[0][:, 1].contiguous().view(torch.uint8).numpy().tobytes())
