"""StateEngine: all that a slot holds moves together, bit for bit, in the promised order; a wrong pair moves none."""

from dataclasses import replace

import pytest
import torch

from kv_cache.block_ops import BlockOps
from kv_cache.cache_spec import BlockLayer, CacheSpec, StateLayer
from kv_cache.state_engine import StateEngine
from kv_cache.state_ops import StateOps
from kv_cache.state_sizing import describe_slot

DELTA, CONV = StateLayer((2, 4, 3), (3, 10)), StateLayer((), (2, 6))
STATES = (DELTA, None, CONV, DELTA)
DRAFTING = (replace(DELTA, saved=(2, 14)), None, replace(CONV, saved=(2, 6)), replace(DELTA, saved=(2, 14)))
"""Cache of a run with drafts; inputs that the convolution saves have the shape of its tail."""
NUM_SLOTS, NUM_HOST_SLOTS = 5, 3
DTYPES = [torch.float32, torch.bfloat16]
DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")],
    ),
]


def make_spec(dtype: torch.dtype = torch.float32, states: tuple[StateLayer | None, ...] = STATES) -> CacheSpec:
    layers = tuple(BlockLayer(1, 8, 8) if each is None else None for each in states)
    return CacheSpec(layers, dtype.itemsize, 16, states)


def make_engine(
    dtype: torch.dtype = torch.float32, device: str = "cpu", states: tuple[StateLayer | None, ...] = STATES
) -> StateEngine:
    engine = StateEngine(make_spec(dtype, states), NUM_SLOTS, NUM_HOST_SLOTS, dtype, torch.device(device))
    engine.allocate()
    return engine


def fill(tensors: list[torch.Tensor], seed: int) -> None:
    """Every bit pattern, NaN and infinity too: a move that computes with the values would change some of them."""
    generator = torch.Generator().manual_seed(seed)
    for each in tensors:
        noise = torch.randint(0, 256, (*each.shape[:-1], each.shape[-1] * each.itemsize), generator=generator)
        each.view(torch.uint8).copy_(noise)


def bits(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [each.cpu().view(torch.uint8).clone() for each in tensors]


def host_tensors(engine: StateEngine) -> list[torch.Tensor]:
    return [each.tensor for each in engine._hosts]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=[(dtype, states) for dtype in DTYPES for states in (STATES, DRAFTING)], ids=str)
def engine(request: pytest.FixtureRequest, device: str) -> StateEngine:
    dtype, states = request.param
    engine = make_engine(dtype, device, states)
    fill([*engine.tensors], 1)
    fill(host_tensors(engine), 2)
    return engine


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_each_layer_gets_its_own_states(device: str, dtype: torch.dtype):
    engine = make_engine(dtype, device)
    first, without, conv, last = engine.layers
    assert without is None
    assert engine.layer_states(0) is first
    for each in (first, last):
        assert (each.state.shape, each.state.dtype) == ((NUM_SLOTS, 2, 4, 3), torch.float32)
        assert (each.tail.shape, each.tail.dtype) == ((NUM_SLOTS, 3, 10), dtype)
        assert each.state.is_contiguous()
        assert each.tail.is_contiguous()
    assert conv.state is None
    assert conv.tail.shape == (NUM_SLOTS, 2, 6)
    first.state.fill_(1.0)
    conv.tail.fill_(2.0)
    assert not last.state.any()
    assert not last.tail.any()
    assert first.state.data_ptr() % 16 == 0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_allocated_bytes_are_those_of_the_spec(dtype: torch.dtype):
    engine, spec = make_engine(dtype), make_spec(dtype)
    assert spec.slot_bytes == 2 * (4 * 24 + dtype.itemsize * 30) + dtype.itemsize * 12
    assert sum(each.nbytes for each in engine.tensors) == engine.num_device_bytes == NUM_SLOTS * spec.slot_bytes
    assert engine.num_host_bytes == NUM_HOST_SLOTS * spec.slot_bytes


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_inputs_of_drafts_are_saved_beside_states(dtype: torch.dtype):
    engine, spec = make_engine(dtype, states=DRAFTING), make_spec(dtype, DRAFTING)
    assert (spec.most_drafts, make_spec().most_drafts) == (2, 0)
    assert spec.slot_bytes == make_spec(dtype).slot_bytes + dtype.itemsize * 2 * (14 + 6 + 14)
    assert sum(each.nbytes for each in engine.tensors) == engine.num_device_bytes == NUM_SLOTS * spec.slot_bytes
    layers = [each for each in engine.layers if each is not None]
    assert [each.saved.shape[1:] for each in layers] == [(2, 14), (2, 6), (2, 14)]
    assert all(each.saved.dtype == dtype and each.saved.is_contiguous() for each in layers)
    for each in engine.lasting_tensors:
        each.fill_(1.0)
    assert not any(each.saved.any() for each in layers)
    assert all(each.tail.all() and (each.state is None or each.state.all()) for each in layers)
    # In a run without drafts nothing is there.
    plain = make_engine(dtype)
    assert all(each is None or each.saved is None for each in plain.layers)
    assert len(plain.lasting_tensors) == len(plain.tensors) == len(engine.lasting_tensors)


def test_second_convolution_has_inputs_of_its_own():
    """Tails of one shape share a tensor, and are apart; the second one's drafts are saved, and do not last."""
    layer = StateLayer((2, 3), (3, 4), (2, 5), second_tail=(3, 4), second_saved=(2, 4))
    spec = CacheSpec((None, None), 2, 16, (layer, StateLayer((), (3, 4), (2, 4))))
    engine = StateEngine(spec, 2, 0, torch.bfloat16, torch.device("cpu"))
    engine.allocate()
    assert spec.slot_bytes == 4 * 6 + 2 * (12 + 10 + 12 + 8) + 2 * (12 + 8)
    assert sum(each.nbytes for each in engine.tensors) == engine.num_device_bytes
    first, last = engine.layers
    for number, tail in enumerate((first.tail, first.second_tail, last.tail)):
        tail.fill_(number + 1)
    assert [each.second_tail is None for each in (first, last)] == [False, True]
    assert [float(each.float().mean()) for each in (first.tail, first.second_tail, last.tail)] == [1, 2, 3]
    for each in engine.lasting_tensors:
        each.fill_(7.0)
    assert bool((first.second_tail == 7).all())
    assert not first.second_saved.any()
    assert describe_slot(spec).endswith(
        "(1 layers of 2 channels of 3 float32, 3 x 4 inputs, 2 x 5 inputs of drafts, 3 x 4 inputs, 2 x 4 inputs of "
        "drafts, 1 layers of 3 x 4 inputs, 2 x 4 inputs of drafts)"
    )


def test_states_and_tails_of_one_shape_are_apart():
    """In float32 a state may have the shape of a tail; both are then in one tensor."""
    spec = CacheSpec((None,), 4, 16, (StateLayer((3, 8), (3, 8)),))
    engine = StateEngine(spec, 2, 0, torch.float32, torch.device("cpu"))
    engine.allocate()
    (states,) = engine.layers
    states.state.fill_(1.0)
    assert not states.tail.any()


def test_stage_without_states_executes_any_moves():
    spec = CacheSpec((BlockLayer(1, 8, 8),), 4, 16, (None,))
    engine = StateEngine(spec, NUM_SLOTS, NUM_HOST_SLOTS, torch.float32, torch.device("cpu"))
    engine.allocate()
    engine.execute(StateOps(copy=((0, 1),), swap_out=((2, 0),)))
    assert engine.layers == (None,)
    assert spec.slot_bytes == engine.num_device_bytes == 0


def test_copies_read_all_sources_before_writing(engine: StateEngine):
    """0 and 1 change places and 2 gets the old 1: no sequential order of these pairs is right."""
    before, num_lasting = bits([*engine.tensors]), len(engine.lasting_tensors)
    engine.execute(StateOps(copy=((0, 1), (1, 0), (1, 2))))
    after = bits([*engine.tensors])
    for was, now in zip(before[:num_lasting], after[:num_lasting], strict=True):
        assert torch.equal(now, was[:, [1, 0, 1, 3, 4]])
    # Inputs of drafts stay: no row lags behind the position of a copy.
    assert all(map(torch.equal, before[num_lasting:], after[num_lasting:]))


def test_state_survives_swapping_out_and_in(engine: StateEngine):
    before = bits([*engine.tensors])
    engine.execute(StateOps(swap_out=((1, 2), (4, 0))))
    for was, now in zip(before, bits(host_tensors(engine)), strict=True):
        assert torch.equal(now[:, [2, 0]], was[:, [1, 4]])
    fill([*engine.tensors], 3)
    engine.execute(StateOps(swap_in=((2, 3), (0, 0))))
    for was, now in zip(before, bits([*engine.tensors]), strict=True):
        assert torch.equal(now[:, [3, 0]], was[:, [1, 4]])


def test_step_swaps_out_copies_then_swaps_in(engine: StateEngine):
    """Slot 0 leaves for the host and for slot 3, then host slot 1 takes its place; the host slot that was just written
    is read as well.
    """
    before, host_before = bits([*engine.tensors]), bits(host_tensors(engine))
    engine.execute(StateOps(swap_in=((1, 0), (2, 4)), swap_out=((0, 2),), copy=((0, 3),)))
    for index, (was, host_was, now) in enumerate(zip(before, host_before, bits([*engine.tensors]), strict=True)):
        is_copied = index < len(engine.lasting_tensors)
        assert torch.equal(now[:, 3], was[:, 0 if is_copied else 3])
        assert torch.equal(now[:, 0], host_was[:, 1])
        assert torch.equal(now[:, 4], was[:, 0])


WRONG = {
    "copy of state slot 0 to 5: device state slot 5 does not exist, there are 5": StateOps(copy=((0, 5),)),
    "swap_out of state slot 0 to 3: host state slot 3 does not exist, there are 3": StateOps(swap_out=((0, 3),)),
    "swap_in of state slot -1 to 0: host state slot -1 does not exist": StateOps(swap_in=((-1, 0),)),
    "already receives state slot 1 by copy": StateOps(copy=((1, 2),), swap_in=((0, 2),)),
    "already receives state slot 1 by swap_out": StateOps(swap_out=((1, 0), (2, 0))),
}


@pytest.mark.parametrize("words", WRONG)
def test_wrong_pair_is_rejected_before_any_move(words: str):
    engine = make_engine()
    fill([*engine.tensors], 1)
    before = bits([*engine.tensors])
    right, wrong = StateOps(copy=((0, 4),)), WRONG[words]
    with pytest.raises(ValueError, match=words):
        engine.execute(StateOps(wrong.swap_in, wrong.swap_out, (*right.copy, *wrong.copy)))
    for was, now in zip(before, bits([*engine.tensors]), strict=True):
        assert torch.equal(was, now)


def test_released_states_are_gone_and_allocated_again():
    engine = make_engine()
    engine.layers[0].state.fill_(1.0)
    with pytest.raises(AssertionError, match="allocated already"):
        engine.allocate()
    engine.release()
    assert engine.num_host_bytes == 0
    with pytest.raises(AssertionError, match="not allocated"):
        _ = engine.layers
    engine.allocate()
    assert not engine.layers[0].state.any()


def test_states_from_inference_mode_are_writable_outside():
    with torch.inference_mode():
        engine = make_engine()
    engine.layers[0].state[0] = 1.0
    engine.execute(StateOps(copy=((0, 1),)))
    assert engine.layers[0].state[1].eq(1.0).all()


def test_moves_of_states_are_those_of_blocks():
    """Both kinds of moves have the same fields, so one piece of code runs them."""
    assert {"swap_in", "swap_out", "copy"} <= {*BlockOps.__dataclass_fields__} & {*StateOps.__dataclass_fields__}
