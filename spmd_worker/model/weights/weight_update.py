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

from spmd_worker.model.weights.tensor_checks import tied_head_fault

WeightUpdateReport = tuple[dict[str, str], list[str], bool, list[int], bool, str]
"""Digests, names that are missing, whether those must be loaded, the calls whose changes were refused, whether all
weights were loaded, those too that may be left out, and what is wrong with a tied head that was loaded, or "".
"""

_BLOCK_BYTES: Final = 1 << 22
_WORDS: Final = 512


class WeightUpdate:
    """The update of one rank's model. `num_in_flight`, when it is set, says how many requests are being answered.
    `tied` are the names of the embedding and of the head that it is too.
    """

    def __init__(self, tied: tuple[str, str] | None = None) -> None:
        self._embedding, self._head = tied or ("", "")
        self.embedding_digest = self._head_digest = ""
        """Of the embedding that was committed last, or "" where that is not known; and of a tied head."""
        self._is_paired = False
        """Whether the embedding was loaded, too, in the same try, or the try has failed: an embedding that comes now is
        one of another try.
        """
        self.digests: dict[str, str] = {}
        """By checkpoint name, of what was loaded since the last commit."""
        self.is_open = False
        self.must_be_whole = False
        """No weight is what it was: each has to be loaded, also where the caller says that some stay."""
        self._are_weights_asleep = False
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

    def check_awake(self, before: str = "first") -> None:
        """Raise RuntimeError while there are no weights to look at or to write over."""
        if self._are_weights_asleep:
            raise RuntimeError(f"the weights are asleep: call wake_up(tags=['weights']) {before}")

    def begin(self) -> None:
        """Before the first byte is written. Raises RuntimeError while requests are being answered, and as `check_awake`
        does.
        """
        self.check_awake("before new ones are loaded")
        if self.is_open:
            return
        num_requests = self.num_in_flight() if self.num_in_flight is not None else 0
        if num_requests:
            raise RuntimeError(
                f"{num_requests} requests are being answered with the weights that are there: call llm_engine.step "
                f"until none is left, or abort them and call it once, before new weights are loaded"
            )
        self.is_open, self._num_refused_before = True, len(self.refused_calls)

    def sleep(self) -> None:
        """The weights are asleep, their memory there or not."""
        self._are_weights_asleep = True

    def drop(self, kept: Collection[str]) -> None:
        """The weights are dropped, but for those of `kept`: what other ranks are to be told of these is not forgotten,
        what was loaded of them and which changes were refused.
        """
        digests = {name: digest for name, digest in self.digests.items() if name in kept}
        refused_calls = self.refused_calls if kept else []
        self.end()
        self.digests, self.refused_calls, self.embedding_digest = digests, refused_calls, ""

    def wake(self, *, were_dropped: bool) -> None:
        """The weights are awake. Those that `were_dropped` have all to be loaded: an update is open until then."""
        self._are_weights_asleep = False
        if were_dropped:
            self.is_open, self.must_be_whole = True, True
            self._num_refused_before = len(self.refused_calls)

    def add(self, name: str, tensor: Tensor) -> None:
        """A whole checkpoint tensor was loaded, or passed over because this rank holds nothing of it."""
        if name == self._embedding and self._head_digest:
            # The head of another try comes later or not at all.
            self._head_digest = "" if self._is_paired else self._head_digest
            self._is_paired = True
        self.digests[name] = content_digest(tensor)

    def add_tied_head(self, tensor: Tensor) -> None:
        """A head was passed over because the embedding is its weight, which it has to be equal to."""
        self._is_paired = not self._head_digest and self._embedding in self.digests
        self._head_digest = content_digest(tensor)

    def forget_tied_head(self) -> None:
        """All weights are loaded anew, without a head: one that was loaded before is of a try that broke off."""
        self._head_digest = ""

    def _head_fault(self) -> str:
        """Why the head that was loaded cannot be the embedding, or ""."""
        embedding = self.digests.get(self._embedding, self.embedding_digest)
        if self._head_digest in ("", embedding):
            return ""
        if not embedding:
            way_out = f"load {self._embedding}, with or without {self._head}"
            return tied_head_fault(self._head, f"was loaded without {self._embedding}", way_out)
        return tied_head_fault(
            self._head,
            f"differs from {self._embedding} in elements, dtype or shape",
            f"load {self._embedding} again, with an equal {self._head} or without, or set tie_word_embeddings to false "
            f"and make a new LLM to use both",
        )

    def missing(self, names: Collection[str]) -> list[str]:
        """Which of `names` were not loaded."""
        return [name for name in names if name not in self.digests]

    def report(self, names: Collection[str], buffers: Collection[str] = ()) -> "WeightUpdateReport | None":
        """What `WorkerBase.get_weight_update` returns, of a model with weights of these names, of which `buffers` may
        be left out.
        """
        if not self.is_open:
            return ({}, [], False, self.refused_calls, False, "") if self.refused_calls else None
        missing = self.missing(names)
        self._has_all = not missing
        refused_calls = self.refused_calls[self._num_refused_before if self._has_all else 0 :]
        missing = [name for name in missing if name not in buffers]
        return self.digests, missing, self.must_be_whole, refused_calls, self._has_all, self._head_fault()

    def refuse(self) -> None:
        """The update was refused for its head: an embedding that comes now is of another try."""
        self._is_paired = True

    def end(self) -> None:
        """The update is committed, or what was loaded is dropped."""
        if self._has_all:
            self.num_calls = 0
        self.embedding_digest, self._head_digest = self.digests.get(self._embedding, self.embedding_digest), ""
        # Of an update that was not open are those of `drop`, for the next one.
        self.digests = {} if self.is_open else self.digests
        self.is_open = self.must_be_whole = self._has_all = False
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
