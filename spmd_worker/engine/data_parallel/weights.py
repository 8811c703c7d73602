"""Broadcast of new weights from one rank to every rank of an engine, of all its replicas, tensor by tensor.

Headers are sent as JSON and tensors as their own bytes, through host memory, over the control group.
"""

import json
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from spmd_worker.base.liveness.heartbeat import BETWEEN_STEPS
from spmd_worker.engine.data_parallel.agreement import agree_on_call
from spmd_worker.engine.data_parallel.per_rank_prompts import PerRankCalls
from spmd_worker.engine.engine import Engine
from spmd_worker.engine.interruption import error_of_rank, error_text
from spmd_worker.model.weights.tensor_checks import check_data, pairs_of
from spmd_worker.replica.sequence.request import whole_number

Pair = tuple[str, Tensor]


def broadcast_weights(
    engine: Engine, turns: PerRankCalls, tensors: Iterable[Pair] | None, source: int
) -> Iterator[Pair]:
    """The pairs of rank `source` of the engine, on every rank; the others pass None. Every rank receives all of them,
    or stops after the same one. One tensor is sent at a time.

    Raises TypeError and ValueError for invalid or contradictory arguments, RuntimeError while requests are being
    answered and in `turns`, and on the other ranks RankFailedError with the text of what the source's `tensors` raised.
    """
    channel = engine.engine_channel
    own: Iterator[Pair] | None = None

    def prepare() -> int:
        nonlocal own, source
        source = whole_number("source", source)
        if not 0 <= source < channel.size:
            raise ValueError(f"source={source} must be a rank of this engine, from 0 to {channel.size - 1}")
        if (tensors is not None) != (channel.rank == source):
            raise ValueError(f"rank {source} alone gives tensors, the others None: this is rank {channel.rank}")
        if engine.scheduler.has_unfinished:
            raise RuntimeError("requests are in flight: call llm_engine.step until all have ended, or pause_generation")
        own = pairs_of(tensors) if tensors is not None else None
        return source

    turns.check_outside("update_weights")
    # Without a source each rank loads its own tensors, and nothing is exchanged.
    agree_on_call(engine, "update_weights", prepare, is_optional=True)
    while True:
        engine.times.heartbeat.enter(f"waiting for rank {source}'s weights")
        pair = _transfer(engine, own, source)
        engine.times.heartbeat.enter(BETWEEN_STEPS)
        if pair is None:
            return
        yield pair


def _transfer(engine: Engine, own: Iterator[Pair] | None, source: int) -> Pair | None:
    """Send or receive the next pair; None after the last."""
    pair, header, own_error = _read_next(own) if own is not None else (None, {}, None)
    channel = engine.engine_channel
    with engine.life.exchanging():
        payload = json.dumps(header).encode() if own is not None else None
        header = json.loads(channel.broadcast(payload, source))
        if "name" in header:
            shape, dtype = header["shape"], getattr(torch, header["dtype"])
            pair = (header["name"], torch.empty(shape, dtype=dtype)) if pair is None else pair
            channel.broadcast_tensor(pair[1], source)
    if own_error is not None:
        raise own_error
    if "error" in header:
        raise error_of_rank(source, header["error"], "failed in update_weights")
    return pair


def _read_next(own: Iterator[Pair]) -> tuple[Pair | None, dict[str, Any], BaseException | None]:
    """The source's next pair with its header, or the error instead."""
    try:
        found = next(own, None)
        if found is None:
            return None, {}, None
        name, tensor = found
        check_data(name, tensor)
        plain = tensor.detach().cpu().contiguous()
        header = {"name": name, "shape": list(plain.shape), "dtype": str(plain.dtype).removeprefix("torch.")}
        return (name, plain), header, None
    except BaseException as error:  # any error is sent to the waiting ranks
        return None, {"error": error_text(error)}, error
