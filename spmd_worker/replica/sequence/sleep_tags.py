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

ABORT: Final = "abort"
WAIT: Final = "wait"
KEEP: Final = "keep"
MODES: Final = (ABORT, WAIT, KEEP)
"""What happens to unanswered requests in a pause."""


def checked_level(level: Any, *, least: int = 1) -> int:
    """A valid sleep level, from `least` on. Raises ValueError for any other value."""
    number = plain_int(level)
    if number is None or number not in range(least, 3):
        pauses = "" if least else "0 (only generation pauses), "
        raise ValueError(
            f"level={shown(level)} must be {pauses}1 (weights are kept in host memory) or 2 (weights are dropped)"
        )
    return number


def checked_mode(mode: Any) -> str:
    """A mode of pauses. Raises ValueError for any other value."""
    if not isinstance(mode, str) or mode not in MODES:
        raise ValueError(f"mode={shown(mode)} must be one of {', '.join(map(repr, MODES))}")
    return mode


def checked_tags(tags: Sequence[str] | None) -> list[str]:
    """Tags to wake up, in the order of `TAGS`; None is all. vLLM's "scheduling" is accepted, and wakes up nothing.
    Raises ValueError for an invalid list.
    """
    if tags is None:
        return list(TAGS)
    if isinstance(tags, str) or not all(tag in (*TAGS, "scheduling") for tag in tags):
        raise ValueError(f"tags={tags!r} must be None (all) or a list of {', '.join(map(repr, TAGS))}")
    return [tag for tag in TAGS if tag in tags]


def tags_after(event: str, payload: Any, tags: tuple[str, ...]) -> tuple[str, ...]:
    """Sleeping tags once every worker has committed `event`, where `tags` slept before."""
    if event == SLEEP:
        return TAGS
    if event == WAKE_UP:
        return tuple(tag for tag in tags if tag not in payload)
    return tags
