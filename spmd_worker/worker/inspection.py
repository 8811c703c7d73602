"""Model inspection: a readable tree of modules with this rank's parameters, and its slices of the checkpoint."""

import math
import re
from collections.abc import Sequence
from itertools import product

import torch
from torch import Tensor, nn

from spmd_worker.model.decoder import DecoderForCausalLM
from spmd_worker.model.layers.checkpoint_layer import PackedLayer
from spmd_worker.model.layers.experts import SparseFeedForward
from spmd_worker.model.layers.weight_slice import HeldSlice, extents
from spmd_worker.ops.kernels.byte_rows import byte_rows_shape, is_packed
from spmd_worker.ops.kernels.cpu.int8 import int8_shape

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


def describe_model(model: nn.Module) -> str:
    """One line per module; runs of equal layers are folded into one line with their range."""
    return "\n".join([type(model).__name__, *_children(model, depth=1)])


def describe_slices(model: DecoderForCausalLM) -> str:
    """Layers and experts of this rank, then its slices of checkpoint tensors, one line for all layers and experts with
    equal slices. Complete tensors are left out.
    """
    stage, layers = model.stage, model.model_config.layers
    lines = []
    if stage.stop - stage.start < len(layers):
        lines.append(f"layers {stage.start} to {stage.stop} of {len(layers)}")
    owned: dict[tuple[tuple[str, ...], int], list[str]] = {}
    for number, layer in enumerate(model.model.layers, stage.start):
        experts = layers[number].experts
        if experts is not None and isinstance(layer.mlp, SparseFeedForward):
            own = tuple(layer.mlp.experts)
            if len(own) < experts.num_experts:
                owned.setdefault((own, experts.num_experts), []).append(str(number))
    lines += [f"experts {_run(own)} of {count} in layers {_run(found)}" for (own, count), found in owned.items()]
    sliced: dict[tuple[str, str, HeldSlice], list[str]] = {}
    for name, held in model.weights.held.items():
        part = held.held_slice
        if not part.is_complete:
            parent = held.module_name.rpartition(".")[2]
            sliced.setdefault((_NUMBER.sub("*", name), parent, part), []).append(name)
    for (pattern, parent, part), names in sliced.items():
        where = "" if f".{parent}." in f".{pattern}" else f", in {parent}"
        lines += [f"{name} {part}{where}" for name in _folded_names(pattern, names)]
    for padding in model.weights.paddings:
        count = extents(padding.destination)[0]
        lines.append(f"{padding.parameter_name}: {count} {'row' if count == 1 else 'rows'} of padding")
    return "\n".join(["slices of the checkpoint:", *[f"  {line}" for line in lines]]) if lines else ""


def _folded_names(pattern: str, names: list[str]) -> list[str]:
    """One name with ranges, if the names have all combinations of their numbers; otherwise all names."""
    numbers = [_NUMBER.findall(name) for name in names]
    axes = [tuple(dict.fromkeys(found)) for found in zip(*numbers, strict=True)]
    if sorted(map(tuple, numbers)) != sorted(product(*axes)):
        return names
    for axis in axes:
        pattern = pattern.replace("*", _run(axis), 1)
    return [pattern]


def _run(numbers: Sequence[str]) -> str:
    """Consecutive numbers as 0-3, others as 1,3,5."""
    first = int(numbers[0])
    is_consecutive = list(numbers) == [str(first + offset) for offset in range(len(numbers))]
    return f"{numbers[0]}-{numbers[-1]}" if is_consecutive and len(numbers) > 1 else ",".join(numbers)


def _children(module: nn.Module, depth: int) -> list[str]:
    lines: list[str] = []
    run: list[tuple[str, list[str]]] = []
    for name, child in module.named_children():
        body = [_describe(child), *_children(child, depth + 1)]
        if run and (run[-1][1] != body or not name.isdigit()):
            lines += _fold(run, depth)
            run = []
        run.append((name, body))
    return lines + _fold(run, depth)


def _fold(run: list[tuple[str, list[str]]], depth: int) -> list[str]:
    if not run:
        return []
    name = run[0][0] if len(run) == 1 else _run([name for name, _ in run])
    first, *rest = run[0][1]
    return [f"{'  ' * depth}{name}: {first}", *rest]


def _describe(module: nn.Module) -> str:
    shapes = [
        f"{name} {_held_shape(module, name, parameter)} {str(parameter.dtype).removeprefix('torch.')}"
        for name, parameter in module.named_parameters(recurse=False)
    ]
    return " ".join([type(module).__name__, *shapes])


def _held_shape(module: nn.Module, name: str, parameter: Tensor) -> list[int]:
    """The checkpoint's shape, of a weight that is held as stored too."""
    if isinstance(module, PackedLayer) and module.stored is not None:
        return list(module.shape_of(name))
    return _plain_shape(parameter)


def _plain_shape(parameter: Tensor) -> list[int]:
    """The checkpoint's shape; a weight in panels is [..., inputs / 2, 16, 2], its outputs in front and in the 16."""
    if is_packed(parameter):
        return list(byte_rows_shape(parameter))
    if parameter.dtype == torch.int8:
        return list(int8_shape(parameter))
    if parameter.ndim < 4:
        return list(parameter.shape)
    *groups, half_inputs, outputs, pair = parameter.shape
    return [math.prod(groups) * outputs, half_inputs * pair]
