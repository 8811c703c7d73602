"""Per-rank prompts (`gather=True`) and `turns()`: any number of such calls per rank.

A call is one exchange, in which each rank sends its prompts, and the run of all of them in one list, which every rank
has. Prompt i of rank r has the index i * ranks + r, so that its random stream does not depend on the number of prompts
of the others. Each rank keeps the outputs of its own.

In turns, a rank that calls waits until every other rank calls too or has left; ranks that have left pass no prompts,
and follow until all have left. So loops of different lengths on different ranks never wait for each other for ever.
"""

import base64
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Final

from spmd_worker.base.liveness.deferred_signals import host_signals
from spmd_worker.engine.data_parallel.agreement import agree_to_compute, exchange
from spmd_worker.engine.data_parallel.prompts import CheckedPrompt, answer_prompts
from spmd_worker.engine.data_parallel.replicas import Replicas
from spmd_worker.engine.engine import Engine
from spmd_worker.media.sent_audio import PreparedMedia, SentAudio, sent
from spmd_worker.media.sent_image import SentImage
from spmd_worker.replica.lockstep.wire.packing import ByteReader, ByteWriter
from spmd_worker.replica.lockstep.wire.record_codec import codec_of
from spmd_worker.replica.sequence.outputs import RequestOutput

_TURNS: Final = "turns"
_Prepare = Callable[[], Sequence[CheckedPrompt] | None]
"""None: this rank has left."""
_PROMPTS: Final = codec_of(tuple[CheckedPrompt, ...] | None)
_IMAGES: Final = codec_of(tuple[tuple[SentImage, ...], ...])
_AUDIO: Final = codec_of(tuple[tuple[SentAudio, ...], ...])


def answer_per_rank(
    engine: Engine, replicas: Replicas | None, call: str, prepare: Callable[[], Sequence[CheckedPrompt]]
) -> list[RequestOutput]:
    """Outputs of the prompts that `prepare` returns, in order. Every rank of the engine calls this, with any number of
    prompts.

    Raises what `prepare` raises; on the other ranks that is RankFailedError with its text, and nothing was computed.
    """
    return _run_call(engine, replicas, call, prepare)[1]


class PerRankCalls:
    """This rank's calls in blocks of `LLM.turns`."""

    def __init__(self, engine: Engine, replicas: Replicas | None) -> None:
        self._engine, self._run_call = engine, partial(_run_call, engine, replicas, _TURNS)
        self.is_open = False
        """Whether this rank is in a block."""
        self._is_over = False
        """Whether this block has ended on all ranks."""

    @contextmanager
    def block(self) -> Iterator[None]:
        """Block that every rank of the engine enters and leaves. Call `answer` in it, any number of times.

        At its end this rank follows the calls of the others until they have left; an error that leaves it ends the
        block on all. Raises RuntimeError within another block, and at its end as `answer` does.
        """
        if self.is_open:
            raise RuntimeError("llm.turns() cannot be nested: leave the block of llm.turns() first")
        self.is_open, self._is_over = True, False
        try:
            with host_signals():
                yield
            self._leave()
        except GeneratorExit:
            raise
        except BaseException as error:  # Ctrl-C too: the other ranks wait for this one's next call
            self._fail(error)
            raise
        finally:
            self.is_open = False

    def check_outside(self, call: str) -> None:
        """Raise RuntimeError in a block: the other ranks wait for this one's prompts, not for `call`."""
        if self.is_open:
            raise RuntimeError(f"{call} is a call that all ranks make together: leave the block of llm.turns() first")

    def answer(self, prompts: Sequence[CheckedPrompt]) -> list[RequestOutput]:
        """Answer this rank's prompts, in a block. Raises RankFailedError if another rank's error ended the block."""
        if self._is_over:
            raise RuntimeError("another rank failed and ended this block of llm.turns() on every rank: leave the block")
        return self._call(lambda: prompts)[1]

    def _leave(self) -> None:
        while not self._is_over:
            # This rank takes part in the steps of the others' prompts.
            self._is_over, _ = self._call(self._engine.changes.complete_weights)

    def _fail(self, error: BaseException) -> None:
        """Send `error` to the other ranks and raise it, unless the block has ended on all ranks already."""

        def raise_it() -> None:
            raise error

        if not self._is_over:
            self._is_over = True
            exchange(self._engine, _TURNS, raise_it, lambda _: None)

    def _call(self, prepare: _Prepare) -> tuple[bool, list[RequestOutput]]:
        try:
            return self._run_call(prepare)
        except BaseException:
            self._is_over = True
            raise


def _run_call(
    engine: Engine, replicas: Replicas | None, call: str, prepare: _Prepare
) -> tuple[bool, list[RequestOutput]]:
    """Returns whether every rank has left, and the outputs of this rank's prompts."""
    own, answers = agree_to_compute(engine, call, prepare, {}, _encode)
    by_rank = [_decode(payload) for payload in answers] if answers else [own]
    if all(prompts is None for prompts in by_rank):
        return True, []
    size = engine.engine_channel.size
    prompts = {
        position * size + rank: prompt
        for rank, given in enumerate(by_rank)
        for position, prompt in enumerate(given or ())
    }
    outputs = answer_prompts(engine, replicas, prompts, lambda num_answered: None)
    rank = engine.engine_channel.rank
    return False, [outputs[position * size + rank] for position in range(len(own or ()))]


def _encode(prompts: Sequence[CheckedPrompt] | None) -> str:
    """Encode the prompts as a JSON value."""
    writer = ByteWriter()
    _PROMPTS.write(writer, [None if prompts is None else tuple(prompts)])
    media = [tuple(map(sent, each.media)) for each in prompts or ()]
    for codec, kind in ((_IMAGES, SentImage), (_AUDIO, SentAudio)):
        codec.write(writer, [tuple([tuple([one for one in each if isinstance(one, kind)]) for each in media])])
    return base64.b64encode(bytes(writer.data)).decode("ascii")


def _decode(payload: str) -> Sequence[CheckedPrompt] | None:
    """The inverse of `_encode`."""
    content = base64.b64decode(payload)
    reader = ByteReader(content, len(content))
    prompts: Sequence[CheckedPrompt] | None = _PROMPTS.read(reader, 1)[0]
    images: Sequence[Sequence[SentImage]] = _IMAGES.read(reader, 1)[0]
    audio: Sequence[Sequence[SentAudio]] = _AUDIO.read(reader, 1)[0]
    if prompts is None:
        return None
    media: list[tuple[PreparedMedia, ...]] = [
        (*[each.prepared for each in first], *[each.prepared for each in second])
        for first, second in zip(images, audio, strict=True)
    ]
    return [replace(prompt, media=given) if given else prompt for prompt, given in zip(prompts, media, strict=True)]
