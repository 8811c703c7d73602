"""An engine's counters and gauges, under the names of vLLM's `LLM.get_metrics()`."""

from dataclasses import dataclass, field, replace

from spmd_worker.replica.scheduler.counters import SchedulerCounters
from spmd_worker.replica.scheduler.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class Metric:
    """A named value. The engine's have the label `model_name`."""

    name: str
    value: float
    labels: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Counter(Metric):
    """An integer that only grows."""


@dataclass(frozen=True, slots=True)
class Gauge(Metric):
    """A value that rises and falls."""


@dataclass(frozen=True, slots=True)
class Vector:
    """Several integers that only grow: of the first draft of a row's step, the second, and so on."""

    name: str
    values: list[int]
    labels: dict[str, str] = field(default_factory=dict)

    def by_position(self) -> list[Counter]:
        """A counter for each, with its `position` as a label."""
        positions = enumerate(self.values)
        return [Counter(self.name, value, {**self.labels, "position": str(number)}) for number, value in positions]


@dataclass(frozen=True, slots=True)
class Histogram:
    """Distribution of `count` values with the sum `sum`; of a bound in `buckets`, those that are not greater."""

    name: str
    count: int
    sum: float
    buckets: dict[float, int]
    labels: dict[str, str] = field(default_factory=dict)


def engine_metrics(scheduler: Scheduler, model_name: str) -> list[Metric | Vector]:
    """Counters since the start of the engine, and current gauges."""
    counters, cache = scheduler.counters, scheduler.cache
    metrics: list[Metric | Vector] = [
        Gauge("vllm:num_requests_running", len(scheduler.running)),
        Gauge("vllm:num_requests_waiting", scheduler.queues.num_waiting),
        Gauge("vllm:kv_cache_usage_perc", cache.num_used_blocks / cache.num_blocks if cache.num_blocks else 0.0),
        Counter("vllm:num_preemptions", counters.num_preemptions),
        Counter("vllm:prefix_cache_queries", counters.num_queried_prompt_tokens),
        Counter("vllm:prefix_cache_hits", counters.num_cached_prompt_tokens),
        Counter("vllm:prompt_tokens", counters.num_prompt_tokens),
        Counter("vllm:generation_tokens", counters.num_output_tokens),
        *[Counter("vllm:request_success", number, {"finished_reason": each}) for each, number in _ends(counters)],
        *_draft_metrics(scheduler),
    ]
    return [replace(each, labels={"model_name": model_name, **each.labels}) for each in metrics]


def _ends(counters: SchedulerCounters) -> list[tuple[str, int]]:
    """Requests that have ended, by vLLM's names of the reasons."""
    others = {
        "length": counters.num_finished_by_length,
        "abort": counters.num_aborted,
        "error": counters.num_failed,
        "repetition": counters.num_finished_by_repetition,
    }
    return [("stop", counters.num_finished - sum(others.values())), *others.items()]


def _draft_metrics(scheduler: Scheduler) -> list[Metric | Vector]:
    """Metrics of speculation, as in vLLM only of an engine that has it."""
    counters, speculation = scheduler.counters, scheduler.limits.speculation
    if speculation is None:
        return []
    accepted = counters.num_accepted_by_position
    return [
        Counter("vllm:spec_decode_num_drafts", counters.num_drafts),
        Counter("vllm:spec_decode_num_draft_tokens", counters.num_drafted_tokens),
        Counter("vllm:spec_decode_num_accepted_tokens", counters.num_accepted_tokens),
        Vector(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            [*accepted, *[0] * (speculation.most_drafts - len(accepted))],
        ),
    ]
