"""Drafts of a second, smaller model with its own keys and values in the target's blocks.

It computes nothing of a row until it drafts for it: then it catches up with the row's tokens, and drafts greedily, a
position of all rows at a time. What it has computed of a row is known by the row's blocks: a row that was preempted, or
shares blocks with another one, is caught up again. A wrong key would cost acceptance, never a bit of an answer.

T: tokens; R: rows that draft.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kv_cache.cache_engine import CacheEngine
from spmd_worker.model.decoder import DecoderForCausalLM
from spmd_worker.model.drafts.draft_head import DraftTokens
from spmd_worker.model.layers.embedding import StepMedia
from spmd_worker.ops.sampling.shard_argmax import best_of_shards
from spmd_worker.ranks.communicator import GroupHandle
from spmd_worker.replica.mirror.mirror import ScheduledSequence
from spmd_worker.replica.sequence.request import RequestId
from spmd_worker.replica.sequence.sampled import SampledIds
from spmd_worker.replica.sequence.sequence import SequenceKey
from spmd_worker.worker.drafts.draft_tokens import RowTokens, lay_out, to_ids
from spmd_worker.worker.drafts.drafting_rows import DraftLimits, StepRow, step_rows
from spmd_worker.worker.runner.batch import Batch


@dataclass(frozen=True, slots=True)
class _Computed:
    """Keys that the draft has of a row: of its first `num_tokens` tokens, then of `guesses`, its drafts. They are in
    the first `num_blocks` of `block_ids`, the mirror's list, which only grows.
    """

    block_ids: Sequence[int]
    num_blocks: int
    num_tokens: int
    guesses: tuple[int, ...]

    def num_valid(self, row: StepRow, limits: DraftLimits) -> int:
        """Number of the row's tokens whose keys these are. Blocks of drafts may have been given away where the list is
        another.
        """
        own = row.sequence.block_ids
        is_same = own is self.block_ids
        num_blocks = self.num_blocks if is_same else _num_equal(self.block_ids[: self.num_blocks], own)
        num_slots = num_blocks // limits.num_groups * limits.block_size
        count = min(self.num_tokens, num_slots)
        if is_same and count == self.num_tokens:
            tokens = row.token_ids(count, min(count + len(self.guesses), row.end, num_slots))
            count += _num_equal(self.guesses, tokens)
        return count


def _num_equal(first: Sequence[int], second: Sequence[int]) -> int:
    """Length of the common beginning."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((index for index, (one, other) in pairs if one != other), min(len(first), len(second)))


class ModelDrafter:
    """Implements `Drafter`. `engine` has the caches of `model`, whose layers are all on these ranks; a forward pass has
    at most `max_tokens`.
    """

    needs_hidden = takes_media = False
    aux_layers: tuple[int, ...] = ()

    def __init__(
        self, model: DecoderForCausalLM, engine: CacheEngine, group: GroupHandle, limits: DraftLimits, max_tokens: int
    ) -> None:
        self._model, self._engine, self._group, self._limits = model, engine, group, limits
        self._max_tokens, self._device = max_tokens, engine.device
        self.num_lookahead_tokens = limits.num_drafts
        self._computed: dict[SequenceKey, _Computed] = {}
        self._tensors: tuple[Tensor, ...] = ()

    def begin(
        self,
        scheduled: Sequence[ScheduledSequence],
        batch: Batch,
        hidden: Tensor,
        aux: tuple[Tensor, ...],
        media: StepMedia | None = None,
    ) -> None:
        """The draft computes from tokens alone. Of a row that is recomputed it has nothing: others may have written to
        its blocks meanwhile, also where it was given the same again.
        """
        del batch, hidden, aux, media
        for sequence, _, _ in scheduled:
            computed = self._computed.get(sequence.key)
            # A step begins with the last token that was sampled.
            if computed is not None and sequence.num_computed_tokens < computed.num_tokens - 1:
                del self._computed[sequence.key]

    def forget(self, keys: Iterable[SequenceKey], request_ids: Iterable[RequestId]) -> None:
        """Drop what is known of sequences that ended, and of requests."""
        for key in keys:
            self._computed.pop(key, None)
        ended = dict.fromkeys(request_ids)
        if ended:
            self._computed = {key: each for key, each in self._computed.items() if key.request_id not in ended}

    @torch.inference_mode()
    def propose(
        self, scheduled: Sequence[ScheduledSequence], sampled: SampledIds, *, wants_drafts: bool = True
    ) -> tuple[tuple[int, ...], ...]:
        """Drafts of each sequence that the step samples for."""
        found: list[tuple[int, ...]] = [()] * sampled.num_sequences
        if self._tensors is not self._engine.tensors:
            # The cache is another one since the worker slept.
            self._computed, self._tensors = {}, self._engine.tensors
        rows = [(row, self._num_wanted(row)) for row in step_rows(scheduled, sampled)] if wants_drafts else []
        rows = [(row, count) for row, count in rows if count]
        if rows:
            for (row, _), drafts in zip(rows, self._drafts(*zip(*rows, strict=True)), strict=True):
                found[row.result_index] = drafts
        return tuple(found)

    def _num_wanted(self, row: StepRow) -> int:
        request = row.sequence.request
        if request.rows or request.media:
            # Tokens without ids that the draft knows.
            return 0
        return row.num_wanted(self._limits, self._limits.num_places(row.sequence) - row.end + 1)

    def _drafts(self, rows: tuple[StepRow, ...], counts: tuple[int, ...]) -> list[tuple[int, ...]]:
        """So many drafts of each row."""
        latest = self._catch_up(rows)
        found = [latest]
        for position in range(1, max(counts)):
            drafting = [index for index, count in enumerate(counts) if count > position]
            tokens = [self._row_tokens(rows[index], rows[index].end + position - 1, 1) for index in drafting]
            indices = to_ids(drafting, self._device)
            latest = latest.index_copy(0, indices, self._chosen(latest[indices], tokens))
            found.append(latest)
        drafts = [tuple(own[:count]) for own, count in zip(torch.stack(found, 1).tolist(), counts, strict=True)]
        for row, own in zip(rows, drafts, strict=True):
            blocks = row.sequence.block_ids
            # The last draft was not computed.
            self._computed[row.sequence.key] = _Computed(blocks, len(blocks), row.end, own[:-1])
        return drafts

    def _catch_up(self, rows: Sequence[StepRow]) -> Tensor:
        """Compute the tokens of the rows that the draft has not computed; the ids that follow them, int64 [R]."""
        firsts = [min(self._num_computed(row), row.end - 1) for row in rows]
        left = sum(row.end - first for row, first in zip(rows, firsts, strict=True))
        while left > max(self._max_tokens, len(rows)):
            tokens, ids, room = [], [], self._max_tokens
            for index, row in enumerate(rows):
                # The last tokens of all rows are computed together.
                count = min(row.end - 1 - firsts[index], room)
                if count > 0:
                    tokens.append(self._row_tokens(row, firsts[index], count))
                    ids += row.token_ids(firsts[index], firsts[index] + count)
                    firsts[index] += count
                    room -= count
            left -= len(ids)
            self._compute(to_ids(ids, self._device), tokens)
        tokens = [self._row_tokens(row, first, row.end - first) for row, first in zip(rows, firsts, strict=True)]
        ids = [token for row, first in zip(rows, firsts, strict=True) for token in row.token_ids(first, row.end)]
        return self._chosen(to_ids(ids, self._device), tokens)

    def _num_computed(self, row: StepRow) -> int:
        """Number of the row's first tokens whose keys the draft has, perhaps those of the sample it forked from."""
        key = row.sequence.key
        computed = self._computed.get(key) or self._computed.get(SequenceKey(key.request_id, 0))
        return 0 if computed is None else computed.num_valid(row, self._limits)

    def _row_tokens(self, row: StepRow, first: int, count: int) -> RowTokens:
        sequence = row.sequence
        return RowTokens(self._limits.blocks(sequence), first, count, self._limits.regime(sequence.request))

    def _compute(self, ids: Tensor, tokens: Sequence[RowTokens]) -> tuple[Tensor, DraftTokens]:
        """Hidden states [T, hidden] of tokens of rows, whose keys and values are written."""
        laid_out = lay_out(tokens, self._limits.block_size, self._device)
        of_tokens = (ids, laid_out.positions, laid_out.regimes, self._engine.draft_caches, laid_out.attention)
        return self._model(*of_tokens), laid_out

    def _chosen(self, ids: Tensor, tokens: Sequence[RowTokens]) -> Tensor:
        """The likeliest id behind the last token of each row, int64 [R]."""
        hidden, laid_out = self._compute(ids, tokens)
        values, columns = self._model.argmax_logits(hidden[laid_out.last])
        first_id = self._model.lm_head.shard.start
        chosen = best_of_shards(values, columns, self._group, first_id)[1].long()
        # Logits may be NaN: the row's own end does not depend on drafts.
        return chosen.clamp_(0, self._limits.model_config.vocab_size - 1)
