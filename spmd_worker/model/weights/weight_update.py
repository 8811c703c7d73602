"""An update of weights, from its first tensor to its commit: the names that were loaded, with a digest of each.

Until the commit some weights are old and some new, and the engine runs no step. Updates are local: nothing here is
exchanged with other ranks.
"""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from hashlib import blake2b
from typing import Final

import numpy as np
import torch
from torch import Tensor

from spmd_worker.model.weights.tensor_checks import tied_head_fault

WeightUpdateReport = tuple[dict[str, str], list[str], bool, list[int], bool, str]
"""Digests; missing names; whether those must be loaded; the `apply_model` calls whose changes were rejected; whether
all weights were loaded, optional ones too; the fault of a tied head that was loaded, or "".
"""

_BLOCK_BYTES: Final = 1 << 22
_WORDS: Final = 512
_OF_STATE: Final = "state "
OF_SHARDS: Final = "shards "
"""Beginning of the digest of a tensor that came in shards."""


class WeightUpdate:
    """The update of one rank's model. `num_in_flight`, if it is set, counts the requests in flight. `tied` are the
    names of the embedding and of the head that is tied to it.
    """

    def __init__(self, tied: tuple[str, str] | None = None) -> None:
        self._embedding, self._head = tied or ("", "")
        self.embedding_digest = self._head_digest = ""
        """Digest of the last committed embedding, "" if unknown; of a tied head that was loaded since."""
        self._is_paired = False
        """Whether the embedding was loaded in the same try as the head, or the try has failed: an embedding that is
        loaded now belongs to another try.
        """
        self.digests: dict[str, str] = {}
        """Digests of the tensors loaded since the last commit, by checkpoint name."""
        self.is_open = False
        self.must_be_complete = False
        """The weights were dropped: all have to be loaded, also if the caller says that some stay."""
        self._are_weights_asleep = False
        self.num_calls = 0
        """Calls of `apply_model` since all weights were last loaded. Other commits do not reset it: ranks that have
        rejected different calls commit different ones, and must number the next one alike.
        """
        self.rejected_calls: list[int] = []
        """Numbers of the `apply_model` calls whose changes this rank has rejected since the last commit. Other ranks
        may have made the changes of these calls; loading all weights afterwards makes the ranks equal again.
        """
        self._num_rejected_before, self._has_all = 0, False
        self.num_in_flight: Callable[[], int] | None = None

    def check_awake(self, before: str = "first") -> None:
        """Raise RuntimeError while the weights sleep."""
        if self._are_weights_asleep:
            raise RuntimeError(f"the weights are asleep: call wake_up(tags=['weights']) {before}")

    def begin(self) -> None:
        """Open the update, before any write. Raises RuntimeError as `check_possible`."""
        self.check_possible()
        if not self.is_open:
            self.is_open, self._num_rejected_before = True, len(self.rejected_calls)

    def check_possible(self) -> None:
        """Raise RuntimeError while weights sleep, or requests are in flight and no update is open."""
        self.check_awake("before new ones are loaded")
        if self.is_open:
            return
        num_requests = self.num_in_flight() if self.num_in_flight is not None else 0
        if num_requests:
            raise RuntimeError(
                f"{num_requests} requests are being answered with the weights that are there: call llm_engine.step "
                f"until none is left, or pause_generation, before new weights are loaded"
            )

    def sleep(self) -> None:
        """The weights sleep, with or without their memory."""
        self._are_weights_asleep = True

    def drop(self, kept: Collection[str]) -> None:
        """The weights are dropped, except `kept` ones, whose digests and rejected calls are still to be reported."""
        digests = {name: digest for name, digest in self.digests.items() if name in kept}
        rejected_calls = self.rejected_calls if kept else []
        self.end()
        self.digests, self.rejected_calls, self.embedding_digest = digests, rejected_calls, ""

    def wake(self, *, were_dropped: bool) -> None:
        """The weights are awake. If they `were_dropped`, an update is open until all are loaded."""
        self._are_weights_asleep = False
        if were_dropped:
            self.is_open, self.must_be_complete = True, True
            self._num_rejected_before = len(self.rejected_calls)

    def add(self, name: str, tensor: Tensor | str) -> None:
        """A full checkpoint tensor was loaded, or skipped because this rank has no part of it; of one that came in
        shards its digest (`shards_digest`).
        """
        if name == self._embedding and self._head_digest:
            # A paired head belongs to the try before; that of this one is loaded later or not at all.
            self._head_digest = "" if self._is_paired else self._head_digest
            self._is_paired = True
        self.digests[name] = tensor if isinstance(tensor, str) else content_digest(tensor)

    def add_tied_head(self, tensor: Tensor | str) -> None:
        """A tied head was skipped; it has to be equal to the embedding at the commit."""
        self._is_paired = not self._head_digest and self._embedding in self.digests
        self._head_digest = tensor if isinstance(tensor, str) else content_digest(tensor)

    @contextmanager
    def writing(self, names: Collection[str]) -> Iterator[None]:
        """Block in which these weights are written in parts. After an exception in it all weights have to be loaded."""
        self.begin()
        must_be_complete, self.must_be_complete = self.must_be_complete, True
        for name in names:
            self.digests.pop(name, None)
        yield
        self.must_be_complete = must_be_complete

    def begin_all(self) -> None:
        """Open an update that `add_all` completes: until then no caller may compute with the weights."""
        self.begin()
        # Tensors that were loaded before may be overwritten by a try that fails.
        self.must_be_complete, self.digests = True, {}
        self.forget_tied_head()

    def add_all(self, names: Collection[str], state: str) -> None:
        """All weights were loaded from a sharded state with this digest, of which a rank reads no full tensor."""
        self.digests = dict.fromkeys(names, f"{_OF_STATE}{state}")

    def forget_tied_head(self) -> None:
        """Ignore a tied head of an interrupted try, because all weights are loaded again, without a head."""
        self._head_digest = ""

    def _head_fault(self) -> str:
        """Message about a loaded head that differs from the embedding, or ""."""
        embedding = self._known_embedding()
        if self._head_digest in ("", embedding):
            return ""
        if not embedding:
            way_out = f"load {self._embedding}, with or without {self._head}"
            return tied_head_fault(self._head, f"was loaded without {self._embedding}", way_out)
        if embedding.startswith(OF_SHARDS) != self._head_digest.startswith(OF_SHARDS):
            way_out = f"give both alike, or leave {self._head} out"
            fault = f"cannot be compared with {self._embedding}, because one of them came in shards"
            return tied_head_fault(self._head, fault, way_out)
        return tied_head_fault(
            self._head,
            f"differs from {self._embedding} in elements, dtype or shape",
            f"load {self._embedding} again, with an equal {self._head} or without, or set tie_word_embeddings to false "
            f"and make a new LLM to use both",
        )

    def _known_embedding(self) -> str:
        """Digest of the embedding, "" if a sharded state had it."""
        digest = self.digests.get(self._embedding, self.embedding_digest)
        return "" if digest.startswith(_OF_STATE) else digest

    def missing(self, names: Collection[str]) -> list[str]:
        return [name for name in names if name not in self.digests]

    def report(self, names: Collection[str], buffers: Collection[str] = ()) -> "WeightUpdateReport | None":
        """Result of `WorkerBase.get_weight_update` for a model with these weights, of which `buffers` are optional."""
        if not self.is_open:
            return ({}, [], False, self.rejected_calls, False, "") if self.rejected_calls else None
        missing = self.missing(names)
        self._has_all = not missing
        rejected_calls = self.rejected_calls[self._num_rejected_before if self._has_all else 0 :]
        missing = [name for name in missing if name not in buffers]
        return self.digests, missing, self.must_be_complete, rejected_calls, self._has_all, self._head_fault()

    def reject(self) -> None:
        """The update was rejected for its head: an embedding that is loaded now belongs to another try."""
        self._is_paired = True

    def end(self) -> None:
        """The update is committed, or the loaded weights are dropped."""
        if self._has_all:
            self.num_calls = 0
        self.embedding_digest, self._head_digest = self._known_embedding(), ""
        # Digests without an open update are those that `drop` keeps for the next one.
        self.digests = {} if self.is_open else self.digests
        self.is_open = self.must_be_complete = self._has_all = False
        self.rejected_calls, self._num_rejected_before = [], 0


def content_digest(tensor: Tensor) -> str:
    """A digest of dtype, shape and elements that detects accidental differences, at memory speed.

    It hashes 512 sums of each block of 4 MiB, of every 512th word, so permuted words in a block may go undetected.
    """
    digest = blake2b(f"{tensor.dtype} {list(tensor.shape)}".encode(), digest_size=8)
    content = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    for start in range(0, content.size, _BLOCK_BYTES):
        block = content[start : start + _BLOCK_BYTES]
        num_summed = block.size - block.size % (8 * _WORDS)
        digest.update(block[:num_summed].view(np.uint64).reshape(-1, _WORDS).sum(axis=0, dtype=np.uint64).data)
        digest.update(block[num_summed:].data)
    return digest.hexdigest()
