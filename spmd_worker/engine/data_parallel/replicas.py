"""Replicas of one engine, on each of its ranks: rounds of shared work, and the reporting of errors to all."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, cast

from spmd_worker.base.errors import RankFailedError
from spmd_worker.engine.data_parallel.round import ReplicaRound
from spmd_worker.engine.data_parallel.store import Store
from spmd_worker.engine.engine import Engine
from spmd_worker.ranks.groups import shared_store

_WAITING_SHARE: Final = 16
"""A replica takes more work while at most this part of its `max_num_seqs` waits."""


class Replicas:
    """Use `open_replicas`. Every rank of the engine makes the same calls, in the same order."""

    def __init__(self, engine: Engine, store: Store, prefix: str) -> None:
        self.engine, self.prefix = engine, prefix
        self._store = store
        self._num_rounds = 0
        self._has_failed = False
        self._last: ReplicaRound | None = None

    def check_not_failed(self) -> None:
        """Raise RuntimeError after a failed round: a replica has ended or stopped halfway."""
        if self._has_failed:
            raise RuntimeError("an earlier call failed on one of the replicas: close this LLM and make a new one")

    @contextmanager
    def round(self) -> Iterator[ReplicaRound]:
        """The next round, with keys of its own. An error is reported to all ranks, which may wait for this one."""
        engine = self.engine
        self._num_rounds += 1
        round_ = ReplicaRound(
            self._store,
            f"{self.prefix}/round {self._num_rounds}",
            engine.engine_channel.rank // engine.channel.size,
            engine.config.parallel.data_parallel_size,
            engine.config.executor.timeout_s,
            engine.is_leader,
        )
        self._last = round_
        try:
            yield round_
        except BaseException as error:
            self._has_failed = True
            round_.fail(_failure_text(engine, error))
            engine.life.report(error)
            raise

    @contextmanager
    def taking_steps(self) -> Iterator[ReplicaRound]:
        """A round in which every replica runs its own steps, each another number; between them it sends heartbeats. At
        its end this one waits for the others. Call `end_steps` after it.
        """
        with self.round() as round_:
            yield round_
            if self.engine.is_leader:
                round_.finish()
            for _ in round_.wait(lambda: round_.is_over):
                pass

    def end_steps(self, payload: bytes) -> list[bytes]:
        """Every rank's payload, in rank order, after a round of `taking_steps`."""
        with self.engine.life.exchanging():
            payloads = self.engine.engine_channel.collect(payload)
        self.forget_round()
        return payloads

    def forget_round(self) -> None:
        """Remove the keys of the round that is over, after an exchange with every rank."""
        if self.engine.is_first_rank and self._last is not None:
            self._last.forget()


def open_replicas(engine: Engine) -> Replicas | None:
    """None for an engine of one replica. Every rank of the engine calls this."""
    if engine.config.parallel.data_parallel_size == 1:
        return None
    # Its stubs declare only str; it accepts and returns bytes.
    store = cast("Store", shared_store())
    # Several engines may exist in a world, successively or simultaneously.
    number = str(store.add("spmd_worker/engines", 1)).encode() if engine.is_first_rank else None
    name = engine.engine_channel.broadcast(number).decode()
    return Replicas(engine, store, f"spmd_worker/engine {name}")


def num_wanted(engine: Engine, num_unfinished: int) -> int:
    """Number of sequences to admit next to `num_unfinished` unfinished ones: 0 while many wait to be scheduled."""
    most_waiting = engine.max_num_seqs // _WAITING_SHARE
    if engine.scheduler.queues.num_waiting > most_waiting:
        return 0
    return max(engine.max_num_seqs + most_waiting - num_unfinished, 0)


def _failure_text(engine: Engine, error: BaseException) -> str:
    """Text of a rank's error for the other replicas."""
    size = engine.channel.size
    replica, rank = divmod(engine.engine_channel.rank, size)
    if size == 1:
        return f"rank {engine.engine_channel.rank} (replica {replica}) raised {type(error).__name__}: {error}"
    first = replica * size
    ranks = f"replica {replica}, ranks {first} to {first + size - 1}"
    text = str(error) if isinstance(error, RankFailedError) else f"rank {rank} raised {type(error).__name__}: {error}"
    return f"{ranks}, counted from 0 there: {text}"
