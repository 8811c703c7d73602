"""`LLMEngine`, vLLM's engine with explicit steps: named requests, prompts in any form, partial outputs."""

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from numbers import Real
from typing import TYPE_CHECKING, Any, Self

import torch

from spmd_worker.base.names import hint, with_keyword_hints
from spmd_worker.compat.adapter_requests import check_no_prompt_adapter, check_request, set_in_output
from spmd_worker.compat.call_arguments import check_extras, check_request_extras, priorities_of
from spmd_worker.compat.engine_args import EngineArgs, run_config
from spmd_worker.compat.engine_model_config import EngineModelConfig
from spmd_worker.compat.key_names import explain_in_keywords
from spmd_worker.compat.methods import ENGINE_ABSENT
from spmd_worker.compat.metrics import Metric, Vector, engine_metrics
from spmd_worker.compat.prompts import Encoded, Prompt, apply_pooling
from spmd_worker.compat.script_tokenizer import script_tokenizer
from spmd_worker.compat.text_offsets import late_chunks
from spmd_worker.engine.calls.given_prompts import encode_given
from spmd_worker.engine.engine import Engine
from spmd_worker.engine.lora_adapters import LoRAAdapters
from spmd_worker.engine.partial_outputs import PartialOutputs
from spmd_worker.engine.prompt_adapters import PromptAdapters
from spmd_worker.engine.startup import read_run, start_engine
from spmd_worker.engine.validation import as_request_ids
from spmd_worker.executor.executor import Executor
from spmd_worker.media.prompt_content import PromptContent
from spmd_worker.replica.sequence.adapter_kind import LORA, PROMPT
from spmd_worker.replica.sequence.decoder_prompt import RuledParams
from spmd_worker.replica.sequence.late_chunking import LateChunkingMetadata
from spmd_worker.replica.sequence.lora_request import LoRARequest
from spmd_worker.replica.sequence.outputs import PoolingOutput, PoolingRequestOutput, RequestMetrics, RequestOutput
from spmd_worker.replica.sequence.pooling_params import PoolingParams, pooled_sampling
from spmd_worker.replica.sequence.prompt_adapter_request import PromptAdapterRequest
from spmd_worker.replica.sequence.request import RequestId, check_sampling
from spmd_worker.replica.sequence.sampling_params import RequestOutputKind, SamplingParams
from spmd_worker.replica.sequence.sequence import SequenceGroup
from spmd_worker.tokenizer.tokenizer import Tokenizer
from spmd_worker.worker.adapter_methods import AdapterMethods


class NamedRequests:
    """Open requests of one engine that have names, and the partial outputs of those that want them."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._ids: dict[str, RequestId] = {}
        self._names: dict[RequestId, str] = {}
        self._lora_requests: dict[RequestId, LoRARequest] = {}
        self._partials: dict[RequestId, PartialOutputs] = {}
        self._chunks: dict[RequestId, LateChunkingMetadata] = {}

    def has(self, name: str) -> bool:
        return name in self._ids

    def add(
        self,
        name: str,
        request_id: RequestId,
        lora_request: LoRARequest | None,
        chunks: LateChunkingMetadata | None = None,
    ) -> None:
        self._ids[name], self._names[request_id] = request_id, name
        if chunks is not None:
            self._chunks[request_id] = chunks
        if lora_request is not None:
            self._lora_requests[request_id] = lora_request

    def track(self, request_id: RequestId, params: SamplingParams, prompt: PromptContent) -> None:
        """Prepare partial outputs of a request, if it wants them."""
        if params.output_kind is not RequestOutputKind.FINAL_ONLY:
            given = (prompt.text, self._tokenizer, prompt.encoder_text)
            self._partials[request_id] = PartialOutputs(params.output_kind, *given)

    def ids_of(self, name: Any) -> list[RequestId]:
        """Id of the open request with this name or number, if any. Raises TypeError for an invalid id."""
        is_text = isinstance(name, str)
        if is_text and name in self._ids:
            return [self._ids[name]]
        # The number of a named request, given as text, is not that request's name.
        return [each for each in as_request_ids([name]) if not (is_text and each in self._names)]

    def final(self, output: RequestOutput) -> RequestOutput | PoolingRequestOutput[PoolingOutput]:
        request_id = RequestId(int(output.request_id))
        partial = self._partials.pop(request_id, None)
        name, chunks = self._names.pop(request_id, None), self._chunks.pop(request_id, None)
        set_in_output(output, self._lora_requests.pop(request_id, None))
        if name is not None:
            del self._ids[name]
            output.request_id = name
            if output.vector is not None or output.token_vectors is not None:
                vector, token_ids = PoolingOutput(output.pooled), output.prompt_token_ids
                return PoolingRequestOutput(name, vector, token_ids, output.num_cached_tokens, late_chunking=chunks)
        return output if partial is None else partial.final(output)

    def partial_outputs(
        self,
        groups: Mapping[RequestId, SequenceGroup],
        metrics_of: Callable[[SequenceGroup], RequestMetrics | None],
    ) -> list[RequestOutput]:
        """Partial outputs of the requests that want them; `groups` are the running and waiting ones."""
        outputs = []
        for request_id, partial in list(self._partials.items()):
            group = groups.get(request_id)
            output = partial.partial(group, metrics_of(group)) if group is not None else None
            if output is not None:
                output.request_id = self._names.get(request_id, output.request_id)
                set_in_output(output, self._lora_requests.get(request_id))
                outputs.append(output)
        return outputs


@with_keyword_hints()
@explain_in_keywords
class LLMEngine(AdapterMethods, Engine):
    """Engine with vLLM's methods, started by `from_engine_args` or by an `LLM` (`llm.llm_engine`).

    Under torchrun every rank of a replica makes the same calls, in the same order; or one rank makes them, while the
    others are in `follow`. Any thread may call `add_request` and `abort_request` while another one steps.
    """

    def __new__(cls, *given: Any, **_: Any) -> Self:
        """`LLMEngine(llm.llm_engine)` returns that engine."""
        return given[0] if given and isinstance(given[0], cls) else super().__new__(cls)

    def __init__(self, *given: Any, **named: Any) -> None:
        if given and given[0] is self:
            return
        super().__init__(*given, **named)
        self.named_requests = NamedRequests(self.tokenizer)

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs, *_: Any, **__: Any) -> Self:
        """Start an engine. Further arguments of vLLM's method (usage_context, stat_loggers) have no effect.

        Raises the errors of `LLM(**vars(engine_args))`. `shutdown` releases memory and groups, as does the garbage
        collection of the engine.
        """
        engine = start_engine(read_run(run_config(vars(engine_args))), engine_class=cls)
        weakref.finalize(engine, engine.life.release, is_closed=False)
        return engine

    if not TYPE_CHECKING:  # a type checker would accept every name

        def __getattr__(self, name: str) -> Any:
            raise AttributeError(f"LLMEngine has no attribute {name!r}{hint(name, dir(self), ENGINE_ABSENT)}")

    def add_request(
        self,
        request_id: str | Sequence[int],
        prompt: Prompt | SamplingParams,
        params: SamplingParams | PoolingParams | None = None,
        arrival_time: float | None = None,
        lora_request: LoRARequest | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        prompt_text: str | None = None,
        prompt_adapter_request: PromptAdapterRequest | None = None,
        *,
        custom_id: str | None = None,
        index: int | None = None,
        **others: Any,
    ) -> str | RequestId:
        """Queue a request, whose outputs have `request_id`. Without a seed, its position among the requests names its
        random stream. `params.output_kind` selects partial outputs from `step`. With PoolingParams, in a pooling run,
        `step` returns a PoolingRequestOutput, as `LLM.encode` does. `arrival_time`, in seconds since the epoch, is for
        its metrics; `prompt_text` is its output's `prompt`; `priority` is as in `LLM.generate`. An adapter that is not
        loaded is loaded first, in steps of the engine (`add_lora`).

        `add_request(token_ids, params)` queues a request without a name and returns its number; `custom_id` or `index`
        name its random stream, as for the rows of a job.

        Returns `request_id`. Raises ValueError for a request that cannot be answered, for the name of an open request,
        and for unsupported arguments; TypeError for an invalid type.
        """
        check_request_extras(trace_headers, others)
        check_extras(tokenization_kwargs)
        (priority,) = priorities_of(1, [priority])
        self.limits.check_priority(priority)
        check_request(lora_request, LORA)
        check_request(prompt_adapter_request, PROMPT)
        if arrival_time is not None and (isinstance(arrival_time, bool) or not isinstance(arrival_time, Real)):
            raise TypeError(
                f"arrival_time is a {type(arrival_time).__name__}: give seconds since the epoch, or leave it out"
            )
        if not isinstance(prompt_text, str | None):
            raise TypeError(f"prompt_text is a {type(prompt_text).__name__}: give text")
        if params is None:
            if lora_request is not None or prompt_adapter_request is not None:
                raise ValueError("adapters are for requests with a name: add_request(name, prompt, params, ...)")
            return self._add_unnamed(request_id, prompt, custom_id, index, priority)
        if not isinstance(request_id, str):
            raise TypeError(f"request_id={request_id!r} is a {type(request_id).__name__}: give text")
        if custom_id is not None or index is not None:
            raise ValueError("custom_id and index are for requests without a name: leave them out, or give a seed")
        if not isinstance(params, PoolingParams):
            check_sampling(params)
        is_truncated = params.truncate_prompt_tokens is not None
        encoded = encode_given(prompt, self, is_truncated=is_truncated)
        if encoded.error is not None:
            raise ValueError(encoded.error)
        # Not in the lock: an adapter that is not loaded takes steps.
        encoded.adapter = 0 if lora_request is None else self.adapters.digest_of(lora_request)
        encoded.priority = priority
        if isinstance(params, PoolingParams):
            check_no_prompt_adapter(prompt_adapter_request)
        (encoded.virtual,) = self.prompt_adapters.virtual_tokens([prompt_adapter_request])
        # Locked: a request might end before the thread that added it has stored its name.
        with self.calls.lock:
            if self.named_requests.has(request_id):
                raise ValueError(f"request_id={request_id!r} is the name of an open request: give another")
            sampling = self._pooled(encoded, params) if isinstance(params, PoolingParams) else params
            shown = encoded if prompt_text is None else replace(encoded, text=prompt_text)
            number = self.requests.add(shown, encoded.completed(sampling, RuledParams()))
            if isinstance(params, SamplingParams):
                self.named_requests.track(number, params, shown)
            if arrival_time is not None:
                self.requests.times.set_arrival(number, float(arrival_time))
            chunks = late_chunks(encoded, self.limits.pooling, self.need_tokenizer)
            self.named_requests.add(request_id, number, lora_request, chunks)
        return request_id

    def _add_unnamed(
        self, token_ids: Any, sampling: Any, custom_id: str | None, index: int | None, priority: int
    ) -> RequestId:
        if isinstance(token_ids, str) and not isinstance(sampling, SamplingParams | Mapping):
            raise TypeError(
                "params is missing: give add_request a name, a prompt and SamplingParams, or token ids and "
                "SamplingParams"
            )
        with self.calls.lock:
            prompt = PromptContent(token_ids, priority=priority)
            number = self.requests.add(prompt, sampling, custom_id=custom_id, index=index)
            self.named_requests.track(number, sampling, prompt)
        return number

    def _pooled(self, encoded: Encoded, params: PoolingParams) -> SamplingParams:
        """Prepare a prompt to pool, and return its sampling parameters. Raises ValueError."""
        config = self.limits.pooling
        apply_pooling(encoded, params, config, self.max_model_len, self.need_tokenizer)
        if encoded.error is not None:
            raise ValueError(encoded.error)
        assert config is not None, "checked by apply_pooling"
        assert encoded.pooling is not None, "set by apply_pooling"
        return pooled_sampling(encoded.pooling, config)

    def abort_request(self, request_ids: str | int | Iterable[str | int], internal: bool = False) -> None:
        """End requests at the next step; their outputs so far are returned with finish reason "abort". Names without an
        open request are ignored. `internal` is accepted for vLLM and has no effect.

        Requests without a name are ended by their number, or the `request_id` of their outputs. Raises TypeError for an
        invalid id, before any request is ended.
        """
        is_one = isinstance(request_ids, str | bytes | bytearray) or not isinstance(request_ids, Iterable)
        given: Any = [request_ids] if is_one else request_ids
        numbers = [number for each in given for number in self.named_requests.ids_of(each)]
        self.requests.abort(numbers)

    def step(self) -> list[RequestOutput | PoolingRequestOutput[PoolingOutput]]:  # type: ignore[override]  # see there
        """Run one step; returns the outputs of the requests that ended in it, and the partial outputs of those with new
        tokens that want them. A pooled request with a name has a PoolingRequestOutput.
        """
        outputs: list[Any] = super().step()
        return outputs

    def _outputs_of(self, ended: list[SequenceGroup]) -> list[Any]:
        with self.calls.lock:
            outputs = [self.named_requests.final(output) for output in super()._outputs_of(ended)]
            return [*outputs, *self.named_requests.partial_outputs(self.scheduler.queues.groups, self.requests.metrics)]

    def close_followers(self) -> None:
        """Rank 0 only: end the `follow` loops of the other ranks. The engine can be used further, with calls of all
        ranks or another `follow`. Raises RuntimeError while requests are unanswered, with their number.
        """
        with self.calls.inside("close_followers", is_alone=True):
            self.requests.check_idle_or_asleep()
            self.end_round()

    def get_num_unfinished_requests(self) -> int:
        """Number of requests that were added and have not ended."""
        return self.requests.num_unfinished

    def get_supported_tasks(self) -> tuple[str, ...]:
        """Tasks of rows: "generate", or `PoolingConfig.tasks` of a pooling model."""
        pooling = self.limits.pooling
        return ("generate",) if pooling is None else pooling.tasks

    def get_tokenizer(self) -> Any:
        """Same as `LLM.get_tokenizer`."""
        return self._script_tokenizer

    @cached_property
    def _script_tokenizer(self) -> Any:
        return script_tokenizer(self.need_tokenizer(), self.resolved.model_folder)

    def get_metrics(self) -> list[Metric | Vector]:
        """Same as `LLM.get_metrics`."""
        return engine_metrics(self.scheduler, self.resolved.location.name)

    @property
    def model_executor(self) -> Executor:
        """The executor; with a worker in this process, `driver_worker.model_runner.model` is its model."""
        return self.executor

    @cached_property
    def model_config(self) -> EngineModelConfig:
        """The model and the limits of this engine."""
        return EngineModelConfig(self.resolved, getattr(torch, self.resolved.dtype))

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Same as `Changes.reset_prefix_cache`; returns True. `reset_connector` has no effect."""
        self.changes.reset_prefix_cache(reset_running_requests)
        return True

    def set_weight_version(self, version: int) -> None:
        """Same as `LLM.set_weight_version`."""
        self.changes.set_weight_version(version)

    @property
    def _adapter_calls(self) -> LoRAAdapters:
        """The calls of `add_lora` and its like; ranks in `follow` read the folder that rank 0 names."""
        return self.adapters

    @property
    def _prompt_adapter_calls(self) -> PromptAdapters:
        return self.prompt_adapters

    def is_sleeping(self) -> bool:
        """Same as `LLM.is_sleeping`."""
        return self.executor.is_sleeping or self.pauses.is_by_sleep

    def is_paused(self) -> bool:
        """Whether generation is paused."""
        return self.pauses.is_paused

    def reset_encoder_cache(self) -> None:
        """Same as `LLM.reset_mm_cache`: encoded images are all that is kept of them."""
        self.reset_mm_cache()

    def apply_model(self, func: Callable[[Any], Any]) -> list[Any]:
        """Same as `LLM.apply_model`."""
        return self.changes.apply_model(func)

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Same as `LLM.collective_rpc`."""
        with self.calls.inside("collective_rpc"):
            self.life.check_not_closed()
            return self.executor.collective_rpc(method, timeout, args, kwargs)
