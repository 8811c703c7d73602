"""What enters a replica is checked where its record is made: events, requests and sampling parameters.

A step's message is coded later, on all ranks at once: what has no place in it was once the end of every rank.
"""

import numpy as np
import pytest
import torch

from spmd_worker.replica.lockstep.wire.codec import decode_message, encode_message
from spmd_worker.replica.lockstep.wire.message import StepMessage
from spmd_worker.replica.sequence.events import Abort, Admit, Event, SetWeightVersion
from spmd_worker.replica.sequence.request import Request, RequestId, as_token_ids
from spmd_worker.replica.sequence.sampling_params import SamplingParams
from spmd_worker.replica.sequence.step import StepPlan

NO_NUMBERS = ["x", "7", None, 1.0, True, [3], Ellipsis]


def coded(event: Event) -> Event:
    """Through a message and back."""
    message = decode_message(encode_message(StepMessage(1, (event,), StepPlan(1), (), b"")))
    return message.events[0]


@pytest.mark.parametrize("value", NO_NUMBERS, ids=repr)
def test_event_of_another_type_is_rejected_at_construction(value: object):
    for event in (Abort, SetWeightVersion):
        with pytest.raises(TypeError, match=rf" is a {type(value).__name__}: give a whole "):
            event(value)


@pytest.mark.parametrize("number", [2**63, -(2**63) - 1, 2**70])
def test_number_beyond_64_bits_is_rejected_at_construction(number: int):
    with pytest.raises(ValueError, match=rf"version={number} must .*64 bits"):
        SetWeightVersion(number)
    with pytest.raises(ValueError, match=f"request_id={number} must fit 64 bits"):
        Abort(RequestId(number))


def test_every_valid_event_number_can_be_encoded():
    for number in (0, -1, 2**63 - 1, -(2**63), np.int64(5), torch.tensor(6)):
        event = SetWeightVersion(number)
        assert type(event.version) is int
        assert coded(event) == event


def test_token_ids_are_plain_integers_in_a_tuple():
    ids = as_token_ids([np.int32(3), 4, 2**63 - 1, -(2**63)])
    assert ids == (3, 4, 2**63 - 1, -(2**63))
    assert [type(each) for each in ids] == [int] * 4
    assert as_token_ids([]) == ()
    assert as_token_ids(range(3)) == (0, 1, 2)
    request = Request(RequestId(0), [np.int64(7), 8], SamplingParams(), 0)
    assert coded(Admit(request)) == Admit(request)


@pytest.mark.parametrize(
    ("values", "error", "message"),
    [
        ("hello", TypeError, r"^prompt_token_ids .*str: .*list"),
        (b"hello", TypeError, "prompt_token_ids is a bytes: "),
        (None, TypeError, "prompt_token_ids is a NoneType: "),
        ([1, True], TypeError, r"^prompt_token_ids\[1\]=True .*bool: .*number"),
        ([1.0], TypeError, r"prompt_token_ids\[0\]=1.0 is a float: "),
        (["a"], TypeError, r"prompt_token_ids\[0\]='a' is a str: "),
        ([5, 2**63], ValueError, r"prompt_token_ids\[1\]=9223372036854775808 must fit 64 bits"),
    ],
)
def test_invalid_prompt_makes_no_request(values: object, error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        Request(RequestId(0), values, SamplingParams(), 0)


def test_request_needs_sampling_params():
    with pytest.raises(TypeError, match=r"^sampling .*dict: .*SamplingParams"):
        Request(RequestId(0), (1,), {"temperature": 0}, 0)


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        ({"top_k": 2**63}, "top_k=9223372036854775808 must fit 64 bits"),
        ({"max_tokens": 2**70}, f"max_tokens={2**70} must fit 64 bits"),
        ({"max_tokens": None, "min_tokens": 2**64}, f"min_tokens={2**64} must fit 64 bits"),
        ({"stop": ["ok", "\ud800"]}, r"stop: '\ud800' contains a lone surrogate, which UTF-8 cannot encode"),
    ],
)
def test_sampling_parameters_beyond_message_range_are_rejected(sampling: dict[str, object], message: str):
    with pytest.raises(ValueError) as refused:
        SamplingParams(**sampling)
    assert str(refused.value) == message


def test_extreme_sampling_parameters_can_be_encoded():
    """Negative control of the bounds: they are the message's own."""
    largest = SamplingParams(
        top_k=2**63 - 1, max_tokens=2**63 - 1, min_tokens=2**63 - 1, seed=2**64 - 1, stop="\U0010ffff"
    )
    event = Admit(Request(RequestId(0), (1,), largest, 2**64 - 1))
    assert coded(event) == event
