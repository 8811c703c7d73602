"""CacheEngine: whole blocks move bit for bit, in the promised order, and nothing moves when a pair is wrong."""

import mmap
from pathlib import Path

import pytest
import torch

from kv_cache.block_ops import BlockOps
from kv_cache.cache_engine import CacheEngine
from kv_cache.cache_spec import CacheSpec

NUM_LAYERS, NUM_DEVICE_BLOCKS, NUM_HOST_BLOCKS = 3, 5, 4
DTYPES = [torch.float32, torch.bfloat16]
DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")],
    ),
]


def make_engine(dtype=torch.float32, device="cpu", block_shape=(2, 2, 4, 8)):
    spec = CacheSpec(num_layers=NUM_LAYERS, num_kv_heads=2, head_size=8, dtype_bytes=dtype.itemsize, block_size=4)
    return CacheEngine(spec, block_shape, NUM_DEVICE_BLOCKS, NUM_HOST_BLOCKS, dtype, torch.device(device))


def fill_with_random_bits(cache, seed):
    """Every bit pattern, NaN and infinity too: a move that computes with the values would change some of them."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randint(0, 256, (*cache.shape[:-1], cache.shape[-1] * cache.itemsize), generator=generator)
    cache.view(torch.uint8).copy_(noise)


def bits(cache):
    return cache.cpu().view(torch.uint8).clone()


def resident_bytes():
    num_pages = int(Path("/proc/self/statm").read_text().split()[1])
    return num_pages * mmap.PAGESIZE


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


@pytest.fixture(params=DTYPES, ids=str)
def engine(request, device):
    engine = make_engine(request.param, device)
    engine.allocate()
    fill_with_random_bits(engine.device_cache, 1)
    fill_with_random_bits(engine.host_cache, 2)
    return engine


def test_both_caches_have_the_promised_shapes_and_start_as_zeros(device):
    engine = make_engine(torch.bfloat16, device)
    engine.allocate()
    assert engine.device_cache.shape == (NUM_LAYERS, NUM_DEVICE_BLOCKS, 2, 2, 4, 8)
    assert engine.host_cache.shape == (NUM_LAYERS, NUM_HOST_BLOCKS, 2, 2, 4, 8)
    assert engine.device_cache.dtype == engine.host_cache.dtype == torch.bfloat16
    assert engine.device_cache.device.type == device
    assert engine.host_cache.device.type == "cpu"
    assert engine.host_cache.is_pinned() == (device == "cuda")
    assert not engine.device_cache.any()
    assert not engine.host_cache.any()
    assert engine.device_cache[0, 0].nbytes == engine.spec.layer_block_bytes


def test_the_cache_on_the_cpu_starts_on_a_cache_line():
    engine = make_engine()
    engine.allocate()
    assert engine.device_cache.data_ptr() % 64 == 0
    assert engine.device_cache.is_contiguous()


def test_a_large_cache_commits_no_memory_before_it_is_written():
    spec = CacheSpec(num_layers=4, num_kv_heads=8, head_size=128, dtype_bytes=4, block_size=16)
    engine = CacheEngine(spec, (2**15,), 2048, 0, torch.float32, torch.device("cpu"))
    resident_before = resident_bytes()
    engine.allocate()
    assert engine.device_cache.nbytes == 2**30
    engine.device_cache[3, 2047, 0] = 1.0
    assert resident_bytes() - resident_before < 2**26
    assert engine.device_cache[3, 2047].sum() == 1.0


def test_a_cache_allocated_in_inference_mode_is_written_outside_it():
    engine = make_engine()
    with torch.inference_mode():
        engine.allocate()
    engine.device_cache[0, 0] = 1.0
    engine.copy([(0, 1)])
    with torch.inference_mode():
        engine.copy([(1, 2)])
    assert engine.device_cache[0, 2].eq(1.0).all()


def test_a_layers_cache_is_a_view():
    engine = make_engine()
    engine.allocate()
    engine.layer_cache(1)[3] = 7.0
    assert engine.device_cache[1, 3].eq(7.0).all()
    assert engine.device_cache.count_nonzero() == engine.device_cache[1, 3].numel()
    with pytest.raises(AssertionError, match="layer 3 of 3"):
        engine.layer_cache(3)


def test_any_packing_of_the_right_size_is_taken_and_any_other_refused():
    make_engine(block_shape=(128,)).allocate()
    with pytest.raises(AssertionError, match="is 508 bytes, one block of one layer is 512"):
        make_engine(block_shape=(127,)).allocate()


def test_a_released_cache_is_gone_and_can_be_allocated_again():
    engine = make_engine()
    engine.allocate()
    with pytest.raises(AssertionError, match="allocated already"):
        engine.allocate()
    engine.device_cache.fill_(1.0)
    engine.release()
    with pytest.raises(AssertionError, match="not allocated"):
        _ = engine.device_cache
    engine.allocate()
    assert not engine.device_cache.any()


def test_a_copy_moves_whole_blocks_of_all_layers_bit_for_bit(engine):
    expected, host_before = bits(engine.device_cache), bits(engine.host_cache)
    expected[:, 4] = expected[:, 0]
    expected[:, 2] = expected[:, 1]
    engine.copy([(0, 4), (1, 2)])
    assert torch.equal(bits(engine.device_cache), expected)
    assert torch.equal(bits(engine.host_cache), host_before)


def test_every_source_of_a_copy_is_read_before_any_destination_is_written(engine):
    """0 and 1 change places and 2 gets the old 1: no sequential order of these pairs is right."""
    before = bits(engine.device_cache)
    engine.copy([(0, 1), (1, 0), (1, 2)])
    after = bits(engine.device_cache)
    assert torch.equal(after, before[:, [1, 0, 1, 3, 4]])


def test_a_block_swapped_out_and_in_again_is_the_same_bit_for_bit(engine):
    before, host_before = bits(engine.device_cache), bits(engine.host_cache)
    engine.swap_out([(1, 3), (4, 0)])
    assert torch.equal(bits(engine.host_cache)[:, [3, 0]], before[:, [1, 4]])
    assert torch.equal(bits(engine.host_cache)[:, [1, 2]], host_before[:, [1, 2]])
    assert torch.equal(bits(engine.device_cache), before)
    fill_with_random_bits(engine.device_cache, 3)
    engine.swap_in([(3, 2), (0, 0)])
    assert torch.equal(bits(engine.device_cache)[:, [2, 0]], before[:, [1, 4]])


def test_a_step_swaps_out_then_in_then_copies(engine):
    """Device block 0 leaves, host block 1 takes its place, and the copy of block 0 sees the arrival."""
    device_before, host_before = bits(engine.device_cache), bits(engine.host_cache)
    engine.execute(BlockOps(swap_in=((1, 0),), swap_out=((0, 2),), copy=((0, 3),)))
    assert torch.equal(bits(engine.host_cache)[:, 2], device_before[:, 0])
    assert torch.equal(bits(engine.device_cache)[:, 0], host_before[:, 1])
    assert torch.equal(bits(engine.device_cache)[:, 3], host_before[:, 1])


def test_a_step_without_operations_moves_nothing(engine):
    before = bits(engine.device_cache)
    engine.execute(BlockOps())
    assert torch.equal(bits(engine.device_cache), before)


@pytest.mark.parametrize(
    ("block_ops", "message"),
    [
        (BlockOps(copy=((0, 1), (2, 5))), "copy of block 2 to 5: device block 5 does not exist, there are 5"),
        (BlockOps(copy=((-1, 1),)), "device block -1 does not exist"),
        (BlockOps(copy=((0, 1),), swap_out=((0, 4),)), "swap_out of block 0 to 4: host block 4 does not exist"),
        (BlockOps(swap_out=((0, 0),), swap_in=((4, 0),)), "swap_in of block 4 to 0: host block 4 does not exist"),
        (BlockOps(swap_in=((0, 5),)), "device block 5 does not exist"),
        (BlockOps(swap_out=((0, 0),), copy=((0, 2), (1, 2))), "device block 2 already receives block 0"),
    ],
)
def test_a_wrong_pair_is_named_before_anything_moves(engine, block_ops, message):
    device_before, host_before = bits(engine.device_cache), bits(engine.host_cache)
    with pytest.raises(ValueError, match=message):
        engine.execute(block_ops)
    assert torch.equal(bits(engine.device_cache), device_before)
    assert torch.equal(bits(engine.host_cache), host_before)
