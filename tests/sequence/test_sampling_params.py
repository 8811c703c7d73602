"""What a row may ask of the sampler: how many samples run, how many come back, and when they are ranked."""

import pytest

from spmd_worker.sequence.sampling_params import SAMPLING_KEYS, SamplingParams


@pytest.mark.parametrize(
    ("given", "num_sequences", "is_ranked"),
    [
        ({}, 1, False),
        ({"n": 3}, 3, False),
        ({"best_of": 1}, 1, False),
        ({"n": 3, "best_of": 3}, 3, False),
        ({"n": 3, "best_of": 4}, 4, True),
        ({"best_of": 1024}, 1024, True),
        ({"best_of": 2, "temperature": 0.0}, 2, True),
    ],
)
def test_best_of_says_how_many_samples_run(given: dict[str, object], num_sequences: int, is_ranked: bool):
    sampling = SamplingParams(**given)
    assert (sampling.num_sequences, sampling.is_ranked) == (num_sequences, is_ranked)


@pytest.mark.parametrize(
    ("given", "is_needed"),
    [
        ({}, False),
        ({"n": 3}, False),
        ({"n": 3, "best_of": 3}, False),
        ({"n": 3, "best_of": 4}, True),
        ({"logprobs": 0}, True),
        ({"n": 3, "best_of": 4, "logprobs": 2}, True),
        ({"prompt_logprobs": 0}, False),
    ],
)
def test_log_probabilities_of_samples_are_needed_to_be_returned_or_to_rank(given: dict[str, object], is_needed: bool):
    assert SamplingParams(**given).needs_logprobs == is_needed


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"n": 3, "best_of": 2},
            "best_of=2 must be at least n=3: raise best_of, lower n, or leave best_of out, which runs n samples and "
            "returns them all",
        ),
        ({"best_of": 1025}, "best_of=1025 must be at most 1024"),
        ({"best_of": 2.0}, "best_of=2.0 must be a whole number"),
        ({"best_of": True}, "best_of=True must be a whole number"),
        ({"best_of": "2"}, "best_of='2' must be a whole number"),
        ({"n": 0, "best_of": 2}, "n=0 must be from 1 to 1024"),
    ],
)
def test_a_best_of_that_cannot_be_is_refused_with_the_way_out(given: dict[str, object], message: str):
    with pytest.raises(ValueError) as error_result:
        SamplingParams(**given)
    assert str(error_result.value) == message


@pytest.mark.parametrize("value", [0, -1])
def test_a_best_of_of_no_samples_is_below_every_n(value: int):
    with pytest.raises(ValueError, match=f"best_of={value} must be at least n=1"):
        SamplingParams(best_of=value)


def test_best_of_is_a_key_of_rows_beside_n():
    assert SAMPLING_KEYS[:2] == ("n", "best_of")
