"""Progress bar of a call: tqdm's or the caller's."""

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

from tqdm import tqdm

UseTqdm = bool | Callable[..., Any]

logger = logging.getLogger(__name__)


class _Bar(tqdm):  # type: ignore[type-arg]  # tqdm is generic in its stubs only
    """A bar without tqdm's monitor thread, which would outlive the call."""

    monitor_interval = 0


class CallBar:
    """The bar of one call, on the first rank. Its errors are logged: other ranks are in the middle of the call."""

    def __init__(self, use_tqdm: UseTqdm, num_prompts: int, *, is_shown: bool) -> None:
        self._bar: Any = None
        if use_tqdm and is_shown:
            make = use_tqdm if callable(use_tqdm) else _Bar
            with self._dropped_on_error():
                self._bar = make(total=num_prompts, desc="prompts", disable=False)

    def update(self, count: int = 1) -> None:
        if self._bar is not None:
            with self._dropped_on_error():
                self._bar.update(count)

    def close(self) -> None:
        if self._bar is not None:
            with self._dropped_on_error():
                self._bar.close()

    @contextlib.contextmanager
    def _dropped_on_error(self) -> Iterator[None]:
        try:
            yield
        except Exception:  # the caller's code, in a call that the other ranks are in
            self._bar = None
            logger.exception("use_tqdm: the progress bar failed; the call continues without it")
