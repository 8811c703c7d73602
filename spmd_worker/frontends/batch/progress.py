"""Displays the progress of a job, and its summary, on rank 0."""

import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, Final, TextIO

from tqdm import tqdm

from spmd_worker.base.names import counted

_DEFAULT_INTERVAL_S: Final = 10.0
_MUCH_WAITING: Final = 0.2
_UNKNOWN_COLUMNS, _UNKNOWN_LINES = 80, 24


class _Bar(tqdm):  # type: ignore[type-arg]  # tqdm is generic in its stubs only
    monitor_interval = 0
    """No monitor thread: it must not add threads to a host's process."""


class Progress:
    """Rows, tokens per second and time left: a bar on a terminal, elsewhere the first and last state and a line every
    `interval_s` seconds. `total_rows` is None when unknown; `rows_before` of them do not count for the rate, nor do
    rejected ones. Tokens are those of the output, or of the prompts if there are none: vectors and scores.
    """

    def __init__(
        self,
        total_rows: int | None,
        stream: TextIO | None = None,
        is_terminal: bool | None = None,
        interval_s: float = _DEFAULT_INTERVAL_S,
        clock: Callable[[], float] = time.monotonic,
        rows_before: int = 0,
    ) -> None:
        self._total_rows, self._interval_s, self._clock = total_rows, interval_s, clock
        self._stream = sys.stderr if stream is None else stream
        self._is_terminal = self._stream.isatty() if is_terminal is None else is_terminal
        self._start_s = clock()
        self._last_shown_s: float | None = None
        self._num_rows_shown: int | None = None
        self._num_rows = self._num_rows_before = rows_before
        self._num_output_tokens = self._num_prompt_tokens = 0
        self._bar: _Bar | None = None
        self._is_closed = False

    def update(self, rows: int, output_tokens: int, prompt_tokens: int = 0, rejected: int = 0) -> None:
        """Count `rows` more finished rows, `rejected` of them without a computation, and more tokens; display if
        due.
        """
        self._num_rows += rows
        self._num_rows_before += rejected
        self._num_output_tokens += output_tokens
        self._num_prompt_tokens += prompt_tokens
        now_s = self._clock()
        is_first = self._last_shown_s is None and (self._num_rows > self._num_rows_before or self._num_output_tokens)
        last_s = self._start_s if self._last_shown_s is None else self._last_shown_s
        if self._is_terminal:
            self._show_bar(rows, now_s)
        elif is_first or now_s - last_s >= self._interval_s:
            self._show_line(now_s)

    def expect(self, total_rows: int | None) -> None:
        self._total_rows = total_rows
        if self._bar is not None:
            self._bar.total = total_rows

    def close(self) -> None:
        """Display the last state. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        if not self._is_terminal:
            if self._num_rows_shown != self._num_rows:
                self._show_line(self._clock())
        elif self._bar is not None:
            self._bar.refresh()
            self._bar.close()

    def _show_bar(self, rows: int, now_s: float) -> None:
        if self._bar is None:
            # miniters: the tokens per second change while no row ends.
            look = {"unit": " rows", "desc": "rows", "miniters": 0, **_terminal_size(self._stream)}
            self._bar = _Bar(total=self._total_rows, initial=self._num_rows - rows, file=self._stream, **look)
        self._bar.set_postfix_str(f"{self._tokens_per_s(now_s):,.0f} tokens/s", refresh=False)
        self._bar.update(rows)

    def _show_line(self, now_s: float) -> None:
        self._last_shown_s, self._num_rows_shown = now_s, self._num_rows
        total = "" if self._total_rows is None else f" of {self._total_rows:,}"
        left, num_done = "", self._num_rows - self._num_rows_before
        if self._total_rows is not None and num_done > 0 and self._num_rows < self._total_rows:
            left_s = (now_s - self._start_s) / num_done * (self._total_rows - self._num_rows)
            left = f", {format_seconds(left_s)} left"
        kind = "prompt" if self._has_only_prompts() else "output"
        # A run that is resumed by force with fewer rows has answered more than there are now.
        num_rows = self._num_rows if self._total_rows is None else min(self._num_rows, self._total_rows)
        rows = counted(num_rows, "row") if self._total_rows is None else f"{num_rows:,}{total} rows"
        text = f"{rows}, {self._num_tokens():,} {kind} tokens"
        print(f"{text}, {self._tokens_per_s(now_s):,.1f} tokens/s{left}", file=self._stream, flush=True)

    def _has_only_prompts(self) -> bool:
        return self._num_prompt_tokens > 0 and not self._num_output_tokens

    def _num_tokens(self) -> int:
        return self._num_prompt_tokens if self._has_only_prompts() else self._num_output_tokens

    def _tokens_per_s(self, now_s: float) -> float:
        elapsed_s = now_s - self._start_s
        return self._num_tokens() / elapsed_s if elapsed_s > 0 else 0.0


def _terminal_size(stream: TextIO) -> dict[str, Any]:
    """Size for tqdm: dynamic, or fixed if the terminal's is unknown (tqdm would display nothing), as in containers."""
    try:
        is_known = min(os.get_terminal_size(stream.fileno())) > 0
    except (OSError, ValueError):
        is_known = False
    return {"dynamic_ncols": True} if is_known else {"ncols": _UNKNOWN_COLUMNS, "nrows": _UNKNOWN_LINES}


def format_seconds(seconds: float) -> str:
    """Readable duration: `0.84 s`, `12.3 s`, `4 min 05 s`, `2 h 03 min`."""
    if seconds < 60:
        return f"{seconds:.2f} s" if seconds < 1 else f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def format_summary(metrics: Mapping[str, Any]) -> str:
    """The summary of an ended job from the keys of metrics.json: an aligned line per fact, none for a missing key."""
    facts = [(label, text) for label, text in _facts(metrics) if text is not None]
    width = max((len(label) for label, _ in facts), default=0)
    return "\n".join(f"{label:<{width}}  {text}" for label, text in facts)


def _facts(metrics: Mapping[str, Any]) -> list[tuple[str, str | None]]:
    return [
        ("rows", _count(metrics, "rows")),
        ("answered before", _count(metrics, "resumed_rows") if metrics.get("resumed_rows") else None),
        ("error rows", _error_rows(metrics)),
        ("prompt tokens", _prompt_tokens(metrics)),
        *_tokens_made(metrics),
        ("time to load", _duration(metrics, "load_s")),
        ("time to generate", _duration(metrics, "generate_s")),
        ("total time", _duration(metrics, "wall_s")),
        ("peak memory", _memory(metrics)),
        ("rows by adapter", _adapters(metrics)),
        ("rows of lost leases", _lost_rows(metrics)),
        ("replicas", _replicas(metrics)),
        ("steps", _count(metrics, "steps")),
        ("lockstep", _lockstep(metrics)),
        ("stages busy", _stages(metrics)),
        ("waiting for cores", _waits(metrics)),
        ("experts", _experts(metrics)),
        ("preemptions", _preemptions(metrics)),
        ("host tier", _tier(metrics)),
        ("prefix hits verified", _verified(metrics)),
        ("drafts", _drafts(metrics)),
    ]


def _adapters(metrics: Mapping[str, Any]) -> str | None:
    counts = metrics.get("adapters") or {}
    return ", ".join(f"{number:,} {name}" for name, number in counts.items()) or None


def _lost_rows(metrics: Mapping[str, Any]) -> str | None:
    counts = [metrics.get(key) or 0 for key in ("lost_rows", "dropped_rows")]
    return f"{counts[0]:,} computed, {counts[1]:,} dropped before" if any(counts) else None


def _replicas(metrics: Mapping[str, Any]) -> str | None:
    """Rows and busy time per replica."""
    replicas = metrics.get("replicas")
    if not replicas:
        return None
    rows, busy = ([each[key] for each in replicas] for key in ("rows", "busy_s"))
    return f"{', '.join(f'{number:,}' for number in rows)} rows; busy {', '.join(map(format_seconds, busy))}"


def _stages(metrics: Mapping[str, Any]) -> str | None:
    """Busy share of each stage of a pipeline."""
    stages = metrics.get("stages")
    if not stages:
        return None
    shares = ", ".join(f"{stage['busy_share']:.0%}" for stage in stages)
    return f"{shares} (bubble {metrics['bubble_share']:.0%})"


def _waits(metrics: Mapping[str, Any]) -> str | None:
    """Shown only if it is much: other processes run on the cores."""
    waits = metrics.get("thread_waits")
    if not waits or waits["largest_share"] < _MUCH_WAITING or not waits["lost_cores"]:
        return None
    return f"{waits['largest_share']:.0%} of the time computed: other processes run on the same cores"


def _experts(metrics: Mapping[str, Any]) -> str | None:
    """The expert with most tokens, relative to the mean of its layer, and the number without tokens."""
    experts = metrics.get("experts")
    if not experts:
        return None
    busiest, never = experts["busiest"], experts["never_used"]
    where = f"layer {busiest['layer']} expert {busiest['expert']}"
    return f"busiest/mean {busiest['over_mean']:.1f} ({where}), never used {never:,}"


def _lockstep(metrics: Mapping[str, Any]) -> str | None:
    """Cost of agreement: digest, messages, and waiting for the other ranks."""
    seconds, num_steps = metrics.get("lockstep_s"), metrics.get("steps")
    if seconds is None or not num_steps:
        return None
    total_s = sum(metrics.get(f"{phase}_s") or 0.0 for phase in ("schedule", "lockstep", "execute", "apply"))
    share = f", {seconds / total_s:.1%} of the step" if total_s else ""
    return f"{seconds / num_steps * 1000:.2f} ms a step{share}"


def _preemptions(metrics: Mapping[str, Any]) -> str | None:
    """Preempted sequences by kind, and the share of the tokens that was recomputed because of it."""
    count, by_swap = metrics.get("preemptions"), metrics.get("preemptions_by_swap")
    if not count or by_swap is None:
        return _count(metrics, "preemptions")
    recomputed, computed = metrics.get("recomputed_tokens") or 0, metrics.get("computed_tokens")
    share = f", {recomputed:,} tokens recomputed ({recomputed / computed:.1%})" if computed else ""
    return f"{count:,} ({by_swap:,} by swap, {count - by_swap:,} by recompute{share})"


def _tier(metrics: Mapping[str, Any]) -> str | None:
    stored, loaded = metrics.get("tier_stored_blocks"), metrics.get("tier_loaded_blocks")
    return f"{stored:,} blocks stored, {loaded or 0:,} loaded" if stored else None


def _verified(metrics: Mapping[str, Any]) -> str | None:
    verified, unverified = metrics.get("prefix_hits_verified"), metrics.get("prefix_hits_unverified")
    return f"{verified or 0:,}, all equal; {unverified or 0:,} not completed" if verified or unverified else None


def _drafts(metrics: Mapping[str, Any]) -> str | None:
    """Drafts that were accepted, and the tokens that a step gave a row that had drafts."""
    record = metrics.get("speculation")
    if not record or not record["drafted_tokens"]:
        return None
    accepted, drafted = record["accepted_tokens"], record["drafted_tokens"]
    return f"{accepted:,} of {drafted:,} accepted ({accepted / drafted:.0%}), {record['mean_length']:.2f} tokens a step"


def _count(metrics: Mapping[str, Any], key: str) -> str | None:
    return None if metrics.get(key) is None else f"{metrics[key]:,}"


def _duration(metrics: Mapping[str, Any], key: str) -> str | None:
    return None if metrics.get(key) is None else format_seconds(metrics[key])


def _error_rows(metrics: Mapping[str, Any]) -> str | None:
    count = _count(metrics, "error_rows")
    codes = metrics.get("error_codes") or {}
    if count is None or not codes:
        return count
    by_count = sorted(codes.items(), key=lambda item: (-item[1], item[0]))
    return f"{count} ({', '.join(f'{number:,} {code}' for code, number in by_count)})"


def _prompt_tokens(metrics: Mapping[str, Any]) -> str | None:
    total = _count(metrics, "prompt_tokens")
    cached, computed = _count(metrics, "cached_prompt_tokens"), _count(metrics, "computed_prompt_tokens")
    if total is None or cached is None or computed is None:
        return total
    return f"{total} ({computed} computed, {cached} from the cache)"


def _tokens_made(metrics: Mapping[str, Any]) -> list[tuple[str, str | None]]:
    """Output tokens, or the rate of prompts where rows have vectors or scores."""
    tokens, seconds = metrics.get("output_tokens"), metrics.get("generate_s")
    if tokens == 0 and metrics.get("computed_tokens"):
        return [("prompt tokens per second", f"{metrics['computed_tokens'] / seconds:,.1f}" if seconds else None)]
    made = None if tokens is None else tokens - (metrics.get("resumed_output_tokens") or 0)
    rate = None if made is None or not seconds else f"{made / seconds:,.1f}"
    return [("output tokens", _count(metrics, "output_tokens")), ("output tokens per second", rate)]


def _memory(metrics: Mapping[str, Any]) -> str | None:
    num_bytes = metrics.get("peak_memory_bytes")
    if num_bytes is None:
        return None
    return f"{num_bytes / 2**30:,.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:,.1f} MiB"
