"""A model as a readable tree: modules, and the shapes and dtypes of this rank's parameters."""

import math

import torch
from torch import Tensor, nn

from spmd_worker.kernels.cpu.int8 import int8_shape


def describe_model(model: nn.Module) -> str:
    """One line a module; runs of equal layers are folded into one line with their range."""
    return "\n".join([type(model).__name__, *_children(model, depth=1)])


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
    name = run[0][0] if len(run) == 1 else f"{run[0][0]}-{run[-1][0]}"
    first, *rest = run[0][1]
    return [f"{'  ' * depth}{name}: {first}", *rest]


def _describe(module: nn.Module) -> str:
    shapes = [
        f"{name} {_plain_shape(parameter)} {str(parameter.dtype).removeprefix('torch.')}"
        for name, parameter in module.named_parameters(recurse=False)
    ]
    return " ".join([type(module).__name__, *shapes])


def _plain_shape(parameter: Tensor) -> list[int]:
    """As the checkpoint has it: a weight in panels is [..., inputs / 2, 16, 2], outputs in front and in the 16."""
    if parameter.dtype == torch.int8:
        return list(int8_shape(parameter))
    if parameter.ndim < 4:
        return list(parameter.shape)
    *groups, half_inputs, outputs, pair = parameter.shape
    return [math.prod(groups) * outputs, half_inputs * pair]
