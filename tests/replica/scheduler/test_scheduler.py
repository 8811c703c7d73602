"""What each step computes, literally: joining, chunks, decoding beside prompts, preemption, forks, limits, aborts.

A row of a step is (request, sample, first token, tokens, samples). Blocks hold 4 tokens.
"""

import pytest
from mirror_state import mirror_state
from scheduler_runs import EOS, Row, Run

from kv_cache.block_ops import BlockOps
from kv_cache.cache_manager import CacheManager
from spmd_worker.replica.scheduler import planner as planner_module
from spmd_worker.replica.sequence.events import Close
from spmd_worker.replica.sequence.metadata import SequenceData, SequenceGroupMetadata
from spmd_worker.replica.sequence.outputs import Logprob
from spmd_worker.replica.sequence.request import Request
from spmd_worker.replica.sequence.sampled import NON_FINITE, SampledIds
from spmd_worker.replica.sequence.sampling_params import SamplingParams
from spmd_worker.replica.sequence.sequence import FinishReason, SequenceKey
from spmd_worker.replica.sequence.step import StepPlan, StepResult


def test_first_plan_introduces_requests_with_their_blocks():
    run = Run()
    run.admit(5, max_tokens=3)
    run.admit(3)
    plan = run.scheduler.schedule()
    params = [SamplingParams(max_tokens=count, ignore_eos=True) for count in (3, 8)]
    assert plan == StepPlan(
        step=1,
        groups=(
            SequenceGroupMetadata(Request(0, (1,) * 5, params[0], 0), (SequenceData(0, (), (0, 1), 0, 5, 1),)),
            SequenceGroupMetadata(Request(1, (1,) * 3, params[1], 1), (SequenceData(0, (), (2,), 0, 3, 1),)),
        ),
        num_tokens=8,
    )
    assert run.cache.num_free_blocks == 97


def test_idle_scheduler_gives_numbered_empty_plans():
    run = Run()
    assert run.scheduler.schedule() == StepPlan(step=1)
    assert run.scheduler.schedule() == StepPlan(step=2)
    assert run.scheduler.handle(Close()) is None
    assert not run.scheduler.has_unfinished


def test_request_is_prefilled_decoded_and_freed():
    run = Run()
    run.admit(6, max_tokens=3)
    assert run.steps(4) == [[Row(0, 0, 0, 6, 1)], [Row(0, 0, 6, 1, 1)], [Row(0, 0, 7, 1, 1)], []]
    assert run.tokens(0) == [[9, 9, 9]]
    assert run.ended[0].sequences[0].finish_reason is FinishReason.LENGTH
    assert run.cache.num_used_blocks == 0
    # The mirrors hear of the end in the plan after it.
    assert run.last_plan.finished_sequences == (SequenceKey(0, 0),)
    assert run.last_plan.finished_request_ids == (0,)
    assert len(run.mirror._groups) == 0


def test_long_prompt_is_chunked_and_samples_at_end():
    run = Run(max_num_batched_tokens=8)
    run.admit(20, max_tokens=2)
    assert run.steps(4) == [
        [Row(0, 0, 0, 8, 0)],
        [Row(0, 0, 8, 8, 0)],
        [Row(0, 0, 16, 4, 1)],
        [Row(0, 0, 20, 1, 1)],
    ]


def test_decodes_go_before_prompts_in_token_budget():
    run = Run(max_num_batched_tokens=8)
    run.admit(3)
    run.step()
    run.admit(10)
    run.admit(2)
    assert run.steps(3) == [
        [Row(0, 0, 3, 1, 1), Row(1, 0, 0, 7, 0)],
        [Row(0, 0, 4, 1, 1), Row(1, 0, 7, 3, 1), Row(2, 0, 0, 2, 1)],
        [Row(0, 0, 5, 1, 1), Row(1, 0, 10, 1, 1), Row(2, 0, 2, 1, 1)],
    ]


def test_unchunked_prompt_waits_for_step_that_fits_it():
    run = Run(max_num_batched_tokens=8, chunked=False)
    run.admit(3, max_tokens=3)
    run.step()
    run.admit(8)
    assert run.steps(3) == [[Row(0, 0, 3, 1, 1)], [Row(0, 0, 4, 1, 1)], [Row(1, 0, 0, 8, 1)]]


def test_unfit_request_keeps_later_ones_waiting():
    run = Run(num_blocks=4)
    run.admit(10, max_tokens=2)
    run.admit(9, max_tokens=2)
    run.admit(1, max_tokens=1)
    assert run.step() == [Row(0, 0, 0, 10, 1)]
    assert run.step() == [Row(0, 0, 10, 1, 1)]
    assert run.step() == [Row(1, 0, 0, 9, 1), Row(2, 0, 0, 1, 1)]


def test_prompt_is_admitted_only_with_all_its_blocks():
    run = Run(num_blocks=4, max_num_batched_tokens=8)
    run.admit(6)
    run.step()
    run.admit(12)
    assert run.step() == [Row(0, 0, 6, 1, 1)], "a chunk of 7 tokens would have found its blocks"


def test_running_sequences_never_exceed_max_num_seqs():
    run = Run(max_num_seqs=2)
    for max_tokens in (2, 3, 1):
        run.admit(2, max_tokens=max_tokens)
    assert [[row.request for row in rows] for rows in run.steps(4)] == [[0, 1], [0, 1], [1, 2], []]


def test_watermark_applies_unless_engine_is_empty():
    run = Run(num_blocks=10, watermark=4)
    run.admit(16, max_tokens=2)
    run.admit(12)
    assert run.step() == [Row(0, 0, 0, 16, 1)], "6 blocks are free, 3 are needed and 4 must be left"
    assert run.step() == [Row(0, 0, 16, 1, 1)]
    run = Run(num_blocks=4, watermark=4)
    run.admit(16, max_tokens=1)
    assert run.step() == [Row(0, 0, 0, 16, 1)]


def preempted_run() -> Run:
    """Three requests of 4 tokens and a block each; in the second step each needs another and there is one."""
    run = Run(num_blocks=4)
    for _ in range(3):
        run.admit(4)
    assert run.step() == [Row(0, 0, 0, 4, 1), Row(1, 0, 0, 4, 1), Row(2, 0, 0, 4, 1)]
    run.admit(1)
    assert run.step() == [Row(0, 0, 4, 1, 1), Row(1, 0, 4, 1, 1)]
    return run


def test_tie_preempts_latest_sequence_and_keeps_its_position():
    run = preempted_run()
    assert run.running() == [(0, 0), (1, 0)]
    assert run.waiting() == [(2, 0), (3, 0)], "before the one that came later, which might have fitted"
    assert run.scheduler.counters.num_preemptions == 1
    assert run.scheduler.counters.num_recomputed_tokens == 0, "nothing is computed again yet"
    assert run.cache.num_free_blocks == 0, "request 1 took the block of request 2"


def test_preempted_request_waits_for_all_its_blocks():
    run = preempted_run()
    assert [row.request for row in run.step()] == [0, 1]
    assert run.waiting() == [(2, 0), (3, 0)]


def test_preempted_request_is_recomputed_with_its_tokens():
    run = preempted_run()
    run.abort(1)
    assert run.step() == [Row(0, 0, 5, 1, 1), Row(2, 0, 0, 5, 1)]
    assert run.scheduler.counters.num_recomputed_tokens == 4
    run.finish()
    assert run.tokens(2) == [[9] * 8]


def test_last_request_in_order_preempts_itself():
    run = Run(num_blocks=4)
    run.admit(8, max_tokens=4)
    run.admit(7)
    run.step()
    assert run.step() == [Row(0, 0, 8, 1, 1)], "request 1 lost its two blocks to request 0, which took one"
    assert run.waiting() == [(1, 0)]
    run.finish()
    assert [len(tokens) for request in (0, 1) for tokens in run.tokens(request)] == [4, 8]


def test_half_computed_prompt_restarts_after_preemption():
    run = Run(num_blocks=6, max_num_batched_tokens=12)
    run.admit(8, max_tokens=12)
    run.step()
    run.admit(16, max_tokens=2)
    assert run.step() == [Row(0, 0, 8, 1, 1)], "3 blocks are free, 4 are needed"
    run = Run(num_blocks=6, max_num_batched_tokens=4)
    run.admit(4, max_tokens=16)
    run.step()
    run.admit(15, max_tokens=2)
    rows = [row for rows in run.steps(20) for row in rows if row.request == 1]
    assert [row.first for row in rows][:3] == [0, 3, 6]
    run.finish()
    assert [len(tokens) for request in (0, 1) for tokens in run.tokens(request)] == [16, 2]


def test_samples_share_one_prompt_then_run_separately():
    run = Run()
    run.admit(6, n=3, max_tokens=3)
    assert run.step(lambda key, position: 10 + key.sample_index) == [Row(0, 0, 0, 6, 3)]
    assert run.running() == [(0, 0), (0, 1), (0, 2)]
    assert run.cache.num_used_blocks == 2, "the prompt is shared"
    rows = run.step(lambda key, position: 20 + key.sample_index)
    assert rows == [Row(0, sample, 6, 1, 1) for sample in range(3)]
    # Two copy the half-full block, the last one to write keeps it.
    assert run.last_plan.block_ops == BlockOps(copy=((1, 2), (1, 3)))
    assert run.cache.num_used_blocks == 4
    run.finish(lambda key, position: 30 + key.sample_index)
    assert run.tokens(0) == [[10, 20, 30], [11, 21, 31], [12, 22, 32]]
    assert run.cache.num_used_blocks == 0


def test_fork_at_full_blocks_copies_nothing():
    run = Run()
    run.admit(8, n=3)
    run.steps(2)
    assert run.last_plan.block_ops == BlockOps()
    assert run.cache.num_used_blocks == 2 + 3


def test_unforked_request_counts_all_its_samples():
    run = Run(max_num_seqs=4)
    run.admit(6, n=3, max_tokens=2)
    run.admit(6, n=2, max_tokens=2)
    run.admit(6, max_tokens=2)
    assert [[row[:2] for row in rows] for rows in run.steps(5)] == [
        [(0, 0)],
        [(0, 0), (0, 1), (0, 2)],
        [(1, 0), (2, 0)],
        [(1, 0), (1, 1), (2, 0)],
        [],
    ]


def test_preempted_forks_are_recomputed_separately():
    run = Run(num_blocks=6, max_model_len=24)
    run.admit(6, n=4, max_tokens=10)
    run.finish(lambda key, position: 10 * position + key.sample_index)
    assert run.scheduler.counters.num_preemptions > 0
    assert run.tokens(0) == [[10 * position + sample for position in range(6, 16)] for sample in range(4)]


def test_early_finished_samples_leave_others_running():
    run = Run()
    run.admit(4, n=3, max_tokens=5, stop_token_ids=[7])
    run.step(lambda key, position: 7 if key.sample_index == 1 else 9)
    assert run.running() == [(0, 0), (0, 2)]
    run.finish()
    assert [len(tokens) for tokens in run.tokens(0)] == [5, 1, 5]
    reasons = [sequence.finish_reason for sequence in run.ended[0].sequences]
    assert reasons == [FinishReason.LENGTH, FinishReason.STOP, FinishReason.LENGTH]


def test_abort_removes_waiting_request():
    run = Run(max_num_seqs=1)
    run.admit(4)
    run.admit(4)
    run.step()
    group = run.abort(1)
    assert group is not None
    assert group.sequences[0].finish_reason is FinishReason.ABORT
    assert run.waiting() == []
    run.finish()
    assert sorted(run.ended) == [0, 1]
    assert run.tokens(1) == [[]]


def test_abort_before_first_plan_ends_request():
    run = Run()
    run.admit(4)
    assert run.abort(0) is not None
    assert run.step() == []
    assert run.last_plan.finished_request_ids == (0,)


def test_abort_inside_prompt_frees_its_blocks():
    run = Run(max_num_batched_tokens=8)
    run.admit(20)
    run.step()
    assert run.cache.num_used_blocks == 2
    run.abort(0)
    assert run.cache.num_used_blocks == 0
    assert run.step() == []
    assert len(run.mirror._groups) == 0


def test_abort_while_decoding_keeps_sampled_tokens():
    run = Run()
    run.admit(4)
    run.admit(4)
    run.steps(3)
    run.abort(0)
    assert run.tokens(0) == [[9, 9, 9]]
    assert run.step() == [Row(1, 0, 6, 1, 1)]


def test_abort_removes_preempted_request():
    run = preempted_run()
    run.abort(2)
    assert run.waiting() == [(3, 0)]
    assert run.tokens(2) == [[9]]
    run.finish()
    assert run.cache.num_used_blocks == 0


def test_abort_ends_forks_in_different_states():
    """One sample has ended and one is preempted."""
    run = Run(num_blocks=5, max_model_len=16)
    run.admit(7, n=3, max_tokens=9, stop_token_ids=[7])
    run.step(lambda key, position: 7 if key.sample_index == 0 else 9)
    while not run.waiting():
        run.step()
    group = run.abort(0)
    reasons = [sequence.finish_reason for sequence in group.sequences]
    assert reasons == [FinishReason.STOP, FinishReason.ABORT, FinishReason.ABORT]
    assert run.cache.num_used_blocks == 0
    assert run.waiting() == run.running() == []


def test_abort_of_unknown_or_ended_request_is_ignored():
    run = Run()
    assert run.abort(17) is None
    run.admit(4, max_tokens=1)
    run.step()
    assert run.abort(0) is None
    assert run.ended[0].sequences[0].finish_reason is FinishReason.LENGTH


def test_tokens_sampled_for_aborted_request_are_dropped():
    run = Run()
    run.admit(4, n=2)
    run.admit(4)
    plan = run.scheduler.schedule()
    run.abort(0)
    assert run.scheduler.apply(StepResult(plan.step, (1, 2, 3))) == []
    assert run.scheduler.running[0].output_token_ids == [3]
    run.scheduler.check_integrity()


def test_counters_add_up():
    run = Run(num_blocks=8)
    for length in (4, 5, 6):
        run.admit(length, max_tokens=6, n=2)
    run.finish()
    counters = run.scheduler.counters
    assert counters.num_prompt_tokens == 15
    assert counters.num_output_tokens == 3 * 2 * 6
    assert counters.num_preemptions > 0
    # Each prompt once for two samples, each output token but the last once, and what was computed again.
    once = 15 + 3 * 2 * 5
    assert counters.num_computed_tokens == once + counters.num_recomputed_tokens


def test_request_is_counted_by_the_worst_end_of_its_samples():
    run = Run(num_blocks=32)
    for _ in range(3):
        run.admit(4, max_tokens=6, n=2, ignore_eos=False)
    ends = {(0, 0): EOS, (0, 1): EOS, (1, 0): EOS, (2, 1): NON_FINITE}
    run.finish(lambda key, position: ends.get((key.request_id, key.sample_index), 5))
    run.admit(4, max_tokens=6)
    run.step()
    run.abort(3)
    run.admit(4, max_tokens=6, n=2, repetition_detection={"max_pattern_size": 2, "min_count": 2})
    run.finish(lambda key, position: 5 if key.sample_index else position)
    counters = run.scheduler.counters
    found = (counters.num_finished, counters.num_finished_by_length, counters.num_failed, counters.num_aborted)
    assert (*found, counters.num_finished_by_repetition) == (5, 1, 1, 1, 1)


def test_prompt_logprobs_arrive_by_chunk_and_after_preemption():
    run = Run(max_num_batched_tokens=4, max_num_seqs=2)
    run.admit(6, prompt_logprobs=0, max_tokens=2)
    entries = [None, *({token: Logprob(-float(token), 1)} for token in range(1, 6))]
    plan = run.scheduler.schedule()
    run.scheduler.apply(StepResult(plan.step, (), (), ((0, 0, tuple(entries[:5])),)))
    plan = run.scheduler.schedule()
    run.scheduler.apply(StepResult(plan.step, (9,), (), ((0, 5, (entries[5],)),)))
    plan = run.scheduler.schedule()
    again = tuple({token: Logprob(-token - 0.5, 1)} for token in range(1, 4))
    (group,) = run.scheduler.apply(StepResult(plan.step, (9,), (), ((0, 1, again),)))
    assert group.prompt_logprobs == [None, *again, *entries[4:]]


def test_logprobs_are_kept_and_summed_per_sample():
    run = Run()
    run.admit(4, n=2, logprobs=0, max_tokens=2)
    run.admit(4, max_tokens=1)
    values = [{5: Logprob(-1.0, 1)}, {6: Logprob(-2.0, 2)}, None]
    plan = run.scheduler.schedule()
    run.scheduler.apply(StepResult(plan.step, (5, 6, 7), tuple(values)))
    plan = run.scheduler.schedule()
    (group,) = run.scheduler.apply(StepResult(plan.step, (6, 5), ({6: Logprob(-0.5, 1)}, {5: Logprob(-0.25, 1)})))
    assert [sequence.cumulative_logprob for sequence in group.sequences] == [-1.5, -2.25]
    assert [len(sequence.logprobs) for sequence in group.sequences] == [2, 2]


def test_victim_check_detects_victim_that_is_not_last(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(planner_module, "choose_victim", lambda sequences: sequences[-2 % len(sequences)])
    with pytest.raises(AssertionError):
        preempted_run()


def test_integrity_check_detects_lost_blocks(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(CacheManager, "release", lambda self, table: table.block_ids.clear())
    run = Run()
    run.admit(4, max_tokens=2)
    with pytest.raises(AssertionError, match="0 tables list it"):
        run.finish()


def give(run: Run, *rows: tuple[int, ...]) -> StepPlan:
    """One step that gives each sequence it samples for these ids; its plan, checked by the mirror."""
    plan = run.scheduler.schedule()
    run.mirror.apply(plan)
    ids = SampledIds.from_rows(rows)
    for group in run.scheduler.apply(StepResult(plan.step, ids.token_ids, num_token_ids=ids.num_ids)):
        run.ended[group.request.request_id] = group
    run.scheduler.check_integrity()
    return plan


def test_sequences_continue_by_none_one_or_several_ids():
    run = Run()
    for _ in range(3):
        run.admit(5)
    keys = ((0, 0), (1, 0), (2, 0))
    give(run, (), (11,), (21, 22, 23))
    plan = give(run, (1,), (), (24,))
    assert (plan.continuing, plan.groups, plan.num_tokens) == (keys, (), 1 + 1 + 3)
    assert (plan.continuing_token_ids, plan.continuing_num_ids) == ((11, 21, 22, 23), (0, 1, 3))
    plan = give(run, (2,), (12,), (25,))
    assert (plan.continuing_token_ids, plan.continuing_num_ids) == ((1, 24), (1, 0, 1))
    plan = give(run, (3,), (13,), (26,))
    # All were given one: as if nothing had been.
    assert (plan.continuing_token_ids, plan.continuing_num_ids, plan.num_tokens) == ((2, 12, 25), (), 3)
    outputs = [sequence.output_token_ids for sequence in run.scheduler.running]
    assert outputs == [[1, 2, 3], [11, 12, 13], [21, 22, 23, 24, 25, 26]]


def test_sequence_without_new_id_recomputes_its_last_token():
    run = Run()
    run.admit(4)
    give(run, (7,))
    first, second = give(run, ()), give(run, (8,))
    assert first.num_tokens == second.num_tokens == 1
    assert (second.continuing, second.continuing_num_ids) == (((0, 0),), (0,))
    assert mirror_state(run.mirror)[0, 0][2] == run.scheduler.running[0].num_computed_tokens == 5


def test_several_ids_allocate_all_blocks_they_reach():
    run = Run()
    run.admit(4, max_tokens=20)
    give(run, tuple(range(9)))
    plan = give(run, (9,))
    assert plan.continuing_num_ids == (9,)
    assert [index for index, _ in plan.continuing_blocks] == [0, 0, 0]


def test_ids_beyond_token_budget_are_computed_in_chunks():
    run = Run(max_num_batched_tokens=4, max_num_seqs=2)
    run.admit(4, max_tokens=20)
    give(run, tuple(range(6)))
    plan = give(run)
    (data,) = plan.groups[0].sequences
    assert (data.appended_token_ids, data.num_scheduled_tokens, data.num_samples) == ((0, 1, 2, 3, 4, 5), 4, 0)
    plan = give(run, (6,))
    assert (plan.num_tokens, plan.groups[0].sequences[0].appended_token_ids) == (2, ())
    assert give(run, (7,)).continuing_token_ids == (6,)


@pytest.mark.parametrize(
    ("sampling", "output", "reason"),
    [
        ({"stop_token_ids": [12]}, [11, 12], FinishReason.STOP),
        ({"max_tokens": 2}, [11, 12], FinishReason.LENGTH),
        ({"stop_token_ids": [12], "min_tokens": 3}, [11, 12, 12], FinishReason.STOP),
        ({"stop_token_ids": [14], "max_tokens": 4}, [11, 12, 12, 13], FinishReason.LENGTH),
    ],
)
def test_stop_condition_cuts_inside_the_ids_of_step(sampling, output, reason):
    run = Run()
    run.admit(4, **sampling)
    run.admit(4)
    give(run, (11, 12, 12, 13, 14), (1, 2, 3))
    (sequence,) = run.ended[0].sequences
    assert (sequence.output_token_ids, sequence.finish_reason) == (output, reason)
    assert run.scheduler.counters.num_output_tokens == len(output) + 3
    # What the others were given is theirs, also where the one before was cut.
    plan = give(run, (4,))
    assert (plan.finished_request_ids, plan.continuing, plan.continuing_token_ids) == ((0,), ((1, 0),), (1, 2, 3))


def test_forks_receive_their_own_ids():
    run = Run()
    run.admit(5, n=3)
    give(run, (1, 2), (), (31,))
    give(run, (3,), (21, 22), (32,))
    give(run, (4,), (), (33,))
    outputs = {each.sample_index: each.output_token_ids for each in run.scheduler.running}
    assert outputs == {0: [1, 2, 3, 4], 1: [21, 22], 2: [31, 32, 33]}


def test_logprobs_follow_the_ids_that_are_kept():
    run = Run()
    run.admit(4, logprobs=0, max_tokens=2)
    run.admit(4)
    plan = run.scheduler.schedule()
    entries = ({5: Logprob(-1.0, 1)}, {6: Logprob(-2.0, 1)}, {7: Logprob(-4.0, 1)}, None)
    (group,) = run.scheduler.apply(StepResult(plan.step, (5, 6, 7, 8), entries, num_token_ids=(3, 1)))
    assert group.sequences[0].cumulative_logprob == -3.0
    assert group.sequences[0].logprobs == list(entries[:2])
    assert run.scheduler.running[0].output_token_ids == [8]
