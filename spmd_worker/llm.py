"""What people import: text in, text out.

In a plain script one process is the whole world; in a script under torchrun every rank makes the same calls and every
rank gets every output.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import wraps
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar, Unpack

from spmd_worker.base.config.schema import ParallelConfig
from spmd_worker.base.names import explain_keywords, hint
from spmd_worker.compat.chat import load_template
from spmd_worker.compat.engine_args import EngineArgs, run_config, with_own_keywords
from spmd_worker.compat.engine_model_config import EngineModelConfig
from spmd_worker.compat.key_names import speaks_keywords
from spmd_worker.compat.llm_keywords import LLMKeywords
from spmd_worker.compat.methods import CALL_KEYWORDS, LLM_ABSENT
from spmd_worker.compat.metrics import Metric
from spmd_worker.engine.calls.beam_calls import BeamCalls
from spmd_worker.engine.calls.call_runner import CallRunner
from spmd_worker.engine.calls.pooling_calls import PoolingCalls
from spmd_worker.engine.calls.prompt_calls import PromptCalls
from spmd_worker.engine.calls.prompt_encoding import PromptEncoder
from spmd_worker.engine.calls.sleep_calls import SleepCalls
from spmd_worker.engine.calls.weight_calls import WeightCalls
from spmd_worker.engine.calls.worker_calls import WorkerCalls
from spmd_worker.engine.data_parallel.agreement import agree_on_call
from spmd_worker.engine.data_parallel.per_rank_prompts import PerRankCalls
from spmd_worker.engine.data_parallel.replicas import open_replicas
from spmd_worker.engine.startup import read_run, restart_engine, start_engine
from spmd_worker.llm_engine import LLMEngine
from spmd_worker.replica.sequence.sampling_params import SamplingParams

_Calls = TypeVar("_Calls")
_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def _of(
    kind: type[_Calls], method: Callable[Concatenate[_Calls, _Arguments], _Result]
) -> Callable[Concatenate["LLM", _Arguments], _Result]:
    """A method of `LLM` that calls this one of its object of a `kind`, with the same signature and docstring."""

    @wraps(method)
    def called(llm: "LLM", /, *args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        return method(llm._calls[kind], *args, **kwargs)

    called.__module__, called.__qualname__ = __name__, f"LLM.{method.__name__}"
    return called


@explain_keywords(CALL_KEYWORDS)
@speaks_keywords
class LLM:
    """An engine in this process, or this rank's replica of one. Close it, or use it as a context manager; what is
    forgotten, or open when the interpreter ends, is closed then. One thread at a time calls it: while one is in a call,
    those of others raise RuntimeError that says who is in which.

    `model` is a folder, or a name on the hub, `revision` of it; see `model.path` in docs/reference/configuration.md,
    which has every keyword too. Arguments are named and mean what they mean in vLLM; vLLM's other keywords are accepted
    too: docs/vllm.md says what each does here, and why some are refused. Arguments are checked as a command line's are:
    ConfigError names the keyword, the value and the rule. Raises ConfigError, ModelConfigError, TokenizerError or
    CheckpointError before anything is computed, TypeError for an unknown keyword.
    """

    @with_own_keywords
    def __init__(self, model: str | Path, **keywords: Unpack[LLMKeywords]) -> None:
        resolved = read_run(run_config({"model": model, **keywords}))
        self._chat_template = load_template(keywords.get("chat_template"), resolved.tokenizer)
        self.llm_engine = start_engine(resolved, engine_class=LLMEngine)
        self._open()

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> "LLM":
        """As `LLM(**vars(engine_args))`."""
        return cls(**vars(engine_args))

    def _open(self) -> None:
        engine = self.llm_engine
        # When the engine is forgotten or the interpreter ends. Process groups have threads, and torch may abort the
        # process when it takes them down with the interpreter.
        self._release = weakref.finalize(engine, engine.life.release, is_closed=False)
        self._replicas = replicas = open_replicas(engine)
        self._turns = turns = PerRankCalls(engine, replicas)
        encoder = PromptEncoder(engine)
        runner = CallRunner(engine, replicas, turns, encoder)
        self._calls: dict[type, Any] = {
            PromptCalls: PromptCalls(engine, encoder, runner, self._chat_template),
            BeamCalls: BeamCalls(engine, encoder, runner, turns),
            PoolingCalls: PoolingCalls(engine, encoder, runner),
            WeightCalls: WeightCalls(engine, turns),
            SleepCalls: SleepCalls(engine, turns),
            WorkerCalls: WorkerCalls(engine, turns),
        }

    # Methods of objects in engine/calls/, where their signatures, docstrings and code are.
    generate = _of(PromptCalls, PromptCalls.generate)
    chat = _of(PromptCalls, PromptCalls.chat)
    chat_messages = _of(PromptCalls, PromptCalls.chat_messages)
    score_tokens = _of(PromptCalls, PromptCalls.score_tokens)
    beam_search = _of(BeamCalls, BeamCalls.beam_search)

    embed = _of(PoolingCalls, PoolingCalls.embed)
    encode = _of(PoolingCalls, PoolingCalls.encode)
    classify = _of(PoolingCalls, PoolingCalls.classify)
    reward = _of(PoolingCalls, PoolingCalls.reward)
    score = _of(PoolingCalls, PoolingCalls.score)

    start_weight_update = _of(WeightCalls, WeightCalls.start_weight_update)
    update_weights = _of(WeightCalls, WeightCalls.update_weights)
    finish_weight_update = _of(WeightCalls, WeightCalls.finish_weight_update)
    weight_update = _of(WeightCalls, WeightCalls.weight_update)
    load_weights = _of(WeightCalls, WeightCalls.load_weights)
    set_weight_version = _of(WeightCalls, WeightCalls.set_weight_version)
    reset_prefix_cache = _of(WeightCalls, WeightCalls.reset_prefix_cache)

    sleep = _of(SleepCalls, SleepCalls.sleep)
    wake_up = _of(SleepCalls, SleepCalls.wake_up)

    collective_rpc = _of(WorkerCalls, WorkerCalls.collective_rpc)
    apply_model = _of(WorkerCalls, WorkerCalls.apply_model)
    worker_event = _of(WorkerCalls, WorkerCalls.worker_event)
    start_profile = _of(WorkerCalls, WorkerCalls.start_profile)
    stop_profile = _of(WorkerCalls, WorkerCalls.stop_profile)

    @contextmanager
    def turns(self) -> Iterator[None]:
        """A block in which each rank calls `generate` and `chat` with prompts of its own, as often as it likes, without
        the others having to call them as often: for loops over tools or environments, whose number of turns differs.

        Every rank of the engine enters and leaves the block. A call waits until every other rank has called too or is
        at the end of its block, for `timeout_s` at most; a rank at the end of its block takes part in the calls of the
        others until all have come there. An error that leaves the block on one rank ends it on all: the others get
        RankFailedError with its words from the call they make or from the end of their block. The engine can be used
        again.
        """
        with self.llm_engine.calls.inside("turns", is_alone=True):
            self.llm_engine.life.check_open()
            with self._turns.block():
                yield

    def get_tokenizer(self) -> Any:
        """The model's tokenizer, for the script: transformers' own where transformers is installed, else one with the
        same names for encoding, decoding and chat templates. Raises ConfigError for a model folder without one.
        """
        return self.llm_engine.get_tokenizer()

    @property
    def supported_tasks(self) -> tuple[str, ...]:
        """What can be asked for: "generate", or of "embed", "classify", "score" and "reward" what the model does."""
        return self.llm_engine.get_supported_tasks()

    def get_metrics(self) -> list[Metric]:
        """What this rank's replica has done since its start, and how full it is: vLLM's names, numbers and gauges."""
        return self.llm_engine.get_metrics()

    @property
    def model_config(self) -> EngineModelConfig:
        """What this LLM runs, by the names of vLLM's ModelConfig that scripts read."""
        return self.llm_engine.model_config

    def get_world_size(self, include_dp: bool = True) -> int:
        """Ranks of the engine; without `include_dp` those of one of its replicas."""
        parallel = self.llm_engine.config.parallel
        size = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
        return size * parallel.data_parallel_size if include_dp else size

    def get_default_sampling_params(self) -> SamplingParams:
        """What prompts get that come without parameters: the model's generation_config.json, then vLLM's defaults. A
        copy, which may be changed.
        """
        return self.llm_engine.default_sampling.clone()

    @property
    def is_sleeping(self) -> bool:
        """Whether anything sleeps; also `llm_engine.model_executor.is_sleeping`."""
        return self.llm_engine.executor.is_sleeping

    @property
    def sleeping_tags(self) -> tuple[str, ...]:
        """What sleeps: "weights", "kv_cache", both or nothing."""
        return self.llm_engine.executor.sleeping_tags

    def reset_mm_cache(self) -> None:
        """Nothing: models of text have no other inputs."""

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
            # First, or the old engine would give back what the new one has.
            self._release.detach()
            self.llm_engine = restarted
            self._open()

    def close(self) -> None:
        """Give back memory, and the process groups this object made. Idempotent; every rank calls it. Does nothing in a
        process that was forked from the one that made this object.
        """
        self.llm_engine.shutdown()
        self._release.detach()

    if not TYPE_CHECKING:  # or a misspelled name would be an attribute to a type checker

        def __getattr__(self, name: str) -> Any:
            """For names that are not here only."""
            raise AttributeError(f"LLM has no attribute {name!r}{hint(name, dir(self), LLM_ABSENT)}")

    def __enter__(self) -> "LLM":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
