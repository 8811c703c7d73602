"""The tensors of one step, literally: flat tokens in plan order, positions, blocks, and the rows that sample."""

import dataclasses

import torch

from kv_cache.block import BlockId
from spmd_worker.replica.mirror.mirror import MirroredSequence, ScheduledSequence
from spmd_worker.replica.sequence.request import Request, RequestId
from spmd_worker.replica.sequence.sampling_params import SamplingParams
from spmd_worker.worker.runner.batch import build_batch
from spmd_worker.worker.runner.dummy_steps import max_step

CPU = torch.device("cpu")
GREEDY = SamplingParams(temperature=0.0)


def scheduled(
    request_id: int,
    prompt: list[int],
    output: list[int],
    blocks: list[int],
    first: int,
    num_tokens: int,
    num_samples: int,
    sample: int = 0,
    regime: int = 0,
) -> ScheduledSequence:
    request = Request(RequestId(request_id), tuple(prompt), SamplingParams(n=4), 100 + request_id, regime)
    tables = [BlockId(block) for block in blocks]
    return ScheduledSequence(
        MirroredSequence(request, sample, output, tables, first, num_tokens), num_tokens, num_samples
    )


STEP = [
    scheduled(0, [10, 11, 12], [], [5], 0, 3, 2),  # a whole prompt, about to fork
    scheduled(1, [20, 21, 22, 23, 24], [25, 26, 27], [7, 2], 7, 1, 1, sample=3, regime=105),  # decodes
    scheduled(2, [30, 31, 32, 33, 34, 35], [], [1, 9], 3, 2, 0),  # a chunk that crosses into its second block
    scheduled(3, [40, 41], [42, 43, 44], [0, 3], 1, 4, 1, regime=2),  # computed again after a preemption
]


def test_batch_is_flat_in_plan_order():
    batch = build_batch(STEP, 4, CPU)
    assert batch.token_ids.tolist() == [10, 11, 12, 27, 33, 34, 41, 42, 43, 44]
    assert batch.positions.tolist() == [0, 1, 2, 7, 3, 4, 1, 2, 3, 4]
    assert batch.rope_regimes.tolist() == [0, 0, 0, 105, 0, 0, 2, 2, 2, 2]
    assert batch.attention.query_starts == (0, 3, 4, 6, 10)
    assert batch.attention.context_lengths == (3, 8, 5, 5)
    assert batch.attention.token_blocks.tolist() == [5, 5, 5, 2, 1, 9, 0, 0, 0, 3]
    assert batch.attention.token_offsets.tolist() == [0, 1, 2, 3, 3, 0, 1, 2, 3, 0]
    assert [table[:2] for table in batch.attention.block_tables.tolist()] == [[5, 0], [7, 2], [1, 9], [0, 3]]


def test_rows_sample_their_own_last_token():
    batch = build_batch(STEP, 4, CPU)
    assert batch.sample_rows.tolist() == [2, 2, 3, 9]
    names = [(row.stream, row.sample_index, row.position) for row in batch.rows]
    assert names == [(100, 0, 3), (100, 1, 3), (101, 3, 8), (103, 0, 5)]
    assert [list(row.output_token_ids) for row in batch.rows] == [[], [], [25, 26, 27], [42, 43, 44]]


def test_argmax_rows_have_no_sample_rows():
    greedy = [dataclasses.replace(each.sequence.request, sampling=GREEDY) for each in STEP]
    step = [with_request(each, request) for each, request in zip(STEP, greedy)]
    assert build_batch(step, 4, CPU).rows == ()
    assert len(build_batch(step, 4, CPU).sample_rows) == 4
    waiting = with_request(step[1], dataclasses.replace(greedy[1], sampling=dataclasses.replace(GREEDY, min_tokens=4)))
    assert [row.stream for row in build_batch([step[0], waiting], 4, CPU).rows] == [100, 100, 101], "of 3 tokens"
    enough = with_request(step[1], dataclasses.replace(greedy[1], sampling=dataclasses.replace(GREEDY, min_tokens=3)))
    assert build_batch([step[0], enough], 4, CPU).rows == ()
    for kind in ({"logprobs": 0}, {"temperature": 1.0}, {"logit_bias": {3: 1.0}}, {"repetition_penalty": 1.1}):
        other = with_request(step[3], dataclasses.replace(greedy[3], sampling=dataclasses.replace(GREEDY, **kind)))
        assert len(build_batch([step[0], other], 4, CPU).rows) == 3, kind
        # What does not sample has no part in it.
        chunk = with_request(step[2], dataclasses.replace(greedy[2], sampling=dataclasses.replace(GREEDY, **kind)))
        assert build_batch([step[0], chunk], 4, CPU).rows == (), kind


def with_request(each: ScheduledSequence, request: Request) -> ScheduledSequence:
    return each._replace(sequence=dataclasses.replace(each.sequence, request=request))


def test_a_step_of_chunks_alone_samples_nothing():
    batch = build_batch([STEP[2]], 4, CPU)
    assert batch.rows == ()
    assert batch.sample_rows.tolist() == []


def test_sequence_layout_does_not_depend_on_batch():
    """Else the answer to a row would depend on the rows beside it."""
    together = build_batch(STEP, 4, CPU)
    for index, each in enumerate(STEP):
        alone = build_batch([each], 4, CPU)
        tokens = slice(together.attention.query_starts[index], together.attention.query_starts[index + 1])
        for name in ("token_ids", "positions", "rope_regimes"):
            assert torch.equal(getattr(together, name)[tokens], getattr(alone, name)), name
        assert torch.equal(together.attention.token_blocks[tokens], alone.attention.token_blocks)


def test_max_step_has_max_tokens_and_rows():
    step = max_step(max_num_batched_tokens=64, max_num_seqs=8, max_model_len=100, block_size=4)
    assert [each.num_scheduled_tokens for each in step] == [8] * 8
    blocks = [block for each in step for block in each.sequence.block_ids]
    assert blocks == list(range(16)), "no block is shared"
    assert all(each.num_samples == 1 for each in step)
    assert all(row.needs_all_logits for row in build_batch(step, 4, CPU).rows)


def test_max_step_respects_max_model_len():
    step = max_step(max_num_batched_tokens=2048, max_num_seqs=2, max_model_len=50, block_size=16)
    assert [each.num_scheduled_tokens for each in step] == [49, 49]
    assert len(max_step(3, 8, 50, 16)) == 3
