"""The step that needs most memory, made up: what a profile runs.

The tokens are all zero; no request behind them exists.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from kv_cache.block import BlockId, num_blocks_for
from kv_cache.cache_engine import CacheEngine
from spmd_worker.model.decoder import DecoderForCausalLM
from spmd_worker.model_config.pooling import PoolingConfig
from spmd_worker.replica.mirror.mirror import MirroredSequence, ScheduledSequence
from spmd_worker.replica.sequence.pooling_params import PoolingParams, taken_pooling
from spmd_worker.replica.sequence.request import Request, RequestId
from spmd_worker.replica.sequence.sampling_params import SamplingParams
from spmd_worker.worker.runner.model_runner import ModelRunner

# One likeliest token as well: off the CPU those of many rows are sought at once, in copies beside the logits.
_FILTERED = SamplingParams(top_p=0.9, logprobs=1)
_REPORTED = SamplingParams(logit_bias=((0, 1.0),), logprobs=0)
_GREEDY = SamplingParams(temperature=0.0, logit_bias=((0, 1.0),), logprobs=1)


def largest_step(
    max_num_batched_tokens: int,
    max_num_seqs: int,
    max_model_len: int,
    block_size: int,
    pooling: PoolingConfig | None = None,
    *,
    all_filtered: bool = False,
) -> tuple[ScheduledSequence, ...]:
    """As many tokens as a step may hold, spread over as many sequences as may run, all of which sample, or are pooled.

    All want log-probabilities and whole rows of logits. On the CPU, where filters go nearly row by row, one filtered
    row holds as much as many and takes less time. Elsewhere many are sorted at once: `all_filtered` filters all but the
    first, which is greedy, so that what is filtered and what is drawn are copies beside the logits of all.
    """
    num_sequences = max(1, min(max_num_seqs, max_num_batched_tokens))
    num_tokens = max(1, min(max_model_len - 1, max_num_batched_tokens // num_sequences))
    scheduled: list[ScheduledSequence] = []
    first_block = 0
    pooled = None if pooling is None else taken_pooling(PoolingParams(), pooling)
    for index in range(num_sequences):
        num_blocks = num_blocks_for(num_tokens, block_size)
        if all_filtered:
            sampling = _FILTERED if index or num_sequences == 1 else _GREEDY
        else:
            sampling = _REPORTED if index else _FILTERED
        request = Request(RequestId(index), (0,) * num_tokens, sampling, stream=index, pooling=pooled)
        blocks = [BlockId(first_block + offset) for offset in range(num_blocks)]
        sequence = MirroredSequence(request, 0, [], blocks, 0, num_tokens)
        scheduled.append(ScheduledSequence(sequence, num_tokens, num_samples=1))
        first_block += num_blocks
    return tuple(scheduled)


def longest_chunk(
    max_num_batched_tokens: int, max_model_len: int, block_size: int, num_blocks: int
) -> tuple[ScheduledSequence, ...]:
    """The chunk for which attention holds most, where it holds anything of a row's length: as many tokens as a step may
    have, at the end of the longest row. The row's blocks take turns in the `num_blocks` that there are.
    """
    num_tokens = max(1, min(max_num_batched_tokens, max_model_len - 1))
    first = max(max_model_len - 1 - num_tokens, 0)
    request = Request(RequestId(0), (0,) * (first + num_tokens), _REPORTED, stream=0)
    blocks = [BlockId(index % num_blocks) for index in range(num_blocks_for(first + num_tokens, block_size))]
    sequence = MirroredSequence(request, 0, [], blocks, first, num_tokens)
    return (ScheduledSequence(sequence, num_tokens, num_samples=1),)


@contextmanager
def prepared_step(
    model: DecoderForCausalLM,
    engine: CacheEngine,
    new_runner: Callable[[CacheEngine], ModelRunner],
    *steps: Sequence[ScheduledSequence],
) -> Iterator[Callable[[], None]]:
    """Run `steps`, one after the other, on a cache of their own, whose memory is taken on entering and given back on
    leaving.

    `engine` is not allocated yet. It may have fewer layers than the model: as many run, and the model has all of them
    again on leaving. Layers are alike and follow each other, so a few hold at their fullest what all do.
    """
    stack = model.model
    all_layers = stack.layers
    stack.layers = all_layers[: engine.spec.num_layers]
    try:
        engine.allocate()
        engine.device_cache.zero_()  # host memory is taken when it is written

        def run() -> None:
            runner = new_runner(engine)
            for scheduled in steps:
                runner.forward(0, scheduled)
                runner.sample()

        yield run
    finally:
        stack.layers = all_layers
        engine.release()
