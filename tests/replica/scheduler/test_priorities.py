"""Priorities: who joins first, who is preempted first, and that the waiting queue is always sorted."""

import random

import pytest
from scheduler_runs import Run

from spmd_worker.replica.scheduler import planner as planner_module
from spmd_worker.replica.scheduler.policy import WaitingQueue
from spmd_worker.replica.sequence.request import Request, RequestId
from spmd_worker.replica.sequence.sampling_params import SamplingParams
from spmd_worker.replica.sequence.sequence import Sequence


def order_of_ends(run: Run) -> list[int]:
    run.finish()
    return list(run.ended)


@pytest.mark.guarantee("Requests of lower priority numbers are served first, and preempted last")
def test_requests_join_by_priority_then_arrival():
    run = Run(max_num_seqs=1)
    run.admit(4, max_tokens=3)
    run.step()
    for priority in (1, 0, 1, -2, 0):
        run.admit(4, max_tokens=2, priority=priority)
    assert run.waiting() == [(4, 0), (2, 0), (5, 0), (1, 0), (3, 0)]
    assert order_of_ends(run) == [0, 4, 2, 5, 1, 3], "the running one is not interrupted"


def test_first_priority_has_the_token_budget_first():
    run = Run(max_num_batched_tokens=6)
    run.admit(20, max_tokens=1)
    run.step()
    run.admit(9, max_tokens=1, priority=-1)
    rows = run.step()
    assert [row[:4] for row in rows] == [(0, 0, 6, 6)], "a running prompt keeps the budget"
    run = Run(max_num_batched_tokens=8)
    run.admit(5, max_tokens=9, priority=5)
    run.admit(5, max_tokens=9)
    assert [row[:4] for row in run.step()] == [(0, 0, 0, 3), (1, 0, 0, 5)]


def preempted_run() -> list[tuple[int, int]]:
    """Five blocks are full, and both requests need another: that of the later priority has more work."""
    run = Run(num_blocks=5, max_model_len=20)
    run.admit(16, max_tokens=4, priority=2)
    run.admit(4, max_tokens=10)
    run.step()
    run.step()
    return run.waiting()


@pytest.mark.guarantee("Requests of lower priority numbers are served first, and preempted last")
def test_last_priority_is_preempted_though_most_computed():
    assert preempted_run() == [(0, 0)]


@pytest.mark.control("Requests of lower priority numbers are served first, and preempted last")
def test_victim_check_detects_preemption_by_work_alone(monkeypatch: pytest.MonkeyPatch):
    by_work = lambda running: min(running, key=lambda each: each.num_computed_tokens)  # noqa: E731  # one expression
    monkeypatch.setattr(planner_module, "choose_victim", by_work)
    assert preempted_run() == [(1, 0)]


def test_preempted_sequence_waits_behind_new_first_priority():
    run = Run(num_blocks=5, max_model_len=20)
    run.admit(16, max_tokens=4, priority=2)
    run.admit(4, max_tokens=10)
    run.steps(2)
    run.admit(4, max_tokens=2, priority=1)
    run.admit(4, max_tokens=2, priority=3)
    assert run.waiting() == [(2, 0), (0, 0), (3, 0)]
    assert sorted(order_of_ends(run)) == [0, 1, 2, 3]


def test_waiting_queue_is_sorted_after_any_operations():
    chance, queue, expected = random.Random(5), WaitingQueue(), list[Sequence]()
    for number in range(400):
        kind = chance.choice(["append", "append", "pop", "remove", "return"])
        if kind == "append" or not expected:
            request = Request(
                RequestId(number),
                (1,),
                SamplingParams(),
                number,
                adapter=chance.choice([0, 0, 7]),
                priority=chance.randint(-2, 2),
            )
            expected.append(Sequence(request, 0))
            queue.append(expected[-1])
        elif kind == "remove":
            queue.remove(expected.pop(chance.randrange(len(expected))))
        else:
            head = queue.first()
            queue.pop(head)
            expected.remove(head)
            if kind == "return":
                queue.reinsert(head)
                expected.append(head)
        expected.sort(key=lambda each: (each.request.priority, each.key))
        assert list(queue) == expected
        assert len(queue) == len(expected)
        assert not expected or queue.first() is expected[0]
