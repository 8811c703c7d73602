"""Experts' matrices as modules of their own, whatever the checkpoint and the adapter stack.

A checkpoint has a tensor for each expert and matrix, whose modules have its names, or stacks [experts, outputs,
inputs], of which expert 3 is called `<stack>.3` here. An adapter has matrices of modules, as PEFT writes them where
experts are modules, or of stacks (`target_parameters`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from spmd_worker.base.errors import CheckpointError
from spmd_worker.model.adapters.source import AdapterModule, AdapterSource, raise_problems
from spmd_worker.model.layers.weight_slice import WeightSlice, volume
from spmd_worker.model.weights.checkpoint_names import CheckpointNames


def module_sizes(names: CheckpointNames, shapes: Mapping[str, Sequence[int]]) -> dict[str, tuple[int, int]]:
    """[outputs, inputs] of all experts' modules of a model, from the shapes of its checkpoint's tensors."""
    found: dict[str, tuple[int, int]] = {}
    for name, shape in shapes.items():
        if names.layer_of_expert(name) is None:
            continue
        stack = names.expert_stack(name)
        if stack is None and name.endswith(".weight"):
            found[name.removesuffix(".weight")] = (shape[0], shape[1])
        elif stack is not None and len(shape) == 3:
            rows, columns = shape[:0:-1] if stack.is_transposed else shape[1:]
            found |= {f"{name}.{expert}": (rows, columns) for expert in range(shape[0])}
    return found


def module_of(names: CheckpointNames, piece: WeightSlice) -> str:
    """The module of a rank's slice of experts' matrices; "" for other slices, and for no slice."""
    if not volume(piece.source) or names.layer_of_expert(piece.checkpoint_name) is None:
        return ""
    if names.expert_stack(piece.checkpoint_name) is None:
        return piece.checkpoint_name.removesuffix(".weight")
    return f"{piece.checkpoint_name}.{piece.source[0][0]}" if len(piece.source) == 3 else ""


def by_expert(source: AdapterSource, names: CheckpointNames, shapes: Mapping[str, Sequence[int]]) -> AdapterSource:
    """The adapter with matrices of single experts in place of those of stacks. A stack that the model does not have
    stays, for the caller's error. `shapes` are those of the checkpoint's tensors.

    PEFT knows which dimension of a stack has inputs from its class, but not for each class and in each release: if
    sizes are those of matrices the other way round, the adapter is turned, and with it its stacks of square matrices,
    whose sizes do not tell. Raises AdapterError if a stack and a module have matrices of the same expert.
    """
    stacks = {name: module for name, module in source.modules.items() if module.num_experts}
    if not stacks:
        return source
    sizes = module_sizes(names, shapes)
    found = {name: _experts(name, module, names) for name, module in stacks.items()}
    others = [name for name in stacks if not _fits(found[name], sizes)]
    turned = {name: _experts(name, stacks[name].turned(), names) for name in others}
    turned = {name: experts for name, experts in turned.items() if _fits(experts, sizes)}
    if turned:
        square = [name for name, module in stacks.items() if len(module.b) == module.a.shape[1]]
        turned |= {name: _experts(name, stacks[name].turned(), names) for name in square}
    modules = {name: module for name, module in source.modules.items() if name not in stacks}
    problems: list[str] = []
    owners = {name: name for name in modules}
    for given, experts in (found | turned).items():
        problems += [f"{given}: has matrices of {name}, as {owners[name]} has" for name in experts if name in owners]
        modules |= experts
        owners |= dict.fromkeys(experts, given)
    raise_problems(source.subject, problems)
    return replace(source, modules=modules)


def _fits(modules: Mapping[str, AdapterModule], sizes: Mapping[str, tuple[int, int]]) -> bool:
    return all(sizes.get(name) == (len(each.b), each.a.shape[1]) for name, each in modules.items())


def _experts(given: str, module: AdapterModule, names: CheckpointNames) -> dict[str, AdapterModule]:
    num_outputs, num_inputs = len(module.b), module.a.shape[1]
    try:
        parts = names.parts(given, (module.num_experts, num_outputs, num_inputs))
    except CheckpointError:
        return {given: module}
    found: dict[str, AdapterModule] = {}
    for name, view in parts.items():
        rows = slice(None) if view is None or view.rows == (0, 0) else slice(*view.rows)
        if names.layer_of_expert(name) is None:
            return {given: module}
        if names.expert_stack(name) is not None:
            found |= {f"{name}.{each}": module.of_expert(each, rows) for each in range(module.num_experts)}
        elif view is not None and view.index is not None:
            found[name.removesuffix(".weight")] = module.of_expert(view.index, rows)
    return found or {given: module}
