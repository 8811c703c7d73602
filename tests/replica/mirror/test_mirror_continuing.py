"""Decoding that continues in the mirror: keys and ids are enough; what does not follow is refused before anything
changed.
"""

import copy
import dataclasses

import pytest
from mirror_state import mirror_state
from step_records import every_change
from test_mirror import BLOCK_SIZE, COPY_FOR_FORK, NUM_BLOCKS, delta, frozen, plan, snapshot

from spmd_worker.replica.mirror.last_rows import LastRows
from spmd_worker.replica.mirror.mirror import Mirror, MirrorError
from spmd_worker.replica.sequence.metadata import SequenceData, SequenceDataDelta
from spmd_worker.replica.sequence.sampled import SampledIds
from spmd_worker.replica.sequence.sequence import SequenceKey
from spmd_worker.replica.sequence.step import StepPlan

KEY_OF_1, FORK_OF_1, KEY_OF_2, KEY_OF_3 = (
    SequenceKey(1, 0),
    SequenceKey(1, 1),
    SequenceKey(2, 0),
    SequenceKey(3, 0),
)


@pytest.fixture
def mirror() -> Mirror:
    """After step 7: 1 and 3 have sampled, 3 at the end of its only block; of 2 the first 3 of 6 tokens are computed."""
    mirror = Mirror(NUM_BLOCKS, BLOCK_SIZE)
    mirror.apply(
        plan(
            7,
            snapshot(1, SequenceData(0, (), (0, 1), 0, 5, 1), n=3),
            snapshot(2, SequenceData(0, (), (2,), 0, 3, 0), num_prompt_tokens=6),
            snapshot(3, SequenceData(0, (), (5,), 0, 4, 1), num_prompt_tokens=4),
        )
    )
    return mirror


def steady(step: int, *rows: tuple[SequenceKey, int], groups=(), blocks=(), **fields) -> StepPlan:
    """Sequences that go on, each with the id it appends; then groups."""
    whole = plan(step, *groups)
    changes = {
        "continuing": tuple(key for key, _ in rows),
        "continuing_token_ids": tuple(token_id for _, token_id in rows),
        "continuing_blocks": tuple(blocks),
        "num_tokens": len(rows) + whole.num_tokens,
    }
    return dataclasses.replace(whole, **{**changes, **fields})


CHUNK_OF_2 = delta(2, SequenceDataDelta(0, (), 1, (3,), 3, 3, 1))
COPY_OF_1 = delta(1, SequenceDataDelta(0, (50,), 1, (8,), 5, 1, 1))
FIRST_OF_FORK = delta(1, SequenceDataDelta(1, (60,), 0, (0, 4), 5, 1, 1))
BOTH = ((KEY_OF_1, 50), (KEY_OF_3, 70))


def test_sequence_continues_with_one_token(mirror):
    (row,) = mirror.apply(steady(8, (KEY_OF_1, 50)))
    assert (row.sequence.request.request_id, row.num_scheduled_tokens, row.num_samples) == (1, 1, 1)
    assert (row.sequence.num_computed_tokens, row.sequence.num_scheduled_tokens) == (5, 1)
    assert row.sequence.token_ids(4, 6) == [104, 50]
    assert mirror_state(mirror)[KEY_OF_1] == ((50,), (0, 1), 6)
    assert mirror_state(mirror)[KEY_OF_2] == ((), (2,), 3)


def test_block_is_appended_to_sequence_at_its_index(mirror):
    mirror.apply(steady(8, *BOTH, blocks=[(1, 9)]))
    assert mirror_state(mirror)[KEY_OF_1] == ((50,), (0, 1), 6)
    assert mirror_state(mirror)[KEY_OF_3] == ((70,), (5, 9), 5)


def test_rows_come_in_plan_order_continuing_first(mirror):
    rows = mirror.apply(steady(8, *BOTH[::-1], groups=[CHUNK_OF_2], blocks=[(0, 9)]))
    assert [(row.sequence.request.request_id, row.num_scheduled_tokens) for row in rows] == [(3, 1), (1, 1), (2, 3)]


def test_parent_continues_while_fork_is_introduced(mirror):
    mirror.apply(steady(8, (KEY_OF_1, 50), groups=[FIRST_OF_FORK], block_ops=COPY_FOR_FORK))
    mirror.apply(steady(9, (KEY_OF_1, 51), (FORK_OF_1, 61)))
    assert mirror_state(mirror)[KEY_OF_1] == ((50, 51), (0, 1), 7)
    assert mirror_state(mirror)[FORK_OF_1] == ((60, 61), (0, 4), 7)


def test_sequence_continues_while_sibling_comes_as_snapshot(mirror):
    mirror.apply(steady(8, (KEY_OF_1, 50), groups=[FIRST_OF_FORK], block_ops=COPY_FOR_FORK))
    whole = snapshot(1, SequenceData(1, (60, 61), (6, 7), 0, 7, 1), n=3)
    first, second = mirror.apply(steady(9, (KEY_OF_1, 51), groups=[whole]))
    assert first.sequence.output_token_ids == [50, 51]
    assert second.sequence.output_token_ids == [60, 61]
    assert first.sequence.request is second.sequence.request is whole.request


def test_continuing_decode_equals_deltas(mirror):
    """Golden relation: 20 steps of one sequence, told in either way."""
    other = Mirror(NUM_BLOCKS, BLOCK_SIZE)
    other.apply(plan(7, snapshot(1, SequenceData(0, (), (0, 1), 0, 5, 1), n=3)))
    for number in range(20):
        length = 5 + number
        num_blocks = max(2, -(-length // BLOCK_SIZE))
        taken = () if length < num_blocks * BLOCK_SIZE else (num_blocks,)
        mirror.apply(steady(8 + number, (KEY_OF_1, number), blocks=[(0, block) for block in taken]))
        told = SequenceDataDelta(0, (number,), num_blocks, taken, length, 1, 1)
        other.apply(plan(8 + number, delta(1, told)))
        assert mirror_state(mirror)[KEY_OF_1] == mirror_state(other)[KEY_OF_1]


def test_ended_sequence_is_forgotten_while_others_continue(mirror):
    ended = {"finished_sequences": (KEY_OF_3,), "finished_request_ids": (3,)}
    mirror.apply(steady(8, (KEY_OF_1, 50), **ended))
    assert list(mirror_state(mirror)) == [KEY_OF_1, KEY_OF_2]


GOOD = steady(8, *BOTH, groups=[CHUNK_OF_2], blocks=[(1, 9)])

REFUSALS = {
    "an unknown request": (
        steady(8, (SequenceKey(4, 0), 50)),
        "step 8, request 4, sample 0: field continuing is unknown, the mirror expects a sequence that it holds",
    ),
    "an unknown sample of a known request": (
        steady(8, (KEY_OF_1, 50), (FORK_OF_1, 60)),
        "step 8, request 1, sample 1: field continuing is unknown, the mirror expects a sequence that it holds",
    ),
    "a sequence inside its prompt": (
        steady(8, (KEY_OF_1, 50), (KEY_OF_2, 60)),
        "step 8, request 2, sample 0: field continuing is computed to 3, the mirror expects computed to 6, its",
    ),
    "no block for the token": (
        steady(8, *BOTH),
        "request 3, sample 0: field continuing is without a block for token 4, the mirror expects a block for it",
    ),
    "a block at another's place": (
        steady(8, *BOTH, blocks=[(0, 9)]),
        "request 3, sample 0: field continuing is without a block for token 4, the mirror expects a block for it",
    ),
    "a block beyond the cache": (
        steady(8, *BOTH, blocks=[(1, NUM_BLOCKS)]),
        "step 8: field continuing_blocks is 10, the mirror expects from 0 to 9",
    ),
    "a negative block": (
        steady(8, *BOTH, blocks=[(1, -1)]),
        "step 8: field continuing_blocks is -1, the mirror expects from 0 to 9",
    ),
    "a place beyond the rows": (
        steady(8, *BOTH, blocks=[(1, 9), (2, 8)]),
        r"step 8: field continuing_blocks is at indices \[1, 2\], the mirror expects different ones from 0 to 1",
    ),
    "a negative place": (
        steady(8, *BOTH, blocks=[(1, 9), (-2, 8)]),
        r"step 8: field continuing_blocks is at indices \[1, -2\], the mirror expects different ones from 0 to 1",
    ),
    "a place given twice": (
        steady(8, *BOTH, blocks=[(1, 9), (1, 8)]),
        r"step 8: field continuing_blocks is at indices \[1, 1\], the mirror expects different ones from 0 to 1",
    ),
    "a block for nobody": (
        steady(8, blocks=[(0, 9)]),
        r"step 8: field continuing_blocks is at indices \[0\], the mirror expects different ones from 0 to -1",
    ),
    "a sequence listed twice": (
        steady(8, (KEY_OF_1, 50), (KEY_OF_1, 51)),
        "step 8: field continuing is a list with one sequence twice",
    ),
    "a sequence that goes on and is told of": (
        steady(8, (KEY_OF_1, 50), groups=[COPY_OF_1]),
        "step 8, request 1, sample 0: field continuing is also in groups, the mirror expects one or the other",
    ),
    "a sequence that goes on and is told whole": (
        steady(8, (KEY_OF_3, 70), groups=[snapshot(3, SequenceData(0, (), (6,), 0, 4, 1))], blocks=[(0, 9)]),
        "step 8, request 3, sample 0: field continuing is also in groups, the mirror expects one or the other",
    ),
    "a sequence that goes on and has ended": (
        steady(8, (KEY_OF_1, 50), finished_sequences=(KEY_OF_1,)),
        "step 8, request 1, sample 0: field continuing is also finished, the mirror expects one or the other",
    ),
    "a sequence that goes on and whose request has ended": (
        steady(8, (KEY_OF_1, 50), finished_request_ids=(3, 1)),
        "step 8, request 1, sample 0: field continuing is also finished, the mirror expects one or the other",
    ),
    "an id too few": (
        steady(8, *BOTH, blocks=[(1, 9)], continuing_token_ids=(50,)),
        "step 8: field continuing_token_ids is 1 ids, the mirror expects 2 for the 2",
    ),
    "an id too many": (
        steady(8, *BOTH, blocks=[(1, 9)], continuing_token_ids=(50, 70, 90)),
        "step 8: field continuing_token_ids is 3 ids, the mirror expects 2 for the 2",
    ),
    "ids of nobody": (
        steady(8, continuing_token_ids=(50,)),
        "step 8: field continuing_token_ids is 1 ids, the mirror expects 0 for the 0",
    ),
    "a count without those that go on": (
        steady(8, (KEY_OF_1, 50), groups=[CHUNK_OF_2], num_tokens=3),
        "step 8: field num_tokens is 3, the mirror expects 4",
    ),
    "a fault in the groups after those that go on": (
        steady(8, (KEY_OF_1, 50), groups=[delta(4, SequenceDataDelta(0, (), 1, (3,), 3, 3, 1))]),
        "request 4: field request_id is a delta, the mirror expects a snapshot",
    ),
    "a repeated step": (steady(7, (KEY_OF_1, 50)), "step 7: field step is 7, the mirror expects 8"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_inconsistent_plan_is_rejected_and_changes_nothing(mirror, name):
    refused, problem = REFUSALS[name]
    before = frozen(mirror)
    with pytest.raises(MirrorError, match=problem):
        mirror.apply(refused)
    assert frozen(mirror) == before
    mirror.apply(GOOD)
    assert mirror_state(mirror) == {
        KEY_OF_1: ((50,), (0, 1), 6),
        KEY_OF_2: ((), (2, 3), 6),
        KEY_OF_3: ((70,), (5, 9), 5),
    }


def test_block_is_required_with_first_token_needing_it(mirror):
    """5 tokens in 2 blocks of 4 need no third block until the ninth."""
    for number in range(3):
        mirror.apply(steady(8 + number, (KEY_OF_1, 50)))
    before = frozen(mirror)
    with pytest.raises(MirrorError, match=r"without .*block .*token 8,"):
        mirror.apply(steady(11, (KEY_OF_1, 50)))
    assert frozen(mirror) == before
    mirror.apply(steady(11, (KEY_OF_1, 50), blocks=[(0, 9)]))


def test_every_small_plan_change_is_rejected_or_followed(mirror):
    """Nothing but MirrorError comes out, whatever field changes, and never a half-applied plan."""
    before, num_refused = frozen(mirror), 0
    for path, changed in every_change(GOOD, "plan"):
        tried = copy.deepcopy(mirror)
        try:
            rows = tried.apply(changed)
        except MirrorError:
            num_refused += 1
            assert frozen(tried) == before, path
        else:
            assert sum(row.num_scheduled_tokens for row in rows) == changed.num_tokens, path
    assert num_refused > 20


# Of 1 and 3: none or several ids. 1 holds 5 tokens in two blocks of 4, 3 holds 4 in one.


def uneven(rows, blocks=(), **fields) -> StepPlan:
    """Keys with the ids that each was given."""
    ids = SampledIds.from_rows([token_ids for _, token_ids in rows])
    changes = {
        "continuing": tuple(key for key, _ in rows),
        "continuing_token_ids": ids.token_ids,
        "continuing_num_ids": ids.num_ids,
        "continuing_blocks": tuple(blocks),
        "num_tokens": sum(max(len(token_ids), 1) for _, token_ids in rows),
    }
    return StepPlan(8, **{**changes, **fields})


def test_sequences_continue_with_no_and_several_ids(mirror):
    first, second = mirror.apply(uneven([(KEY_OF_1, ()), (KEY_OF_3, (70, 71, 72, 73, 74))], blocks=[(1, 9), (1, 8)]))
    assert (first.num_scheduled_tokens, first.sequence.num_computed_tokens, first.num_samples) == (1, 4, 1)
    assert (second.num_scheduled_tokens, second.sequence.num_computed_tokens, second.num_samples) == (5, 4, 1)
    assert mirror_state(mirror)[KEY_OF_1] == ((), (0, 1), 5)
    assert mirror_state(mirror)[KEY_OF_3] == ((70, 71, 72, 73, 74), (5, 9, 8), 9)


@pytest.mark.parametrize(
    ("bad", "problem"),
    [
        (uneven([(KEY_OF_1, (1, 2, 3, 4))]), "continuing is without a block for token 8"),
        (uneven([(KEY_OF_3, (1, 2, 3, 4, 5))], blocks=[(0, 9)]), "continuing is without a block for token 8"),
        (uneven([(KEY_OF_1, (1, 2))], num_tokens=1), "field num_tokens is 1, the mirror expects 2"),
        (uneven([(KEY_OF_1, ())], num_tokens=0), "field num_tokens is 0, the mirror expects 1"),
        (uneven([(KEY_OF_1, (1, 2))], continuing_num_ids=(3,)), "is 2 ids, the mirror expects 3"),
        (uneven([(KEY_OF_1, (1, 2))], continuing_num_ids=(1, 1)), "continuing_num_ids is 2 numbers from 1 on"),
        (uneven([(KEY_OF_1, (1, 2))], continuing_num_ids=(-1,)), "continuing_num_ids is 1 numbers from -1 on"),
        (uneven([(KEY_OF_2, ())]), "continuing is computed to 3"),
    ],
)
def test_inconsistent_id_counts_are_rejected(mirror, bad, problem):
    before = frozen(mirror)
    with pytest.raises(MirrorError, match=problem):
        mirror.apply(bad)
    assert frozen(mirror) == before


def test_sequence_without_id_may_copy_its_last_block(mirror):
    """A delta that begins one token back, which nobody else may do."""
    repeats = delta(1, SequenceDataDelta(0, (), 1, (8,), 4, 1, 1))
    with pytest.raises(MirrorError, match=r"num_computed_tokens is 3, .*expects 5$"):
        mirror.apply(plan(8, delta(1, SequenceDataDelta(0, (), 0, (8, 9), 3, 2, 1))))
    with pytest.raises(MirrorError, match=r"num_computed_tokens is 4, .*expects 5$"):
        mirror.apply(plan(8, delta(1, SequenceDataDelta(0, (1,), 1, (8,), 4, 2, 1))))
    (row,) = mirror.apply(plan(8, repeats))
    assert (row.num_scheduled_tokens, row.sequence.num_computed_tokens) == (1, 4)


# Rows of the step before, in order, are not looked at one by one.


def outcome(mirror: Mirror, given: StepPlan) -> object:
    """The state after the plan, or why it was rejected."""
    try:
        rows = mirror.apply(given)
    except MirrorError as error:
        return str(error)
    return mirror_state(mirror), [(row.sequence.key, row.num_scheduled_tokens, row.num_samples) for row in rows]


@pytest.mark.parametrize("name", [*REFUSALS, "right"])
def test_rows_in_order_are_judged_like_others(mirror, monkeypatch, name):
    given = steady(8, *BOTH, blocks=((1, 6),)) if name == "right" else REFUSALS[name][0]
    other = copy.deepcopy(mirror)
    followed = outcome(mirror, given)
    monkeypatch.setattr(LastRows, "following", lambda self, keys: None)
    assert outcome(other, given) == followed


def test_full_row_lacks_a_block_however_it_got_there(mirror):
    """Row 1 has room for 8 tokens; its row is found by column from its second token on."""
    mirror.apply(steady(8, *BOTH, blocks=((1, 6),)))
    for step in (9, 10):
        mirror.apply(steady(step, (KEY_OF_1, step), groups=(CHUNK_OF_2,) if step == 9 else ()))
    with pytest.raises(MirrorError, match="request 1, sample 0: field continuing is without a block for token 8"):
        mirror.apply(steady(11, (KEY_OF_1, 11), (KEY_OF_2, 11)))
