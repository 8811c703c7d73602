"""A model runner's steps with drafts, in models with recurrent states: ids and states are those without drafts."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from state_models import state_folder
from torch import Tensor

from kv_cache.block import BlockId
from spmd_worker.base.config.schema import ModelOptions, RunConfig, SchedulerConfig
from spmd_worker.base.config.speculation import SpeculativeConfig
from spmd_worker.base.errors import StepMismatchError
from spmd_worker.ops.attention.draft_replay import DraftReplay
from spmd_worker.ranks.environment import RankEnvironment
from spmd_worker.replica.mirror.records import MirroredSequence, ScheduledSequence
from spmd_worker.replica.sequence.request import Request, RequestId
from spmd_worker.replica.sequence.sampling_params import SamplingParams
from spmd_worker.resolved import resolve_run
from spmd_worker.worker import start
from spmd_worker.worker.backends.triton import TritonDevice
from spmd_worker.worker.loaded_model import LoadedModel
from spmd_worker.worker.runner.dummy_steps import drafting_step
from spmd_worker.worker.runner.row_repeat import RowRepeater
from spmd_worker.worker.runner.state_rows import draft_replay
from spmd_worker.worker.worker import Worker

KINDS = ("lfm2", "falcon")
PROMPTS = ((7, 8, 9, 10, 11), (12, 13, 14))


@cache
def worker_of(kind: str, most_drafts: int) -> Worker:
    model = ModelOptions(path=str(state_folder(kind)), dtype="float32", max_model_len=128)
    scheduler = SchedulerConfig(max_num_batched_tokens=64, max_num_seqs=4)
    resolved = resolve_run(RunConfig(model=model, scheduler=scheduler, device="cpu"), "cpu")
    if most_drafts:
        speculation = SpeculativeConfig(method="ngram", num_speculative_tokens=most_drafts)
        resolved = replace(resolved, config=replace(resolved.config, speculative_config=speculation))
    worker = Worker(resolved, RankEnvironment())
    worker.init_device()
    worker.load_model()
    return worker


@pytest.fixture(scope="module", autouse=True)
def shutdown() -> Iterator[None]:
    yield
    for kind in KINDS:
        for most_drafts in (0, 3):
            worker_of(kind, most_drafts).shutdown()
    worker_of.cache_clear()


def loaded_model(kind: str, most_drafts: int = 3) -> LoadedModel:
    loaded = worker_of(kind, most_drafts).loaded
    assert loaded is not None
    return loaded


@dataclass
class Rows:
    """Greedy rows in a cache of their own."""

    kind: str
    most_drafts: int
    sequences: list[MirroredSequence] = field(init=False)
    num_steps: int = 0

    def __post_init__(self) -> None:
        loaded = loaded_model(self.kind, self.most_drafts)
        spec = worker_of(self.kind, self.most_drafts).get_kv_cache_spec()
        assert spec.most_drafts == self.most_drafts
        self.engine = loaded.new_cache_engine(spec, 8, 0, (4, 0))
        self.engine.allocate()
        self.runner = loaded.new_runner(self.engine)
        self.sequences = [
            MirroredSequence(
                *(Request(RequestId(row), prompt, SamplingParams(temperature=0.0), row), 0, []),
                *([BlockId(2 * row), BlockId(2 * row + 1)], 0, 0),
                state_slot=2 - row,
            )
            for row, prompt in enumerate(PROMPTS)
        ]

    def step(self, drafts: tuple[tuple[int, ...], ...] = ((), ()), repeated_rows: tuple[int, ...] = ()) -> None:
        """All known tokens of each row, and its drafts."""
        scheduled = []
        for own, its in zip(self.sequences, drafts, strict=True):
            own.draft_token_ids = its
            num_given = own.num_prompt_tokens + len(own.output_token_ids) - own.num_computed_tokens
            scheduled.append(ScheduledSequence(own, num_given + len(its), 1))
        self.runner.forward(self.num_steps, tuple(scheduled), repeated_rows=repeated_rows)
        result, ids = self.runner.sample(), 0
        for own, count in zip(self.sequences, result.num_token_ids or (1, 1), strict=True):
            own.num_computed_tokens = own.num_prompt_tokens + len(own.output_token_ids) + count - 1
            own.num_lagging_tokens = count - 1
            own.output_token_ids += result.token_ids[ids : ids + count]
            ids += count
        self.num_steps += 1

    def states(self, row: int) -> list[Tensor]:
        assert self.engine.states is not None
        return [each[:, 2 - row].clone() for each in self.engine.states.lasting_tensors]


@cache
def plainly(kind: str) -> tuple[list[list[int]], list[list[list[Tensor]]]]:
    """Ids of each row, and its states after each step without drafts."""
    rows, states = Rows(kind, 0), [[] for _ in PROMPTS]
    for _ in range(10):
        rows.step()
        for row, of_row in enumerate(states):
            of_row.append(rows.states(row))
    return [each.output_token_ids for each in rows.sequences], states


def drafted(kind: str) -> Rows:
    """After the prompts a step in which row 0 has right drafts and row 1 a wrong one behind a right one, one in which
    row 0 lags alone and row 1 has drafts again.
    """
    answers, _ = plainly(kind)
    rows = Rows(kind, 3)
    rows.step()
    rows.step((tuple(answers[0][1:4]), (answers[1][1], answers[1][2] ^ 1)))
    assert [each.num_lagging_tokens for each in rows.sequences] == [3, 1]
    rows.step(((), tuple(answers[1][3:5])), repeated_rows=(0,))
    assert [each.num_lagging_tokens for each in rows.sequences] == [0, 2]
    return rows


@pytest.mark.parametrize("kind", KINDS)
def test_steps_with_drafts_equal_steps_without(kind: str) -> None:
    answers, states = plainly(kind)
    rows = drafted(kind)
    for row, own in enumerate(rows.sequences):
        assert own.output_token_ids == answers[row][: len(own.output_token_ids)]
        # The slot is where the row's last given token is.
        number = len(own.output_token_ids) - 1 - own.num_lagging_tokens
        assert all(map(torch.equal, rows.states(row), states[row][number]))
    assert [len(each.output_token_ids) for each in rows.sequences] == [6, 6]


def test_repeated_row_without_its_lag_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    begin = RowRepeater.begin

    def forgets(self: RowRepeater, scheduled: Any, row: int, batch: Any, own: Any, incoming: Any) -> Any:
        assert own.attention.replay is not None
        own = replace(own, attention=replace(own.attention, replay=None))
        return begin(self, scheduled, row, batch, own, incoming)

    monkeypatch.setattr(RowRepeater, "begin", forgets)
    with pytest.raises(StepMismatchError, match="recurrent states"):
        drafted("lfm2")


def test_dummy_steps_replay_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest step, with the longest lag of each row, and that of the warm-up."""
    seen, extend = [], DraftReplay.extend

    def noting(self: DraftReplay, inputs: Tensor, saved: Tensor) -> Tensor:
        seen.append((len(inputs), len(self.lagging_rows), len(self.draft_rows)))
        return extend(self, inputs, saved)

    monkeypatch.setattr(DraftReplay, "extend", noting)
    loaded, rows = loaded_model("lfm2"), Rows("lfm2", 3)
    with start.prepare_max_step(loaded, rows.engine.spec) as run:
        run()
    assert {*seen} == {(64, 4 * 3, 0)}
    seen.clear()
    rows.runner.forward(0, drafting_step(16, 8))
    assert rows.runner.sample().num_token_ids in ((1,), (2,), ())
    assert {*seen} == {(2, 1, 1)}
    seen.clear()
    with start.prepare_max_step(loaded_model("lfm2", 0), Rows("lfm2", 0).engine.spec) as run:
        run()
    assert not seen


def test_warm_up_compiles_replays_where_rows_draft() -> None:
    for most_drafts in (0, 3):
        steps: list[Any] = []
        runner = SimpleNamespace(
            forward=lambda number, scheduled, seen=steps: seen.append(scheduled),
            sample=lambda: None,
            num_groups=1,
            adapters=None,
        )
        resolved = worker_of("lfm2", most_drafts).resolved
        device: Any = SimpleNamespace(resolved=resolved, warm_up_masks=lambda _: None, _warm_up_matmuls=lambda *_: None)
        TritonDevice.warm_up(device, lambda _, found=runner: found, None, 16)
        replays = [draft_replay(scheduled, most_drafts, torch.device("cpu")) for scheduled in steps]
        assert sum(each is not None for each in replays) == (most_drafts > 0)
