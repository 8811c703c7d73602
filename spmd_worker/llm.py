"""`LLM`, the offline engine: text in, text out.

A plain script is one process; in a script under torchrun every rank makes the same calls and gets every output.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import wraps
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar, Unpack

from spmd_worker.base.config.parallel import ParallelConfig
from spmd_worker.base.names import hint, with_keyword_hints
from spmd_worker.compat.engine_args import EngineArgs, run_config, with_keyword_signature
from spmd_worker.compat.engine_model_config import EngineModelConfig
from spmd_worker.compat.key_names import explain_in_keywords
from spmd_worker.compat.llm_keywords import LLMKeywords
from spmd_worker.compat.methods import CALL_KEYWORDS, LLM_ABSENT
from spmd_worker.compat.metrics import Metric, Vector
from spmd_worker.engine.calls.beam_calls import BeamCalls
from spmd_worker.engine.calls.call_runner import CallRunner
from spmd_worker.engine.calls.check_calls import CheckCalls
from spmd_worker.engine.calls.hidden_state_calls import HiddenStateCalls
from spmd_worker.engine.calls.pause_calls import PauseCalls
from spmd_worker.engine.calls.pooling_calls import PoolingCalls
from spmd_worker.engine.calls.prompt_calls import PromptCalls
from spmd_worker.engine.calls.prompt_encoding import PromptEncoder
from spmd_worker.engine.calls.queue_calls import QueueCalls
from spmd_worker.engine.calls.saving_calls import SavingCalls
from spmd_worker.engine.calls.weight_calls import WeightCalls
from spmd_worker.engine.calls.worker_calls import WorkerCalls
from spmd_worker.engine.data_parallel.agreement import agree_on_call
from spmd_worker.engine.data_parallel.per_rank_prompts import PerRankCalls
from spmd_worker.engine.data_parallel.replicas import open_replicas
from spmd_worker.engine.startup import read_run, restart_engine, start_engine
from spmd_worker.llm_engine import LLMEngine
from spmd_worker.replica.sequence.sampling_params import SamplingParams
from spmd_worker.tokenizer.chat_templates import load_template

_Calls = TypeVar("_Calls")
_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def _forward(
    kind: type[_Calls], method: Callable[Concatenate[_Calls, _Arguments], _Result]
) -> Callable[Concatenate["LLM", _Arguments], _Result]:
    """Method of `LLM` that calls `method` of its object of class `kind`, with the same signature and docstring."""

    @wraps(method)
    def called(llm: "LLM", /, *args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        return method(llm._calls[kind], *args, **kwargs)

    called.__module__, called.__qualname__ = __name__, f"LLM.{method.__name__}"
    return called


@with_keyword_hints(CALL_KEYWORDS)
@explain_in_keywords
class LLM:
    """An engine in this process, or this rank's replica of one. Close it, or use it as a context manager; it is also
    closed when it is garbage collected, and when the interpreter ends. One thread at a time may call it: calls of other
    threads meanwhile raise RuntimeError that names both threads and calls.

    `model` is a folder, or a name on the hub with an optional `revision`; docs/reference/configuration.md lists
    `model.path` and all keywords. Keywords have vLLM's names and meanings; vLLM's other keywords are accepted too:
    docs/reference/vllm_names.md says what each does here, and which are rejected and why. Arguments are validated as on
    a command line: ConfigError names the keyword, the value and the rule. Raises ConfigError, ModelConfigError,
    TokenizerError or CheckpointError before anything is computed, TypeError for an unknown keyword.
    """

    @with_keyword_signature
    def __init__(self, model: str | Path, **keywords: Unpack[LLMKeywords]) -> None:
        resolved = read_run(run_config({"model": model, **keywords}))
        given = keywords.get("chat_template")
        named = {} if resolved.tokenizer is None else resolved.tokenizer.chat_templates.sources
        self._chat_template = None if given is None else load_template("chat_template", given, named)
        self.llm_engine = start_engine(resolved, engine_class=LLMEngine)
        self._open()

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> "LLM":
        """Same as `LLM(**vars(engine_args))`."""
        return cls(**vars(engine_args))

    def _open(self) -> None:
        engine = self.llm_engine
        names = engine.named_requests
        # Runs when the engine is garbage collected or the interpreter ends. Process groups have threads, and torch may
        # abort the process if the interpreter's end closes them.
        self._release = weakref.finalize(engine, engine.life.release, is_closed=False)
        self._replicas = replicas = open_replicas(engine)
        self._turns = turns = PerRankCalls(engine, replicas)
        encoder = PromptEncoder(engine)
        runner = CallRunner(engine, replicas, turns, encoder)
        self._calls: dict[type, Any] = {
            PromptCalls: PromptCalls(engine, encoder, runner, self._chat_template),
            BeamCalls: BeamCalls(engine, encoder, runner, turns),
            QueueCalls: QueueCalls(engine, encoder, runner, replicas, turns, names),
            PoolingCalls: PoolingCalls(engine, encoder, runner),
            WeightCalls: WeightCalls(engine, turns),
            WorkerCalls: WorkerCalls(engine, turns),
            PauseCalls: PauseCalls(engine, replicas, turns),
            SavingCalls: SavingCalls(engine, turns),
            CheckCalls: CheckCalls(engine, turns),
        }
        inside = (self._calls[PromptCalls], self._calls[WorkerCalls])
        self._calls[HiddenStateCalls] = HiddenStateCalls(engine, *inside)

    # Methods of the objects in engine/calls/, which have their signatures, docstrings and code.
    generate = _forward(PromptCalls, PromptCalls.generate)
    chat = _forward(PromptCalls, PromptCalls.chat)
    chat_messages = _forward(PromptCalls, PromptCalls.chat_messages)
    score_tokens = _forward(PromptCalls, PromptCalls.score_tokens)
    beam_search = _forward(BeamCalls, BeamCalls.beam_search)

    enqueue = _forward(QueueCalls, QueueCalls.enqueue)
    wait_for_completion = _forward(QueueCalls, QueueCalls.wait_for_completion)
    extract_hidden_states = _forward(HiddenStateCalls, HiddenStateCalls.extract_hidden_states)

    embed = _forward(PoolingCalls, PoolingCalls.embed)
    encode = _forward(PoolingCalls, PoolingCalls.encode)
    classify = _forward(PoolingCalls, PoolingCalls.classify)
    reward = _forward(PoolingCalls, PoolingCalls.reward)
    score = _forward(PoolingCalls, PoolingCalls.score)

    start_weight_update = _forward(WeightCalls, WeightCalls.start_weight_update)
    update_weights = _forward(WeightCalls, WeightCalls.update_weights)
    finish_weight_update = _forward(WeightCalls, WeightCalls.finish_weight_update)
    weight_update = _forward(WeightCalls, WeightCalls.weight_update)
    load_weights = _forward(WeightCalls, WeightCalls.load_weights)
    digests_of = _forward(WeightCalls, WeightCalls.digests_of)
    apply_weight_deltas = _forward(WeightCalls, WeightCalls.apply_weight_deltas)
    init_weight_transfer_engine = _forward(WeightCalls, WeightCalls.init_weight_transfer_engine)
    set_weight_version = _forward(WeightCalls, WeightCalls.set_weight_version)
    reset_prefix_cache = _forward(WeightCalls, WeightCalls.reset_prefix_cache)

    pause_generation = _forward(PauseCalls, PauseCalls.pause_generation)
    resume_generation = _forward(PauseCalls, PauseCalls.resume_generation)

    add_lora = _forward(WorkerCalls, WorkerCalls.add_lora)
    remove_lora = _forward(WorkerCalls, WorkerCalls.remove_lora)
    pin_lora = _forward(WorkerCalls, WorkerCalls.pin_lora)
    list_loras = _forward(WorkerCalls, WorkerCalls.list_loras)
    add_prompt_adapter = _forward(WorkerCalls, WorkerCalls.add_prompt_adapter)
    remove_prompt_adapter = _forward(WorkerCalls, WorkerCalls.remove_prompt_adapter)
    pin_prompt_adapter = _forward(WorkerCalls, WorkerCalls.pin_prompt_adapter)
    list_prompt_adapters = _forward(WorkerCalls, WorkerCalls.list_prompt_adapters)

    sleep = _forward(WorkerCalls, WorkerCalls.sleep)
    wake_up = _forward(WorkerCalls, WorkerCalls.wake_up)
    collective_rpc = _forward(WorkerCalls, WorkerCalls.collective_rpc)
    apply_model = _forward(WorkerCalls, WorkerCalls.apply_model)
    get_model_inspection = _forward(WorkerCalls, WorkerCalls.get_model_inspection)
    worker_event = _forward(WorkerCalls, WorkerCalls.worker_event)
    start_profile = _forward(WorkerCalls, WorkerCalls.start_profile)
    stop_profile = _forward(WorkerCalls, WorkerCalls.stop_profile)

    save_sharded_state = _forward(SavingCalls, SavingCalls.save_sharded_state)
    save_checkpoint = _forward(SavingCalls, SavingCalls.save_checkpoint)
    save_streamed = _forward(SavingCalls, SavingCalls.save_streamed)

    numerical_policy = _forward(CheckCalls, CheckCalls.numerical_policy)
    weights_digest = _forward(CheckCalls, CheckCalls.weights_digest)
    tensor_digests = _forward(CheckCalls, CheckCalls.tensor_digests)
    check_weights = _forward(CheckCalls, CheckCalls.check_weights)

    @contextmanager
    def turns(self) -> Iterator[None]:
        """Block in which each rank calls `generate` and `chat` with its own prompts, any number of times: for loops
        over tools or environments, whose number of turns differs between ranks.

        Every rank of the engine enters and leaves the block. A call waits until every other rank has called too or is
        at the end of its block, for `timeout_s` at most; a rank at the end of its block takes part in the calls of the
        others until all are there. An error that leaves the block on one rank ends it on all: the others raise
        RankFailedError with its text, in their next call or at the end of their block. The engine can be used again.
        """
        with self.llm_engine.calls.inside("turns", is_alone=True):
            self.llm_engine.life.check_open()
            with self._turns.block():
                yield

    def get_tokenizer(self) -> Any:
        """The model's tokenizer: transformers' own if transformers is installed, else one with the same methods for
        encoding, decoding and chat templates. Raises ConfigError for a model folder without a tokenizer.
        """
        return self.llm_engine.get_tokenizer()

    @property
    def supported_tasks(self) -> tuple[str, ...]:
        """Tasks of this run: "generate", or those of "embed", "classify", "score" and "reward" that the model has."""
        return self.llm_engine.get_supported_tasks()

    def get_metrics(self) -> list[Metric | Vector]:
        """Counters and gauges of this rank's replica, under vLLM's names."""
        return self.llm_engine.get_metrics()

    @property
    def model_config(self) -> EngineModelConfig:
        """The model, under the names of vLLM's ModelConfig that scripts read."""
        return self.llm_engine.model_config

    def get_world_size(self, include_dp: bool = True) -> int:
        """Number of ranks of the engine; without `include_dp`, of one of its replicas."""
        parallel = self.llm_engine.config.parallel
        size = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
        return size * parallel.data_parallel_size if include_dp else size

    def get_default_sampling_params(self) -> SamplingParams:
        """Default parameters of prompts, a mutable copy: the model's generation_config.json, then vLLM's defaults."""
        return self.llm_engine.default_sampling.clone()

    @property
    def is_sleeping(self) -> bool:
        """Whether weights or cache are asleep (`llm_engine.model_executor.is_sleeping`), or generation is (level 0)."""
        return self.llm_engine.is_sleeping()

    @property
    def is_paused(self) -> bool:
        """Whether generation is paused."""
        return self.llm_engine.is_paused()

    @property
    def weight_version(self) -> int:
        """Version of the weights: 0 as they were at the start, a digest of loaded ones, or what `set_weight_version`
        set. Outputs name it for the tokens that are sampled from now on.
        """
        return self.llm_engine.weight_version

    @property
    def sleeping_tags(self) -> tuple[str, ...]:
        """The sleeping parts: "weights", "kv_cache", both or none."""
        return self.llm_engine.executor.sleeping_tags

    def reset_mm_cache(self) -> None:
        """Drop the rows of all images, on every rank: those that are needed later are made again, with the same bits.
        Under torchrun the call of each replica's first rank takes effect. No effect in a model that takes no images.
        """
        self.llm_engine.reset_mm_cache()

    def reinitialize_distributed(
        self,
        *,
        tensor_parallel_size: int = 1,
        pipeline_parallel_size: int = 1,
        data_parallel_size: int = 1,
        pipeline_layers: list[int] | None = None,
    ) -> None:
        """Change the layout of the ranks in the running processes: model, cache and groups are rebuilt; cached blocks
        and changes of workers are lost. `llm_engine` is another object afterwards.

        Under torchrun every rank calls this and the number of ranks is fixed; the multiproc backend starts and ends
        worker processes. Raises RuntimeError while requests are unanswered, with their number, and ConfigError for
        an unsupported layout; the LLM is unchanged then. A later failure closes it.
        """
        engine = self.llm_engine
        with engine.calls.inside("reinitialize_distributed", is_alone=True):
            engine.life.check_open()

            def prepare() -> ParallelConfig:
                engine.requests.check_idle()
                return replace(
                    engine.config.parallel,
                    tensor_parallel_size=tensor_parallel_size,
                    pipeline_parallel_size=pipeline_parallel_size,
                    data_parallel_size=data_parallel_size,
                    pipeline_layers=pipeline_layers,
                )

            self._turns.check_outside("reinitialize_distributed")
            parallel = agree_on_call(engine, "reinitialize_distributed", prepare)
            try:
                restarted = restart_engine(engine, parallel)
            except BaseException:
                if engine.is_closed:
                    self.close()
                raise
            # First: the old engine must not release the resources that the new one uses.
            self._release.detach()
            self.llm_engine = restarted
            self._open()

    def close(self) -> None:
        """Release memory and process groups. Idempotent; every rank calls it. No effect in a forked process."""
        self.llm_engine.shutdown()
        self._release.detach()

    if not TYPE_CHECKING:  # a type checker would accept every name

        def __getattr__(self, name: str) -> Any:
            raise AttributeError(f"LLM has no attribute {name!r}{hint(name, dir(self), LLM_ABSENT)}")

    def __enter__(self) -> "LLM":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
