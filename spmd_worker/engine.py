"""Tokens in, tokens out: the engine that every rank runs a replica of.

One step is three calls, all in one direction: `schedule`, `agree`, `execute_model`; then what was sampled goes back
into the scheduler. Rank 0's requests and aborts become events of the next message; what other ranks ask for is ignored,
because only rank 0 touches the outside world. Knows how the parts fit together and no part's inside.
"""

import json
import logging
import platform
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy
import safetensors
import tokenizers
import torch

from kv_cache.cache_manager import CacheManager
from spmd_worker.config import ConfigError, RunConfig
from spmd_worker.engine_outputs import request_output
from spmd_worker.executor.executor import Executor
from spmd_worker.lockstep.agreement import canonical, check_equal
from spmd_worker.lockstep.channel import ControlChannel
from spmd_worker.lockstep.connect import open_step_channel
from spmd_worker.lockstep.errors import RankFailedError
from spmd_worker.lockstep.lockstep import Lockstep
from spmd_worker.lockstep.step_channel import FollowerChannel, LeaderChannel
from spmd_worker.memory.plan import check_cache_setting, resolve_max_model_len
from spmd_worker.model_shape import ModelShape, read_generation_config, read_model_shape
from spmd_worker.observability.step_times import StepTimes
from spmd_worker.parallel.environment import RankEnvironment, read_rank_environment
from spmd_worker.parallel.groups import world_environment
from spmd_worker.parallel.layout import RankLayout, check_divides
from spmd_worker.parallel.process_group import single_group
from spmd_worker.scheduler.scheduler import Scheduler, SchedulerCounters, SchedulerLimits
from spmd_worker.scheduler.stop import StopChecker
from spmd_worker.sequence.defaults import default_sampling
from spmd_worker.sequence.events import Abort, Admit, Close, Event
from spmd_worker.sequence.outputs import RequestOutput
from spmd_worker.sequence.request import Request, RequestId, random_stream
from spmd_worker.sequence.sampling_params import SamplingParams
from spmd_worker.sequence.sequence import Sequence, SequenceGroup
from spmd_worker.sequence.step import StepResult
from spmd_worker.tokenizer import IncrementalDecoder, Tokenizer
from spmd_worker.version import code_fingerprint
from spmd_worker.weights.identity import file_identities, tensor_digests

logger = logging.getLogger(__name__)

_WATERMARK_SHARE = 0.01
"""Free blocks that admission leaves to running sequences, as a share of the cache."""


class LLMEngine:
    """Use `start_engine`. Every rank of a replica makes the same calls of `step`, in the same order."""

    def __init__(
        self,
        config: RunConfig,
        shape: ModelShape,
        tokenizer: Tokenizer | None,
        executor: Executor,
        channel: ControlChannel,
        lockstep: Lockstep,
        scheduler: Scheduler,
    ) -> None:
        self.config, self.shape, self.tokenizer, self.executor = config, shape, tokenizer, executor
        self.channel, self.lockstep, self.scheduler = channel, lockstep, scheduler
        self.is_closed = False
        self._is_mid_step = False
        self.times = StepTimes()
        self.default_sampling = default_sampling(config.sampling, _generation_config(config))
        self.max_model_len = resolve_max_model_len(config, shape)
        self._events: list[Event] = []
        self._prompts: dict[RequestId, str | None] = {}
        self._num_requests = 0
        self._sampled_token_ids: tuple[int, ...] = ()

    @property
    def is_leader(self) -> bool:
        """Whether this rank's requests count."""
        return self.channel.rank == 0

    @property
    def counters(self) -> SchedulerCounters:
        """What happened so far."""
        return self.scheduler.counters

    @property
    def num_unfinished(self) -> int:
        """Requests added here and not answered yet."""
        return len(self._prompts)

    def check_request(self, prompt_token_ids: tuple[int, ...], sampling: SamplingParams) -> None:
        """Raise ValueError for a request that could never be answered. Needs no other rank."""
        if not prompt_token_ids:
            raise ValueError("the prompt has no tokens: give at least one")
        outside = next((token for token in prompt_token_ids if not 0 <= token < self.shape.vocab_size), None)
        if outside is not None:
            raise ValueError(f"token id {outside} is outside the vocabulary of {self.shape.vocab_size} tokens")
        if len(prompt_token_ids) + 1 > self.max_model_len:
            raise ValueError(
                f"the prompt has {len(prompt_token_ids)} tokens but model.max_model_len is {self.max_model_len}, which "
                f"must hold the prompt and at least one output token: shorten the prompt or raise model.max_model_len"
            )
        if sampling.n > self.config.scheduler.max_num_seqs:
            raise ValueError(
                f"n={sampling.n} is more than scheduler.max_num_seqs={self.config.scheduler.max_num_seqs}: "
                f"lower n or raise scheduler.max_num_seqs"
            )
        if sampling.stop and self.tokenizer is None:
            raise ValueError("stop strings need a tokenizer.json in the model folder: use stop_token_ids")
        sampling.check_vocabulary(self.shape.vocab_size)

    def add_request(
        self,
        prompt_token_ids: tuple[int, ...],
        sampling: SamplingParams,
        *,
        prompt: str | None = None,
        custom_id: str | None = None,
        index: int | None = None,
    ) -> RequestId:
        """Queue a request for the next step. `custom_id`, else `index`, else the order of requests names its
        randomness.

        Raises ValueError as `check_request` does.
        """
        self.check_request(prompt_token_ids, sampling)
        request_id = RequestId(self._num_requests)
        row = self._num_requests if index is None else index
        stream = random_stream(self.config.seed, sampling.seed, custom_id, row)
        self._num_requests += 1
        self._prompts[request_id] = prompt
        self._events.append(Admit(Request(request_id, prompt_token_ids, sampling, stream)))
        return request_id

    def abort_request(self, request_id: RequestId) -> None:
        """End a request at the next step; its output so far comes back with finish reason "abort"."""
        self._events.append(Abort(request_id))

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has anything to do here."""
        return bool(self._prompts)

    def check_idle(self) -> None:
        """Raise RuntimeError unless new prompts would have the engine to themselves: open, whole, nothing waiting."""
        if self.is_closed:
            raise RuntimeError("this LLM was closed: make a new one")
        self._check_whole()
        if self.has_unfinished_requests():
            raise RuntimeError(
                f"{self.num_unfinished} requests of llm_engine.add_request are not answered yet: call llm_engine.step "
                f"until they are"
            )

    def step(self) -> list[RequestOutput]:
        """One step. Returns the requests that ended in it, in plan order."""
        return [self._output(group) for group in self._step()]

    def follow(self) -> None:
        """Run steps until rank 0 closes: the loop of a rank that has no requests of its own."""
        while not self.is_closed:
            self._step()

    def close_followers(self) -> None:
        """Rank 0 only: end the `follow` loops. The engine takes no more requests."""
        self._events.append(Close())
        while not self.is_closed:
            self._step()

    def shutdown(self) -> None:
        """Give back memory and groups. Idempotent; every rank calls it."""
        self.is_closed = True
        self.lockstep.close()
        self.channel.close()
        self.executor.shutdown()

    def agree_on(self, subject: str, value: Any) -> None:
        """Raise RanksDisagreeError, naming the first difference, unless every rank gives an equal JSON value.

        Compares nothing with `executor.digest_every` 0.
        """
        if self.config.executor.digest_every:
            check_equal(subject, self.channel.gather(canonical(value)))

    def agree_on_prompts(self, prompts: list[tuple[tuple[int, ...], SamplingParams]]) -> None:
        """Raise RanksDisagreeError, naming prompt, field and both values, unless every rank gives equal prompts.

        Digests are compared; only a prompt that differs is sent whole.
        """
        if not self.config.executor.digest_every or self.channel.size == 1:
            return
        digests = [blake2b(canonical(_as_json(prompt)), digest_size=8).hexdigest() for prompt in prompts]
        lists = [json.loads(payload) for payload in self.channel.gather(canonical(digests))]
        for index, entries in enumerate(zip(*lists)):
            if len(dict.fromkeys(entries)) > 1:
                self.agree_on("prompts", {f"prompts[{index}]": _as_json(prompts[index])})
        check_equal("prompts", [canonical({"number of prompts": len(entries)}) for entries in lists])

    def _step(self) -> list[SequenceGroup]:
        """Raises ReplicaDivergedError or RankFailedError, naming the culprit, where another rank is the cause."""
        self._check_whole()
        self._is_mid_step = True
        try:
            ended = self._run_step()
        except Exception as error:  # told to the other ranks, which may be waiting for this one, then raised again
            explained = self.lockstep.explain(error)
            if explained is error:
                raise
            raise explained from error
        self._is_mid_step = False
        return ended

    def _check_whole(self) -> None:
        """An exception in a step, Ctrl-C too, leaves scheduler and devices in different states for good."""
        if self._is_mid_step:
            raise RuntimeError("an earlier step failed halfway: close this LLM and make a new one")

    def _run_step(self) -> list[SequenceGroup]:
        self.times.begin()
        plan = self.scheduler.schedule()
        events, self._events = tuple(self._events), []
        self.times.end("schedule")
        agreed = self.lockstep.agree(plan, self._sampled_token_ids, events)
        self.times.end("lockstep")
        result = self.executor.execute_model(agreed.plan)
        assert isinstance(result, StepResult), type(result)
        self.times.end("execute")
        self._sampled_token_ids = result.token_ids
        ended = self.scheduler.apply(result) if agreed.plan.has_rows else []
        for event in agreed.events:
            ended += self._take_in(event)
        self.times.end("apply")
        return ended

    def _take_in(self, event: Event) -> list[SequenceGroup]:
        if isinstance(event, Close):
            self.is_closed = True
        aborted = self.scheduler.handle(event)
        return [aborted] if aborted is not None else []

    def _output(self, group: SequenceGroup) -> RequestOutput:
        prompt = self._prompts.pop(group.request.request_id, None)
        return request_output(group, prompt, self.tokenizer)


def _as_json(prompt: tuple[tuple[int, ...], SamplingParams]) -> dict[str, Any]:
    return {"prompt_token_ids": list(prompt[0]), "sampling": asdict(prompt[1])}


def start_engine(config: RunConfig, environment: RankEnvironment | None = None) -> LLMEngine:
    """Build this rank's replica: device, groups, weights, cache, scheduler. Every rank of the layout calls this.

    Raises ConfigError or ModelConfigError before any rank is waited for; RanksDisagreeError and RankFailedError, the
    same on every rank, once the groups exist.
    """
    environment = world_environment(environment or read_rank_environment())
    shape, layout = read_run(config)
    executor = Executor.get_class(config.executor.backend, environment)(config, shape, layout, environment)
    executor.start()
    channel: ControlChannel = getattr(executor, "channel", None) or ControlChannel(single_group())
    try:
        tokenizer, num_blocks = _load(config, shape, executor, channel)
        scheduler = new_scheduler(config, shape, tokenizer, num_blocks)
        if config.executor.digest_every:
            cache = {"num_blocks": scheduler.cache.num_blocks, "block_size": scheduler.cache.block_size}
            check_equal("caches", channel.gather(canonical(cache)))
        # The channel last: it starts a thread.
        lockstep = Lockstep(_open_channel(config, channel, environment), config.executor.digest_every)
    except BaseException:
        executor.shutdown()
        raise
    return LLMEngine(config, shape, tokenizer, executor, channel, lockstep, scheduler)


def _load(
    config: RunConfig, shape: ModelShape, executor: Executor, channel: ControlChannel
) -> tuple[Tokenizer | None, int]:
    """Everything that reads files or takes memory, agreed on step by step; returns the number of device blocks."""
    folder = Path(config.model.path or "")
    tokenizer = _together(channel, "reading the tokenizer", partial(Tokenizer.open_if_present, folder))
    if config.executor.digest_every:
        _agree_on_start(channel, config, shape, tokenizer)
    _together(channel, "loading the model", executor.load_model)
    counts = _together(channel, "sizing the cache", executor.determine_num_available_blocks)
    num_device, num_host = channel.minimum(counts)
    _together(channel, "allocating the cache", partial(executor.initialize_from_config, num_device, num_host))
    return tokenizer, num_device


def _open_channel(
    config: RunConfig, channel: ControlChannel, environment: RankEnvironment
) -> LeaderChannel | FollowerChannel | None:
    if channel.size == 1:
        return None
    is_one_node = environment.local_world_size == environment.world_size
    return open_step_channel(channel, None if is_one_node else environment.master_address, config.executor.timeout_s)


def read_run(config: RunConfig) -> tuple[ModelShape, RankLayout]:
    """The model's shape and the layout of ranks, checked against each other. Raises ConfigError or ModelConfigError."""
    if config.model.path is None:
        raise ConfigError("model.path is not set: give a Hugging Face model folder, such as scripts/demo/model")
    shape = read_model_shape(Path(config.model.path))
    parallel = config.parallel
    layout = RankLayout(parallel.tensor_parallel_size, parallel.pipeline_parallel_size, parallel.data_parallel_size)
    check_divides(layout, shape)
    resolve_max_model_len(config, shape)
    check_cache_setting(config, shape)
    return shape, layout


def new_scheduler(config: RunConfig, shape: ModelShape, tokenizer: Tokenizer | None, num_blocks: int) -> Scheduler:
    """This rank's replica of the scheduler, empty."""
    limits = SchedulerLimits(
        config.scheduler.max_num_seqs,
        config.scheduler.max_num_batched_tokens,
        config.scheduler.enable_chunked_prefill,
    )
    watermark = max(1, int(num_blocks * _WATERMARK_SHARE))
    cache = CacheManager(num_blocks, config.cache.block_size, watermark_blocks=watermark)
    new_decoder = partial(_new_decoder, tokenizer) if tokenizer is not None else None
    return Scheduler(limits, cache, StopChecker(shape.eos_token_ids, resolve_max_model_len(config, shape), new_decoder))


def _new_decoder(tokenizer: Tokenizer, sequence: Sequence) -> IncrementalDecoder:
    request = sequence.request
    return IncrementalDecoder(tokenizer, request.prompt_token_ids, request.sampling.skip_special_tokens)


def _generation_config(config: RunConfig) -> dict[str, Any]:
    return read_generation_config(Path(config.model.path or ""))


def package_versions() -> dict[str, str]:
    """What computes beside this code, and could compute otherwise in another version."""
    versions = {module.__name__: str(module.__version__) for module in (numpy, safetensors, tokenizers, torch)}
    return {"python": platform.python_version(), **versions}


def _agree_on_start(channel: ControlChannel, config: RunConfig, shape: ModelShape, tokenizer: Tokenizer | None) -> None:
    """Configuration, code and model must be the same on every rank; where output goes is rank 0's business."""
    settings = asdict(config)
    del settings["job"]
    # The memory budget may differ: the number of blocks is agreed on by its minimum.
    del settings["cache"]["gpu_memory_utilization"]
    settings["model"]["path"] = None
    value = {
        "config": settings,
        "code": code_fingerprint(),
        "packages": package_versions(),
        "model": asdict(shape),
        "tokenizer": tokenizer.fingerprint() if tokenizer is not None else None,
    }
    check_equal("settings", channel.gather(canonical(value)))
    if config.model.load_format != "dummy":
        _agree_on_weights(channel, Path(config.model.path or ""))


def _agree_on_weights(channel: ControlChannel, folder: Path) -> None:
    """Ranks that read the same files have the same weights; copies are compared by content, tensor by tensor."""
    identities = channel.gather(
        canonical(_together(channel, "reading the checkpoint", partial(file_identities, folder)))
    )
    if len(dict.fromkeys(identities)) == 1:
        return
    # One rank of those that share files reads them for all.
    is_first = identities.index(identities[channel.rank]) == channel.rank
    digests = _together(channel, "reading the checkpoint", partial(tensor_digests, folder) if is_first else dict)
    gathered = channel.gather(canonical(digests))
    check_equal("weights", [gathered[identities.index(identity)] for identity in identities])


def _together(channel: ControlChannel, phase: str, action: Callable[[], Any]) -> Any:
    """Run `action` on every rank; if it fails on any, all raise RankFailedError naming the first that did and why."""
    result: Any = None
    problem = ""
    try:
        result = action()
    except (ValueError, OSError, RuntimeError, MemoryError) as error:
        if channel.size == 1:
            raise
        problem = f"{type(error).__name__}: {error}"
    for rank, other in enumerate(channel.gather(problem.encode("utf-8", "replace"))):
        if other:
            raise RankFailedError(f"rank {rank} failed while {phase}: {other.decode('utf-8', 'replace')}")
    return result
