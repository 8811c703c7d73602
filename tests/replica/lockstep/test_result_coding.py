"""What a step sampled as bytes and back."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spmd_worker.replica.lockstep.wire.message import MessageError
from spmd_worker.replica.lockstep.wire.result_coding import decode_result, encode_result
from spmd_worker.replica.sequence.outputs import Logprob
from spmd_worker.replica.sequence.prompt_scores import ScoredRows
from spmd_worker.replica.sequence.request import RequestId
from spmd_worker.replica.sequence.routed_experts import RoutedTokens
from spmd_worker.replica.sequence.step import StepResult

ids = st.integers(0, 200_000)
entries = st.none() | st.dictionaries(
    ids, st.builds(Logprob, st.floats(allow_nan=False), st.integers(1, 200_000), st.none(), st.none()), max_size=4
)
results = st.builds(
    StepResult,
    st.integers(1, 10**6),
    st.lists(ids, max_size=20).map(tuple),
    st.lists(entries, max_size=5).map(tuple),
    st.lists(st.tuples(st.integers(0, 1000).map(RequestId), ids, st.lists(entries, max_size=3).map(tuple))).map(tuple),
    mask_checksums=st.lists(st.integers(0, 2**32 - 1), max_size=1).map(tuple),
    kept_ids=st.lists(st.none() | st.binary(max_size=9), max_size=4).map(tuple),
    prompt_scores=st.lists(st.builds(ScoredRows, ids, ids, st.binary(), st.binary()), max_size=2).map(tuple),
    routed_experts=st.lists(st.builds(RoutedTokens, *[ids] * 6, st.binary()), max_size=2).map(tuple),
)


@given(results)
def test_step_result_round_trips(result: StepResult):
    assert decode_result(encode_result(result)) == result


def test_log_probability_round_trips_bit_for_bit():
    values = [-0.0, math.nextafter(-1.5, 0.0), -math.inf]
    result = StepResult(3, (7,), tuple({7: Logprob(value, 1)} for value in values))
    back = decode_result(encode_result(result))
    assert [math.copysign(1, entry[7].logprob) for entry in back.logprobs] == [-1, -1, -1]
    assert [entry[7].logprob.hex() for entry in back.logprobs] == [value.hex() for value in values]


def test_ids_alone_cost_few_bytes():
    assert len(encode_result(StepResult(500, tuple(range(256))))) < 300


@given(results, st.data())
def test_other_bytes_are_rejected(result: StepResult, data: st.DataObject):
    payload = encode_result(result)
    cut = data.draw(st.integers(0, len(payload) - 1))
    with pytest.raises(MessageError):
        decode_result(payload[:cut])
    with pytest.raises(MessageError, match="1 bytes left over"):
        decode_result(payload + b"\0")
