"""Per-rank prompts (`gather=True`) and `turns()`: any number of such calls per rank.

A call is one exchange, in which each rank sends its prompts, and the run of all of them in one list, which every rank
has. Prompt i of rank r has the index i * ranks + r, so that its random stream does not depend on the number of prompts
of the others. Each rank keeps the outputs of its own. A prompt with images or audio runs in a replica that is chosen
before, and only the leader of that gets the pixels or features, from the rank that has them.

In turns, a rank that calls waits until every other rank calls too or has left; ranks that have left pass no prompts,
and follow until all have left. So loops of different lengths on different ranks never wait for each other for ever.
"""

import base64
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Final

import torch

from spmd_worker.base.liveness.deferred_signals import host_signals
from spmd_worker.engine.data_parallel.agreement import agree_to_compute, exchange
from spmd_worker.engine.data_parallel.prompts import CheckedPrompt, answer_prompts
from spmd_worker.engine.data_parallel.replicas import Replicas
from spmd_worker.engine.engine import Engine
from spmd_worker.media.media_sizes import MediaSizes, with_content
from spmd_worker.media.sent_audio import PreparedMedia
from spmd_worker.ranks.transport.channel import ControlChannel
from spmd_worker.replica.lockstep.wire.packing import ByteReader, ByteWriter
from spmd_worker.replica.lockstep.wire.record_codec import codec_of
from spmd_worker.replica.sequence.outputs import RequestOutput

_TURNS: Final = "turns"
_Prepare = Callable[[], Sequence[CheckedPrompt] | None]
"""None: this rank has left."""
_PROMPTS: Final = codec_of(tuple[CheckedPrompt, ...] | None)
_MEDIA: Final = codec_of(tuple[tuple[MediaSizes, ...], ...])


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
    size, rank = engine.engine_channel.size, engine.engine_channel.rank
    # Those of this rank still have their images and audio.
    by_rank[rank] = own
    prompts = {
        position * size + rank: prompt
        for rank, given in enumerate(by_rank)
        for position, prompt in enumerate(given or ())
    }
    if size > 1:
        prompts |= _send_media(engine, prompts)
    outputs = answer_prompts(engine, replicas, prompts, lambda num_answered: None)
    return False, [outputs[position * size + rank] for position in range(len(own or ()))]


def _send_media(engine: Engine, prompts: Mapping[int, CheckedPrompt]) -> dict[int, CheckedPrompt]:
    """The prompts with images or audio, each placed in a replica, whose leader gets the content from the rank that has
    it.
    """
    channel = engine.engine_channel
    placed = _placed(
        [index for index, each in sorted(prompts.items()) if each.content.media], channel.size, engine.channel.size
    )
    found = {}
    with engine.life.exchanging():
        for index, replica in placed.items():
            prompt, source, leader = prompts[index], index % channel.size, replica * engine.channel.size
            media = prompt.content.media
            if source != leader and channel.rank == source:
                for each in media:
                    channel.send_bytes(torch.frombuffer(bytearray(each.content.data), dtype=torch.uint8), leader)
            elif source != leader and channel.rank == leader:
                media = tuple([_received(channel, each, source) for each in media])
            found[index] = CheckedPrompt(replace(prompt.content, media=media), prompt.sampling, replica)
    return found


def _received(channel: ControlChannel, media: PreparedMedia, source: int) -> PreparedMedia:
    return with_content(media, channel.receive_bytes(media.content.num_bytes, source).numpy().data)


def _placed(indices: Sequence[int], num_ranks: int, replica_size: int) -> dict[int, int]:
    """Replica of each prompt with media, by index: that of its rank, but no replica gets more than its share."""
    num_prompts = [0] * (num_ranks // replica_size)
    share = -(-len(indices) // len(num_prompts))
    placed, others = {}, []
    for index in indices:
        replica = index % num_ranks // replica_size
        if num_prompts[replica] == share:
            others.append(index)
            continue
        placed[index] = replica
        num_prompts[replica] += 1
    for index in others:
        placed[index] = num_prompts.index(min(num_prompts))
        num_prompts[placed[index]] += 1
    return dict(sorted(placed.items()))


def _encode(prompts: Sequence[CheckedPrompt] | None) -> str:
    """Encode the prompts, without the content of their images and audio, as a JSON value."""
    writer = ByteWriter()
    _PROMPTS.write(writer, [None if prompts is None else tuple(prompts)])
    _MEDIA.write(writer, [tuple([tuple(map(MediaSizes.of, each.content.media)) for each in prompts or ()])])
    return base64.b64encode(bytes(writer.data)).decode("ascii")


def _decode(payload: str) -> Sequence[CheckedPrompt] | None:
    """The inverse of `_encode`."""
    content = base64.b64decode(payload)
    reader = ByteReader(content, len(content))
    prompts: Sequence[CheckedPrompt] | None = _PROMPTS.read(reader, 1)[0]
    media: Sequence[Sequence[MediaSizes]] = _MEDIA.read(reader, 1)[0]
    if prompts is None:
        return None
    return [
        replace(prompt, content=replace(prompt.content, media=tuple([each.prepared for each in given])))
        for prompt, given in zip(prompts, media, strict=True)
    ]
