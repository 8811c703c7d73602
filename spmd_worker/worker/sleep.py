"""One worker's memory while its engine sleeps: the worker events `sleep` and `wake_up`, what each prepares and commits.

What a rank may lack, memory, is taken while it prepares, so that a commit cannot fail. Nothing is computed meanwhile:
the engine has no requests when it goes to sleep, and takes none before all is awake.
"""

import logging
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from spmd_worker.model.decoder import DecoderForCausalLM
from spmd_worker.model.weight_memory import WeightMemory
from spmd_worker.replica.sequence.sleep_tags import KV_CACHE, TAGS, WEIGHTS, checked_level, checked_tags
from spmd_worker.worker.caches import WorkerCaches
from spmd_worker.worker.memory import host
from spmd_worker.worker.memory.device import give_back_freed
from spmd_worker.worker.runner.step_graphs import StepGraphs

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class GoingToSleep:
    """What `prepare_sleep` staged; `host_weights` where the weights leave the device and are kept."""

    level: int
    host_weights: list[Tensor] | None


@dataclass(frozen=True, slots=True)
class WakingUp:
    """What `prepare_wake_up` staged: which tags wake, and memory for the weights where they had none."""

    tags: tuple[str, ...]
    weights: list[Tensor] | None
    num_bytes: int


class WorkerSleep:
    """Handler of the two events, of a worker whose model and cache are there. `num_local_ranks` share the memory of
    this machine.
    """

    def __init__(
        self,
        model: DecoderForCausalLM,
        weights: WeightMemory,
        cache: WorkerCaches,
        device: torch.device,
        num_local_ranks: int,
        graphs: StepGraphs | None = None,
    ) -> None:
        self.tags: tuple[str, ...] = ()
        """What sleeps."""
        self._model, self._weights, self._cache = model, weights, cache
        self._device, self._num_local_ranks, self._graphs = device, num_local_ranks, graphs

    def prepare_sleep(self, level: int) -> GoingToSleep:
        """Copy the weights to host memory where they are on another device and stay (level 1)."""
        leaves = checked_level(level) == 1 and self._device.type != "cpu" and self._weights.is_there
        return GoingToSleep(level, self._weights.copy_to_host() if leaves else None)

    def commit_sleep(self, staged: GoingToSleep) -> dict[str, int]:
        """Give memory back. Returns bytes by tag. Graphs go: what wakes up is elsewhere in the device's memory."""
        started = perf_counter()
        if self._graphs is not None:
            self._graphs.forget()
        given = dict.fromkeys(TAGS, 0)
        if KV_CACHE not in self.tags:
            given[KV_CACHE] = self._cache.num_device_bytes + self._cache.held_host_bytes
            self._cache.release()
        weights = self._model.weights
        if staged.level == 2 or staged.host_weights is not None:
            had_memory = self._weights.is_there
            self._weights.give_back(staged.host_weights)
            given[WEIGHTS] = self._weights.num_bytes if had_memory else 0
        if staged.level == 2:
            weights.update.drop(weights.buffer_names)
        weights.update.sleep()
        self.tags = TAGS
        give_back_freed(self._device)
        self._log(f"asleep at level {staged.level}, gave back", given, started)
        return given

    def prepare_wake_up(self, tags: list[str]) -> WakingUp:
        """Take the memory for what sleeps of `tags`. Raises MemoryError, saying how much is missing."""
        waking = tuple(tag for tag in checked_tags(tags) if tag in self.tags)
        takes_weights = WEIGHTS in waking and not self._weights.is_there
        takes_cache = KV_CACHE in waking
        needed = {WEIGHTS: self._weights.num_bytes * takes_weights}
        needed[KV_CACHE] = (self._cache.num_device_bytes + self._cache.num_host_bytes) * takes_cache
        self._check_room(needed)
        try:
            weights = self._weights.take() if takes_weights else None
            if takes_cache:
                self._cache.allocate()
        except (MemoryError, RuntimeError) as error:
            weights = None
            self._forget(takes_cache=takes_cache)
            raise MemoryError(f"{_in_words(needed)} could not be allocated on {self._device}: {error}") from None
        return WakingUp(waking, weights, sum(needed.values()))

    def commit_wake_up(self, staged: WakingUp) -> dict[str, int]:
        """Put in place what was taken. Returns bytes by tag."""
        started = perf_counter()
        taken = dict.fromkeys(TAGS, 0)
        if WEIGHTS in staged.tags:
            were_dropped = False
            if staged.weights is not None:
                taken[WEIGHTS] = self._weights.num_bytes
                were_dropped = not self._weights.restore(staged.weights)
            self._model.weights.update.wake(were_dropped=were_dropped)
        taken[KV_CACHE] = staged.num_bytes - taken[WEIGHTS]
        self.tags = tuple(tag for tag in self.tags if tag not in staged.tags)
        self._log(f"awake but for {', '.join(self.tags) or 'nothing'}, took", taken, started)
        return taken

    def undo_wake_up(self, staged: WakingUp | None) -> None:
        """Another rank has no room: as it was before."""
        if staged is not None:
            takes_cache = KV_CACHE in staged.tags
            if staged.weights is not None:
                staged.weights.clear()
            self._forget(takes_cache=takes_cache)

    def _forget(self, *, takes_cache: bool) -> None:
        if takes_cache:
            self._cache.release()
        give_back_freed(self._device)

    def _check_room(self, needed: dict[str, int]) -> None:
        """Memory of a host is handed out as it is written, far past what there is: that would end in a step."""
        on_host = sum(needed.values()) if self._device.type == "cpu" else 0
        available = host.available_bytes() // self._num_local_ranks
        if on_host > available:
            raise MemoryError(
                f"{_in_words(needed)} are needed and {available} bytes are available to this rank, "
                f"{on_host - available} too few; this process holds {host.resident_bytes()} bytes already: give memory "
                f"back, then wake up"
            )

    def _log(self, what: str, num_bytes: dict[str, int], started: float) -> None:
        seconds, resident = perf_counter() - started, host.resident_bytes()
        logger.info("%s %s in %.3f s; this process holds %d bytes", what, _in_words(num_bytes), seconds, resident)


def _in_words(num_bytes: dict[str, Any]) -> str:
    return " and ".join(f"{count} bytes of {tag}" for tag, count in num_bytes.items() if count) or "0 bytes"
