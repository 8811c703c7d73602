"""An adapter -> updates of the model's weights by checkpoint name, for `model.lora_merge`."""

from collections.abc import Mapping, Sequence

import torch

from spmd_worker.base.errors import CheckpointError
from spmd_worker.model.adapters.expert_modules import by_expert, module_sizes
from spmd_worker.model.adapters.source import AdapterSource, raise_problems
from spmd_worker.model.adapters.targets import scaled
from spmd_worker.model.adapters.text_part import text_part
from spmd_worker.model.weights.checkpoint_names import CheckpointNames
from spmd_worker.model.weights.merged_weights import LowRankUpdate, StackUpdate


def weight_updates(
    adapter: AdapterSource, names: CheckpointNames, shapes: Mapping[str, Sequence[int]]
) -> dict[str, LowRankUpdate | StackUpdate]:
    """B A of each module, with the scaling, in float32. `shapes` are those of the model's weights, of every stage.

    Raises AdapterError that lists all modules that are not matrices of the model, or of other sizes, and saved modules,
    which replace weights.
    """
    adapter = by_expert(text_part(adapter, names), names, shapes)
    experts = module_sizes(names, shapes)
    updates: dict[str, LowRankUpdate | StackUpdate] = {}
    stacks: dict[str, dict[int, LowRankUpdate]] = {}
    separate = names.separate_rows(shapes)
    inside: dict[str, dict[str, LowRankUpdate]] = {}
    taken: dict[str, str] = {}
    problems: list[str] = []
    if adapter.config.is_transposed and not names.are_transposed:
        problems.append(f"{adapter.config.subject}: fan_in_fan_out=true: the model's matrices are not transposed")
    # PEFT saves an adapted head's own weight beside the adapter.
    bases = {f"{module}.base_layer.weight": module for module in adapter.modules}
    for name in adapter.saved:
        if name not in bases:
            problems.append(f"{name}: a saved module is no update of low rank: merge the adapter with merge_and_unload")
    for module, matrices in adapter.modules.items():
        base = adapter.saved.get(f"{module}.base_layer.weight")
        update = LowRankUpdate(matrices.a.float(), scaled(matrices), base)
        stack, _, expert = module.rpartition(".")
        found = names.expert_stack(stack)
        if found is not None:
            if experts.get(module) != update.shape:
                sizes = list(shapes.get(stack, ()))
                problems.append(f"{module}: is {list(update.shape)} [outputs, inputs], but {stack} has {sizes}")
            else:
                update = update.transposed() if found.is_transposed else update
                stacks.setdefault(stack, {})[int(expert)] = update
            continue
        try:
            name, *others = names.parts(f"{module}.weight", update.shape)
        except CheckpointError as error:
            problems.append(str(error))
            continue
        shape = tuple(shapes.get(name, ()))
        if name in separate:
            joined, (start, stop) = separate[name]
            if update.shape != (expected := (stop - start, shapes[joined][1])):
                problems.append(f"{module}: is {list(update.shape)} [outputs, inputs], but {name} has {list(expected)}")
            elif name in inside.setdefault(joined, {}):
                problems.append(f"{module}: a second adapter of its module, as {taken[name]} is")
            else:
                inside[joined][name], taken[name] = update, module
            continue
        if names.is_transposed(name):
            update = update.transposed()
        if names.tied is not None and name == names.tied[1]:
            problems.append(f"{module}: is tied to the embedding, which the adapter would change too")
        elif name not in shapes or others:
            problems.append(f"{module}: the model has no such matrix")
        elif shape != update.shape or (base is not None and shape != tuple(base.shape)):
            problems.append(f"{module}: is {list(update.shape)} [outputs, inputs], but {name} has {list(shape)}")
        elif name in updates:
            problems.append(f"{module}: a second adapter of its module, as {taken[name]} is")
        else:
            updates[name], taken[name] = update, module
    raise_problems(adapter.subject, problems)
    for joined, parts in inside.items():
        updates[joined] = _joined(shapes[joined][0], {separate[name][1]: update for name, update in parts.items()})
    return updates | {name: StackUpdate(experts) for name, experts in stacks.items()}


def _joined(num_rows: int, parts: Mapping[tuple[int, int], LowRankUpdate]) -> LowRankUpdate:
    """The update of a tensor from those of its rows: their ranks, one behind the other."""
    b = torch.zeros(num_rows, sum(update.a.shape[0] for update in parts.values()))
    first = 0
    for (start, stop), update in parts.items():
        last = first + update.a.shape[0]
        b[start:stop, first:last] = update.b
        first = last
    return LowRankUpdate(torch.cat([update.a for update in parts.values()]), b)
