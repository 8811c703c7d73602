"""Blocks and states are compared as bytes, and the first difference is named."""

import math

import pytest
import torch

from kv_cache import byte_comparison
from kv_cache.byte_comparison import ByteDifference, differing_blocks, differing_states
from kv_cache.cache_engine import CacheEngine
from kv_cache.cache_spec import BlockLayer, CacheSpec, StateLayer
from kv_cache.state_engine import StateEngine

PLAIN, LATENT = BlockLayer(2, 4, 4), BlockLayer(1, 6, 0)
STATES = (StateLayer((2, 3), (3, 4), (2, 5), (2, 6), (2, 6)), None, StateLayer((), (2, 4), (2, 4)))
SPEC = CacheSpec((PLAIN, None, LATENT), dtype_bytes=2, block_size=4, states=STATES)
PAIRS = [(0, 5), (1, 6), (2, 7)]


@pytest.fixture
def engine() -> CacheEngine:
    """Blocks and slots 5, 6, 7 equal 0, 1, 2."""
    device = torch.device("cpu")
    states = StateEngine(SPEC, 8, 0, torch.bfloat16, device)
    shapes = [(2, 4, 8) if shape == PLAIN else (1, 4, 6) for shape in SPEC.shapes]
    engine = CacheEngine(SPEC, shapes, 8, 0, torch.bfloat16, device, states)
    engine.allocate()
    for tensor in (*engine.tensors, *states.tensors):
        tensor[:, 0:3] = torch.randn(tensor[:, 0:3].shape, generator=torch.Generator().manual_seed(1))
        tensor[:, 0, ..., -1] = math.nan
        tensor[:, 5:8] = tensor[:, 0:3]
    return engine


def test_equal_pairs_have_no_difference(engine: CacheEngine) -> None:
    """NaN equals itself."""
    assert differing_blocks(engine, PAIRS) is None
    assert differing_states(engine, PAIRS) is None
    assert differing_blocks(engine, []) is None


def test_first_differing_element_is_named(engine: CacheEngine) -> None:
    latent = engine.layer_cache(2)
    latent[6, 0, 2, 3], latent[1, 0, 2, 3], latent[7] = 0.5, 0.25, 1.0
    assert differing_blocks(engine, PAIRS) == ByteDifference(1, 2, "block", (0, 2, 3), 0.25, 0.5)


@pytest.mark.parametrize(("layer", "part"), [(0, "state"), (0, "tail"), (0, "second_tail"), (2, "tail")])
def test_states_and_tails_are_compared(engine: CacheEngine, layer: int, part: str) -> None:
    tensor = getattr(engine.states.layer_states(layer), part)
    tensor[2, 1, 2], tensor[7, 1, 2] = 3.0, 4.0
    assert differing_states(engine, PAIRS) == ByteDifference(2, layer, part.rpartition("_")[2], (1, 2), 3.0, 4.0)


def test_saved_inputs_of_drafts_are_not_compared(engine: CacheEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    for each in (engine.states.layer_states(0), engine.states.layer_states(2)):
        each.saved[7] += 1
    # Seen at once, not layer by layer.
    monkeypatch.setattr(byte_comparison, "_first_difference", None)
    assert differing_states(engine, PAIRS) is None


def test_zeros_of_two_signs_differ(engine: CacheEngine) -> None:
    cache = engine.layer_cache(0)
    cache[0, 0, 0, 0], cache[5, 0, 0, 0] = 0.0, -0.0
    found = differing_blocks(engine, PAIRS)
    assert found is not None
    assert found.element == (0, 0, 0)


def test_many_pairs_are_compared_in_slices(engine: CacheEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(byte_comparison, "_TEMPORARY_BYTES", 1)
    assert differing_blocks(engine, PAIRS) is None
    engine.layer_cache(0)[7, 1, 3, 7] += 1
    found = differing_blocks(engine, PAIRS)
    assert found is not None
    assert (found.pair, found.element) == (2, (1, 3, 7))
