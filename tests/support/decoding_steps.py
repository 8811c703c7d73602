"""Steps of rows that decode, as a mirror gives them to a runner."""

from collections.abc import Iterator

from kv_cache.block import BlockId
from spmd_worker.replica.mirror.mirror import MirroredSequence, ScheduledSequence
from spmd_worker.replica.sequence.request import Request, RequestId
from spmd_worker.replica.sequence.sampling_params import SamplingParams


def decoding(num_sequences: int, length: int, block_size: int, spread: int) -> Iterator[tuple[ScheduledSequence, ...]]:
    """Steps of rows that decode, of `length` tokens and up to `spread` more at first."""
    sequences = []
    for index in range(num_sequences):
        prompt = tuple(range(length - index % (spread + 1)))
        request = Request(RequestId(index), prompt, SamplingParams(temperature=0.0), index)
        sequences.append(MirroredSequence(request, 0, [], [], len(prompt) - 1, 1))
    next_block = 0
    while True:
        for sequence in sequences:
            while len(sequence.block_ids) * block_size < sequence.num_tokens:
                sequence.block_ids.append(BlockId(next_block))
                next_block += 1
        yield tuple(each.decode_row for each in sequences)
        for sequence in sequences:
            sequence.output_token_ids.append(7)
            sequence.num_computed_tokens += 1
