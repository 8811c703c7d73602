"""Tensors of another process on this node, by handles: CUDA's on the same GPU, shared memory on the CPU.

Handles are plain tuples. A GPU's are the arguments of torch's `rebuild_cuda_tensor`, as vLLM sends them, by the GPU's
UUID; no function of a handle is called and nothing is unpickled. The sender keeps its tensors until the call returns.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch
from torch import Tensor
from torch.multiprocessing import reductions

from spmd_worker.base.errors import CheckpointError
from spmd_worker.compat.weight_transfer import TransferRequest
from spmd_worker.model.weights.tensor_checks import WEIGHT_DTYPES, checked_shape

CPU: Final = "cpu"
"""Key of a handle of shared memory, in place of a GPU's UUID."""
_DEVICE_ARGUMENT: Final = 6
"""Place of the device's index among the arguments of `rebuild_cuda_tensor`."""
_NUM_CUDA_ARGUMENTS: Final = 15
_NUM_CPU_ARGUMENTS: Final = 5

Handle = Mapping[str, tuple[Any, ...]]


def ipc_handle(tensor: Tensor) -> Handle:
    """Handle of a contiguous tensor, for `update_weights` of another process. A tensor on the CPU is moved to shared
    memory, if it is not there.
    """
    if tensor.is_cuda:
        _, arguments = reductions.reduce_tensor(tensor.detach())  # type: ignore[no-untyped-call]  # torch's own
        return {str(torch.cuda.get_device_properties(tensor.device).uuid): tuple(arguments)}
    storage = tensor.detach().untyped_storage()
    manager, name, num_bytes = storage._share_filename_cpu_()
    return {CPU: (manager, name, num_bytes, tensor.storage_offset(), str(tensor.dtype).removeprefix("torch."))}


def shared_tensors(request: TransferRequest) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a request, views of the other process's memory. Raises CheckpointError for a handle of another
    device, and for one that is not as large as its tensor.
    """
    if isinstance(request.ipc_handles, Mapping):
        packed, start = _tensor_of("the packed buffer", request.ipc_handles, None), 0
        for name, size, part in zip(request.names, request.tensor_sizes or (), _kinds(request), strict=True):
            dtype, shape = part
            yield name, _shaped(name, packed.view(torch.uint8).view(-1)[start : start + size], dtype, shape)
            start += size
        return
    for name, handle, (dtype, shape) in zip(request.names, request.ipc_handles, _kinds(request), strict=True):
        yield name, _shaped(name, _tensor_of(name, handle, dtype), dtype, shape)


def _kinds(request: TransferRequest) -> Iterator[tuple[torch.dtype, tuple[int, ...]]]:
    known = {str(dtype).removeprefix("torch."): dtype for dtype in WEIGHT_DTYPES.values()}
    for name, dtype, shape in zip(request.names, request.dtype_names, request.shapes, strict=True):
        if dtype not in known:
            raise CheckpointError(f"{name}: has the dtype {dtype!r}, but weights must have one of {', '.join(known)}")
        yield known[dtype], checked_shape(f"{name}: its shape", shape)


def _tensor_of(name: str, handle: Handle, dtype: torch.dtype | None) -> Tensor:
    if not isinstance(handle, Mapping):
        raise CheckpointError(f"{name}: its handle is a {type(handle).__name__}: give what ipc_handle(tensor) returns")
    if CPU in handle:
        if len(handle[CPU]) != _NUM_CPU_ARGUMENTS:
            raise CheckpointError(f"{name}: its handle has {len(handle[CPU])} parts, not {_NUM_CPU_ARGUMENTS}")
        manager, file, num_bytes, offset, held = handle[CPU]
        try:
            storage = torch.UntypedStorage._new_shared_filename_cpu(manager, file, num_bytes)
        except RuntimeError as error:
            raise CheckpointError(
                f"{name}: the memory of its handle is gone ({error}): the sender keeps its tensors until "
                f"update_weights has returned"
            ) from error
        held_dtype = torch.uint8 if dtype is None else dtype
        if dtype is not None and held != str(dtype).removeprefix("torch."):
            raise CheckpointError(f"{name}: dtype_names says {dtype}, but the handle is of {held}")
        return torch.empty(0, dtype=held_dtype).set_(storage)[offset:]
    own = _own_gpus()
    uuid = next((each for each in handle if each in own), None)
    if uuid is None:
        raise CheckpointError(
            f"{name}: its handle is of {', '.join(handle) or 'no device'}, but this rank has {', '.join([*own, CPU])}: "
            f"the trainer's process has to be on the same GPU, or give shared memory of the CPU"
        )
    arguments = list(handle[uuid])
    if len(arguments) != _NUM_CUDA_ARGUMENTS:
        raise CheckpointError(f"{name}: its handle has {len(arguments)} parts, not {_NUM_CUDA_ARGUMENTS}")
    arguments[_DEVICE_ARGUMENT] = own[uuid]
    found: Tensor = reductions.rebuild_cuda_tensor(*arguments)  # type: ignore[no-untyped-call]  # torch's own
    return found


def _own_gpus() -> dict[str, int]:
    """Indices of the GPUs that this process sees, by UUID."""
    number = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return {str(torch.cuda.get_device_properties(index).uuid): index for index in range(number)}


def _shaped(name: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """The first elements of the memory of a handle, in this shape."""
    if tensor.dtype != dtype and tensor.dtype != torch.uint8:
        raise CheckpointError(f"{name}: dtype_names says {dtype}, but the handle is of {tensor.dtype}")
    num_elements = torch.Size(shape).numel()
    if tensor.is_cuda and tensor.dtype == dtype and tuple(tensor.shape) == shape:
        return tensor
    flat = tensor.view(-1).view(torch.uint8)[: num_elements * dtype.itemsize]
    if flat.numel() < num_elements * dtype.itemsize:
        raise CheckpointError(f"{name}: its handle has {flat.numel()} bytes, too few for {dtype} {list(shape)}")
    # A part of a packed buffer may be off its dtype's alignment.
    aligned = flat if flat.storage_offset() % dtype.itemsize == 0 else flat.clone()
    return aligned.view(dtype).view(shape)
