"""Drafts of decoding sequences: whoever drafts whatever, rows get the tokens that they get without, and no other row
finds a block whose drafts were not verified.

Every step is done to a cache with contents, where drafts are written behind a row's tokens (`visible_cache.py`).
"""

import random
from functools import cache, partial
from typing import Any

import pytest
import scheduler_runs
from histories import MAX_MODEL_LEN, limits, new_run, operations, play, prompt_of, random_history
from hypothesis import given, settings
from hypothesis import strategies as st
from planted_drafts import KINDS, PlantedProposer, chance_of
from scheduler_runs import EOS, VOCAB_SIZE, Row, Run, cached_run

from spmd_worker.replica.mirror import plan_check
from spmd_worker.replica.mirror.mirror import MirrorError
from spmd_worker.replica.scheduler import scheduler as scheduler_module
from spmd_worker.replica.scheduler.drafting import Drafting
from spmd_worker.replica.sequence.sequence import FinishReason

PLAIN = {"num_blocks": 12, "max_num_batched_tokens": 16, "max_model_len": MAX_MODEL_LEN, "step_tokens": 16}
LAYOUTS: dict[str, dict[str, Any]] = {
    "crowded": PLAIN,
    "cached": {**PLAIN, "caching": True},
    "swapped": {**PLAIN, "caching": True, "preemption": "swap", "num_host_blocks": 8, "num_tier_blocks": 12},
    "ahead": {**PLAIN, "caching": True, "ahead": 1},
    "stages": {**PLAIN, "caching": True, "virtual_engines": 2},
    "roomy": {**PLAIN, "num_blocks": 100, "max_num_batched_tokens": 100, "step_tokens": 100},
}


def sampled(key: tuple[int, int], position: int) -> int:
    """The token of a sequence at a position, often the same in all."""
    return 1 + position % 3 if chance_of(*key, position) % 4 else 1 + chance_of(*key, position) % 5


def drafted_run(kind: str, values=sampled, make=Run, **options: Any) -> Run:
    """Drafts are right by `values`. The run's request ids count from 0."""
    prompts: dict[int, int] = {}

    def right(key, num_outputs: int, most: int) -> list[int]:
        first = prompts[key.request_id] + num_outputs
        return [values(key, first + index) for index in range(most)]

    proposer = PlantedProposer(right, kind, VOCAB_SIZE)
    run = make(drafts=3, proposer=proposer, **options)
    admit = run.admit

    def noted(num_prompt_tokens: int, prompt: tuple[int, ...] | None = None, *rest: Any, **sampling: Any) -> int:
        request_id = admit(num_prompt_tokens, prompt, *rest, **sampling)
        prompts[request_id] = len(prompt or ()) or num_prompt_tokens
        return request_id

    run.admit = noted
    return run


def answers(run: Run, seed: int) -> list[list[list[int]]]:
    random_history(seed, run, sampled)
    return [run.tokens(index) for index in range(25)]


@cache
def plain_answers(layout: str) -> tuple[list[list[list[int]]], Run]:
    run = Run(**{name: value for name, value in LAYOUTS[layout].items() if name != "step_tokens"})
    return answers(run, 1), run


@pytest.mark.gate("chance-*", "right-stages", "wrong-swapped")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS[:3])
def test_planted_drafts_change_no_token(kind: str, layout: str):
    run, (expected, plain) = drafted_run(kind, **LAYOUTS[layout]), plain_answers(layout)
    assert answers(run, 1) == expected
    counters = run.scheduler.counters
    assert counters.num_output_tokens == plain.scheduler.counters.num_output_tokens
    assert (counters.num_accepted_tokens > 0) == (kind != "wrong")
    assert (counters.num_accepted_tokens == counters.num_drafted_tokens) == (kind == "right")
    assert sum(counters.num_accepted_by_position) == counters.num_accepted_tokens
    if kind == "right":
        assert counters.num_steps < plain.scheduler.counters.num_steps


@pytest.mark.parametrize("layout", ["crowded", "swapped"])
def test_drafts_cause_no_more_preemptions(layout: str):
    options = LAYOUTS[layout]
    for seed in range(2):
        wrong, none = drafted_run("wrong", **options), drafted_run("none", **options)
        answers(wrong, seed)
        answers(none, seed)
        assert wrong.scheduler.counters.num_drafted_tokens > 20
        preemptions = [run.scheduler.counters.num_preemptions for run in (wrong, none)]
        assert preemptions[0] <= preemptions[1], seed
        assert preemptions[1] > 0


def test_right_drafts_are_kept_in_one_step():
    run = drafted_run("right", values=lambda key, position: 7)
    run.admit(4, max_tokens=8)
    assert run.step(7) == [Row(0, 0, 0, 4, 1)]
    # One given token and three drafts; four are right with the id after the last.
    assert run.step(7) == [Row(0, 0, 4, 4, 1)]
    (sequence,) = run.scheduler.running
    assert (len(sequence.output_token_ids), sequence.num_computed_tokens) == (5, 8)
    # Three are left: the last comes without a draft.
    assert run.step(7) == [Row(0, 0, 8, 3, 1)]
    assert run.tokens(0) == [[7] * 8]
    counters = run.scheduler.counters
    assert (counters.num_drafts, counters.num_drafts_by_position) == (2, [2, 2, 1])
    assert counters.num_accepted_by_position == [2, 2, 1]


def test_wrong_drafts_leave_a_row_where_it_was():
    run = drafted_run("wrong", values=lambda key, position: 7, caching=True)
    run.admit(4, max_tokens=4)
    run.step(7)
    assert run.step(7) == [Row(0, 0, 4, 3, 1)]
    (sequence,) = run.scheduler.running
    assert (sequence.output_token_ids, sequence.num_computed_tokens, sequence.num_hashed_blocks) == ([7, 7], 5, 1)
    # Blocks of the drafts are kept for the tokens to come.
    assert sequence.table.num_blocks == 2
    run.finish(7)
    assert run.tokens(0) == [[7] * 4]


def test_drafts_end_with_the_token_that_ends_a_row():
    run = drafted_run("right", values=lambda key, position: EOS if position == 6 else 7)
    run.admit(4, max_tokens=8, ignore_eos=False)
    run.finish(lambda key, position: EOS if position == 6 else 7)
    assert run.tokens(0) == [[7, 7, EOS]]
    assert run.ended[0].sequences[0].finish_reason is FinishReason.STOP
    assert run.scheduler.counters.num_output_tokens == 3


def test_prompt_chunks_and_decoding_rows_share_a_step():
    run = drafted_run("right", values=lambda key, position: 7, max_num_batched_tokens=8, step_tokens=8)
    run.admit(3, max_tokens=20)
    run.step(7)
    run.admit(30, max_tokens=2)
    # What the prompt wants is more than a step's tokens: no drafts.
    assert run.step(7) == [Row(0, 0, 3, 1, 1), Row(1, 0, 0, 7, 0)]
    for _ in range(3):
        run.step(7)
    assert run.scheduler.counters.num_drafted_tokens == 0
    run.finish(7)
    assert run.scheduler.counters.num_drafted_tokens > 0


def test_rule_decides_by_step_tokens():
    run = drafted_run("right", step_tokens=4)
    for _ in range(4):
        run.admit(2, max_tokens=6)
    run.finish(sampled)
    assert run.scheduler.counters.num_drafted_tokens == 0


@pytest.mark.parametrize("draft", [VOCAB_SIZE, -1])
def test_draft_beyond_the_vocabulary_is_refused(draft: int):
    run = drafted_run("right", values=lambda key, position: draft)
    run.admit(4, max_tokens=8)
    run.step(7)
    with pytest.raises(ValueError, match=f"token ids below {VOCAB_SIZE}"):
        run.step(7)


def test_more_drafts_than_asked_are_refused():
    run = drafted_run("right")
    run.scheduler._drafting._proposer.propose = lambda sequence, most: (7,) * (most + 1)
    run.admit(4, max_tokens=8)
    run.step(7)
    with pytest.raises(ValueError, match="4 drafts were proposed, and 3 are the most"):
        run.step(7)


def test_workers_drafts_are_taken_once():
    run = Run(drafts=3, lookahead=3)
    run.worker_drafts = lambda key, position: (7, 7, 8)
    run.admit(4, max_tokens=12)
    run.step(7)
    # No row decoded yet, so the workers were not asked.
    assert not run.last_plan.wants_drafts
    assert run.step(7) == [Row(0, 0, 4, 1, 1)]
    assert run.last_plan.wants_drafts
    (sequence,) = run.scheduler.running
    # For the given token, and three more after it.
    assert sequence.table.num_blocks == 2
    assert run.step(7) == [Row(0, 0, 5, 4, 1)]
    assert (sequence.worker_drafts, sequence.drafts) == ((7, 7, 8), ())
    assert (sequence.num_drafted, sequence.num_accepted) == (3, 2)
    run.worker_drafts = lambda key, position: ()
    run.finish(7)
    assert run.tokens(0) == [[7] * 12]


def test_step_after_workers_draft_waits_for_ids():
    """Rows must not go ahead while the workers draft from their tokens: the one row that may have drafts is preempted
    in the step that wants them, and the drafts of the other fail.
    """
    run = Run(drafts=3, lookahead=3, ahead=1, num_blocks=6)
    run.worker_drafts = lambda key, position: ()
    run.admit(8, max_tokens=16)
    run.admit(5, max_tokens=16)
    num_preempted_in = []
    while run.scheduler.has_unfinished:
        for sequence in run.scheduler.running[:1]:
            sequence.num_drafted, sequence.num_accepted = 60, 0
        before = run.scheduler.counters.num_preemptions
        run.step(7)
        if run.last_plan.wants_drafts:
            assert not run._in_flight
            num_preempted_in.append(run.scheduler.counters.num_preemptions - before)
    assert sum(num_preempted_in) > 0


@pytest.mark.parametrize("limits", [{"max_tokens": 5}, {"max_tokens": 60}], ids=["max_tokens", "max_model_len"])
def test_workers_drafts_past_the_end_of_a_row_are_cut(limits: dict[str, int]):
    run = Run(drafts=3, lookahead=3, max_model_len=9)
    run.worker_drafts = lambda key, position: (7, 7, 7)
    run.admit(4, **limits)
    run.step(7)
    assert run.step(7) == [Row(0, 0, 4, 1, 1)]
    # Three tokens are left: the last comes without a draft.
    assert run.step(7) == [Row(0, 0, 5, 3, 1)]
    assert run.tokens(0) == [[7] * 5]


def test_proposer_forgets_rows_that_end():
    run = drafted_run("right")
    first = run.admit(4, n=2, max_tokens=3)
    run.admit(4, max_tokens=9)
    run.steps(4)
    run.abort(1)
    assert first in run.ended
    assert run.scheduler._drafting._proposer.num_forgotten == 3


@pytest.mark.parametrize("ahead", [0, 1])
def test_step_with_drafts_waits_for_ids(ahead: int):
    """Negative control: steps without drafts are decided ahead."""
    run, plain = drafted_run("right", ahead=ahead), Run(ahead=ahead)
    nums_ahead = []
    for each in (run, plain):
        each.admit(4, max_tokens=9)
        seen = 0
        while each.scheduler.has_unfinished:
            each.step(sampled)
            seen += each.last_plan.num_ahead
        nums_ahead.append(seen)
    assert nums_ahead[0] == 0
    assert (nums_ahead[1] > 0) == bool(ahead)
    assert run.tokens(0) == plain.tokens(0)


def test_block_of_unverified_drafts_is_found(monkeypatch: pytest.MonkeyPatch):
    """Negative control: drafts count as computed though they are not the row's tokens, and another row reads them."""
    for module in (scheduler_module, plan_check):
        monkeypatch.setattr(module, "num_equal", lambda drafts, token_ids: min(len(drafts), len(token_ids)))
    monkeypatch.setattr(scheduler_runs, "_verified", lambda values, key, position, drafts: [7] * (len(drafts) + 1))
    run = drafted_run("wrong", values=lambda key, position: 7, make=cached_run, block_size=2)
    run.admit(4, (1, 2, 3, 4), max_tokens=5)
    for _ in range(2):
        run.step(7)
    run.admit(9, (1, 2, 3, 4, 7, 7, 7, 7, 5), max_tokens=2)
    scheduler_runs.without_block_check(monkeypatch)
    with pytest.raises(AssertionError, match="follows"):
        run.finish(7)


def test_drafts_accepted_unseen_are_rejected(monkeypatch: pytest.MonkeyPatch):
    """Negative control: the mirror knows the drafts, and sees that they are not the row's tokens."""
    monkeypatch.setattr(scheduler_module, "num_equal", lambda drafts, token_ids: len(drafts))
    run = drafted_run("wrong", values=lambda key, position: 7)
    run.admit(4, max_tokens=9)
    run.steps(2)
    with pytest.raises((MirrorError, AssertionError)):
        run.finish(7)


@pytest.mark.parametrize("gives_back", [True, False])
def test_blocks_of_drafts_are_given_back(gives_back: bool, monkeypatch: pytest.MonkeyPatch):
    """Negative control: else a row is preempted for blocks that hold nothing."""
    if not gives_back:
        monkeypatch.setattr(Drafting, "give_back", lambda self, running: False)
    run = drafted_run("wrong", values=lambda key, position: 7, num_blocks=3)
    run.admit(2, max_tokens=4)
    run.admit(3, max_tokens=3)
    run.finish(7)
    assert run.scheduler.counters.num_preemptions == (not gives_back)
    assert (run.tokens(0), run.tokens(1)) == ([[7] * 4], [[7] * 3])


drafting_limits = st.tuples(
    limits,
    st.sampled_from(KINDS[:3]),
    st.fixed_dictionaries({"step_tokens": st.sampled_from([6, 13, 60]), "lookahead": st.sampled_from([0, 0, 3])}),
)


def keeps_answers(given_limits: tuple[dict[str, Any], str, dict[str, Any]], done: list[Any]) -> None:
    plain_limits, kind, drafting = given_limits
    values = by_position(random.Random(3).randint(1, 9))
    runs = []
    for options, make in (({}, Run), (drafting, partial(drafted_run, kind, values))):
        run = new_run({**plain_limits, **options}, make)
        asked = play(run, done, values)
        run.settle()
        assert run.cache.num_used_blocks == run.cache.num_used_host_blocks == 0
        runs.append((run, asked))
    (plain, _), (run, asked) = runs
    for request_id in asked:
        groups = [each.ended[request_id] for each in (plain, run)]
        for first, second in zip(*[group.sequences for group in groups], strict=False):
            if FinishReason.ABORT not in (first.finish_reason, second.finish_reason):
                assert first.output_token_ids == second.output_token_ids, prompt_of(asked[request_id])


def by_position(shift: int):
    """The token of a sequence at a position: one in nine ends it."""
    return lambda key, position: EOS if chance_of(*key, position, shift) % 9 == 0 else 1 + position % 3


@settings(max_examples=15)
@given(drafting_limits, operations)
def test_any_history_with_drafts_keeps_answers(given_limits: Any, done: list[Any]):
    keeps_answers(given_limits, done)


@pytest.mark.stress
@settings(max_examples=1_000)
@given(drafting_limits, operations)
def test_many_more_histories_with_drafts_keep_answers(given_limits: Any, done: list[Any]):
    keeps_answers(given_limits, done)
