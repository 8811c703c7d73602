"""Counts of drafts under vLLM's names, in Prometheus' text, and summed over replicas in `metrics.json`."""

import json
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

from spmd_worker.base.config.speculation import SpeculativeConfig
from spmd_worker.compat.metrics import Vector, engine_metrics
from spmd_worker.frontends.batch.job_counts import JobCounts
from spmd_worker.frontends.batch.job_metrics import job_metrics
from spmd_worker.frontends.batch.progress import format_summary
from spmd_worker.frontends.serve.responses import prometheus_text
from spmd_worker.replica.scheduler.counters import SchedulerCounters


def counters(*steps: tuple[int, int]) -> SchedulerCounters:
    found = SchedulerCounters()
    for num_drafted, num_accepted in steps:
        found.count_drafts(num_drafted, num_accepted)
    return found


def metrics_of(found: SchedulerCounters, speculation: SpeculativeConfig | None) -> dict[str, Any]:
    scheduler: Any = SimpleNamespace(
        counters=found,
        limits=SimpleNamespace(speculation=speculation),
        running=[],
        queues=SimpleNamespace(num_waiting=0),
        cache=SimpleNamespace(num_used_blocks=0, num_blocks=0),
    )
    return {each.name: each for each in engine_metrics(scheduler, "m") if "spec_decode" in each.name}


def job_metrics_of(*replicas: SchedulerCounters) -> dict[str, Any]:
    common = {
        "peak_memory_bytes": 1,
        "stages": [],
        "expert_loads": [],
        "thread_waits": [],
        "computed_s": 1.0,
        "encode_s": 0.0,
        "media_wait_s": 0.0,
        "hears": False,
        "replica": {"rows": 1, "output_tokens": 1, "busy_s": 1.0},
        "times": dict.fromkeys(("schedule_s", "lockstep_s", "execute_s", "apply_s"), 1.0),
    }
    return job_metrics(JobCounts(), [json.dumps({**common, "counters": asdict(each)}).encode() for each in replicas])


def test_engine_reports_drafts_by_position():
    found = metrics_of(counters((3, 2), (4, 4), (1, 0)), SpeculativeConfig(method="ngram"))
    values = {
        name.removeprefix("vllm:spec_decode_num_"): each.values if isinstance(each, Vector) else each.value
        for name, each in found.items()
    }
    assert values == {"drafts": 3, "draft_tokens": 8, "accepted_tokens": 6, "accepted_tokens_per_pos": [2, 2, 1, 1, 0]}


def test_engine_without_speculation_reports_no_drafts():
    assert metrics_of(counters(), None) == {}


def test_prometheus_text_has_a_line_a_position():
    lines = prometheus_text([Vector("vllm:x", [5, 3])]).decode().splitlines()
    assert lines == ["# TYPE vllm:x_total counter", 'vllm:x_total{position="0"} 5', 'vllm:x_total{position="1"} 3']


def test_job_sums_drafts_of_its_replicas():
    metrics = job_metrics_of(counters((3, 2), (1, 1)), counters((2, 0)))
    assert metrics["speculation"] == {
        "row_steps": 3,
        "drafted_tokens": 6,
        "accepted_tokens": 3,
        "mean_length": 2.0,
        "drafted_by_position": [3, 2, 1],
        "accepted_by_position": [2, 1, 0],
    }
    assert "3 of 6 accepted (50%), 2.00 tokens a step" in format_summary(metrics)


def test_job_without_drafts_has_no_record_of_them():
    assert "speculation" not in job_metrics_of(counters())
    assert "drafts" not in format_summary(job_metrics_of(counters()))
