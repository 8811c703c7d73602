"""CacheEngine: whole blocks move bit for bit, in the promised order, and nothing moves when a pair is wrong."""

import contextlib

import pytest
import ranks
import torch
from cache_specs import uniform_spec
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kv_cache import host_memory
from kv_cache.block_ops import BlockOps
from kv_cache.cache_engine import CacheEngine

NUM_LAYERS, NUM_DEVICE_BLOCKS, NUM_HOST_BLOCKS = 3, 5, 4
DTYPES = [torch.float32, torch.bfloat16]
DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")],
    ),
]


def make_engine(dtype=torch.float32, device="cpu", block_shape=(2, 2, 4, 8), engine_class=CacheEngine):
    spec = uniform_spec(num_layers=NUM_LAYERS, num_kv_heads=2, head_size=8, dtype_bytes=dtype.itemsize, block_size=4)
    return engine_class(spec, [block_shape], NUM_DEVICE_BLOCKS, NUM_HOST_BLOCKS, dtype, torch.device(device))


def fill_with_random_bits(cache, seed):
    """Every bit pattern, NaN and infinity too: a move that computes with the values would change some of them."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randint(0, 256, (*cache.shape[:-1], cache.shape[-1] * cache.itemsize), generator=generator)
    cache.view(torch.uint8).copy_(noise)


def bits(cache):
    return cache.cpu().view(torch.uint8).clone()


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


@pytest.fixture(params=DTYPES, ids=str)
def engine(request, device):
    engine = make_engine(request.param, device)
    engine.allocate()
    fill_with_random_bits(engine.tensors[0], 1)
    fill_with_random_bits(engine._host[0].tensor, 2)
    return engine


def test_caches_start_zeroed_with_the_specified_shapes(device):
    engine = make_engine(torch.bfloat16, device)
    engine.allocate()
    assert engine.tensors[0].shape == (NUM_LAYERS, NUM_DEVICE_BLOCKS, 2, 2, 4, 8)
    assert engine._host[0].tensor.shape == (NUM_LAYERS, NUM_HOST_BLOCKS, 2, 2, 4, 8)
    assert engine.tensors[0].dtype == engine._host[0].tensor.dtype == torch.bfloat16
    assert engine.tensors[0].device.type == device
    assert engine._host[0].tensor.device.type == "cpu"
    assert engine._host[0].tensor.is_pinned() == (device == "cuda")
    assert not engine.tensors[0].any()
    assert not engine._host[0].tensor.any()
    assert engine.tensors[0][0, 0].nbytes == engine.spec.block_bytes // NUM_LAYERS


def test_cpu_cache_is_aligned_to_a_cache_line():
    engine = make_engine()
    engine.allocate()
    assert engine.tensors[0].data_ptr() % 64 == 0
    # The layers of a block lie side by side.
    assert engine.tensors[0].transpose(0, 1).is_contiguous()


COMMITTED = """
import mmap, sys
from pathlib import Path
import torch
from kv_cache import host_memory
from kv_cache.cache_engine import CacheEngine
from kv_cache.cache_spec import BlockLayer, CacheSpec

def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE

if sys.argv[1] == "control":
    host_memory.lazy_zeros = lambda shape, dtype: torch.zeros(shape, dtype=dtype)
spec = CacheSpec((BlockLayer(8, 128, 128),) * 4, dtype_bytes=4, block_size=16)
engine = CacheEngine(spec, [(2**15,)], 512, 0, torch.float32, torch.device("cpu"))
before = resident_bytes()
engine.allocate()
assert engine.tensors[0].nbytes == 2**28
engine.tensors[0][3, 511, 0] = 1.0
print(resident_bytes() - before)
assert engine.tensors[0][3, 511].sum() == 1.0
"""


@pytest.mark.parametrize("is_control", [False, True])
def test_large_cache_commits_no_memory_until_written(is_control: bool):
    """Measured in a process of its own, in which nothing else takes memory meanwhile. The control is written as it is
    made; some pages of libraries may be taken from the process while it is, and the system's count is behind by some a
    core.
    """
    done = ranks.run_ranks(COMMITTED, 1, timeout_s=240, arguments=["control" if is_control else "ours"]).checked()
    assert (int(done.stdout) > 2**27) if is_control else (int(done.stdout) < 2**26)


def test_cache_from_inference_mode_is_writable_outside_it():
    engine = make_engine()
    with torch.inference_mode():
        engine.allocate()
    engine.tensors[0][0, 0] = 1.0
    engine.execute(BlockOps(copy=((0, 1),)))
    with torch.inference_mode():
        engine.execute(BlockOps(copy=((1, 2),)))
    assert engine.tensors[0][0, 2].eq(1.0).all()


def test_block_shape_must_match_the_block_size():
    make_engine(block_shape=(128,)).allocate()
    with pytest.raises(AssertionError, match=r"508 bytes, .*block .*512$"):
        make_engine(block_shape=(127,)).allocate()


def test_released_cache_is_gone_and_can_be_reallocated():
    engine = make_engine()
    engine.allocate()
    with pytest.raises(AssertionError, match="allocated already"):
        engine.allocate()
    engine.tensors[0].fill_(1.0)
    engine.release()
    with pytest.raises(AssertionError, match="not allocated"):
        _ = engine.tensors[0]
    engine.allocate()
    assert not engine.tensors[0].any()


def test_copy_moves_all_layers_bit_for_bit(engine):
    expected, host_before = bits(engine.tensors[0]), bits(engine._host[0].tensor)
    expected[:, 4] = expected[:, 0]
    expected[:, 2] = expected[:, 1]
    engine.execute(BlockOps(copy=((0, 4), (1, 2))))
    assert torch.equal(bits(engine.tensors[0]), expected)
    assert torch.equal(bits(engine._host[0].tensor), host_before)


def test_copy_reads_all_sources_before_writing(engine):
    """0 and 1 change places and 2 gets the old 1: no sequential order of these pairs is right."""
    before = bits(engine.tensors[0])
    engine.execute(BlockOps(copy=((0, 1), (1, 0), (1, 2))))
    after = bits(engine.tensors[0])
    assert torch.equal(after, before[:, [1, 0, 1, 3, 4]])


def test_block_survives_swapping_out_and_in(engine):
    before, host_before = bits(engine.tensors[0]), bits(engine._host[0].tensor)
    engine.execute(BlockOps(swap_out=((1, 3), (4, 0))))
    assert torch.equal(bits(engine._host[0].tensor)[:, [3, 0]], before[:, [1, 4]])
    assert torch.equal(bits(engine._host[0].tensor)[:, [1, 2]], host_before[:, [1, 2]])
    assert torch.equal(bits(engine.tensors[0]), before)
    fill_with_random_bits(engine.tensors[0], 3)
    engine.execute(BlockOps(swap_in=((3, 2), (0, 0))))
    assert torch.equal(bits(engine.tensors[0])[:, [2, 0]], before[:, [1, 4]])


def test_step_swaps_out_then_copies_then_swaps_in(engine):
    """Device block 0 leaves for the host and for block 3, and then host block 1 takes its place."""
    device_before, host_before = bits(engine.tensors[0]), bits(engine._host[0].tensor)
    engine.execute(BlockOps(swap_in=((1, 0),), swap_out=((0, 2),), copy=((0, 3),)))
    assert torch.equal(bits(engine._host[0].tensor)[:, 2], device_before[:, 0])
    assert torch.equal(bits(engine.tensors[0])[:, 3], device_before[:, 0])
    assert torch.equal(bits(engine.tensors[0])[:, 0], host_before[:, 1])


def test_swapped_out_block_can_receive_a_copy(engine):
    device_before = bits(engine.tensors[0])
    engine.execute(BlockOps(swap_out=((0, 2),), copy=((4, 0),)))
    assert torch.equal(bits(engine._host[0].tensor)[:, 2], device_before[:, 0])
    assert torch.equal(bits(engine.tensors[0])[:, 0], device_before[:, 4])


def test_host_block_swaps_into_two_device_blocks(engine):
    """How a sequence that is swapped in and forks at once gets its two blocks."""
    host_before = bits(engine._host[0].tensor)
    engine.execute(BlockOps(swap_in=((1, 0), (1, 3))))
    assert torch.equal(bits(engine.tensors[0])[:, [0, 3]], host_before[:, [1, 1]])


def test_swap_in_reads_swap_outs_of_the_step(engine):
    device_before = bits(engine.tensors[0])
    engine.execute(BlockOps(swap_out=((4, 1),), swap_in=((1, 2),)))
    assert torch.equal(bits(engine.tensors[0])[:, 2], device_before[:, 4])


def test_blocks_beyond_staging_memory_move_in_batches(device, monkeypatch):
    """On the CPU nothing is staged, and this is one more swap."""
    engine = make_engine(device=device)
    monkeypatch.setattr(host_memory, "_STAGING_BYTES", engine.spec.block_bytes)
    engine.allocate()
    fill_with_random_bits(engine.tensors[0], 1)
    before = bits(engine.tensors[0])
    engine.execute(BlockOps(swap_out=((0, 3), (1, 2), (2, 1))))
    engine.tensors[0].zero_()
    engine.execute(BlockOps(swap_in=((3, 4), (2, 3), (1, 0))))
    engine.execute(BlockOps(swap_in=((2, 1),)))
    assert torch.equal(bits(engine.tensors[0])[:, [4, 3, 0, 1]], before[:, [0, 1, 2, 1]])


# Random steps against a model of bytes.


def steps(num_device_blocks, num_host_blocks):
    """Lists of pairs as `BlockOps` allows them: see rules 3 and 6 there."""
    device, host = st.integers(0, num_device_blocks - 1), st.integers(0, num_host_blocks - 1)
    return st.builds(
        lawful,
        swap_out=st.lists(st.tuples(device, host), max_size=num_host_blocks),
        copy=st.lists(st.tuples(device, device), max_size=num_device_blocks),
        swap_in=st.lists(st.tuples(host, device), max_size=num_device_blocks),
    )


def lawful(swap_out, copy, swap_in):
    """Of pairs that contradict each other the first stays."""
    left_host = {destination: (source, destination) for source, destination in reversed(swap_out)}
    received = {}
    for kind, pairs in (("copy", copy), ("swap_in", [pair for pair in swap_in if pair[0] not in left_host])):
        for source, destination in pairs:
            received.setdefault(destination, (kind, source))
    of_kind = {
        kind: tuple((source, destination) for destination, (own, source) in received.items() if own == kind)
        for kind in ("copy", "swap_in")
    }
    return BlockOps(swap_in=of_kind["swap_in"], swap_out=tuple(left_host.values()), copy=of_kind["copy"])


def execute_on_bytes(blocks, block_ops):
    """`blocks`: (memory, block) -> bytes. The contract as it reads, with nothing in place."""
    began = dict(blocks)
    for source, destination in block_ops.swap_out:
        blocks["host", destination] = began["device", source]
    for source, destination in block_ops.copy:
        blocks["device", destination] = began["device", source]
    for source, destination in block_ops.swap_in:
        blocks["device", destination] = blocks["host", source]


def bytes_of(engine):
    caches = {"device": engine.tensors[0], "host": engine._host[0].tensor}
    return {
        (memory, block): bits(cache[:, block]).numpy().tobytes()
        for memory, cache in caches.items()
        for block in range(cache.shape[1])
    }


def filled_engine(device="cpu", engine_class=CacheEngine):
    engine = make_engine(device=device, engine_class=engine_class)
    engine.allocate()
    fill_with_random_bits(engine.tensors[0], 1)
    fill_with_random_bits(engine._host[0].tensor, 2)
    return engine


@pytest.mark.parametrize("device", DEVICES)
@given(history=st.lists(steps(NUM_DEVICE_BLOCKS, NUM_HOST_BLOCKS), min_size=1, max_size=6))
def test_random_steps_match_the_byte_model(device, history):
    engine = filled_engine(device)
    blocks = bytes_of(engine)
    for block_ops in history:
        engine.execute(block_ops)
        execute_on_bytes(blocks, block_ops)
    assert bytes_of(engine) == blocks


class FakeStream:
    """Stands in for a CUDA stream on the CPU, where everything is done when it is called: notes who waits for whom."""

    def __init__(self, name, notes):
        self.name, self.notes = name, notes

    def wait_stream(self, other):
        self.notes.append(f"{self.name} waits for {other.name}")

    def synchronize(self):
        self.notes.append(f"the host waits for {self.name}")


class FakeEvent(FakeStream):
    def record(self, stream):
        self.notes.append(f"{self.name} on {stream.name}")


@pytest.fixture
def staged(monkeypatch):
    """An engine on the CPU that goes the way of a CUDA device, with staging memory for two blocks; and the notes."""
    notes = []
    compute, side = FakeStream("compute", notes), FakeStream("side", notes)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: compute)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(host_memory, "indices", lambda block_ids, device: torch.tensor(block_ids))
    engine = filled_engine()
    staging = torch.empty_like(engine._host[0].tensor[:, :2])
    event = FakeEvent("staging read", notes)
    memory = host_memory.CudaHostMemory(engine.tensors[0], engine._host[0].tensor, staging, side, event)
    engine._host = (memory,)
    return engine, notes


def test_host_bytes_include_the_staging_buffers(staged):
    engine, _ = staged
    block_bytes = engine.tensors[0].nbytes // NUM_DEVICE_BLOCKS
    assert engine.num_host_bytes == (NUM_HOST_BLOCKS + 2) * block_bytes
    engine.release()
    assert engine.num_host_bytes == 0


def test_pinned_memory_is_allocated_once_on_first_use():
    made = []

    def make():
        made.append(torch.is_inference_mode_enabled())
        return host_memory.PlainHostMemory(torch.zeros(1, 4, 2), 3)

    memory = host_memory.LazyHostMemory(make)
    with torch.inference_mode():
        memory.move_out(())
        memory.move_in(())
        assert made == []
        memory.move_out(((1, 0),))
    assert made == [False], "what is made in inference mode cannot be written outside it"
    memory.tensor[:] = 7
    memory.move_in(((0, 1),))
    assert made == [False]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(history=st.lists(steps(NUM_DEVICE_BLOCKS, NUM_HOST_BLOCKS), min_size=1, max_size=4))
def test_staged_blocks_match_the_byte_model(staged, history):
    engine, _ = staged
    fill_with_random_bits(engine.tensors[0], 3)
    blocks = bytes_of(engine)
    for block_ops in history:
        engine.execute(block_ops)
        execute_on_bytes(blocks, block_ops)
    assert bytes_of(engine) == blocks


def test_streams_wait_for_each_other_around_transfers(staged):
    """The host waits for the side stream alone."""
    engine, notes = staged
    engine.execute(BlockOps(swap_out=((0, 0), (1, 1), (2, 2)), copy=((3, 4),), swap_in=((3, 0), (3, 1), (3, 2))))
    assert notes == [
        # Three blocks leave in two turns, once the last step has written them.
        "side waits for compute",
        "the host waits for side",
        "the host waits for side",
        # The copies are queued on the compute stream here; then three blocks arrive in two turns.
        "side waits for compute",
        "the host waits for staging read",
        "staging read on side",
        "the host waits for staging read",
        "staging read on side",
        # The forward pass comes after them.
        "compute waits for side",
    ]
    notes.clear()
    engine.execute(BlockOps(copy=((3, 4),)))
    assert not notes


class SwapsInBeforeItCopies(CacheEngine):
    def execute(self, block_ops):
        super().execute(BlockOps(swap_out=block_ops.swap_out))
        super().execute(BlockOps(swap_in=block_ops.swap_in))
        super().execute(BlockOps(copy=block_ops.copy))


class CopiesBeforeItSwapsOut(CacheEngine):
    def execute(self, block_ops):
        super().execute(BlockOps(copy=block_ops.copy))
        super().execute(BlockOps(swap_out=block_ops.swap_out))
        super().execute(BlockOps(swap_in=block_ops.swap_in))


class CopiesOneAfterTheOther(CacheEngine):
    def execute(self, block_ops):
        super().execute(BlockOps(swap_out=block_ops.swap_out))
        for pair in block_ops.copy:
            super().execute(BlockOps(copy=(pair,)))
        super().execute(BlockOps(swap_in=block_ops.swap_in))


@pytest.mark.parametrize("engine_class", [SwapsInBeforeItCopies, CopiesBeforeItSwapsOut, CopiesOneAfterTheOther])
def test_byte_comparison_detects_another_operation_order(engine_class):
    """The comparison above sees each rule that is broken. Block 0 leaves, is copied, and receives; 1 and 4 swap."""
    block_ops = BlockOps(swap_out=((0, 2), (1, 3)), copy=((0, 3), (1, 4), (4, 1)), swap_in=((1, 0),))
    engine, wrong = filled_engine(), filled_engine(engine_class=engine_class)
    blocks = bytes_of(engine)
    engine.execute(block_ops)
    wrong.execute(block_ops)
    execute_on_bytes(blocks, block_ops)
    assert bytes_of(engine) == blocks
    assert bytes_of(wrong) != blocks


def test_empty_step_moves_nothing(engine):
    before = bits(engine.tensors[0])
    engine.execute(BlockOps())
    assert torch.equal(bits(engine.tensors[0]), before)


@pytest.mark.parametrize(
    ("block_ops", "message"),
    [
        (BlockOps(copy=((0, 1), (2, 5))), "copy of block 2 to 5: device block 5 does not exist, there are 5"),
        (BlockOps(copy=((-1, 1),)), "device block -1 does not exist"),
        (BlockOps(copy=((0, 1),), swap_out=((0, 4),)), "swap_out of block 0 to 4: host block 4 does not exist"),
        (BlockOps(swap_out=((0, 0),), swap_in=((4, 0),)), "swap_in of block 4 to 0: host block 4 does not exist"),
        (BlockOps(swap_in=((0, 5),)), "device block 5 does not exist"),
        (BlockOps(swap_out=((0, 0),), copy=((0, 2), (1, 2))), "device block 2 already receives block 0 by copy"),
        (BlockOps(swap_out=((0, 3), (2, 3))), "swap_out of block 2 to 3: host block 3 already receives block 0"),
        (BlockOps(swap_in=((1, 2), (3, 2))), "swap_in of block 3 to 2: device block 2 already receives block 1"),
        (
            BlockOps(copy=((0, 2),), swap_in=((1, 3), (3, 2))),
            "swap_in of block 3 to 2: device block 2 already receives block 0 by copy in this step",
        ),
    ],
)
def test_invalid_pair_is_rejected_before_anything_moves(engine, block_ops, message):
    device_before, host_before = bits(engine.tensors[0]), bits(engine._host[0].tensor)
    with pytest.raises(ValueError, match=message):
        engine.execute(block_ops)
    assert torch.equal(bits(engine.tensors[0]), device_before)
    assert torch.equal(bits(engine._host[0].tensor), host_before)
