"""Answers a list of prompts: in one replica, or by all replicas of an engine, of which every rank gets every output.

Every rank has the complete list. A replica's leader takes the next prompts from the shared counter, longest first, up
to its capacity; the other ranks of its replica follow its steps. No replica waits for another before all is answered.
"""

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from spmd_worker.engine.data_parallel.output_coding import decode_outputs, encode_outputs
from spmd_worker.engine.data_parallel.replicas import Replicas, num_wanted
from spmd_worker.engine.data_parallel.round import ReplicaRound
from spmd_worker.engine.engine import Engine
from spmd_worker.engine.interruption import Interruption
from spmd_worker.replica.sequence.outputs import RequestOutput
from spmd_worker.replica.sequence.pooling_params import PoolingParams
from spmd_worker.replica.sequence.request import RequestId
from spmd_worker.replica.sequence.sampling_params import SamplingParams

_LENGTH: Final = struct.Struct("<I")
OnAnswered = Callable[[int], object]
"""Called with the number of newly answered prompts."""


@dataclass(frozen=True, slots=True)
class RoundPrompt:
    """A prompt that `Requests.check` found nothing wrong with. `index` in the list of call number `call` names
    its randomness, and its output.
    """

    call: int
    index: int
    text: str | None
    token_ids: tuple[int, ...]
    sampling: SamplingParams
    rope_regime: int | None = None
    pooling: PoolingParams | None = None

    @property
    def longest(self) -> int:
        """Most tokens it may have: prompt and, if limited, output tokens of all its samples."""
        return len(self.token_ids) + self.sampling.num_sequences * (self.sampling.max_tokens or 0)


def answer_alone(engine: Engine, prompts: list[RoundPrompt], on_answered: OnAnswered) -> dict[int, RequestOutput]:
    """Outputs by index. Every rank of the replica calls this with the same prompts. What a signal's handler raises on
    any of them ends the call on all, with nothing left open.
    """
    run = _Run(engine)
    with engine.interruptible() as interruption:
        for prompt in prompts:
            run.add(prompt)
        while engine.has_unfinished_requests():
            num_answered = run.step()
            if not interruption.is_ending:
                on_answered(num_answered)
    interruption.check()
    return run.outputs


def answer_together(
    replicas: Replicas, prompts: list[RoundPrompt], on_answered: OnAnswered
) -> dict[int, RequestOutput]:
    """Outputs of all prompts by index, the same on every rank. Every rank of the engine calls this with the same
    prompts; `on_answered` is for its first rank.

    Raises RankFailedError, naming replica and rank, where another replica failed or fell silent. What a signal's
    handler raises on any rank ends the call on all, with nothing left open.
    """
    engine = replicas.engine
    with replicas.round() as round_, engine.interruptible() as interruption:
        progress = _Progress(round_, on_answered if engine.is_first_rank else None)
        outputs = _take_part(engine, round_, prompts, progress, interruption)
        for _ in round_.wait(lambda: round_.is_over):
            progress.show()
            interruption.look()
            if interruption.is_ending:
                round_.interrupt()
        progress.show()
        # Last check: a replica may have had no work.
        interruption.look()
    shared: dict[int, RequestOutput] = {}
    with engine.life.exchanging():
        payloads = engine.engine_channel.collect(_pack(interruption.own_text, outputs))
    replicas.forget_round()
    answers = [_unpack(payload) for payload in payloads]
    interruption.agreed = next(((rank, text) for rank, (text, _) in enumerate(answers) if text), None)
    interruption.check()
    for _, coded in answers:
        shared |= decode_outputs(coded) if coded else {}
    return shared


def _pack(interrupt: str, outputs: dict[int, RequestOutput]) -> bytes:
    """A rank's part of the exchange that ends a round: the text of an interrupt, or this replica's outputs."""
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
    engine: Engine,
    round_: ReplicaRound,
    prompts: list[RoundPrompt],
    progress: "_Progress",
    interruption: Interruption,
) -> dict[int, RequestOutput]:
    """Answer this replica's share; returns its outputs, on its leader."""
    if not engine.is_leader:
        engine.follow_round()
        return {}
    # Sorting is stable, so every rank has one order.
    order = sorted(prompts, key=lambda prompt: -prompt.longest)
    run = _Run(engine)
    while (not interruption.is_ending and _take(engine, round_, order, run)) or engine.has_unfinished_requests():
        num_answered = run.step()
        if num_answered:
            round_.count(num_answered)
        if interruption.is_ending:
            round_.interrupt()
        if round_.send_heartbeat():
            progress.show()
            if round_.is_interrupted:
                interruption.wanted = interruption.wanted or (0, "on another replica")
    if engine.channel.size > 1:
        engine.end_round()
    round_.finish()
    return run.outputs


def _take(engine: Engine, round_: ReplicaRound, prompts: list[RoundPrompt], run: "_Run") -> bool:
    """Add the next prompts; returns whether there were any."""
    most = num_wanted(engine, run.num_sequences)
    if most == 0:
        return False
    places = round_.take(len(prompts), most)
    for place in places:
        run.add(prompts[place])
    return bool(places)


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
    """Prompts in an engine, and their outputs."""

    def __init__(self, engine: Engine) -> None:
        self.outputs: dict[int, RequestOutput] = {}
        self._engine = engine
        self._prompts: dict[RequestId, RoundPrompt] = {}

    @property
    def num_sequences(self) -> int:
        """Samples of the prompts that are not answered yet."""
        return sum(prompt.sampling.num_sequences for prompt in self._prompts.values())

    def add(self, prompt: RoundPrompt) -> None:
        """Queue a prompt for the next step."""
        number = self._engine.requests.admit(
            prompt.token_ids,
            prompt.sampling,
            prompt=prompt.text,
            index=prompt.index,
            call=prompt.call,
            rope_regime=prompt.rope_regime,
            pooling=prompt.pooling,
        )
        self._prompts[number] = prompt

    def step(self) -> int:
        """One step; returns the number of prompts answered in it."""
        answered = self._engine.step()
        for output in answered:
            index = self._prompts.pop(RequestId(int(output.request_id))).index
            output.request_id = str(index)
            self.outputs[index] = output
        return len(answered)
