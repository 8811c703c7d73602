"""Builds the tensors of one forward pass from scheduled sequences.

A batch is flat: the tokens of all sequences one after another, in plan order, with no padding.

    token_ids   a0 a1 a2 | b7 | c3 c4      sequence a computes its prompt, b decodes, c computes a chunk
    positions    0  1  2 |  7 |  3  4
    sample_rows        2 |  3 |            c has more chunks to compute, so it is not sampled

T: tokens of the step; S: sequences; R: rows that sample.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kv_cache.block import num_blocks_for
from spmd_worker.model_config.vision_config import VisionConfig
from spmd_worker.ops.attention.metadata import AttentionMetadata, WantedTokens
from spmd_worker.ops.kernels.host_copies import to_device
from spmd_worker.ops.kernels.sample_row import SampleRow
from spmd_worker.replica.grammar.step_masks import ConstrainedRow
from spmd_worker.replica.mirror.mirror import MirroredSequence, ScheduledSequence
from spmd_worker.replica.sequence.sampled import sample_indices
from spmd_worker.replica.sequence.sequence import SequenceKey
from spmd_worker.worker.runner.cross_step import with_cross_step
from spmd_worker.worker.runner.image_layout import last_visible_of, media_of_step, rope_positions_of
from spmd_worker.worker.runner.state_rows import draft_replay, state_segments

Integers = NDArray[np.int64]

Drafts = tuple[tuple[int, ...], ...]

_DRAFTS = attrgetter("sequence.draft_token_ids")
_IS_PLAIN = attrgetter("sequence.is_plain")
_ADAPTER = attrgetter("request.adapter")
_MIN_LEFT_OUT = 32
"""Tokens: leaving out fewer costs more than it saves."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Input of one forward pass. Tensors int64 [T] on the device, `sample_rows` [R]. `rows` has one entry per sample;
    it is empty if all samples need only the argmax. `token_types` is None if all are of the first type. `adapter_slots`
    int32 [T]: slots of the tokens' adapters, -1 without one; None if no row has one. `rope_positions` int64 [3, T]:
    time, line and column of the tokens, or [6, T] as of `rope_positions_of`; None if no row has images, or the model
    has one position a token. `drafts`, in
    a step that has some: those of each sequence that samples. A sequence with k drafts has k + 1 samples.
    """

    token_ids: Tensor
    positions: Tensor
    rope_regimes: Tensor
    attention: AttentionMetadata
    sample_rows: Tensor
    rows: tuple[SampleRow, ...]
    token_types: Tensor | None = None
    adapter_slots: Tensor | None = None
    rope_positions: Tensor | None = None
    drafts: Drafts = ()


SlotOf = Callable[[int], int]
"""Slot of a row's adapter (`Request.adapter`), -1 for none."""


def build_batch(
    scheduled: Sequence[ScheduledSequence],
    block_size: int,
    device: torch.device,
    rows: tuple[SampleRow, ...] | None = None,
    *,
    is_encoder: bool = False,
    slot_of: SlotOf | None = None,
    has_states: bool = False,
    most_drafts: int = 0,
    vision: VisionConfig | None = None,
    num_groups: int = 1,
    group_of: tuple[int, ...] = (),
    has_encoder: bool = False,
) -> Batch:
    """Lay out a step. `scheduled` comes from the mirror, in plan order; `rows` are those of `rows_to_sample`, if they
    are known. Rows of an encoder have blocks for this step only, one row after another. `slot_of` None: no row has an
    adapter. `has_states`: the model's rows have recurrent states, and layers of the stage save the inputs of
    `most_drafts` drafts of a row beside them. `vision`: how the model takes images, if it does.
    Tables have entries of `num_groups` groups of layers, `group_of` each layer's. `has_encoder`: the model is the
    decoder of an encoder-decoder model, and positions count from the decoder's first.
    """
    counts = [each.num_scheduled_tokens for each in scheduled]
    firsts = [each.sequence.num_computed_tokens for each in scheduled]
    starts = (0, *accumulate(counts))
    positions = _positions(firsts, counts, starts[-1])
    rope_regimes = np.repeat([each.sequence.request.rope_regime for each in scheduled], counts)
    block_ids = _step_blocks(counts, block_size) if is_encoder else [each.sequence.block_ids for each in scheduled]
    entries = _block_tables(block_ids)
    # [S, blocks of the longest] of each group
    tables, *other_tables = (entries[:, group::num_groups] for group in range(num_groups))
    sequence_of_token = np.repeat(np.arange(len(scheduled)), counts)
    sequences = [each.sequence for each in scheduled]
    of_images = (vision, media_of_step(vision, sequences), firsts, counts)
    three, last_visible = rope_positions_of(*of_images), last_visible_of(*of_images)
    last_visible = _last_attended(scheduled, counts) if is_encoder else last_visible
    attention = AttentionMetadata(
        query_starts=starts,
        context_lengths=tuple(first + count for first, count in zip(firsts, counts, strict=True)),
        block_tables=_to(tables, device),
        token_blocks=_to(_blocks_of_tokens(tables, sequence_of_token, positions // block_size), device),
        token_offsets=_to(positions % block_size, device),
        sees_later=is_encoder,
        segments=state_segments(sequences, starts, firsts, device) if has_states else None,
        replay=draft_replay(scheduled, most_drafts, device) if has_states else None,
        last_visible=None if last_visible is None else _to(last_visible.astype(np.int32), device),
    )
    if other_tables:
        token_blocks = [_blocks_of_tokens(each, sequence_of_token, positions // block_size) for each in other_tables]
        others = [
            replace(attention, block_tables=_to(each, device), token_blocks=_to(blocks, device))
            for each, blocks in zip(other_tables, token_blocks)
        ]
        attention = replace(attention, others=tuple(others), group_of=group_of)
    if has_encoder:
        assert not other_tables, "layers of a decoder with an encoder have one block table"
        attention, positions = with_cross_step(attention, scheduled, positions, block_size)
    types = _token_types(scheduled, counts) if is_encoder else None
    adapters = adapter_slots(sequences, slot_of)
    return Batch(
        token_ids=_to(token_ids(scheduled), device),
        positions=_to(positions, device),
        rope_regimes=_to(rope_regimes.astype(np.int64), device),
        attention=attention,
        sample_rows=_to(sampled_tokens(scheduled, np.array(starts[1:])), device),
        rows=rows_to_sample(scheduled) if rows is None else rows,
        token_types=None if types is None else _to(types, device),
        adapter_slots=None if adapters is None else _to(adapters.astype(np.int32).repeat(counts), device),
        rope_positions=None if three is None else _to(three, device),
        drafts=drafts_of(scheduled),
    )


def drafts_of(scheduled: Sequence[ScheduledSequence]) -> Drafts:
    """`Batch.drafts`."""
    if not any(map(_DRAFTS, scheduled)):
        return ()
    return tuple([each.sequence.draft_token_ids for each in scheduled for _ in range(each.num_samples)])


def sampled_tokens(scheduled: Sequence[ScheduledSequence], ends: Integers) -> Integers:
    """Indices of the tokens that are sampled from, int64 [R]; `ends` int64 [S] are those after each sequence's last."""
    nums_samples = [each.num_samples for each in scheduled]
    if not any(map(_DRAFTS, scheduled)):
        return (ends - 1).repeat(nums_samples)
    nums_drafts = [len(drafts) for drafts in map(_DRAFTS, scheduled)]
    spans = [
        np.arange(end - 1 - num_drafts, end) if num_drafts else np.full(num_samples, end - 1)
        for end, num_samples, num_drafts in zip(map(int, ends), nums_samples, nums_drafts)
    ]
    return np.concatenate(spans)


def adapter_slots(sequences: Iterable[MirroredSequence], slot_of: SlotOf | None) -> Integers | None:
    """Slot of each sequence's adapter, int64 [S]; None if none has one."""
    adapters = list(map(_ADAPTER, sequences))
    if not any(adapters):
        return None
    assert slot_of is not None, "a row has an adapter, and the model takes none"
    slots = {adapter: slot_of(adapter) for adapter in dict.fromkeys(adapters)}
    return np.array([slots[adapter] for adapter in adapters], dtype=np.int64)


def wanted_tokens(scheduled: Sequence[ScheduledSequence], batch: Batch) -> tuple[WantedTokens, Tensor] | None:
    """The tokens that are sampled from, and the index of each sample among them, int64 [R]. None if the step needs
    other outputs too, or would leave out too few tokens.
    """
    attention = batch.attention
    # The last layer's.
    attention = attention.of_layer(len(attention.group_of) - 1)
    sampling = [index for index, each in enumerate(scheduled) if each.num_samples]
    if attention.query_starts[-1] - len(sampling) < _MIN_LEFT_OUT:
        return None
    if batch.drafts or any(each.sequence.request.sampling.scores_prompt for each in scheduled):
        return None
    device = batch.token_ids.device
    rows = _to(np.array([attention.query_starts[index + 1] - 1 for index in sampling], dtype=np.int64), device)
    chosen = _to(np.array(sampling, dtype=np.int64), device)
    metadata = AttentionMetadata(
        query_starts=tuple(range(len(sampling) + 1)),
        context_lengths=tuple(attention.context_lengths[index] for index in sampling),
        block_tables=attention.block_tables.index_select(0, chosen),
        token_blocks=attention.token_blocks.index_select(0, rows),
        token_offsets=attention.token_offsets.index_select(0, rows),
    )
    samples = np.arange(len(sampling)).repeat([scheduled[index].num_samples for index in sampling])
    return WantedTokens(rows, metadata), _to(samples, device)


def _step_blocks(counts: Sequence[int], block_size: int) -> list[range]:
    ends = [*accumulate(num_blocks_for(count, block_size) for count in counts)]
    return [range(start, end) for start, end in zip([0, *ends], ends)]


def _token_types(scheduled: Sequence[ScheduledSequence], counts: Sequence[int]) -> Integers | None:
    """int64 [T]: 0 in the first text of a pair, 1 in the second; None if no row is a pair with types."""
    poolings = [each.sequence.request.pooling for each in scheduled]
    firsts = [None if pooling is None else pooling.num_first_tokens for pooling in poolings]
    if all(first is None for first in firsts):
        return None
    types = [np.arange(count) >= (count if first is None else first) for first, count in zip(firsts, counts)]
    return np.concatenate(types).astype(np.int64)


def _last_attended(scheduled: Sequence[ScheduledSequence], counts: Sequence[int]) -> Integers | None:
    """int64 [T]: the last token that an encoder's tokens attend to; None if they attend to all of their rows."""
    poolings = [each.sequence.request.pooling for each in scheduled]
    attended = [None if pooling is None else pooling.num_attended_tokens for pooling in poolings]
    if all(each is None for each in attended):
        return None
    ends = [count if each is None else min(each, count) for each, count in zip(attended, counts)]
    return np.repeat(np.array(ends, dtype=np.int64) - 1, counts)


def constrained_rows(scheduled: Sequence[ScheduledSequence]) -> list[ConstrainedRow]:
    """The entries of `Batch.rows` with structured outputs or rules of tokens."""
    found, index = [], 0
    for sequence, _, num_samples in scheduled:
        request, sampling = sequence.request, sequence.request.sampling
        constraint, rules = sampling.structured_outputs, sampling.token_rules
        if constraint is not None or rules is not None:
            reports = sampling.needs_logprobs or sampling.return_sampling_mask
            allows_forced = (not sampling.forbids_tokens, not reports)
            prompt = request.known_token_ids if rules is not None and rules.needs_prompt_ids else ()
            for number, sample_index in enumerate(sample_indices(sequence.sample_index, num_samples)):
                key = SequenceKey(request.request_id, sample_index)
                own = (index + number, key, constraint, sequence.output_token_ids)
                drafts = sequence.draft_token_ids
                found.append(ConstrainedRow(*own, *allows_forced, rules, prompt, sampling.max_tokens, drafts))
        index += num_samples + len(sequence.draft_token_ids)
    return found


def _samples(sequence: MirroredSequence, num_samples: int) -> Iterator[tuple[int, list[int]]]:
    """Sample index and output tokens before the token, for each token that a row samples: several of a row that is
    about to fork, or has drafts, which count as outputs at the positions behind them.
    """
    outputs = sequence.output_token_ids
    for sample_index in sample_indices(sequence.sample_index, num_samples):
        yield sample_index, outputs
    for number in range(1, len(sequence.draft_token_ids) + 1):
        yield sequence.sample_index, [*outputs, *sequence.draft_token_ids[:number]]


class RowsToSample:
    """`Batch.rows` of successive steps: the same tuple as long as a plan continues the same rows."""

    def __init__(self) -> None:
        self._scheduled: Sequence[ScheduledSequence] | None = None
        self._rows: tuple[SampleRow, ...] = ()

    def of(self, scheduled: Sequence[ScheduledSequence]) -> tuple[SampleRow, ...]:
        """`rows_to_sample`. The mirror gives the same tuple if the same rows continue by a token, with the same
        requests; then only the rows' `min_tokens` may make a difference.
        """
        is_same = scheduled is self._scheduled and isinstance(scheduled, tuple)
        if is_same and (not self._rows or not any(row.sampling.min_tokens for row in self._rows)):
            return self._rows
        self._scheduled, rows = scheduled, rows_to_sample(scheduled)
        if not (is_same and rows == self._rows):
            self._rows = rows
        return self._rows


def rows_to_sample(scheduled: Sequence[ScheduledSequence]) -> tuple[SampleRow, ...]:
    """`Batch.rows`. Sequences often share their parameters, so it is cheap to find that no rows are needed."""
    if all(map(_IS_PLAIN, scheduled)):
        return ()
    samplings = [each.sequence.request.sampling for each in scheduled if each.num_samples]
    distinct = {id(sampling): sampling for sampling in samplings}
    if not any(each.min_tokens or not each.needs_argmax_only for each in distinct.values()):
        return ()
    rows = tuple(_sample_rows(scheduled))
    return () if all(row.is_plainly_greedy for row in rows) else rows


def _sample_rows(scheduled: Sequence[ScheduledSequence]) -> Iterator[SampleRow]:
    """One row per sample; several for a sequence that is about to fork, or has drafts."""
    for sequence, _, num_samples in scheduled:
        request = sequence.request
        for sample_index, outputs in _samples(sequence, num_samples):
            yield SampleRow(
                request.sampling,
                request.stream,
                sample_index,
                # Random numbers do not depend on the size of blocks.
                len(request.prompt_token_ids) - request.num_encoder_positions,
                request.known_token_ids,
                outputs,
            )


def _positions(firsts: list[int], counts: list[int], num_tokens: int) -> Integers:
    """int64 [T]: each sequence counts from its first uncomputed token."""
    starts = np.cumsum([0, *counts[:-1]])
    offsets: Integers = np.repeat(np.array(firsts, dtype=np.int64) - starts, counts)
    return np.arange(num_tokens, dtype=np.int64) + offsets


def token_ids(scheduled: Sequence[ScheduledSequence]) -> Integers:
    """The ids that a step computes, int64 [T]."""
    found: list[Integers] = []
    # Of consecutive rows that compute their last token.
    last_ids: list[int] = []
    for sequence, count, num_samples in scheduled:
        if count == 1 and num_samples and sequence.output_token_ids:
            last_ids.append(sequence.output_token_ids[-1])
            continue
        if last_ids:
            found.append(np.array(last_ids, dtype=np.int64))
            last_ids = []
        first = sequence.num_computed_tokens
        found.append(sequence.token_array(first, first + count))
    if last_ids or not found:
        found.append(np.array(last_ids, dtype=np.int64))
    return np.concatenate(found)


def _block_tables(tables: Sequence[Sequence[int]]) -> Integers:
    """int64 [S, blocks of the longest], padded with zeros."""
    lengths = np.array([len(table) for table in tables])
    padded = np.zeros((len(tables), lengths.max()), dtype=np.int64)
    padded[np.arange(padded.shape[1]) < lengths[:, None]] = list(chain.from_iterable(tables))
    return padded


def _blocks_of_tokens(tables: Integers, sequences: Integers, numbers: Integers) -> Integers:
    """Block of each token, by its sequence and the number of the block in the table; 0 where tables are empty."""
    return tables[sequences, numbers] if tables.shape[1] else np.zeros(len(numbers), dtype=np.int64)


def _to(array: NDArray[Any], device: torch.device) -> Tensor:
    return to_device(torch.from_numpy(np.ascontiguousarray(array)), device)
