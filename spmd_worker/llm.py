"""What people import: text in, text out.

In a plain script one process is the whole world; in a script under torchrun every rank makes the same calls and every
rank gets every output.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import wraps
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar, Unpack

import torch

from spmd_worker.base.config.schema import ModelOptions, ParallelConfig
from spmd_worker.base.liveness.deferred_signals import host_signals
from spmd_worker.base.names import explain_keywords, hint
from spmd_worker.compat.beam_search import BeamSearchOutput, BeamSearchParams
from spmd_worker.compat.call_arguments import check_extras
from spmd_worker.compat.chat import ChatOptions, answer_messages, load_template
from spmd_worker.compat.engine_args import EngineArgs, run_config, with_own_keywords
from spmd_worker.compat.engine_model_config import EngineModelConfig
from spmd_worker.compat.key_names import speaks_keywords
from spmd_worker.compat.llm_keywords import LLMKeywords
from spmd_worker.compat.methods import CALL_KEYWORDS, LLM_ABSENT
from spmd_worker.compat.metrics import Metric
from spmd_worker.compat.prompts import Encoded, Prompt
from spmd_worker.engine.calls.pooling_calls import GivenParams, PoolingCalls
from spmd_worker.engine.calls.prompt_calls import Messages, OnError, PromptCalls, UseTqdm
from spmd_worker.engine.data_parallel.agreement import agree_on_call, agree_to_compute, fail_call
from spmd_worker.engine.data_parallel.own_prompts import Turns
from spmd_worker.engine.data_parallel.replicas import open_replicas
from spmd_worker.engine.data_parallel.weights import broadcast_weights
from spmd_worker.engine.startup import read_run, restart_engine, start_engine
from spmd_worker.llm_engine import LLMEngine
from spmd_worker.replica.sequence.events import ResetPrefixCache
from spmd_worker.replica.sequence.outputs import (
    ClassificationOutput,
    ClassificationRequestOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    RequestOutput,
    ScoringRequestOutput,
)
from spmd_worker.replica.sequence.pooling_params import PoolingParams
from spmd_worker.replica.sequence.sampling_params import SamplingParams
from spmd_worker.replica.sequence.sleep_tags import check_mode, checked_level, checked_tags

_Prepared = TypeVar("_Prepared")
_Arguments = ParamSpec("_Arguments")


def _in_one_thread(
    *, is_alone: bool = False
) -> Callable[
    [Callable[Concatenate["LLM", _Arguments], _Prepared]], Callable[Concatenate["LLM", _Arguments], _Prepared]
]:
    """For methods that no two threads are in at a time (`CallGuard.inside`)."""

    def guarded(
        method: Callable[Concatenate["LLM", _Arguments], _Prepared],
    ) -> Callable[Concatenate["LLM", _Arguments], _Prepared]:
        @wraps(method)
        def called(llm: "LLM", /, *args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Prepared:
            with llm.llm_engine.calls.inside(method.__name__, is_alone=is_alone):
                return method(llm, *args, **kwargs)

        return called

    return guarded


def _of_host(function: Callable[_Arguments, _Prepared]) -> Callable[_Arguments, _Prepared]:
    """A function of the host, called with the host's own handlers of signals."""

    @wraps(function)
    def called(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Prepared:
        with host_signals():
            return function(*args, **kwargs)

    return called


@explain_keywords(CALL_KEYWORDS)
@speaks_keywords
class LLM:
    """An engine in this process, or this rank's replica of one. Close it, or use it as a context manager; what is
    forgotten, or open when the interpreter ends, is closed then. One thread at a time calls it: while one is in a call,
    those of others raise RuntimeError that says who is in which.

    `model` is a folder, or a name on the hub, `revision` of it; see `model.path` in docs/reference/configuration.md,
    which has every keyword too. Arguments are named and mean what they mean in vLLM; vLLM's other keywords are accepted
    too: docs/vllm.md says what each does here, and why some are refused. Arguments are checked as a
    command line's are: ConfigError names the keyword, the value and the rule. Raises ConfigError, ModelConfigError,
    TokenizerError or CheckpointError before anything is computed, TypeError for an unknown keyword.
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
        # When the engine is forgotten or the interpreter ends. Process groups have threads, and torch may abort the
        # process when it takes them down with the interpreter.
        self._release = weakref.finalize(self.llm_engine, self.llm_engine.life.release, is_closed=False)
        replicas = open_replicas(self.llm_engine)
        self._turns = Turns(self.llm_engine, replicas)
        self._prompt_calls = PromptCalls(self.llm_engine, replicas, self._turns)
        self._pooling_calls = PoolingCalls(self.llm_engine, self._prompt_calls)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: UseTqdm = True,
        lora_request: Any = None,
        priority: int | Sequence[int] | None = None,
        on_error: OnError = "raise",
        gather: bool = False,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """One output a prompt, in order. Prompts that can never be answered (too long for the model, ...) raise
        PromptsRefusedError, a ValueError that names all of them, before anything is computed; with `on_error="row"`
        each of them gets an output with `error` and no completions, and the rest is answered.

        A prompt whose parameters have no `seed` draws by the engine's seed, the number of the call and its index in it:
        another call draws other numbers, and a program that runs again draws the same ones.

        Under torchrun every rank of an engine, those of all its replicas, must pass the same prompts:
        RanksDisagreeError names the first that differs. Every rank gets every output. What one rank raises before any
        prompt is answered, such as TypeError or ValueError for its arguments, is RankFailedError on the others, and the
        engine can be used again. With `gather` every rank passes prompts of its own, as many as it likes or none, and
        gets their outputs only; prompts that are refused are that rank's error, and no bar is shown. In `turns` every
        call is one of those, and not every rank needs to make it.

        `use_tqdm` may be what makes the bar, such as `partial(tqdm, leave=False)`; the first rank has one, and what it
        raises is logged. Adapters do
        not exist here and rows are served first come, first served: ValueError for a `lora_request` or a `priority`
        that asks for anything, and for `tokenization_kwargs` and `mm_processor_kwargs`.
        """

        def encode() -> list[Encoded]:
            encoded = self._prompt_calls.encode(prompts, sampling_params)
            check_extras(len(encoded), lora_request, priority, tokenization_kwargs, mm_processor_kwargs)
            return encoded

        return self._prompt_calls.run("generate", encode, sampling_params, on_error, gather, use_tqdm)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: UseTqdm = True,
        lora_request: Any = None,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        tool_call_format: str = "auto",
        reasoning_format: str = "auto",
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
        *,
        priority: int | Sequence[int] | None = None,
        on_error: OnError = "raise",
        gather: bool = False,
    ) -> list[RequestOutput]:
        """One conversation or a list of them through the model's chat template; otherwise as `generate`.

        A message's content is a string or a list of text parts; a part that is no text (an image) is that
        conversation's error. With `chat_template_content_format="auto"` the template gets the form that it takes, with
        `string` parts are joined by line ends, with `openai` they are kept. `tools` are JSON schemas, which the
        template writes; arguments of tool calls may be JSON. `tool_choice` is auto, none, required or a named function
        as in OpenAI's API: an answer that must be a call is held to the model's own call syntax and the function's
        schema, and `chat_messages` reads it. `tool_call_format` and `reasoning_format` as in `chat_messages`.
        `chat_template` is another template's text or the name of one of the folder's, `chat_template_kwargs` are more
        variables for it. `continue_final_message`, with `add_generation_prompt=False`, leaves the last message open,
        and the answer goes on with it.
        """

        def encode() -> list[Encoded]:
            template = self._chat_template if chat_template is None else chat_template
            options = ChatOptions(
                template,
                chat_template_content_format,
                add_generation_prompt,
                continue_final_message,
                tools,
                tool_choice,
                ModelOptions(tool_call_format=tool_call_format, reasoning_format=reasoning_format),
                {} if chat_template_kwargs is None else chat_template_kwargs,
            )
            encoded = self._prompt_calls.render(messages, options, sampling_params)
            check_extras(len(encoded), lora_request, priority, tokenization_kwargs, mm_processor_kwargs)
            return encoded

        return self._prompt_calls.run("chat", encode, sampling_params, on_error, gather, use_tqdm)

    def chat_messages(
        self,
        output: RequestOutput,
        tools: Sequence[Mapping[str, Any]] | None = None,
        sampling_params: SamplingParams | None = None,
        *,
        tool_choice: str | Mapping[str, Any] | None = None,
        tool_call_format: str = "auto",
        reasoning_format: str = "auto",
    ) -> list[dict[str, Any]]:
        """The message of each completion of an output of `chat`, in OpenAI's shape, to be appended to the conversation.

        `tools`, `tool_choice` and `sampling_params` are those that `chat` had: with tools, calls in the text become
        `tool_calls`, and reasoning becomes `reasoning_content`. In which form a model writes them is found in its chat
        template, or said as in `model.tool_call_format` and `model.reasoning_format`. What is no call stays content.
        Raises ConfigError for a model folder without a tokenizer, ValueError for tools that are none.
        """
        tokenizer = self.llm_engine.need_tokenizer()
        model = ModelOptions(tool_call_format=tool_call_format, reasoning_format=reasoning_format)
        options = ChatOptions(self._chat_template, tools=tools, tool_choice=tool_choice, model=model)
        return answer_messages(output, options, tokenizer, sampling_params or SamplingParams())

    def score_tokens(
        self,
        prompts: Prompt | Sequence[Prompt],
        completions: Sequence[Sequence[int]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        gather: bool = False,
        use_tqdm: UseTqdm = False,
    ) -> list[list[float]]:
        """The log-probability of each token of `completions[i]`, token ids, given `prompts[i]` and the tokens before.

        They come from the kernels that sample, with weights as they are now: of what `generate` sampled they are the
        bits that it reports as `logprobs` (those of the unprocessed logits, `raw_logprobs`), however rows were batched,
        cut into chunks or preempted then and now (with `logprobs=-1` under tensor parallelism, but for the rounding of
        a sum). `gather` as in `generate`.

        `sampling_params` are those that the completions were sampled with. A model with LongRoPE needs them where it
        depends on their `max_tokens` how positions are turned; nothing else of them counts.

        Raises ValueError, before anything is computed, for a completion or a prompt without tokens, and as `generate`
        does for what is too long; and for a row whose logits are not finite.
        """
        return self._prompt_calls.score_tokens(prompts, completions, sampling_params, gather, use_tqdm)

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling_params: GivenParams = None,
        use_tqdm: UseTqdm = True,
        truncate_prompt_tokens: int | None = None,
        gather: bool = False,
        lora_request: Any = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """The vector of each prompt, in order: what the last stage's hidden states come to by the model folder's
        `modules.json`, or by `pooling_type`; float32. A row's numbers do not depend on the rows beside it, on chunks,
        preemption or what was cached.

        Needs a run that pools: a model folder that is for it, or `runner="pooling"`. `truncate_prompt_tokens` as in
        `PoolingParams`. `gather`, ranks and prompts that are refused as in `generate`. Raises ValueError for a run or a
        model that does something else, naming what it does, and for a vector that is not finite.
        """
        return self._pooling_calls.pool(
            "embed",
            "embed",
            prompts,
            pooling_params,
            EmbeddingOutput,
            EmbeddingRequestOutput,
            truncate_prompt_tokens=truncate_prompt_tokens,
            lora_request=lora_request,
            tokenization_kwargs=tokenization_kwargs,
            gather=gather,
            use_tqdm=use_tqdm,
        )

    def encode(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: GivenParams = None,
        *,
        pooling_task: str | None = None,
        use_tqdm: UseTqdm = True,
        truncate_prompt_tokens: int | None = None,
        gather: bool = False,
        lora_request: Any = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """What the model gives for each prompt, as plain numbers: a vector or scores. `pooling_task` is embed,
        classify, score or reward; None is what the model does. Otherwise as `embed`.
        """
        return self._pooling_calls.pool(
            "encode",
            pooling_task,
            prompts,
            pooling_params,
            PoolingOutput,
            PoolingRequestOutput,
            truncate_prompt_tokens=truncate_prompt_tokens,
            lora_request=lora_request,
            tokenization_kwargs=tokenization_kwargs,
            gather=gather,
            use_tqdm=use_tqdm,
        )

    def classify(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling_params: GivenParams = None,
        use_tqdm: UseTqdm = True,
        gather: bool = False,
        lora_request: Any = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[ClassificationRequestOutput]:
        """The scores of each prompt's labels, of a `*ForSequenceClassification`, from its last token: after softmax,
        sigmoid for one label, or what config.json says; as they are with `use_activation=False`. Otherwise as `embed`.
        """
        return self._pooling_calls.pool(
            "classify",
            "classify",
            prompts,
            pooling_params,
            ClassificationOutput,
            ClassificationRequestOutput,
            lora_request=lora_request,
            tokenization_kwargs=tokenization_kwargs,
            gather=gather,
            use_tqdm=use_tqdm,
        )

    def reward(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling_params: GivenParams = None,
        use_tqdm: UseTqdm = True,
        gather: bool = False,
        lora_request: Any = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """The reward of each prompt: the score of a model with one label, as it is. Otherwise as `classify`."""
        return self._pooling_calls.pool(
            "reward",
            "reward",
            prompts,
            pooling_params,
            PoolingOutput,
            PoolingRequestOutput,
            lora_request=lora_request,
            tokenization_kwargs=tokenization_kwargs,
            gather=gather,
            use_tqdm=use_tqdm,
        )

    def score(
        self,
        text_1: str | Sequence[str],
        text_2: str | Sequence[str],
        *,
        pooling_params: PoolingParams | None = None,
        use_tqdm: UseTqdm = True,
        truncate_prompt_tokens: int | None = None,
        lora_request: Any = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        chat_template: str | None = None,
    ) -> list[ScoringRequestOutput]:
        """How well each of `text_2` goes with its text of `text_1`, or with the only one: the cosine of their vectors,
        or of a model with one label its score of the second text behind the first. `chat_template` may ask
        for nothing. Otherwise as `embed`.
        """
        return self._pooling_calls.score(
            text_1,
            text_2,
            pooling_params,
            chat_template,
            truncate_prompt_tokens=truncate_prompt_tokens,
            lora_request=lora_request,
            tokenization_kwargs=tokenization_kwargs,
            use_tqdm=use_tqdm,
        )

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

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        lora_request: Any = None,
        use_tqdm: UseTqdm = False,
        concurrency_limit: int | None = None,
    ) -> list[BeamSearchOutput]:
        """The `beam_width` likeliest continuations of each prompt that beams find, best first.

        Each token is a call of `generate` for all beams of all prompts, which finds what they have in common in the
        prefix cache. `concurrency_limit` is vLLM's and without effect. Raises ValueError for a prompt that cannot be
        answered, and otherwise what `generate` raises.
        """
        return self._prompt_calls.beam_search(prompts, params, lora_request, use_tqdm)

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
        wanted = _of_host(method) if callable(method) else method
        return self.llm_engine.collective_rpc(wanted, timeout, args, kwargs)

    def apply_model(self, func: Callable[[Any], Any]) -> list[Any]:
        """Call `func` with this rank's shard of the model, as a torch module with the checkpoint's names.

        `named_parameters()`, `get_parameter(name)`, `state_dict()`, `load_state_dict(...)` and attributes
        (`model.model.layers[0].mlp.up_proj.weight`) show the checkpoint's tensors, or this rank's slices of them, and
        what `func` changes in them before it ends counts, a tied head included; `model.load_weights(pairs)` takes
        whole tensors by name, as `update_weights` does. `parameter.checkpoint_slice` says which slice one is: as text
        "rows 192 to 288 of 288", as `ranges`, and of a whole tensor `checkpoint_slice.of(tensor)`. It has no forward
        pass. Of a packed weight (those of the linear layers on the CPU) each parameter that is asked for is a copy,
        kept until `func` ends: where memory is short, ask for a few in each call.
        `collective_rpc("get_model_inspection")` shows shapes and slices without any. What was cached before is not
        found after it, changed or not. Raises ValueError for what cannot be changed, with nothing changed on this rank;
        where other ranks did not refuse in the same call, what computes next raises RanksDisagreeError on all, until
        all weights were loaded. Calls are told apart by their number, so every rank makes as many where some may be
        refused.
        """
        return self.llm_engine.apply_model(_of_host(func) if callable(func) else func)

    @_in_one_thread()
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
        engine = self.llm_engine
        engine.life.check_open()

        def prepare() -> tuple[str, Any, bool]:
            engine.changes.complete_weights()
            return name, payload, reset_prefix_cache

        self._agree("worker_event", prepare)
        return engine.worker_event(name, payload, [ResetPrefixCache()] if reset_prefix_cache else [])

    def start_profile(self, folder: str | Path | None = None) -> None:
        """Record what every rank computes, with torch's profiler, until `stop_profile`. Raises WorkerEventError where a
        rank cannot write to `folder`, ValueError without one.
        """
        if folder is None:
            raise ValueError("start_profile needs the folder to write to: start_profile(folder)")
        self.worker_event("start_profile", str(folder))

    def stop_profile(self) -> list[str]:
        """Write `trace.rank<N>.json` of every rank, for ui.perfetto.dev: the paths of this executor's workers. Raises
        WorkerEventError where no profile is being made.
        """
        return self.worker_event("stop_profile")

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Later prompts find nothing of what is cached now, on every rank; returns True. For weights that were changed
        in place, under the same version. Under torchrun the first rank of each replica speaks for it.

        Weights that were loaded since the last commit are committed, which every rank does: MissingWeightsError lists
        those of the model that were not loaded. Raises ValueError for `reset_running_requests` while requests of
        `llm_engine.add_request` are unanswered. What the host tier holds goes with or without `reset_connector`.
        """
        self.llm_engine.reset_prefix_cache(reset_running_requests, reset_connector)
        return True

    def reset_mm_cache(self) -> None:
        """Nothing: models of text have no other inputs."""

    def set_weight_version(self, version: int) -> None:
        """Say that the weights were changed in place (by a `collective_rpc` of your own): what was cached is not found.

        Under torchrun the first rank of each replica speaks for it: call this on every rank. Any other number than the
        last that fits 64 bits will do; a trainer gives its step. Raises TypeError or ValueError for anything else.
        """
        self.llm_engine.set_weight_version(version)

    @_in_one_thread()
    def start_weight_update(self, *, partial: bool = False) -> None:
        """New weights come, by `update_weights` or the model's own `load_weights`, and nothing is computed before
        `finish_weight_update`. `partial`: those that do not come stay as they are, which is an error otherwise.

        Without this and `finish_weight_update`, what was loaded is committed by the next `generate`, `chat`,
        `reset_prefix_cache` or `llm_engine.step`, and has to be all weights of the model. Checkpoint tensors that
        transformers has as buffers (`e_score_correction_bias`; `beta` and `eps` of Apertus) may be left out, as a
        trainer's `named_parameters()` does: they stay as they are, and are taken where they come.
        """
        self.llm_engine.life.check_open()
        self.llm_engine.changes.weights.hold(is_partial=partial)

    @_in_one_thread()
    def update_weights(self, tensors: Iterable[tuple[str, torch.Tensor]] | None, *, source: int | None = None) -> None:
        """Load whole tensors by their checkpoint names: any of them, in any order, of any floating-point dtype, from
        any device. Every rank gives the same; nothing is exchanged. Each rank takes its slices, in place.

        Where one rank alone has them, `source` is that rank of this engine, on every rank, and the others give None:
        one tensor after the other is broadcast, through host memory.

        Raises RuntimeError while requests are being answered, and ValueError for an unknown name and a tensor that is
        misshapen, sharded or, unless the LLM has `allow_nonfinite`, not finite, which is not written; TypeError for
        what is not a name and a tensor.
        """
        self.llm_engine.life.check_open()
        if source is not None:
            tensors = broadcast_weights(self.llm_engine, self._turns, tensors, source)
        elif tensors is None:
            raise TypeError("tensors is None: give pairs of name and tensor, or the rank that has them as source")
        executor: Any = self.llm_engine.model_executor  # with a worker in this process, unless it says why not
        executor.driver_worker.model_runner.model.load_weights(tensors)

    @_in_one_thread()
    def finish_weight_update(self) -> None:
        """Commit what was loaded: nothing that was cached before is found. Every rank calls this.

        Raises MissingWeightsError that lists what was not loaded, CheckpointError for a head that differs from the
        embedding it is tied to, and RanksDisagreeError that names a weight of which ranks were given different tensors;
        load it again then.
        """
        engine, updates = self.llm_engine, self.llm_engine.changes.weights
        engine.life.check_open()

        def prepare() -> None:
            engine.changes.commit_weights(is_partial=updates.release())

        self._turns.check_outside("finish_weight_update")
        agree_to_compute(engine, "finish_weight_update", prepare, {}, lambda _: None)

    @contextmanager
    def weight_update(self, *, partial: bool = False) -> Iterator[Callable[[str, torch.Tensor], None]]:
        """`with llm.weight_update() as load: load(name, tensor)`: as `start_weight_update`, `update_weights` one by
        one, and `finish_weight_update`. After an exception inside, which the other ranks hear of at the end of their
        block, all weights have to be loaded before anything is computed.
        """
        updates = self.llm_engine.changes.weights
        updates.check_not_held()
        try:
            self.start_weight_update(partial=partial)
            yield lambda name, tensor: self.update_weights([(name, tensor)])
        except BaseException as error:
            if updates.is_held:
                updates.release()
                if not isinstance(error, GeneratorExit):
                    fail_call(self.llm_engine, "finish_weight_update", error)
            raise
        self.finish_weight_update()

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """All weights of the model, whole tensors by their checkpoint names: as `start_weight_update`, `update_weights`
        and `finish_weight_update`, with what these raise. MissingWeightsError lists those that did not come.
        """
        with self.weight_update() as load:
            for name, tensor in weights:
                load(name, tensor)

    @_in_one_thread(is_alone=True)
    def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """Give memory back until `wake_up`, on every rank or on none; every rank calls this, with no request
        unanswered. `level` 1 keeps the weights, in host memory, and drops the cache; 2 drops both. The CPU's weights
        are in host memory and stay where they are at level 1. What was cached is not found afterwards. Bytes and
        seconds of each rank are logged.

        Asleep, `reset_prefix_cache` and `set_weight_version` can be called, and `load_weights` once the weights are
        awake; to sleep again is no error, and 2 after 1 drops the weights. Whatever computes raises RuntimeError. Needs
        nothing to be switched on.

        `mode` says in vLLM what becomes of unanswered requests: abort, wait and keep are the same here.

        Raises ValueError for another level or mode, RuntimeError while requests are unanswered, saying how many, and
        MissingWeightsError where some weights were loaded and others not, which level 2 drops; nothing sleeps then.
        """
        self.llm_engine.life.check_open()

        def prepare() -> int:
            self.llm_engine.requests.check_idle_or_asleep()
            self.llm_engine.changes.weights.check_not_held()
            check_mode(mode)
            return checked_level(level)

        self.llm_engine.sleep(self._agree("sleep", prepare))

    @_in_one_thread(is_alone=True)
    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Take memory again for what sleeps: all of it, or `tags`, "weights" and "kv_cache", in any order and in one
        call or two; what is awake is passed over. Sizes are those from before. Every rank calls this.

        After `sleep(level=2)` the weights are none, but for those that may be left out of an update (see
        `start_weight_update`), which are what they were: until all others were loaded (`load_weights`,
        `update_weights`, `collective_rpc("reload_weights")`) whatever computes raises MissingWeightsError that lists
        those that were not. Weights that were loaded completely are committed.

        Raises ValueError for other tags, and WorkerEventError where a rank has too little memory, naming the rank and
        the bytes; all ranks are as they were before and can try again.
        """
        self.llm_engine.life.check_open()

        def prepare() -> list[str]:
            self.llm_engine.requests.check_idle_or_asleep()
            self.llm_engine.changes.weights.check_not_held()
            return checked_tags(tags)

        self.llm_engine.wake_up(self._agree("wake_up", prepare))

    @property
    def is_sleeping(self) -> bool:
        """Whether anything sleeps; also `llm_engine.model_executor.is_sleeping`."""
        return self.llm_engine.executor.is_sleeping

    @property
    def sleeping_tags(self) -> tuple[str, ...]:
        """What sleeps: "weights", "kv_cache", both or nothing."""
        return self.llm_engine.executor.sleeping_tags

    @_in_one_thread(is_alone=True)
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

        parallel = self._agree("reinitialize_distributed", prepare)
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

    def _agree(self, call: str, prepare: Callable[[], _Prepared]) -> _Prepared:
        """As `agree_on_call`. Raises RuntimeError in turns."""
        self._turns.check_outside(call)
        return agree_on_call(self.llm_engine, call, prepare)
