"""Releases the device memory of adapters' matrices, which go to host memory meanwhile, and restores them."""

import torch
from torch import Tensor

from spmd_worker.model.adapters.loaded import LoadedAdapters
from spmd_worker.model.weight_memory import host_copy


class AdapterMemory:
    """The matrices of one rank's loaded adapters; `loaded` None has none. Matrices in memory of the host, as kernels of
    the CPU have them, stay where they are. Adapters are loaded and removed in either state, not between `copy_to_host`
    and `release`, nor between `allocate` and `restore`.
    """

    def __init__(self, loaded: LoadedAdapters | None = None) -> None:
        self._loaded = loaded
        self._device: torch.device | None = None
        self.is_allocated = True

    @property
    def num_bytes(self) -> int:
        """Bytes that `release` frees or `allocate` takes."""
        return sum(tensor.nbytes for tensor in self._tensors())

    def copy_to_host(self) -> list[Tensor]:
        """Copies for `release`."""
        return list(map(host_copy, self._tensors()))

    def release(self, host: list[Tensor]) -> None:
        """Replace the matrices by their copies: no step may use them."""
        assert self.is_allocated, "restore comes first"
        self._device = next((tensor.device for tensor in self._tensors()), None)
        self._replace(host)
        self.is_allocated = False

    def allocate(self) -> list[Tensor]:
        """Copies on the device for `restore`. Nothing changes."""
        return [tensor.to(self._device or tensor.device, copy=True) for tensor in self._tensors()]

    def restore(self, tensors: list[Tensor]) -> None:
        """Make `tensors` the matrices."""
        self._replace(tensors)
        self.is_allocated = True

    def _tensors(self) -> list[Tensor]:
        return [] if self._loaded is None else [each for stack in self._loaded.stacks for each in stack.tensors()]

    def _replace(self, tensors: list[Tensor]) -> None:
        rest = iter(tensors)
        for stack in [] if self._loaded is None else self._loaded.stacks:
            stack.replace([next(rest) for _ in stack.tensors()])
