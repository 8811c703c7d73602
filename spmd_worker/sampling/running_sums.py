"""Running sums of a distribution, of which the ids that are drawn and cut are looked up.

On the CPU they are float64 sums in the order of ids, a row by one thread: the same bits with any other rows. A GPU adds
in an order that follows the number of rows, and for a single row from run to run; there shares are whole numbers, whose
sums are exact in any order.

K: rows; V: columns.
"""

from typing import Final

import torch
from torch import Tensor

_SUM_BITS: Final = 62


def running_sums(shares: Tensor, out: Tensor | None = None) -> Tensor:
    """Float64 [K, V] or [V], from 0 to 1 -> the sums along the last dimension up to each column, in `out` if it is
    given. Never falling, and the same where a share is 0, so that nothing without a share is found by `searchsorted`.
    """
    if shares.device.type == "cpu":
        return torch.cumsum(shares, dim=-1, out=out)
    sums = exact_running_sums(shares)
    return sums if out is None else out.copy_(sums)


def exact_running_sums(shares: Tensor) -> Tensor:
    """As `running_sums`, of the shares as whole numbers of 2^-44 where there are 2^18 columns, and finer of fewer."""
    scale = 2.0 ** (_SUM_BITS - (shares.shape[-1] - 1).bit_length())
    numbers = (shares * scale).round().long()
    return numbers.cumsum(dim=-1).double() / scale
