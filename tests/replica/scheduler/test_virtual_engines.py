"""Several steps in flight: who may go on, who may be preempted, and that nobody's answer depends on it."""

import random

import pytest
from scheduler_runs import Row, Run

from spmd_worker.replica.scheduler import planner as planner_module
from spmd_worker.replica.scheduler.policy import choose_victim
from spmd_worker.replica.scheduler.scheduler import Scheduler
from spmd_worker.replica.sequence.sequence import SequenceGroup
from spmd_worker.replica.sequence.step import StepResult


def started(num_requests: int, virtual_engines: int, **limits: int) -> Run:
    """Requests whose prompts one step has computed."""
    run = Run(virtual_engines=virtual_engines, **limits)
    for _ in range(num_requests):
        run.admit(3, max_tokens=20)
    assert [row.num_tokens for row in run.step()] == [3] * num_requests
    return run


def requests_of(rows: list[Row]) -> list[int]:
    return [row.request for row in rows]


def by_place(key, position):
    """A token that tells whose it is and where."""
    return 1 + 50 * key.request_id + 10 * key.sample_index + position


def test_two_steps_in_flight_halve_decoding_sequences():
    run = started(6, 2)
    # The first tokens are being sampled.
    assert run.step() == []
    assert [requests_of(run.step()) for _ in range(4)] == [[0, 1, 2], [3, 4, 5], [0, 1, 2], [3, 4, 5]]


def test_shares_even_out_when_sequences_end():
    run = started(6, 2)
    run.step()
    run.step()
    for request in (0, 1, 2):
        run.abort(request)
    assert [len(run.step()) for _ in range(6)] == [2, 1, 2, 1, 2, 1]


def test_three_steps_in_flight_have_a_third_each():
    run = started(6, 3)
    run.steps(2)
    assert [requests_of(run.step()) for _ in range(4)] == [[0, 1], [2, 3], [4, 5], [0, 1]]


def test_chunks_of_prompt_follow_without_waiting():
    run = Run(virtual_engines=2, max_num_batched_tokens=8)
    run.admit(20)
    assert [run.step() for _ in range(3)] == [[(0, 0, 0, 8, 0)], [(0, 0, 8, 8, 0)], [(0, 0, 16, 4, 1)]]


def test_sequence_in_flight_neither_continues_nor_is_preempted():
    run = started(2, 2, num_blocks=7, max_model_len=24)
    # Both fill their blocks together; one has to be preempted while the other's token is in flight.
    run.finish(by_place)
    assert run.scheduler.counters.num_preemptions > 0
    for request in (0, 1):
        (output,) = run.tokens(request)
        # The first token was sampled before `by_place` was asked.
        assert output[1:] == [1 + 50 * request + position for position in range(4, 3 + len(output))]


def count_as_they_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have every id that comes counted, whosever it is."""
    apply = Scheduler.apply

    def counting(self: Scheduler, result: StepResult) -> list[SequenceGroup]:
        before = self.counters.num_output_tokens
        ended = apply(self, result)
        self.counters.num_output_tokens = before + len(result.token_ids)
        return ended

    monkeypatch.setattr(Scheduler, "apply", counting)


@pytest.mark.parametrize(("is_counted", "num_counted"), [(False, 16), (True, 20)])
def test_tokens_of_aborted_request_are_not_counted(monkeypatch: pytest.MonkeyPatch, is_counted: bool, num_counted: int):
    """Negative control: with those of the 4 samples that were aborted it is 20."""
    if is_counted:
        count_as_they_come(monkeypatch)
    run = Run(virtual_engines=2)
    for num_samples in (1, 3, 2):
        run.admit(4, n=num_samples)
    run.step()
    # Their first tokens are being sampled.
    run.abort(0)
    run.abort(1)
    run.finish()
    outputs = [token_ids for request in range(3) for token_ids in run.tokens(request)]
    assert [len(token_ids) for token_ids in outputs] == [0, 0, 8, 8]
    assert run.scheduler.counters.num_output_tokens == num_counted


@pytest.mark.parametrize(("is_counted", "num_counted"), [(False, 5), (True, 12)])
def test_several_tokens_of_aborted_request_are_not_counted(
    monkeypatch: pytest.MonkeyPatch, is_counted: bool, num_counted: int
):
    if is_counted:
        count_as_they_come(monkeypatch)
    run = Run(virtual_engines=2)
    for num_samples in (1, 3, 2):
        run.admit(4, n=num_samples)
    plan = run.scheduler.schedule()
    run.abort(0)
    run.abort(1)
    # 3 of request 0, 1, 0 and 3 of the samples of request 1, 2 and 3 of those of request 2.
    result = StepResult(plan.step, tuple(range(10, 22)), num_token_ids=(3, 1, 0, 3, 2, 3))
    assert run.scheduler.apply(result) == []
    assert [sequence.output_token_ids for sequence in run.scheduler.running] == [[17, 18], [19, 20, 21]]
    assert [run.tokens(request) for request in (0, 1)] == [[[]], [[]]]
    assert run.scheduler.counters.num_output_tokens == num_counted
    run.scheduler.check_integrity()


def has_right_outputs(run: Run) -> bool:
    chance = random.Random(run.cache.num_blocks)
    for _ in range(10):
        run.admit(chance.randint(1, 9), max_tokens=chance.randint(4, 12))
    run.finish(by_place, limit=500)
    right = []
    for request, group in run.ended.items():
        start = 1 + 50 * request + group.sequences[0].num_prompt_tokens
        right.append(run.tokens(request)[0] == [start + place for place in range(len(run.tokens(request)[0]))])
    return all(right)


def test_output_check_detects_victim_in_flight(monkeypatch: pytest.MonkeyPatch):
    limits = {"virtual_engines": 4, "max_model_len": 24, "max_num_batched_tokens": 16}
    runs = [Run(num_blocks=num_blocks, **limits) for num_blocks in range(9, 20)]
    assert all(map(has_right_outputs, runs))
    # Negative control: choosing among all that run, as is right with one step in flight.
    wrong = []
    for num_blocks in range(9, 20):
        run = Run(num_blocks=num_blocks, **limits)
        monkeypatch.setattr(planner_module, "choose_victim", lambda _, run=run: choose_victim(run.scheduler.running))
        wrong.append(not has_right_outputs(run))
    assert any(wrong)


@pytest.mark.gate("0-2", "3-3", "6-4")
@pytest.mark.parametrize("virtual_engines", [2, 3, 4])
@pytest.mark.parametrize("seed", range(8))
def test_answers_equal_those_of_single_steps(seed: int, virtual_engines: int):
    crowded = {"num_blocks": 9, "max_num_batched_tokens": 16, "max_model_len": 24, "num_host_blocks": 4}
    runs = [Run(preemption="auto", virtual_engines=each, **crowded) for each in (1, virtual_engines)]
    for run in runs:
        chance = random.Random(seed)
        for _ in range(20):
            run.admit(chance.randint(1, 14), n=chance.choice([1, 1, 3]), max_tokens=chance.randint(1, 9))
        run.finish(by_place)
        assert run.scheduler.counters.num_preemptions > 0
    first, other = ([run.tokens(request) for request in range(20)] for run in runs)
    assert first == other
