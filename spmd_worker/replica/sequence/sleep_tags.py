"""What of an engine sleeps, by vLLM's names: a value that every rank computes for itself from the worker events."""

from collections.abc import Sequence
from typing import Any, Final

from spmd_worker.base.config.plain_values import plain_int, shown

WEIGHTS: Final = "weights"
KV_CACHE: Final = "kv_cache"
TAGS: Final = (WEIGHTS, KV_CACHE)
SLEEP: Final = "sleep"
WAKE_UP: Final = "wake_up"
"""Names of the worker events."""

_MODES: Final = ("abort", "wait", "keep")


def checked_level(level: Any) -> int:
    """Raises ValueError for what is no level of sleep."""
    number = plain_int(level)
    if number not in (1, 2):
        raise ValueError(f"level={shown(level)} must be 1 (weights are kept in host memory) or 2 (weights are dropped)")
    return number


def check_mode(mode: Any) -> None:
    """What becomes of requests when an engine falls asleep, by vLLM's names: all the same, where none is unanswered.
    Raises ValueError for another one.
    """
    if mode not in _MODES:
        raise ValueError(f"mode={mode!r} must be one of {', '.join(map(repr, _MODES))}")


def checked_tags(tags: Sequence[str] | None) -> list[str]:
    """Which tags wake up, in the order of `TAGS`; None is all. Raises ValueError for what is no list of them."""
    if tags is None:
        return list(TAGS)
    if isinstance(tags, str) or not all(tag in TAGS for tag in tags):
        raise ValueError(f"tags={tags!r} must be None (all) or a list of {', '.join(map(repr, TAGS))}")
    return [tag for tag in TAGS if tag in tags]


def tags_after(event: str, payload: Any, tags: tuple[str, ...]) -> tuple[str, ...]:
    """What sleeps once every worker has committed `event`, where `tags` slept before."""
    if event == SLEEP:
        return TAGS
    if event == WAKE_UP:
        return tuple(tag for tag in tags if tag not in payload)
    return tags
