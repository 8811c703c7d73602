"""Ways that a sampler takes where the device draws and keeps histories, on reference kernels; and rows that continue
over steps, whose numbers are prepared once.
"""

from collections.abc import Callable, Sequence

import pytest
import torch
from test_sampler import EOS, KINDS, VOCAB_SIZE
from thread_groups import on_ranks

from spmd_worker.model.layers.embedding import VocabularyShard
from spmd_worker.ops.kernels.reference import ReferenceKernels
from spmd_worker.ops.kernels.sample_row import SampleRow
from spmd_worker.ops.kernels.triton import penalty_kernels
from spmd_worker.ops.kernels.triton.penalties import RowHistories
from spmd_worker.ops.sampling.processors import process_logits
from spmd_worker.ops.sampling.sampler import Sampled, Sampler
from spmd_worker.ops.sampling.step_rows import StepRows
from spmd_worker.ops.sampling.token_masks import NO_MASKS
from spmd_worker.ranks.communicator import GroupHandle
from spmd_worker.replica.sequence.sampled import NOT_READ
from spmd_worker.replica.sequence.sampling_params import SamplingParams

NUM_STEPS = 4


class Histories:
    """Rows are processed by their lists; what is appended is only counted."""

    def __init__(self) -> None:
        self.num_appended = 0

    def prepare(self, rows: Sequence[SampleRow]) -> list[SampleRow]:
        return list(rows)

    def is_next(self, prepared: list[SampleRow]) -> bool:
        return True

    def process_(self, logits: torch.Tensor, prepared: list[SampleRow]) -> None:
        process_logits(logits, prepared, EOS)

    def append_(self, prepared: list[SampleRow], token_ids: torch.Tensor) -> None:
        self.num_appended += len(token_ids)


class DeviceKernels(ReferenceKernels):
    samples_on_device = True

    def __init__(self) -> None:
        self.histories = Histories()

    def new_histories(self, vocab_size, eos_token_ids, device):
        return self.histories


def rows_of() -> tuple[SampleRow, ...]:
    """Three of each kind; the last may stop from its fifth token on."""
    kinds = [*KINDS, {"temperature": 1.0, "min_tokens": 4}]
    return tuple(
        SampleRow(SamplingParams(**kind), 2**63 + index, copy, 3, (1, 2, 3), [7] * copy)
        for index, kind in enumerate(kinds)
        for copy in range(3)
    )


def steps_of(kernels: ReferenceKernels, size: int, mode: str = "raw_logprobs", *, keeps: bool = True) -> list[Sampled]:
    """Steps of the same rows on a group of ranks. Without `keeps` the sampler is given new rows each time."""

    def run(group: GroupHandle) -> list[Sampled]:
        generator, found = torch.Generator().manual_seed(3), []
        shard, rows = VocabularyShard(VOCAB_SIZE, size, group.rank), rows_of()
        sampler = Sampler(group, shard.start, VOCAB_SIZE, EOS, mode, kernels)
        for _ in range(NUM_STEPS):
            logits = 2 * torch.randn(len(rows), VOCAB_SIZE, generator=generator)
            mine = torch.full((len(rows), shard.size), -torch.inf)
            mine[:, : shard.num_owned] = logits[:, shard.start : shard.stop]
            found.append(sampler.sample(mine, rows if keeps else list(rows)))
            for row, token_id in zip(rows, found[-1].token_ids, strict=True):
                row.output_token_ids.append(token_id)
        return found

    every = on_ranks(size, run)
    assert all(repr(each) == repr(every[0]) for each in every)
    return every[0]


@pytest.fixture(scope="module")
def expected() -> list[Sampled]:
    return steps_of(ReferenceKernels(), 1, keeps=False)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("kernels", [ReferenceKernels, DeviceKernels])
def test_rows_that_continue_have_the_same_tokens(expected: list[Sampled], kernels: type[ReferenceKernels], size: int):
    assert repr(steps_of(kernels(), size)) == repr(expected)


@pytest.mark.parametrize("kernels", [ReferenceKernels, DeviceKernels])
def test_continuing_rows_with_processed_logprobs_are_alike(kernels: type[ReferenceKernels]):
    expected = steps_of(ReferenceKernels(), 1, "processed_logprobs", keeps=False)
    assert repr(steps_of(kernels(), 2, "processed_logprobs")) == repr(expected)


def test_comparison_detects_positions_that_stay(expected: list[Sampled], monkeypatch: pytest.MonkeyPatch):
    continues = StepRows.continues

    def still(self: StepRows, rows: Sequence[SampleRow], masks: object) -> bool:
        found = continues(self, rows, masks)
        self.simple.step = self.others.step = 0
        return found

    monkeypatch.setattr(StepRows, "continues", still)
    assert repr(steps_of(DeviceKernels(), 1)) != repr(expected)


def test_step_rows_continue_only_with_equal_growth():
    device = torch.device("cpu")
    rows = rows_of()
    step = StepRows(rows, NO_MASKS, device)
    assert step.continues(rows, NO_MASKS)
    # Other rows; a list, which may change.
    assert not step.continues(rows_of(), NO_MASKS)
    assert not StepRows([*rows], NO_MASKS, device).continues([*rows], NO_MASKS)
    for row in rows:
        row.output_token_ids.append(1)
    assert step.continues(rows, NO_MASKS)
    assert step.others.step == 1
    for row in rows:
        row.output_token_ids.append(1)
    # Rows that now have their `min_tokens` take another way.
    assert not step.continues(rows, NO_MASKS)
    step = StepRows(rows, NO_MASKS, device)
    rows[0].output_token_ids.append(1)
    assert not step.continues(rows, NO_MASKS)


def test_histories_get_a_token_for_each_row():
    kernels = DeviceKernels()
    found = steps_of(kernels, 1)
    assert kernels.histories.num_appended >= NUM_STEPS * 3 * 6
    assert len(found) == NUM_STEPS


def test_row_past_its_minimum_needs_no_state(monkeypatch: pytest.MonkeyPatch):
    """Its state fell behind while nothing of it was processed, and a second row asked for its unread tokens."""

    class Launch:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            return lambda *arguments, **options: None

    for name in ("start", "clear", "append", "decide", "apply"):
        monkeypatch.setattr(penalty_kernels, name, Launch())
    histories = RowHistories(64, (2,), torch.device("cpu"))
    first, second = (
        SampleRow(SamplingParams(top_p=0.9, min_tokens=1).frozen(), stream, 0, 3, (1, 2, 3), []) for stream in (1, 2)
    )
    prepared = histories.prepare([first])
    assert prepared.slots[0] is not None
    histories.append_(prepared, torch.tensor([5]))
    # Two steps on, the last of which is not read yet.
    first.output_token_ids.extend((5, 7, NOT_READ))
    slots = histories.prepare([first, second]).slots
    assert slots[0] is None
    assert slots[1] is not None
