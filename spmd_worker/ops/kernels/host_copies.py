"""Asynchronous copies between host and device."""

from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_ALIGNMENT: Final = 16
"""Bytes: Triton compiles a kernel again for a tensor that is not aligned."""
_DTYPES: Final = {
    "int32": torch.int32,
    "int64": torch.int64,
    "float32": torch.float32,
    "float64": torch.float64,
}


def to_device(numbers: Tensor, device: torch.device) -> Tensor:
    """Copy a host tensor to `device`; returns the tensor itself if that is the CPU.

    A copy to a CUDA device goes through pinned memory: from other memory the host would wait for all that the device
    has queued. torch reuses that memory only after the copy.
    """
    # A trainer may have made the device torch's default: then the tensor is there already.
    if device.type == "cuda" and numbers.device.type == "cpu":
        numbers = numbers.pin_memory()
    return numbers.to(device, non_blocking=True)


def send(arrays: Sequence[NDArray[Any]], device: torch.device) -> list[Tensor]:
    """Copy arrays of 32 or 64 bits an element to `device`, in one copy; each result has its array's shape and dtype."""
    starts = [0]
    for each in arrays:
        starts.append(starts[-1] + -(-each.nbytes // _ALIGNMENT) * _ALIGNMENT)
    packed = np.zeros(starts[-1], dtype=np.uint8)
    for start, each in zip(starts, arrays):
        packed[start : start + each.nbytes] = np.ascontiguousarray(each).reshape(-1).view(np.uint8)
    sent = to_device(torch.from_numpy(packed), device)
    return [
        sent[start : start + each.nbytes].view(_DTYPES[each.dtype.name]).view(each.shape)
        for start, each in zip(starts, arrays)
    ]


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
