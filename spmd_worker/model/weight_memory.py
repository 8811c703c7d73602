"""Releases the memory of a model's weights, and allocates and restores it.

A released weight is replaced by a tensor on the meta device of the same shape and dtype: reading or writing it is an
error, not a crash. Names, slices and rotary frequencies stay. Addresses of weights change: `DecoderStack.join_layers`
and stacked experts read them again. Weights that are parts of one tensor are so again.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from spmd_worker.model.decoder import DecoderForCausalLM
from spmd_worker.model.drafts.draft_head import DraftHead
from spmd_worker.ops.kernels.api import Kernels


@dataclass(frozen=True, slots=True)
class _Released:
    """A released weight. `host` is a copy of its values, None if they were dropped. `stride` None: oneDNN's layout.
    `is_buffer`: its values are kept, because no trainer passes them (`WeightStore.buffer_names`). `part_of`: number of
    the storage that it shares with others, bytes of that, and its offset there, in elements; None if it has its own.
    """

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    stride: tuple[int, ...] | None
    host: Tensor | None
    is_buffer: bool
    part_of: tuple[int, int, int] | None = None

    def empty(self, device: torch.device) -> Tensor:
        if self.stride is None:
            return torch.empty(self.shape, dtype=self.dtype, device=device)
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device)


class WeightMemory:
    """The weights of one rank's model, or of a head that drafts, allocated at first, `num_bytes` in all."""

    def __init__(self, model: DecoderForCausalLM | DraftHead, kernels: Kernels) -> None:
        # Quantised weights are never in oneDNN's layout.
        self._model, self._kernels = model, kernels.plain
        self.num_bytes = sum(tensor.nbytes for tensor in self._tensors())
        self._released: list[_Released] | None = None

    @property
    def is_allocated(self) -> bool:
        return self._released is None

    def copy_to_host(self) -> list[Tensor]:
        """Copies of the weights for `release`, pinned for a CUDA device, so that copies back are faster."""
        return [host_copy(tensor) for tensor in self._tensors()]

    def release(self, host: list[Tensor] | None) -> None:
        """Release the memory, if it is allocated. `host`: values to restore, of `copy_to_host`; None: the weights will
        be loaded again, so earlier copies are dropped too. Buffers, a few numbers per layer, are always kept.
        """
        if self._released is None:
            tensors = self._tensors()
            buffers = {id(self._model.get_parameter(name)) for name in self._model.weights.buffer_parameters}
            copies: list[Tensor | None] = [None] * len(tensors) if host is None else [*host]
            if host is None:
                # Restored on the CPU, the copies are the buffers themselves, which later updates write.
                with torch.inference_mode(False):
                    for index, tensor in enumerate(tensors):
                        copies[index] = tensor.detach().to("cpu", copy=True) if id(tensor) in buffers else None
            self._released = [
                _Released(
                    *(tensor.shape, tensor.dtype, tensor.device, None if tensor.is_mkldnn else tensor.stride()),
                    host=copy,
                    is_buffer=id(tensor) in buffers,
                    part_of=part,
                )
                for tensor, copy, part in zip(tensors, copies, _shared_parts(tensors), strict=True)
            ]
            self._model.model.joined_layers = None
            self._model.forget_addresses()
            self._replace([each.empty(torch.device("meta")) for each in self._released])
        elif host is None:
            self._released = [each if each.is_buffer else replace(each, host=None) for each in self._released]

    def allocate(self) -> list[Tensor]:
        """Tensors for `restore`: the kept values, zeros where they were dropped. The model does not change."""
        assert self._released is not None, "release comes first"
        storages: dict[int, Tensor] = {}
        with torch.inference_mode(False):
            return [self._new(each, storages) for each in self._released]

    def restore(self, tensors: list[Tensor]) -> bool:
        """Make `tensors` the weights. Returns whether all values were kept; else all but buffers have to be loaded."""
        assert self._released is not None, "release comes first"
        is_kept = all(each.host is not None for each in self._released)
        self._released = None
        self._replace(tensors)
        self._model.forget_addresses()
        self._model.model.join_layers()
        return is_kept

    def _new(self, released: _Released, storages: dict[int, Tensor]) -> Tensor:
        """`storages` are those made so far, by the numbers of `_Released.part_of`."""
        if released.part_of is not None and released.stride is not None:
            number, num_bytes, offset = released.part_of
            if number not in storages:
                storages[number] = torch.empty(num_bytes, dtype=torch.uint8, device=released.device)
            part = storages[number].view(released.dtype).as_strided(released.shape, released.stride, offset)
            return part.zero_() if released.host is None else part.copy_(released.host, non_blocking=True)
        if released.host is not None:
            return released.host.to(released.device, non_blocking=True)
        zeros = released.empty(released.device).zero_()
        return self._kernels.pack(zeros) if released.stride is None else zeros

    def _tensors(self) -> list[Tensor]:
        """Parameters and buffers, each once, in the order of the modules."""
        return list({id(tensor): tensor for _, _, tensor in self._attributes()}.values())

    def _attributes(self) -> Iterator[tuple[nn.Module, str, Tensor]]:
        for module in self._model.modules():
            for tensors in (module._parameters, module._buffers):
                for name, tensor in tensors.items():
                    if tensor is not None:
                        yield module, name, tensor

    def _replace(self, tensors: list[Tensor]) -> None:
        """Replace all of `_tensors`; a weight that two modules share stays shared."""
        attributes = list(self._attributes())
        order = {id(tensor): None for _, _, tensor in attributes}
        made = {key: nn.Parameter(tensor, requires_grad=False) for key, tensor in zip(order, tensors, strict=True)}
        for module, name, tensor in attributes:
            new = made[id(tensor)]
            if name in module._parameters:
                module._parameters[name] = new
            else:
                module._buffers[name] = new.data


def _shared_parts(tensors: list[Tensor]) -> list[tuple[int, int, int] | None]:
    """`_Released.part_of` of each."""
    storages = [None if tensor.is_mkldnn else tensor.untyped_storage().data_ptr() for tensor in tensors]
    counts = Counter(storages)
    return [
        None
        if storage is None or counts[storage] < 2
        else (storage, tensor.untyped_storage().nbytes(), int(tensor.storage_offset()))
        for tensor, storage in zip(tensors, storages, strict=True)
    ]


def host_copy(tensor: Tensor) -> Tensor:
    """A copy in host memory, pinned for a CUDA device."""
    if not tensor.is_cuda:
        return tensor.detach().clone()
    copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, pin_memory=True)
    return copy.copy_(tensor.detach())
