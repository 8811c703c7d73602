"""New weights between their first tensor and the commit: which were loaded, with a digest of each.

Until the commit a model has weights of two kinds, old and new, and no step may run; that is the engine's to see to.
Nothing here exchanges anything with other ranks.
"""

from collections.abc import Callable, Collection
from hashlib import blake2b
from typing import Final

import numpy as np
import torch
from torch import Tensor

WeightUpdateReport = tuple[dict[str, str], list[str], bool, list[int]]
"""Digests, names that are missing, whether those must be loaded, and the calls whose changes were refused."""

_BLOCK_BYTES: Final = 1 << 22
_WORDS: Final = 512


class WeightUpdate:
    """The update of one rank's model. `num_in_flight`, when it is set, says how many requests are being answered."""

    def __init__(self) -> None:
        self.digests: dict[str, str] = {}
        """By checkpoint name, of what was loaded since the last commit."""
        self.is_open = False
        self.must_be_whole = False
        """No weight is what it was: each has to be loaded, also where the caller says that some stay."""
        self.are_weights_asleep = False
        self.num_calls = 0
        """Of `apply_model` since all weights were last loaded. No other commit resets it: ranks that have refused
        different calls commit different ones, and still number the next alike.
        """
        self.refused_calls: list[int] = []
        """Numbers of the calls of `apply_model` whose changes were refused here, since the last commit. What other
        ranks have changed in the same calls, this one has not; whoever loads all weights afterwards has made that good.
        """
        self._num_refused_before, self._has_all = 0, False
        self.num_in_flight: Callable[[], int] | None = None

    def begin(self) -> None:
        """Before the first byte is written. Raises RuntimeError while requests are being answered, and while there are
        no weights to write over.
        """
        if self.are_weights_asleep:
            raise RuntimeError("the weights are asleep: call wake_up(tags=['weights']) before new ones are loaded")
        if self.is_open:
            return
        num_requests = self.num_in_flight() if self.num_in_flight is not None else 0
        if num_requests:
            raise RuntimeError(
                f"{num_requests} requests are being answered with the weights that are there: call llm_engine.step "
                f"until none is left, or abort them and call it once, before new weights are loaded"
            )
        self.is_open, self._num_refused_before = True, len(self.refused_calls)

    def require_all(self) -> None:
        """The weights were dropped: an update is open until all of them were loaded."""
        self.digests, self.is_open, self.must_be_whole = {}, True, True
        self._num_refused_before = len(self.refused_calls)

    def add(self, name: str, tensor: Tensor) -> None:
        """A whole checkpoint tensor was loaded, or passed over because this rank holds nothing of it."""
        self.digests[name] = content_digest(tensor)

    def missing(self, names: Collection[str]) -> list[str]:
        """Which of `names` were not loaded."""
        return [name for name in names if name not in self.digests]

    def report(self, names: Collection[str]) -> "WeightUpdateReport | None":
        """What `WorkerBase.get_weight_update` returns, of a model with weights of these names."""
        if not self.is_open:
            return ({}, [], False, self.refused_calls) if self.refused_calls else None
        missing = self.missing(names)
        self._has_all = not missing
        refused_calls = self.refused_calls[0 if missing else self._num_refused_before :]
        return self.digests, missing, self.must_be_whole, refused_calls

    def end(self) -> None:
        """The update is committed, or what was loaded is dropped."""
        if self._has_all:
            self.num_calls = 0
        self.digests, self.is_open, self.must_be_whole, self._has_all = {}, False, False, False
        self.refused_calls, self._num_refused_before = [], 0


def content_digest(tensor: Tensor) -> str:
    """A digest of dtype, shape and elements, for tensors that differ by accident.

    Made at the speed of memory: of each block of 4 MiB the 512 sums of every 512th word are hashed, so a permutation
    of words within a block may go unseen.
    """
    digest = blake2b(f"{tensor.dtype} {list(tensor.shape)}".encode(), digest_size=8)
    content = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    for start in range(0, content.size, _BLOCK_BYTES):
        block = content[start : start + _BLOCK_BYTES]
        num_summed = block.size - block.size % (8 * _WORDS)
        digest.update(block[:num_summed].view(np.uint64).reshape(-1, _WORDS).sum(axis=0, dtype=np.uint64).data)
        digest.update(block[num_summed:].data)
    return digest.hexdigest()
