"""Keys of groups of tokens, beside those of tokens. D: size of a key; T: tokens of a step."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class GroupKeys:
    """A key for `rate` tokens each, in `cache` [blocks, places, D], a view of the cache of the layer's keys: in the
    block of the last of them, at that token's offset divided by the rate. A token sees those of `numbers`, int32 [T,
    ..] ascending, or without them the first ones, `most` at most.
    """

    cache: Tensor
    rate: int
    most: int
    numbers: Tensor | None = None
