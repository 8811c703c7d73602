"""What cuts the distribution: min-p, top-k, top-p; and what temperature makes of logits.

Each filter finds a threshold for its row and drops everything below it, so that ties are kept or dropped together and
the outcome depends on the row's values alone, not on the order in which a sort leaves equal ones. The order is vLLM's:
min-p, top-k, then top-p of what top-k left. What a token weighs is its mass, a whole number (`Kernels.masses`).

K: rows; V: vocabulary.
"""

import math
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from spmd_worker.ops.kernels.api import Cuts, Kernels
from spmd_worker.ops.kernels.host_copies import to_device
from spmd_worker.replica.sequence.sampling_params import SamplingParams

_MOST_TEMPERATURE: Final = 1e30
"""Hotter is as hot: all tokens that are left are equally likely. Float32 has no larger powers to spare."""

_LOG2_E: Final = math.log2(math.e)
_MOST_FACTOR: Final = 1e38
"""Colder is as cold: all but the largest have no mass. Float32 has hardly larger numbers."""


def bounded_temperature(temperature: float) -> float:
    """What logits are divided by."""
    return min(temperature, _MOST_TEMPERATURE)


def factors_of(temperatures: Sequence[float], device: torch.device) -> Tensor:
    """Float32 [K]: what logits are multiplied by before they are powers of two."""
    values = [min(_LOG2_E / bounded_temperature(each), _MOST_FACTOR) for each in temperatures]
    return to_device(torch.tensor(values, dtype=torch.float32), device)


def filter_logits(kernels: Kernels, logits: Tensor, samplings: Sequence[SamplingParams]) -> None:
    """Set what the filters drop to minus infinity, in place; float32 [K, V], of rows that draw and have filters.

    A row without a finite largest logit, which has nothing to draw, is left with any values.
    """
    device = logits.device
    largest = torch.nan_to_num(kernels.largest(logits)[0], nan=0.0, posinf=0.0, neginf=0.0)
    below = [
        bounded_temperature(each.temperature) * math.log(each.min_p) if each.min_p > 0.0 else -math.inf
        for each in samplings
    ]
    cuts = Cuts(
        largest=largest,
        factors=factors_of([each.temperature for each in samplings], device),
        lowest=largest + to_device(torch.tensor(below, dtype=torch.float32), device),
        top_k=to_device(torch.tensor([max(0, each.top_k) for each in samplings], dtype=torch.int64), device),
        top_p=to_device(torch.tensor([each.top_p for each in samplings], dtype=torch.float64), device),
    )
    kernels.cut_(logits, cuts)
