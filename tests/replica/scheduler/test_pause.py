"""Pauses of a scheduler: who computes meanwhile, what is kept, and by which weights each token is said to be made."""

import pytest
from scheduler_runs import Run

from spmd_worker.replica.scheduler.scheduler import Scheduler
from spmd_worker.replica.sequence.sequence import Sequence, SequenceStatus
from spmd_worker.replica.sequence.weight_spans import replace_span, spans_of


def spans(run: Run, request: int, sample: int = 0) -> list[tuple[int, int]]:
    sequence: Sequence = run.ended[request].sequences[sample]
    return spans_of(sequence.weight_spans, len(sequence.output_token_ids))


@pytest.mark.parametrize("clear_cache", [True, False])
def test_kept_rows_continue_after_resume(clear_cache: bool):
    run = Run(max_num_seqs=2)
    for _ in range(3):
        run.admit(5, max_tokens=4)
    run.steps(2)
    run.pause("keep", clear_cache)
    assert not run.scheduler.has_unfinished
    assert run.steps(3) == [[], [], []]
    assert len(run.running()) == (0 if clear_cache else 2)
    run.resume()
    # Prompt and two tokens again, or the last token alone.
    assert [row.num_tokens for row in run.step()] == ([7, 7] if clear_cache else [1, 1])
    run.finish()
    assert [len(run.tokens(request)[0]) for request in range(3)] == [4, 4, 4]


def test_rows_that_have_begun_end_in_wait():
    run = Run(max_num_seqs=2)
    for _ in range(4):
        run.admit(2, max_tokens=3)
    run.step()
    run.pause("wait")
    run.finish()
    assert (sorted(run.ended), run.waiting()) == ([0, 1], [(2, 0), (3, 0)])
    late = run.admit(2, max_tokens=1)
    assert run.steps(2) == [[], []]
    run.resume()
    run.finish()
    assert sorted(run.ended) == [0, 1, 2, 3, late]


@pytest.mark.parametrize("is_aborted", [False, True])
def test_urgent_row_of_a_pause_waits_for_its_end(is_aborted: bool):
    """Hazard: rows that arrive in a pause, before those that it waits for in service order, are answered too, and a
    stream of them keeps it from ending. A begun row in their lane, preempted behind them, ends nevertheless.
    """
    run = Run(num_blocks=5, max_num_seqs=2)
    for _ in range(2):
        run.admit(6, max_tokens=6, priority=5)
    run.step()
    run.pause("wait")
    urgent = [run.admit(2, max_tokens=1, priority=priority) for priority in (1, 0)]
    while run.scheduler.has_unfinished:
        run.step()
    assert (sorted(run.ended), run.scheduler.counters.num_preemptions) == ([0, 1], 1)
    if is_aborted:
        run.abort(urgent.pop(0))
    run.pause("wait")
    assert not run.scheduler.has_unfinished
    assert run.scheduler.queues.num_waiting == len(urgent)
    run.resume()
    assert run.waiting() == [(request, 0) for request in reversed(urgent)]
    run.finish()
    assert sorted(run.ended) == [0, 1, 2, 3]


def test_queued_row_before_a_begun_one_ends_too():
    """Control of a rule that would never end: the row in front waits in the lane of the preempted one behind it."""
    run = Run(num_blocks=6, max_num_seqs=3, max_loras=1)
    run.load(1, 11)
    run.load(2, 12)
    for adapter in (11, 12, 0):
        run.admit(2, adapter=adapter, max_tokens=4)
    run.step()
    assert run.running() == [(0, 0), (2, 0)]
    run.pause("wait")
    run.finish()
    assert sorted(run.ended) == [0, 1, 2]


def test_swapped_rows_are_dropped_with_the_cache():
    run = Run(num_blocks=7, max_num_seqs=2, preemption="swap", num_host_blocks=20)
    for _ in range(2):
        run.admit(10, max_tokens=8)
    while not run.swapped():
        run.step()
    run.pause("keep", clear_cache=True)
    assert run.swapped() == []
    assert {each.status for each in run.scheduler.waiting} == {SequenceStatus.PREEMPTED}
    run.resume()
    run.finish()


@pytest.mark.parametrize("ahead", [0, 1])
def test_each_token_names_its_weights(ahead: int):
    run = Run(max_num_seqs=6, ahead=ahead)
    first, other = run.admit(3, max_tokens=6, n=2), run.admit(3, max_tokens=2)
    run.steps(3)
    num_sampled = len(run.scheduler.running[0].output_token_ids)
    run.pause("keep", clear_cache=True)
    run.set_weight_version(7)
    run.set_weight_version(-4)
    late = run.admit(2, max_tokens=1)
    run.resume()
    run.finish()
    num_before = num_sampled + ahead
    assert spans(run, first) == spans(run, first, 1) == [(0, 0), (num_before, -4)]
    assert (spans(run, other), spans(run, late)) == ([(0, 0)], [(0, -4)])


@pytest.mark.control("Tokens name the weights that made them")
def test_spans_without_begin_are_wrong(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Scheduler, "begin_weights", lambda self, version: None)
    with pytest.raises(AssertionError):
        test_each_token_names_its_weights(0)


def test_weights_that_return_join_spans():
    run = Run()
    row = run.admit(3, max_tokens=4)
    run.steps(2)
    run.set_weight_version(7)
    run.set_weight_version(0)
    run.finish()
    assert spans(run, row) == [(0, 0)]


def test_kept_keys_name_no_blocks_of_new_weights():
    run = Run(caching=True, max_num_seqs=1)
    run.admit(8, max_tokens=8)
    run.steps(2)
    run.pause("keep", clear_cache=False)
    run.set_weight_version(7)
    run.resume()
    run.finish()
    run.admit(8, max_tokens=1)
    assert [row.num_tokens for row in run.step()] == [8]


def test_replaced_spans_leave_the_others():
    spans = ((0, 1), (4, 2))
    assert replace_span(spans, 2, 6, 3, 9) == ((0, 1), (2, 3), (6, 2))
    assert replace_span(spans, 0, 9, 3, 9) == ((0, 3),)
    assert replace_span(spans, 0, 2, 3, 9) == ((0, 3), (2, 1), (4, 2))
    assert replace_span((), 0, 2, 3, 2) == ((0, 3),)
    assert spans_of(spans, 9, 5) == [(0, 2)]
    assert spans_of(spans, 0) == []
