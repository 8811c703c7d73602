"""Drafts of a model with recurrent states: a slot has the tokens before its row's next, but for those that it lags by.

Every step passes the codec, is applied by a mirror, and done to slots with contents (`visible_states.py`), which apply
a draft only where the row's next step says that the state lags by it.
"""

import random
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from histories import operations, state_limits
from hypothesis import given, settings
from scheduler_runs import Row, Run, tokens
from test_drafting import drafted_run, drafting_limits, keeps_answers, sampled

from kv_cache.state_ops import StateOps
from spmd_worker.replica.lockstep.wire.codec import Decoder, Encoder
from spmd_worker.replica.lockstep.wire.message import StepMessage
from spmd_worker.replica.mirror import mirror as mirror_module
from spmd_worker.replica.mirror.last_rows import LastRows
from spmd_worker.replica.mirror.records import MirrorError
from spmd_worker.replica.scheduler import drafting, updates
from spmd_worker.replica.scheduler.sequence_states import SequenceStates
from spmd_worker.replica.sequence.metadata import SequenceData
from spmd_worker.replica.sequence.sequence import FinishReason, Sequence, SequenceKey
from spmd_worker.replica.sequence.step import StepPlan


class LaggingRun(Run):
    """`seen` counts what became of sequences whose states lag, by kind."""

    def __init__(self, **limits: Any) -> None:
        super().__init__(**limits)
        self.seen: Counter[str] = Counter()
        self._encoder, self._decoder, self._schedule = Encoder(), Decoder(), self.scheduler.schedule
        self.scheduler.schedule = self._through_codec
        states = self.scheduler._allocator.states
        states._keep = partial(self._checked, states._keep)
        states.swap_out = partial(self._counted, "swapped out", states.swap_out)
        states.release = partial(self._counted, "released", states.release)

    def _through_codec(self) -> StepPlan:
        alive = [*self.scheduler.running, *self.scheduler.waiting]
        lags = {each.key: each.num_lagging_tokens for each in alive}
        plan = self._schedule()
        for group in plan.groups:
            for data in group.sequences:
                lag = lags[SequenceKey(group.request_id, data.sample_index)]
                self.seen["planned"] += lag > 0
                if isinstance(data, SequenceData):
                    assert data.num_lagging_tokens == lag, data
                    self.seen["sent completely"] += lag > 0
        decoded = self._decoder.decode(self._encoder.encode(StepMessage(plan.step, (), plan, (), b"")))
        assert decoded.plan == plan
        return decoded.plan

    def _checked(self, keep: Callable[..., None], sequence: Sequence, position: int, name: bytes) -> None:
        """A snapshot is made of a slot that is at its position."""
        num_tokens = self.states.num_tokens(sequence.state_slot)
        assert num_tokens == position, f"state in slot {sequence.state_slot} has {num_tokens} tokens, not {position}"
        self.seen["kept"] += sequence.num_lagging_tokens > 0
        keep(sequence, position, name)

    def _counted(self, kind: str, move: Callable[..., None], sequence: Sequence) -> None:
        if sequence.num_lagging_tokens:
            self.seen["aborted" if sequence.finish_reason is FinishReason.ABORT else kind] += 1
        move(sequence)


def lagging_run(kind: str, values=sampled, **options: Any) -> LaggingRun:
    return drafted_run(kind, values, LaggingRun, **{"snapshot_slots": 3, "grid": 8, **options})


CROWDED = {"num_blocks": 30, "max_num_batched_tokens": 40, "step_tokens": 40, "max_model_len": 100}
CACHED = {**CROWDED, "caching": True}
SWAPPED = {**CACHED, "preemption": "swap", "num_host_blocks": 40, "host_slots": 3}
LAYOUTS: dict[str, dict[str, Any]] = {
    "crowded": CROWDED,
    "cached": CACHED,
    "swapped": SWAPPED,
    "ahead": {**SWAPPED, "ahead": 1},
    "stages": {**SWAPPED, "virtual_engines": 2},
}


def long_history(seed: int, run: Run) -> None:
    """Long answers in a small cache: forks, aborts, pauses, rows without an id, and requests that continue an answer;
    each gets its tokens.
    """
    chance = random.Random(seed)
    asked: dict[int, tuple[int, ...]] = {}
    if not run.limits.num_steps_ahead:
        run.num_ids = lambda: chance.random() < 0.98
    while len(asked) < 10 or run.scheduler.has_unfinished:
        if len(asked) < 10 and run.scheduler.num_computing() < 5 and chance.random() < 0.4:
            prompt = tuple(chance.choices((1, 2), k=chance.randint(1, 12)))
            before = chance.choice([None, *run.ended])
            if before is not None:
                prompt = (*asked[before], *run.tokens(before)[0], *prompt)[: 60 - len(prompt)]
            given = {"n": chance.choice([1, 1, 1, 2]), "max_tokens": chance.randint(1, 80 - len(prompt))}
            asked[run.admit(0, prompt, **given)] = prompt
        elif chance.random() < 0.03:
            run.abort(chance.randrange(len(asked) + 1))
        elif chance.random() < 0.03:
            run.pause("keep", chance.random() < 0.3)
            if run.scheduler.has_unfinished and chance.random() < 0.7:
                run.step(sampled)
                assert not run.scheduler.has_unfinished
                run.seen["caught up"] += 1
            run.resume()
        run.step(sampled)
    run.settle()
    assert run.slots.num_used_slots == run.slots.num_used_host_slots == 0
    for group in run.ended.values():
        for each in group.sequences:
            first = each.num_prompt_tokens
            assert each.output_token_ids == [sampled(each.key, index) for index in range(first, each.num_tokens)]


@pytest.mark.gate("stages", "swapped")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_states_lag_by_accepted_drafts_alone(layout: str):
    seen, hits = Counter(), 0
    for seed, kind in enumerate(("right", "chance")):
        run = lagging_run(kind, **LAYOUTS[layout])
        long_history(seed, run)
        seen += run.seen
        hits += run.scheduler.counters.num_snapshot_hits
        assert run.scheduler.counters.num_accepted_tokens > 30
    wanted = {"crowded": ["released"], "cached": ["released", "kept"], "swapped": ["swapped out", "kept"]}
    for kind in ("planned", *wanted.get(layout, ["swapped out", "sent completely"])):
        assert seen[kind] > 0, (kind, seen)
    assert (hits > 0) == (layout != "crowded")


@pytest.mark.stress
def test_states_lag_in_many_histories():
    seen: Counter[str] = Counter()
    for seed in range(400):
        run = lagging_run(("right", "chance", "wrong")[seed % 3], **LAYOUTS[list(LAYOUTS)[seed % 5]])
        long_history(seed, run)
        seen += run.seen
    kinds = ("planned", "sent completely", "kept", "swapped out", "released", "aborted", "caught up")
    assert min(seen[kind] for kind in kinds) > 5, seen


def forgotten_in_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    make = updates._snapshot_of
    monkeypatch.setattr(updates, "_snapshot_of", lambda decision: replace(make(decision), num_lagging_tokens=0))
    monkeypatch.setattr(LaggingRun, "_through_codec", lambda self: self._schedule())


def forgotten_at_swap(monkeypatch: pytest.MonkeyPatch) -> None:
    swap_in = SequenceStates.swap_in

    def forget(self: SequenceStates, sequence: Sequence) -> None:
        swap_in(self, sequence)
        sequence.num_lagging_tokens = 0

    monkeypatch.setattr(SequenceStates, "swap_in", forget)
    monkeypatch.setattr(LaggingRun, "_through_codec", lambda self: self._schedule())


def forgotten_by_mirror(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mirror_module, "num_lagging_tokens", lambda sequence, num_computed_tokens: 0)


def kept_after_its_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mirror's row lags in the step after, too."""
    advance = LastRows.advance

    def keep(self: LastRows, token_ids: Iterable[int]) -> LastRows:
        lags = [each.num_lagging_tokens for each in self.sequences]
        rows = advance(self, token_ids)
        for sequence, lag in zip(self.sequences, lags, strict=True):
            sequence.num_lagging_tokens = lag
        return rows

    monkeypatch.setattr(LastRows, "advance", keep)


def of_computed_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Snapshots where the computed tokens are, and drafts that lead there."""
    jump(monkeypatch)

    def make(self: SequenceStates, running: list[Sequence], hashes: Any) -> None:
        for sequence in running:
            if sequence.num_computed_tokens and sequence.num_computed_tokens % self.unit == 0:
                self._reach(sequence, sequence.num_computed_tokens, hashes)

    monkeypatch.setattr(SequenceStates, "make_snapshots", make)


def jump(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafting, "num_before_snapshot", lambda num_tokens, unit: unit)


FAULTS = [forgotten_in_snapshot, forgotten_at_swap, forgotten_by_mirror, kept_after_its_step, of_computed_tokens]


@pytest.mark.parametrize("fault", FAULTS)
def test_wrong_lag_is_seen_in_slots(fault: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch):
    """Negative control; a mirror sees what is sent wrong, before any slot does."""
    fault(monkeypatch)
    with pytest.raises((AssertionError, MirrorError), match=r"state in slot|with a lag of 0, the mirror expects"):
        [long_history(seed, lagging_run(("right", "chance")[seed % 2], **SWAPPED)) for seed in range(10)]


def seven(key: SequenceKey, position: int) -> int:
    return 7


def test_drafts_leave_tokens_before_snapshots():
    """Tokens 8 and 16 are given ones, with three drafts at most: a slot is there when the next step begins."""
    run = lagging_run("right", seven, caching=True)
    run.admit(0, tokens(1, 5), max_tokens=20)
    assert [run.step(7) for _ in range(3)] == [[Row(0, 0, 0, 5, 1)], [Row(0, 0, 5, 2, 1)], [Row(0, 0, 7, 4, 1)]]
    (sequence,) = run.scheduler.running
    assert (sequence.num_computed_tokens, sequence.num_lagging_tokens) == (11, 3)
    # The copy of the state after 8 tokens comes before the drafts behind it are applied.
    assert (run.step(7), run.last_plan.state_ops) == ([Row(0, 0, 11, 4, 1)], StateOps(copy=((0, 1),)))
    assert (sequence.num_computed_tokens, sequence.num_lagging_tokens) == (15, 3)
    # Token 15 leads to 16, and drafts begin again behind it.
    assert (run.step(7), run.last_plan.state_ops) == ([Row(0, 0, 15, 4, 1)], StateOps())
    assert (run.step(7)[0].first, run.last_plan.state_ops.copy) == (19, ((0, 1),))


@pytest.mark.parametrize("caching", [True, False])
def test_drafts_pass_snapshots_nobody_makes(caching: bool):
    run = lagging_run("right", seven, caching=caching)
    run.admit(0, tokens(1, 6), max_tokens=16)
    run.step(7)
    assert run.step(7) == [Row(0, 0, 6, 1 if caching else 4, 1)]


@pytest.mark.parametrize(("kind", "jumps"), [("right", False), ("chance", False), ("wrong", False), ("right", True)])
def test_next_turn_finds_state_of_answer(kind: str, jumps: bool, monkeypatch: pytest.MonkeyPatch):
    """Negative control: drafts that jump over the token before a snapshot's position leave none behind."""
    if jumps:
        jump(monkeypatch)
    run = lagging_run(kind, caching=True)
    run.admit(0, tokens(1, 6), max_tokens=40)
    run.finish(sampled)
    run.admit(0, (*tokens(1, 6), *run.tokens(0)[0], 77, 78), max_tokens=1)
    first = run.step(sampled)[0].first
    # Of 46 tokens; the copy is in the step after the one that has reached 40.
    assert (first == 40) == (not jumps), first


def test_workers_drafts_are_cut_before_snapshots():
    run = Run(drafts=3, lookahead=3, caching=True, snapshot_slots=3, grid=8)
    run.worker_drafts = lambda key, position: (7, 7, 7)
    run.admit(0, tokens(1, 5), max_tokens=20)
    rows = [row[3:4] + row[2:3] for _ in range(6) for row in run.step(7)]
    # Numbers of tokens, from the first one on; none is drafted behind 7.
    assert rows == [(5, 0), (1, 5), (1, 6), (4, 7), (4, 11), (4, 15)]
    assert run.last_plan.wants_drafts
    assert run.slots.num_snapshots == 1


def test_row_without_ids_lags_no_more():
    run = lagging_run("right", seven)
    run.admit(0, tokens(1, 5), max_tokens=20)
    run.step(7)
    run.step(7)
    (sequence,) = run.scheduler.running
    assert sequence.num_lagging_tokens == 3
    # Without a draft, and without an id, it is computed again.
    run.scheduler._drafting._proposer.propose = lambda sequence, most: ()
    run.num_ids = iter([0, *[1] * 30]).__next__
    run.step(7)
    assert (sequence.num_lagging_tokens, sequence.state_slot, run.waiting()) == (0, None, [(0, 0)])
    run.finish(7)


def test_states_catch_up_before_a_pause():
    """One has a block for its next token, the other starts again: its block would be a third."""
    run = lagging_run("right", seven, num_blocks=5)
    for _ in range(2):
        run.admit(0, tokens(1, 5), max_tokens=12)
    run.step(7)
    run.step(7)
    assert [each.num_lagging_tokens for each in run.scheduler.running] == [3, 2]
    run.pause("keep")
    assert run.scheduler.has_unfinished
    assert len(run.step(7)) == 1
    assert not run.scheduler.has_unfinished
    assert run.step(7) == []
    run.resume()
    run.finish(7)


def test_models_without_states_never_lag():
    run = drafted_run("right", seven)
    run.admit(0, tokens(1, 5), max_tokens=20)
    while run.scheduler.has_unfinished:
        run.step(7)
        assert all(each.num_lagging_tokens == 0 for each in run.scheduler.running)
        assert all(each.num_lagging_tokens == 0 for each in run.mirror._sequences.values())
    assert run.scheduler.counters.num_accepted_tokens > 0


def with_states(given_limits: Any, states: dict[str, Any]) -> Any:
    limits, kind, options = given_limits
    return {**limits, **states}, kind, options


@settings(max_examples=10)
@given(drafting_limits, state_limits, operations)
def test_any_history_with_states_keeps_answers(given_limits: Any, states: dict[str, Any], done: list[Any]):
    keeps_answers(with_states(given_limits, states), done)


@pytest.mark.stress
@settings(max_examples=1_000)
@given(drafting_limits, state_limits, operations)
def test_many_more_histories_with_states_keep_answers(given_limits: Any, states: dict[str, Any], done: list[Any]):
    keeps_answers(with_states(given_limits, states), done)
