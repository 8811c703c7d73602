"""The maximum of each row over vocabulary shards. R: rows; every rank of the group calls with the same rows."""

import torch
from torch import Tensor

from spmd_worker.ranks.communicator import GroupHandle


def best_of_shards(values: Tensor, columns: Tensor, group: GroupHandle, first_id: int) -> tuple[Tensor, Tensor]:
    """Each rank's maxima and their columns, [R] -> the maximum over ranks, float64, and its id, [R] each; the smaller
    id wins a tie. `first_id` is the token of this rank's first column.
    """
    if group.size == 1:
        return values.double(), columns + first_id
    own = torch.stack((values.double(), (columns + first_id).double()), dim=-1)
    pairs = group.all_gather(own)
    # Shards are in ascending order of ids and max returns the first maximum, so the smallest id wins.
    best, owners = pairs[:, :, 0].max(dim=0)
    return best, pairs[:, :, 1].gather(0, owners.unsqueeze(0)).squeeze(0)
