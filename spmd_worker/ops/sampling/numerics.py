"""Region of the sampler: what it computes beside kernels, and its random numbers."""

from pathlib import Path

from spmd_worker.base.numerical_policy import Region, source_version
from spmd_worker.ops.kernels import random
from spmd_worker.ops.kernels.torch_version import torch_version


def choice_region() -> Region:
    """The region of filters, penalties, log-probabilities and draws."""
    sources = source_version(str(Path(__file__).parent), random.__file__)
    return Region("counter-based random numbers", f"{torch_version()}, {sources}")
