"""Choice of the device backend that `executor.device_backend` names."""

from dataclasses import replace
from typing import Final

import torch

from spmd_worker.base.errors import ConfigError
from spmd_worker.resolved import ResolvedRun
from spmd_worker.worker.backends.backend import DeviceBackend
from spmd_worker.worker.worker_wrapper import resolve_class

_CLASSES: Final = {
    "cpu": "spmd_worker.worker.backends.cpu.CpuDevice",
    "torch": "spmd_worker.worker.backends.plain_torch.TorchDevice",
    "triton": "spmd_worker.worker.backends.triton.TritonDevice",
}
"""Imported on demand: triton is optional."""


def new_backend(resolved: ResolvedRun, device: torch.device) -> DeviceBackend:
    """The backend of `executor.device_backend`; `auto` is cpu on a CPU and torch elsewhere. Raises ConfigError for an
    invalid class.
    """
    name = resolved.config.executor.device_backend
    if name == "auto":
        name = "cpu" if device.type == "cpu" else "torch"
    try:
        backend_class: type[DeviceBackend] = resolve_class(_CLASSES.get(name, name), DeviceBackend)
    except ValueError as error:
        raise ConfigError(f"executor.device_backend: {error}") from None
    return backend_class(resolved, device)


def with_device_backend(resolved: ResolvedRun, name: str) -> ResolvedRun:
    """The run with another `executor.device_backend`, for a worker class that brings its own."""
    executor = replace(resolved.config.executor, device_backend=name)
    return replace(resolved, config=replace(resolved.config, executor=executor))
