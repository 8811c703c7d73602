"""What the host takes to lay out a decode step for a device, and what it sends: with what is kept there, and anew."""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence

import torch

from kv_cache.block import BlockId
from spmd_worker.replica.mirror.mirror import MirroredSequence, ScheduledSequence
from spmd_worker.replica.sequence.request import Request, RequestId
from spmd_worker.replica.sequence.sampling_params import SamplingParams
from spmd_worker.worker.runner.batch import Batch, build_batch
from spmd_worker.worker.runner.batch_state import BatchState

BLOCK_SIZE = 16
DEVICE = torch.device("meta")
"""Whose operations take the host's time and compute nothing."""
_Build = Callable[[Sequence[ScheduledSequence]], Batch]


def bench_batches(options: argparse.Namespace) -> int:
    """What laying out a decode step costs the host, and what it sends to the device.

    `sequences` decode at each of the `contexts` for `steps` steps, laid out with what the device keeps of the step
    before and anew, in turns, on the meta device. Median microseconds of a step, and the most bytes that one sends.
    `ratio` is kept / anew. A step in which the rows are others is laid out anew in both, for `first_us`.
    """
    results = []
    print("context       kept us   anew us   ratio   first us   kept B   anew B")
    for context in options.contexts:
        times: dict[str, list[float]] = {"kept": [], "anew": [], "first": []}
        most_bytes = {"kept": 0, "anew": 0}
        for turn in range(options.turns):
            for kind in ("kept", "anew") if turn % 2 == 0 else ("anew", "kept"):
                _measure(kind, options.sequences, context, options.steps, times, most_bytes)
        microseconds = {kind: round(1e6 * statistics.median(each), 1) for kind, each in times.items()}
        ratio = round(microseconds["kept"] / microseconds["anew"], 3)
        results.append({"context": context, "us": microseconds, "ratio": ratio, "bytes": most_bytes})
        print(
            f"{context:7d} {microseconds['kept']:13.1f} {microseconds['anew']:9.1f} {ratio:7.3f} "
            f"{microseconds['first']:10.1f} {most_bytes['kept']:8d} {most_bytes['anew']:8d}"
        )
    print(json.dumps({"sequences": options.sequences, "steps": options.steps, "results": results}))
    return 0


def _measure(
    kind: str,
    num_sequences: int,
    context: int,
    num_steps: int,
    times: dict[str, list[float]],
    most_bytes: dict[str, int],
) -> None:
    sequences = [_sequence(index, context) for index in range(num_sequences)]
    state = BatchState(BLOCK_SIZE, DEVICE)
    build: _Build = state.build if kind == "kept" else lambda scheduled: build_batch(scheduled, BLOCK_SIZE, DEVICE)
    for step in range(num_steps + 1):
        scheduled = _next_step(sequences)
        start = time.perf_counter()
        batch = build(scheduled)
        seconds = time.perf_counter() - start
        if step:
            times[kind].append(seconds)
            sent = state.num_bytes_sent if kind == "kept" else _num_bytes(batch)
            most_bytes[kind] = max(most_bytes[kind], sent)
        elif kind == "kept":
            times["first"].append(seconds)


def _sequence(index: int, context: int) -> MirroredSequence:
    prompt = tuple(range(context - index % BLOCK_SIZE))
    request = Request(RequestId(index), prompt, SamplingParams(temperature=0.0), index)
    blocks = [BlockId(number) for number in range(-(-len(prompt) // BLOCK_SIZE))]
    return MirroredSequence(request, 0, [], blocks, len(prompt) - 1, 1)


def _next_step(sequences: list[MirroredSequence]) -> tuple[ScheduledSequence, ...]:
    for sequence in sequences:
        sequence.output_token_ids.append(7)
        sequence.num_computed_tokens += 1
        if len(sequence.block_ids) * BLOCK_SIZE < sequence.num_tokens:
            sequence.block_ids.append(BlockId(len(sequence.block_ids)))
    return tuple([each.decode_row for each in sequences])


def _num_bytes(batch: Batch) -> int:
    """Of tensors that are each sent as they are."""
    own = (batch.token_ids, batch.positions, batch.rope_regimes, batch.sample_rows)
    attention = (batch.attention.block_tables, batch.attention.token_blocks, batch.attention.token_offsets)
    return sum(each.nbytes for each in (*own, *attention))
