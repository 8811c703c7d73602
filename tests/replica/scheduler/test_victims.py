"""Who is preempted when the blocks do not suffice: the least computed work, chosen before the step is decided; and what
keeps the others from giving way in turn.

A row of a step is (request, sample, first token, tokens, samples). Blocks hold 4 tokens; what is preempted is computed
again.
"""

from typing import Any

import pytest
from histories import Operation, limits, new_run, operations, play
from hypothesis import given, settings
from scheduler_runs import Row, Run

from spmd_worker.replica.scheduler import planner as planner_module
from spmd_worker.replica.scheduler.planner import Planner
from spmd_worker.replica.scheduler.policy import choose_victim
from spmd_worker.replica.sequence.request import Request
from spmd_worker.replica.sequence.sampling_params import SamplingParams
from spmd_worker.replica.sequence.sequence import Sequence, SequenceStatus


def started(run: Run, *prompt_lengths: int, **sampling: object) -> Run:
    """Requests of these lengths, all of whose prompts the first step computes; each samples its first token."""
    for length in prompt_lengths:
        run.admit(length, **sampling)
    assert run.step() == [Row(index, 0, 0, length, 1) for index, length in enumerate(prompt_lengths)]
    return run


def full_run() -> Run:
    """Five blocks are full, and both requests need another: the longer one arrived last."""
    return started(Run(num_blocks=5, max_model_len=20), 4, 16)


def test_least_computed_sequence_is_preempted_though_first():
    run = full_run()
    assert run.step() == [Row(1, 0, 16, 1, 1)]
    assert (run.running(), run.waiting()) == ([(1, 0)], [(0, 0)])


def test_victim_check_detects_preemption_of_latest_arrival(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(planner_module, "choose_victim", lambda running: running[-1])
    with pytest.raises(AssertionError):
        test_least_computed_sequence_is_preempted_though_first()


@pytest.mark.parametrize(
    ("computed", "expected"),
    [((7,), 0), ((5, 9), 0), ((9, 5), 1), ((9, 5, 7), 1), ((5, 5), 1), ((5, 5, 9), 1), ((9, 5, 5, 9, 6), 2)],
)
def test_tie_preempts_the_latest_sequence(computed: tuple[int, ...], expected: int):
    requests = [Request(index, (1,) * 10, SamplingParams(), index) for index in range(len(computed))]
    running = [Sequence(request, 0, num_computed_tokens=count) for request, count in zip(requests, computed)]
    assert choose_victim(running) is running[expected]


def test_tie_in_run_preempts_the_latest_sequence():
    run = started(Run(num_blocks=6), 4, 4, 16)
    assert run.step() == [Row(2, 0, 16, 1, 1)], "one block is missing after the first of the two is gone"
    assert run.waiting() == [(0, 0), (1, 0)]
    run = started(Run(num_blocks=7), 4, 4, 16)
    assert run.step() == [Row(0, 0, 4, 1, 1), Row(2, 0, 16, 1, 1)]
    assert run.waiting() == [(1, 0)]


def beside_a_half_computed_prompt(**sampling: object) -> Run:
    """Three tokens a step of request 1 are computed; then both need a block and one is left."""
    run = Run(num_blocks=8, max_num_seqs=3, max_num_batched_tokens=4, max_model_len=32)
    run.admit(12, max_tokens=6)
    run.steps(3)
    run.admit(15, max_tokens=2, **sampling)
    assert run.steps(4) == [[Row(0, 0, 12 + step, 1, 1), Row(1, 0, 3 * step, 3, 0)] for step in range(4)]
    assert run.cache.num_free_blocks == 1
    return run


def test_half_computed_prompt_is_preempted_like_any_other():
    run = beside_a_half_computed_prompt()
    assert run.step() == [Row(0, 0, 16, 1, 1)], "16 computed tokens stay, 12 go"
    assert run.waiting() == [(1, 0)]
    assert run.steps(2) == [[Row(1, 0, 0, 4, 0)], [Row(1, 0, 4, 4, 0)]]


def test_only_as_many_as_needed_are_preempted():
    run = started(Run(num_blocks=6), 4, 4, 16)
    run.admit(1)
    run.step()
    assert run.scheduler.counters.num_preemptions == 2
    assert [group.num_preemptions for group in run.scheduler.queues.groups.values()] == [1, 1, 0, 0]


def test_preemption_ignores_tokens_beyond_step_budget():
    """Two half-computed prompts want four blocks between them, but this step computes two blocks of the first."""
    requests = [Request(index, (1,) * 8, SamplingParams(), index) for index in range(2)]
    running = [Sequence(request, 0, status=SequenceStatus.RUNNING) for request in requests]
    run = Run(num_blocks=2, max_num_batched_tokens=8)
    run.scheduler.queues.running += running
    plan = run.scheduler.schedule()
    assert [group.request_id for group in plan.groups] == [0]
    assert run.scheduler.running == running


def test_preempted_request_returns_before_later_arrivals():
    run = full_run()
    run.admit(1, max_tokens=1)
    assert run.step() == [Row(1, 0, 16, 1, 1)]
    assert run.waiting() == [(0, 0), (2, 0)]
    assert run.steps(2) == [[Row(1, 0, 17 + step, 1, 1)] for step in range(2)]
    assert sorted(run.ended) == [1]
    assert run.step() == [Row(0, 0, 0, 5, 1), Row(2, 0, 0, 1, 1)]


def crowd() -> Run:
    """Twelve blocks are full. Each of three needs one more, and the first to go has only one to give."""
    return started(Run(num_blocks=12, max_model_len=48), 4, 20, 24)


def test_preemption_step_admits_nothing():
    run = crowd()
    assert run.step() == [Row(2, 0, 24, 1, 1)]
    assert run.waiting() == [(0, 0), (1, 0)]
    assert run.cache.num_free_blocks == 5, "request 0 wants two of them"
    assert run.step() == [Row(0, 0, 0, 5, 1), Row(2, 0, 25, 1, 1)]


def test_admission_check_detects_victim_readmitted_in_same_step(monkeypatch: pytest.MonkeyPatch):
    preempt = Planner._preempt_for_blocks
    monkeypatch.setattr(Planner, "_preempt_for_blocks", lambda self, *given: preempt(self, *given) and False)
    with pytest.raises(AssertionError):
        test_preemption_step_admits_nothing()


def test_lone_sequence_is_never_preempted():
    run = Run(num_blocks=5, max_model_len=20)
    run.admit(4, max_tokens=16)
    for _ in range(3):
        run.admit(4, max_tokens=16)
    run.finish()
    groups = [run.ended[index] for index in range(4)]
    assert [len(group.sequences[0].output_token_ids) for group in groups] == [16] * 4
    assert groups[0].num_preemptions == 0
    alone = Run(num_blocks=5, max_model_len=20)
    alone.admit(4, max_tokens=16)
    assert alone.finish() == 16
    assert alone.scheduler.counters.num_preemptions == 0


def test_preempted_tokens_count_as_recomputed_when_computed_again():
    run = full_run()
    run.step()
    counters = run.scheduler.counters
    assert (counters.num_preemptions, counters.num_recomputed_tokens) == (1, 0)
    while run.waiting():
        run.step()
    assert counters.num_recomputed_tokens == 4
    run = full_run()
    run.step()
    run.abort(0)
    run.finish()
    assert run.scheduler.counters.num_recomputed_tokens == 0, "it never was"


class WatchedRun(Run):
    """Notes who is preempted in each step, and holds it against what ran before the step."""

    num_seen = 0

    def step(self, values=9) -> list[Row]:
        # Of the highest priority number the least work goes first.
        running = self.scheduler.running
        before = {each.key: (-each.request.priority, each.num_computed_tokens) for each in running}
        rows = super().step(values)
        waiting = [sequence.key for sequence in self.scheduler.waiting]
        victims = [key for key in before if key in waiting]
        if victims:
            self._check(before, victims)
            assert all((row.request, row.sample) in before for row in rows), "somebody joined after a preemption"
            self.num_seen += 1
        return rows

    def _check(self, before: dict, victims: list) -> None:
        most = max(before.values())
        first_with_most = min(key for key in before if before[key] == most)
        assert first_with_most not in victims, f"{first_with_most} was preempted with {most[1]} computed tokens"
        # Those who stayed would have lost more, or as much and come first.
        assert max((before[key], tuple(-each for each in key)) for key in victims) < min(
            (before[key], tuple(-each for each in key)) for key in before if key not in victims
        )


def play_watched(limits: dict[str, Any], operations: list[Operation]) -> None:
    # With several steps in flight, those whose tokens are being sampled are not preempted either.
    play(new_run({**limits, "virtual_engines": 1, "ahead": 0}, WatchedRun), operations)


@settings(max_examples=20)
@given(limits, operations)
def test_most_computed_sequence_is_never_preempted(limits: dict[str, Any], operations: list[Operation]):
    play_watched(limits, operations)


@pytest.mark.stress
@settings(max_examples=1_000)
@given(limits, operations)
def test_most_computed_sequence_survives_many_more_histories(limits: dict[str, Any], operations: list[Operation]):
    play_watched(limits, operations)


@pytest.mark.parametrize(
    "choose",
    [lambda running: running[-1], lambda running: min(running, key=lambda each: each.num_computed_tokens)],
    ids=["the last", "of equals the first"],
)
def test_property_detects_other_victims(monkeypatch: pytest.MonkeyPatch, choose):
    monkeypatch.setattr(planner_module, "choose_victim", choose)
    run = WatchedRun(num_blocks=9, max_model_len=24)
    for length in (4, 12, 4, 8, 4, 10):
        run.admit(length, n=2, max_tokens=12)
    with pytest.raises(AssertionError):
        run.finish()
    monkeypatch.undo()
    run = WatchedRun(num_blocks=9, max_model_len=24)
    for length in (4, 12, 4, 8, 4, 10):
        run.admit(length, n=2, max_tokens=12)
    run.finish()
    assert run.num_seen > 3


# What is left free, so that those who run are not preempted at once.


def test_admission_leaves_a_block_for_each_running_sequence():
    run = Run(num_blocks=6, watermark_per_sequence=1, max_model_len=24)
    for _ in range(4):
        run.admit(4)
    assert [row.request for row in run.step()] == [0, 1, 2], "three blocks are left, and three need one soon"
    assert [row.request for row in run.step()] == [0, 1, 2]
    assert run.scheduler.counters.num_preemptions == 0
    run = Run(num_blocks=6, max_model_len=24)
    for _ in range(4):
        run.admit(4)
    assert [len(run.step()), len(run.step())] == [4, 3]
    assert run.scheduler.counters.num_preemptions == 1


def test_admission_leaves_a_block_for_each_future_sample():
    run = Run(num_blocks=8, watermark_per_sequence=1, max_model_len=32)
    run.admit(4, n=3)
    for _ in range(3):
        run.admit(4)
    assert [row.request for row in run.step()] == [0, 1, 2], "five blocks are left for five"
    assert [row[:2] for row in run.step()] == [(0, 0), (0, 1), (0, 2), (1, 0), (2, 0)]


# How many sequences a group counts for.


@pytest.mark.parametrize("samples", [{"n": 3}, {"n": 1, "best_of": 3}, {"n": 3, "best_of": 3}])
def test_unforked_group_counts_all_its_samples(samples: dict[str, int]):
    run = Run(max_num_seqs=4, max_num_batched_tokens=8)
    run.admit(12, max_tokens=2, **samples)
    run.admit(2, n=2, max_tokens=1)
    run.admit(1, max_tokens=1)
    assert run.step() == [Row(0, 0, 0, 8, 0)]
    assert run.step() == [Row(0, 0, 8, 4, 3)], "one sequence runs, but three will: there is no place for two more"
    assert run.step() == [Row(0, sample, 12, 1, 1) for sample in range(3)]
    assert run.step() == [Row(1, 0, 0, 2, 2), Row(2, 0, 0, 1, 1)]


def test_count_check_detects_group_counted_once_until_fork(monkeypatch: pytest.MonkeyPatch):
    decide_waiting = Planner._decide_waiting

    def counted_once(self, budget, decisions):
        budget.num_sequences += sum(each.num_samples - 1 for each in self._queues.running)
        decide_waiting(self, budget, decisions)

    monkeypatch.setattr(Planner, "_decide_waiting", counted_once)
    with pytest.raises(AssertionError):
        test_unforked_group_counts_all_its_samples({"n": 3})


def test_preempted_unforked_group_counts_all_its_samples():
    run = beside_a_half_computed_prompt(n=2)
    run.admit(1, n=2, max_tokens=1)
    assert run.steps(4) == [[Row(0, 0, 16, 1, 1)], *[[Row(1, 0, first, 4, 0)] for first in (0, 4, 8)]]
    assert run.step() == [Row(1, 0, 12, 3, 2)], "a token is left of the budget, and two places but for the fork"
    assert run.step() == [Row(1, 0, 15, 1, 1), Row(1, 1, 15, 1, 1)]
    assert run.step() == [Row(2, 0, 0, 1, 2)]


def test_returning_sample_counts_once_after_fork():
    run = Run(num_blocks=8, max_num_seqs=3, max_model_len=32)
    run.admit(8, n=2)
    run.admit(16)
    run.step()
    assert run.step() == [Row(0, 0, 8, 1, 1), Row(1, 0, 16, 1, 1)], "three blocks are wanted, two are free"
    assert run.waiting() == [(0, 1)]
    run.abort(1)
    run.admit(1)
    assert run.step() == [Row(0, 0, 9, 1, 1), Row(0, 1, 8, 1, 1), Row(2, 0, 0, 1, 1)], "it shares the prompt"
