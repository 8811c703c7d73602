"""Worker events `sleep` and `wake_up`: free and reallocate one worker's weights and cache.

Memory is allocated during prepare, so that a commit cannot fail. No step computes meanwhile: the engine has no requests
when it falls asleep and accepts none until everything is awake.
"""

import logging
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from spmd_worker.model.adapters.adapter_memory import AdapterMemory
from spmd_worker.model.decoder import DecoderForCausalLM
from spmd_worker.model.weight_memory import WeightMemory
from spmd_worker.replica.sequence.sleep_tags import KV_CACHE, TAGS, WEIGHTS, checked_level, checked_tags
from spmd_worker.worker.caches import WorkerCaches
from spmd_worker.worker.memory import host
from spmd_worker.worker.memory.device import give_back_freed
from spmd_worker.worker.runner.media_store import MediaStore
from spmd_worker.worker.runner.step_graphs import StepGraphs

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class GoingToSleep:
    """Staged by `prepare_sleep`; `host_weights` if the weights leave the device and are kept, `host_adapters` and
    `host_draft` if the adapters and a draft's weights leave it, which are always kept.
    """

    level: int
    host_weights: list[Tensor] | None
    host_adapters: list[Tensor] | None = None
    host_draft: list[Tensor] | None = None


@dataclass(frozen=True, slots=True)
class WakingUp:
    """Staged by `prepare_wake_up`: the tags that wake up, and memory for the weights, adapters and weights of a draft
    that had none.
    """

    tags: tuple[str, ...]
    weights: list[Tensor] | None
    adapters: list[Tensor] | None
    num_bytes: int
    draft: list[Tensor] | None = None


@dataclass(eq=False)
class WorkerSleep:
    """Handles the two events; `num_local_ranks` ranks share this machine's memory. `tags` are the sleeping ones.
    `draft` has the weights of a model or head that drafts.
    """

    model: DecoderForCausalLM
    weights: WeightMemory
    cache: WorkerCaches
    device: torch.device
    num_local_ranks: int
    graphs: StepGraphs | None = None
    adapters: AdapterMemory = field(default_factory=AdapterMemory)
    media: MediaStore | None = None
    draft: WeightMemory | None = None
    tags: tuple[str, ...] = ()

    def prepare_sleep(self, level: int) -> GoingToSleep:
        """Copy what is kept to host memory if it is on another device: the adapters, and the weights at level 1."""
        is_on_host = self.device.type == "cpu"
        leaves = checked_level(level) == 1 and not is_on_host and self.weights.is_allocated
        adapters_leave = not is_on_host and self.adapters.is_allocated
        return GoingToSleep(
            level,
            self.weights.copy_to_host() if leaves else None,
            self.adapters.copy_to_host() if adapters_leave else None,
            self.draft.copy_to_host() if self.draft is not None and self._draft_leaves else None,
        )

    @property
    def _draft_leaves(self) -> bool:
        return self.draft is not None and self.device.type != "cpu" and self.draft.is_allocated

    def commit_sleep(self, staged: GoingToSleep) -> dict[str, int]:
        """Free the memory. Returns bytes by tag. Graphs are dropped, because what wakes up gets other addresses."""
        started = perf_counter()
        if self.graphs is not None:
            self.graphs.forget()
        freed = dict.fromkeys(TAGS, 0)
        if self.media is not None:
            self.media.clear()
        if KV_CACHE not in self.tags:
            freed[KV_CACHE] = self.cache.num_device_bytes + self.cache.held_host_bytes
            self.cache.release()
        weights = self.model.weights
        if staged.level == 2 or staged.host_weights is not None:
            freed[WEIGHTS] = self.weights.num_bytes * self.weights.is_allocated
            self.weights.release(staged.host_weights)
        if staged.host_adapters is not None:
            freed[WEIGHTS] += self.adapters.num_bytes
            self.adapters.release(staged.host_adapters)
        if self.draft is not None and staged.host_draft is not None:
            freed[WEIGHTS] += self.draft.num_bytes
            self.draft.release(staged.host_draft)
        if staged.level == 2:
            weights.update.drop(weights.buffer_names)
        weights.update.sleep()
        self.tags = TAGS
        give_back_freed(self.device)
        self._log(f"asleep at level {staged.level}, freed", freed, started)
        return freed

    def prepare_wake_up(self, tags: list[str]) -> WakingUp:
        """Allocate memory for the sleeping ones of `tags`. Raises MemoryError with the number of missing bytes."""
        waking = tuple(tag for tag in checked_tags(tags) if tag in self.tags)
        takes_weights = WEIGHTS in waking and not self.weights.is_allocated
        takes_adapters = WEIGHTS in waking and not self.adapters.is_allocated
        takes_cache = KV_CACHE in waking
        draft = self.draft if WEIGHTS in waking and self.draft is not None and not self.draft.is_allocated else None
        needed = {WEIGHTS: self.weights.num_bytes * takes_weights + self.adapters.num_bytes * takes_adapters}
        needed[WEIGHTS] += 0 if draft is None else draft.num_bytes
        needed[KV_CACHE] = (self.cache.num_device_bytes + self.cache.num_host_bytes) * takes_cache
        self._check_available(needed)
        try:
            weights = self.weights.allocate() if takes_weights else None
            adapters = self.adapters.allocate() if takes_adapters else None
            of_draft = None if draft is None else draft.allocate()
            if takes_cache:
                self.cache.allocate()
        except (MemoryError, RuntimeError) as error:
            weights = adapters = of_draft = None
            self._free(takes_cache=takes_cache)
            raise MemoryError(f"{_in_words(needed)} could not be allocated on {self.device}: {error}") from None
        return WakingUp(waking, weights, adapters, sum(needed.values()), of_draft)

    def commit_wake_up(self, staged: WakingUp) -> dict[str, int]:
        """Restore the weights into the staged memory. Returns bytes by tag."""
        started = perf_counter()
        taken = dict.fromkeys(TAGS, 0)
        if WEIGHTS in staged.tags:
            were_dropped = False
            if staged.weights is not None:
                taken[WEIGHTS] = self.weights.num_bytes
                were_dropped = not self.weights.restore(staged.weights)
            if staged.adapters is not None:
                taken[WEIGHTS] += self.adapters.num_bytes
                self.adapters.restore(staged.adapters)
            if self.draft is not None and staged.draft is not None:
                taken[WEIGHTS] += self.draft.num_bytes
                self.draft.restore(staged.draft)
            self.model.weights.update.wake(were_dropped=were_dropped)
        taken[KV_CACHE] = staged.num_bytes - taken[WEIGHTS]
        self.tags = tuple(tag for tag in self.tags if tag not in staged.tags)
        self._log(f"awake{f' but for {self.tags[0]}' if self.tags else ''}, allocated", taken, started)
        return taken

    def undo_wake_up(self, staged: WakingUp | None) -> None:
        """Free the staged memory, because another rank lacks memory."""
        if staged is not None:
            for tensors in (staged.weights, staged.adapters, staged.draft):
                if tensors is not None:
                    tensors.clear()
            self._free(takes_cache=KV_CACHE in staged.tags)

    def _free(self, *, takes_cache: bool) -> None:
        if takes_cache:
            self.cache.release()
        give_back_freed(self.device)

    def _check_available(self, needed: dict[str, int]) -> None:
        """Hosts overcommit memory: without this check a later step would be killed when it writes to it."""
        on_host = sum(needed.values()) if self.device.type == "cpu" else 0
        available = host.available_bytes() // self.num_local_ranks
        if on_host > available:
            raise MemoryError(
                f"{_in_words(needed)} are needed and {available} bytes are available to this rank, "
                f"{on_host - available} too few; this process holds {host.resident_bytes()} bytes: free memory, then "
                f"wake up"
            )

    def _log(self, change: str, num_bytes: dict[str, int], started: float) -> None:
        seconds, resident = perf_counter() - started, host.resident_bytes()
        logger.info("%s %s in %.3f s; this process holds %d bytes", change, _in_words(num_bytes), seconds, resident)


def _in_words(num_bytes: dict[str, Any]) -> str:
    return " and ".join(f"{count} bytes of {tag}" for tag, count in num_bytes.items() if count) or "0 bytes"
