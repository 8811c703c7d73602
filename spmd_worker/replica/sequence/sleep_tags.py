"""Sleep tags ("weights", "kv_cache"), in vLLM's names: every rank computes the sleeping ones from the worker events."""

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
    """A valid sleep level. Raises ValueError for any other value."""
    number = plain_int(level)
    if number not in (1, 2):
        raise ValueError(f"level={shown(level)} must be 1 (weights are kept in host memory) or 2 (weights are dropped)")
    return number


def check_mode(mode: Any) -> None:
    """Raise ValueError for an unknown mode. vLLM's modes have one effect: no request is unanswered here."""
    if mode not in _MODES:
        raise ValueError(f"mode={mode!r} must be one of {', '.join(map(repr, _MODES))}")


def checked_tags(tags: Sequence[str] | None) -> list[str]:
    """Tags to wake up, in the order of `TAGS`; None is all. Raises ValueError for an invalid list."""
    if tags is None:
        return list(TAGS)
    if isinstance(tags, str) or not all(tag in TAGS for tag in tags):
        raise ValueError(f"tags={tags!r} must be None (all) or a list of {', '.join(map(repr, TAGS))}")
    return [tag for tag in TAGS if tag in tags]


def tags_after(event: str, payload: Any, tags: tuple[str, ...]) -> tuple[str, ...]:
    """Sleeping tags once every worker has committed `event`, where `tags` slept before."""
    if event == SLEEP:
        return TAGS
    if event == WAKE_UP:
        return tuple(tag for tag in tags if tag not in payload)
    return tags
