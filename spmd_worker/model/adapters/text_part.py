"""The part of an adapter that text computes with, by modules of checkpoints.

PEFT's `all-linear` adapts the towers of a model for images too. Where only the text of a model runs (`max_images=0`, or
a tower that is not supported) an adapter's matrices for them are left out. A tower that runs has no adapters: rows with
images would have other answers than the adapter's, so it is refused.
"""

import logging
from dataclasses import replace

from spmd_worker.base.errors import AdapterError, CheckpointError
from spmd_worker.base.metrics.log import SAME_ON_EVERY_RANK
from spmd_worker.model.adapters.source import AdapterModule, AdapterSource, raise_problems
from spmd_worker.model.weights.checkpoint_names import CheckpointNames

logger = logging.getLogger(__name__)


def text_part(source: AdapterSource, names: CheckpointNames) -> AdapterSource:
    """The adapter without modules, and full weights, of what text does not run; says once how many those are. Raises
    AdapterError if nothing is left, for modules of a tower that runs, and for one not linear or of a wrong shape.
    """
    _check_tower(source, names)
    modules = {name: each for name, each in source.modules.items() if not names.is_beside_text(f"{name}.weight")}
    saved = {name: each for name, each in source.saved.items() if not names.is_beside_text(name)}
    left_out = [name for name in (*source.modules, *source.saved) if name not in modules and name not in saved]
    problem = "is a convolution: only linear modules are adapted"
    raise_problems(source.subject, [f"{name}: {problem}" for name, each in modules.items() if each.a.ndim > 2])
    source = replace(source, modules=modules, saved=saved)
    if not left_out:
        return replace(source, modules=_divided(source, names))
    if not modules:
        raise AdapterError(
            f"{source.subject}: has only modules that no row of text runs, such as {left_out[0]}: rows with it would "
            f"have the answers of the base model"
        )
    logger.info(
        "%s: %d of %d modules, such as %s, are left out, as their weights are: no row of text runs them",
        *(source.subject, len(left_out), len(modules) + len(saved) + len(left_out), left_out[0]),
        extra=SAME_ON_EVERY_RANK,
    )
    return replace(source, modules=_divided(source, names))


def _divided(source: AdapterSource, names: CheckpointNames) -> dict[str, AdapterModule]:
    """The modules, with one for each of those that are one in transformers' memory (`Names.joined_rows`), or in files
    alone (`Names.separate`). Raises AdapterError for a module that is given twice, alone and as a part.
    """
    modules: dict[str, AdapterModule] = {}
    given: dict[str, str] = {}
    problems: list[str] = []
    for module, matrices in source.modules.items():
        try:
            rows = names.joined_rows(f"{module}.weight", matrices.b.shape)
        except CheckpointError as error:
            problems.append(str(error))
            continue
        parts = {name.removesuffix(".weight"): slice(*each) for name, each in rows.items()} or {module: slice(None)}
        if twice := next((name for name in parts if name in given), ""):
            problems.append(f"{module}: has matrices of {twice}, as {given[twice]} has: train with one of the two")
        given |= dict.fromkeys(parts, module)
        modules |= {name: replace(matrices, b=matrices.b[each]) for name, each in parts.items()}
    raise_problems(source.subject, problems)
    return modules


def _check_tower(source: AdapterSource, names: CheckpointNames) -> None:
    modules = [*source.modules, *(name.removesuffix(".weight") for name in source.saved)]
    found = [name for name in modules if names.is_of_tower(f"{name}.weight")]
    if found:
        raise AdapterError(
            f"{source.subject}: adapts {len(found)} modules of the model's tower, such as {found[0]}, which rows with "
            f"images run, and a tower takes no adapters: train with exclude_modules, merge the adapter with PEFT's "
            f"merge_and_unload, or run the text alone with limits.max_images=0"
        )
