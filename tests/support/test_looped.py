"""Cases that one test goes through: all of them run, and a failure names its own."""

import inspect
from typing import Any

import pytest
from looped import looped


def test_every_case_runs_in_order():
    seen: list[Any] = []

    @looped("size", [1, 2])
    @looped(("kind", "count"), [("a", 3), ("b", 4)])
    def case(other: str, size: int, kind: str, count: int) -> None:
        seen.append((other, size, kind, count))

    assert list(inspect.signature(case).parameters) == ["other"]
    case(other="x")
    assert seen == [("x", 1, "a", 3), ("x", 1, "b", 4), ("x", 2, "a", 3), ("x", 2, "b", 4)]


def test_failure_names_its_case():
    @looped("size", [1, 2, 3])
    def case(size: int) -> None:
        assert size != 2

    with pytest.raises(AssertionError) as failure:
        case()
    assert failure.value.__notes__ == ["case: size=2"]


def test_name_that_is_no_parameter_is_rejected():
    with pytest.raises(AssertionError, match="sizes"):
        looped("sizes", [1])(lambda size: None)
