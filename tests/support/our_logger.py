"""Puts the runtime's loggers back as they were: a program configures its process's, and a test's process goes on.

And has pytest capture what these loggers and the root get, without asking all loggers three times a test whether they
pass on what they log: transformers and torch have a thousand, and 2 % of the gate went there.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from _pytest.logging import catching_logs

from spmd_worker.base.metrics.log import LOGGER_NAME, LOGGER_NAMES


@contextmanager
def logger_as_it_was() -> Iterator[logging.Logger]:
    """The runtime's logger; handlers, levels and propagation of it and of the cache's are restored afterwards."""
    loggers = [logging.getLogger(each) for each in LOGGER_NAMES]
    before = [(each, list(each.handlers), each.level, each.propagate) for each in loggers]
    try:
        yield logging.getLogger(LOGGER_NAME)
    finally:
        for logger, handlers, level, propagate in before:
            logger.handlers, logger.propagate = handlers, propagate
            if logger.level != level:
                # It empties the caches of all loggers.
                logger.setLevel(level)


def capture_ours_only() -> None:
    """Once in a process."""
    catching_logs.__enter__ = _attach  # type: ignore[method-assign]  # pytest has no setting for it


def _attach(capture: catching_logs[logging.Handler]) -> logging.Handler:
    root, ours = logging.getLogger(), [logging.getLogger(each) for each in LOGGER_NAMES]
    capture.attached_loggers = [root, *[each for each in ours if not each.propagate]]
    for each in capture.attached_loggers:
        each.addHandler(capture.handler)
    if capture.level is not None:
        capture.handler.setLevel(capture.level)
        capture.orig_level = root.level
        root.setLevel(min(root.level, capture.level))
    return capture.handler
