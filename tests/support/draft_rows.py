"""Rows for tests of drafts: sequences that tokens are appended to."""

from collections.abc import Iterable

from spmd_worker.replica.sequence.request import Request, RequestId
from spmd_worker.replica.sequence.sampling_params import SamplingParams
from spmd_worker.replica.sequence.sequence import Sequence


def row(prompt: Iterable[int], outputs: Iterable[int] = (), *, request_id: int = 0, sample: int = 0, n: int = 1):
    """A sequence of a request of its own, or of a sibling's with the same `request_id`."""
    request = Request(RequestId(request_id), tuple(prompt), SamplingParams(n=n), stream=request_id)
    return Sequence(request, sample, output_token_ids=list(outputs))
