"""Puts the runtime's logger back as it was: a program configures it for its process, and a test's process goes on."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

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
        logger.setLevel(level)
