"""A row with drafts samples at its last token and at each draft, with the outputs and drafts before it."""

import torch

from spmd_worker.replica.mirror.records import MirroredSequence, ScheduledSequence
from spmd_worker.replica.sequence.outputs import Logprob
from spmd_worker.replica.sequence.request import Request, RequestId
from spmd_worker.replica.sequence.sampled import SampledIds
from spmd_worker.replica.sequence.sampling_params import SamplingParams
from spmd_worker.worker.runner.batch import Batch, build_batch
from spmd_worker.worker.runner.batch_state import BatchState
from spmd_worker.worker.runner.verified import verified

CPU = torch.device("cpu")


def step() -> tuple[ScheduledSequence, ...]:
    """A row that decodes, one with two drafts, a chunk of a prompt, one that forks, and one with a draft."""

    def row(number: int, prompt: int, outputs: list[int], first: int, count: int, drafts: tuple[int, ...] = ()):
        request = Request(RequestId(number), tuple(range(prompt)), SamplingParams(n=3, temperature=0.5), number)
        return MirroredSequence(request, 0, outputs, [number], first, count, draft_token_ids=drafts)

    return (
        ScheduledSequence(row(0, 3, [7], 3, 1), 1, 1),
        ScheduledSequence(row(1, 2, [5, 6], 3, 1, (8, 9)), 3, 1),
        ScheduledSequence(row(2, 9, [], 0, 4), 4, 0),
        ScheduledSequence(row(3, 2, [], 0, 2), 2, 3),
        ScheduledSequence(row(4, 2, [5, 6], 2, 2, (4,)), 3, 1),
    )


def check(batch: Batch) -> None:
    assert batch.token_ids.tolist() == [7, 6, 8, 9, 0, 1, 2, 3, 0, 1, 5, 6, 4]
    assert batch.positions.tolist() == [3, 3, 4, 5, 0, 1, 2, 3, 0, 1, 2, 3, 4]
    assert batch.sample_rows.tolist() == [0, 1, 2, 3, 9, 9, 9, 11, 12]
    assert batch.drafts == ((), (8, 9), (), (), (), (4,))
    outputs = [list(row.output_token_ids) for row in batch.rows]
    assert outputs == [[7], [5, 6], [5, 6, 8], [5, 6, 8, 9], [], [], [], [5, 6], [5, 6, 4]]
    assert [row.position for row in batch.rows] == [4, 4, 5, 6, 2, 2, 2, 4, 5]
    assert [row.sample_index for row in batch.rows] == [0, 0, 0, 0, 0, 1, 2, 0, 0]


def test_row_with_drafts_samples_at_each():
    check(build_batch(step(), 16, CPU))


def test_kept_state_lays_out_the_same_step():
    check(BatchState(16, CPU).build(step()))


def test_ids_are_kept_up_to_the_first_difference():
    """Ids and log-probabilities of a row without drafts, two of three, and one whose first is wrong."""
    sampled = SampledIds((1, 8, 7, 9, 5, 4))
    entries = tuple({token_id: Logprob(float(index), 1)} for index, token_id in enumerate(sampled.token_ids))
    ids, (logprobs, others) = verified(((), (8, 9), (4,)), sampled, (entries, ()))
    assert ids == SampledIds((1, 8, 7, 5), (1, 2, 1))
    assert logprobs == (entries[0], entries[1], entries[2], entries[4])
    assert others == ()
    # A grammar that does not confirm the second id, and a row that ends where its first logits are not finite.
    assert verified(((8, 9),), SampledIds((8, 9, 3)), (), lambda row, own: 1)[0] == SampledIds((8,))
    assert verified(((8, 9),), SampledIds((-1, 9, 3)), ())[0] == SampledIds((-1,))
