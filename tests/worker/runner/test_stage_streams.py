"""Streams that a head on the last stage reads of earlier stages arrive there, each as its own layer's."""

import pytest
import torch
from torch import Tensor

from spmd_worker.ranks.topology import Stage
from spmd_worker.worker.runner.stage_streams import StageStreams

HIDDEN, NUM_TOKENS = 8, 3


def stages(*starts: int, num_layers: int = 6) -> list[Stage]:
    bounds = [*starts, num_layers]
    last = len(starts) - 1
    return [Stage(bounds[i], bounds[i + 1], is_first=i == 0, is_last=i == last) for i in range(len(starts))]


def stream(layer: int) -> Tensor:
    return torch.full((NUM_TOKENS, HIDDEN), float(layer))


@pytest.mark.parametrize("layers", [(), (2, 3, 4), (5, 0, 2), (1, 1, 0), (4, 5, 3)], ids=str)
@pytest.mark.parametrize("starts", [(0,), (0, 3), (0, 2, 4), (0, 1, 5)], ids=str)
def test_streams_of_all_stages_reach_the_last(starts: tuple[int, ...], layers: tuple[int, ...]):
    received = torch.empty(0)
    for stage in stages(*starts):
        streams, hidden, known = StageStreams(stage, layers, HIDDEN), stream(stage.start), dict[int, Tensor]()
        if not stage.is_first:
            assert received.shape == (NUM_TOKENS, streams.received_size)
            hidden, known = streams.split(received)
            assert torch.equal(hidden, stream(stage.start))
            hidden.add_(100)  # a stage changes them in place
        known |= {layer: stream(layer) for layer in streams.own}
        received = streams.joined(stream(stage.stop), known)
        assert stage.is_last or all(torch.equal(each, stream(layer)) for layer, each in known.items())
    assert set(known) == set(layers)
    assert all(torch.equal(known[layer], stream(layer)) for layer in layers)


def test_steps_of_fewer_layers_send_as_much():
    """Steps that measure memory run some of a stage's layers: the next stage receives what it always does."""
    first, second = stages(0, 4)
    streams = {1: stream(1), 3: torch.empty(0)}
    sent = StageStreams(first, (1, 3, 5), HIDDEN).joined(stream(4), streams)
    assert sent.shape == (NUM_TOKENS, StageStreams(second, (1, 3, 5), HIDDEN).received_size)
    assert sent.dtype == torch.float32


def test_states_are_sent_as_they_are_without_a_head():
    first, _ = stages(0, 3)
    hidden = stream(1)
    assert StageStreams(first, (), HIDDEN).joined(hidden, {}) is hidden
