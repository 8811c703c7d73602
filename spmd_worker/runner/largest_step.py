"""The step that needs most memory, made up: what a profile runs.

Knows counts. The tokens are all zero; no request behind them exists.
"""

from kv_cache.block import BlockId, num_blocks_for
from spmd_worker.lockstep.mirror import MirroredSequence, ScheduledSequence
from spmd_worker.sequence.request import Request, RequestId
from spmd_worker.sequence.sampling_params import SamplingParams


def largest_step(
    max_num_batched_tokens: int, max_num_seqs: int, max_model_len: int, block_size: int
) -> tuple[ScheduledSequence, ...]:
    """As many tokens as a step may hold, spread over as many sequences as may run, all of which sample with filters."""
    num_sequences = max(1, min(max_num_seqs, max_num_batched_tokens))
    num_tokens = max(1, min(max_model_len - 1, max_num_batched_tokens // num_sequences))
    sampling = SamplingParams(top_p=0.9, logprobs=0)
    scheduled: list[ScheduledSequence] = []
    first_block = 0
    for index in range(num_sequences):
        num_blocks = num_blocks_for(num_tokens, block_size)
        request = Request(RequestId(index), (0,) * num_tokens, sampling, stream=index)
        blocks = [BlockId(first_block + offset) for offset in range(num_blocks)]
        sequence = MirroredSequence(request, 0, [], blocks, 0, num_tokens)
        scheduled.append(ScheduledSequence(sequence, num_tokens, num_samples=1))
        first_block += num_blocks
    return tuple(scheduled)
