"""Agreement on one step: followers send digests, rank 0 compares them and sends the message that every rank runs.

Every replica plans and digests by itself; a follower sends its digest to rank 0, which compares all of them with its
own before it sends the step's message: rank 0's plan, the ids it sampled in the last step, and new events. So no step
runs anywhere unless all ranks agreed on it, for one short answer and one message. The digest is chained: equal digests
mean equal steps since the start.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, cast

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
"""Number of step records that each rank keeps, to be written to a file when the replicas diverge."""

NO_IDS: Final = SampledIds()


@dataclass(frozen=True, slots=True)
class StepReport:
    """One rank's report to the agreement of a step: results of the steps that ended since the last agreement, and its
    requests.

    `sampled` and `mask_checksums` enter the digest. `finished_transfers` are this rank's. `event_problem` is the reason
    why it did not prepare the worker event of the step before, "" if it did or there was none. `interrupt` is the text
    of an exception that a signal's handler raised here, for rank 0 (`Lockstep.take_interrupt`). `events` enter with
    this step if this is rank 0.
    """

    sampled: SampledIds = NO_IDS
    mask_checksums: tuple[int, ...] = ()
    finished_transfers: tuple[int, ...] = ()
    event_problem: str = ""
    interrupt: str = ""
    events: tuple[Event, ...] = ()


@dataclass(frozen=True, slots=True)
class AgreedStep:
    """Every rank executes `plan`, then applies `events`, those of workers and those of the scheduler."""

    plan: StepPlan
    events: tuple[Event, ...]


class Lockstep:
    """One replica's agreement, step after step. `channel` is None for a replica of one rank.

    Digests are compared every `digest_every` steps, never for 0, and always in the step after a worker event, in which
    the ranks report whether they prepared it. The ids that come with a step are those of the step `num_in_flight`
    before it. `on_message` is called with every message on rank 0, before it is sent.
    """

    def __init__(
        self, channel: LeaderChannel | FollowerChannel | None, digest_every: int, num_in_flight: int = 1
    ) -> None:
        self.records: deque[StepMessage] = deque(maxlen=NUM_KEPT_RECORDS)
        self.on_message: Callable[[bytes], None] | None = None
        self._channel, self._digest_every = channel, digest_every
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
        """Digest of all agreed steps."""
        return self._digest.value

    def agree(self, plan: StepPlan, report: StepReport) -> AgreedStep:
        """The step that every rank runs: rank 0's plan and events.

        Raises ReplicaDivergedError, the same on every rank, if the step must not run; RankFailedError if a rank is gone
        or silent.
        """
        (token_ids, num_ids), mask_checksums = report.sampled, report.mask_checksums
        digest = self._digest.update(Record(plan, self._last_events, token_ids, num_ids, mask_checksums))
        local = StepMessage(plan.step, self._last_events, plan, token_ids, digest, num_ids, mask_checksums)
        self.records.append(local)
        self._finished_transfers += report.finished_transfers
        try:
            if self._follower is None:
                message = self._lead(local, report)
            else:
                message = self._follow(local, self._follower, report)
        except LostMessageError as error:
            raise self._diverged(local.step, str(error)) from None
        self._last_events = message.events
        return AgreedStep(message.plan, message.events)

    def diagnose(self, error: BaseException) -> BaseException:
        """The exception to raise for an error of this rank: a peer's abort message if it came first, else the error.

        Reports it to the other ranks, which may be waiting in a collective of the same step.
        """
        if self._channel is None:
            return error
        if isinstance(error, AbortedError):
            if self._leader is not None:
                # Followers hear of one another through rank 0 only.
                self._leader.abort(str(error), error.is_divergence)
            return _error_of(str(error), error.is_divergence)
        if isinstance(error, ReplicaDivergedError | RankFailedError):
            text = str(error)
        else:
            # In a collective, a peer that leaves looks like a network error here: read its message first.
            received = self._channel.received_abort() if isinstance(error, RuntimeError) else None
            if received is not None:
                return _error_of(*received)
            step = self.records[-1].step if self.records else 0
            text = f"rank {self._channel.rank} raised {type(error).__name__} at step {step}: {error}"
        self._channel.abort(text, isinstance(error, ReplicaDivergedError))
        return error

    def take_finished_transfers(self) -> tuple[int, ...]:
        """Transfers that every rank has finished since the last call, for rank 0 to report as an event."""
        return self._transfers.take_complete()

    def take_interrupt(self) -> tuple[int, str] | None:
        """Rank 0 only: the first rank that has reported an interrupt since the last call, and its text."""
        interrupts, self._interrupts = self._interrupts, []
        return next(iter(interrupts), None)

    @property
    def event_problem(self) -> str:
        """Rank 0 only, once the step after a worker event is agreed on: the problem of the lowest rank that could not
        prepare it, "" if all could.
        """
        return next(filter(None, self._event_problems), "")

    def close(self) -> None:
        """Leave the channel. Idempotent."""
        if self._channel is not None:
            self._channel.close()

    def _lead(self, local: StepMessage, report: StepReport) -> StepMessage:
        message = replace(local, events=report.events)
        self._transfers.add(0, self._take_local_finished())
        if self._is_event_answered:
            self._event_problems = [report.event_problem]
        if self._leader is None and self.on_message is None:
            return message
        # Encoded before the answers arrive, and sent only if they agree.
        payload = self._encoder.encode(message)
        if self._leader is not None and self._is_compared(local.step):
            self._compare(local, self._leader)
        if self.on_message is not None:
            self.on_message(payload)
        if self._leader is not None:
            self._leader.send(payload)
        return message

    def _follow(self, local: StepMessage, channel: FollowerChannel, report: StepReport) -> StepMessage:
        is_compared = self._is_compared(local.step)
        if is_compared:
            channel.offer_record(partial(encode_message, local))
            answer = pack_answer(local.digest, self._take_local_finished(), report.interrupt)
            if self._is_event_answered:
                answer = pack_event_answer(answer, report.event_problem)
            channel.answer(local.step, answer)
        payload = channel.receive()
        try:
            message = self._decoder.decode(payload)
        except MessageError as error:
            reason = f"rank {channel.rank} cannot read rank 0's message: {error}"
            raise self._diverged(local.step, reason) from None
        if is_compared:
            self._last_agreed_step = local.step
        return message

    def _diverged(self, step: int, reason: str) -> ReplicaDivergedError:
        return ReplicaDivergedError(f"step {step} did not run (last agreed step {self._last_agreed_step}): {reason}")

    def _take_local_finished(self) -> list[int]:
        finished, self._finished_transfers = self._finished_transfers, []
        return finished

    def _is_compared(self, step: int) -> bool:
        return self._is_event_answered or (self._digest_every > 0 and step % self._digest_every == 0)

    @property
    def _is_event_answered(self) -> bool:
        """Whether the answers of this step report on a worker event: all steps up to that one have run."""
        return any(isinstance(event, WorkerEvent) for event in self._last_events)

    def _compare(self, local: StepMessage, channel: LeaderChannel) -> None:
        payloads = channel.collect(local.step)
        if not self._is_event_answered and payloads.count(local.digest) == len(payloads):
            # Hot path: nobody says more than a digest, and there may be a thousand answers.
            self._last_agreed_step = local.step
            return
        if self._is_event_answered:
            pairs = [unpack_event_answer(payload) for payload in payloads]
            payloads = [answer for answer, _ in pairs]
            self._event_problems += [problem for _, problem in pairs]
        answers = [unpack_answer(payload) for payload in payloads]
        different = [rank for rank, answer in enumerate(answers, start=1) if answer.digest != local.digest]
        if different:
            raise self._diagnosed(local, channel, different)
        self._last_agreed_step = local.step
        for rank, answer in enumerate(answers, start=1):
            self._transfers.add(rank, answer.finished_transfers)
            if answer.interrupt:
                self._interrupts.append((rank, answer.interrupt))

    def _diagnosed(self, local: StepMessage, channel: LeaderChannel, different: list[int]) -> ReplicaDivergedError:
        """The error that names the first different field, sent to every follower."""
        payloads = channel.exchange_records(encode_message(local))
        records = [record_of(decode_message(payload)) for payload in payloads]
        difference = first_difference(records[0], records[different[0]], 0, different[0])
        ranks = f"rank {different[0]}" if len(different) == 1 else f"ranks {', '.join(map(str, different))}"
        reason = difference or "this step is equal; an earlier one, which was not compared, was not"
        error = self._diverged(local.step, f"{ranks} diverged from rank 0: {reason}")
        channel.send_diagnosis(str(error))
        return error


def _error_of(text: str, is_divergence: bool) -> BaseException:
    return ReplicaDivergedError(text) if is_divergence else RankFailedError(text)
