"""What the watermark of admission saves: runs of the scheduler alone, with room for a share of the blocks."""

import argparse
import json
import random
from dataclasses import asdict, dataclass

from kv_cache.block import num_blocks_for
from kv_cache.cache_manager import CacheManager
from spmd_worker.replica.scheduler.allocator import PreemptionPolicy
from spmd_worker.replica.scheduler.planner import SchedulerLimits
from spmd_worker.replica.scheduler.scheduler import Scheduler
from spmd_worker.replica.scheduler.stop import StopChecker
from spmd_worker.replica.sequence.events import Admit
from spmd_worker.replica.sequence.request import Request, RequestId
from spmd_worker.replica.sequence.sampling_params import SamplingParams
from spmd_worker.replica.sequence.step import StepPlan, StepResult

BLOCK_SIZE = 16
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
