"""A record with a field of another type or out of range is refused where it is made, with record, field and rule."""

import pytest

from spmd_worker.replica.sequence.events import Abort, Admit, EndWorkerEvent, FinishTransfers, WorkerEvent
from spmd_worker.replica.sequence.metadata import SequenceData, SequenceDataDelta
from spmd_worker.replica.sequence.request import Request
from spmd_worker.replica.sequence.sampling_params import SamplingParams
from spmd_worker.replica.sequence.step import StepPlan

REQUEST = Request(1, (2, 3), SamplingParams(), 2**64 - 1)


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: Admit(7), "Admit.request=7 must be of type Request"),
        (lambda: EndWorkerEvent("7", ""), "EndWorkerEvent.number='7' must be of type int"),
        (lambda: WorkerEvent(1, "name", "text"), "WorkerEvent.payload='text' must be of type bytes"),
        (lambda: FinishTransfers([1]), r"FinishTransfers.numbers=\[1\] must be of type tuple"),
        (lambda: Request(1, (2,), SamplingParams(), 2**64), f"Request.stream={2**64} must be from"),
        (lambda: StepPlan(1.5), "StepPlan.step=1.5 must be of type int"),
        (lambda: StepPlan(1, num_tokens=2**66), f"StepPlan.num_tokens={2**66} must be from"),
        (lambda: StepPlan(1, continuing=[]), r"StepPlan.continuing=\[\] must be of type tuple"),
        (lambda: StepPlan(1, block_ops=None), "StepPlan.block_ops=None must be of type BlockOps"),
        (lambda: SequenceData(0, (), (), 0, 1, -1), "num_samples=-1 must be 0 or more"),
        (lambda: SequenceDataDelta(0, (), 0, (), 0, 1, -1), "num_samples=-1 must be 0 or more"),
        (lambda: SequenceData(0, (), (), 0, 1, 1, 0, (), -2), "num_lagging_tokens=-2 must be 0 or more"),
        (lambda: SamplingParams(max_tokens=2**63), "max_tokens=9223372036854775808 must fit 64 bits"),
        (lambda: SamplingParams(top_k=2**64), "top_k=18446744073709551616 must fit 64 bits"),
        (lambda: SamplingParams(stop_token_ids=(2**63,)), "stop_token_ids: 9223372036854775808 must be a token id"),
        (lambda: SamplingParams(stop="\udcff"), "UTF-8"),
    ],
)
def test_field_without_encoding_is_rejected(make, problem):
    with pytest.raises(ValueError, match=problem):
        make()


def test_valid_fields_are_accepted():
    assert REQUEST.stream == 2**64 - 1
    assert SamplingParams(seed=2**64 - 1, max_tokens=None, stop="é").stop == ("é",)
    assert Abort(-(2**63)).request_id == -(2**63)
