"""Choice of the device backend that `executor.device_backend` names.

`auto` is cpu on a CPU; on CUDA triton if it computes the model there, else torch, which is said once with the reason.
Ranks that choose differently have other arithmetic, and are refused when they start (`engine/startup.py`).
"""

import logging
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from typing import Final

import torch

from spmd_worker.base.errors import ConfigError
from spmd_worker.resolved import ResolvedRun, resolve_again
from spmd_worker.worker.backends.backend import DeviceBackend
from spmd_worker.worker.worker_wrapper import resolve_class

logger = logging.getLogger(__name__)

_CLASSES: Final = {
    "cpu": "spmd_worker.worker.backends.cpu.CpuDevice",
    "torch": "spmd_worker.worker.backends.plain_torch.TorchDevice",
    "triton": "spmd_worker.worker.backends.triton.TritonDevice",
}
"""Imported on demand: triton is optional."""


def new_backend(resolved: ResolvedRun, device: torch.device) -> DeviceBackend:
    """The backend of `executor.device_backend`. Raises ConfigError for an invalid class."""
    name = resolved.config.executor.device_backend
    if name == "auto":
        return _automatic(resolved, device)
    return _named(name, resolved, device)


def _automatic(resolved: ResolvedRun, device: torch.device) -> DeviceBackend:
    if device.type != "cuda":
        return _named("cpu" if device.type == "cpu" else "torch", resolved, device)
    if find_spec("triton") is None:
        reason: str | None = "needs the package triton, which comes with CUDA builds of torch"
    else:
        backend = _named("triton", resolved, device)
        reason = backend.unsupported()
        if reason is None:
            return backend
    _warn_once(reason)
    return _named("torch", resolved, device)


def _named(name: str, resolved: ResolvedRun, device: torch.device) -> DeviceBackend:
    try:
        backend_class: type[DeviceBackend] = resolve_class(_CLASSES.get(name, name), DeviceBackend)
    except ValueError as error:
        raise ConfigError(f"executor.device_backend: {error}") from None
    return backend_class(resolved, device)


@cache
def _warn_once(reason: str) -> None:
    logger.warning(
        "plain torch is used on the GPU instead of our Triton kernels: it is many times slower, and a row's last bits "
        "may depend on its batch. executor.device_backend=triton %s",
        reason,
    )


def with_device_backend(resolved: ResolvedRun, name: str) -> ResolvedRun:
    """The run with another `executor.device_backend`, for a worker class that brings its own."""
    executor = replace(resolved.config.executor, device_backend=name)
    # The default of leaves depends on the backend.
    return resolve_again(
        replace(resolved, config=replace(resolved.config, executor=executor)), resolved.config.parallel
    )
