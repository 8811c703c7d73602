"""Texts of a run's summary: its figures, its diagnosis, and why its slowest steps were slow.

Most come from the steps; `metrics.json` has the rows, errors and recomputed tokens of an ended run, and is empty for a
killed one.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any, Final

from spmd_worker.base.metrics.step_stats import StepStats
from spmd_worker.base.metrics.timeline import PHASES
from spmd_worker.frontends.report.data import NEARLY_FULL, Totals
from spmd_worker.frontends.report.text import count, count_and_noun, duration, share

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
    sums = totals.sums
    blocks_note = f"{share(totals.max_blocks_used, totals.num_blocks)} of {totals.num_blocks:,}"
    if totals.max_host_blocks:
        blocks_note += f"; {totals.max_host_blocks:,} on the host"
    cached, prompt = _cached_and_prompt_tokens(totals, metrics)
    cache_note = f"{count(cached)} of {count(prompt, 'token')}"
    preemptions_note = f"{sums.num_swapped_out:,} by swap, {sums.num_recomputed:,} by recompute"
    return [
        _rows(totals, metrics),
        _output_tokens(totals, metrics),
        _wall_time(totals, metrics),
        Figure(duration(totals.median_us), "a step (median)", count(totals.num_steps, "step")),
        Figure(count(totals.max_blocks_used), "blocks in use at the peak", blocks_note),
        Figure(share(cached, prompt), "of prompts from the cache", cache_note),
        Figure(*count_and_noun(totals.num_preemptions, "preemption"), preemptions_note),
        _recomputed(totals, metrics),
        *_media(metrics),
        *_drafts(totals, metrics),
    ]


def diagnosis(totals: Totals, metrics: Mapping[str, Any]) -> str:
    """Two or three sentences about the cache's effect on this run."""
    if not totals.num_blocks:
        return "The model keeps no keys and values: it is an encoder, or none of its layers has attention."
    cache = f"The cache of {count(totals.num_blocks, 'block')}"
    nearly_full = (
        f"{share(totals.nearly_full_us, totals.wall_us)} of the time at least {share(NEARLY_FULL, 1)} of it was in use"
    )
    if totals.num_preemptions:
        cost = _preemption_cost(totals, metrics)
        pressure = f"{cache} was too small for all sequences at once: {nearly_full}. {cost}."
    elif totals.nearly_full_us:
        pressure = f"{cache} was just large enough: {nearly_full}, but no sequence was preempted."
    else:
        at_most = share(totals.max_blocks_used, totals.num_blocks)
        pressure = f"{cache} was large enough: at most {at_most} of it was in use, and no sequence was preempted."
    if totals.sums.num_verified_hits:
        hits = count(totals.sums.num_verified_hits, "prefix-cache hit")
        pressure += f" {hits} computed again for comparison: all equal."
    cached, prompt = _cached_and_prompt_tokens(totals, metrics)
    if not cached and totals.sums.num_cached_tokens:
        return f"{pressure} Inputs of the encoder were found in the prefix cache, and no tokens of prompts."
    if not cached:
        return f"{pressure} No prompt tokens were found in the prefix cache: no prompts shared a prefix, or it was off."
    found = share(cached, prompt).capitalize()
    return f"{pressure} {found} of the prompt tokens were found in the prefix cache and not computed."


def slowest_phase(stats: StepStats) -> str:
    """The phase that took most of the step, its work, and its share."""
    phase = max(PHASES, key=lambda name: getattr(stats, f"{name}_us"))
    kinds = ((stats.num_prompt_tokens, "prompt token"), (stats.num_decode_tokens, "decode token"))
    tokens = [count(number, noun) for number, noun in kinds if number] or ["0 tokens"]
    work = {
        "schedule": "scheduling",
        "lockstep": "agreeing with other ranks, or waiting for them",
        "execute": f"computing {' and '.join(tokens)}",
        "apply": f"applying {count(stats.num_sampled_tokens, 'token')}",
    }
    return f"{work[phase]} ({share(getattr(stats, f'{phase}_us'), stats.duration_us)})"


def step_events(stats: StepStats) -> str:
    """Preemptions, returns, cache hits and endings of a step, as a list of texts; empty without any."""
    parts = (
        (stats.num_swapped_out, "preempted by swap"),
        (stats.num_recomputed, "preempted by recompute"),
        (stats.num_swapped_in, "back from the host"),
        (stats.num_cached_tokens, "tokens from the cache"),
        (stats.num_verified_hits, "hits verified"),
        (stats.num_accepted_tokens, "drafts accepted"),
        (stats.num_rejected_tokens, "drafts rejected"),
        (stats.num_finished, "finished"),
    )
    return ", ".join(f"{number:,} {label}" for number, label in parts if number)


def _preemption_cost(totals: Totals, metrics: Mapping[str, Any]) -> str:
    by_swap, by_recompute = totals.sums.num_swapped_out, totals.sums.num_recomputed
    lost = _number(metrics, "recomputed_tokens")
    computed = _number(metrics, "computed_tokens") or totals.sums.num_tokens
    price = "" if lost is None else f" ({count(lost, 'token')}, {share(lost, computed)} of all computed tokens)"
    parts = (
        (by_swap, "by swap copied blocks to host memory"),
        (by_recompute, f"by recompute dropped tokens that had to be recomputed{price}"),
    )
    return "; ".join(f"{count(number, 'preemption')} {effect}" for number, effect in parts if number)


def _rows(totals: Totals, metrics: Mapping[str, Any]) -> Figure:
    rows, errors = _number(metrics, "rows"), _number(metrics, "error_rows")
    if rows is None:
        number, requests = count_and_noun(totals.sums.num_finished, "request")
        return Figure(number, f"{requests} ended", "according to the steps")
    return Figure(*count_and_noun(rows, "row"), count(errors, "error row") if errors else "no error rows")


def _output_tokens(totals: Totals, metrics: Mapping[str, Any]) -> Figure:
    tokens, seconds = _number(metrics, "output_tokens"), _number(metrics, "generate_s")
    if tokens is None or not seconds:
        tokens, seconds = totals.sums.num_sampled_tokens, totals.wall_us / 1e6
    before = _number(metrics, "resumed_output_tokens") or 0
    rate = f"{count((tokens - before) / seconds, 'token')} per second" if seconds else "in 0 s"
    return Figure(*count_and_noun(tokens, "output token"), rate)


def _wall_time(totals: Totals, metrics: Mapping[str, Any]) -> Figure:
    seconds, load_s = _number(metrics, "generate_s"), _number(metrics, "load_s")
    value = totals.wall_us if seconds is None else seconds * 1e6
    note = "from the first step to the last" if load_s is None else f"after {duration(load_s * 1e6)} to load"
    return Figure(duration(value), "to generate", note)


def _media(metrics: Mapping[str, Any]) -> list[Figure]:
    wait_s, encode_s = (_number(metrics, key) for key in ("media_wait_s", "encode_s"))
    counts = {word: _number(metrics, f"{word}s") or 0 for word in ("image", "video", "recording")}
    if not any(counts.values()) and not wait_s:
        return []
    note = f"{duration((encode_s or 0) * 1e6)} in towers"
    note = "".join([f"{count(number, word)}, " for word, number in counts.items() if number]) + note
    what = "images" if counts["image"] else "videos" if counts["video"] else "audio"
    return [Figure(duration((wait_s or 0) * 1e6), f"waiting for {what}", note)]


def _drafts(totals: Totals, metrics: Mapping[str, Any]) -> list[Figure]:
    drafted, accepted = totals.sums.num_drafted_tokens, totals.sums.num_accepted_tokens
    if not drafted:
        return []
    length = _number(drafts_of(metrics), "mean_length")
    note = f"{count(accepted)} of {count(drafted, 'draft')}"
    if length is None:
        return [Figure(share(accepted, drafted), "of drafts accepted", note)]
    return [Figure(f"{length:.2f} tokens", "a step of a row with drafts", f"accepted {note}")]


def drafts_of(metrics: Mapping[str, Any]) -> Mapping[str, Any]:
    """The record of speculation in `metrics.json`; empty without one."""
    record = metrics.get("speculation")
    return record if isinstance(record, Mapping) else {}


def draft_positions(metrics: Mapping[str, Any]) -> list[tuple[int, int]]:
    """Drafts made and accepted as first, second, ... draft of a row's step."""
    record = drafts_of(metrics)
    made, kept = (record.get(f"{name}_by_position") for name in ("drafted", "accepted"))
    if not isinstance(made, list) or not isinstance(kept, list):
        return []
    pairs = list(zip(made, kept))
    return pairs if all(isinstance(each, int) and each >= 0 for pair in pairs for each in pair) else []


def _recomputed(totals: Totals, metrics: Mapping[str, Any]) -> Figure:
    lost = _number(metrics, "recomputed_tokens")
    computed = _number(metrics, "computed_tokens") or totals.sums.num_tokens
    if lost is None and totals.sums.num_recomputed:
        return Figure("unknown", "recomputed", f"of {count(computed, 'token')} computed")
    note = f"{count(lost or 0)} of {count(computed, 'token')} computed"
    return Figure(share(lost or 0, computed), "recomputed", note)


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
