"""Per-rank prompts (`gather=True`) and `turns()`: any number of such calls per rank.

A call is one exchange, in which each rank sends its prompts, and the run of all of them in one list, which every rank
has. Prompt i of rank r has the index i * ranks + r, so that its random stream does not depend on the number of prompts
of the others. Each rank keeps the outputs of its own.

In turns, a rank that asks waits until every other rank asks too or has left; ranks that have left pass no prompts, and
follow until all have left. So a loop on one rank never leaves another waiting for ever, however often it asks.
"""

import base64
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Final

from spmd_worker.base.liveness.deferred_signals import host_signals
from spmd_worker.engine.data_parallel.agreement import agree_to_compute, exchange
from spmd_worker.engine.data_parallel.prompts import RoundPrompt, answer_alone, answer_together
from spmd_worker.engine.data_parallel.replicas import Replicas
from spmd_worker.engine.engine import Engine
from spmd_worker.replica.lockstep.wire.packing import ByteReader, ByteWriter
from spmd_worker.replica.lockstep.wire.record_codec import codec_of
from spmd_worker.replica.sequence.outputs import RequestOutput
from spmd_worker.replica.sequence.pooling_params import PoolingParams
from spmd_worker.replica.sequence.sampling_params import SamplingParams

_TURNS: Final = "turns"
_Prepare = Callable[[], Sequence["PerRankPrompt"] | None]
"""None: this rank has left."""


@dataclass(frozen=True, slots=True)
class PerRankPrompt:
    """What the other ranks need of a prompt that `Requests.check` found nothing wrong with."""

    token_ids: tuple[int, ...]
    sampling: SamplingParams
    rope_regime: int | None = None
    pooling: PoolingParams | None = None


_PROMPTS: Final = codec_of(tuple[PerRankPrompt, ...])


def answer_own(
    engine: Engine, replicas: Replicas | None, call: str, prepare: Callable[[], Sequence[PerRankPrompt]]
) -> list[RequestOutput]:
    """Outputs of the prompts that `prepare` returns, in order. Every rank of the engine calls this, with any number of
    prompts.

    Raises what `prepare` raises; on the other ranks that is RankFailedError with its text, and nothing was computed.
    """
    _, outputs = _ask(engine, replicas, call, prepare)
    return outputs


class PerRankCalls:
    """This rank's turns, in consecutive blocks."""

    def __init__(self, engine: Engine, replicas: Replicas | None) -> None:
        self._engine, self._ask = engine, partial(_ask, engine, replicas, _TURNS)
        self.is_open = False
        """Whether this rank is in a block."""
        self._is_over = False
        """Whether the turns of this block have ended on all ranks."""

    @contextmanager
    def block(self) -> Iterator[None]:
        """Block of turns, which every rank of the engine enters and leaves. Call `ask` in it, any number of times.

        At its end this rank follows the turns of the others until they have left; an error that leaves it ends the
        turns of all. Raises RuntimeError within another block, and at its end as `ask` does.
        """
        if self.is_open:
            raise RuntimeError("turns are not taken inside turns: leave the block first")
        self.is_open, self._is_over = True, False
        try:
            with host_signals():
                yield
            self._leave()
        except GeneratorExit:
            raise
        except BaseException as error:  # Ctrl-C too: the other ranks wait for this one's next turn
            self._fail(error)
            raise
        finally:
            self.is_open = False

    def check_outside(self, call: str) -> None:
        """Raise RuntimeError in a block: the other ranks wait for this one's next turn, not for `call`."""
        if self.is_open:
            raise RuntimeError(f"{call} is a call that all ranks make together: leave the block of llm.turns() first")

    def ask(self, prompts: Sequence[PerRankPrompt]) -> list[RequestOutput]:
        """One turn of this rank, in a block. Raises RankFailedError if another rank's turns ended in an error: these
        have ended too.
        """
        if self._is_over:
            raise RuntimeError("these turns have ended, because those of another rank failed: leave the block")
        return self._take_turn(lambda: prompts)[1]

    def _leave(self) -> None:
        while not self._is_over:
            # This rank takes part in the steps of the others' prompts.
            have_all_left, _ = self._take_turn(self._engine.changes.complete_weights)
            self._is_over = have_all_left

    def _fail(self, error: BaseException) -> None:
        """Raises `error`, unless the turns of all ranks have ended already."""

        def raise_it() -> None:
            raise error

        if not self._is_over:
            self._is_over = True
            exchange(self._engine, _TURNS, raise_it, lambda _: None)

    def _take_turn(self, prepare: _Prepare) -> tuple[bool, list[RequestOutput]]:
        try:
            return self._ask(prepare)
        except BaseException:
            self._is_over = True
            raise


def _ask(engine: Engine, replicas: Replicas | None, call: str, prepare: _Prepare) -> tuple[bool, list[RequestOutput]]:
    """Whether no rank passed a list, and the outputs of this rank's prompts."""
    own, answers = agree_to_compute(engine, call, prepare, {}, _encode)
    by_rank = [_decode(payload) for payload in answers] if answers else [own]
    if all(prompts is None for prompts in by_rank):
        return True, []
    number, size = engine.requests.num_calls, engine.engine_channel.size
    prompts = [
        RoundPrompt(
            number, place * size + rank, None, prompt.token_ids, prompt.sampling, prompt.rope_regime, prompt.pooling
        )
        for rank, brought in enumerate(by_rank)
        for place, prompt in enumerate(brought or ())
    ]
    engine.requests.num_calls += 1
    answer = partial(answer_alone, engine) if replicas is None else partial(answer_together, replicas)
    outputs = answer(prompts, lambda num_answered: None) if prompts else {}
    rank = engine.engine_channel.rank
    return False, [outputs[place * size + rank] for place in range(len(own or ()))]


def _encode(prompts: Sequence[PerRankPrompt] | None) -> str | None:
    """Encode the prompts as a JSON value."""
    if prompts is None:
        return None
    writer = ByteWriter()
    _PROMPTS.write(writer, [tuple(prompts)])
    return base64.b64encode(bytes(writer.data)).decode("ascii")


def _decode(payload: str | None) -> Sequence[PerRankPrompt] | None:
    """The inverse of `_encode`."""
    if payload is None:
        return None
    content = base64.b64decode(payload)
    prompts: Sequence[PerRankPrompt] = _PROMPTS.read(ByteReader(content, len(content)), 1)[0]
    return prompts
