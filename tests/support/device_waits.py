"""Counts operations that make the host wait for a CUDA device, on the meta device, whose tensors have no values.

`DeviceWaits` looks at each operation. A read-back is a copy to the host, a number taken out of a tensor, or an
operation whose result is as large as values say; what it reads is zero, so that the code goes on and the next one is
counted too. An upload for which the host waits is a copy from the host without `non_blocking`, and a tensor of the host
that torch copies where it is given beside one of the device. A list that names places is copied too, and is not seen.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

SIZED_BY_VALUES = ("nonzero", "unique", "unique_dim", "_unique2", "unique_consecutive", "masked_select", "bincount")
PLACES = ("index", "index_put", "index_put_", "_index_put_impl_")
COPIES_ALONG = (*PLACES, "where")
"""Operations that copy what they are given on the host."""


class DeviceWaits(TorchDispatchMode):
    """Notes the names of the operations."""

    def __init__(self) -> None:
        super().__init__()
        self.read_backs: list[str] = []
        self.uploads: list[str] = []
        self.num_bytes_up = 0
        """Copies from the host, waited for or not."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        del types
        kwargs = kwargs or {}
        name = function.overloadpacket.__name__
        # In inference mode operations come here before torch has made simpler ones of them.
        if torch.is_inference_mode_enabled():
            with self:
                result = function.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        tensors = _tensors_of((args, kwargs))
        is_on_device = [each.is_meta for each in tensors]
        if name == "_local_scalar_dense" and all(is_on_device):
            self.read_backs.append(name)
            return torch.zeros((), dtype=tensors[0].dtype).item()
        if name in SIZED_BY_VALUES and any(is_on_device):
            self.read_backs.append(name)
            args = [torch.zeros_like(each, device="cpu") if isinstance(each, Tensor) else each for each in args]
            return _as_if_on_device(function(*args, **kwargs))
        if name in PLACES and any(each.is_meta and each.dtype == torch.bool for each in _tensors_of(args[1])):
            self.read_backs.append(name)
            return args[0].flatten()[:0] if name == "index" else args[0]
        if (
            name == "_to_copy"
            and torch.device(kwargs.get("device") or tensors[0].device).type != tensors[0].device.type
        ):
            if tensors[0].is_meta:
                self.read_backs.append(name)
                return torch.zeros(tensors[0].shape, dtype=kwargs.get("dtype") or tensors[0].dtype)
            self.num_bytes_up += tensors[0].nbytes
            if not kwargs.get("non_blocking"):
                self.uploads.append(name)
        if name == "copy_" and is_on_device == [False, True]:
            self.read_backs.append(name)
            return tensors[0].zero_()
        if name in COPIES_ALONG and len(set(is_on_device)) > 1:
            self.uploads.append(name)
        return function(*args, **kwargs)


def _tensors_of(values: Any) -> list[Tensor]:
    return [each for each in tree_leaves(values) if isinstance(each, Tensor)]


def _as_if_on_device(result: Any) -> Any:
    if isinstance(result, Tensor):
        return torch.empty_like(result, device="meta")
    return tuple(_as_if_on_device(each) for each in result)
