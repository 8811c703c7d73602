"""What full collections of a job look at."""

import gc
import weakref

import pytest

from spmd_worker.memory.garbage import settled_objects


class Cycle:
    def __init__(self) -> None:
        self.own = self


@pytest.mark.usefixtures("nothing_frozen")
def test_what_outlived_the_first_full_collection_is_looked_at_by_none_after_it():
    assert gc.get_freeze_count() == 0
    before = len(gc.callbacks)
    with settled_objects():
        assert gc.get_freeze_count() == 0
        gc.collect(1)
        assert gc.get_freeze_count() == 0, "a lesser one has not looked at all"
        gc.collect()
        settled = gc.get_freeze_count()
        assert settled > 10_000
        gone = weakref.ref(Cycle())
        gc.collect()
        assert gone() is None, "what came after it is looked at"
        assert gc.get_freeze_count() <= settled
        assert len(gc.callbacks) == before
    assert gc.get_freeze_count() == 0


@pytest.mark.usefixtures("nothing_frozen")
def test_a_job_that_ends_before_the_first_one_leaves_nothing():
    before = len(gc.callbacks)
    with pytest.raises(KeyError), settled_objects():
        raise KeyError
    assert (len(gc.callbacks), gc.get_freeze_count()) == (before, 0)
    gc.collect()
    assert gc.get_freeze_count() == 0


def test_what_the_caller_has_frozen_stays_and_nothing_else_does():
    gc.collect()
    gc.freeze()
    frozen = gc.get_freeze_count()
    assert frozen > 10_000
    with settled_objects():
        ours = [Cycle() for _ in range(100)]
        gc.collect()
        # A frozen object goes like any other when nobody has it any more.
        assert frozen - 1_000 < gc.get_freeze_count() <= frozen
    assert frozen - 1_000 < gc.get_freeze_count() <= frozen
    assert len(ours) == 100
