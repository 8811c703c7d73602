"""What agreeing on a step costs: scheduler, digest, messages and mirror on ranks, without a model."""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import torch

from kv_cache.cache_manager import CacheManager
from spmd_worker.ranks.environment import read_rank_environment
from spmd_worker.ranks.groups import join_groups
from spmd_worker.ranks.topology import RankLayout
from spmd_worker.ranks.transport.channel import ControlChannel
from spmd_worker.ranks.transport.connect import open_step_channel
from spmd_worker.replica.lockstep.channel import FollowerChannel, LeaderChannel
from spmd_worker.replica.lockstep.difference import Record
from spmd_worker.replica.lockstep.digest import ChainedDigest
from spmd_worker.replica.lockstep.lockstep import Lockstep, StepReport
from spmd_worker.replica.lockstep.wire.codec import Decoder, Encoder
from spmd_worker.replica.lockstep.wire.message import StepMessage
from spmd_worker.replica.mirror.mirror import Mirror
from spmd_worker.replica.scheduler.planner import SchedulerLimits
from spmd_worker.replica.scheduler.scheduler import Scheduler
from spmd_worker.replica.scheduler.stop import StopChecker
from spmd_worker.replica.sequence.events import Admit, Event
from spmd_worker.replica.sequence.request import Request, RequestId
from spmd_worker.replica.sequence.sampled import SampledIds
from spmd_worker.replica.sequence.sampling_params import SamplingParams
from spmd_worker.replica.sequence.step import StepPlan, StepResult

BENCH_RUNTIME = Path(__file__).resolve().parents[1] / "bench_runtime.py"
BLOCK_SIZE = 16
NUM_PROMPT_TOKENS = 33
MAX_TOKENS = 1_000_000
VOCAB_SIZE = 150_000
NUM_WARM_STEPS = 30
MAX_START_STEPS = 100
TIMEOUT_S = 60.0
LAUNCH_TIMEOUT_S = 300.0
TARGET_US = 1000.0

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class LockstepResult:
    """One row of the table; times are medians in microseconds where they are not named otherwise."""

    ranks: int
    sequences: int
    bytes_a_step: int
    bytes_a_step_max: int
    schedule_us: float
    digest_us: float
    encode_us: float
    exchange_us: float
    decode_us: float
    mirror_us: float
    apply_us: float
    step_p10_us: float
    step_us: float
    step_p90_us: float


# A rank's side.


class Replica:
    """Scheduler and mirror of one rank, with `num_sequences` decoding and nobody ending."""

    def __init__(self, num_sequences: int, num_steps: int, lockstep: Lockstep) -> None:
        num_blocks = num_sequences * ((NUM_PROMPT_TOKENS + BLOCK_SIZE + num_steps) // BLOCK_SIZE + 2)
        limits = SchedulerLimits(num_sequences, max(2048, num_sequences))
        cache = CacheManager(num_blocks, BLOCK_SIZE)
        self.scheduler = Scheduler(limits, cache, StopChecker((), 2 * MAX_TOKENS, None))
        self.mirror = Mirror(num_blocks, BLOCK_SIZE)
        self.lockstep = lockstep
        self.sampled: tuple[int, ...] = ()
        self.times = StepTimes()
        self._num_sequences = num_sequences
        self._ids = [
            tuple((step * 7919 + row * 104_729) % VOCAB_SIZE for row in range(num_sequences)) for step in range(61)
        ]

    def start(self) -> None:
        """Admit, compute the prompts, and go on until every sequence decodes."""
        events: tuple[Event, ...] = tuple(map(Admit, lockstep_requests(self._num_sequences)))
        plan = self.step(events)
        while len(plan.continuing) < self._num_sequences:
            plan = self.step()
            assert plan.step < MAX_START_STEPS, f"{len(plan.continuing)} of {self._num_sequences} sequences decode"
        for _ in range(NUM_WARM_STEPS):
            self.step()

    def step(self, events: tuple[Event, ...] = ()) -> StepPlan:
        """As the engine does it, the model left out."""
        plan = self.scheduler.schedule()
        agreed = self.lockstep.agree(plan, StepReport(SampledIds(self.sampled), events=events))
        self.mirror.apply(agreed.plan)
        self._apply(plan)
        for event in agreed.events:
            self.scheduler.handle(event)
        return plan

    def timed_step(self) -> None:
        """The same step, its parts measured one by one; what lockstep does inside is done once more, to be measured."""
        times, sampled = self.times, self.sampled
        plan = times.measure("schedule", self.scheduler.schedule)
        digest = times.measure("digest", lambda: times.digest.update(Record(plan, (), sampled)))
        message = StepMessage(plan.step, (), plan, sampled, digest)
        payload = times.measure("encode", lambda: times.encoder.encode(message))
        times.num_bytes.append(len(payload))
        times.measure("decode", lambda: times.decoder.decode(payload))
        agreed = self.lockstep.agree(plan, StepReport(SampledIds(sampled)))
        times.measure("mirror", lambda: self.mirror.apply(agreed.plan))
        times.measure("apply", lambda: self._apply(plan))

    def _apply(self, plan: StepPlan) -> None:
        num_samples = len(plan.continuing) + sum(data.num_samples for group in plan.groups for data in group.sequences)
        self.sampled = self._ids[plan.step % len(self._ids)][:num_samples]
        if plan.has_rows:
            self.scheduler.apply(StepResult(plan.step, self.sampled))


class StepTimes:
    """Microseconds of each part, and a codec and a digest of its own to be measured with."""

    def __init__(self) -> None:
        self.encoder, self.decoder, self.digest = Encoder(), Decoder(), ChainedDigest()
        self.num_bytes: list[int] = []
        self._parts: dict[str, list[float]] = {}

    def measure(self, part: str, action: Callable[[], T]) -> T:
        started_s = time.perf_counter()
        result = action()
        self._parts.setdefault(part, []).append((time.perf_counter() - started_s) * 1e6)
        return result

    def median(self, part: str) -> float:
        # The first message stands alone, the others are coded against the one before.
        return statistics.median(self._parts[part][1:])


def lockstep_requests(num_sequences: int) -> list[Request]:
    """Prompts of 33 to 48 tokens, so that in every step a sixteenth of the sequences takes a block."""
    sampling = SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True)
    return [
        Request(RequestId(number), tuple(range(NUM_PROMPT_TOKENS + number % BLOCK_SIZE)), sampling, number)
        for number in range(num_sequences)
    ]


def measure_lockstep(channel: LeaderChannel | FollowerChannel, num_sequences: int, num_steps: int) -> LockstepResult:
    """Every rank calls this; rank 0's result counts."""
    replica = Replica(
        num_sequences, 2 * num_steps + NUM_WARM_STEPS + MAX_START_STEPS, Lockstep(channel, digest_every=1)
    )
    replica.start()
    steps_us = []
    for _ in range(num_steps):
        started_s = time.perf_counter()
        replica.step()
        steps_us.append((time.perf_counter() - started_s) * 1e6)
    for _ in range(num_steps):
        replica.timed_step()
    times = replica.times
    num_bytes = sorted(times.num_bytes[1:])
    exchange_us = measure_exchange(channel, statistics.median_low(num_bytes), num_steps)
    parts = {f"{part}_us": times.median(part) for part in ("schedule", "digest", "encode", "decode", "mirror", "apply")}
    deciles = statistics.quantiles(steps_us, n=10)
    return LockstepResult(
        ranks=channel.size,
        sequences=num_sequences,
        bytes_a_step=statistics.median_low(num_bytes),
        bytes_a_step_max=num_bytes[-1],
        exchange_us=exchange_us,
        step_us=statistics.median(steps_us),
        step_p10_us=deciles[0],
        step_p90_us=deciles[-1],
        **parts,
    )


def measure_exchange(channel: LeaderChannel | FollowerChannel, num_bytes: int, num_rounds: int) -> float:
    """Median of a round: every follower's digest up, a message of `num_bytes` down. Both ends are in step."""
    payload, answer = bytes(num_bytes), bytes(16)
    leader, follower = cast("LeaderChannel", channel), cast("FollowerChannel", channel)
    rounds_us = []
    for number in range(num_rounds):
        started_s = time.perf_counter()
        if channel.rank == 0:
            leader.collect(number)
            leader.send(payload)
        else:
            follower.answer(number, answer)
            follower.receive()
        rounds_us.append((time.perf_counter() - started_s) * 1e6)
    return statistics.median(rounds_us)


def run_rank(options: argparse.Namespace) -> None:
    """Under torchrun: measure each number of sequences; rank 0 writes the results down."""
    torch.set_num_threads(1)
    environment = read_rank_environment()
    groups = join_groups(RankLayout(environment.world_size, 1, 1), environment, torch.device("cpu"), TIMEOUT_S)
    channel = open_step_channel(ControlChannel(groups.control), None, TIMEOUT_S)
    try:
        results = [measure_lockstep(channel, num_sequences, options.steps) for num_sequences in options.sequences]
    finally:
        channel.close()
        groups.destroy()
    if environment.rank == 0:
        options.results.write_text(json.dumps([asdict(result) for result in results]), encoding="utf-8")


# The launcher's side.


def launch_ranks(num_ranks: int, options: argparse.Namespace) -> list[LockstepResult]:
    with tempfile.TemporaryDirectory(prefix="bench-lockstep-") as folder:
        results = Path(folder) / "results.json"
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
        sizes = ",".join(map(str, options.sequences))
        script = [str(BENCH_RUNTIME), "lockstep", "--results", str(results)]
        script += ["--sequences", sizes, "--steps", str(options.steps)]
        process = subprocess.Popen([*launcher, *script], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        try:
            output, _ = process.communicate(timeout=LAUNCH_TIMEOUT_S)
        except BaseException:
            # Not killed: torchrun passes SIGTERM on to its ranks, which live in sessions of their own.
            process.terminate()
            process.wait()
            raise
        if process.returncode != 0:
            raise SystemExit(f"bench_runtime.py: {num_ranks} ranks failed:\n{output}")
        return [LockstepResult(**values) for values in json.loads(results.read_text(encoding="utf-8"))]


def print_lockstep(results: list[LockstepResult]) -> None:
    parts = ("schedule", "digest", "encode", "exchange", "decode", "mirror", "apply", "step_p10", "step", "step_p90")
    print("".join([f"{'ranks':>5} {'sequences':>9} {'bytes':>6} {'max':>6}", *(f" {part:>8}" for part in parts)]))
    for result in results:
        counts = f"{result.ranks:>5} {result.sequences:>9} {result.bytes_a_step:>6} {result.bytes_a_step_max:>6}"
        print(counts + "".join(f" {getattr(result, f'{part}_us'):>8.0f}" for part in parts))


def lockstep_summary(results: list[LockstepResult]) -> dict[str, Any]:
    """For machines: every number, and whether 256 sequences on two ranks keep to the budget."""
    target = [result for result in results if (result.ranks, result.sequences) == (2, 256)]
    return {
        "benchmark": "lockstep",
        "results": [{name: round(value, 1) for name, value in asdict(result).items()} for result in results],
        "load_average": round(os.getloadavg()[0], 1),
        "target_us": TARGET_US,
        "is_within_target": target[0].step_us < TARGET_US if target else None,
    }


def bench_lockstep(options: argparse.Namespace) -> int:
    """What agreeing on a step costs: everything of a step but the model, while sequences decode.

    For each number of ranks it starts that many processes under torchrun. Every rank runs the project's own scheduler,
    lockstep channel and mirror; sampled ids are made up. Medians, in microseconds:

        schedule  planning the step                     decode   reading the message (a follower)
        digest    hashing plan, events and last ids     mirror   bringing the worker's copy up to date
        encode    writing the message (rank 0)          apply    applying the sampled ids to the scheduler
        exchange  answers up and message down, alone    step     all of it together, rank after rank in lockstep

    `exchange` is a round in which the ranks do nothing else; `step` is measured in steps that measure nothing else,
    with its 10th and 90th percentile beside it: where something else computes too, ranks wait for a core in the middle
    of a step, and the 10th percentile is nearer to what agreeing costs.
    """
    if options.results is not None:
        run_rank(options)
        return 0
    results = [result for num_ranks in options.ranks for result in launch_ranks(num_ranks, options)]
    print_lockstep(results)
    load, num_cores = os.getloadavg()[0], os.cpu_count() or 1
    if load > max(options.ranks):
        print(f"the load of this machine is {load:.1f} on {num_cores} cores: others compute here too, see --help")
    print(json.dumps(lockstep_summary(results)))
    return 0
