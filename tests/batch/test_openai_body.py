"""Numbers that JSON does not have never reach a row's line."""

import json
import math

import pytest

from spmd_worker.batch.output.openai_body import finite, logprob_records
from spmd_worker.sequence.outputs import Logprob


@pytest.mark.parametrize(
    ("logprob", "expected"), [(-1.5, -1.5), (0.0, 0.0), (-math.inf, -9999.0), (-1e30, -9999.0), (math.nan, -9999.0)]
)
def test_a_logprob_is_a_number_that_json_has(logprob: float, expected: float):
    """NaN, from a row all of whose tokens are forbidden, once ended the job when its line was written."""
    assert finite(logprob) == expected
    records = logprob_records({3: Logprob(logprob, 1, "x")})
    assert json.loads(json.dumps(records, allow_nan=False))[0]["logprob"] == expected
