"""What the last stage sampled reaches every rank; what a rank made itself, it compares."""

from types import SimpleNamespace
from typing import Any

import pytest

from spmd_worker.engine.pipeline import StepPipeline
from spmd_worker.replica.lockstep.lockstep import AgreedStep
from spmd_worker.replica.lockstep.wire.result_coding import encode_result
from spmd_worker.replica.sequence.sequence import SequenceKey
from spmd_worker.replica.sequence.step import StepPlan, StepResult

PLAN = StepPlan(1, continuing=(SequenceKey(1, 0),), continuing_token_ids=(4,), num_tokens=1)
SAMPLED = StepResult(1, (5,), mask_checksums=(7,))


@pytest.mark.parametrize(("rank", "own", "expected"), [(0, (), (7,)), (1, (), (7,)), (2, (7,), (7,)), (3, (8,), (8,))])
def test_sampling_rank_keeps_own_mask_checksum(rank: int, own: tuple[int, ...], expected: Any):
    """Of two stages of two shards: rank 2 tells the others; rank 3 has made masks too."""
    executor: Any = SimpleNamespace(
        max_concurrent_batches=2,
        collective_rpc=lambda *given, **named: None,
        execute_model=lambda plan, non_block: StepResult(1, (9,) if own else (), mask_checksums=own),
    )

    def broadcast(payload: bytes | None, source: int) -> bytes:
        assert (payload is not None, source) == (rank == 2, 2)
        return encode_result(SAMPLED)

    pipeline = StepPipeline(
        executor, SimpleNamespace(rank=rank, size=4, broadcast=broadcast), num_shards=2, num_stages=2
    )
    pipeline.add(AgreedStep(PLAN, ()))
    _, result = pipeline.take_oldest()
    assert (result.token_ids, result.mask_checksums) == ((5,), expected)
