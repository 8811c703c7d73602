"""When each request came, began and ended, on this rank: for `RequestOutput.metrics`. Nothing is decided by it."""

import time
from dataclasses import replace

from spmd_worker.replica.sequence.outputs import RequestMetrics
from spmd_worker.replica.sequence.request import RequestId
from spmd_worker.replica.sequence.step import StepPlan


class RequestTimes:
    """Told of requests that were added here, and of every step; knows nothing of the others'."""

    def __init__(self) -> None:
        self._metrics: dict[RequestId, RequestMetrics] = {}

    def add(self, request_id: RequestId) -> None:
        """A request was queued now."""
        self._metrics[request_id] = RequestMetrics(arrival_time=time.time(), queued_ts=time.monotonic())

    def arrived(self, request_id: RequestId, arrival_time: float) -> None:
        """A request that was added had come before: at `arrival_time`, in seconds since the epoch."""
        metrics = self._metrics.get(request_id)
        if metrics is not None:
            metrics.arrival_time = arrival_time

    def begin(self, plan: StepPlan) -> None:
        """A step was planned now. What is new in it is in `groups`: a step that only decodes costs nothing here."""
        for group in plan.groups:
            metrics = self._metrics.get(group.request_id)
            if metrics is not None and not metrics.scheduled_ts:
                metrics.scheduled_ts = time.monotonic()

    def end(self, plan: StepPlan) -> None:
        """The step has sampled now."""
        for group in plan.groups:
            metrics = self._metrics.get(group.request_id)
            if metrics is None or metrics.first_token_ts:
                continue
            if any(sequence.num_samples for sequence in group.sequences):
                metrics.first_token_ts = metrics.last_token_ts = time.monotonic()
                metrics.first_token_latency = time.time() - metrics.arrival_time

    def read(self, request_id: RequestId, num_output_tokens: int) -> RequestMetrics | None:
        """What is known of a request whose last tokens have come now; None for one that was not added here."""
        metrics = self._metrics.get(request_id)
        if metrics is None:
            return None
        last_token_ts = time.monotonic() if num_output_tokens else metrics.last_token_ts
        return replace(metrics, num_generation_tokens=num_output_tokens, last_token_ts=last_token_ts)

    def forget(self, request_id: RequestId) -> None:
        """It has ended."""
        self._metrics.pop(request_id, None)
