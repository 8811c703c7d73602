"""Comparing what the ranks were given: equal values give equal bytes, and the first difference is named."""

import pytest

from spmd_worker.base.errors import RanksDisagreeError
from spmd_worker.replica.lockstep.agreement import canonical, check_equal, first_difference


def test_equal_values_encode_equally_for_any_key_order():
    assert canonical({"b": [1, 2.5], "a": None}) == canonical({"a": None, "b": [1, 2.5]}) == b'{"a":null,"b":[1,2.5]}'


def test_numbers_of_different_types_are_different_values():
    assert canonical(1) != canonical(1.0)
    assert canonical(0.0) != canonical(-0.0)
    assert canonical(1) != canonical(True)


def test_text_in_any_language_is_encoded_as_ascii():
    assert canonical("größer\ud800") == b'"gr\\u00f6\\u00dfer\\ud800"'


def test_ranks_with_equal_values_pass():
    check_equal("settings", [canonical({"seed": 1})] * 4)
    check_equal("settings", [canonical({"seed": 1})])


def test_first_differing_rank_is_named_with_both_values():
    payloads = [canonical({"config": {"seed": seed, "n": 2}}) for seed in (0, 0, 7, 9)]
    with pytest.raises(RanksDisagreeError) as caught:
        check_equal("settings", payloads)
    message = (
        "ranks were given different settings: config.seed is 0 on rank 0, 7 on rank 2; start every rank with the same"
    )
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("first", "other", "said"),
    [
        ({"a": 1}, {"a": 2}, "a is 1 on rank 0, 2 on rank 3"),
        ({"a": {"b": [1, {"c": "x"}]}}, {"a": {"b": [1, {"c": "y"}]}}, 'a.b[1].c is "x" on rank 0, "y" on rank 3'),
        ({"a": 1}, {"a": 1, "b": 2}, "b is missing on rank 0, 2 on rank 3"),
        ({"a": [1, 2]}, {"a": [1]}, "a has 2 entries on rank 0, 1 on rank 3"),
        ({"a": [1, 2]}, {"a": [2]}, "a[0] is 1 on rank 0, 2 on rank 3"),
        ({"a": {}}, {"a": []}, "a is {} on rank 0, [] on rank 3"),
        ({"b": 1, "a": 1}, {"a": 2, "b": 2}, "a is 1 on rank 0, 2 on rank 3"),
        (1, 2, "value is 1 on rank 0, 2 on rank 3"),
        ({"a": 1}, {"a": 1.0}, "a is 1 on rank 0, 1.0 on rank 3"),
        ({"a": 1}, {"a": True}, "a is 1 on rank 0, true on rank 3"),
        ({"a": 0.0}, {"a": -0.0}, "a is 0.0 on rank 0, -0.0 on rank 3"),
        ({"a": None}, {}, "a is null on rank 0, missing on rank 3"),
        ([1, 2], [1], "value has 2 entries on rank 0, 1 on rank 3"),
    ],
)
def test_first_difference_of_values_is_named(first, other, said):
    assert first_difference(first, other, 3) == said


def test_long_values_are_cut_short():
    said = first_difference({"a": "x" * 500}, {"a": "y" * 500}, 1)
    assert said.startswith('a is "xxx')
    assert len(said) < 200


@pytest.mark.parametrize(
    ("first", "other"), [({"a": None}, {}), ({"a": 1}, {"a": True}), ({"a": [0.0]}, {"a": [-0.0]})]
)
def test_every_difference_of_bytes_is_named(first, other):
    """Python's own equality does not tell these apart, and then the message would name nothing."""
    with pytest.raises(RanksDisagreeError, match="different settings: a"):
        check_equal("settings", [canonical(first), canonical(other)])
