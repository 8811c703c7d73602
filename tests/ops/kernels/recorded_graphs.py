"""CUDA graphs without CUDA: what a step launches is written down with the tensors that it was launched on, and launched
again on these.

As on a device, a graph has no Python in it: what the host decided while it was recorded (numbers, shapes, kernels)
stays, and only what stands in the tensors changes. Recording computes nothing: all that was made meanwhile is
overwritten, and what it changed is put back. Kernels of Triton are interpreted.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from triton.runtime.interpreter import GridExecutor

from spmd_worker.worker.backends.triton import TritonDevice
from spmd_worker.worker.runner.step_graphs import StepGraph

_launch_interpreted = GridExecutor.__call__


class RecordedGraph:
    """Implements `StepGraph`. `num_recorded` and `num_replayed` count, of all graphs together."""

    num_recorded = num_replayed = 0

    def __init__(self) -> None:
        self._launches: list[Callable[[], object]] = []

    def record(self, launch: Callable[[], None]) -> None:
        type(self).num_recorded += 1
        mode = _Recording(self._launches)
        GridExecutor.__call__ = lambda executor, *args, **kwargs: mode.launch(executor, *args, **kwargs)
        try:
            with mode:
                launch()
        finally:
            GridExecutor.__call__ = _launch_interpreted
        for storage, before in mode.kept.values():
            storage.copy_(before)
        for tensor in mode.made:
            tensor.fill_(torch.nan if tensor.is_floating_point() else 1)

    def replay(self) -> None:
        type(self).num_replayed += 1
        for launch in self._launches:
            launch()


class _Recording(TorchDispatchMode):
    """Every operation of torch, and of Triton through `launch`. `made` are tensors with memory of their own, `kept`
    the memory of others that may be changed, by address, and what was in it.
    """

    def __init__(self, launches: list[Callable[[], object]]) -> None:
        super().__init__()
        self._launches = launches
        self.made: list[torch.Tensor] = []
        self.kept: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("a value is read while a graph is recorded")
        kwargs = kwargs or {}
        if function._schema.is_mutable:
            self._keep(args[:1])
        result = function(*args, **kwargs)
        if function._schema.is_mutable:
            self._launches.append(lambda: function(*args, **kwargs))
            return result
        known = [each.untyped_storage().data_ptr() for each in _tensors((args, tuple(kwargs.values())))]
        own = [each for each in _tensors((result,)) if each.untyped_storage().data_ptr() not in known]
        self.made += own
        if own and "empty" not in function.__name__:
            self._launches.append(lambda: _copy(_tensors((function(*args, **kwargs),)), _tensors((result,))))
        return result

    def launch(self, executor: GridExecutor, *args: Any, **kwargs: Any) -> None:
        self._launches.append(lambda: _launch_interpreted(executor, *args, **kwargs))
        with _disable_current_modes():
            self._keep((args, tuple(kwargs.values())))
            _launch_interpreted(executor, *args, **kwargs)

    def _keep(self, values: Any) -> None:
        made = [each.untyped_storage().data_ptr() for each in self.made]
        for storage in [each.untyped_storage() for each in _tensors(values)]:
            if storage.data_ptr() not in (*made, *self.kept):
                self.kept[storage.data_ptr()] = (storage, storage.clone())


def _tensors(values: Any) -> list[torch.Tensor]:
    return [
        tensor
        for value in values
        for tensor in (
            [value] if isinstance(value, torch.Tensor) else _tensors(value) if isinstance(value, (tuple, list)) else []
        )
    ]


def _copy(sources: list[torch.Tensor], targets: list[torch.Tensor]) -> None:
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source)


class RecordedDevice(TritonDevice):
    """Steps are replayed, though kernels are interpreted."""

    def graph_maker(self) -> Callable[[], StepGraph]:
        return RecordedGraph
