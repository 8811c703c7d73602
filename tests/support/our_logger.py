"""Puts the runtime's logger back as it was: a program configures it for its process, and a test's process goes on.

And has pytest capture what that logger and the root get, without asking all loggers three times a test whether they
pass on what they log: transformers and torch have a thousand, and 2 % of the gate went there.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from _pytest.logging import catching_logs

from spmd_worker.base.metrics.log import LOGGER_NAME


@contextmanager
def logger_as_it_was() -> Iterator[logging.Logger]:
    """The runtime's logger, whose handlers, level and propagation are restored afterwards."""
    logger = logging.getLogger(LOGGER_NAME)
    handlers, level, propagate = list(logger.handlers), logger.level, logger.propagate
    try:
        yield logger
    finally:
        logger.handlers, logger.propagate = handlers, propagate
        if logger.level != level:
            # It empties the caches of all loggers.
            logger.setLevel(level)


def capture_ours_only() -> None:
    """Once in a process."""
    catching_logs.__enter__ = _attach  # type: ignore[method-assign]  # pytest has no setting for it


def _attach(capture: catching_logs[logging.Handler]) -> logging.Handler:
    root, ours = logging.getLogger(), logging.getLogger(LOGGER_NAME)
    capture.attached_loggers = [root] if ours.propagate else [root, ours]
    for each in capture.attached_loggers:
        each.addHandler(capture.handler)
    if capture.level is not None:
        capture.handler.setLevel(capture.level)
        capture.orig_level = root.level
        root.setLevel(min(root.level, capture.level))
    return capture.handler
