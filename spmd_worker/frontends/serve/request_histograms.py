"""Histograms of a server's requests for `/metrics`, with the names and the buckets of vLLM's.

Observed by the engine's thread, after each step and at the end of a request; read by the server's thread. Times are
seconds of the monotonic clock, given by the caller.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable
from itertools import accumulate
from typing import Final

from spmd_worker.compat.metrics import Histogram
from spmd_worker.replica.sequence.outputs import RequestOutput
from spmd_worker.replica.sequence.request import RequestId
from spmd_worker.replica.sequence.sampling_params import SamplingParams
from spmd_worker.replica.sequence.sequence import FinishReason, Sequence

_FIRST_TOKEN: Final = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_TOKEN: Final = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_REQUEST: Final = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_SAMPLES: Final = (1.0, 2.0, 5.0, 10.0, 20.0)


class _Buckets:
    """Counts of values by the first bound that is not less, the last one by none."""

    def __init__(self, bounds: Iterable[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def histogram(self, name: str, labels: dict[str, str]) -> Histogram:
        # One copy, because the other thread goes on counting.
        *counts, total = accumulate(self.counts.copy())
        return Histogram(name, total, self.sum, dict(zip(self.bounds, counts, strict=True)), labels)


class RequestHistograms:
    """`max_model_len` ends the buckets of tokens. A request is one of the engine's: of a body of several prompts or
    texts each is one, with all of its samples. Requests that were aborted or failed have only a first token.
    """

    def __init__(self, model_name: str, max_model_len: int) -> None:
        self._labels = {"model_name": model_name}
        self._all: dict[str, _Buckets] = {}

        def made(name: str, bounds: Iterable[float]) -> Callable[[float], None]:
            self._all[f"vllm:{name}"] = buckets = _Buckets(bounds)
            return buckets.observe

        tokens = _one_two_five(max_model_len)
        self._observe_first = made("time_to_first_token_seconds", _FIRST_TOKEN)
        self._observe_next = made("inter_token_latency_seconds", _TOKEN)
        self._observe_mean = made("request_time_per_output_token_seconds", _TOKEN)
        self._observe_total = made("e2e_request_latency_seconds", _REQUEST)
        self._observe_queue = made("request_queue_time_seconds", _REQUEST)
        self._observe_prefill = made("request_prefill_time_seconds", _REQUEST)
        self._observe_decode = made("request_decode_time_seconds", _REQUEST)
        self._observe_inference = made("request_inference_time_seconds", _REQUEST)
        self._observe_prompt = made("request_prompt_tokens", tokens)
        self._observe_generation = made("request_generation_tokens", tokens)
        self._observe_n = made("request_params_n", _SAMPLES)
        self._observe_max_tokens = made("request_params_max_tokens", tokens)
        self._unbegun: dict[RequestId, float] = {}
        """Requests without a token, and when they arrived."""
        self._decoding: dict[Sequence, tuple[int, float]] = {}
        """Sequences with a token, how many they have, and since when."""

    def begin(self, request_id: RequestId, arrived_s: float) -> None:
        """A request that generates was admitted."""
        self._unbegun[request_id] = arrived_s

    def step(self, running: Iterable[Sequence], now_s: float) -> None:
        """A step has ended; `running` are the scheduler's sequences. One that ended is read once more by itself."""
        decoding, ended = self._decoding, list[Sequence]()
        for sequence, (num_tokens, last_s) in decoding.items():
            num_now = len(sequence.output_token_ids)
            if num_now > num_tokens:
                self._observe_next(now_s - last_s)
                decoding[sequence] = num_now, now_s
            if sequence.finish_reason is not None:
                ended.append(sequence)
        for sequence in ended:
            del decoding[sequence]
        for sequence in running:
            if sequence.output_token_ids and sequence not in decoding:
                decoding[sequence] = len(sequence.output_token_ids), now_s
                self._observe_begin(sequence.request.request_id, now_s)

    def end(
        self,
        request_id: RequestId,
        output: RequestOutput,
        sampling: SamplingParams | None,
        arrived_s: float,
        now_s: float,
    ) -> None:
        """A request has ended; `sampling` None: it pooled. Called before `step` of the step that ended it."""
        times = output.metrics
        if times is not None and times.first_token_ts:
            self._observe_begin(request_id, times.first_token_ts)
        self._unbegun.pop(request_id, None)
        is_aborted = any(each.finish_reason == FinishReason.ABORT.value for each in output.outputs)
        if times is None or output.error is not None or is_aborted:
            return
        self._observe_total(now_s - arrived_s)
        self._observe_queue(times.scheduled_ts - times.queued_ts)
        self._observe_prompt(output.num_prompt_tokens)
        if sampling is None:
            return
        self._observe_prefill(times.first_token_ts - times.scheduled_ts)
        self._observe_decode(times.last_token_ts - times.first_token_ts)
        self._observe_inference(times.last_token_ts - times.scheduled_ts)
        num_steps = max(len(each.token_ids) for each in output.outputs) - 1
        if num_steps > 0:
            self._observe_mean((times.last_token_ts - times.first_token_ts) / num_steps)
        self._observe_generation(times.num_generation_tokens)
        self._observe_n(sampling.n)
        if sampling.max_tokens is not None:
            self._observe_max_tokens(sampling.max_tokens)

    def metrics(self) -> list[Histogram]:
        """All of them, from any thread."""
        return [buckets.histogram(name, self._labels) for name, buckets in self._all.items()]

    def _observe_begin(self, request_id: RequestId, now_s: float) -> None:
        arrived_s = self._unbegun.pop(request_id, None)
        if arrived_s is not None:
            self._observe_first(now_s - arrived_s)


def _one_two_five(limit: int) -> list[float]:
    """1, 2, 5, 10, 20, ... up to `limit`."""
    powers = range(len(str(limit)))
    return [float(digit * 10**power) for power in powers for digit in (1, 2, 5) if digit * 10**power <= limit]
