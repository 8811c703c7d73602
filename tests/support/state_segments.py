"""Steps of sequences with states: segments by hand, and tokens cut into steps."""

from collections.abc import Iterator, Sequence

import torch

from spmd_worker.ops.kernels.recurrent import StateSegments

CHUNKS = (1, 7, 16, 63, 64, 65)
"""Lengths of steps that every recurrent kernel and model is cut into."""


def segments_of(*rows: tuple[int, int, int]) -> StateSegments:
    """Of (slot, tokens, first position) of each sequence."""
    starts = [0]
    for _, count, _ in rows:
        starts.append(starts[-1] + count)
    columns = ([slot for slot, _, _ in rows], starts, [first for _, _, first in rows])
    return StateSegments(*(torch.tensor(each, dtype=torch.int32) for each in columns))


def steps_of(counts: Sequence[int], chunk: int) -> Iterator[list[tuple[int, int, int]]]:
    """Steps of sequences of `counts` tokens, each `chunk` tokens at most: (sequence, first position, tokens)."""
    for first in range(0, max(counts), chunk):
        yield [(row, first, min(chunk, count - first)) for row, count in enumerate(counts) if count > first]
