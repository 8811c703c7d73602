"""Numbers on their way between host and device: the host does not wait until they are there."""

from collections.abc import Callable

import torch
from torch import Tensor


def to_device(numbers: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host, on `device`; itself where that is the CPU.

    A copy to a CUDA device goes through pinned memory: from any other the host would wait for all that the device has
    queued. torch hands that memory out again only when the copy is done, so nobody else writes to it before.
    """
    # Where a trainer has made it torch's default, what is made of a list is on the device already.
    if device.type == "cuda" and numbers.device.type == "cpu":
        numbers = numbers.pin_memory()
    return numbers.to(device, non_blocking=True)


def from_device(numbers: Tensor) -> Callable[[], Tensor]:
    """Have numbers copied to the host when the device has made them: what is returned waits for that and gives them.

    A copy from a CUDA device goes to pinned memory, and the wait is for what was queued until now; from any other the
    host copies when it is asked.
    """
    if numbers.device.type != "cuda":
        return numbers.cpu
    there = torch.empty_like(numbers, device="cpu", pin_memory=True)
    there.copy_(numbers, non_blocking=True)
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch's
    event.record()

    def wait() -> Tensor:
        event.synchronize()
        return there

    return wait
