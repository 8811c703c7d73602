"""Temperature, min-p, top-k and top-p.

Each filter finds a threshold for its row and drops everything below it: ties are kept or dropped together, and the
result depends on the row's values alone, not on the order of equal values in a sort. The order is vLLM's: min-p, top-k,
then top-p of what top-k kept. Top-p adds up fixed-point probability weights (`Kernels.prob_sums`).

K: rows; V: vocabulary.
"""

import math
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spmd_worker.ops.kernels.api import Kernels, LogitFilters
from spmd_worker.ops.kernels.host_copies import send
from spmd_worker.replica.sequence.sampling_params import SamplingParams

_MAX_TEMPERATURE: Final = 1e30
"""Higher temperatures make no difference: all kept tokens are equally likely. Float32 cannot go much further."""

_LOG2_E: Final = math.log2(math.e)
_MAX_FACTOR: Final = 1e38
"""Lower temperatures make no difference: all but the maximum have weight 0. Float32 cannot go much further."""


def bounded_temperature(temperature: float) -> float:
    """The divisor of logits."""
    return min(temperature, _MAX_TEMPERATURE)


def exponent_factors(temperatures: Sequence[float]) -> NDArray[np.float32]:
    """Float32 [K]: factors of logits as exponents of two."""
    values = [min(_LOG2_E / bounded_temperature(each), _MAX_FACTOR) for each in temperatures]
    return np.array(values, dtype=np.float32)


def filter_numbers(samplings: Sequence[SamplingParams]) -> tuple[NDArray[Any], ...]:
    """Numbers of `filter_logits`: factors, distances below the maximum, float32 [K]; top-k, int64; top-p, float64."""
    below = [
        bounded_temperature(each.temperature) * math.log(each.min_p) if each.min_p > 0.0 else -math.inf
        for each in samplings
    ]
    return (
        exponent_factors([each.temperature for each in samplings]),
        np.array(below, dtype=np.float32),
        np.array([max(0, each.top_k) for each in samplings], dtype=np.int64),
        np.array([each.top_p for each in samplings], dtype=np.float64),
    )


def filter_logits(
    kernels: Kernels, logits: Tensor, samplings: Sequence[SamplingParams], numbers: Sequence[Tensor] | None = None
) -> None:
    """Set dropped logits to minus infinity, in place; float32 [K, V], of rows that sample and have filters. `numbers`:
    their `filter_numbers`, if the device has them.

    A row without a finite maximum, which has nothing to sample, may get any values.
    """
    factors, below, top_k, top_p = numbers or send(filter_numbers(samplings), logits.device)
    maxima = torch.nan_to_num(kernels.argmax(logits)[0], nan=0.0, posinf=0.0, neginf=0.0)
    kernels.filter_(logits, LogitFilters(maxima, factors, maxima + below, top_k, top_p))
