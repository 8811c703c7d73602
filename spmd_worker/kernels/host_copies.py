"""Numbers of the host on their way to the device: the host does not wait until they are there."""

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
