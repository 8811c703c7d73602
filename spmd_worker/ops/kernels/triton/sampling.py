"""Launches of sampling_kernels.py."""

import torch
from torch import Tensor

from spmd_worker.ops.kernels.api import Draws, LogitFilters
from spmd_worker.ops.kernels.triton import sampling_kernels
from spmd_worker.ops.kernels.triton.launching import power_of_two


def argmax(rows: Tensor) -> tuple[Tensor, Tensor]:
    """[R, V] -> float32 [R], int64 [R]: `Kernels.argmax`."""
    rows = _contiguous_rows(rows)
    num_rows, size = rows.shape
    values = torch.empty(num_rows, dtype=torch.float32, device=rows.device)
    columns = torch.empty(num_rows, dtype=torch.int64, device=rows.device)
    num_parts = -(-size // sampling_kernels.PART)
    if num_rows:
        keys = torch.empty((num_rows, num_parts), dtype=torch.int64, device=rows.device)
        sampling_kernels.part_maxima[(num_rows, num_parts)](
            *(rows, keys, size, rows.stride(0), num_parts),
            PART=sampling_kernels.PART,
            BLOCK=sampling_kernels.BLOCK,
            **sampling_kernels.LAUNCH,
        )
        sampling_kernels.join_maxima[(num_rows,)](
            *(keys, values, columns, num_parts), PARTS=power_of_two(num_parts), **sampling_kernels.SMALL_LAUNCH
        )
    return values, columns


def top_logits(logits: Tensor, count: int) -> Tensor:
    """[R, V] -> float64 [R, count, 2]: `Kernels.top_logits`."""
    logits = _contiguous_rows(logits)
    num_blocks = -(-logits.shape[1] // sampling_kernels.BLOCK)
    pairs = torch.full((len(logits), count, 2), -1.0, dtype=torch.float64, device=logits.device)
    if logits.numel() and count:
        sampling_kernels.top_logits[(len(logits),)](
            *(logits, pairs, logits.shape[1], logits.stride(0), count, num_blocks),
            BLOCK=sampling_kernels.BLOCK,
            BLOCKS=power_of_two(num_blocks),
            **sampling_kernels.LAUNCH,
        )
    return pairs


def random_bits(keys: Tensor, step: int) -> Tensor:
    """Int64 [3, R] -> int64 [R]: `Kernels.random_bits`."""
    bits = torch.empty(keys.shape[1], dtype=torch.int64, device=keys.device)
    if len(bits):
        sampling_kernels.random_bits[(len(bits),)](keys, bits, step, len(bits), **sampling_kernels.SMALL_LAUNCH)
    return bits


def draw(logits: Tensor, draws: Draws) -> tuple[Tensor, Tensor]:
    """[R, V] -> int64 [R], float32 [R]: `Kernels.draw`."""
    logits = _contiguous_rows(logits)
    maxima, ids = argmax(logits)
    if not len(ids):
        return ids, maxima
    sums = prob_sums(logits, maxima, draws.factors)
    num_pieces = sums.shape[1]
    sampling_kernels.draw[(len(ids),)](
        *(logits, maxima, ids, draws.factors, sums, draws.keys, ids, draws.step, draws.otherwise, len(ids)),
        *(logits.shape[1], logits.stride(0), num_pieces),
        PIECE=sampling_kernels.PIECE,
        PIECES=power_of_two(num_pieces),
        **sampling_kernels.LAUNCH,
    )
    return ids, maxima


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
        lists = torch.empty((len(logits), sampling_kernels.LISTED), dtype=torch.float32, device=logits.device)
        sampling_kernels.filter_logits[(len(logits),)](
            *(logits, *(each.contiguous() for each in filters.tensors()), lists, logits.shape[1], logits.stride(0)),
            BLOCK=sampling_kernels.FILTER_BLOCK,
            LISTED=sampling_kernels.LISTED,
            **sampling_kernels.FILTER_LAUNCH,
        )


def _contiguous_rows(logits: Tensor) -> Tensor:
    return logits if logits.stride(1) == 1 else logits.contiguous()
