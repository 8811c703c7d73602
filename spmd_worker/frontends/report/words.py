"""Texts of a run's summary: its figures, its diagnosis, and why its slowest steps were slow.

Most come from the steps; `metrics.json` has what only the end of a run knows (rows, errors, recomputed tokens), and is
empty for a run that was killed.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any, Final

from spmd_worker.base.metrics.step_stats import StepStats
from spmd_worker.base.metrics.timeline import PHASES
from spmd_worker.frontends.report.data import NEARLY_FULL, Totals
from spmd_worker.frontends.report.text import count, duration, named, share

NO_METRICS: Final = (
    "There is no metrics.json: the run was killed, or is still running. Everything here is from steps.csv, up to the "
    "last step that was written."
)


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure of the summary: `28 %`, its label, and a note."""

    value: str
    label: str
    note: str


def summary_figures(totals: Totals, metrics: Mapping[str, Any]) -> list[Figure]:
    """Figures of the summary, in reading order."""
    return [
        _rows(totals, metrics),
        _output_tokens(totals, metrics),
        _wall_time(totals, metrics),
        _step_time(totals),
        _blocks(totals),
        _cache_hits(totals, metrics),
        _preemptions(totals),
        _recomputed(totals, metrics),
    ]


def diagnosis(totals: Totals, metrics: Mapping[str, Any]) -> str:
    """Two or three sentences about the cache's effect on this run."""
    if not totals.num_blocks:
        return "There is no cache: rows of an encoder are computed whole, and nothing of them is kept."
    cache = f"The cache of {count(totals.num_blocks, 'block')}"
    often = (
        f"{share(totals.nearly_full_us, totals.wall_us)} of the time at least {share(NEARLY_FULL, 1)} of it was in use"
    )
    if totals.num_preemptions:
        pressure = (
            f"{cache} was too small for all sequences at once: {often}, and sequences were preempted "
            f"{_times(totals.num_preemptions)}. {_what_it_cost(totals, metrics)}"
        )
    elif totals.nearly_full_us:
        pressure = f"{cache} was just large enough: {often}, but no sequence was preempted."
    else:
        at_most = share(totals.max_blocks_used, totals.num_blocks)
        pressure = f"{cache} was large enough: at most {at_most} of it was in use, and no sequence was preempted."
    return f"{pressure} {_what_was_found(totals, metrics)}"


def why_slow(stats: StepStats) -> str:
    """The phase that took most of the step, its work, and its share."""
    phase = max(PHASES, key=lambda name: getattr(stats, f"{name}_us"))
    doing = {
        "schedule": "deciding what to compute",
        "lockstep": "agreeing with other ranks, or waiting for them",
        "execute": f"computing {_what_was_computed(stats)}",
        "apply": f"applying {count(stats.num_sampled_tokens, 'token')}",
    }
    return f"{doing[phase]} ({share(getattr(stats, f'{phase}_us'), stats.duration_us)})"


def what_happened(stats: StepStats) -> str:
    """Preemptions, returns, cache hits and endings of a step, as a list of texts; empty without any."""
    parts = (
        (stats.num_swapped_out, "preempted by swap"),
        (stats.num_recomputed, "preempted by recompute"),
        (stats.num_swapped_in, "back from the host"),
        (stats.num_cached_tokens, "tokens from the cache"),
        (stats.num_finished, "finished"),
    )
    return ", ".join(f"{number:,} {words}" for number, words in parts if number)


def _what_was_computed(stats: StepStats) -> str:
    prompt, decode = stats.num_prompt_tokens, stats.num_decode_tokens
    if not prompt:
        return count(decode, "decode token")
    if not decode:
        return count(prompt, "prompt token")
    return f"{count(prompt)} prompt and {count(decode, 'decode token')}"


def _what_it_cost(totals: Totals, metrics: Mapping[str, Any]) -> str:
    by_swap, by_recompute = totals.sums.num_swapped_out, totals.sums.num_recomputed
    lost = _number(metrics, "recomputed_tokens")
    computed = _number(metrics, "computed_tokens") or totals.sums.num_tokens
    price = "" if lost is None else f" ({count(lost, 'token')}, {share(lost, computed)} of all that was computed)"
    swapped = f"{_times(by_swap).capitalize()} their blocks were copied to host memory"
    again = f"{_times(by_recompute)} what they had computed was dropped and had to be computed again{price}"
    if not by_recompute:
        return f"{swapped}, so that nothing was computed twice."
    return f"{swapped}; {again}." if by_swap else f"{again[0].upper()}{again[1:]}."


def _what_was_found(totals: Totals, metrics: Mapping[str, Any]) -> str:
    cached, prompt = _cached_and_prompt_tokens(totals, metrics)
    if not cached:
        return "No prompt began like an earlier one, or prefix caching was off: nothing was found in the cache."
    return f"{share(cached, prompt)} of the prompt tokens were found in the prefix cache and not computed."


def _times(number: int) -> str:
    return {1: "once", 2: "twice"}.get(number, f"{number:,} times")


def _rows(totals: Totals, metrics: Mapping[str, Any]) -> Figure:
    rows, errors = _number(metrics, "rows"), _number(metrics, "error_rows")
    if rows is None:
        number, requests = named(totals.sums.num_finished, "request")
        return Figure(number, f"{requests} ended", "as far as the steps tell")
    return Figure(*named(rows, "row"), count(errors, "error row") if errors else "no error rows")


def _output_tokens(totals: Totals, metrics: Mapping[str, Any]) -> Figure:
    tokens, seconds = _number(metrics, "output_tokens"), _number(metrics, "generate_s")
    if tokens is None or not seconds:
        tokens, seconds = totals.sums.num_sampled_tokens, totals.wall_us / 1e6
    before = _number(metrics, "resumed_output_tokens") or 0
    rate = f"{count((tokens - before) / seconds, 'token')} per second" if seconds else "in no time"
    return Figure(*named(tokens, "output token"), rate)


def _wall_time(totals: Totals, metrics: Mapping[str, Any]) -> Figure:
    seconds, load_s = _number(metrics, "generate_s"), _number(metrics, "load_s")
    value = totals.wall_us if seconds is None else seconds * 1e6
    note = "from the first step to the last" if load_s is None else f"after {duration(load_s * 1e6)} to load"
    return Figure(duration(value), "to generate", note)


def _step_time(totals: Totals) -> Figure:
    return Figure(duration(totals.median_us), "a step (median)", f"{count(totals.num_steps, 'step')}")


def _blocks(totals: Totals) -> Figure:
    note = f"{share(totals.max_blocks_used, totals.num_blocks)} of {totals.num_blocks:,}"
    if totals.max_host_blocks:
        note += f"; {totals.max_host_blocks:,} on the host"
    return Figure(count(totals.max_blocks_used), "blocks in use at the peak", note)


def _cache_hits(totals: Totals, metrics: Mapping[str, Any]) -> Figure:
    cached, prompt = _cached_and_prompt_tokens(totals, metrics)
    return Figure(share(cached, prompt), "of prompts from the cache", f"{count(cached)} of {count(prompt, 'token')}")


def _preemptions(totals: Totals) -> Figure:
    sums = totals.sums
    note = f"{sums.num_swapped_out:,} by swap, {sums.num_recomputed:,} by recompute"
    return Figure(*named(totals.num_preemptions, "preemption"), note)


def _recomputed(totals: Totals, metrics: Mapping[str, Any]) -> Figure:
    lost = _number(metrics, "recomputed_tokens")
    computed = _number(metrics, "computed_tokens") or totals.sums.num_tokens
    if lost is None and totals.sums.num_recomputed:
        return Figure("not known", "computed again", f"of {count(computed, 'token')} computed")
    note = f"{count(lost or 0)} of {count(computed, 'token')} computed"
    return Figure(share(lost or 0, computed), "computed again", note)


def _cached_and_prompt_tokens(totals: Totals, metrics: Mapping[str, Any]) -> tuple[float, float]:
    """Tokens of the rows that ended; without metrics the steps' counts, in which recomputed prompts count twice."""
    cached, prompt = _number(metrics, "cached_prompt_tokens"), _number(metrics, "prompt_tokens")
    if cached is None or not prompt:
        cached = totals.sums.num_cached_tokens
        prompt = cached + totals.sums.num_prompt_tokens
    return cached, prompt


def _number(metrics: Mapping[str, Any], key: str) -> float | None:
    value = metrics.get(key)
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return None
    return value if isfinite(value) else None
