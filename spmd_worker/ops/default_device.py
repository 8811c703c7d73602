"""Torch's default device inside calls: the host, as in a program that has set none."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


def host_by_default() -> AbstractContextManager[Any]:
    """Block in which tensors without a device are made on the host, also after the caller's `set_default_device`."""
    # The context costs every function of torch a call, so it is entered only where it changes something.
    return nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu")
