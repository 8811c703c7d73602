"""What `abort_request` takes for an id, and what `check_request` takes for a request."""

import numpy as np
import pytest

from spmd_worker.engine.validation import as_request_ids, check_request
from spmd_worker.sequence.sampling_params import SamplingParams


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (3, [3]),
        ("3", [3]),
        (np.int64(3), [3]),
        ([], []),
        (["3", 4, "5"], [3, 4, 5]),
        ((each for each in "12"), [1, 2]),
        ({"7": "kept"}, [7]),
        (2**70, [2**70]),
        # The ids of no request.
        ("", [-1]),
        ("x", [-1]),
        ("-3", [-1]),
        (" 3", [-1]),
        ("٣", [-1]),
        ("9" * 5000, [-1]),
    ],
)
def test_ids_are_numbers_or_texts_alone_or_in_any_iterable(given: object, expected: list[int]):
    assert as_request_ids(given) == expected


@pytest.mark.parametrize(
    ("given", "named"),
    [(None, "None"), (1.0, "1.0"), (True, "True"), (b"12", "b'12'"), (["1", None], "None"), ([["1"]], "['1']")],
)
def test_anything_else_is_named_with_what_to_give(given: object, named: str):
    with pytest.raises(TypeError) as refused:
        as_request_ids(given)
    assert str(refused.value) == (
        f"{named} is no request id: give the number that add_request returned, an output's request_id, or several of "
        f"these in a list"
    )


def checked(prompt_token_ids: object, sampling: object = SamplingParams()) -> None:
    check_request(prompt_token_ids, sampling, vocab_size=10, max_model_len=8, max_num_seqs=4, has_tokenizer=True)


def test_what_is_no_request_is_a_type_error_and_what_cannot_be_answered_a_value_error():
    checked([1, 2])
    for ids, sampling in (("12", SamplingParams()), ([1.5], SamplingParams()), ([1], None)):
        with pytest.raises(TypeError, match=r"give (a list of )?(a )?whole numbers?|give SamplingParams"):
            checked(ids, sampling)
    for ids in ([], [10], [-1], [2**70], [1] * 8):
        with pytest.raises(ValueError, match=r"no tokens|outside the vocabulary|64 bits|max_model_len"):
            checked(ids)
