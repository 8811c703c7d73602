"""The small steps, made up, that meet every kernel a later step can launch: what a warm-up runs.

The tokens are all zero; no request behind them exists.
"""

from kv_cache.block import BlockId, num_blocks_for
from spmd_worker.model_config.pooling import PoolingConfig
from spmd_worker.replica.mirror.mirror import MirroredSequence, ScheduledSequence
from spmd_worker.replica.sequence.pooling_params import PoolingParams, taken_pooling
from spmd_worker.replica.sequence.request import Request, RequestId
from spmd_worker.replica.sequence.sampling_params import SamplingParams

_WAYS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0, logprobs=1),
    SamplingParams(temperature=1.0, top_k=2, top_p=0.9, min_p=0.1, logprobs=1),
    SamplingParams(temperature=1.0, logit_bias=((0, 1.0),)),
)
"""Of choosing a token: from shards and from whole rows of logits, greedy and drawn, filtered, reported. One row each:
more of them make no other form of a kernel, and where kernels are interpreted each takes its time.
"""


def warm_up_steps(
    num_tokens: int, num_keys: int, block_size: int, num_blocks: int, pooling: PoolingConfig | None = None
) -> tuple[tuple[ScheduledSequence, ...], ...]:
    """A step of `num_tokens` sequences and one of a few. Each sequence computes one token, and samples or is pooled;
    the first sees `num_keys` keys, the others one. The first's blocks take turns in the `num_blocks` that there are,
    and the others write into one of them.
    """
    pooled = None if pooling is None else taken_pooling(PoolingParams(), pooling)
    ways = _WAYS if pooling is None else _WAYS[:1]
    counts = (num_tokens, min(num_tokens, len(_WAYS)))

    def sequence(index: int) -> ScheduledSequence:
        sampling = ways[index] if index < len(ways) else _WAYS[0]
        return _last_token(index, 1 if index else num_keys, sampling, pooled, block_size, num_blocks)

    return tuple(tuple(map(sequence, range(count))) for count in counts)


def greedy_step(num_sequences: int, block_size: int, num_blocks: int) -> tuple[ScheduledSequence, ...]:
    """A step of so many sequences, each of one token and greedy."""
    return tuple(_last_token(index, 1, _WAYS[0], None, block_size, num_blocks) for index in range(num_sequences))


def _last_token(
    index: int,
    length: int,
    sampling: SamplingParams,
    pooling: PoolingParams | None,
    block_size: int,
    num_blocks: int,
) -> ScheduledSequence:
    """Of a sequence of `length` tokens that is computed but for it."""
    request = Request(RequestId(index), (0,) * length, sampling, stream=index, pooling=pooling)
    blocks = [BlockId(number % num_blocks) for number in range(num_blocks_for(length, block_size))]
    return ScheduledSequence(MirroredSequence(request, 0, [], blocks, length - 1, 1), 1, num_samples=1)
