"""An engine as scripts for vLLM drive it by hand: requests with names, prompts in any form, outputs as they come."""

import threading
import weakref
from collections.abc import Iterable
from typing import Any

from spmd_worker.compat.call_arguments import check_extras
from spmd_worker.compat.engine_args import EngineArgs, run_config
from spmd_worker.compat.prompts import Encoded, Prompt, encode_prompt, take_pooling
from spmd_worker.engine.engine import LLMEngine as Engine
from spmd_worker.engine.partial_outputs import PartialOutputs
from spmd_worker.engine.startup import read_run, start_engine
from spmd_worker.sequence.outputs import PoolingOutput, PoolingRequestOutput, RequestOutput
from spmd_worker.sequence.pooling_params import PoolingParams, pooled_sampling
from spmd_worker.sequence.request import RequestId, check_sampling
from spmd_worker.sequence.sampling_params import RequestOutputKind, SamplingParams


class LLMEngine:
    """vLLM's names over an engine (`engine`, whose other methods are here too), as `from_engine_args` starts it, or as
    an `LLM` has it: `LLMEngine(llm.llm_engine)`.

    Under torchrun every rank of a replica makes the same calls, in the same order; or one rank alone makes them, while
    the others are in `follow`. `add_request` and `abort_request` may come from any thread while another steps.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._numbers: dict[str, RequestId] = {}
        self._names: dict[RequestId, str] = {}
        self._partials: dict[RequestId, PartialOutputs] = {}
        # A request may end before the thread that added it has noted its name.
        self._lock = threading.RLock()

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs, *_: Any, **__: Any) -> "LLMEngine":
        """Start an engine. What vLLM's method takes besides (usage_context, stat_loggers) is without effect.

        Raises what `LLM(**vars(engine_args))` raises. `shutdown` gives back memory and groups, and so does forgetting
        the engine.
        """
        engine = start_engine(read_run(run_config(vars(engine_args))))
        weakref.finalize(engine, engine.release, is_closed=False)
        return cls(engine)

    def __getattr__(self, name: str) -> Any:
        if name == "engine":
            raise AttributeError(name)
        return getattr(self.engine, name)

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | PoolingParams,
        arrival_time: float | None = None,
        lora_request: Any = None,
        *,
        priority: int = 0,
        **others: Any,
    ) -> str:
        """Queue a request; its outputs have `request_id`. Its random numbers, where it has no seed, are named by the
        order of requests. `params.output_kind` says whether `step` gives outputs of it before it ends. With
        PoolingParams, in a run that pools, `step` gives a PoolingRequestOutput, as `LLM.encode` does.

        Returns `request_id`. Raises ValueError for a request that could never be answered, for a name that a request
        has which has not ended, and for arguments that ask for what is not here; TypeError for what is no request.
        """
        if not isinstance(request_id, str):
            raise TypeError(f"request_id={request_id!r} is a {type(request_id).__name__}: give text")
        asked = [name for name, value in others.items() if value]
        if asked:
            raise ValueError(f"{asked[0]}={others[asked[0]]!r} is refused: a request is a prompt and its parameters")
        check_extras(1, lora_request, [priority])
        if not isinstance(params, PoolingParams):
            check_sampling(params)
        encoded = encode_prompt(prompt, self.engine.need_tokenizer)
        if encoded.error is not None:
            raise ValueError(encoded.error)
        with self._lock:
            if request_id in self._numbers:
                raise ValueError(f"request_id={request_id!r} is the name of a request that has not ended: give another")
            number = self._add(encoded, params)
            self._numbers[request_id], self._names[number] = number, request_id
            if isinstance(params, SamplingParams) and params.output_kind is not RequestOutputKind.FINAL_ONLY:
                self._partials[number] = PartialOutputs(params.output_kind, encoded.text, self.engine.tokenizer)
        return request_id

    def _add(self, encoded: Encoded, params: SamplingParams | PoolingParams) -> RequestId:
        if isinstance(params, SamplingParams):
            return self.engine.add_request(encoded.token_ids, params, prompt=encoded.text)
        config = self.engine.limits.pooling
        take_pooling(encoded, params, config, self.engine.max_model_len, self.engine.need_tokenizer)
        if encoded.error is not None:
            raise ValueError(encoded.error)
        assert config is not None, "of a run that pools"
        assert encoded.pooling is not None, "as it was taken"
        token_ids, sampling = encoded.token_ids, pooled_sampling(encoded.pooling, config)
        self.engine.check_request(token_ids, sampling, encoded.pooling)
        return self.engine.admit_request(token_ids, sampling, prompt=encoded.text, pooling=encoded.pooling)

    def abort_request(self, request_ids: str | Iterable[str]) -> None:
        """End requests at the next step; what they have so far comes back with finish reason "abort". A name that no
        request has, or has no more, is not an error.
        """
        names = [request_ids] if isinstance(request_ids, str) else list(request_ids)
        # Without the lock: a finalizer or a signal's handler may come here while this thread has the engine's lock, for
        # which another thread waits that has this one's.
        numbers = [self._numbers.get(name) for name in names]
        self.engine.abort_request([number for number in numbers if number is not None])

    def step(self) -> list[RequestOutput | PoolingRequestOutput[PoolingOutput]]:
        """One step: the requests that ended in it, and those with new tokens that want outputs before."""
        with self.engine.calls.inside("step"):
            return self._outputs_of(self.engine.step())

    def _outputs_of(self, ended: list[RequestOutput]) -> list[RequestOutput | PoolingRequestOutput[PoolingOutput]]:
        with self._lock:
            outputs = [_shown(self._ended(output)) for output in ended]
            for number, partial in self._partials.items():
                group = self.engine.scheduler.queues.groups.get(number)
                output = partial.partial(group, self.engine.request_metrics(group)) if group is not None else None
                if output is not None:
                    output.request_id = self._names[number]
                    outputs.append(output)
        return outputs

    def get_num_unfinished_requests(self) -> int:
        """Requests that were added and have not ended."""
        return self.engine.num_unfinished

    def is_sleeping(self) -> bool:
        """Whether anything sleeps."""
        return self.engine.executor.is_sleeping

    def reset_mm_cache(self) -> None:
        """Nothing: models of text have no other inputs."""

    def _ended(self, output: RequestOutput) -> RequestOutput:
        number = RequestId(int(output.request_id))
        partial = self._partials.pop(number, None)
        name = self._names.pop(number, None)
        if name is not None:
            del self._numbers[name]
            output.request_id = name
        return output if partial is None else partial.final(output)


def _shown(output: RequestOutput) -> RequestOutput | PoolingRequestOutput[PoolingOutput]:
    """One that was pooled as what it gives."""
    if output.vector is None:
        return output
    vector, token_ids = PoolingOutput(output.vector), output.prompt_token_ids
    return PoolingRequestOutput(output.request_id, vector, token_ids, output.num_cached_tokens)
