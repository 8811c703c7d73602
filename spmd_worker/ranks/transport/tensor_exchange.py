"""Exchange of tensors' bytes, from rank to rank, over a group of a trainer: gloo in host memory, NCCL on GPUs.

Only lengths and bytes are sent, so nothing is unpickled.
"""

from collections.abc import Mapping
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor

WAITS_FOR_RANKS: Final = True
"""Marker for the watchdog, which finds it in the module of a frame."""


class TensorExchange:
    """`group` is a group of `torch.distributed`; None: the default one. Without any, this process is alone. NCCL is
    used, where the group has it, for weights on the GPU `device`.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, device: torch.device | None = None) -> None:
        self._group = group
        is_alone = group is None and not (dist.is_available() and dist.is_initialized())
        self.rank = 0 if is_alone else dist.get_rank(group)
        self.size = 1 if is_alone else dist.get_world_size(group)
        kinds = "" if is_alone else dist.get_backend_config(group)
        is_on_gpu = device is not None and device.type == "cuda"
        has_nccl = "nccl" in kinds and (is_on_gpu or "cpu:gloo" not in kinds)
        self.device = torch.device("cuda", torch.cuda.current_device()) if has_nccl else torch.device("cpu")
        """Device of the exchanged bytes."""

    def gather(self, payload: bytes) -> list[bytes]:
        """Every rank's payload, in rank order; lengths may differ."""
        if self.size == 1:
            return [payload]
        own = torch.tensor([len(payload)], device=self.device)
        lengths = [torch.zeros_like(own) for _ in range(self.size)]
        dist.all_gather(lengths, own, group=self._group)
        sizes = [int(each) for each in lengths]
        padded = torch.zeros(max(*sizes, 1), dtype=torch.uint8)
        padded[: len(payload)] = torch.frombuffer(bytearray(payload or b"\0"), dtype=torch.uint8)[: len(payload)]
        padded = padded.to(self.device)
        rows = [torch.empty_like(padded) for _ in range(self.size)]
        dist.all_gather(rows, padded, group=self._group)
        return [row[:size].cpu().numpy().tobytes() for row, size in zip(rows, sizes, strict=True)]

    def exchange(self, outgoing: Mapping[int, Tensor], incoming: Mapping[int, int]) -> dict[int, Tensor]:
        """Send uint8 [n] on `device` to ranks, and receive `incoming` bytes from ranks, by their number in the group.
        Every rank of the group calls this, with what matches.
        """
        received = {rank: torch.empty(size, dtype=torch.uint8, device=self.device) for rank, size in incoming.items()}
        operations = [
            *(self._operation(dist.isend, tensor, rank) for rank, tensor in outgoing.items()),
            *(self._operation(dist.irecv, tensor, rank) for rank, tensor in received.items()),
        ]
        if operations:
            for work in dist.batch_isend_irecv(operations):
                work.wait()
        return received

    def _operation(self, kind: object, tensor: Tensor, rank: int) -> dist.P2POp:
        peer = rank if self._group is None else dist.get_global_rank(self._group, rank)
        return dist.P2POp(kind, tensor, peer, self._group)  # type: ignore[arg-type]  # torch types it as any callable
