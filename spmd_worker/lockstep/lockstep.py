"""The agreement of one step: rank 0's message arrives, the digests are compared, rank 0's plan is what runs.

One message a step carries rank 0's events, its plan, the ids it sampled in the last step and its chained digest. Each
follower digests its own plan in the same way; if any digest differs the step does not run anywhere. Knows plans and
events. Knows nothing about what they lead to.
"""

from dataclasses import dataclass
from typing import Protocol

from spmd_worker.lockstep.codec import decode_message, encode_message
from spmd_worker.lockstep.difference import Record, first_difference
from spmd_worker.lockstep.digest import ChainedDigest
from spmd_worker.lockstep.errors import ReplicaDivergedError
from spmd_worker.lockstep.message import StepMessage
from spmd_worker.sequence.events import Event
from spmd_worker.sequence.step import StepPlan


class Channel(Protocol):
    """What `lockstep/channel.py` offers."""

    @property
    def size(self) -> int:
        """Ranks of the replica."""

    @property
    def rank(self) -> int:
        """This rank's place."""

    def broadcast(self, payload: bytes | None) -> bytes:
        """Rank 0's bytes, on every rank."""

    def gather(self, payload: bytes) -> list[bytes]:
        """Every rank's bytes, on every rank."""


@dataclass(frozen=True, slots=True)
class AgreedStep:
    """What every rank does now: execute `plan`, then take `events` in."""

    plan: StepPlan
    events: tuple[Event, ...]


class Lockstep:
    """One replica's agreement, step after step. `digest_every` 0 compares nothing."""

    def __init__(self, channel: Channel, digest_every: int) -> None:
        self._channel, self._digest_every = channel, digest_every
        self._digest = ChainedDigest()
        self._last_agreed_step = 0

    @property
    def chain_head(self) -> bytes:
        """The digest of everything agreed on so far."""
        return self._digest.value

    def agree(self, plan: StepPlan, sampled_token_ids: tuple[int, ...], events: tuple[Event, ...]) -> AgreedStep:
        """`events` are rank 0's to raise; the others' are ignored. Raises ReplicaDivergedError on every rank."""
        if self._channel.size == 1:
            self._digest.update(plan.step, events, plan, sampled_token_ids)
            return AgreedStep(plan, events)
        message = self._exchange(plan, sampled_token_ids, events)
        digest = self._digest.update(plan.step, message.events, plan, sampled_token_ids)
        if self._digest_every and plan.step % self._digest_every == 0:
            self._compare(digest, Record(plan, message.events, sampled_token_ids))
        return AgreedStep(message.plan, message.events)

    def _exchange(self, plan: StepPlan, sampled_token_ids: tuple[int, ...], events: tuple[Event, ...]) -> StepMessage:
        payload: bytes | None = None
        if self._channel.rank == 0:
            payload = encode_message(StepMessage(plan.step, events, plan, sampled_token_ids, self._digest.value))
        received = self._channel.broadcast(payload)
        return decode_message(received)

    def _compare(self, digest: bytes, record: Record) -> None:
        digests = self._channel.gather(digest)
        different = [rank for rank, other in enumerate(digests) if other != digests[0]]
        if not different:
            self._last_agreed_step = record.plan.step
            return
        raise ReplicaDivergedError(self._explain(different, record))

    def _explain(self, different: list[int], record: Record) -> str:
        """Name the first field that differs; every rank exchanges its record, so every rank says the same."""
        payloads = self._channel.gather(
            encode_message(StepMessage(record.plan.step, record.events, record.plan, record.sampled_token_ids, b""))
        )
        messages = [decode_message(payload) for payload in payloads]
        records = [Record(each.plan, each.events, each.sampled_token_ids) for each in messages]
        difference = first_difference(records[0], records[different[0]], 0, different[0])
        return (
            f"step {record.plan.step} did not run: ranks {', '.join(map(str, different))} diverged from rank 0 "
            f"(last agreed step {self._last_agreed_step}): {difference or 'an earlier step, which was not compared'}"
        )
