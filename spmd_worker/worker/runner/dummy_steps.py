"""Dummy steps: the one that needs the most memory, for profiling, and small ones that launch every kernel, for warm-up.

All tokens are zero, and no real requests exist.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Final

from kv_cache.block import BlockId, num_blocks_for
from kv_cache.cache_engine import CacheEngine
from spmd_worker.model.decoder import DecoderForCausalLM
from spmd_worker.model_config.pooling import PoolingConfig
from spmd_worker.replica.mirror.mirror import MirroredSequence, ScheduledSequence
from spmd_worker.replica.sequence.pooling_params import PoolingParams, resolve_pooling
from spmd_worker.replica.sequence.request import Request, RequestId
from spmd_worker.replica.sequence.sampling_params import SamplingParams
from spmd_worker.worker.runner.model_runner import ModelRunner

# With a top logprob: off the CPU those of many rows are computed at once, in copies next to the logits.
_FILTERED = SamplingParams(top_p=0.9, logprobs=1).frozen()
_PENALISED = SamplingParams(top_p=0.9, logprobs=1, repetition_penalty=1.1).frozen()
_REPORTED = SamplingParams(logit_bias=((0, 1.0),), logprobs=0).frozen()
_GREEDY = SamplingParams(temperature=0.0, logit_bias=((0, 1.0),), logprobs=1).frozen()

DUMMY_SLOTS: Final = (1, 0)
"""Slots of recurrent states, of the device and of the host, that dummy steps need: all their rows share the first. What
it holds means nothing, and is finite.
"""

_WARM_UP_PARAMS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0, logprobs=1),
    SamplingParams(temperature=1.0, top_k=2, top_p=0.9, min_p=0.1, logprobs=1),
    SamplingParams(temperature=1.0, logit_bias=((0, 1.0),), repetition_penalty=1.1),
)
"""Sampling from shards and from complete rows of logits: greedy, random, filtered, penalised, with logprobs. One row
each: more rows need no other kernels, and take time where kernels are interpreted.
"""


def max_step(
    max_num_batched_tokens: int,
    max_num_seqs: int,
    max_model_len: int,
    block_size: int,
    pooling: PoolingConfig | None = None,
    *,
    all_filtered: bool = False,
) -> tuple[ScheduledSequence, ...]:
    """The maximum number of tokens, spread over the maximum number of sequences, all of which sample or are pooled.

    All want logprobs and complete rows of logits. On the CPU filters work nearly row by row, so one filtered row needs
    as much memory as many and takes less time. Elsewhere many rows are sorted at once: `all_filtered` filters all but
    the first, which is greedy, so that the filtered and the sampled logits are copies next to the logits of all rows;
    and penalises them, so that the device keeps counts of as many rows as there can be.
    """
    num_sequences = max(1, min(max_num_seqs, max_num_batched_tokens))
    num_tokens = max(1, min(max_model_len - 1, max_num_batched_tokens // num_sequences))
    num_blocks = num_blocks_for(num_tokens, block_size)
    first, others = (_GREEDY, _PENALISED) if all_filtered and num_sequences > 1 else (_FILTERED, _REPORTED)
    return tuple(
        _sequence(
            index,
            others if index else first,
            range(index * num_blocks, (index + 1) * num_blocks),
            num_tokens,
            pooling=pooling,
        )
        for index in range(num_sequences)
    )


def longest_chunk(
    max_num_batched_tokens: int, max_model_len: int, block_size: int, num_blocks: int
) -> tuple[ScheduledSequence, ...]:
    """The chunk that needs the most attention memory, if that depends on a row's length: the maximum number of tokens
    at the end of the longest row. Its blocks cycle through the `num_blocks` of the cache.
    """
    num_tokens = max(1, min(max_num_batched_tokens, max_model_len - 1))
    num_computed = max(max_model_len - 1 - num_tokens, 0)
    blocks = _cycled_blocks(num_computed + num_tokens, block_size, num_blocks)
    return (_sequence(0, _REPORTED, blocks, num_tokens, num_computed),)


def warm_up_steps(
    num_tokens: int, num_keys: int, block_size: int, num_blocks: int, pooling: PoolingConfig | None = None
) -> tuple[tuple[ScheduledSequence, ...], ...]:
    """A step of `num_tokens` sequences of one token, one of a few, and a chunk of two tokens, if there may be two. All
    sample or are pooled. The first sequence of the first step attends to `num_keys` keys, the others to their own.
    Blocks cycle through the `num_blocks` of the cache.
    """
    params = _WARM_UP_PARAMS if pooling is None else _WARM_UP_PARAMS[:1]

    def sequence(index: int, length: int, num_computed: int) -> ScheduledSequence:
        sampling = params[index] if index < len(params) else _WARM_UP_PARAMS[0]
        blocks = _cycled_blocks(length, block_size, num_blocks)
        return _sequence(index, sampling, blocks, length - num_computed, num_computed, pooling=pooling)

    many = tuple(sequence(index, 1 if index else num_keys, 0 if index else num_keys - 1) for index in range(num_tokens))
    few = tuple(sequence(index, 1, 0) for index in range(min(num_tokens, len(_WARM_UP_PARAMS))))
    return (many, few, (sequence(0, min(num_tokens, 2), 0),))


def greedy_step(num_sequences: int, block_size: int, num_blocks: int) -> tuple[ScheduledSequence, ...]:
    """A step of `num_sequences` greedy sequences of one token."""
    blocks = _cycled_blocks(1, block_size, num_blocks)
    return tuple(_sequence(index, _WARM_UP_PARAMS[0], blocks, 1) for index in range(num_sequences))


def drafting_step(block_size: int, num_blocks: int) -> tuple[ScheduledSequence, ...]:
    """A step of a greedy sequence that has a draft, and whose recurrent states lag by a token."""
    sequence, _, num_samples = _sequence(0, _WARM_UP_PARAMS[0], _cycled_blocks(4, block_size, num_blocks), 1, 2)
    sequence.draft_token_ids = (0,)
    return lagging([ScheduledSequence(sequence, 2, num_samples)], 1)


def prompt_step(
    num_tokens: int, max_model_len: int, block_size: int, num_blocks: int, pooling: PoolingConfig | None = None
) -> tuple[ScheduledSequence, ...]:
    """A step of as few prompts as hold `num_tokens` tokens. Blocks cycle through the `num_blocks` of the cache."""
    most = max(1, max_model_len - 1)
    lengths = [min(most, num_tokens - start) for start in range(0, num_tokens, most)]
    return tuple(
        _sequence(index, _WARM_UP_PARAMS[0], _cycled_blocks(length, block_size, num_blocks), length, pooling=pooling)
        for index, length in enumerate(lengths)
    )


def with_adapter(scheduled: Sequence[ScheduledSequence], adapter: int) -> tuple[ScheduledSequence, ...]:
    """The same step of rows with this adapter (`Request.adapter`)."""
    for each in scheduled:
        each.sequence.request = replace(each.sequence.request, adapter=adapter)
    return tuple(scheduled)


def lagging(scheduled: Sequence[ScheduledSequence], num_tokens: int) -> tuple[ScheduledSequence, ...]:
    """The same step of rows whose recurrent states lag by so many tokens."""
    for each in scheduled:
        each.sequence.num_lagging_tokens = num_tokens
    return tuple(scheduled)


def in_groups(scheduled: Sequence[ScheduledSequence], num_groups: int) -> tuple[ScheduledSequence, ...]:
    """The same step, whose rows' blocks serve every group of layers: what they hold means nothing."""
    for each in scheduled:
        each.sequence.block_ids = [block_id for block_id in each.sequence.block_ids for _ in range(num_groups)]
    return tuple(scheduled)


def _sequence(
    index: int,
    sampling: SamplingParams,
    blocks: Iterable[int],
    num_tokens: int,
    num_computed: int = 0,
    *,
    pooling: PoolingConfig | None = None,
) -> ScheduledSequence:
    """A sequence that computes its last `num_tokens` tokens, after `num_computed`, and samples or is pooled."""
    params = None if pooling is None else resolve_pooling(PoolingParams(), pooling)
    request = Request(RequestId(index), (0,) * (num_computed + num_tokens), sampling, stream=index, pooling=params)
    block_ids = [BlockId(number) for number in blocks]
    sequence = MirroredSequence(request, 0, [], block_ids, num_computed, num_tokens, state_slot=0)
    return ScheduledSequence(sequence, num_tokens, num_samples=1)


def _cycled_blocks(length: int, block_size: int, num_blocks: int) -> list[int]:
    """Empty for a cache without blocks."""
    return [index % num_blocks for index in range(num_blocks_for(length, block_size) if num_blocks else 0)]


@contextmanager
def prepared_step(
    model: DecoderForCausalLM,
    engine: CacheEngine,
    new_runner: Callable[[CacheEngine], ModelRunner],
    *steps: Sequence[ScheduledSequence],
) -> Iterator[Callable[[], None]]:
    """Context with a function that runs `steps` one after another on their own cache, which is allocated on entry and
    freed on exit. Where rows may have adapters, which need memory, all have one.

    `engine` is not allocated yet. It may have fewer layers than the model, of which only that many run: layers of a
    kind run one after another, so a few reach the same peak as all. The model has all layers again on exit.
    """
    stack = model.model
    all_layers = stack.layers
    stack.layers = all_layers[: engine.spec.num_layers]
    grouped = [in_groups(scheduled, engine.spec.groups.num_groups) for scheduled in steps]
    try:
        engine.allocate()
        for tensor in engine.tensors:
            tensor.zero_()  # host memory is taken when it is written

        def run() -> None:
            runner = new_runner(engine)
            adapters = runner.adapters
            with nullcontext(0) if adapters is None else adapters.placeholder() as adapter:
                for scheduled in grouped:
                    runner.forward(0, with_adapter(scheduled, adapter))
                    runner.sample()

        yield run
    finally:
        stack.layers = all_layers
        engine.release()
