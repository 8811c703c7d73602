"""Recurrent states beside blocks: what is computed once, kept, found, moved and forgotten, step by step."""

import pytest
from scheduler_runs import Row, Run, tokens

from kv_cache.state_ops import StateOps
from spmd_worker.replica.scheduler.sequence_states import SequenceStates
from spmd_worker.replica.sequence.sampled import NON_FINITE
from spmd_worker.replica.sequence.sequence import SequenceStatus


def stateful(**limits: object) -> Run:
    """Snapshots every 8 tokens at most, blocks of 4."""
    return Run(**{"caching": True, "snapshot_slots": 8, **limits})


def ops(run: Run) -> StateOps:
    """What the last step moved."""
    return run.last_plan.state_ops


def real_sizes(**limits: object) -> Run:
    sizes = {"num_blocks": 6000, "block_size": 16, "max_num_seqs": 64, "max_num_batched_tokens": 8192, "grid": 64}
    return stateful(**{**sizes, "max_model_len": 2048, "snapshot_slots": 64, "interval": 1600, **limits})


FLOWS = [(64, {}), (10, {"max_num_batched_tokens": 500}), (10, {"ahead": 1}), (10, {"virtual_engines": 4})]


@pytest.mark.parametrize(("num_rows", "flow"), FLOWS)
def test_common_prompt_of_many_rows_is_computed_once(num_rows: int, flow: dict[str, int]):
    """Rows share 1,000 tokens and differ in 30: 960 are computed once, the other 40 and the 30 by each."""
    run = real_sizes(**flow)
    for row in range(num_rows):
        run.admit(0, (*tokens(1, 1000), *tokens(10_000 * (row + 1), 30)), max_tokens=2)
    run.finish()
    counters = run.scheduler.counters
    assert counters.num_cached_prompt_tokens == (num_rows - 1) * 960
    assert counters.num_snapshot_hits == num_rows - 1
    # The first output token of each is computed too.
    assert counters.num_computed_tokens == 960 + num_rows * 71


def test_equal_prompts_are_computed_once():
    run = real_sizes()
    for _ in range(10):
        run.admit(1000, max_tokens=1)
    run.finish()
    assert run.scheduler.counters.num_computed_tokens == 960 + 10 * 40


def test_samples_that_cannot_run_at_once_share_prompt():
    run = real_sizes(max_num_seqs=4)
    run.admit(1000, n=10, max_tokens=1)
    run.finish()
    assert run.scheduler.counters.num_computed_tokens == 960 + 3 * 40


def test_prompt_is_cut_where_its_state_is_kept():
    """The copy is in the step after the one that reached position 16; it is found by later requests."""
    run = stateful()
    run.admit(0, tokens(1, 19), max_tokens=1)
    assert (run.step(), ops(run)) == ([Row(0, 0, 0, 16, 0)], StateOps())
    assert (run.step(), ops(run)) == ([Row(0, 0, 16, 3, 1)], StateOps(copy=((0, 1),)))
    run.admit(0, (*tokens(1, 18), 99, 98), max_tokens=1)
    assert (run.step(), ops(run)) == ([Row(1, 0, 16, 4, 1)], StateOps(copy=((1, 0),)))
    assert run.ended[1].num_cached_tokens == 16


def test_snapshot_is_found_in_step_that_copies_it():
    """Both copies read the slot of the row that goes on."""
    run = stateful()
    run.admit(0, tokens(1, 19), max_tokens=1)
    run.admit(0, tokens(1, 19), max_tokens=1)
    assert run.step() == [Row(0, 0, 0, 16, 0)]
    assert (run.step(), ops(run)) == ([Row(0, 0, 16, 3, 1), Row(1, 0, 16, 3, 1)], StateOps(copy=((0, 1), (0, 2))))


def test_blocks_without_snapshot_are_computed_again():
    """The junction: the second request sees how far it shares, and keeps the state there for the third."""
    run = stateful()
    run.admit(0, tokens(1, 30), max_tokens=1)
    run.finish()
    run.admit(0, (*tokens(1, 21), *tokens(90, 9)), max_tokens=1)
    assert run.step() == [Row(1, 0, 0, 16, 0)]
    assert run.step() == [Row(1, 0, 16, 8, 0)]
    assert run.step() == [Row(1, 0, 24, 6, 1)]
    run.admit(0, (*tokens(1, 21), *tokens(70, 9)), max_tokens=1)
    assert run.step()[0] == Row(2, 0, 16, 8, 0)


def test_states_are_kept_at_intervals():
    run = stateful(interval=16)
    run.admit(0, tokens(1, 60), max_tokens=1)
    assert [row.num_tokens for rows in run.steps(5) for row in rows] == [16, 16, 16, 8, 4]
    assert run.scheduler.counters.num_snapshots == 4


def test_rows_wait_for_snapshot_and_others_pass():
    run = stateful(max_num_batched_tokens=8)
    for prompt in (tokens(1, 20), tokens(1, 20), tokens(50, 3)):
        run.admit(0, prompt, max_tokens=1)
    assert run.step() == [Row(0, 0, 0, 8, 0)]
    assert run.step() == [Row(0, 0, 8, 8, 0)]
    assert run.waiting() == [(1, 0), (2, 0)]
    assert run.step() == [Row(0, 0, 16, 4, 1), Row(1, 0, 16, 4, 1)]
    run = stateful(max_num_batched_tokens=30)
    for prompt in (tokens(1, 20), tokens(1, 20), tokens(50, 3)):
        run.admit(0, prompt, max_tokens=1)
    assert run.step() == [Row(0, 0, 0, 16, 0), Row(2, 0, 0, 3, 1)]


def test_rows_do_not_wait_for_aborted_row():
    """The next one makes the snapshot, and those behind it wait for that."""
    run = stateful()
    for _ in range(3):
        run.admit(0, tokens(1, 19), max_tokens=1)
    run.step()
    run.abort(0)
    assert run.step() == [Row(1, 0, 0, 16, 0)]
    assert run.waiting() == [(2, 0)]
    run.abort(1)
    run.admit(0, tokens(1, 19), max_tokens=1)
    assert run.step() == [Row(2, 0, 0, 16, 0)]


@pytest.mark.parametrize("ahead", [0, 1])
def test_forks_are_copied_in_next_plan_scheduled_or_not(ahead: int):
    """The budget of the next step is one token, the parent's, which overwrites its state."""
    run = stateful(max_num_seqs=4, max_num_batched_tokens=1, ahead=ahead)
    run.admit(2, n=3, max_tokens=3)
    run.step()
    run.step()
    (row,) = run.step()
    assert row.sample == 0
    assert ops(run) == StateOps(copy=((0, 1), (0, 2)))
    run.finish()


def test_state_is_swapped_with_blocks():
    run = stateful(num_blocks=6, caching=False, preemption="swap", num_host_blocks=8, host_slots=1, max_num_seqs=2)
    for _ in range(2):
        run.admit(8, max_tokens=10)
    while not run.swapped():
        run.step()
    assert (run.last_plan.block_ops.swap_out != (), ops(run)) == (True, StateOps(swap_out=((1, 0),)))
    while not ops(run).swap_in:
        run.step()
    assert run.last_plan.block_ops.swap_in != ()
    run.finish()


@pytest.mark.parametrize("places", [{"host_slots": 0}, {"num_host_blocks": 1}, {"slot_copy_tokens": 100.0}])
def test_blocks_and_state_are_swapped_together_or_not(places: dict[str, float]):
    """Without room for one of the two, or where both together cost more than computing, it is computed again."""
    given = {"preemption": "auto", "block_copy_tokens": 0.0, "num_host_blocks": 8, "host_slots": 1, **places}
    run = stateful(num_blocks=6, caching=False, max_num_seqs=2, **given)
    for _ in range(2):
        run.admit(8, max_tokens=10)
    run.finish()
    counters = run.scheduler.counters
    assert (counters.num_preemptions > 0, counters.num_swapped_out) == (True, 0)


def test_recomputed_row_starts_from_best_snapshot():
    run = stateful(num_blocks=11, max_num_seqs=2)
    for start in (1, 50):
        run.admit(0, tokens(start, 17), max_tokens=8)
    while not run.waiting() or run.scheduler.waiting.first().status is not SequenceStatus.PREEMPTED:
        run.step()
    while run.waiting():
        (*_, last) = run.step()
    assert last == Row(1, 0, 16, 5, 1)


def test_answer_keeps_its_last_state_for_next_turn():
    """One snapshot a row: a later one takes the slot of the one before."""
    run = stateful()
    run.admit(0, tokens(1, 9), max_tokens=25)
    run.finish()
    assert run.slots.num_snapshots == 2
    answer = run.tokens(0)[0]
    run.admit(0, (*tokens(1, 9), *answer, 77, 78), max_tokens=1)
    assert run.step() == [Row(1, 0, 32, 4, 1)]


def test_answers_take_no_slots_of_prompts():
    run = stateful(max_num_seqs=1, snapshot_slots=1)
    for _ in range(2):
        run.admit(0, tokens(1, 19), max_tokens=40)
        run.finish()
    counters = run.scheduler.counters
    assert (counters.num_snapshots, counters.num_snapshot_hits) == (1, 1)
    assert counters.num_snapshots_skipped > 2
    run.scheduler.check_integrity()


def test_oldest_answer_makes_room_for_another():
    run = stateful(max_num_seqs=1, snapshot_slots=2)
    for first in (1, 1, 101):
        run.admit(0, tokens(first, 19), max_tokens=40)
        run.finish()
    assert run.slots.num_snapshots == 2
    run.admit(0, (*tokens(101, 19), *run.tokens(2)[0], 77, 78), max_tokens=1)
    assert run.step()[0].first > 19


def test_snapshot_without_room_is_skipped_and_counted():
    run = stateful(max_num_seqs=1, snapshot_slots=0)
    run.admit(0, tokens(1, 19), max_tokens=1)
    run.finish()
    counters = run.scheduler.counters
    assert (counters.num_snapshots, counters.num_snapshots_skipped) == (0, 1)


@pytest.mark.parametrize("change", [Run.reset_prefix_cache, lambda run: run.set_weight_version(2)])
@pytest.mark.parametrize("num_steps", [1, 2, 3])
def test_changes_forget_snapshots_made_and_to_come(change, num_steps: int):
    run = stateful()
    run.admit(0, tokens(1, 35), max_tokens=3)
    run.steps(num_steps)
    change(run)
    run.finish()
    # The second computes the blocks anew, and the third must not find an older state of the same name beside them.
    for first in (0, 32):
        run.admit(0, tokens(1, 35), max_tokens=1)
        assert run.step()[0].first == first
        run.finish()


def test_row_in_error_takes_its_names_back():
    run = stateful()
    run.admit(0, tokens(1, 19), max_tokens=9)
    run.admit(0, tokens(50, 19), max_tokens=9)
    run.finish(lambda key, position: NON_FINITE if key.request_id == 0 and position > 24 else 5)
    for number, prompt in ((2, tokens(1, 19)), (3, tokens(50, 19))):
        run.admit(0, prompt, max_tokens=1)
        assert run.step()[0].first == (0 if number == 2 else 16)
        run.finish()


def test_models_without_states_have_no_slots():
    run = Run(caching=True)
    run.admit(19, n=2, max_tokens=3)
    run.finish()
    assert ops(run) == StateOps()
    assert run.scheduler.state_slots is None


def test_prompt_in_one_piece_is_not_cut():
    run = stateful(chunked=False)
    run.admit(0, tokens(1, 19), max_tokens=1)
    assert run.step() == [Row(0, 0, 0, 19, 1)]


def test_prompt_that_must_be_computed_finds_and_makes_nothing_twice():
    """Its log-probabilities are wanted, so it starts from zeros, and is not cut where a snapshot is there already."""
    run = stateful()
    for first, number in ((0, 16), (0, 19), (16, 3)):
        run.admit(0, tokens(1, 19), max_tokens=1, prompt_logprobs=0 if number == 19 else None)
        (row,) = run.step()
        assert (row.first, row.num_tokens) == (first, number)
        run.finish()


def test_evicted_blocks_are_loaded_only_up_to_snapshot():
    """Blocks are of use as far as a state is there: with none of them kept, nothing is loaded."""
    run = stateful(num_blocks=10, num_tier_blocks=30)
    for start in (1, 101, 201):
        run.admit(0, tokens(start, 31), max_tokens=1)
        run.finish()
        run.settle()
    run.admit(0, tokens(1, 31), max_tokens=1)
    run.finish()
    assert run.scheduler.counters.num_loaded_blocks == 6
    assert run.ended[3].num_cached_tokens == 24
    run.slots.clear_names()
    run.admit(0, tokens(101, 31), max_tokens=1)
    run.finish()
    assert run.scheduler.counters.num_loaded_blocks == 6
    assert run.ended[4].num_cached_tokens == 0


def test_blocks_outside_are_not_looked_up_without_snapshot():
    """Another engine has saved them, but a state is on this device or nowhere."""
    first, second = (stateful(saves_outside=True) for _ in range(2))
    second.contents.join(first.contents)
    for run in (first, second):
        run.admit(0, tokens(1, 19), max_tokens=1)
        run.finish()
        run.settle()
    assert len(second.contents.outside) == 4
    assert (second.ended[0].num_cached_tokens, second.scheduler.counters.num_loaded_blocks) == (0, 0)


def test_snapshot_of_swapped_row_is_not_waited_for():
    """Hazard: urgent rows wait for the snapshot that a swapped row is to make, and it waits behind them, without end:
    there are more of them than run at once.
    """
    sizes = {"num_blocks": 11, "num_host_blocks": 20, "max_num_seqs": 2, "max_num_batched_tokens": 4}
    run, shared = stateful(**sizes, preemption="swap", host_slots=4), tokens(2, 33)
    run.admit(4, max_tokens=24)
    run.step()
    writer = run.admit(0, shared, priority=5, max_tokens=2)
    run.steps(2)
    for _ in range(4):
        run.admit(0, shared, priority=1, max_tokens=2)
    run.steps(8)
    assert (run.running(), run.swapped()) == ([(0, 0)], [(writer, 0)])
    # Every step computes something.
    run.finish()
    assert sorted(run.ended) == [*range(6)]
    assert run.scheduler.counters.num_swapped_in == 1


def test_integrity_detects_slot_that_is_kept(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(SequenceStates, "release", lambda self, sequence: None)
    run = stateful()
    run.admit(5, max_tokens=5)
    run.admit(5, n=2, max_tokens=1)
    with pytest.raises(AssertionError, match="slot 1 counts 1 owners, 0 sequences own it"):
        run.finish()


def test_tokens_left_by_cut_chunk_have_blocks():
    """A chunk that ends early leaves its tokens to rows that each begin a block, which were not counted."""
    run = stateful(num_blocks=13, max_num_batched_tokens=12, max_model_len=48, interval=8, grid=4, snapshot_slots=0)
    for num_prompt_tokens, max_tokens in ((40, 8), (1, 8), (2, 7), (5, 6), (4, 7)):
        run.admit(num_prompt_tokens, max_tokens=max_tokens)
    run.finish()
