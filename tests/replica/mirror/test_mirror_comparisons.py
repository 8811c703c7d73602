"""A mirror rejects a comparison of a hit that its worker could not make, and changes nothing."""

import dataclasses

import pytest
from mirror_state import mirror_state
from test_mirror_states import delta, new_mirror, prompts

from spmd_worker.replica.mirror.mirror import MirrorError
from spmd_worker.replica.sequence.hit_comparison import CachedCopy, HitComparison
from spmd_worker.replica.sequence.sequence import SequenceKey
from spmd_worker.replica.sequence.step import StepPlan


def block(index: int, number: int) -> HitComparison:
    return HitComparison(SequenceKey(2, 0), (CachedCopy(index, number, b"name", 1),))


def state(index: int, number: int) -> HitComparison:
    return HitComparison(SequenceKey(2, 0), (), (CachedCopy(index, number, b"name", 1),))


def compares(plan: StepPlan, comparison: HitComparison) -> StepPlan:
    return dataclasses.replace(plan, hit_comparisons=(comparison,))


def test_comparison_of_computed_blocks_is_accepted() -> None:
    """Two prompts of five tokens in blocks of four."""
    mirror = new_mirror()
    mirror.apply(compares(prompts(), block(0, 9)))
    assert mirror.held(SequenceKey(2, 0)).block_ids == [2, 3]
    chunk = delta(2, appended_token_ids=(11, 12, 13), num_scheduled_tokens=3)
    mirror.apply(compares(chunk, state(1, 5)))


@pytest.mark.parametrize(
    ("comparison", "match"),
    [
        (block(0, 16), "request 2, sample 0: field hit_comparisons is block 16, the mirror expects from 0 to 15"),
        (block(0, -1), "block -1"),
        (block(1, 9), "index 1, the mirror expects that of a block below token 5"),
        (block(-1, 9), "index -1"),
        (state(0, 6), "slot 6, the mirror expects from 0 to 5"),
        (state(0, 2), "the state after block 0, the mirror expects that after token 5"),
        (HitComparison(SequenceKey(3, 0), ()), "request 3, sample 0: .* a sequence that is not in groups"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_impossible_comparison_is_rejected(comparison: HitComparison, match: str) -> None:
    mirror = new_mirror()
    state_before = mirror_state(mirror)
    with pytest.raises(MirrorError, match=match):
        mirror.apply(compares(prompts(), comparison))
    assert mirror_state(mirror) == state_before


def test_model_without_states_compares_none() -> None:
    plan = StepPlan(1, tuple([_stateless(group) for group in prompts().groups]), num_tokens=15)
    with pytest.raises(MirrorError, match="slot 0, the mirror expects from 0 to -1"):
        new_mirror(0).apply(compares(plan, state(0, 0)))


def _stateless(group):
    return dataclasses.replace(group, sequences=(dataclasses.replace(group.sequences[0], state_slot=-1),))
