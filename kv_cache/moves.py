"""Moves of one step within the tensors of a device and between them and the host: of blocks, and of states.

Shapes: tensors of the device [layers, number on the device, *shape], of the host [layers, number on the host, *shape].
"""

from collections.abc import Sequence
from typing import Final, Protocol

from torch import Tensor

from kv_cache.host_memory import HostMemory, Pairs, indices

_TEMPORARY_BYTES: Final = 2**28


class Moves(Protocol):
    """Pairs (from, to) of one step: `BlockOps` and `StateOps`, whose contract is that of `BlockOps`."""

    @property
    def swap_out(self) -> Pairs: ...

    @property
    def copy(self) -> Pairs: ...

    @property
    def swap_in(self) -> Pairs: ...


def check_moves(noun: str, moves: Moves, num_on_device: int, num_on_host: int) -> None:
    """Raise ValueError naming the block or state (`noun`) if a pair of any kind is outside the memories, one of the
    host receives twice, or one of the device receives twice, by copy or swap_in.
    """
    device, host = ("device", num_on_device), ("host", num_on_host)
    received: dict[int, tuple[str, int]] = {}
    _check_pairs(noun, "swap_out", moves.swap_out, device, host, {})
    _check_pairs(noun, "copy", moves.copy, device, device, received)
    _check_pairs(noun, "swap_in", moves.swap_in, host, device, received)


def run_moves(moves: Moves, tensors: Sequence[Tensor], hosts: Sequence[HostMemory]) -> None:
    """Run checked moves in the order swap out, copy, swap in, each tensor with its host memory by itself: tensors have
    no memory in common.
    """
    for tensor, host in zip(tensors, hosts, strict=True):
        host.move_out(moves.swap_out)
        (_copy_each if tensor.device.type == "cpu" else _copy_at_once)(moves.copy, tensor)
        host.move_in(moves.swap_in)


def _check_pairs(
    noun: str,
    kind: str,
    pairs: Pairs,
    source_memory: tuple[str, int],
    destination_memory: tuple[str, int],
    received: dict[int, tuple[str, int]],
) -> None:
    """`received`: destination -> (kind, source) of the move it receives; the pairs are added."""
    for source, destination in pairs:
        for number, (memory, count) in ((source, source_memory), (destination, destination_memory)):
            if not 0 <= number < count:
                raise ValueError(
                    f"{kind} of {noun} {source} to {destination}: {memory} {noun} {number} does not exist, "
                    f"there are {count}"
                )
        if destination in received:
            other_kind, other_source = received[destination]
            raise ValueError(
                f"{kind} of {noun} {source} to {destination}: {destination_memory[0]} {noun} {destination} "
                f"already receives {noun} {other_source} by {other_kind} in this step"
            )
        received[destination] = (kind, source)


def _copy_each(pairs: Pairs, tensor: Tensor) -> None:
    """Copy within host memory: only a source that is also a destination is cloned first."""
    destinations = dict.fromkeys(destination for _, destination in pairs)
    cloned = {source: tensor[:, source].clone() for source, _ in pairs if source in destinations}
    for source, destination in pairs:
        tensor[:, destination] = cloned[source] if source in cloned else tensor[:, source]


def _copy_at_once(pairs: Pairs, tensor: Tensor) -> None:
    """Copy within a device's memory, one operation for all layers of the tensor: gathers all sources, then scatters.

    Needs a temporary of what is copied, [layers, num_pairs, *shape]; if it would be big, a layer's at a time.
    """
    if not pairs:
        return
    sources = indices([source for source, _ in pairs], tensor.device)
    destinations = indices([destination for _, destination in pairs], tensor.device)
    num_bytes = len(pairs) * tensor.nbytes // tensor.shape[1]
    if num_bytes <= _TEMPORARY_BYTES:
        tensor.index_copy_(1, destinations, tensor.index_select(1, sources))
        return
    for layer in tensor:
        layer.index_copy_(0, destinations, layer.index_select(0, sources))
