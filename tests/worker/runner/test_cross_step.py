"""A step of an encoder-decoder model, literally: rows of the encoder, tokens of the decoder, and what these see."""

import torch

from kv_cache.block import BlockId
from spmd_worker.replica.mirror.mirror import MirroredSequence, ScheduledSequence
from spmd_worker.replica.sequence.encoder_input import encoder_text
from spmd_worker.replica.sequence.request import Request, RequestId
from spmd_worker.replica.sequence.sampling_params import SamplingParams
from spmd_worker.worker.runner.batch import build_batch
from spmd_worker.worker.runner.dummy_steps import max_step

CPU = torch.device("cpu")
GREEDY = SamplingParams(temperature=0.0)


def scheduled(num_rows: int, prompt: list[int], blocks: list[int], first: int, count: int) -> ScheduledSequence:
    """In blocks of 4."""
    given = encoder_text([7] * num_rows)
    ids, item = given.before(prompt, 4)
    kinds = {"num_virtual_tokens": given.num_positions(4), "media": (item,)}
    request = Request(RequestId(num_rows), ids, GREEDY, num_rows, **kinds)
    tables = [BlockId(block) for block in blocks]
    return ScheduledSequence(MirroredSequence(request, 0, [], tables, first, count), count, 0)


STEP = [
    scheduled(5, [30, 31, 32], [9, 8, 7], 0, 10),  # eight positions of the encoder, two of the decoder's tokens
    scheduled(6, [40, 41], [6, 5, 4], 3, 4),  # a chunk of the encoder's
    scheduled(3, [50, 51, 52, 53, 54], [3, 2, 1], 7, 1),  # another token of the decoder, in its second block
]


def test_tokens_are_of_encoder_or_decoder():
    batch = build_batch(STEP, 4, CPU, has_encoder=True)
    cross = batch.attention.cross
    assert cross is not None
    assert cross.encoder_rows.tolist() == [*range(8), 10, 11, 12, 13]
    assert cross.decoder_rows.tolist() == [8, 9, 14]
    assert batch.positions.tolist() == [0] * 8 + [0, 1] + [0] * 4 + [3]
    assert batch.token_ids.tolist() == [7] * 5 + [0] * 3 + [30, 31] + [7] * 3 + [0] + [53]


def test_rows_are_written_where_they_are():
    cross = build_batch(STEP, 4, CPU, has_encoder=True).attention.cross
    assert cross is not None
    assert cross.written.token_blocks.tolist() == [9] * 4 + [8] * 4 + [6, 5, 5, 5]
    assert cross.written.token_offsets.tolist() == [0, 1, 2, 3] * 2 + [3, 0, 1, 2]
    assert (cross.written.query_starts, cross.written.context_lengths) == ((0, 8, 12), (8, 7))


def test_tokens_see_their_own_and_all_rows():
    attention = build_batch(STEP, 4, CPU, has_encoder=True).attention
    cross = attention.cross
    assert cross is not None
    own, seen = cross.own, cross.seen
    assert (own.query_starts, own.context_lengths) == ((0, 2, 3), (2, 4))
    assert [table[:length] for table, length in zip(own.block_tables.tolist(), (1, 2))] == [[7], [2, 1]]
    assert list(zip(own.token_blocks.tolist(), own.token_offsets.tolist())) == [(7, 0), (7, 1), (2, 3)]
    assert (seen.query_starts, seen.context_lengths) == ((0, 1, 2, 3), (5, 5, 3))
    assert seen.block_tables.tolist() == [[9, 8], [9, 8], [3, 2]]
    parts = (cross.written, own, seen)
    assert all(each.is_of_step(attention) and attention.is_of_step(each) for each in parts)


def test_dummies_without_encoders_see_one_key():
    cross = build_batch(max_step(6, 2, 8, 4), 4, CPU, has_encoder=True).attention.cross
    assert cross is not None
    assert (len(cross.encoder_rows), cross.seen.context_lengths) == (0, (1,) * 6)
    assert cross.own.context_lengths == (3, 3)
