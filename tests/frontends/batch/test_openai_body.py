"""Numbers that JSON does not have never reach a row's line."""

import json
import math

import pytest

from spmd_worker.frontends.openai.openai_body import chat_choice, finite, logprob_records
from spmd_worker.frontends.openai.row import EncodedRow
from spmd_worker.media.prompt_content import PromptContent
from spmd_worker.ops.sampling.logprobs import entries_of
from spmd_worker.replica.sequence.outputs import CompletionOutput, Logprob
from spmd_worker.replica.sequence.sampling_params import SamplingParams


@pytest.mark.parametrize(
    ("logprob", "expected"), [(-1.5, -1.5), (0.0, 0.0), (-math.inf, -9999.0), (-1e30, -9999.0), (math.nan, -9999.0)]
)
def test_logprob_is_a_number_json_has(logprob: float, expected: float):
    """Regression: NaN, from a row with every token forbidden, ended the job when its line was written."""
    assert finite(logprob) == expected
    records = logprob_records({3: Logprob(logprob, 1, "x")})
    assert json.loads(json.dumps(records, allow_nan=False))[0]["logprob"] == expected


@pytest.mark.parametrize(
    ("sampled", "rank", "num_top", "expected"),
    [
        (9, 1, 1, [9]),
        (9, 1, 2, [9, 3]),
        (9, 2, 2, [3, 9]),
        (3, 1, 2, [3, 4]),
        (9, 4, 3, [3, 4, 5]),
        (9, 4, 0, []),
        (9, 4, -1, [3, 4, 5, 9]),
    ],
)
def test_chat_row_has_requested_number_of_top_logprobs(sampled: int, rank: int, num_top: int, expected: list[int]):
    """A sampled token as likely as the last of them was one more; -1, which asks for all, gave none."""
    likely = [(3, -1.0), (4, -1.5), (5, -2.0)]
    position = entries_of(sampled, -1.0, rank, likely if num_top < 0 else likely[:num_top])
    row = EncodedRow(0, None, "chat", PromptContent((1,)), SamplingParams(logprobs=num_top), None)
    completion = CompletionOutput(0, "", [sampled], None, [position], "stop", None)
    choice = chat_choice(completion, {"message": {}}, row)
    (record,) = choice["logprobs"]["content"]
    assert record["token"] == f"token_id:{sampled}"
    assert [each["token"] for each in record["top_logprobs"]] == [f"token_id:{token_id}" for token_id in expected]
