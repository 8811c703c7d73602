"""Which steps graphs are recorded for and launched by, and when they are recorded anew; with a model whose answers can
be told at sight. What replayed steps compute: tests/ops/kernels/triton_graphs.py.
"""

import logging
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from spmd_worker.ops.attention.metadata import AttentionMetadata
from spmd_worker.worker.runner.batch import Batch
from spmd_worker.worker.runner.step_graphs import StepGraphs, graph_sizes

WIDTH, MOST, SEQUENCES = 3, 20, 10


class Model(nn.Module):
    """Token ids times a weight, beside positions; what comes from the stage before is added. Its largest are columns
    of the hidden states.
    """

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((WIDTH,), 2.0), requires_grad=False)
        self.num_tokens: list[int] = []

    def forward(
        self, ids: Tensor, positions: Tensor, regimes: Tensor, cache: Tensor, metadata: object, incoming: Tensor | None
    ) -> Tensor:
        self.num_tokens.append(len(ids))
        hidden = ids[:, None] * self.weight + positions[:, None] * torch.arange(WIDTH) + regimes[:, None]
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
def test_a_step_is_filled_up_by_a_quarter_at_most_or_within_a_tile(most: int):
    sizes = graph_sizes(most)
    assert sizes == tuple(sorted({*sizes}))
    assert sizes[-1] == most
    for before, size in zip((0, *sizes), sizes):
        # The tiles have 64 rows, and below them it is powers of two.
        assert size - before <= max(64, before / 4)
        assert size > 64 or before == 0 or size <= 2 * before
    assert len(sizes) <= 40


def test_a_step_is_filled_up_to_its_size_and_launched_at_once_from_the_second_on(graphs: StepGraphs):
    model = graphs._model
    for number, count in enumerate((5, 7, 8, 3)):
        assert torch.equal(graphs.forward(batch(count), CACHE, None), expected(count))
        assert Graph.num_replayed == number
    assert set(model.num_tokens) == {8}
    assert graphs.num_recorded == 1
    assert torch.equal(graphs.forward(batch(MOST), CACHE, None), expected(MOST))
    assert (model.num_tokens[-2:], graphs.num_recorded) == ([8, MOST], 2)


def test_what_the_stage_before_sends_is_copied_to_where_it_is_read(graphs: StepGraphs):
    for number in range(3):
        incoming = torch.full((4, WIDTH), float(number))
        assert torch.equal(graphs.forward(batch(4), CACHE, incoming), expected(4) + number)


def test_the_rows_that_sample_have_graphs_of_their_own(graphs: StepGraphs):
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


def test_steps_with_more_tokens_or_sequences_are_not_taken(graphs: StepGraphs):
    assert graphs.takes(batch(MOST, SEQUENCES))
    assert not graphs.takes(batch(MOST + 1))
    assert not graphs.takes(batch(MOST, SEQUENCES + 1))


def test_a_cache_that_has_moved_has_graphs_recorded_anew(graphs: StepGraphs):
    for cache, num_replayed in ((CACHE, 0), (CACHE, 1), (torch.ones(4), 1), (CACHE, 1)):
        graphs.forward(batch(4), cache, None)
        assert Graph.num_replayed == num_replayed


def test_weights_that_have_moved_are_looked_for_when_somebody_may_have_moved_them(graphs: StepGraphs):
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


def test_what_cannot_be_recorded_is_launched_kernel_by_kernel_and_said_once(
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
