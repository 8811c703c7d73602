"""Progress bar of a call, tqdm's or the caller's own."""

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

from tqdm import tqdm

UseTqdm = bool | Callable[..., Any]

logger = logging.getLogger(__name__)


class _Bar(tqdm):  # type: ignore[type-arg]  # tqdm is generic in its stubs only
    """Without tqdm's thread, which would go on in the caller's process."""

    monitor_interval = 0


class CallBar:
    """The bar of one call, which the first rank alone has. What a bar of the caller's making raises is logged, and the
    prompts are answered without it: the other ranks, which have none, are in the middle of the call.
    """

    def __init__(self, use_tqdm: UseTqdm, num_prompts: int, *, is_shown: bool) -> None:
        self._bar: Any = None
        if use_tqdm and is_shown:
            make = use_tqdm if callable(use_tqdm) else _Bar
            with self._lost_alone():
                self._bar = make(total=num_prompts, desc="prompts", disable=False)

    def update(self, count: int = 1) -> None:
        """`count` more are done."""
        if self._bar is not None:
            with self._lost_alone():
                self._bar.update(count)

    def close(self) -> None:
        """The call is over."""
        if self._bar is not None:
            with self._lost_alone():
                self._bar.close()

    @contextlib.contextmanager
    def _lost_alone(self) -> Iterator[None]:
        try:
            yield
        except Exception:  # of code that is not ours, in a call that the other ranks are in
            self._bar = None
            logger.exception("use_tqdm: the bar raised, and the call goes on without it")
