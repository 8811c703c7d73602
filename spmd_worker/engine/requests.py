"""Requests of an engine on this rank: ids, limits, prompts and times, from admission to output."""

import glob
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from spmd_worker.base.config.plain_values import plain_text
from spmd_worker.base.errors import AdapterError
from spmd_worker.base.remote_names import is_remote
from spmd_worker.compat.audio_reading import open_encoder_prompts
from spmd_worker.compat.image_reading import open_image_prompts
from spmd_worker.engine.call_guard import CallGuard
from spmd_worker.engine.embeds_reader import EmbedsReader
from spmd_worker.engine.encoder_limits import encoder_limits
from spmd_worker.engine.life import Life
from spmd_worker.engine.outputs import request_output
from spmd_worker.engine.thinking_budget import ThinkingBudget
from spmd_worker.engine.validation import RequestLimits, as_request_ids
from spmd_worker.media.prompt_content import PromptContent
from spmd_worker.media.sent_audio import PreparedMedia
from spmd_worker.replica.grammar.compiler import GrammarCompiler
from spmd_worker.replica.scheduler.adapter_registry import AdapterRegistry
from spmd_worker.replica.scheduler.pause import Pause
from spmd_worker.replica.sequence.encoder_input import encoder_text
from spmd_worker.replica.sequence.events import Abort, Admit
from spmd_worker.replica.sequence.input_rows import PLACEHOLDER, InputRows
from spmd_worker.replica.sequence.media_items import shifted
from spmd_worker.replica.sequence.outputs import RequestMetrics, RequestOutput
from spmd_worker.replica.sequence.prompt_adapter_request import digest_in
from spmd_worker.replica.sequence.request import Request, RequestId, random_stream, unnamed_stream, whole_number
from spmd_worker.replica.sequence.resolved_params import resolve_params
from spmd_worker.replica.sequence.sampling_params import SamplingParams
from spmd_worker.replica.sequence.sequence import SequenceGroup
from spmd_worker.replica.sequence.step import StepPlan
from spmd_worker.resolved import ResolvedRun
from spmd_worker.worker.memory.media_memory import media_row_limits


class Requests:
    """Requests added on this rank. Only rank 0's are answered: other ranks count the requests of its events.

    Any thread may call `add`, `admit` and `abort` while another one steps. `hold_rows` and `hold_media` give the
    workers the rows and the pixels of a request that is admitted here.
    """

    def __init__(
        self,
        resolved: ResolvedRun,
        calls: CallGuard,
        life: Life,
        adapters: AdapterRegistry,
        prompt_adapters: AdapterRegistry,
        hold_rows: Callable[[int, bytes, bytes], None] = lambda *rows: None,
        hold_media: Callable[[int, int, PreparedMedia], None] = lambda *image: None,
        pause: Pause | None = None,
    ) -> None:
        model_config, tokenizer = resolved.model_config, resolved.tokenizer
        self.limits = RequestLimits(
            model_config.vocab_size,
            resolved.max_model_len,
            has_tokenizer=tokenizer is not None,
            grammars=GrammarCompiler(lambda: tokenizer, model_config.vocab_size, model_config.eos_token_ids),
            pooling=model_config.pooling,
            rows=EmbedsReader(
                model_config.embedding_size,
                resolved.dtype,
                resolved.max_model_len,
                _folder_of_input(resolved.config.job.input),
                needs_ids=model_config.takes_ids,
            ),
            images=open_image_prompts(resolved),
            architecture=model_config.architecture,
            media=media_row_limits(resolved),
            encoder=encoder_limits(resolved),
            encoder_prompts=open_encoder_prompts(resolved),
            nums_chosen=tuple({layer.experts.num_chosen for layer in model_config.layers if layer.experts is not None}),
            thinking=ThinkingBudget(resolved.config.model, tokenizer, model_config.vocab_size),
            allows_priority=resolved.config.scheduler.policy == "priority",
            max_step_tokens=resolved.config.scheduler.max_num_batched_tokens,
            num_text_ids=model_config.num_text_ids,
        )
        self._hold_rows, self._hold_media, self._pause = hold_rows, hold_media, pause
        self.num_requests = 0
        self.num_calls = 0
        """Number of calls with a list of prompts: the same on every rank."""
        self.num_unnamed = 0
        """Number of requests with neither custom id nor index."""
        self.times = RequestTimes()
        self.adapters = adapters
        """The loaded LoRA adapters."""
        self.prompt_adapters = prompt_adapters
        self.leaving_adapters: tuple[int, ...] = ()
        """Digests of adapters that a change in progress drops: no request may have them."""
        self.kept_outputs: list[Any] | None = None
        """Outputs of a step that a signal handler interrupted: the next call of `step` returns them, without a step."""
        self._resolved, self._tokenizer, self._calls, self._life = resolved, tokenizer, calls, life
        self._prompts: dict[RequestId, tuple[str | None, str | None]] = {}
        self._adapter_uses: dict[int, int] = {}
        self._last_normalised = (resolved.default_sampling, resolved.default_sampling)

    @property
    def open_ids(self) -> tuple[RequestId, ...]:
        """Ids of the requests that have not ended, in the order of their addition."""
        return tuple(self._prompts)

    @property
    def num_unfinished(self) -> int:
        """Number of requests added here and not answered yet."""
        return len(self._prompts) + sum(bool(output.finished) for output in self.kept_outputs or ())

    @property
    def has_unfinished(self) -> bool:
        """Whether this rank has requests whose last output was not returned."""
        return bool(self._prompts or self.kept_outputs)

    def check_idle(self) -> None:
        """Raise RuntimeError unless the engine is open, awake, not paused and without requests."""
        self._life.check_open()
        self._life.check_awake()
        # Steps answer no request in a pause.
        if self._pause is not None and self._pause.is_paused:
            raise RuntimeError("generation is paused: call resume_generation() before anything is computed")
        self.check_idle_or_asleep()

    def check_idle_or_asleep(self) -> None:
        """Raise RuntimeError unless the engine is open and without requests."""
        self._life.check_open()
        if self.has_unfinished:
            raise RuntimeError(
                f"{self.num_unfinished} requests of llm_engine.add_request or enqueue are not answered yet: call "
                f"llm_engine.step until they are, or wait_for_completion"
            )

    def check(self, prompt: PromptContent, sampling: SamplingParams) -> None:
        """Raise ValueError for a request that cannot be answered, TypeError for an invalid type. Local to this rank."""
        self.limits.check(prompt, sampling)
        self._normalised(sampling)

    def add(
        self, prompt: PromptContent, sampling: SamplingParams, *, custom_id: str | None = None, index: int | None = None
    ) -> RequestId:
        """Truncate and check a request, with the errors of `check`, and queue it (`admit`)."""
        if not isinstance(custom_id, str | None):
            raise TypeError(f"custom_id is a {type(custom_id).__name__}: give text")
        prompt.text, prompt.encoder_text = plain_text(prompt.text), plain_text(prompt.encoder_text)
        prompt.token_ids = self.limits.truncate(prompt, sampling)
        self.limits.check_priority(prompt.priority)
        self.check(prompt, sampling)
        return self.admit(prompt, sampling, custom_id=plain_text(custom_id), index=index)

    def admit(
        self,
        prompt: PromptContent,
        sampling: SamplingParams,
        *,
        custom_id: str | None = None,
        index: int | None = None,
        call: int = 0,
    ) -> RequestId:
        """Queue a request that passed `check` for the next step. Its random stream is named by `custom_id`, else by
        `index` in call number `call`, else by its position among requests with neither. The `sampling` of a pooled
        request is that of `pooled_sampling`. Raises AdapterError for an adapter that is not loaded any more.
        """
        with self._calls.queueing("add_request"):
            self._life.check_not_closed()
            self._life.check_awake()
            self._check_adapter(prompt.adapter)
            token_ids, rows, virtual, encoder = tuple(prompt.token_ids), prompt.rows, prompt.virtual, prompt.encoder
            given_rows: tuple[InputRows, ...] = () if rows is None else (rows.at(0),)
            items, num_virtual = prompt.media_items, prompt.num_virtual_tokens
            if virtual is not None:
                self._check_prompt_adapter(virtual.digest)
                token_ids = (PLACEHOLDER,) * virtual.num_tokens + token_ids
                given_rows = (virtual.rows, *[replace(each, start=virtual.num_tokens) for each in given_rows])
                items = shifted(items, num_virtual)
            if self.limits.pooling is not None and (read_twice := self.limits.pooling.shifted) is not None:
                encoder, token_ids = encoder_text(token_ids), read_twice.decoder_ids(token_ids)
            if encoder is not None:
                block_size = self._resolved.config.cache.block_size
                token_ids, item = encoder.before(token_ids, block_size)
                items, num_virtual = (item,), encoder.num_positions(block_size)
            seed, request_id = self._resolved.config.seed, RequestId(self.num_requests)
            if custom_id is None and index is None:
                stream = unnamed_stream(seed, sampling.seed, self.num_unnamed)
                self.num_unnamed += 1
            else:
                row = 0 if index is None else whole_number("index", index)
                stream = random_stream(seed, sampling.seed, custom_id, row, call)
            regime = self.rope_regime(len(token_ids), sampling) if prompt.rope_regime is None else prompt.rope_regime
            normalised = self._normalised(sampling)
            if self.limits.thinking is not None:
                normalised = self.limits.thinking.resolved(normalised, token_ids)
            given = (token_ids, normalised, stream, regime, prompt.pooling, prompt.adapter, given_rows)
            request = Request(request_id, *given, num_virtual, items, prompt.priority)
            # The workers have the text that an encoder reads: its ids.
            held = () if encoder is not None and not prompt.media else items
            assert [each.media_id for each in held] == [each.media_id for each in prompt.media], request_id
            if rows is not None:
                self._hold_rows(request_id, rows.content, rows.data)
            for number, each in enumerate(prompt.media):
                # Only the leader of a replica has all.
                if each.content.has_data:
                    self._hold_media(request_id, number, each)
            self.num_requests += 1
            self._prompts[request_id] = (prompt.text, prompt.encoder_text)
            for digest in adapters_of(request):
                self._adapter_uses[digest] = self._adapter_uses.get(digest, 0) + 1
            self.times.add(request_id)
            self._calls.queue(Admit(request))
            return request_id

    def num_with_adapter(self, digest: int) -> int:
        """Number of unanswered requests of this rank with an adapter."""
        return self._adapter_uses.get(digest, 0)

    def rope_regime(self, num_prompt_tokens: int, sampling: SamplingParams) -> int:
        max_model_len = self._resolved.max_model_len
        most = min(num_prompt_tokens + (sampling.max_tokens or max_model_len), max_model_len)
        # The last sampled token is not computed.
        return self._resolved.model_config.rope_regime(num_prompt_tokens, max(most - 1, num_prompt_tokens))

    def abort(self, request_ids: str | int | Iterable[str | int]) -> None:
        """End requests at the next step; their outputs so far are returned with finish reason "abort".

        Ids are the results of `add` or the `request_id` of outputs; those without an unfinished request are ignored.
        Raises TypeError for an invalid id, before any request is ended.
        """
        numbers = as_request_ids(request_ids)
        with self._calls.queueing("abort_request"):
            for number in numbers:
                if number in self._prompts:
                    self._calls.queue(Abort(number))

    def count(self, request: Request) -> None:
        """Count a request of rank 0, so that ids are the same on every rank."""
        with self._calls.lock:
            self.num_requests = max(self.num_requests, request.request_id + 1)

    def restore_counts(self, num_requests: int, num_calls: int, num_unnamed: int) -> None:
        """Continue the counts of the engine that this one replaces, the same on every rank: ids stay unique."""
        self.num_requests, self.num_calls, self.num_unnamed = num_requests, num_calls, num_unnamed

    def metrics(self, group: SequenceGroup) -> RequestMetrics | None:
        """Times of a request; None for one that was not added here."""
        num_output_tokens = sum([len(each.output_token_ids) for each in group.sequences])
        return self.times.read(group.request.request_id, num_output_tokens)

    def finish(self, group: SequenceGroup) -> RequestOutput:
        request_id, metrics = group.request.request_id, self.metrics(group)
        self.times.forget(request_id)
        if request_id in self._prompts:
            for digest in adapters_of(group.request):
                with self._calls.lock:
                    self._adapter_uses[digest] -= 1
                    if not self._adapter_uses[digest]:
                        del self._adapter_uses[digest]
        prompt, encoder_prompt = self._prompts.pop(request_id, (None, None))
        late = None if self.limits.pooling is None else self.limits.pooling.late
        return request_output(group, prompt, self._tokenizer, metrics, encoder_prompt, late)

    def _check_adapter(self, digest: int) -> None:
        if digest and (not self.adapters.has(digest) or digest in self.leaving_adapters):
            raise AdapterError("the request's adapter is not loaded any more: add it again")

    def _check_prompt_adapter(self, digest: int) -> None:
        if not self.prompt_adapters.has(digest) or digest in self.leaving_adapters:
            raise AdapterError("the request's prompt adapter is not loaded any more: add it again")

    def _normalised(self, sampling: SamplingParams) -> SamplingParams:
        """Normalise parameters; the last result is cached, because rows often share their parameters."""
        # Read and set once each: several threads may call `check`.
        last = self._last_normalised
        if sampling is not last[0]:
            frozen = sampling.frozen()
            last = self._last_normalised = (frozen, resolve_params(frozen, self._tokenizer, self.limits.vocab_size))
        return last[1]


def adapters_of(request: Request) -> tuple[int, ...]:
    """Digests of the LoRA and prompt adapters that a request needs."""
    prompt_adapter = digest_in(request.rows[0]) if request.has_prompt_adapter else 0
    return tuple(digest for digest in (request.adapter, prompt_adapter) if digest)


def _folder_of_input(name: str | None) -> Path | None:
    """Folder under which the rows of a job may name files: that of its input, or that above the first pattern."""
    if name is None or name == "-" or is_remote(name):
        return None
    folder = Path(name).absolute().parent
    return next((each for each in (folder, *folder.parents) if not glob.has_magic(str(each)) or each.is_dir()), None)


class RequestTimes:
    """Times of each request on this rank, for `RequestOutput.metrics`. No decision depends on them."""

    def __init__(self) -> None:
        self._metrics: dict[RequestId, RequestMetrics] = {}

    def add(self, request_id: RequestId) -> None:
        self._metrics[request_id] = RequestMetrics(arrival_time=time.time(), queued_ts=time.monotonic())

    def set_arrival(self, request_id: RequestId, arrival_time: float) -> None:
        """Set an earlier time of arrival, in seconds since the epoch."""
        metrics = self._metrics.get(request_id)
        if metrics is not None:
            metrics.arrival_time = arrival_time

    def begin(self, plan: StepPlan) -> None:
        """Record that a step was planned. Only its `groups`, which a decode step has none of, are looked at."""
        for group in plan.groups:
            metrics = self._metrics.get(group.request_id)
            if metrics is not None and not metrics.scheduled_ts:
                metrics.scheduled_ts = time.monotonic()

    def end(self, plan: StepPlan) -> None:
        for group in plan.groups:
            metrics = self._metrics.get(group.request_id)
            if metrics is None or metrics.first_token_ts:
                continue
            if any(sequence.num_samples for sequence in group.sequences):
                metrics.first_token_ts = metrics.last_token_ts = time.monotonic()
                metrics.first_token_latency = time.time() - metrics.arrival_time

    def read(self, request_id: RequestId, num_output_tokens: int) -> RequestMetrics | None:
        """Metrics of a request whose last tokens were sampled now; None for one that was not added here."""
        metrics = self._metrics.get(request_id)
        if metrics is None:
            return None
        last_token_ts = time.monotonic() if num_output_tokens else metrics.last_token_ts
        return replace(metrics, num_generation_tokens=num_output_tokens, last_token_ts=last_token_ts)

    def forget(self, request_id: RequestId) -> None:
        self._metrics.pop(request_id, None)
