"""What people import: text in, text out.

In a plain script one process is the whole world; in a script under torchrun every rank makes the same calls and every
rank gets every output.
"""

import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Literal, get_args

import torch
from tqdm import tqdm

from spmd_worker.config.schema import (
    CacheConfig,
    ExecutorConfig,
    ModelOptions,
    ParallelConfig,
    RunConfig,
    SchedulerConfig,
    checked_value,
)
from spmd_worker.data_parallel.agreement import agree_on_call, agree_on_prompts
from spmd_worker.data_parallel.prompts import RoundPrompt, answer_alone, answer_together
from spmd_worker.data_parallel.replicas import open_replicas
from spmd_worker.data_parallel.weights import broadcast_weights
from spmd_worker.engine.engine import LLMEngine
from spmd_worker.engine.startup import read_run, restart_engine, start_engine
from spmd_worker.errors import ChatTemplateError, ConfigError, PromptsRefusedError
from spmd_worker.sequence.events import ResetPrefixCache
from spmd_worker.sequence.outputs import RequestOutput
from spmd_worker.sequence.request import as_token_ids
from spmd_worker.sequence.sampling_params import SamplingParams
from spmd_worker.tokenizer.tokenizer import Tokenizer

Prompt = str | Mapping[str, Any] | Sequence[int]
"""Text, `{"prompt": text}`, `{"prompt_token_ids": ids}`, or token ids."""

_PROMPT_KEYS: Final = ("prompt", "prompt_token_ids")

Messages = Sequence[Mapping[str, Any]]

OnError = Literal["raise", "row"]

_ON_ERROR: Final = get_args(OnError)


class LLM:
    """An engine in this process, or this rank's replica of one. Close it, or use it as a context manager; what is
    forgotten, or open when the interpreter ends, is closed then.

    Arguments are named and mean what they mean in vLLM; `num_blocks` makes a cache of a fixed size, `swap_space` and
    `host_tier_gib` are GiB of host memory a rank. Arguments are checked as a command line's are: ConfigError names the
    key, as a command line has it, the value and the rule. Raises ConfigError, ModelConfigError, TokenizerError or
    CheckpointError before anything is computed.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        tensor_parallel_size: int = 1,
        pipeline_parallel_size: int = 1,
        data_parallel_size: int = 1,
        pipeline_layers: list[int] | None = None,
        dtype: str = "auto",
        seed: int = 0,
        max_model_len: int | None = None,
        max_num_seqs: int | None = None,
        max_num_batched_tokens: int | None = None,
        gpu_memory_utilization: float | None = None,
        block_size: int | None = None,
        num_blocks: int | None = None,
        swap_space: float | None = None,
        host_tier_gib: float | None = None,
        enable_prefix_caching: bool = True,
        preemption_mode: str | None = None,
        enable_chunked_prefill: bool = True,
        load_format: str = "auto",
        logprobs_mode: str = "raw_logprobs",
        distributed_executor_backend: str = "auto",
        worker_cls: str | None = None,
        worker_extension_cls: str | None = None,
        timeout_s: float | None = None,
        device: str = "auto",
    ) -> None:
        cache = _given(
            block_size=block_size,
            num_blocks=num_blocks,
            gpu_memory_utilization=gpu_memory_utilization,
            swap_space_gib=swap_space,
            host_tier_gib=host_tier_gib,
            enable_prefix_caching=enable_prefix_caching,
        )
        scheduler = _given(
            max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens, preemption_mode=preemption_mode
        )
        # Checked before it is compared, here already.
        max_num_seqs = checked_value("scheduler.max_num_seqs", max_num_seqs, int | None)
        if max_num_seqs is not None and max_num_batched_tokens is None:
            scheduler["max_num_batched_tokens"] = max(max_num_seqs, SchedulerConfig().max_num_batched_tokens)
        executor = _given(timeout_s=timeout_s, worker_cls=worker_cls, worker_extension_cls=worker_extension_cls)
        path = os.fspath(model) if isinstance(model, os.PathLike) else model
        config = RunConfig(
            model=ModelOptions(path, dtype, max_model_len, load_format, logprobs_mode),
            parallel=ParallelConfig(tensor_parallel_size, pipeline_parallel_size, data_parallel_size, pipeline_layers),
            executor=ExecutorConfig(backend=distributed_executor_backend, **executor),
            cache=CacheConfig(**cache),
            scheduler=SchedulerConfig(enable_chunked_prefill=enable_chunked_prefill, **scheduler),
            device=device,
            seed=seed,
        )
        self.llm_engine: LLMEngine = start_engine(read_run(config))
        self._open()

    def _open(self) -> None:
        # When the engine is forgotten or the interpreter ends. Process groups have threads, and torch may abort the
        # process when it takes them down with the interpreter.
        self._release = weakref.finalize(self.llm_engine, self.llm_engine.release, is_closed=False)
        self._replicas = open_replicas(self.llm_engine)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        on_error: OnError = "raise",
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """One output a prompt, in order. Prompts that can never be answered (too long for the model, ...) raise
        PromptsRefusedError, a ValueError that names all of them, before anything is computed; with `on_error="row"`
        each of them gets an output with `error` and no completions, and the rest is answered.

        A prompt whose parameters have no `seed` draws by the engine's seed, the number of the call and its index in it:
        another call draws other numbers, and a program that runs again draws the same ones.

        Under torchrun every rank of an engine, those of all its replicas, must pass the same prompts:
        RanksDisagreeError names the first that differs. Every rank gets every output. What one rank raises before any
        prompt is answered, such as TypeError or ValueError for its arguments, is RankFailedError on the others, and the
        engine can be used again.
        """
        return self._run(
            "generate",
            lambda: [self._encode(prompt) for prompt in _as_list(prompts)],
            sampling_params,
            on_error,
            use_tqdm,
        )

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        add_generation_prompt: bool = True,
        on_error: OnError = "raise",
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """One conversation or a list of them through the model's chat template; otherwise as `generate`."""
        return self._run(
            "chat",
            lambda: [self._render(each, add_generation_prompt) for each in _as_conversations(messages)],
            sampling_params,
            on_error,
            use_tqdm,
        )

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer. Raises ConfigError for a model folder without one."""
        if self.llm_engine.tokenizer is None:
            raise ConfigError("the model folder has no tokenizer.json: give prompt_token_ids instead of text")
        return self.llm_engine.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What prompts get that come without parameters: the model's generation_config.json, then vLLM's defaults."""
        return self.llm_engine.default_sampling

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Run a method on the workers of this LLM's executor, by name or as a callable that gets the worker; answers in
        rank order. Under torchrun each rank has one worker; with the multiproc backend, which takes names only, this
        process has them all. Raises what the executor raises: an error that says which rank and what.
        """
        return self.llm_engine.executor.collective_rpc(method, timeout, args, kwargs)

    def apply_model(self, function: Callable[[Any], Any]) -> list[Any]:
        """Call `function` with this rank's shard of the model, as a torch module with the checkpoint's names.

        `named_parameters()`, `get_parameter(name)`, `state_dict()`, `load_state_dict(...)` and attributes
        (`model.model.layers[0].mlp.up_proj.weight`) show the checkpoint's tensors, or this rank's slices of them, and
        what `function` changes in them before it ends counts, a tied head included; `model.load_weights(pairs)` takes
        whole tensors by name, as `update_weights` does. It has no forward pass. Of a packed weight (those of the linear
        layers on the CPU) each parameter that is asked for is a copy, kept until `function` ends: where memory is
        short, ask for a few in each call. `collective_rpc("get_model_inspection")` shows shapes without any. Call
        `set_weight_version` after a change, or cached prefixes go on answering for the old weights.
        """
        return self.collective_rpc("apply_model", args=(function,))

    def worker_event(self, name: str, payload: Any = None, *, reset_prefix_cache: bool = False) -> list[Any]:
        """Change the state of all workers, between the same two steps on every rank, or of none.

        Every worker calls its method `prepare_NAME(payload)`; when all of them could, `commit_NAME`, and when one could
        not, `undo_NAME` on every rank (`WorkerBase`). Methods of your own come with `worker_extension_cls`. `payload`
        is what can cross processes: numbers, texts, bytes, lists, tuples, dicts. Under torchrun every rank calls this;
        requests of `llm_engine.add_request` go on meanwhile. Returns what the commits of this executor's workers
        returned, in rank order. `reset_prefix_cache`, for a change of what is computed: nothing that was cached before
        the commit is found after it. Raises WorkerEventError, on every rank, naming the lowest rank that refused and
        why; the LLM is as it was before.
        """
        self.llm_engine.check_open()
        agree_on_call(self.llm_engine, "worker_event", lambda: (name, payload, reset_prefix_cache))
        return self.llm_engine.worker_event(name, payload, [ResetPrefixCache()] if reset_prefix_cache else [])

    def start_profile(self, folder: str | Path) -> None:
        """Record what every rank computes, with torch's profiler, until `stop_profile`. Raises WorkerEventError where a
        rank cannot write to `folder`.
        """
        self.worker_event("start_profile", str(folder))

    def stop_profile(self) -> list[str]:
        """Write `trace.rank<N>.json` of every rank, for ui.perfetto.dev: the paths of this executor's workers. Raises
        WorkerEventError where no profile is being made.
        """
        return self.worker_event("stop_profile")

    def reset_prefix_cache(self) -> bool:
        """Later prompts find nothing of what is cached now, on every rank; returns True. For weights that were changed
        in place, under the same version. Under torchrun the first rank of each replica speaks for it.

        Weights that were loaded since the last commit are committed, which every rank does: MissingWeightsError lists
        those of the model that were not loaded.
        """
        self.llm_engine.reset_prefix_cache()
        return True

    def set_weight_version(self, version: int) -> None:
        """Say that the weights were changed in place (`apply_model`, `collective_rpc`): what was cached is not found.

        Under torchrun the first rank of each replica speaks for it: call this on every rank. Any other number than the
        last that fits 64 bits will do; a trainer gives its step. Raises TypeError or ValueError for anything else.
        """
        self.llm_engine.set_weight_version(version)

    def start_weight_update(self, *, partial: bool = False) -> None:
        """New weights come, by `update_weights` or the model's own `load_weights`, and nothing is computed before
        `finish_weight_update`. `partial`: those that do not come stay as they are, which is an error otherwise.

        Without this and `finish_weight_update`, what was loaded is committed by the next `generate`, `chat`,
        `reset_prefix_cache` or `llm_engine.step`, and has to be all weights of the model.
        """
        self.llm_engine.check_open()
        self.llm_engine.weight_updates.hold(is_partial=partial)

    def update_weights(self, tensors: Iterable[tuple[str, torch.Tensor]] | None, *, source: int | None = None) -> None:
        """Load whole tensors by their checkpoint names: any of them, in any order, of any floating-point dtype, from
        any device. Every rank gives the same; nothing is exchanged. Each rank takes its slices, in place.

        Where one rank alone has them, `source` is that rank of this engine, on every rank, and the others give None:
        one tensor after the other is broadcast, through host memory.

        Raises RuntimeError while requests are being answered, and ValueError for an unknown name and a tensor that is
        misshapen, sharded or not finite, which is not written.
        """
        self.llm_engine.check_open()
        if source is not None:
            tensors = broadcast_weights(self.llm_engine, tensors, source)
        elif tensors is None:
            raise TypeError("tensors is None: give pairs of name and tensor, or the rank that has them as source")
        executor: Any = self.llm_engine.model_executor  # with a worker in this process, unless it says why not
        executor.driver_worker.model_runner.model.load_weights(tensors)

    def finish_weight_update(self) -> None:
        """Commit what was loaded: nothing that was cached before is found. Every rank calls this.

        Raises MissingWeightsError that lists what was not loaded, and RanksDisagreeError that names a weight of which
        ranks were given different tensors; load it again then.
        """
        engine, updates = self.llm_engine, self.llm_engine.weight_updates
        engine.check_open()

        def prepare() -> list[tuple[_Encoded, SamplingParams]]:
            engine.commit_weights(is_partial=updates.release())
            return []

        agree_on_prompts(engine, "finish_weight_update", prepare, lambda: {"new weights": updates.uncompared})
        updates.uncompared = {}

    @contextmanager
    def weight_update(self, *, partial: bool = False) -> Iterator[Callable[[str, torch.Tensor], None]]:
        """`with llm.weight_update() as load: load(name, tensor)`: as `start_weight_update`, `update_weights` one by
        one, and `finish_weight_update`. After an exception inside, all weights have to be loaded before anything is
        computed.
        """
        self.start_weight_update(partial=partial)
        try:
            yield lambda name, tensor: self.update_weights([(name, tensor)])
        except BaseException:
            self.llm_engine.weight_updates.release()
            raise
        self.finish_weight_update()

    def reinitialize_distributed(
        self,
        *,
        tensor_parallel_size: int = 1,
        pipeline_parallel_size: int = 1,
        data_parallel_size: int = 1,
        pipeline_layers: list[int] | None = None,
    ) -> None:
        """Go on with ranks divided in another way, in the processes that are there: model, cache and groups are made
        anew, and what was cached, or done to workers, is gone. `llm_engine` is another object afterwards.

        Under torchrun every rank calls this and the number of ranks stays; the multiproc backend starts and ends
        worker processes. Raises RuntimeError while requests are unanswered, saying how many, and ConfigError for sizes
        that cannot run here; the LLM is as it was before. What fails later closes it.
        """
        engine = self.llm_engine
        engine.check_open()

        def prepare() -> ParallelConfig:
            engine.check_idle()
            return ParallelConfig(tensor_parallel_size, pipeline_parallel_size, data_parallel_size, pipeline_layers)

        parallel = agree_on_call(engine, "reinitialize_distributed", prepare)
        try:
            restarted = restart_engine(engine, parallel)
        except BaseException:
            if engine.is_closed:
                self.close()
            raise
        # First, or the old engine would give back what the new one has.
        self._release.detach()
        self.llm_engine = restarted
        self._open()

    def close(self) -> None:
        """Give back memory, and the process groups this object made. Idempotent; every rank calls it."""
        self.llm_engine.shutdown()
        self._release.detach()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(
        self,
        call: str,
        encode: Callable[[], list["_Encoded"]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        on_error: OnError,
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        engine, replicas = self.llm_engine, self._replicas
        # Without asking the others: a rank that cannot go on has no channel, or was the cause of their errors already.
        engine.check_open()
        if replicas is not None:
            replicas.check_whole()

        def prepare() -> list[tuple[_Encoded, SamplingParams]]:
            engine.check_idle()
            engine.weight_updates.check_not_held()
            engine.commit_weights()
            if on_error not in _ON_ERROR:
                raise ValueError(f"on_error={on_error!r} must be one of {', '.join(map(repr, _ON_ERROR))}")
            encoded = encode()
            return list(zip(encoded, self._params(sampling_params, len(encoded)), strict=True))

        number, updates = engine.num_calls, engine.weight_updates

        def settings() -> dict[str, Any]:
            return {"new weights": updates.uncompared, "number of the call": number, "on_error": on_error}

        agreed = agree_on_prompts(engine, call, prepare, settings)
        updates.uncompared = {}
        prompts: list[RoundPrompt] = []
        outputs: dict[int, RequestOutput] = {}
        reasons: dict[int, str] = {}
        for index, (each, sampling) in enumerate(agreed):
            try:
                if each.error is not None:
                    raise ValueError(each.error)
                engine.check_request(each.token_ids, sampling)
                prompts.append(RoundPrompt(number, index, each.text, each.token_ids, sampling))
            except ValueError as error:
                reasons[index] = str(error)
                outputs[index] = RequestOutput(
                    str(index), each.text, list(each.token_ids), finished=True, error=reasons[index]
                )
        if reasons and on_error == "raise":
            raise PromptsRefusedError(call, len(agreed), reasons)
        engine.num_calls += 1
        answer = partial(answer_alone, engine) if replicas is None else partial(answer_together, replicas)
        with _Bar(total=len(prompts), desc="prompts", disable=not (use_tqdm and engine.is_first_rank)) as bar:
            outputs |= answer(prompts, bar.update)
        return [outputs[index] for index in range(len(agreed))]

    def _encode(self, prompt: Prompt) -> "_Encoded":
        if isinstance(prompt, Mapping):
            return self._encode_mapping(prompt)
        if not isinstance(prompt, str):
            return _encoded_ids(prompt)
        try:
            return _Encoded(prompt, tuple(self.get_tokenizer().encode(prompt)))
        except (ConfigError, ValueError) as error:
            return _Encoded(prompt, (), str(error))

    def _encode_mapping(self, prompt: Mapping[str, Any]) -> "_Encoded":
        unknown = [str(key) for key in prompt if key not in _PROMPT_KEYS]
        if unknown:
            return _Encoded(
                None, (), f"a prompt has no key {', '.join(unknown)}: give {' or '.join(_PROMPT_KEYS)} and nothing else"
            )
        if "prompt_token_ids" in prompt:
            return _encoded_ids(prompt["prompt_token_ids"])
        if isinstance(prompt.get("prompt"), str):
            return self._encode(prompt["prompt"])
        return _Encoded(None, (), f"a prompt needs text under prompt, or prompt_token_ids; this one has {[*prompt]}")

    def _render(self, messages: Messages, add_generation_prompt: bool) -> "_Encoded":
        try:
            tokenizer = self.get_tokenizer()
            text = tokenizer.apply_chat_template(messages, add_generation_prompt)
            return _Encoded(text, tuple(tokenizer.encode(text, add_special_tokens=False)))
        except (ConfigError, ChatTemplateError, ValueError) as error:
            return _Encoded(None, (), str(error))

    def _params(
        self, given: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int
    ) -> list[SamplingParams]:
        if given is None or isinstance(given, SamplingParams):
            return [given or self.llm_engine.default_sampling] * num_prompts
        if not isinstance(given, Sequence):
            raise TypeError(f"sampling_params is a {type(given).__name__}: give SamplingParams, or a list of them")
        if len(given) != num_prompts:
            raise ValueError(
                f"{len(given)} sampling params for {num_prompts} prompts: give one, or one for each prompt"
            )
        for index, each in enumerate(given):
            if not isinstance(each, SamplingParams):
                raise TypeError(f"sampling_params[{index}] is a {type(each).__name__}: give SamplingParams")
        return list(given)


class _Bar(tqdm):  # type: ignore[type-arg]  # tqdm is generic in its stubs only
    """Without tqdm's thread, which would go on in the caller's process."""

    monitor_interval = 0


class _Encoded:
    """A prompt as ids, or why it cannot be."""

    __slots__ = ("error", "text", "token_ids")

    def __init__(self, text: str | None, token_ids: tuple[int, ...], error: str | None = None) -> None:
        self.text, self.token_ids, self.error = text, token_ids, error


def _encoded_ids(token_ids: Any) -> _Encoded:
    try:
        return _Encoded(None, as_token_ids(token_ids))
    except (TypeError, ValueError) as error:
        return _Encoded(None, (), str(error))


def _as_list(prompts: Any) -> list[Any]:
    """A prompt alone becomes a list of one. Raises TypeError for what is neither."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if not isinstance(prompts, Iterable) or isinstance(prompts, bytes):
        raise TypeError(f"prompts is a {type(prompts).__name__}: give a prompt or a list of prompts")
    listed = list(prompts)
    return [listed] if listed and isinstance(listed[0], int) else listed


def _as_conversations(messages: Any) -> list[Any]:
    """A conversation alone becomes a list of one. Raises TypeError for what is neither."""
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        raise TypeError(f"messages is a {type(messages).__name__}: give a list of messages, or a list of such lists")
    return [messages] if messages and isinstance(messages[0], Mapping) else list(messages)


def _given(**values: Any) -> dict[str, Any]:
    """The arguments that were given; the others keep the configuration's defaults."""
    return {name: value for name, value in values.items() if value is not None}
