"""Steps that are verified, and their rows, follow from counts alone."""

import dataclasses

import pytest

from spmd_worker.replica.mirror.comparison_check import check_repeated
from spmd_worker.replica.mirror.records import MirrorError
from spmd_worker.replica.scheduler.step_verifier import StepVerifier
from spmd_worker.replica.sequence.sequence import SequenceKey
from spmd_worker.replica.sequence.step import StepPlan

CONTINUING = StepPlan(3, continuing=(SequenceKey(0, 0), SequenceKey(1, 0)))


def test_each_row_has_its_turn() -> None:
    verifier = StepVerifier(2)
    chosen = [verifier.choose(num_rows) for num_rows in (3, 3, 0, 3, 3, 3, 3, 1, 1)]
    assert chosen == [(), (0,), (), (), (1,), (), (2,), (), (0,)]
    assert [StepVerifier(0).choose(3) for _ in range(4)] == [()] * 4


def test_row_that_does_not_continue_is_rejected() -> None:
    check_repeated(dataclasses.replace(CONTINUING, repeated_rows=(1,)))
    for row in (2, -1):
        with pytest.raises(
            MirrorError, match=rf"^step 3: field repeated_rows is {row}, the mirror expects from 0 to 1"
        ):
            check_repeated(dataclasses.replace(CONTINUING, repeated_rows=(row,)))
