"""Updates of weights from the shards of a trainer, such as FSDP2's, without a gather: each rank gives what it has.

A round is some tensors. Its ranks exchange, over the trainer's group: digests of their layouts, contents and errors;
layouts, where they are new; and then the parts that other ranks need, in steps of bounded memory.
"""

import json
import secrets
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from math import prod
from typing import Any, Final

import torch
from torch import Tensor

from spmd_worker.base.errors import RanksDisagreeError
from spmd_worker.base.liveness.heartbeat import BETWEEN_STEPS, Heartbeat
from spmd_worker.engine.interruption import error_of_rank, error_text
from spmd_worker.model.weights.shard_receiver import (
    Round,
    blocks_of,
    check_values,
    content_digests,
    given_tensor,
    make_round,
    places,
    recorded,
    shards_digests,
    write_block,
)
from spmd_worker.model.weights.store import WeightStore
from spmd_worker.model.weights.tensor_shards import TensorShard, is_sharded, shard_of
from spmd_worker.model.weights.transfer_plan import Layout, Move, Step, check_same, num_moved_bytes, plan_steps
from spmd_worker.ranks.transport.tensor_exchange import TensorExchange

BUCKET_BYTES: Final = 64 * 2**20
_MAX_PLANS: Final = 1024
_OF_ROUND: Final = "_spmd_worker_round"
"""Attribute of an error that the other ranks know."""
Pair = tuple[str, Tensor]


@dataclass(frozen=True, slots=True)
class Plan:
    """All ranks' layouts of a round, and its steps."""

    layouts: tuple[Layout, ...]
    steps: list[Step]


@dataclass(slots=True)
class KnownPlans:
    """Rounds of this rank by the digest of their tensors, and plans by the digests of all ranks. `token` tells the
    engines of a process apart: the ranks know the same plans, or none of them, also after one has a new engine.
    """

    token: str = field(default_factory=lambda: secrets.token_hex(8))
    rounds: dict[str, Round] = field(default_factory=dict)
    plans: dict[tuple[str, ...], Plan] = field(default_factory=dict)


class ShardLoader:
    """One update. `bucket_bytes` bounds what a rank receives, sends and assembles in a step."""

    def __init__(
        self,
        store: WeightStore,
        exchange: TensorExchange,
        heartbeat: Heartbeat,
        bucket_bytes: int,
        known: KnownPlans,
        *,
        takes_part: bool,
        check: Callable[[], None],
    ) -> None:
        self._store, self._exchange, self._heartbeat = store, exchange, heartbeat
        self._bucket_bytes, self._known, self._takes_part, self._check = bucket_bytes, known, takes_part, check

    def load(self, tensors: Iterable[Pair]) -> None:
        """Load shards, and whole tensors that every rank gives, which need no exchange. All of a collection are one
        round; those of another iterable are in rounds of about `bucket_bytes` a rank, and read as they are needed.

        With a shard, or if it `takes_part`, every rank of the group calls this. Raises what this rank's tensors raise,
        RankFailedError for another's error, RanksDisagreeError for other tensors, and CheckpointError. Nothing of the
        round is written then.
        """
        if isinstance(tensors, Collection):
            self._load_collection(tensors)
        else:
            self._store.load(self._whole(iter(tensors)))

    def _load_collection(self, tensors: Collection[Pair]) -> None:
        whole = [pair for pair in tensors if not _is_shard(pair)]
        if self._takes_part or len(whole) < len(tensors):
            error: Exception | None = None
            shards: list[TensorShard] = []
            try:
                self._store.check_whole(whole)
                shards = [shard_of(name, tensor) for name, tensor in filter(_is_shard, tensors)]
            except Exception as found:  # any error is sent to the waiting ranks
                error = found
            self._load_round(shards, error, is_last=True)
        self._store.load(whole)

    def _whole(self, tensors: Iterator[Pair]) -> Iterator[Pair]:
        """The whole tensors, while shards are loaded in rounds."""
        waiting: list[TensorShard] = []
        try:
            for pair in tensors:
                if not _is_shard(pair):
                    yield pair
                    continue
                self._takes_part = True
                waiting.append(shard_of(*pair))
                if sum(map(self._num_bytes, waiting)) >= self._bucket_bytes:
                    self._load_round(waiting, None, is_last=False)
                    waiting = []
        except Exception as error:
            if self._takes_part and not getattr(error, _OF_ROUND, False):
                self._load_round([], error, is_last=True)
            raise
        if self._takes_part:
            self._load_round(waiting, None, is_last=True)

    def _num_bytes(self, shard: TensorShard) -> int:
        """A rank's mean, the same on every rank."""
        return prod(shard.shape) * shard.values.dtype.itemsize // self._exchange.size

    def _load_round(self, shards: Sequence[TensorShard], error: Exception | None, *, is_last: bool) -> None:
        self._heartbeat.enter("waiting for the other ranks' shards")
        try:
            with torch.no_grad():
                self._load_checked(shards, error, is_last)
        except Exception as found:
            setattr(found, _OF_ROUND, True)
            raise
        finally:
            self._heartbeat.enter(BETWEEN_STEPS)

    def _load_checked(self, shards: Sequence[TensorShard], error: Exception | None, is_last: bool) -> None:
        own: Round | None = None
        answer: dict[str, Any] = {"layout": "", "contents": [], "is_last": is_last}
        if error is None:
            try:
                self._check()
                self._store.update.check_possible()
                own, digest = self._round_of(shards)
                answer["layout"] = f"{self._known.token} {digest}"
                check_values(self._store, shards, own)
                answer["contents"] = content_digests(shards)
            except Exception as found:
                error = found
        if error is not None:
            answer["error"] = error_text(error)
        answers = [json.loads(each) for each in self._exchange.gather(json.dumps(answer).encode())]
        if error is not None:
            raise error
        for rank, each in enumerate(answers):
            if "error" in each:
                raise error_of_rank(rank, each["error"], "failed in update_weights")
        assert own is not None, "without an error"
        plan = self._plan_of(own, tuple(each["layout"] for each in answers))
        ends = [rank for rank, each in enumerate(answers) if each["is_last"]]
        if ends and len(ends) < len(answers):
            raise RanksDisagreeError(f"ranks {ends} have given all of their tensors, the others have more")
        digests = shards_digests(plan.layouts, [each["contents"] for each in answers])
        if shards:
            with recorded(self._store, own, digests):
                for step in plan.steps:
                    self._run(step, shards, own)

    def _round_of(self, shards: Sequence[TensorShard]) -> tuple[Round, str]:
        """The round of these tensors, and its digest."""
        described = [given_tensor(shard) for shard in shards]
        words = repr((self._bucket_bytes, described)).encode()
        digest = blake2b(words, digest_size=16).hexdigest()
        if digest not in self._known.rounds:
            _forget_first(self._known.rounds)
            self._known.rounds[digest] = make_round(self._store, shards, self._bucket_bytes)
        return self._known.rounds[digest], digest

    def _plan_of(self, own: Round, digests: tuple[str, ...]) -> Plan:
        """The plan of the ranks' rounds with these digests; they exchange their layouts if it is a new one."""
        if digests not in self._known.plans:
            payload = json.dumps([self._bucket_bytes, own.layout.as_json()]).encode()
            given = [json.loads(each) for each in self._exchange.gather(payload)]
            buckets = [bucket for bucket, _ in given]
            if len(set(buckets)) > 1:
                raise RanksDisagreeError(f"bucket_bytes of the ranks are {buckets}: give every rank the same")
            layouts = tuple(Layout.from_json(layout) for _, layout in given)
            check_same(layouts)
            sizes = [getattr(torch, each.dtype).itemsize for each in own.layout.shards]
            _forget_first(self._known.plans)
            self._known.plans[digests] = Plan(layouts, plan_steps(layouts, sizes, self._bucket_bytes))
        return self._known.plans[digests]

    def _run(self, step: Step, shards: Sequence[TensorShard], own: Round) -> None:
        """Exchange and write the blocks of a step."""
        rank = self._exchange.rank
        outgoing: dict[int, list[Move]] = {}
        incoming: dict[int, list[Move]] = {}
        for move in step:
            if move.source == rank != move.destination:
                outgoing.setdefault(move.destination, []).append(move)
            elif move.destination == rank != move.source:
                incoming.setdefault(move.source, []).append(move)
        element_bytes = [shard.values.dtype.itemsize for shard in shards]
        received = self._exchange.exchange(
            {to: self._packed(moves, shards, element_bytes) for to, moves in outgoing.items()},
            {source: num_moved_bytes(moves, element_bytes) for source, moves in incoming.items()},
        )
        parts = {
            move: place
            for source, moves in incoming.items()
            for move, place in places(moves, received[source], [shard.values.dtype for shard in shards])
        }
        for (number, block), moves in blocks_of(step, rank).items():
            found = [(move, parts[move] if move in parts else shards[number].read(move.region)) for move in moves]
            write_block(own.targets[number][block], found)

    def _packed(self, moves: Sequence[Move], shards: Sequence[TensorShard], element_bytes: Sequence[int]) -> Tensor:
        """The parts for one rank in one buffer."""
        buffer = torch.empty(num_moved_bytes(moves, element_bytes), dtype=torch.uint8, device=self._exchange.device)
        for move, place in places(moves, buffer, [shard.values.dtype for shard in shards]):
            place.copy_(shards[move.tensor].read(move.region))
        return buffer


def _is_shard(pair: object) -> bool:
    """Other things than pairs are refused with the whole tensors."""
    return isinstance(pair, tuple) and len(pair) == 2 and is_sharded(pair[1])


def _forget_first(known: dict[Any, Any]) -> None:
    """Keep room for one more."""
    if len(known) >= _MAX_PLANS:
        del known[next(iter(known))]
