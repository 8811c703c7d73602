"""What cuts the distribution: min-p, top-k, top-p.

Each filter finds a threshold for its row and drops everything below it, so that ties are kept or dropped together and
the outcome depends on the row's values alone, not on the order in which a sort leaves equal ones. The order is vLLM's:
min-p, top-k, then top-p of what top-k left.

V: vocabulary. All logits are already divided by the temperature.
"""

import math

import torch
from torch import Tensor

from spmd_worker.sampling.running_sums import running_sums
from spmd_worker.sequence.sampling_params import SamplingParams

_NUM_CANDIDATES = 1024
"""How many of the likeliest are sorted first; only when they do not hold `top_p` of the mass, all are."""


def filter_logits(values: Tensor, sampling: SamplingParams) -> None:
    """Set what the filters drop to minus infinity, in place; float32 [V]."""
    threshold = -math.inf
    if sampling.min_p > 0.0:
        threshold = float(values.max()) + math.log(sampling.min_p)
    if 0 < sampling.top_k < values.numel():
        threshold = max(threshold, float(torch.topk(values, sampling.top_k).values[-1]))
    _drop_below(values, threshold)
    if sampling.top_p < 1.0:
        _drop_below(values, _nucleus_threshold(values, sampling.top_p))


def _drop_below(values: Tensor, threshold: float) -> None:
    if threshold > -math.inf:
        values[values < threshold] = -torch.inf


def _nucleus_threshold(values: Tensor, top_p: float) -> float:
    """The smallest logit among the fewest likeliest tokens that hold `top_p` of the mass."""
    weights = torch.exp((values - values.max()).double())
    target = top_p * float(running_sums(weights)[-1])
    num_candidates = min(_NUM_CANDIDATES, values.numel())
    while True:
        likeliest = torch.topk(values, num_candidates).values
        mass = running_sums(torch.exp((likeliest - likeliest[0]).double()))
        if num_candidates == values.numel() or float(mass[-1]) >= target:
            index = int(torch.searchsorted(mass, torch.tensor(target, dtype=mass.dtype, device=mass.device)))
            return float(likeliest[min(index, num_candidates - 1)])
        num_candidates = values.numel()
