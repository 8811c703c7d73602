"""The loop of rank 0's main thread: requests of the exchange into the engine, step by step, and outputs back.

The other ranks are in `follow`. This thread sleeps when idle, and periodically runs an empty step, because the others
wait for steps with a timeout.
"""

import logging
import time

from spmd_worker.compat.metrics import engine_metrics
from spmd_worker.engine.engine import Engine
from spmd_worker.engine.partial_outputs import PartialOutputs
from spmd_worker.engine.step_interval import max_step_interval_s
from spmd_worker.frontends.openai.audio_row import EncodedAudioRow
from spmd_worker.frontends.openai.pooled_row import EncodedPooledRow
from spmd_worker.frontends.openai.row import EncodedRow
from spmd_worker.frontends.openai.row_outputs import RowOutputs
from spmd_worker.frontends.openai.split_rows import admit_split
from spmd_worker.frontends.serve.exchange import OpenRequest, RequestExchange
from spmd_worker.frontends.serve.request_histograms import RequestHistograms
from spmd_worker.replica.sequence.outputs import RequestOutput
from spmd_worker.replica.sequence.request import RequestId
from spmd_worker.replica.sequence.sampling_params import RequestOutputKind, SamplingParams

logger = logging.getLogger(__name__)


class EngineLoop:
    """`drain_s` is the time that open requests may continue once the exchange ends."""

    def __init__(self, engine: Engine, exchange: RequestExchange, drain_s: float) -> None:
        self._engine, self._exchange, self._drain_s = engine, exchange, drain_s
        self._requests: dict[RequestId, OpenRequest] = {}
        # A pooling row has one per text, a row of audio one per window, in their order.
        self._ids: dict[OpenRequest, list[RequestId]] = {}
        self._outputs: dict[OpenRequest, dict[RequestId, RequestOutput]] = {}
        self._partials: dict[RequestId, PartialOutputs] = {}
        self._histograms = RequestHistograms(engine.resolved.location.name, engine.limits.max_model_len)
        self._holds_media = False
        """Whether workers may hold images or audio of requests that have ended: the next step has them forget these."""
        self._patience_s = max_step_interval_s(engine.config.executor.timeout_s)
        # A worker process that ends is noticed by the next step.
        engine.executor.register_failure_callback(exchange.look)

    def run(self) -> None:
        """Run until the exchange has ended and its requests are answered. Raises a step's error, which answers them."""
        try:
            self._run()
            # Requests that arrived at the moment of the end.
            self._exchange.fail(self._exchange.ending)
            # If it ends because a rank is gone, the next step finds out.
            self._step()
            self._engine.close_followers()
        except BaseException as error:  # reported to the clients, and re-raised
            self._exchange.fail(f"the server has failed: {str(error) or type(error).__name__}")
            raise

    def _run(self) -> None:
        engine, exchange = self._engine, self._exchange
        exchange.histograms = self._histograms
        self._publish()
        stepped_s = time.monotonic()
        ending_s: float | None = None
        while not exchange.ending or engine.has_unfinished_requests():
            if not engine.has_unfinished_requests():
                if self._holds_media:
                    self._holds_media = False
                    self._step()
                    stepped_s = time.monotonic()
                exchange.wait(stepped_s + self._patience_s - time.monotonic())
            must_look = self._take()
            now_s = time.monotonic()
            if exchange.ending:
                ending_s = now_s if ending_s is None else ending_s
                if now_s - ending_s >= self._drain_s:
                    self._end_all(exchange.ending)
            # An empty step after an idle period.
            if engine.has_unfinished_requests() or must_look or now_s - stepped_s >= self._patience_s:
                self._step()
                stepped_s = time.monotonic()

    def _take(self) -> bool:
        """Admit and abort requests of the exchange. Returns whether the engine must be checked."""
        arrived, closed, must_look = self._exchange.take()
        for request in arrived:
            self._admit(request)
        ids = [request_id for request in closed for request_id in self._ids.get(request, ())]
        if ids:
            self._engine.requests.abort(ids)
        return must_look

    def _admit(self, request: OpenRequest) -> None:
        row = request.row
        if not isinstance(row, EncodedRow):
            ids = admit_split(self._engine, row)
        else:
            try:
                request_id = self._engine.requests.admit(
                    row.content, row.sampling, custom_id=row.custom_id, index=row.index
                )
            except ValueError as error:
                # Errors that only the engine detects, such as a bad word that is not a token.
                rejected = RequestOutput(
                    "", row.content.text, list(row.content.token_ids), finished=True, error=str(error)
                )
                self._exchange.give([(request, rejected)])
                return
            ids = [request_id]
            if request.is_streamed:
                self._partials[request_id] = PartialOutputs(
                    *(RequestOutputKind.CUMULATIVE, row.content.text, self._engine.tokenizer, row.content.encoder_text)
                )
        self._holds_media = self._holds_media or bool(row.media)
        self._ids[request], self._outputs[request] = ids, {}
        self._requests |= dict.fromkeys(ids, request)
        if not isinstance(row, EncodedPooledRow):
            for request_id in ids:
                self._histograms.begin(request_id, request.arrived_s)

    def _step(self) -> None:
        ended_now = self._engine.step()
        now_s = time.monotonic()
        steps = [self._ended(output, now_s) for output in ended_now]
        self._histograms.step(self._engine.scheduler.running, now_s)
        outputs = [ended for ended in steps if ended is not None]
        groups = self._engine.scheduler.queues.groups
        for request_id, partial in self._partials.items():
            request, group = self._requests[request_id], groups.get(request_id)
            # A reader that has not read the last one gets everything in the next.
            part = None if request.output is not None or group is None else partial.partial(group, None)
            if part is not None:
                outputs.append((request, part))
        self._exchange.give(outputs)
        self._publish()

    def _ended(self, output: RequestOutput, now_s: float) -> tuple[OpenRequest, RequestOutput | RowOutputs] | None:
        """Output of a request; None while others of it are not answered."""
        request_id = RequestId(int(output.request_id))
        request = self._requests.pop(request_id)
        self._partials.pop(request_id, None)
        self._histograms.end(request_id, output, self._sampling_of(request, request_id), request.arrived_s, now_s)
        outputs = self._outputs[request]
        outputs[request_id] = output
        if len(outputs) < len(self._ids[request]):
            return None
        del self._outputs[request]
        ordered = tuple([outputs[each] for each in self._ids.pop(request)])
        return request, output if isinstance(request.row, EncodedRow) else RowOutputs(ordered)

    def _sampling_of(self, request: OpenRequest, request_id: RequestId) -> SamplingParams | None:
        """Parameters of one of a request's sequences of tokens; None for a pooled text."""
        row = request.row
        if isinstance(row, EncodedAudioRow):
            return row.windows[self._ids[request].index(request_id)].sampling
        return row.sampling if isinstance(row, EncodedRow) else None

    def _end_all(self, reason: str) -> None:
        if not self._exchange.has_failed:
            logger.warning("%d requests are not answered: %s", len(self._requests), reason)
            self._exchange.fail(reason)
            self._engine.requests.abort(list(self._requests))

    def _publish(self) -> None:
        engine = self._engine
        self._exchange.metrics = engine_metrics(engine.scheduler, engine.resolved.location.name)
