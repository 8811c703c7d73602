"""Asynchronous copies between host and device."""

from collections.abc import Callable

import torch
from torch import Tensor


def to_device(numbers: Tensor, device: torch.device) -> Tensor:
    """Copy a host tensor to `device`; returns the tensor itself if that is the CPU.

    A copy to a CUDA device goes through pinned memory: from other memory the host would wait for all that the device
    has queued. torch reuses that memory only after the copy.
    """
    # A trainer may have made the device torch's default: then the tensor is there already.
    if device.type == "cuda" and numbers.device.type == "cpu":
        numbers = numbers.pin_memory()
    return numbers.to(device, non_blocking=True)


def from_device(numbers: Tensor) -> Callable[[], Tensor]:
    """Start a copy to the host; the returned function waits for it and returns the host tensor.

    A copy from a CUDA device goes to pinned memory, and the wait is for what is queued until now. Other devices are
    copied from when the function is called.
    """
    if numbers.device.type != "cuda":
        return numbers.cpu
    on_host = torch.empty_like(numbers, device="cpu", pin_memory=True)
    on_host.copy_(numbers, non_blocking=True)
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch's
    event.record()

    def wait() -> Tensor:
        event.synchronize()
        return on_host

    return wait
