"""Launches of sampling_kernels.py."""

import torch
from torch import Tensor

from spmd_worker.ops.kernels.api import LogitFilters
from spmd_worker.ops.kernels.triton import sampling_kernels
from spmd_worker.ops.kernels.triton.launching import power_of_two


def prob_sums(logits: Tensor, maxima: Tensor, factors: Tensor) -> Tensor:
    """[R, V], float32 [R], float32 [R] -> int64 [R, pieces]: `Kernels.prob_sums`."""
    logits = _contiguous_rows(logits)
    num_rows, size = logits.shape
    num_pieces = -(-size // sampling_kernels.PIECE)
    sums = torch.empty((num_rows, num_pieces), dtype=torch.int64, device=logits.device)
    if sums.numel():
        sampling_kernels.prob_sums[(num_rows, num_pieces)](
            *(logits, maxima.contiguous(), factors.contiguous(), sums, size, logits.stride(0), num_pieces),
            PIECE=sampling_kernels.PIECE,
            **sampling_kernels.LAUNCH,
        )
    return sums


def invert_cdf(logits: Tensor, maxima: Tensor, factors: Tensor, sums: Tensor, targets: Tensor) -> Tensor:
    """`sums` from `prob_sums`, targets int64 [R] -> int64 [R]: `Kernels.invert_cdf`."""
    logits = _contiguous_rows(logits)
    num_pieces = sums.shape[1]
    ids = torch.full_like(targets, -1)
    if logits.numel():
        sampling_kernels.invert_cdf[(len(logits),)](
            *(logits, maxima.contiguous(), factors.contiguous(), sums.contiguous(), targets.contiguous(), ids),
            *(logits.shape[1], logits.stride(0), num_pieces),
            PIECE=sampling_kernels.PIECE,
            PIECES=power_of_two(num_pieces),
            **sampling_kernels.LAUNCH,
        )
    return ids


def count_above(logits: Tensor, values: Tensor) -> Tensor:
    """[R, V], float32 [R] -> int64 [R]: `Kernels.count_above`."""
    logits = _contiguous_rows(logits)
    counts = torch.zeros(len(logits), dtype=torch.int64, device=logits.device)
    if logits.numel():
        sampling_kernels.count_above[(len(logits),)](
            *(logits, values.contiguous(), counts, logits.shape[1], logits.stride(0)),
            BLOCK=sampling_kernels.BLOCK,
            **sampling_kernels.LAUNCH,
        )
    return counts


def forbid_(logits: Tensor, allowed: Tensor, rows: Tensor, mask_rows: Tensor, first_id: int) -> None:
    """[K, V], int32 [M, words], int64 [n], int64 [n]: `Kernels.forbid_`."""
    assert logits.stride(1) == 1, logits.stride()
    num_blocks = -(-logits.shape[1] // sampling_kernels.BLOCK)
    if len(rows) and num_blocks:
        sampling_kernels.forbid[(len(rows), num_blocks)](
            *(logits, allowed.contiguous(), rows.contiguous(), mask_rows.contiguous()),
            *(logits.shape[1], logits.stride(0), first_id, allowed.shape[1]),
            BLOCK=sampling_kernels.BLOCK,
            **sampling_kernels.LAUNCH,
        )


def filter_(logits: Tensor, filters: LogitFilters) -> None:
    """Float32 [R, V]: `Kernels.filter_`."""
    assert logits.dtype == torch.float32, logits.dtype
    assert logits.stride(1) == 1, logits.stride()
    if logits.numel():
        sampling_kernels.filter_logits[(len(logits),)](
            *(logits, *(each.contiguous() for each in filters.tensors()), logits.shape[1], logits.stride(0)),
            BLOCK=sampling_kernels.BLOCK,
            **sampling_kernels.FILTER_LAUNCH,
        )


def _contiguous_rows(logits: Tensor) -> Tensor:
    return logits if logits.stride(1) == 1 else logits.contiguous()
