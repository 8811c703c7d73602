"""Drafts of a head that continues the target's hidden states: MTP layers and EAGLE-3.

The head computes every token of each step of the target, since it cannot do so later: at a token's position it takes
the target's states of that token and the id of the next one, which is known once the step has sampled. Behind drafts
that were wrong it computes nothing. Its keys and values move with the target's blocks.

T: tokens; R: rows that draft.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from kv_cache.cache_engine import CacheEngine
from spmd_worker.model.drafts.draft_head import DraftHead, DraftTokens
from spmd_worker.model.layers.embedding import StepMedia
from spmd_worker.model_config.vision_config import VisionConfig
from spmd_worker.ops.sampling.shard_argmax import best_of_shards
from spmd_worker.ranks.communicator import GroupHandle
from spmd_worker.replica.mirror.mirror import ScheduledSequence
from spmd_worker.replica.sequence.request import RequestId
from spmd_worker.replica.sequence.sampled import SampledIds
from spmd_worker.replica.sequence.sequence import SequenceKey
from spmd_worker.worker.drafts.draft_tokens import RowTokens, lay_out, to_ids
from spmd_worker.worker.drafts.drafting_rows import DraftLimits, StepRow, step_rows
from spmd_worker.worker.runner.batch import Batch


class _Given(NamedTuple):
    """A step of the target: its states [T, hidden], and rows of images in the places of the tokens before them."""

    states: Tensor
    media: StepMedia | None


class HeadDrafter:
    """Implements `Drafter`. `engine` has the cache of `head`. `vision`: how the target takes images, if it does."""

    needs_hidden = True

    def __init__(
        self,
        head: DraftHead,
        engine: CacheEngine,
        group: GroupHandle,
        limits: DraftLimits,
        vision: VisionConfig | None = None,
    ) -> None:
        self._head, self._engine, self._group, self._limits = head, engine, group, limits
        self._device, self.aux_layers = engine.device, head.aux_layers
        self._vision = vision if head.takes_media else None
        self.takes_media = self._vision is not None
        self.num_lookahead_tokens = limits.num_drafts
        self._steps: deque[_Given] = deque()

    @torch.inference_mode()
    def begin(
        self,
        scheduled: Sequence[ScheduledSequence],
        batch: Batch,
        hidden: Tensor,
        aux: tuple[Tensor, ...],
        media: StepMedia | None = None,
    ) -> None:
        """Keep the step's states until its tokens are read, perhaps after the next step is launched; a step that
        samples none ends here.
        """
        del batch
        self._steps.append(_Given(self._head.project(hidden, aux), media))
        if not any(each.num_samples for each in scheduled):
            self._computed(step_rows(scheduled, SampledIds()), self._steps.pop())

    def forget(self, keys: Iterable[SequenceKey], request_ids: Iterable[RequestId]) -> None:
        """Nothing is known of rows but their keys."""
        del keys, request_ids

    @torch.inference_mode()
    def propose(
        self, scheduled: Sequence[ScheduledSequence], sampled: SampledIds, *, wants_drafts: bool = True
    ) -> tuple[tuple[int, ...], ...]:
        """Compute the last step's tokens; drafts of each sequence that it sampled for."""
        rows = step_rows(scheduled, sampled)
        states, laid_out = self._computed(rows, self._steps.popleft())
        found: list[tuple[int, ...]] = [()] * sampled.num_sequences
        counts = [self._num_wanted(row) if wants_drafts else 0 for row in rows]
        drafting = [index for index, count in enumerate(counts) if count]
        if drafting:
            of_rows = states[laid_out.last[to_ids(drafting, self._device)]]
            drafts = self._drafts([rows[index] for index in drafting], [counts[index] for index in drafting], of_rows)
            for index, own in zip(drafting, drafts, strict=True):
                found[rows[index].result_index] = own
        return tuple(found)

    def _num_wanted(self, row: StepRow) -> int:
        # The head is a position behind the row.
        return row.num_wanted(self._limits, self._limits.num_places(row.sequence) - row.end + 2)

    def _computed(self, rows: Sequence[StepRow], given: _Given) -> tuple[Tensor, DraftTokens]:
        """The head's states of the tokens of rows that are right, given the target's."""
        tokens: list[RowTokens] = []
        ids: list[int] = []
        places: list[int] = []
        starts = accumulate((row.num_scheduled for row in rows), initial=0)
        for row, start in zip(rows, starts, strict=False):
            count = self._num_right(row)
            ids += [max(token_id, 0) for token_id in row.token_ids(row.first + 1, row.first + 1 + count)]
            places += range(start, start + count)
            tokens.append(self._row_tokens(row, row.first, count))
        states, media = given
        if len(places) < len(states):
            media = None if media is None else self._moved(media, places, len(states))
            states = states[to_ids(places, self._device)]
        return self._compute(to_ids(ids, self._device), tokens, states, media)

    def _moved(self, media: StepMedia, places: Sequence[int], num_tokens: int) -> StepMedia:
        """Rows at the indices in `places` of their tokens: images are of prompts, of which no token is left out."""
        index_of = torch.full((num_tokens,), -1, dtype=torch.int64, device=self._device)
        index_of[to_ids(places, self._device)] = torch.arange(len(places), device=self._device)
        return media._replace(places=index_of[media.places])

    @staticmethod
    def _num_right(row: StepRow) -> int:
        """Number of the row's tokens in the step that are the row's, and not drafts that were wrong."""
        return min(row.num_scheduled, row.end - 1 - row.first)

    def _drafts(self, rows: Sequence[StepRow], counts: Sequence[int], states: Tensor) -> list[tuple[int, ...]]:
        """So many drafts of each row, behind the head's states [R, hidden] of its last token."""
        latest = self._chosen(states)
        found = [latest]
        for position in range(1, max(counts)):
            drafting = [index for index, count in enumerate(counts) if count > position]
            # The last computed position is that of the last token but one.
            tokens = [self._row_tokens(rows[index], rows[index].end - 2 + position, 1) for index in drafting]
            indices = to_ids(drafting, self._device)
            own, _ = self._compute(latest[indices], tokens, states[indices])
            states, latest = states.index_copy(0, indices, own), latest.index_copy(0, indices, self._chosen(own))
            found.append(latest)
        return [tuple(own[:count]) for own, count in zip(torch.stack(found, 1).tolist(), counts, strict=True)]

    def _row_tokens(self, row: StepRow, first: int, count: int) -> RowTokens:
        sequence = row.sequence
        request = sequence.request
        return RowTokens(self._limits.blocks(sequence), first, count, self._limits.regime(request), request.media)

    def _compute(
        self, ids: Tensor, tokens: Sequence[RowTokens], states: Tensor, media: StepMedia | None = None
    ) -> tuple[Tensor, DraftTokens]:
        laid_out = lay_out(tokens, self._limits.block_size, self._device, self._vision)
        # Tokens of images may have ids beyond the vocabulary.
        ids = ids.clamp(max=self._limits.model_config.vocab_size - 1)
        return self._head(ids, laid_out, states, self._engine.draft_caches, media), laid_out

    def _chosen(self, states: Tensor) -> Tensor:
        """The likeliest id of each row, int64 [R]."""
        values, columns = self._head.argmax(states)
        chosen = best_of_shards(values, columns, self._group, self._head.first_id)[1].long()
        # Logits may be NaN: the row's own end does not depend on drafts.
        return self._head.token_ids(chosen.clamp_(0, self._head.vocab_size - 1))
