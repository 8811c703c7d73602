"""Starting an engine: every rank builds its replica, and what must be the same everywhere is compared first.

Configuration, code and model first, then files and memory phase by phase, each agreed on by all ranks, so that one
rank's failure is every rank's error and nobody is waited for in vain.
"""

import json
import platform
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy
import tokenizers
import torch

from spmd_worker.base.config.schema import ParallelConfig, RunConfig
from spmd_worker.base.errors import ConfigError, RankFailedError
from spmd_worker.base.liveness.heartbeat import BETWEEN_STEPS
from spmd_worker.base.liveness.watchdog import Watchdog
from spmd_worker.base.metrics.log import leave_to_rank_0
from spmd_worker.base.metrics.step_times import StepTimes
from spmd_worker.base.version import code_fingerprint
from spmd_worker.engine.call_guard import CallGuard
from spmd_worker.engine.changes import Changes
from spmd_worker.engine.engine import Engine
from spmd_worker.engine.life import Life
from spmd_worker.engine.pipeline import StepPipeline
from spmd_worker.engine.requests import Requests
from spmd_worker.engine.weight_updates import WeightUpdates
from spmd_worker.executor.executor import Executor
from spmd_worker.model.weights.identity import file_identities, tensor_digests
from spmd_worker.ranks.communicator import single_group
from spmd_worker.ranks.environment import RankEnvironment, read_rank_environment
from spmd_worker.ranks.groups import world_environment
from spmd_worker.ranks.rank_watchdog import watch_guest
from spmd_worker.ranks.transport.channel import ControlChannel
from spmd_worker.ranks.transport.connect import open_step_channel
from spmd_worker.ranks.transport.membership import check_members, run_secret
from spmd_worker.replica.lockstep.agreement import canonical, check_equal
from spmd_worker.replica.lockstep.channel import FollowerChannel, LeaderChannel
from spmd_worker.replica.lockstep.lockstep import Lockstep
from spmd_worker.replica.scheduler.allocator import PreemptionPolicy
from spmd_worker.replica.scheduler.factory import CacheSizes, new_scheduler
from spmd_worker.replica.scheduler.planner import SchedulerLimits
from spmd_worker.replica.scheduler.scheduler import Scheduler
from spmd_worker.resolved import ResolvedRun, resolve_again, resolve_run
from spmd_worker.worker.device import check_gpus_not_shared, device_type
from spmd_worker.worker.memory.estimate import block_copy_tokens
from spmd_worker.worker.memory.plan import check_cache_setting

WATERMARK_BLOCKS_PER_SEQUENCE: Final = 1
"""Free blocks that admission leaves for each running sequence: see `docs/decisions.md`."""


_Engine = TypeVar("_Engine", bound=Engine)


def read_run(config: RunConfig) -> ResolvedRun:
    """What this process computes with, its files read once; nothing is started. Raises ConfigError, ModelConfigError
    or TokenizerError for what cannot run.
    """
    leave_to_rank_0(read_rank_environment().rank)
    resolved = resolve_run(config, device_type(config.device))
    check_cache_setting(resolved)
    return resolved


def start_engine(
    resolved: ResolvedRun,
    environment: RankEnvironment | None = None,
    watchdog: Watchdog | None = None,
    engine_class: type[_Engine] = Engine,  # type: ignore[assignment]  # mypy 1: no default of a type variable
) -> _Engine:
    """Build this rank's replica: device, groups, weights, cache, scheduler. Every rank of the layout calls this.

    `resolved` is from `read_run`. `watchdog` is the program's own, and started; without one the engine has one for as
    long as it lives. `engine_class` is the class of what is returned.

    Raises ConfigError before any rank is waited for; RanksDisagreeError and RankFailedError, the same on every rank,
    once the groups exist.
    """
    executor_config = resolved.config.executor
    environment = world_environment(
        environment or read_rank_environment(), resolved.layout.world_size, executor_config.timeout_s
    )
    executor_class = Executor.get_class(executor_config.backend, environment, resolved.layout.world_size)
    executor = executor_class(resolved, environment)
    if watchdog is None:
        num_ranks = resolved.layout.world_size if environment.is_launched else 1
        is_on_gpu = resolved.device_type == "cuda"
        watchdog = watch_guest(environment, num_ranks, executor_config.timeout_s, spins=is_on_gpu)
        watchdog.start()
    return _start_together(resolved, executor, watchdog, executor.start, engine_class)


def restart_engine(engine: _Engine, parallel: ParallelConfig) -> _Engine:
    """The engine that goes on in its place, over ranks divided in another way, with nothing in its caches.

    Under a launcher the ranks stay as many as they are; `multiproc` starts and ends processes. Everything that a start
    agrees on is agreed on anew, numbers of blocks too. Requests and calls go on being numbered; counters begin anew.
    Every rank of the world calls this. Raises RuntimeError while requests are unanswered and ConfigError for a layout
    that cannot run here, with everything as it was; any later failure is for good.
    """
    engine.requests.check_idle()
    executor, watchdog = engine.executor, engine.watchdog
    assert watchdog is not None, "an engine that was started has one"
    resolved = resolve_again(engine.resolved, parallel)
    check_cache_setting(resolved)
    executor.check_layout(resolved.layout)
    engine.life.retire()
    set_up = partial(executor.reinitialize_distributed, resolved)
    restarted = _start_together(resolved, executor, watchdog, set_up, type(engine))
    # Replicas have counted by themselves.
    counts = (engine.requests.num_requests, engine.requests.num_unnamed)
    num_requests, num_unnamed = (
        -least for least in restarted.engine_channel.minimum(tuple(-count for count in counts))
    )
    restarted.requests.continue_from(num_requests, engine.requests.num_calls, num_unnamed)
    return restarted


def _start_together(
    resolved: ResolvedRun,
    executor: Executor,
    watchdog: Watchdog,
    set_up: Callable[[], None],
    engine_class: type[_Engine],
) -> _Engine:
    try:
        return _start(resolved, executor, watchdog, set_up, engine_class)
    except BaseException as error:  # told to the other ranks, which may be waiting for this one, then raised again
        watchdog.fail(error)
        cause = watchdog.find_cause(error)
        if not watchdog.watched.exits:
            watchdog.stop()
        if cause is None:
            raise
        raise RankFailedError(cause) from error


def _start(
    resolved: ResolvedRun,
    executor: Executor,
    watchdog: Watchdog,
    set_up: Callable[[], None],
    engine_class: type[_Engine],
) -> _Engine:
    config = resolved.config
    # Step 0 once more where an engine goes on: a start may take any time.
    watchdog.heartbeat.enter("joining the other ranks", 0)
    set_up()
    channel: ControlChannel = getattr(executor, "channel", None) or ControlChannel(single_group())
    engine_channel: ControlChannel = getattr(executor, "engine_channel", None) or channel
    try:
        watchdog.join_run(check_members(engine_channel, run_secret()))
        # Ranks of the engine, of any replica, must not share a GPU.
        gpus = engine_channel.gather(canonical([each.gpu_identity for each in executor.reports()]))
        check_gpus_not_shared([identity for each in gpus for identity in json.loads(each)])
        sizes = _load(resolved, executor, channel, engine_channel, watchdog)
        watchdog.heartbeat.enter("agreeing on the start")
        scheduler = _new_replica(resolved, sizes)
        if config.executor.digest_every:
            _agree_on_computing(channel, engine_channel, executor, scheduler)
        # The channel last: it starts a thread.
        lockstep = Lockstep(
            _open_channel(config, channel, executor.environment),
            config.executor.digest_every,
            scheduler.limits.num_in_flight,
        )
    except BaseException as error:
        # Before the groups are taken down, which may take a while.
        watchdog.fail(error)
        executor.shutdown()
        raise
    watchdog.heartbeat.enter(BETWEEN_STEPS)
    return new_engine(resolved, executor, channel, engine_channel, lockstep, scheduler, watchdog, engine_class)


def new_engine(
    resolved: ResolvedRun,
    executor: Executor,
    channel: ControlChannel,
    engine_channel: ControlChannel,
    lockstep: Lockstep,
    scheduler: Scheduler,
    watchdog: Watchdog | None,
    engine_class: type[_Engine],
) -> _Engine:
    """An engine of parts that have started: no rank is waited for."""
    times = StepTimes() if watchdog is None else StepTimes(watchdog.heartbeat)
    life = Life(executor, lockstep, (channel, engine_channel), watchdog, times.heartbeat)
    calls = CallGuard()
    requests = Requests(resolved, calls, life)
    weights = WeightUpdates(executor, channel.rank, partial(len, scheduler.queues.groups))
    changes = Changes(executor, lockstep, channel, engine_channel, calls, life, requests, weights)
    parallel = resolved.config.parallel
    pipeline = StepPipeline(executor, channel, parallel.tensor_parallel_size, parallel.pipeline_parallel_size)
    return engine_class(
        resolved,
        executor,
        channel,
        engine_channel,
        lockstep,
        scheduler,
        pipeline,
        watchdog,
        times,
        calls,
        life,
        requests,
        changes,
    )


def _agree_on_computing(
    channel: ControlChannel, engine_channel: ControlChannel, executor: Executor, scheduler: Scheduler
) -> None:
    """Blocks and the order of arithmetic: what is only known once the kernels are built and the memory is measured.

    Another replica may have another number of blocks, but must compute the same bits.
    """
    cache = {
        "num_blocks": scheduler.cache.num_blocks,
        "num_host_blocks": scheduler.cache.num_host_blocks,
        "block_size": scheduler.cache.block_size,
    }
    check_equal("caches", channel.gather(canonical(cache)))
    arithmetic = executor.reports()[0].arithmetic
    check_equal("kernels", engine_channel.gather(canonical({"arithmetic": arithmetic})))


def _load(
    resolved: ResolvedRun,
    executor: Executor,
    channel: ControlChannel,
    engine_channel: ControlChannel,
    watchdog: Watchdog,
) -> CacheSizes:
    """Everything that reads files or takes memory, agreed on step by step by all replicas; returns the blocks that
    every rank of this one has.
    """
    config = resolved.config
    together = partial(_together, engine_channel, watchdog)
    if config.executor.digest_every:
        _agree_on_start(engine_channel, watchdog, resolved)
    together("loading the model", executor.load_model)
    together("checking the workers", partial(_check_workers, resolved, executor))
    counts = together("sizing the cache", executor.determine_num_available_blocks)
    num_tier = int(config.cache.host_tier_gib * 2**30) // max(executor.collective_rpc("get_cache_block_size_bytes"))
    sizes = CacheSizes(*channel.minimum((*counts, num_tier)))
    allocate = partial(executor.initialize_from_config, sizes.num_blocks, sizes.num_host_blocks)
    together("allocating the cache", allocate)
    if sizes.num_tier_blocks:
        allocate_tier = partial(executor.collective_rpc, "initialize_host_tier", args=(sizes.num_tier_blocks,))
        together("allocating the host tier", allocate_tier)
    together("warming up", partial(executor.collective_rpc, "compile_or_warm_up_model"))
    return sizes


def _check_workers(resolved: ResolvedRun, executor: Executor) -> None:
    """Raise RuntimeError for a device that does not compute, ConfigError for a worker class that cannot do this."""
    executor.check_health()
    config, pooling = resolved.config, resolved.model_config.pooling
    key, task = f"executor.worker_cls={config.executor.worker_cls}", "generate" if pooling is None else pooling.task
    if task not in executor.supported_tasks:
        known = ", ".join(executor.supported_tasks) or "nothing"
        kind = "generates" if pooling is None else "pools"
        raise ConfigError(f"{key} supports {known} on every rank, and not {task}: name a class that {kind}")
    for rank, spec in enumerate(executor.get_kv_cache_specs()):
        if spec.block_size != config.cache.block_size:
            raise ConfigError(
                f"{key} has blocks of {spec.block_size} tokens on worker {rank}, and cache.block_size is "
                f"{config.cache.block_size}: they must be equal"
            )


def _open_channel(
    config: RunConfig, channel: ControlChannel, environment: RankEnvironment
) -> LeaderChannel | FollowerChannel | None:
    if channel.size == 1:
        return None
    is_one_node = environment.local_world_size == environment.world_size
    return open_step_channel(channel, None if is_one_node else environment.master_address, config.executor.timeout_s)


def _new_replica(resolved: ResolvedRun, sizes: CacheSizes) -> Scheduler:
    """This rank's replica of the scheduler, empty."""
    config, model_config = resolved.config, resolved.model_config
    copy_tokens = block_copy_tokens(model_config, resolved.dtype, config.cache.block_size, resolved.device_type)
    limits = SchedulerLimits(
        config.scheduler.max_num_seqs,
        config.scheduler.max_num_batched_tokens,
        config.scheduler.enable_chunked_prefill,
        config.cache.enable_prefix_caching,
        PreemptionPolicy(config.scheduler.preemption_mode, copy_tokens),
        WATERMARK_BLOCKS_PER_SEQUENCE,
        config.parallel.pipeline_parallel_size,
        resolved.num_steps_ahead,
    )
    return new_scheduler(
        limits, sizes, config.cache.block_size, model_config.eos_token_ids, resolved.max_model_len, resolved.tokenizer
    )


def package_versions() -> dict[str, str]:
    """What computes beside this code, and could compute otherwise in another version."""
    versions = {module.__name__: str(module.__version__) for module in (numpy, tokenizers, torch)}
    # It takes its time to import, and only rows whose answers have a form need it.
    for name in ("llguidance",):
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return {"python": platform.python_version(), **versions}


def _agree_on_start(
    channel: ControlChannel,
    watchdog: Watchdog,
    resolved: ResolvedRun,
) -> None:
    """Configuration, code and model must be the same on every rank; where output goes, and where clients come from, is
    rank 0's business.
    """
    settings = asdict(resolved.config)
    del settings["job"], settings["serve"]
    # The memory budget may differ: the number of blocks is agreed on by its minimum.
    del settings["cache"]["gpu_memory_utilization"]
    # So may folders; what is in the files is compared.
    settings["model"]["path"] = settings["parallel"]["expert_placement"] = None
    value = {
        "config": settings,
        "code": code_fingerprint(),
        "packages": package_versions(),
        "model": asdict(resolved.model_config),
        "experts": None if resolved.layout.experts is None else asdict(resolved.layout.experts),
        "default sampling": asdict(resolved.default_sampling),
        "tokenizer": resolved.tokenizer.fingerprint() if resolved.tokenizer is not None else None,
    }
    check_equal("settings", channel.gather(canonical(value)))
    if resolved.config.model.load_format != "dummy":
        pooling = resolved.model_config.pooling
        inside = () if pooling is None else pooling.weight_folders
        _agree_on_weights(channel, watchdog, resolved.model_folder, inside)


def _agree_on_weights(channel: ControlChannel, watchdog: Watchdog, folder: Path, inside: tuple[str, ...]) -> None:
    """Ranks that read the same files have the same weights; copies are compared by content, tensor by tensor."""
    identities = channel.gather(
        canonical(_together(channel, watchdog, "reading the checkpoint", partial(file_identities, folder, inside)))
    )
    if len(dict.fromkeys(identities)) == 1:
        return
    # One rank of those that share files reads them for all.
    is_first = identities.index(identities[channel.rank]) == channel.rank
    digests = _together(
        channel, watchdog, "reading the checkpoint", partial(tensor_digests, folder, inside) if is_first else dict
    )
    gathered = channel.gather(canonical(digests))
    check_equal("weights", [gathered[identities.index(identity)] for identity in identities])


def _together(channel: ControlChannel, watchdog: Watchdog, phase: str, action: Callable[[], Any]) -> Any:
    """Run `action` on every rank; if it fails on any, all raise RankFailedError naming the first that did and why."""
    result: Any = None
    problem = ""
    watchdog.heartbeat.enter(phase)
    try:
        result = action()
    except (ValueError, OSError, RuntimeError, MemoryError) as error:
        if channel.size == 1:
            raise
        problem = f"{type(error).__name__}: {error}"
        watchdog.fail(error, phase)
    for rank, other in enumerate(channel.gather(problem.encode("utf-8", "replace"))):
        if other:
            failed = RankFailedError(f"rank {rank} failed while {phase}: {other.decode('utf-8', 'replace')}")
            failed.names_cause = True
            raise failed
    return result
