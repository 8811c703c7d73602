"""Which steps graphs are recorded for and launched by, and when they are recorded anew; with a model whose answers can
be told at sight. What replayed steps compute: tests/ops/kernels/triton_graphs.py.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from kv_cache.layer_states import LayerStates
from spmd_worker.ops.attention.draft_replay import DraftReplay
from spmd_worker.ops.attention.metadata import AttentionMetadata
from spmd_worker.ops.kernels.recurrent import StateSegments
from spmd_worker.worker.runner.batch import Batch
from spmd_worker.worker.runner.step_graphs import StepGraphs, graph_sizes

WIDTH, MOST, SEQUENCES = 3, 20, 10


class Model(nn.Module):
    """Token ids times a weight, beside positions; what comes from the stage before is added, and adapters, and three
    positions. Its largest are columns of the hidden states.
    """

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((WIDTH,), 2.0), requires_grad=False)
        self.num_tokens: list[int] = []

    def forward(
        self,
        ids: Tensor,
        positions: Tensor,
        regimes: Tensor,
        cache: Tensor,
        metadata: object,
        incoming: Tensor | None,
        adapters: Tensor | None = None,
        states: Sequence[LayerStates | None] = (),
        rope_positions: Tensor | None = None,
    ) -> Tensor:
        self.num_tokens.append(len(ids))
        hidden = ids[:, None] * self.weight + positions[:, None] * torch.arange(WIDTH) + regimes[:, None]
        hidden = hidden if adapters is None else hidden + 100 * (adapters[:, None] + 1)
        hidden = hidden if rope_positions is None else hidden + 1000 * rope_positions.sum(0)[:, None]
        hidden = hidden if not states else hidden + states[0].tail
        return hidden if incoming is None else hidden + incoming

    def argmax_logits(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        self.num_tokens.append(len(rows))
        return rows.max(dim=1)


class Attention:
    def fill(self, metadata: AttentionMetadata, num_tokens: int) -> AttentionMetadata:
        return metadata


class Graph:
    """Launches what it was told to, which reads the same tensors. `refusal` is what recording fails with."""

    refusal: str = ""
    num_replayed = 0

    def record(self, launch: Callable[[], None]) -> None:
        if self.refusal:
            raise RuntimeError(self.refusal)
        self._launch = launch

    def replay(self) -> None:
        Graph.num_replayed += 1
        self._launch()


def batch(count: int, num_sequences: int = 1) -> Batch:
    numbers = torch.arange(count)
    lengths = (count,) * num_sequences
    nothing = torch.zeros(0, dtype=torch.int64)
    metadata = AttentionMetadata((0, count), lengths, nothing, nothing, nothing)
    return Batch(numbers + 1, numbers, torch.zeros_like(numbers), metadata, numbers[-1:], ())


def expected(count: int) -> Tensor:
    numbers = torch.arange(count)[:, None]
    return (numbers + 1) * 2.0 + numbers * torch.arange(WIDTH)


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> StepGraphs:
    monkeypatch.setattr(Graph, "num_replayed", 0)
    return StepGraphs(Model(), Attention(), Graph, MOST, SEQUENCES)


CACHE = torch.zeros(4)


@pytest.mark.parametrize("most", [1, 7, 8, 64, 65, 200, 2048, 5000, 16384])
def test_padding_is_at_most_a_quarter_or_tile(most: int):
    sizes = graph_sizes(most)
    assert sizes == tuple(sorted({*sizes}))
    assert sizes[-1] == most
    for before, size in zip((0, *sizes), sizes):
        # The tiles have 64 rows, and below them it is powers of two.
        assert size - before <= max(64, before / 4)
        assert size > 64 or before == 0 or size <= 2 * before
    assert len(sizes) <= 40


def test_padded_step_is_replayed_from_second_time(graphs: StepGraphs):
    model = graphs._model
    for number, count in enumerate((5, 7, 8, 3)):
        assert torch.equal(graphs.forward(batch(count), CACHE, None), expected(count))
        assert Graph.num_replayed == number
    assert set(model.num_tokens) == {8}
    assert graphs.num_recorded == 1
    assert torch.equal(graphs.forward(batch(MOST), CACHE, None), expected(MOST))
    assert (model.num_tokens[-2:], graphs.num_recorded) == ([8, MOST], 2)


def test_incoming_states_are_copied_to_fixed_buffer(graphs: StepGraphs):
    for number in range(3):
        incoming = torch.full((4, WIDTH), float(number))
        assert torch.equal(graphs.forward(batch(4), CACHE, incoming), expected(4) + number)


class Adapters:
    """Steps' adapters are their slots."""

    adapted_layers = frozenset({"layer"})

    def step(self, slots: Tensor) -> Tensor:
        return slots


def test_steps_with_adapters_have_their_own_graphs(graphs: StepGraphs):
    graphs._adapters = adapters = Adapters()
    slots = torch.tensor([0, -1, 1, 0, -1], dtype=torch.int32)
    for number, rows in enumerate((slots, slots, slots.flip(0), slots[:4])):
        adapted = replace(batch(len(rows)), adapter_slots=rows)
        wanted = expected(len(rows)) + 100 * (rows[:, None] + 1)
        assert torch.equal(graphs.forward(adapted, CACHE, None), wanted), number
        # Padding tokens have none, whatever the last step's had.
        assert torch.equal(graphs._hidden[len(rows) : 8], torch.zeros(8 - len(rows), WIDTH)) or number == 3
        assert (graphs._adapter_slots[len(rows) : 8] == -1).all()
    assert (Graph.num_replayed, graphs.num_recorded) == (3, 1)
    assert torch.equal(graphs.forward(batch(5), CACHE, None), expected(5))
    assert torch.equal(graphs.forward(replace(batch(5), adapter_slots=slots), CACHE, None)[1], expected(5)[1])
    assert (Graph.num_replayed, graphs.num_recorded) == (4, 2)
    # Launches of other layers: recorded anew, and those of steps without adapters are kept.
    adapters.adapted_layers = frozenset({"layer", "another"})
    graphs.forward(replace(batch(5), adapter_slots=slots), CACHE, None)
    graphs.forward(batch(5), CACHE, None)
    assert (Graph.num_replayed, graphs.num_recorded) == (5, 2)


def test_sampled_rows_have_their_own_graphs(graphs: StepGraphs):
    for count in (2, 5):
        hidden = graphs.forward(batch(6), CACHE, None)
        values, columns = graphs.argmax(hidden, torch.arange(count))
        assert (values.tolist(), columns.tolist()) == (
            expected(count).max(dim=1).values.tolist(),
            [0, *[2] * (count - 1)],
        )
    assert graphs.num_recorded == 2
    # More than there is room for, and none.
    hidden = graphs.forward(batch(MOST), CACHE, None)
    assert len(graphs.argmax(hidden, torch.arange(SEQUENCES + 1))[0]) == SEQUENCES + 1
    assert graphs._model.num_tokens[-1] == SEQUENCES + 1


def test_graphs_reject_larger_steps(graphs: StepGraphs):
    assert graphs.takes(batch(MOST, SEQUENCES))
    assert not graphs.takes(batch(MOST + 1))
    assert not graphs.takes(batch(MOST, SEQUENCES + 1))


def test_moved_cache_rerecords_graphs(graphs: StepGraphs):
    for cache, num_replayed in ((CACHE, 0), (CACHE, 1), (torch.ones(4), 1), (CACHE, 1)):
        graphs.forward(batch(4), cache, None)
        assert Graph.num_replayed == num_replayed


def test_moved_states_rerecord_graphs(graphs: StepGraphs):
    first, moved = ((LayerStates(None, torch.full((1, WIDTH), number)), None) for number in (1.0, 2.0))
    for states, number, num_replayed in ((first, 1.0, 0), (first, 1.0, 1), (moved, 2.0, 1)):
        assert torch.equal(graphs.forward(batch(4), CACHE, None, states), expected(4) + number)
        assert Graph.num_replayed == num_replayed


def test_moved_weights_are_detected_after_requested_check(graphs: StepGraphs):
    graphs.forward(batch(4), CACHE, None)
    graphs.request_address_check()
    graphs.forward(batch(4), CACHE, None)
    # In place: where they were.
    assert Graph.num_replayed == 1
    graphs._model.weight.data = graphs._model.weight.data * 1
    graphs.forward(batch(4), CACHE, None)
    # Control: nobody looked.
    assert Graph.num_replayed == 2
    graphs.request_address_check()
    graphs.forward(batch(4), CACHE, None)
    assert (Graph.num_replayed, graphs.num_recorded) == (2, 1)


def test_failed_recording_launches_eagerly_with_one_warning(
    graphs: StepGraphs, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    graphs.forward(batch(4), CACHE, None)
    monkeypatch.setattr(Graph, "refusal", "operation not permitted when stream is capturing")
    with caplog.at_level(logging.WARNING):
        for count in (MOST, MOST, 4):
            assert torch.equal(graphs.forward(batch(count), CACHE, None), expected(count))
    assert [record.getMessage() for record in caplog.records] == [
        "steps are launched kernel by kernel, because they could not be recorded as CUDA graphs: operation not "
        "permitted when stream is capturing; executor.enforce_eager=true skips the recording"
    ]
    assert (Graph.num_replayed, graphs.num_recorded) == (0, 0)


def test_steps_with_three_positions_have_their_own_graphs(graphs: StepGraphs):
    for number in range(3):
        three = torch.arange(5).repeat(3, 1) + number
        of_images = replace(batch(5), rope_positions=three)
        assert torch.equal(graphs.forward(of_images, CACHE, None), expected(5) + 1000 * three.sum(0)[:, None])
        assert torch.equal(graphs.forward(batch(5), CACHE, None), expected(5)), "text has none"
    assert (graphs.num_recorded, Graph.num_replayed) == (2, 4)


def test_steps_that_see_later_tokens_have_none(graphs: StepGraphs):
    step = batch(5)
    assert graphs.takes(step)
    assert not graphs.takes(replace(step, attention=replace(step.attention, last_visible=torch.arange(5))))


def test_steps_that_replay_drafts_have_none(graphs: StepGraphs):
    step, rows = batch(5), torch.arange(5)
    assert step.attention.replay is None
    replay = DraftReplay(StateSegments(rows, rows, rows, rows), *[rows] * 5)
    assert not graphs.takes(replace(step, attention=replace(step.attention, replay=replay)))
