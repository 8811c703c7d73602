"""The part of an adapter that text computes with.

PEFT's `all-linear` adapts the towers of a model for images too. Their weights are not loaded, and no row runs them, so
an adapter's matrices for them are left out.
"""

import logging
from dataclasses import replace

from spmd_worker.base.errors import AdapterError
from spmd_worker.base.metrics.log import SAME_ON_EVERY_RANK
from spmd_worker.model.adapters.source import AdapterSource, raise_problems
from spmd_worker.model.weights.checkpoint_names import CheckpointNames

logger = logging.getLogger(__name__)


def text_part(source: AdapterSource, names: CheckpointNames) -> AdapterSource:
    """The adapter without modules, and full weights, of what text does not run; says once how many those are. Raises
    AdapterError if nothing is left, and for a module that is not linear.
    """
    modules = {name: each for name, each in source.modules.items() if not names.is_beside_text(f"{name}.weight")}
    saved = {name: each for name, each in source.saved.items() if not names.is_beside_text(name)}
    left_out = [name for name in (*source.modules, *source.saved) if name not in modules and name not in saved]
    problem = "is a convolution: only linear modules are adapted"
    raise_problems(source.subject, [f"{name}: {problem}" for name, each in modules.items() if each.a.ndim > 2])
    if not left_out:
        return source
    if not modules:
        raise AdapterError(
            f"{source.subject}: has only modules that no row of text runs, such as {left_out[0]}: rows with it would "
            f"have the answers of the base model"
        )
    logger.info(
        "%s: %d of %d modules, such as %s, are left out, as their weights are: no row of text runs them",
        *(source.subject, len(left_out), len(source.modules) + len(source.saved), left_out[0]),
        extra=SAME_ON_EVERY_RANK,
    )
    return replace(source, modules=modules, saved=saved)
