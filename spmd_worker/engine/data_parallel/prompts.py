"""Answers a list of prompts: in one replica, or by all replicas of an engine, of which every rank gets every output.

Every rank has the complete list. A replica's leader takes the next prompts from the shared counter, longest first, up
to its capacity; the other ranks of its replica follow its steps. No replica waits for another before all is answered.
"""

import itertools
import struct
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from spmd_worker.compat.call_images import half_window_bytes, prepare_ahead, with_content_again
from spmd_worker.compat.image_prompts import num_media_bytes
from spmd_worker.engine.data_parallel.output_coding import decode_outputs, encode_outputs
from spmd_worker.engine.data_parallel.replicas import Replicas, num_wanted
from spmd_worker.engine.data_parallel.round import ReplicaRound
from spmd_worker.engine.engine import Engine
from spmd_worker.engine.interruption import Interruption
from spmd_worker.media.errors import MediaError
from spmd_worker.media.prompt_content import PromptContent
from spmd_worker.replica.sequence.outputs import RequestOutput
from spmd_worker.replica.sequence.record_checks import NOT_SENT
from spmd_worker.replica.sequence.request import RequestId
from spmd_worker.replica.sequence.sampling_params import SamplingParams

_LENGTH: Final = struct.Struct("<I")
_MAX_AHEAD: Final = 8
"""Prompts whose pixels are being made again."""
OnAnswered = Callable[[int], object]
"""Called with the number of newly answered prompts."""


@dataclass(frozen=True, slots=True)
class CheckedPrompt:
    """A prompt that passed `Requests.check`. `replica` is the one that answers it, None if any may."""

    content: PromptContent
    sampling: SamplingParams
    replica: int | None = field(default=None, metadata=NOT_SENT)

    @property
    def num_media_bytes(self) -> int:
        return num_media_bytes(self.content.media)

    @property
    def max_tokens(self) -> int:
        """Maximum number of tokens: prompt and, if limited, output tokens of all its samples."""
        num_rows = 0 if self.content.encoder is None else self.content.encoder.num_rows
        return num_rows + len(self.content.token_ids) + self.sampling.num_sequences * (self.sampling.max_tokens or 0)


def answer_prompts(
    engine: Engine, replicas: Replicas | None, prompts: Mapping[int, CheckedPrompt], on_answered: OnAnswered
) -> dict[int, RequestOutput]:
    """Answer the prompts of the next call; returns all outputs by index, on every rank. The number of the call and the
    index name the random stream of a prompt. Every rank of the engine calls this with the same prompts; `on_answered`
    is called on its first rank.

    Raises RankFailedError, naming replica and rank, where another replica failed or fell silent. An exception of a
    signal handler on any rank ends the call on all, with no request left open.
    """
    run = _Run(engine, engine.requests.num_calls, half_window_bytes(engine.config.job.media_window_gib))
    engine.requests.num_calls += 1
    if not prompts:
        return {}
    return _answer_alone(run, prompts, on_answered) if replicas is None else _share(replicas, run, prompts, on_answered)


def _answer_alone(
    run: "_Run", prompts: Mapping[int, CheckedPrompt], on_answered: OnAnswered
) -> dict[int, RequestOutput]:
    with run.engine.interruptible() as interruption:
        run.waiting.extend(sorted(prompts.items(), key=lambda item: item[1].content.priority))
        # Not `is_ending`: the ranks of the replica add the same prompts before the same steps.
        while (interruption.agreed_error is None and run.admit(interruption)) or run.engine.has_unfinished_requests():
            num_answered = run.step()
            if not interruption.is_ending:
                on_answered(num_answered)
    interruption.check()
    return run.outputs


def _share(
    replicas: Replicas, run: "_Run", prompts: Mapping[int, CheckedPrompt], on_answered: OnAnswered
) -> dict[int, RequestOutput]:
    engine = replicas.engine
    with replicas.round() as round_, engine.interruptible() as interruption:
        progress = _Progress(round_, on_answered if engine.is_first_rank else None)
        outputs = _take_part(run, round_, prompts, progress, interruption)
        for _ in round_.wait(lambda: round_.is_over):
            progress.show()
            interruption.check_signals()
            if interruption.is_ending:
                round_.interrupt()
        progress.show()
        # Last check: a replica may have had no work.
        interruption.check_signals()
    shared: dict[int, RequestOutput] = {}
    with engine.life.exchanging():
        payloads = engine.engine_channel.collect(_pack(interruption.error_text, outputs))
    replicas.forget_round()
    answers = [_unpack(payload) for payload in payloads]
    interruption.agreed_error = next(((rank, text) for rank, (text, _) in enumerate(answers) if text), None)
    interruption.check()
    for _, coded in answers:
        shared |= decode_outputs(coded) if coded else {}
    return shared


def _pack(interrupt: str, outputs: dict[int, RequestOutput]) -> bytes:
    """Encode a rank's part of the exchange that ends a round: the text of an interrupt, or this replica's outputs."""
    text = interrupt.encode()
    if not text and not outputs:
        return b""
    return _LENGTH.pack(len(text)) + (text or encode_outputs(outputs))


def _unpack(payload: bytes) -> tuple[str, bytes]:
    """The inverse of `_pack`, with the outputs still encoded."""
    if not payload:
        return "", b""
    num_text_bytes, rest = _LENGTH.unpack(payload[: _LENGTH.size])[0], payload[_LENGTH.size :]
    return rest[:num_text_bytes].decode(), rest[num_text_bytes:]


def _take_part(
    run: "_Run",
    round_: ReplicaRound,
    prompts: Mapping[int, CheckedPrompt],
    progress: "_Progress",
    interruption: Interruption,
) -> dict[int, RequestOutput]:
    """Answer this replica's share; returns its outputs, on its leader."""
    engine = run.engine
    if not engine.is_leader:
        engine.follow_round()
        return {}
    # Sorting is stable, so every rank has one order.
    order = sorted(prompts.items(), key=lambda item: (item[1].content.priority, -item[1].max_tokens))
    placed = deque([item for item in order if item[1].replica == round_.replica])
    shared = [item for item in order if item[1].replica is None]
    while not interruption.is_ending or engine.has_unfinished_requests():
        if not interruption.is_ending:
            _take(run, round_, placed, shared)
            if not run.admit(interruption) and not engine.has_unfinished_requests():
                break
        num_answered = run.step()
        if num_answered:
            round_.count(num_answered)
        if interruption.is_ending:
            round_.interrupt()
        if round_.send_heartbeat():
            progress.show()
            if round_.is_interrupted:
                interruption.requested_error = interruption.requested_error or (0, "on another replica")
    if engine.channel.size > 1:
        engine.end_round()
    round_.finish()
    return run.outputs


def _take(
    run: "_Run",
    round_: ReplicaRound,
    placed: deque[tuple[int, CheckedPrompt]],
    shared: Sequence[tuple[int, CheckedPrompt]],
) -> None:
    """Take the next prompts: those that are placed here first."""
    capacity = 0 if run.waiting else num_wanted(run.engine, run.num_sequences)
    while placed and len(run.waiting) < capacity:
        run.waiting.append(placed.popleft())
    if capacity and not run.waiting:
        run.waiting.extend([shared[position] for position in round_.take(len(shared), capacity)])


class _Progress:
    """Progress of all replicas, for progress bars."""

    def __init__(self, round_: ReplicaRound, on_answered: OnAnswered | None) -> None:
        self._round, self._on_answered, self._num_shown = round_, on_answered, 0

    def show(self) -> None:
        """Report the prompts answered since the last call."""
        if self._on_answered is None:
            return
        num_answered = self._round.num_counted
        self._on_answered(num_answered - self._num_shown)
        self._num_shown = num_answered


class _Run:
    """Prompts of call number `call` in an engine, and their outputs by index. Those in `waiting` are admitted in order
    while the images and audio of running ones take at most `max_media_bytes`, or are one prompt's.
    """

    def __init__(self, engine: Engine, call: int, max_media_bytes: float) -> None:
        self.engine = engine
        self.outputs: dict[int, RequestOutput] = {}
        self.waiting: deque[tuple[int, CheckedPrompt]] = deque()
        self._call, self._max_media_bytes, self._num_media_bytes = call, max_media_bytes, 0
        self._open: dict[RequestId, tuple[int, CheckedPrompt]] = {}

    @property
    def num_sequences(self) -> int:
        return sum(prompt.sampling.num_sequences for _, prompt in self._open.values())

    def admit(self, interruption: Interruption) -> bool:
        """Admit the next prompts; returns whether there were any. Images that cannot be made again end the call."""
        num_before = len(self.waiting)
        while self.waiting and self._has_room(self.waiting[0][1].num_media_bytes):
            index, prompt = self.waiting.popleft()
            content = prompt.content
            self._num_media_bytes += prompt.num_media_bytes
            if self.engine.is_leader:
                prepare_ahead(content.media)
                self._prepare_ahead()
                try:
                    content = replace(content, media=with_content_again(content.media))
                except MediaError as error:
                    # Aborted before its first step, with all others.
                    interruption.error = interruption.error or error
            number = self.engine.requests.admit(content, prompt.sampling, index=index, call=self._call)
            self._open[number] = (index, prompt)
        if self.engine.is_leader:
            self._prepare_ahead()
        return len(self.waiting) < num_before

    def _has_room(self, num_bytes: int) -> bool:
        is_within = self._num_media_bytes + num_bytes <= self._max_media_bytes
        return is_within or not num_bytes or not self._num_media_bytes

    def _prepare_ahead(self) -> None:
        num_bytes = self._num_media_bytes
        for _, prompt in itertools.islice(self.waiting, _MAX_AHEAD):
            num_bytes += prompt.num_media_bytes
            if num_bytes > self._max_media_bytes:
                return
            prepare_ahead(prompt.content.media)

    def step(self) -> int:
        """Run one step; returns the number of prompts answered in it."""
        answered = self.engine.step()
        for output in answered:
            index, prompt = self._open.pop(RequestId(int(output.request_id)))
            self._num_media_bytes -= prompt.num_media_bytes
            output.request_id = str(index)
            self.outputs[index] = output
        return len(answered)
