"""The agreement of one step: answers go up, digests are compared, rank 0's message comes down and is what runs.

Every replica plans and digests by itself; a follower sends its digest to rank 0, which compares all of them with its
own before it sends the step's message: rank 0's plan, the ids it sampled in the last step, and new events. So no step
runs anywhere unless all ranks agreed on it, for one short answer and one message. The digest is chained: equal now
means equal ever since.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, NoReturn, cast

from spmd_worker.base.errors import AbortedError, LostMessageError, RankFailedError, ReplicaDivergedError
from spmd_worker.replica.lockstep.channel import FollowerChannel, LeaderChannel
from spmd_worker.replica.lockstep.difference import Record, first_difference, record_of
from spmd_worker.replica.lockstep.digest import ChainedDigest
from spmd_worker.replica.lockstep.transfers import (
    TransferBook,
    pack_answer,
    pack_event_answer,
    unpack_answer,
    unpack_event_answer,
)
from spmd_worker.replica.lockstep.wire.codec import Decoder, Encoder, decode_message, encode_message
from spmd_worker.replica.lockstep.wire.message import MessageError, StepMessage
from spmd_worker.replica.sequence.events import Event, WorkerEvent
from spmd_worker.replica.sequence.sampled import SampledIds
from spmd_worker.replica.sequence.step import StepPlan

NUM_KEPT_RECORDS: Final = 64
"""Records of the last steps that each rank keeps, to be written down when the replicas diverge."""

NO_IDS: Final = SampledIds()

_REPORTED: Final = (ReplicaDivergedError, RankFailedError, AbortedError)


@dataclass(frozen=True, slots=True)
class StepReport:
    """One rank's report to the agreement of a step: results of the steps that ended since the last agreement, and what
    it asks for.

    `sampled` and `mask_checksums` enter the digest. `finished_transfers` are this rank's own. `event_problem` says why
    it did not prepare the worker event of the step before, "" where it did or there was none. `interrupt` is the text
    of what a signal's handler raised here, for rank 0 (`Lockstep.take_interrupt`). `events` are rank 0's to raise;
    those of other ranks are ignored.
    """

    sampled: SampledIds = NO_IDS
    mask_checksums: tuple[int, ...] = ()
    finished_transfers: tuple[int, ...] = ()
    event_problem: str = ""
    interrupt: str = ""
    events: tuple[Event, ...] = ()


@dataclass(frozen=True, slots=True)
class AgreedStep:
    """What every rank does now: execute `plan`, then take `events` in, those of workers and those of the scheduler."""

    plan: StepPlan
    events: tuple[Event, ...]


class Lockstep:
    """One replica's agreement, step after step. `channel` is None for a replica of one rank.

    Digests are compared every `digest_every` steps, never for 0, and always in the step after a worker event, with
    which the ranks say whether they prepared it. The ids that come with a step are those of the step `num_in_flight`
    before it. `on_message`, when it is set, is given every message on rank 0, before it is sent.
    """

    def __init__(
        self, channel: LeaderChannel | FollowerChannel | None, digest_every: int, num_in_flight: int = 1
    ) -> None:
        self.records: deque[StepMessage] = deque(maxlen=NUM_KEPT_RECORDS)
        self.on_message: Callable[[bytes], None] | None = None
        self._channel, self._digest_every = channel, digest_every
        # One of the two ends, or neither in a replica of one.
        self._leader = cast("LeaderChannel", channel) if channel is not None and channel.rank == 0 else None
        self._follower = cast("FollowerChannel", channel) if channel is not None and channel.rank > 0 else None
        self._digest = ChainedDigest()
        self._encoder, self._decoder = Encoder(num_in_flight), Decoder(num_in_flight)
        self._transfers = TransferBook(1 if channel is None else channel.size)
        self._finished_transfers: list[int] = []
        self._last_events: tuple[Event, ...] = ()
        self._event_problems: list[str] = []
        self._interrupts: list[tuple[int, str]] = []
        self._last_agreed_step = 0

    @property
    def chain_head(self) -> bytes:
        """The digest of everything agreed on so far."""
        return self._digest.value

    def agree(self, plan: StepPlan, report: StepReport) -> AgreedStep:
        """The step that every rank runs: rank 0's plan and events.

        Raises ReplicaDivergedError, the same on every rank, when the step must not run; RankFailedError when a rank is
        gone or silent.
        """
        (token_ids, num_ids), mask_checksums = report.sampled, report.mask_checksums
        digest = self._digest.update(Record(plan, self._last_events, token_ids, num_ids, mask_checksums))
        own = StepMessage(plan.step, self._last_events, plan, token_ids, digest, num_ids, mask_checksums)
        self.records.append(own)
        self._finished_transfers += report.finished_transfers
        try:
            message = self._lead(own, report) if self._follower is None else self._follow(own, self._follower, report)
        except LostMessageError as error:
            raise ReplicaDivergedError(self._did_not_run(own.step, str(error))) from None
        self._last_events = message.events
        return AgreedStep(message.plan, message.events)

    def explain(self, error: BaseException) -> BaseException:
        """What to raise for an error of this rank: a peer's abort message where it spoke first, else the error itself.

        Tells the other ranks, which may be waiting in a collective of the same step.
        """
        if self._channel is None:
            return error
        step = self.records[-1].step if self.records else 0
        if isinstance(error, AbortedError):
            if self._leader is not None:
                # Followers hear of one another through rank 0 only.
                self._leader.abort(str(error), error.is_divergence)
            return _as_raised(str(error), error.is_divergence)
        if not isinstance(error, _REPORTED):
            # In a collective, a peer that leaves looks like a network error here: ask what it said first.
            received = self._channel.received_abort() if isinstance(error, RuntimeError) else None
            if received is not None:
                return _as_raised(*received)
        is_divergence = isinstance(error, ReplicaDivergedError)
        own = isinstance(error, ReplicaDivergedError | RankFailedError)
        text = str(error) if own else f"rank {self._channel.rank} raised {type(error).__name__} at step {step}: {error}"
        self._channel.abort(text, is_divergence)
        return error

    def take_finished_transfers(self) -> tuple[int, ...]:
        """Transfers that every rank has finished since the last call: rank 0's to tell the replicas, as an event."""
        return self._transfers.take_complete()

    def take_interrupt(self) -> tuple[int, str] | None:
        """On rank 0: the first rank that has said since the last call that a signal's handler raised there, and its
        words.
        """
        interrupts, self._interrupts = self._interrupts, []
        return next(iter(interrupts), None)

    @property
    def event_problem(self) -> str:
        """On rank 0, once the step after a worker event is agreed on: what the lowest rank that could not prepare it
        said, "" where all could.
        """
        return next(filter(None, self._event_problems), "")

    def close(self) -> None:
        """Leave the channel. Idempotent."""
        if self._channel is not None:
            self._channel.close()

    def _lead(self, own: StepMessage, report: StepReport) -> StepMessage:
        message = replace(own, events=report.events)
        self._transfers.add(0, self._take_own_finished())
        if self._is_event_answered:
            self._event_problems = [report.event_problem]
        if self._leader is None and self.on_message is None:
            return message
        # Packed before the answers are waited for, and sent only after they agree.
        payload = self._encoder.encode(message)
        if self._leader is not None and self._is_compared(own.step):
            self._compare(own, self._leader)
        if self.on_message is not None:
            self.on_message(payload)
        if self._leader is not None:
            self._leader.send(payload)
        return message

    def _follow(self, own: StepMessage, channel: FollowerChannel, report: StepReport) -> StepMessage:
        if self._is_compared(own.step):
            channel.offer_record(partial(encode_message, own))
            answer = pack_answer(own.digest, self._take_own_finished(), report.interrupt)
            if self._is_event_answered:
                answer = pack_event_answer(answer, report.event_problem)
            channel.answer(own.step, answer)
        payload = channel.receive()
        try:
            message = self._decoder.decode(payload)
        except MessageError as error:
            what = f"rank {channel.rank} cannot read rank 0's message: {error}"
            raise ReplicaDivergedError(self._did_not_run(own.step, what)) from None
        if self._is_compared(own.step):
            self._last_agreed_step = own.step
        return message

    def _did_not_run(self, step: int, what: str) -> str:
        """Whatever the reason, one form, whose last part names it."""
        return f"step {step} did not run (last agreed step {self._last_agreed_step}): {what}"

    def _take_own_finished(self) -> list[int]:
        finished, self._finished_transfers = self._finished_transfers, []
        return finished

    def _is_compared(self, step: int) -> bool:
        return self._is_event_answered or (self._digest_every > 0 and step % self._digest_every == 0)

    @property
    def _is_event_answered(self) -> bool:
        """Whether the answers of this step say how a worker event was prepared: all steps up to that one have run."""
        return any(isinstance(event, WorkerEvent) for event in self._last_events)

    def _compare(self, own: StepMessage, channel: LeaderChannel) -> None:
        payloads = channel.collect(own.step)
        if self._is_event_answered:
            pairs = [unpack_event_answer(payload) for payload in payloads]
            payloads = [answer for answer, _ in pairs]
            self._event_problems += [problem for _, problem in pairs]
        answers = [unpack_answer(payload) for payload in payloads]
        different = [rank for rank, answer in enumerate(answers, start=1) if answer.digest != own.digest]
        if not different:
            self._last_agreed_step = own.step
            for rank, answer in enumerate(answers, start=1):
                self._transfers.add(rank, answer.finished_transfers)
                if answer.interrupt:
                    self._interrupts.append((rank, answer.interrupt))
            return
        self._diverge(own, channel, different)

    def _diverge(self, own: StepMessage, channel: LeaderChannel, different: list[int]) -> NoReturn:
        """Name the first field that differs, tell everybody, raise."""
        payloads = channel.exchange_records(encode_message(own))
        records = [record_of(decode_message(payload)) for payload in payloads]
        difference = first_difference(records[0], records[different[0]], 0, different[0])
        ranks = f"rank {different[0]}" if len(different) == 1 else f"ranks {', '.join(map(str, different))}"
        what = difference or "this step is equal; an earlier one, which was not compared, was not"
        text = self._did_not_run(own.step, f"{ranks} diverged from rank 0: {what}")
        channel.send_diagnosis(text)
        raise ReplicaDivergedError(text)


def _as_raised(text: str, is_divergence: bool) -> BaseException:
    return ReplicaDivergedError(text) if is_divergence else RankFailedError(text)
