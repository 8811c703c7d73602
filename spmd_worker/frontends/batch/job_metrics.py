"""Metrics of a job, as in `metrics.json`: the sum of the reports, in JSON, that all ranks send to rank 0."""

import json
from dataclasses import asdict, dataclass
from itertools import zip_longest
from typing import Any

from spmd_worker.base.metrics.stage_times import busy_shares
from spmd_worker.engine.engine import Engine
from spmd_worker.frontends.batch.job_counts import JobCounts


@dataclass(slots=True)
class ReplicaCounts:
    """Work of one replica. `media_wait_s`: it had no row to compute while images or audio were prepared."""

    rows: int = 0
    output_tokens: int = 0
    media_wait_s: float = 0.0


def report_of_rank(engine: Engine) -> bytes:
    """Report of a following rank."""
    return json.dumps(_of_workers(engine)).encode("ascii")


def report_of_replica(engine: Engine, answered: ReplicaCounts) -> bytes:
    """Report of a replica's leader."""
    times = engine.times
    phases = dict(zip(("schedule_s", "lockstep_s", "execute_s", "apply_s"), times.phases(), strict=True))
    replica = {"rows": answered.rows, "output_tokens": answered.output_tokens, "busy_s": times.total_s}
    report = {**_of_workers(engine), "replica": replica, "counters": asdict(engine.counters), "times": phases}
    report["media_wait_s"] = answered.media_wait_s
    report["chain_head"] = engine.lockstep.chain_head.hex()
    return json.dumps(report).encode("ascii")


def job_metrics(counts: JobCounts, reports: list[bytes]) -> dict[str, Any]:
    """Metrics of the job from `counts` of all rows and `reports` of all ranks."""
    values = [json.loads(report) for report in reports]
    leaders = [value for value in values if "replica" in value]
    counters, times = (
        {name: _summed([leader[part][name] for leader in leaders]) for name in leaders[0][part]}
        for part in ("counters", "times")
    )
    metrics = {
        "rows": counts.rows,
        "resumed_rows": counts.resumed_rows,
        "resumed_output_tokens": counts.resumed_output_tokens,
        "error_rows": counts.error_rows,
        "error_codes": counts.error_codes,
        "prompt_tokens": counts.prompt_tokens,
        "cached_prompt_tokens": counts.cached_prompt_tokens,
        "computed_prompt_tokens": counts.prompt_tokens - counts.cached_prompt_tokens,
        "output_tokens": counts.output_tokens,
        "computed_tokens": counters["num_computed_tokens"],
        "recomputed_tokens": counters["num_recomputed_tokens"],
        "preemptions": counters["num_preemptions"],
        "preemptions_by_swap": counters["num_swapped_out"],
        "tier_stored_blocks": counters["num_stored_blocks"],
        "tier_loaded_blocks": counters["num_loaded_blocks"],
        "prefix_hits_verified": counters["num_verified_hits"],
        "prefix_hits_unverified": counters["num_unverified_hits"],
        "steps_verified": counters["num_verified_steps"],
        "steps": counters["num_steps"],
        **times,
        "peak_memory_bytes": sum(value["peak_memory_bytes"] for value in values),
    }
    if len(leaders) > 1:
        metrics["replicas"] = [leader["replica"] for leader in leaders]
    metrics |= _expert_metrics(values) | _thread_metrics(values) | _media_metrics(counters, values)
    metrics |= _draft_metrics(counters)
    shares = busy_shares(stages_of(reports))
    if shares:
        metrics["stages"] = [
            {"replica": each.replica, "stage": each.stage, "busy_share": round(each.share, 4)} for each in shares
        ]
        metrics["bubble_share"] = round(1 - sum(each.share for each in shares) / len(shares), 4)
    return metrics


def _summed(values: list[Any]) -> Any:
    """Sum of numbers, or of lists of them, position by position."""
    if isinstance(values[0], list):
        return [sum(each) for each in zip_longest(*values, fillvalue=0)]
    return sum(values)


def _draft_metrics(counters: dict[str, Any]) -> dict[str, Any]:
    """Drafts, and the mean number of tokens that a step gave a row that had some; nothing of a job without drafts."""
    if not counters["num_drafts"]:
        return {}
    return {
        "speculation": {
            "row_steps": counters["num_drafts"],
            "drafted_tokens": counters["num_drafted_tokens"],
            "accepted_tokens": counters["num_accepted_tokens"],
            "mean_length": round(1 + counters["num_accepted_tokens"] / counters["num_drafts"], 4),
            "drafted_by_position": counters["num_drafts_by_position"],
            "accepted_by_position": counters["num_accepted_by_position"],
        }
    }


def _media_metrics(counters: dict[str, int], values: list[dict[str, Any]]) -> dict[str, Any]:
    """Images, videos and recordings of the rows, and rows of their tokens, or those of encoder inputs; nothing of a job
    without any.
    """
    counts = {name: counters[f"num_{name}"] for name in ("rows_encoded", "rows_reused")}
    of_media: dict[str, int] = {}
    for name in ("image", "video", "recording"):
        if counters[f"num_{name}s"]:
            of_media |= {f"{name}{end}": counters[f"num_{name}{end}"] for end in ("s", "_tokens")}
    if not any(counts.values()) and not of_media:
        return {}
    seconds = {
        "encode_s": sum(value["encode_s"] for value in values),
        "media_wait_s": sum(value["media_wait_s"] for value in values if "replica" in value),
    }
    return {**of_media, **counts, **seconds}


def stages_of(reports: list[bytes]) -> list[list[dict[str, Any]]]:
    """Stage times per replica, from the first rank of each of its stages; empty without a pipeline."""
    # A replica's ranks are consecutive, its leader first.
    replicas: list[dict[int, dict[str, Any]]] = []
    for report in reports:
        value = json.loads(report)
        if "replica" in value:
            replicas.append({})
        for stage in value["stages"]:
            replicas[-1].setdefault(stage["stage"], stage)
    return [list(stages.values()) for stages in replicas] if len(replicas[0]) > 1 else []


def chain_heads(reports: list[bytes]) -> list[dict[str, Any]]:
    """Number of agreed steps of each replica, and their chained digest."""
    leaders = [value for value in map(json.loads, reports) if "replica" in value]
    return [{"steps": leader["counters"]["num_steps"], "digest_chain_head": leader["chain_head"]} for leader in leaders]


def _of_workers(engine: Engine) -> dict[str, Any]:
    workers = engine.executor.reports()
    return {
        "peak_memory_bytes": engine.executor.peak_memory_bytes(),
        "stages": [each.stage_times for each in workers if each.stage_times],
        "expert_loads": [each.expert_loads for each in workers if each.expert_loads],
        "thread_waits": [each.thread_waits for each in workers if each.thread_waits],
        "computed_s": engine.times.execute_s,
        "encode_s": sum(each.encode_s for each in workers),
    }


def _thread_metrics(values: list[dict[str, Any]]) -> dict[str, Any]:
    """Time that the ranks' kernels waited for their threads, and the maximum share of a rank's time."""
    waits = [(each, value["computed_s"]) for value in values for each in value["thread_waits"]]
    if not waits:
        return {}
    shares = [each["waited_s"] / computed_s for each, computed_s in waits if computed_s > 0]
    return {
        "thread_waits": {
            "waited_s": sum(each["waited_s"] for each, _ in waits),
            "lost_cores": sum(each["num_lost"] for each, _ in waits),
            "largest_share": round(max(shares, default=0.0), 4),
        }
    }


def _expert_metrics(values: list[dict[str, Any]]) -> dict[str, Any]:
    """Tokens per expert of each layer, over all replicas, and the extremes; empty without experts."""
    loads: dict[int, list[int]] = {}
    for value in values:
        for of_rank in value["expert_loads"]:
            for layer, counts in of_rank.items():
                before = loads.get(int(layer), [0] * len(counts))
                loads[int(layer)] = [count + more for count, more in zip(before, counts, strict=True)]
    shares = {
        (layer, expert): count * len(counts) / (sum(counts) or 1)
        for layer, counts in sorted(loads.items())
        for expert, count in enumerate(counts)
    }
    if not shares:
        return {}
    layer, expert = max(shares, key=lambda each: shares[each])
    return {
        "experts": {
            "tokens": {str(layer): counts for layer, counts in sorted(loads.items())},
            "busiest": {"layer": layer, "expert": expert, "over_mean": round(shares[layer, expert], 2)},
            "never_used": sum(counts.count(0) for counts in loads.values()),
        }
    }
