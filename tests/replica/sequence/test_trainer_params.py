"""Parameters that ask for data for trainers, and the records that keep them: their rules, and joining of stages."""

from typing import Any

import numpy as np
import pytest

from spmd_worker.replica.sequence.request import RequestId
from spmd_worker.replica.sequence.routed_experts import RoutedExperts, RoutedTokens, bytes_per_expert, joined_stages
from spmd_worker.replica.sequence.sampling_params import SamplingParams


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"return_sampling_mask": True}, "without a filter keeps every id"),
        ({"prompt_logprob_start": -1}, "must be 0 or more"),
        ({"prompt_logprobs": 65}, "must be from 0 to 64"),
        ({"prompt_logprobs": -1, "prompt_logprob_start": 0}, "must be from 0 to 1024"),
        ({"prompt_logprob_token_ids": [[1], 2]}, "one list for each row"),
        ({"prompt_logprob_token_ids": [[], []]}, "longest list has 0 ids"),
        ({"prompt_logprob_token_ids": [list(range(1025))]}, "longest list has 1025 ids"),
        ({"routed_experts_prompt_start": 3}, "slice the result"),
    ],
    ids=str,
)
def test_invalid_parameters_are_explained(given: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        SamplingParams(**given)


def test_valid_parameters_are_normalised():
    assert SamplingParams(prompt_logprob_token_ids=[4, 5]).prompt_logprob_token_ids == ((4, 5),)
    assert SamplingParams(prompt_logprob_token_ids=np.array([[4, -1], [6, 7]])).prompt_logprob_token_ids == (
        (4,),
        (6, 7),
    )
    assert SamplingParams(prompt_logprobs=1024, prompt_logprob_start=0).has_score_arrays
    for given in ({"temperature": 0}, {"top_k": 5}, {"allowed_token_ids": [3]}):
        assert SamplingParams(return_sampling_mask=True, **given).return_sampling_mask
    # Rows before the first that is scored may be cached; experts are known where they are computed.
    reads = [
        SamplingParams(prompt_logprob_start=9),
        SamplingParams(prompt_logprobs=1),
        SamplingParams(return_routed_experts=True),
    ]
    assert [each.reads_prefix_cache for each in reads] == [True, False, False]


def tokens(first: int, numbers: list[list[int]], num_bytes: int = 1) -> RoutedTokens:
    data = np.array(numbers, f"<u{num_bytes}").tobytes()
    return RoutedTokens(RequestId(1), 0, first, len(numbers), 2, num_bytes, data)


def test_experts_of_stages_are_joined_by_layer():
    last = (tokens(0, [[5, 6], [7, 8]]), tokens(4, [[9, 1]]))
    stages = [np.array([[1, 2], [3, 4], [5, 6]], np.uint8).tobytes(), b""]
    joined = joined_stages(last, stages)
    assert [list(each.data) for each in joined] == [[1, 2, 5, 6, 3, 4, 7, 8], [5, 6, 9, 1]]


@pytest.mark.parametrize("num_experts", [256, 257])
def test_experts_computed_again_replace_theirs(num_experts: int):
    num_bytes = bytes_per_expert(num_experts)
    kept = RoutedExperts()
    kept.put(1, tokens(1, [[1, 2, 3, 4], [5, 6, 7, 8]], num_bytes), 0, 2)
    kept.put(2, tokens(2, [[5, 6, 7, 9], [0, 1, 2, 3]], num_bytes), 0, 2)
    found = kept.array()
    assert (found.dtype, found.shape) == (np.dtype(f"uint{8 * num_bytes}"), (4, 2, 2))
    # Nothing was computed for the first token: its keys and values were given.
    assert found.reshape(4, 4).tolist() == [[0] * 4, [1, 2, 3, 4], [5, 6, 7, 9], [0, 1, 2, 3]]
    assert kept.array(1, 2).tolist() == [[[1, 2], [3, 4]]]
    assert RoutedExperts().array().shape == (0, 0, 1)
