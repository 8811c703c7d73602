"""The memory of a model's weights, given back and taken again.

Where a weight's memory is given back a tensor without data stands in its place, of the same shape and dtype: whatever
reads or writes it is an error, not a crash. Everything else of a model (names, slices, rotary frequencies) stays.
Addresses that were taken of weights are void: `DecoderStack.join_layers` takes them anew.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from spmd_worker.model.decoder import DecoderForCausalLM
from spmd_worker.ops.kernels.api import Kernels


@dataclass(frozen=True, slots=True)
class _Kept:
    """What has to be made again: `host` is a copy of what it was, or None where that was dropped."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    stride: tuple[int, ...] | None
    """None: in an order of oneDNN's."""
    host: Tensor | None
    is_buffer: bool
    """Stays what it was: no trainer hands it over (`WeightStore.buffer_names`)."""


class WeightMemory:
    """Of one rank's model, whose weights are there at first. `num_bytes` are what they take."""

    def __init__(self, model: DecoderForCausalLM, kernels: Kernels) -> None:
        self._model, self._kernels = model, kernels
        self.num_bytes = sum(tensor.nbytes for tensor in self._tensors())
        self._kept: list[_Kept] | None = None

    @property
    def is_there(self) -> bool:
        """Whether the weights have memory."""
        return self._kept is None

    def copy_to_host(self) -> list[Tensor]:
        """For `give_back`; pinned where the device is CUDA, whose copies back are faster then."""
        return [_host_copy(tensor) for tensor in self._tensors()]

    def give_back(self, host: list[Tensor] | None) -> None:
        """Let the memory go, where it is not gone already. `host`: what the weights are when they come back, of
        `copy_to_host`; None: they will have to be loaded, and copies of before are dropped too, but for buffers, of
        which copies are kept on the host: a few numbers a layer.
        """
        if self._kept is None:
            tensors = self._tensors()
            buffers = {id(self._model.get_parameter(name)) for name in self._model.weights.buffer_parameters}
            copies: list[Tensor | None] = [None] * len(tensors) if host is None else [*host]
            if host is None:
                # They may become the buffers themselves, which later updates write.
                with torch.inference_mode(False):
                    for index, tensor in enumerate(tensors):
                        copies[index] = tensor.detach().to("cpu", copy=True) if id(tensor) in buffers else None
            self._kept = [
                _kept(tensor, copy, id(tensor) in buffers) for tensor, copy in zip(tensors, copies, strict=True)
            ]
            self._model.model.joined_layers = None
            self._put([_without_data(each) for each in self._kept])
        elif host is None:
            self._kept = [each if each.is_buffer else replace(each, host=None) for each in self._kept]

    def take(self) -> list[Tensor]:
        """Memory for all weights, for `restore`: what they were, else zeros. Nothing in the model has changed."""
        assert self._kept is not None, "give_back comes first"
        with torch.inference_mode(False):
            return [self._new(each) for each in self._kept]

    def restore(self, tensors: list[Tensor]) -> bool:
        """Make them the weights. Returns whether they are what they were before; else all but buffers have to be
        loaded.
        """
        assert self._kept is not None, "give_back comes first"
        is_kept = all(each.host is not None for each in self._kept)
        self._kept = None
        self._put(tensors)
        self._model.model.join_layers()
        return is_kept

    def _new(self, kept: _Kept) -> Tensor:
        if kept.host is not None:
            return kept.host.to(kept.device, non_blocking=True)
        if kept.stride is None:
            return self._kernels.pack(torch.zeros(kept.shape, dtype=kept.dtype, device=kept.device))
        return torch.empty_strided(kept.shape, kept.stride, dtype=kept.dtype, device=kept.device).zero_()

    def _tensors(self) -> list[Tensor]:
        """Each once, in the order of the modules."""
        return list({id(tensor): tensor for _, _, tensor in self._places()}.values())

    def _places(self) -> Iterator[tuple[nn.Module, str, Tensor]]:
        for module in self._model.modules():
            for held in (module._parameters, module._buffers):
                for name, tensor in held.items():
                    if tensor is not None:
                        yield module, name, tensor

    def _put(self, tensors: list[Tensor]) -> None:
        """In the places of those that are there; what is one weight in two places stays one."""
        places = list(self._places())
        order = {id(tensor): None for _, _, tensor in places}
        made = {key: nn.Parameter(tensor, requires_grad=False) for key, tensor in zip(order, tensors, strict=True)}
        for module, name, tensor in places:
            new = made[id(tensor)]
            if name in module._parameters:
                module._parameters[name] = new
            else:
                module._buffers[name] = new.data


def _kept(tensor: Tensor, host: Tensor | None, is_buffer: bool) -> _Kept:
    stride = None if tensor.is_mkldnn else tensor.stride()
    return _Kept(tensor.shape, tensor.dtype, tensor.device, stride, host, is_buffer)


def _without_data(kept: _Kept) -> Tensor:
    if kept.stride is None:
        return torch.empty(kept.shape, dtype=kept.dtype, device="meta")
    return torch.empty_strided(kept.shape, kept.stride, dtype=kept.dtype, device="meta")


def _host_copy(tensor: Tensor) -> Tensor:
    if not tensor.is_cuda:
        return tensor.detach().clone()
    copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, pin_memory=True)
    return copy.copy_(tensor.detach())
