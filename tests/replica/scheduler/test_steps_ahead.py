"""Steps that are decided before the ids of the one before them are read: who goes ahead, and that nobody's answer
depends on it.
"""

import random
from dataclasses import replace
from itertools import count
from typing import Any

import pytest
from mirror_state import mirror_state
from scheduler_runs import EOS, PLAIN_TOKEN, Row, Run

from kv_cache.block import BlockId
from spmd_worker.replica.mirror.mirror import Mirror, MirrorError
from spmd_worker.replica.mirror.plan_check import PlanCheck
from spmd_worker.replica.scheduler.planner import Planner
from spmd_worker.replica.scheduler.stop import StopChecker
from spmd_worker.replica.sequence.metadata import SequenceData, SequenceGroupMetadata
from spmd_worker.replica.sequence.request import Request, RequestId
from spmd_worker.replica.sequence.sampled import NON_FINITE, NOT_READ, SampledIds
from spmd_worker.replica.sequence.sampling_params import SamplingParams
from spmd_worker.replica.sequence.sequence import FinishReason, Sequence, SequenceKey
from spmd_worker.replica.sequence.step import StepPlan
from spmd_worker.replica.sequence.structured_outputs import StructuredOutputsParams


def by_place(key, position):
    """A token that tells whose it is and where."""
    return 1 + 50 * key.request_id + 10 * key.sample_index + position


def ends_at(end: int):
    return lambda key, position: EOS if position == end else PLAIN_TOKEN


def test_sequence_continues_while_its_token_is_being_sampled():
    run = Run(ahead=1)
    run.admit(3, max_tokens=4)
    rows = run.steps(4)
    assert rows == [[Row(0, 0, 0, 3, 1)], [Row(0, 0, 3, 1, 1)], [Row(0, 0, 4, 1, 1)], [Row(0, 0, 5, 1, 1)]]
    assert [run.last_plan.num_ahead, run.last_plan.continuing, run.last_plan.continuing_token_ids] == [1, ((0, 0),), ()]
    # With its last token it ends, whichever that is: no step is decided for it.
    assert not run.scheduler.has_unfinished
    assert run.scheduler.counters.num_computed_tokens == 6


def test_two_steps_are_scheduled_before_first_is_applied():
    """Negative control: with no step ahead the first is applied at once."""
    applied = []
    for ahead in (0, 1):
        run = Run(ahead=ahead)
        run.admit(3)
        run.step()
        applied.append(len(run.scheduler.running[0].output_token_ids))
        run.step()
        applied.append(len(run.scheduler.running[0].output_token_ids))
    assert applied == [1, 2, 0, 1]


def test_tokens_sampled_after_the_end_are_dropped():
    run = Run(ahead=1, caching=True)
    run.admit(6, ignore_eos=False, max_tokens=9)
    run.admit(6, max_tokens=9)
    run.finish(lambda key, position: EOS if (key.request_id, position) == (0, 8) else PLAIN_TOKEN)
    assert run.tokens(0) == [[PLAIN_TOKEN, PLAIN_TOKEN, EOS]]
    assert run.tokens(1) == [[PLAIN_TOKEN] * 9]
    counters = run.scheduler.counters
    assert counters.num_output_tokens == 12
    # The token behind the end was computed.
    assert counters.num_computed_tokens == 6 + 2 + 1 + 6 + 8 - counters.num_cached_prompt_tokens
    run.settle()
    assert run.cache.num_used_blocks == len(run.mirror._groups) == 0


@pytest.mark.parametrize("histories", [False, True], ids=["tokens on the host", "tokens on the device"])
@pytest.mark.parametrize("form", [None, "penalty", "bad words", "form"])
def test_sequence_waits_when_next_step_needs_its_token(form: str | None, histories: bool):
    """A device that keeps histories knows the token, but not what a form makes of it."""
    given = {
        None: {},
        "penalty": {"presence_penalty": 0.5},
        "bad words": {"bad_words_ids": ((4, 5),)},
        "form": {"structured_outputs": StructuredOutputsParams(choice=("a", "b")), "ignore_eos": False},
    }[form]
    run = Run(ahead=1, histories=histories)
    run.admit(3, max_tokens=4, **given)
    run.admit(3, max_tokens=4)
    plans = []
    for _ in range(5):
        run.step()
        plans.append((run.last_plan.num_ahead, [tuple(key) for key in run.last_plan.continuing]))
    both, one, other = [(0, 0), (1, 0)], [(0, 0)], [(1, 0)]
    if form is None or (histories and form != "form"):
        assert plans == [(0, []), (2, both), (2, both), (2, both), (0, [])]
    else:
        assert plans == [(0, []), (1, other), (1, [*other, *one]), (1, other), (0, one)]
    run.finish()
    assert run.tokens(0) == run.tokens(1) == [[PLAIN_TOKEN] * 4]


def test_empty_step_is_not_scheduled_when_all_wait():
    """Negative control: without the rule every other step computes nothing."""
    run = Run(ahead=1)
    run.admit(3, max_tokens=5, presence_penalty=0.5)
    assert [len(run.step()) for _ in range(5)] == [1] * 5
    assert not run.scheduler.has_unfinished
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Planner, "has_ready", lambda self: True)
        run = Run(ahead=1)
        run.admit(3, max_tokens=5, presence_penalty=0.5)
        assert [len(run.step()) for _ in range(5)] == [1, 0, 1, 0, 1]


def test_forks_are_made_before_they_run_ahead():
    run = Run(ahead=1)
    run.admit(3, n=3, max_tokens=4)
    assert run.step() == [Row(0, 0, 0, 3, 3)]
    run.step(by_place)
    run.finish(by_place)
    assert [each[1:] for each in run.tokens(0)] == [
        [1 + 10 * sample + position for position in (4, 5, 6)] for sample in range(3)
    ]


def test_sequences_never_run_ahead_when_blocks_are_short():
    run = Run(ahead=1, num_blocks=7, max_model_len=24)
    for _ in range(2):
        run.admit(3, max_tokens=20)
    run.finish(by_place)
    assert run.scheduler.counters.num_preemptions > 0
    for request in (0, 1):
        assert run.tokens(request) == [[1 + 50 * request + position for position in range(3, 23)]]


def test_aborted_sequence_ahead_leaves_nothing():
    run = Run(ahead=1, caching=True)
    for _ in range(3):
        run.admit(5)
    run.steps(3)
    run.abort(1)
    run.finish(by_place)
    assert [len(run.tokens(request)[0]) for request in (0, 2)] == [8, 8]
    assert run.ended[1].sequences[0].finish_reason is FinishReason.ABORT
    run.settle()
    assert run.cache.num_used_blocks == len(run.mirror._groups) == 0


def test_sequence_without_id_ends_though_ahead():
    run = Run(ahead=1, caching=True)
    run.admit(3)
    run.admit(3)
    run.finish(lambda key, position: NON_FINITE if (key.request_id, position) == (0, 4) else PLAIN_TOKEN)
    assert run.ended[0].sequences[0].finish_reason is FinishReason.ERROR
    assert run.tokens(0) == [[PLAIN_TOKEN]]
    assert run.tokens(1) == [[PLAIN_TOKEN] * 8]


CROWDED = {"num_blocks": 9, "max_num_batched_tokens": 16, "max_model_len": 24, "num_host_blocks": 4}


@pytest.mark.gate("0-*", "1-*", "2-*")
@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_answers_equal_those_of_single_steps(seed: int, caching: bool):
    """Some end by a token that nobody knows before."""
    runs = [Run(preemption="auto", ahead=ahead, caching=caching, **CROWDED) for ahead in (0, 1)]
    for run in runs:
        chance = random.Random(seed)
        for _ in range(20):
            run.admit(
                chance.randint(1, 14),
                n=chance.choice([1, 1, 3]),
                max_tokens=chance.randint(1, 9),
                ignore_eos=chance.choice([True, False]),
                presence_penalty=chance.choice([0.0, 0.0, 0.5]),
            )
        run.finish(lambda key, position: EOS if position % 7 == 5 else by_place(key, position))
        assert run.scheduler.counters.num_preemptions > 0
    first, other = ([run.tokens(request) for request in range(20)] for run in runs)
    assert first == other


def history_of(seed: int, *, caching: bool) -> list[tuple[int, list[Row]]]:
    """A history in which most rows decode, some end early, and blocks are short now and then."""
    run, chance = Run(ahead=1, caching=caching, num_blocks=40, max_num_batched_tokens=24), random.Random(seed)
    steps = []
    for _ in range(12):
        run.admit(chance.randint(1, 20), n=chance.choice([1, 1, 1, 2]), max_tokens=chance.randint(1, 30))
    while run.scheduler.has_unfinished:
        rows = run.step(lambda key, position: EOS if position % 11 == 5 else by_place(key, position))
        steps.append((run.last_plan.num_ahead, rows))
    return steps


@pytest.mark.parametrize("seed", range(4))
def test_rows_decided_together_equal_one_by_one(seed: int, monkeypatch: pytest.MonkeyPatch):
    together = [history_of(seed, caching=caching) for caching in (False, True)]
    assert sum(num_ahead for num_ahead, _ in together[0]) > 50
    monkeypatch.setattr(Planner, "_decide_ahead", lambda self, running, budget, decisions: running)
    assert [history_of(seed, caching=caching) for caching in (False, True)] == together


def test_comparison_detects_rows_left_out(monkeypatch: pytest.MonkeyPatch):
    """Negative control: of those that do not go ahead the first is forgotten in a few steps."""
    expected, decide, calls = history_of(0, caching=False), Planner._decide_ahead, count()

    def forgetful(self: Planner, *given: Any) -> list[Sequence]:
        others = decide(self, *given)
        return others[1:] if next(calls) < 8 else others

    monkeypatch.setattr(Planner, "_decide_ahead", forgetful)
    assert history_of(0, caching=False) != expected


def test_step_test_detects_sequence_ahead_of_last_token(monkeypatch: pytest.MonkeyPatch):
    right = StopChecker.max_output_tokens
    monkeypatch.setattr(StopChecker, "max_output_tokens", lambda self, request: right(self, request) + 1)
    with pytest.raises(AssertionError):
        test_sequence_continues_while_its_token_is_being_sampled()


# The workers' mirror.


def mirrored(num_tokens: int = 3) -> Mirror:
    """Step 1 computes a prompt of which an id is sampled."""
    mirror = Mirror(8, 4, num_steps_ahead=1)
    request = Request(RequestId(0), (1,) * num_tokens, SamplingParams(max_tokens=9), 0)
    data = SequenceData(0, (), (BlockId(0), BlockId(1)), 0, num_tokens, 1)
    mirror.apply(StepPlan(1, (SequenceGroupMetadata(request, (data,)),), num_tokens=num_tokens))
    return mirror


def ahead(step: int) -> StepPlan:
    return StepPlan(step, num_tokens=1, continuing=(SequenceKey(RequestId(0), 0),), num_ahead=1)


def outputs(mirror: Mirror) -> list[int]:
    ((token_ids, _, _),) = mirror_state(mirror).values()
    return list(token_ids)


def test_late_id_reaches_its_own_position():
    before, after = mirrored(), mirrored()
    before.take_sampled(1, SampledIds((7,)))
    before.apply(ahead(2))
    after.apply(ahead(2))
    assert (outputs(before), outputs(after)) == ([7], [NOT_READ])
    after.take_sampled(1, SampledIds((7,)))
    for mirror in (before, after):
        mirror.apply(ahead(3))
        mirror.take_sampled(2, SampledIds((8,)))
        mirror.take_sampled(3, SampledIds((9,)))
        assert outputs(mirror) == [7, 8]
        # A plan that goes on by an id that it brings forgets the one that was read.
        mirror.apply(StepPlan(4, num_tokens=1, continuing=ahead(4).continuing, continuing_token_ids=(9,)))
        mirror.apply(ahead(5))
        assert outputs(mirror) == [7, 8, 9, NOT_READ]


def test_plan_ahead_needs_sample_of_previous_step():
    mirror = mirrored()
    mirror.apply(StepPlan(2))
    with pytest.raises(MirrorError, match=r"continuing .*ahead .*samples"):
        mirror.apply(ahead(3))
    with pytest.raises(MirrorError, match=r"num_ahead is 2, .* 0 to 1,"):
        mirror.apply(StepPlan(3, num_tokens=1, continuing=ahead(3).continuing, num_ahead=2))
    with pytest.raises(MirrorError, match=r"continuing_token_ids is 1 ids, .*expects 0 "):
        mirrored().apply(
            StepPlan(2, num_tokens=1, continuing=ahead(2).continuing, continuing_token_ids=(7,), num_ahead=1)
        )


# What a plan that only goes on is not checked for again.


def decoding_mirror() -> Mirror:
    """Two sequences that have decoded for two steps; the next token of both needs a block."""
    mirror = Mirror(8, 4)
    groups = []
    for number in range(2):
        request = Request(RequestId(number), (1,) * 6, SamplingParams(max_tokens=9), number)
        blocks = (BlockId(2 * number), BlockId(2 * number + 1))
        groups.append(SequenceGroupMetadata(request, (SequenceData(0, (), blocks, 0, 6, 1),)))
    mirror.apply(StepPlan(1, tuple(groups), num_tokens=12))
    for step in (2, 3):
        mirror.apply(further(step))
    return mirror


def further(step: int) -> StepPlan:
    keys = tuple([SequenceKey(RequestId(number), 0) for number in range(2)])
    plan = StepPlan(step, num_tokens=2, continuing=keys, continuing_token_ids=(7, 8))
    if step == 4:
        plan = replace(plan, continuing_blocks=((0, BlockId(4)), (1, BlockId(5))))
    return plan


KEYS = further(4).continuing
OTHER_PLANS = {
    "no block": {"continuing_blocks": ((0, BlockId(4)),)},
    "a block that is none": {"continuing_blocks": ((0, BlockId(4)), (1, BlockId(8)))},
    "a sequence that is none": {"continuing_blocks": ((0, BlockId(4)), (2, BlockId(5)))},
    "two blocks": {"continuing_blocks": ((0, BlockId(4)), (0, BlockId(6)), (1, BlockId(5)))},
    "too few ids": {"continuing_token_ids": (7,)},
    "too many ids": {"continuing_token_ids": (7, 8, 9)},
    "a wrong count": {"num_tokens": 3},
    "another step": {"step": 5},
    "a negative number ahead": {"num_ahead": -1, "continuing_token_ids": (7, 8, 9)},
    "ahead": {"num_ahead": 1, "continuing_token_ids": (8,)},
    "an ended sequence": {"finished_sequences": KEYS[:1]},
    "an ended request": {"finished_request_ids": (RequestId(1),)},
    "twice": {"continuing": (KEYS[0], KEYS[0])},
    "unknown": {"continuing": (KEYS[0], SequenceKey(RequestId(5), 0))},
    "uneven ids": {"continuing_num_ids": (2, -1)},
}


@pytest.mark.parametrize("changes", OTHER_PLANS.values(), ids=OTHER_PLANS)
def test_plan_like_the_last_is_rejected_alike(monkeypatch: pytest.MonkeyPatch, changes: dict[str, object]):
    said, states = [], []
    for _ in range(2):
        mirror = decoding_mirror()
        before = mirror_state(mirror)
        with pytest.raises(MirrorError) as refused:
            mirror.apply(replace(further(4), **changes))
        said.append(str(refused.value))
        assert mirror_state(mirror) == before
        mirror.apply(further(4))
        states.append(mirror_state(mirror))
        monkeypatch.setattr(Mirror, "_is_same_decoding", lambda self, plan, last: False)
    assert said[0] == said[1]
    assert states[0] == states[1]


def test_purely_continuing_plan_skips_full_check():
    mirror = decoding_mirror()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PlanCheck, "check", None)
        rows = mirror.apply(further(4))
    assert [row.sequence.output_token_ids for row in rows] == [[7, 7, 7], [8, 8, 8]]
    assert mirror.apply(further(5)) is rows
