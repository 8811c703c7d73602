"""Steps of sequences with states: segments by hand, and tokens cut into steps."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

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


def check_scan_steps(scanned: Callable[[list[Any], int], list[Tensor]], inputs: list[Any]) -> None:
    """Outputs and states have the same bits with sequences cut into steps, and alone. `scanned` takes the inputs of
    sequences, the first of 130 tokens, and a length of steps -> outputs of each sequence, then all states.
    """
    expected = scanned(inputs, 130)
    assert not expected[-1].isnan().any()
    for chunk in CHUNKS:
        assert all(map(torch.equal, scanned(inputs, chunk), expected)), chunk
    for row, each in enumerate(inputs):
        alone, states = scanned([each], 130)
        assert torch.equal(alone, expected[row])
        assert torch.equal(states[0], expected[-1][row])
    # Control: a scan that forgets what came before.
    parts = [tuple(each[part] for each in inputs[0]) for part in (slice(65), slice(65, None))]
    assert not torch.equal(torch.cat([scanned([part], 130)[0] for part in parts]), expected[0])


def check_nan_of_others(scanned: Callable[[list[Any], int], list[Tensor]], inputs: list[Any]) -> None:
    """The first of two sequences has the same outputs and states beside one of NaN."""
    expected = scanned(inputs, 20)
    found = scanned([inputs[0], tuple(torch.full_like(each, torch.nan) for each in inputs[1])], 20)
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[-1][0], expected[-1][0])
    assert found[-1][1].isnan().all()
