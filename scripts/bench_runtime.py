"""What the control path costs: admission and preemption, the cache's bookkeeping, agreeing on a step, the journal.

    python scripts/bench_runtime.py admission [--share 0.3] [--rows 256]
    python scripts/bench_runtime.py cache [--blocks 1000,1000000] [--rounds 400]
    python scripts/bench_runtime.py lockstep [--ranks 2,4] [--sequences 16,256,1024] [--steps 300]
    python scripts/bench_runtime.py journal MODEL WORKLOAD [KEY=VALUE...] [--pairs N]

Each prints a table and, as its last line, one JSON object; NAME --help says what is measured. Only `journal` runs a
model.
"""

import argparse
import filecmp
import gc
import inspect
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any, TypeVar, cast

import torch

from kv_cache.block import BlockHash, num_blocks_for
from kv_cache.block_hash import hash_blocks, root_hash
from kv_cache.block_table import BlockTable
from kv_cache.cache_manager import CacheManager
from spmd_worker.distributed.environment import read_rank_environment
from spmd_worker.distributed.groups import join_groups
from spmd_worker.distributed.topology import RankLayout
from spmd_worker.lockstep.difference import Record
from spmd_worker.lockstep.digest import ChainedDigest
from spmd_worker.lockstep.lockstep import Lockstep
from spmd_worker.lockstep.transport.channel import ControlChannel
from spmd_worker.lockstep.transport.connect import open_step_channel
from spmd_worker.lockstep.transport.step_channel import FollowerChannel, LeaderChannel
from spmd_worker.lockstep.wire.codec import Decoder, Encoder
from spmd_worker.lockstep.wire.message import StepMessage
from spmd_worker.mirror.mirror import Mirror
from spmd_worker.scheduler.allocator import PreemptionPolicy
from spmd_worker.scheduler.planner import SchedulerLimits
from spmd_worker.scheduler.scheduler import Scheduler
from spmd_worker.scheduler.stop import StopChecker
from spmd_worker.sequence.events import Admit, Event
from spmd_worker.sequence.request import Request, RequestId
from spmd_worker.sequence.sampling_params import SamplingParams
from spmd_worker.sequence.step import StepPlan, StepResult

ROOT = Path(__file__).resolve().parents[1]
BLOCK_SIZE = 16


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    return int(options.bench(options))


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    parsers = parser.add_subparsers(required=True, metavar="NAME")

    def add(name: str, bench: Callable[[argparse.Namespace], int]) -> argparse.ArgumentParser:
        text = inspect.getdoc(bench) or ""
        added = parsers.add_parser(name, help=text.splitlines()[0], description=text, formatter_class=layout)
        added.set_defaults(bench=bench)
        return added

    admission = add("admission", bench_admission)
    admission.add_argument("--share", type=float, default=0.3, help="of the blocks that the rows want (default 0.3)")
    admission.add_argument("--rows", type=int, default=256, help="sequences in all (default 256)")
    cache = add("cache", bench_cache)
    cache.add_argument("--blocks", type=parse_sizes, default=[1000, 1_000_000], help="default 1000,1000000")
    cache.add_argument("--rounds", type=int, default=400, help="rounds measured (default 400)")
    lockstep = add("lockstep", bench_lockstep)
    lockstep.add_argument("--ranks", type=parse_sizes, default=[2, 4], help="numbers of ranks (default 2,4)")
    lockstep.add_argument("--sequences", type=parse_sizes, default=[16, 256, 1024], help="default 16,256,1024")
    lockstep.add_argument("--steps", type=int, default=300, help="steps measured each way (default 300)")
    lockstep.add_argument("--results", type=Path, help=argparse.SUPPRESS)
    journal = add("journal", bench_journal)
    journal.add_argument("model", type=Path, help="a Hugging Face model folder")
    journal.add_argument("workload", type=Path, help="a JSONL file of rows")
    journal.add_argument("keys", nargs="*", metavar="KEY=VALUE", help="as launch.py takes them")
    journal.add_argument("--pairs", type=int, default=5, help="runs of each kind (default 5)")
    return parser.parse_args(arguments)


def parse_sizes(text: str) -> list[int]:
    return [int(size) for size in text.split(",")]


# Admission.

MAX_NUM_SEQS = 256
MAX_NUM_BATCHED_TOKENS = 2048
MAX_MODEL_LEN = 2048
STEP_MS = 6.0
TOKEN_MS = 0.28
MOVED_BLOCK_MS = 0.1


@dataclass(frozen=True)
class Workload:
    """Rows of `num_samples` each; prompts and outputs of lengths drawn evenly from the two ranges, in tokens."""

    name: str
    prompt_tokens: tuple[int, int]
    output_tokens: tuple[int, int]
    num_samples: int


WORKLOADS = (
    Workload("prompts and answers", (16, 512), (16, 128), 1),
    Workload("prompts and answers, four samples", (16, 512), (16, 128), 4),
    Workload("long answers", (32, 32), (256, 256), 1),
    Workload("long answers, four samples", (32, 32), (256, 256), 4),
)


@dataclass(frozen=True)
class Outcome:
    """One run. `seconds` is by the cost model; `recomputed` is the share of all computed tokens."""

    workload: str
    mode: str
    watermark: int
    seconds: float
    steps: int
    preemptions: int
    recomputed: float


def draw_requests(workload: Workload, num_rows: int) -> list[Request]:
    """The same rows every time."""
    chance = random.Random(7)
    requests = []
    for index in range(max(1, num_rows // workload.num_samples)):
        prompt = tuple(chance.randrange(100, 40_000) for _ in range(chance.randint(*workload.prompt_tokens)))
        num_outputs = chance.randint(*workload.output_tokens)
        sampling = SamplingParams(n=workload.num_samples, max_tokens=num_outputs, ignore_eos=True)
        requests.append(Request(RequestId(index), prompt, sampling, stream=index))
    return requests


def num_wanted_blocks(requests: list[Request]) -> int:
    """Blocks of the first batch at its longest; samples of a row share the full blocks of its prompt."""
    total = num_running = 0
    for request in requests:
        num_prompt, sampling = len(request.prompt_token_ids), request.sampling
        num_running += sampling.n
        if num_running > MAX_NUM_SEQS:
            break
        shared = num_prompt // BLOCK_SIZE
        total += shared + sampling.n * (num_blocks_for(num_prompt + (sampling.max_tokens or 0), BLOCK_SIZE) - shared)
    return total


def run_workload(workload: Workload, num_rows: int, share: float, mode: str, watermark: int) -> Outcome:
    """All rows through the scheduler; sampled tokens are drawn."""
    requests = draw_requests(workload, num_rows)
    least = num_blocks_for(MAX_MODEL_LEN, BLOCK_SIZE)
    num_blocks = max(least, int(num_wanted_blocks(requests) * share))
    cache = CacheManager(num_blocks, BLOCK_SIZE, num_host_blocks=0 if mode == "recompute" else 100_000)
    limits = SchedulerLimits(
        MAX_NUM_SEQS,
        MAX_NUM_BATCHED_TOKENS,
        enable_prefix_caching=True,
        preemption=PreemptionPolicy(mode),
        watermark_blocks_per_sequence=watermark,
    )
    scheduler = Scheduler(limits, cache, StopChecker((), MAX_MODEL_LEN, None))
    for request in requests:
        scheduler.handle(Admit(request))
    milliseconds, chance = 0.0, random.Random(1)
    while scheduler.has_unfinished:
        plan = scheduler.schedule()
        milliseconds += cost_ms(plan)
        num_samples = len(plan.continuing) + sum(data.num_samples for group in plan.groups for data in group.sequences)
        scheduler.apply(StepResult(plan.step, tuple(chance.randrange(100, 40_000) for _ in range(num_samples))))
    counters = scheduler.counters
    recomputed = counters.num_recomputed_tokens / counters.num_computed_tokens
    preemptions = counters.num_preemptions
    return Outcome(workload.name, mode, watermark, milliseconds / 1000, counters.num_steps, preemptions, recomputed)


def cost_ms(plan: StepPlan) -> float:
    """By the cost model."""
    num_moved = len(plan.block_ops.swap_in) + len(plan.block_ops.swap_out)
    return STEP_MS + TOKEN_MS * plan.num_tokens + MOVED_BLOCK_MS * num_moved


def bench_admission(options: argparse.Namespace) -> int:
    """What the watermark of admission costs and saves: the scheduler alone, in a cache too small for the rows.

    The cache has a share of the blocks that the rows want. No model runs: a step's time is a base, so much a computed
    token and so much a moved block, as measured for a model of 135 million parameters in bfloat16 on two CPU cores.
    """
    print(f"cache: {options.share:.0%} of what the rows want; watermark: free blocks for each running sequence\n")
    print(f"{'workload':<34} {'mode':<10} watermark  seconds  steps  preemptions  computed again")
    outcomes = []
    for workload in WORKLOADS:
        for mode in ("recompute", "swap"):
            for watermark in (0, 1, 2, 4):
                outcome = run_workload(workload, options.rows, options.share, mode, watermark)
                outcomes.append(outcome)
                print(
                    f"{outcome.workload:<34} {mode:<10} {watermark:>9}  {outcome.seconds:>7.2f}  {outcome.steps:>5}  "
                    f"{outcome.preemptions:>11}  {outcome.recomputed:>14.1%}"
                )
    print(json.dumps({"share": options.share, "outcomes": [asdict(outcome) for outcome in outcomes]}))
    return 0


# The cache's bookkeeping.

TABLE_BLOCKS = 64
NUM_APPENDS = 16
PROMPT_TOKENS = 100_000
OPERATIONS = ("allocate", "append", "free", "name", "lookup")
STATES = ("plain", "filling", "evicting", "worst")
BOUND_STATES = ("plain", "filling")
MAX_RATIO = 1.5
MAX_LOOKUP_MS = 20.0

OperationTimes = dict[str, list[float]]
"""Operation -> nanoseconds a block, one number for each round."""


class World:
    """A manager in one of the states, and the tables that run in it: table -> first token of its prompt."""

    def __init__(self, num_blocks: int, state: str) -> None:
        self.manager, self.state, self.random = CacheManager(num_blocks, BLOCK_SIZE), state, Random(num_blocks)
        self.times: OperationTimes = {operation: [] for operation in OPERATIONS}
        self.running: list[tuple[BlockTable, int]] = []
        self._num_prompts = 0

    @property
    def has_names(self) -> bool:
        return self.state != "plain"

    def fill(self) -> None:
        """All blocks in tables, in an order of the state; then half of the tables end, in a random order."""
        whole, num_tables = BlockTable(), self.manager.num_blocks // TABLE_BLOCKS
        self.manager.extend(whole, 0, self.manager.num_blocks * BLOCK_SIZE)
        if self.state == "worst":
            self.random.shuffle(whole.block_ids)
        tables = [BlockTable(whole.block_ids[i * TABLE_BLOCKS : (i + 1) * TABLE_BLOCKS]) for i in range(num_tables)]
        self.manager.release(BlockTable(whole.block_ids[num_tables * TABLE_BLOCKS :]))
        self.random.shuffle(tables)
        ending = tables[num_tables // 2 :]
        if self.state in ("evicting", "worst"):
            for table in ending:
                self.name(table, self.new_prompt())
        for table in ending:
            self.manager.release(table)
        for table in tables[: num_tables // 2]:
            self.add(table, self.new_prompt())

    def round(self) -> None:
        """Every operation once, each of them timed."""
        self._stay_in_state()
        prompt, table = self.new_prompt(), BlockTable()
        num_tokens = TABLE_BLOCKS * BLOCK_SIZE
        self._measure("allocate", lambda: self.manager.extend(table, 0, num_tokens), TABLE_BLOCKS)
        if self.has_names:
            token_ids = prompt_tokens(prompt)
            self._measure("name", lambda: self._name(table, token_ids), TABLE_BLOCKS)
        self.running.append((table, prompt))
        self.manager.take_block_ops()
        ended, _ = self.running.pop(self.random.randrange(len(self.running)))
        num_ended = ended.num_blocks
        self._measure("free", lambda: self.manager.release(ended), num_ended)
        growing = [self.random.choice(self.running)[0] for _ in range(NUM_APPENDS)]
        self._measure("append", lambda: self._append(growing), NUM_APPENDS)
        self.manager.take_block_ops()
        if self.has_names:
            token_ids = prompt_tokens(self.random.choice(self.running)[1])
            self._measure("lookup", lambda: self._look_up(token_ids), TABLE_BLOCKS)

    def add(self, table: BlockTable, prompt: int) -> None:
        """A table that has run for some time already."""
        if self.has_names:
            self.name(table, prompt)
        self.running.append((table, prompt))

    def name(self, table: BlockTable, prompt: int) -> None:
        self._name(table, prompt_tokens(prompt))
        self.manager.take_block_ops()

    def new_prompt(self) -> int:
        """The first token of a prompt that is unlike all others."""
        self._num_prompts += 1
        return self._num_prompts

    def _stay_in_state(self) -> None:
        """Tables that run grow, so now and then one more ends. A small cache is soon full: then names are dropped, and
        those that run get theirs again.
        """
        while self.manager.num_free_blocks < self.manager.num_blocks // 3:
            self.manager.release(self.running.pop(self.random.randrange(len(self.running)))[0])
        num_unnamed = self.manager.num_free_blocks - self.manager.num_cached_blocks
        if self.state == "filling" and num_unnamed < TABLE_BLOCKS + NUM_APPENDS:
            self.manager.reset_prefix_cache()
            for table, prompt in self.running:
                self.name(table, prompt)

    def _name(self, table: BlockTable, token_ids: list[int]) -> None:
        self.manager.name_blocks(table, names_of(token_ids), 0, len(token_ids))

    def _append(self, tables: list[BlockTable]) -> None:
        for table in tables:
            num_tokens = table.num_blocks * BLOCK_SIZE
            self.manager.extend(table, num_tokens, num_tokens + 1)

    def _look_up(self, token_ids: list[int]) -> None:
        found = self.manager.find_prefix(names_of(token_ids))
        assert len(found) == TABLE_BLOCKS, f"{len(found)} of {TABLE_BLOCKS} blocks of a prompt that runs are found"

    def _measure(self, operation: str, action: Callable[[], object], num_blocks: int) -> None:
        started_ns = time.perf_counter_ns()
        action()
        self.times[operation].append((time.perf_counter_ns() - started_ns) / num_blocks)


class BareDict:
    """What any index of names pays: names in a dict, deleted a table at a time, in the order in which they came."""

    def __init__(self, num_names: int) -> None:
        self.random = Random(num_names)
        self.times: OperationTimes = {"find": [], "replace": []}
        self._names: dict[bytes, int] = {}
        self._tables: list[list[bytes]] = []
        self._oldest = 0
        self._num_tables = num_names // TABLE_BLOCKS

    def fill(self) -> None:
        for _ in range(self._num_tables):
            self._tables.append(self._new_names())
            self._names.update(zip(self._tables[-1], range(TABLE_BLOCKS)))

    def round(self) -> None:
        new, wanted = self._new_names(), [bytes(bytearray(name)) for name in self.random.choice(self._tables)]
        old, self._tables[self._oldest] = self._tables[self._oldest], new
        self._oldest = (self._oldest + 1) % self._num_tables
        names, started_ns = self._names, time.perf_counter_ns()
        for name in old:
            del names[name]
        for number, name in enumerate(new):
            names[name] = number
        replaced_ns = time.perf_counter_ns()
        for name in wanted:
            names.get(name)
        self.times["replace"].append((replaced_ns - started_ns) / TABLE_BLOCKS)
        self.times["find"].append((time.perf_counter_ns() - replaced_ns) / TABLE_BLOCKS)

    def _new_names(self) -> list[bytes]:
        return [self.random.randbytes(16) for _ in range(TABLE_BLOCKS)]


TAIL_TOKENS = list(range(TABLE_BLOCKS * BLOCK_SIZE - 1))


def prompt_tokens(prompt: int) -> list[int]:
    return [prompt, *TAIL_TOKENS]


def names_of(token_ids: list[int]) -> list[BlockHash]:
    return hash_blocks(root_hash(), token_ids, BLOCK_SIZE)


def take_turns(worlds: list[World] | list[BareDict], num_rounds: int) -> None:
    """A B A B, the first tenth of the rounds only to warm up."""
    for world in worlds:
        world.fill()
    gc.collect()
    for number in range(num_rounds + num_rounds // 10):
        for world in worlds:
            world.round()
        if number == num_rounds // 10 - 1:
            for world in worlds:
                for times in world.times.values():
                    times.clear()


def medians(worlds: list[World] | list[BareDict]) -> dict[str, list[float]]:
    """Operation -> the median of each world, in nanoseconds; what a state has no use for is left out."""
    return {
        operation: [statistics.median(world.times[operation]) for world in worlds]
        for operation in worlds[0].times
        if worlds[0].times[operation]
    }


def measure_long_lookup(num_blocks: int) -> tuple[float, float]:
    """Medians in milliseconds: names of a prompt of 100,000 tokens worked out, and all of them found."""
    manager, table = CacheManager(num_blocks, BLOCK_SIZE), BlockTable()
    token_ids = [index * 7919 % 150_000 for index in range(min(PROMPT_TOKENS, num_blocks * BLOCK_SIZE))]
    manager.extend(table, 0, len(token_ids))
    manager.name_blocks(table, names_of(token_ids), 0, len(token_ids))
    samples = []
    for _ in range(21):
        started_ns = time.perf_counter_ns()
        names = names_of(token_ids)
        named_ns = time.perf_counter_ns()
        found = manager.find_prefix(names)
        samples.append((named_ns - started_ns, time.perf_counter_ns() - named_ns))
        assert len(found) == len(token_ids) // BLOCK_SIZE, (len(found), len(token_ids))
    naming_ns, finding_ns = (statistics.median(times) for times in zip(*samples))
    return naming_ns / 1e6, finding_ns / 1e6


def print_row(state: str, operation: str, nanoseconds: list[float]) -> None:
    ratio = nanoseconds[-1] / nanoseconds[0]
    is_bound = " *" if state in BOUND_STATES and operation in OPERATIONS else ""
    print(
        f"{state:>9} {operation:>9}" + "".join(f" {each:>10.0f}" for each in nanoseconds) + f" {ratio:>7.2f}{is_bound}"
    )


def measure_states(options: argparse.Namespace) -> dict[str, dict[str, list[float]]]:
    """State -> operation -> nanoseconds a block for each number of blocks; prints a row as soon as it is known."""
    print("nanoseconds a block:" + "".join(f" {number:>10,}" for number in options.blocks) + "   ratio")
    results = {}
    for state in STATES:
        worlds = [World(num_blocks, state) for num_blocks in options.blocks]
        take_turns(worlds, options.rounds)
        results[state] = medians(worlds)
        for operation, nanoseconds in results[state].items():
            print_row(state, operation, nanoseconds)
    dicts = [BareDict(num_blocks) for num_blocks in options.blocks]
    take_turns(dicts, options.rounds)
    results["dict"] = medians(dicts)
    for operation, nanoseconds in results["dict"].items():
        print_row("dict", operation, nanoseconds)
    print(f"* must be under {MAX_RATIO}")
    return results


def cache_summary(results: dict[str, dict[str, list[float]]], long_lookup: tuple[float, float]) -> dict[str, object]:
    ratios = {
        f"{state} {operation}": round(nanoseconds[-1] / nanoseconds[0], 2)
        for state, rows in results.items()
        for operation, nanoseconds in rows.items()
    }
    bound = {key: ratio for key, ratio in ratios.items() if key.split()[0] in BOUND_STATES}
    lookup_ms = round(sum(long_lookup), 2)
    return {
        "benchmark": "cache",
        "ratios": bound,
        "lookup_100k_tokens_ms": lookup_ms,
        "other_ratios": {key: ratio for key, ratio in ratios.items() if key not in bound},
        "ns": {
            state: {key: [round(each) for each in row] for key, row in rows.items()} for state, rows in results.items()
        },
        "load_average": round(os.getloadavg()[0], 1),
        "is_within_target": max(bound.values()) < MAX_RATIO and lookup_ms < MAX_LOOKUP_MS,
    }


def bench_cache(options: argparse.Namespace) -> int:
    """What the cache's bookkeeping costs for a block, with few blocks and with many: more must not cost more each.

    Nanoseconds a block, medians, through the calls that the scheduler makes. The sizes take turns, round by round, so
    that whatever else this machine does meets all of them alike.

        allocate  a new table of 64 blocks            name    its names worked out from tokens and entered
        append    one block each to 16 that run       lookup  names of a prompt worked out, and all of them found
        free      a table that has run for long

    Half of the blocks belong to tables of 64 that run, and whenever one is made another ends, at random. So what is
    extended, freed or found was last touched long ago, as in an engine, and with many blocks it is in no near cache of
    the processor. The free half, always in the random order in which tables ended, is in one of these states:

        plain     nothing in the cache has a name (prefix caching off)
        filling   what runs has names, what is free has none yet: the cache has not been full so far
        evicting  what is free has names, too: each block that is taken loses one
        worst     as evicting, and the blocks of each table lie far apart in memory

    `plain` and `filling` show what the algorithms cost: their ratios must stay under 1.5. `evicting` and `worst` add
    what memory costs: a name leaves the index with each block that is taken, from a slot as random as the name is. Any
    index pays for that; the line `dict` is a bare dict of as many names, one deleted for one inserted, and one found.

    Last the names of a prompt of 100,000 tokens, worked out and found, which must take less than 20 ms. The exit code
    is 1 if one of the two is missed.
    """
    results = measure_states(options)
    long_lookup = measure_long_lookup(options.blocks[-1])
    print(f"prompt of 100,000 tokens: {long_lookup[0]:.1f} ms for its names, {long_lookup[1]:.1f} ms to find them")
    result = cache_summary(results, long_lookup)
    print(json.dumps(result))
    return 0 if result["is_within_target"] else 1


# Agreeing on a step.

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
        agreed = self.lockstep.agree(plan, self.sampled, events)
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
        agreed = self.lockstep.agree(plan, sampled, ())
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
        script = [__file__, "lockstep", "--results", str(results), "--sequences", sizes, "--steps", str(options.steps)]
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


# The journal.

WITHOUT_JOURNAL = """
import sys
import launch
from spmd_worker.batch.run_dir.journal import RowJournal
from spmd_worker.batch.progress import Progress

kept = {}
def append(self, key, answer):
    self._note(answer.index, key, 0, len(answer.line))
    kept[answer.index] = answer.line
RowJournal.append = append
RowJournal.tick = RowJournal.commit = lambda self: None
RowJournal.lines = lambda self: (kept[index] for index in sorted(kept))
Progress.update = lambda self, rows, tokens: None
sys.exit(launch.main())
"""


def run_job(options: argparse.Namespace, folder: Path, which: str) -> float:
    """Seconds to generate."""
    folder.mkdir(exist_ok=True)
    script = [str(ROOT / "launch.py")] if which == "with" else ["-c", WITHOUT_JOURNAL]
    command = [
        *(sys.executable, *script, f"model.path={options.model}", f"job.input={options.workload}"),
        *(f"job.output={folder}/out.jsonl", *options.keys),
    ]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"the job failed:\n{done.stderr}")
    metrics = json.loads((folder / "out.jsonl.run" / "metrics.json").read_text(encoding="utf-8"))
    return float(metrics["generate_s"])


def bench_journal(options: argparse.Namespace) -> int:
    """What the journal and the progress display cost a job.

    Runs `launch.py` with them and without them in turn, and compares the seconds to generate that `metrics.json` has.
    Without: rows are kept in memory, nothing is committed, nothing is shown. The outputs must be equal. `overhead` is
    the median of the pairs' ratios, less one.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        seconds: dict[str, list[float]] = {"with": [], "without": []}
        for number in range(options.pairs):
            # Which is first changes, because the machine warms up, or something else starts on it.
            for which in ("with", "without") if number % 2 else ("without", "with"):
                seconds[which].append(run_job(options, folder / which, which))
        if not filecmp.cmp(folder / "with" / "out.jsonl", folder / "without" / "out.jsonl", shallow=False):
            raise SystemExit("the outputs differ")
    ratios = [own / other for own, other in zip(seconds["with"], seconds["without"], strict=True)]
    for own, other, ratio in zip(seconds["with"], seconds["without"], ratios, strict=True):
        print(f"with {own:8.3f} s   without {other:8.3f} s   ratio {ratio:.4f}")
    print(json.dumps({**seconds, "overhead": round(statistics.median(ratios) - 1, 4)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
