"""Rows of a step as a drafter sees them: their tokens with those just sampled, and how many drafts each may get.

All of it is a function of the agreed plan and the sampled ids, so it is the same on every rank of a tensor group.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from spmd_worker.model_config.model_config import ModelConfig
from spmd_worker.replica.mirror.mirror import MirroredSequence, ScheduledSequence
from spmd_worker.replica.sequence.request import Request
from spmd_worker.replica.sequence.sampled import SampledIds

_REGIME_ROPES: Final = ("dynamic", "longrope")


@dataclass(frozen=True, slots=True)
class DraftLimits:
    """`num_drafts` of a row at most, up to `max_len` tokens of it. Tables have `num_groups` entries a block, the first
    of a group that keeps all tokens. `model_config` is the draft's.
    """

    num_drafts: int
    max_len: int
    block_size: int
    num_groups: int
    model_config: ModelConfig

    def num_places(self, sequence: MirroredSequence) -> int:
        """Number of tokens that the row's blocks have slots for."""
        return len(sequence.block_ids) // self.num_groups * self.block_size

    def blocks(self, sequence: MirroredSequence) -> Sequence[int]:
        return sequence.block_ids if self.num_groups == 1 else sequence.block_ids[:: self.num_groups]

    def regime(self, request: Request) -> int:
        """The draft's own `ModelConfig.rope_regime` of a row."""
        if not any(rope.rope_type in _REGIME_ROPES for rope in self.model_config.ropes):
            return 0
        num_prompt = len(request.prompt_token_ids)
        most = min(num_prompt + (request.sampling.max_tokens or self.max_len), self.max_len)
        return self.model_config.rope_regime(num_prompt, max(most - 1, num_prompt))


@dataclass(frozen=True, slots=True)
class StepRow:
    """A row of a step: `num_tokens` of it were known, `sampled_ids` follow them; none in the middle of a prompt.
    `result_index` is that of its first sample in the step's result, `num_samples` their number.
    """

    sequence: MirroredSequence
    first: int
    num_scheduled: int
    num_tokens: int
    sampled_ids: tuple[int, ...]
    result_index: int
    num_samples: int

    @property
    def end(self) -> int:
        """Number of the row's tokens, with those just sampled."""
        return self.num_tokens + len(self.sampled_ids)

    def token_ids(self, start: int, stop: int) -> list[int]:
        """Tokens at positions [start, stop), with those just sampled."""
        num_known = min(stop, self.num_tokens)
        known = self.sequence.token_ids(start, num_known) if start < num_known else []
        first = max(start - self.num_tokens, 0)
        return [*known, *self.sampled_ids[first : max(stop - self.num_tokens, 0)]]

    def num_wanted(self, limits: DraftLimits, num_slots: int) -> int:
        """Number of drafts that the row may get, if its blocks have slots for so many tokens beyond `end`; 0 for a row
        that forks or ends.
        """
        sampling = self.sequence.request.sampling
        if self.num_samples != 1 or not self.sampled_ids or self.sampled_ids[-1] < 0:
            return 0
        num_outputs = self.end - self.sequence.num_prompt_tokens
        left = limits.num_drafts if sampling.max_tokens is None else sampling.max_tokens - num_outputs - 1
        return max(min(limits.num_drafts, left, limits.max_len - self.end, num_slots), 0)


def step_rows(scheduled: Sequence[ScheduledSequence], sampled: SampledIds) -> list[StepRow]:
    """The rows of a step in the order of its plan."""
    return list(_rows(scheduled, sampled.rows()))


def _rows(scheduled: Sequence[ScheduledSequence], ids: list[tuple[int, ...]]) -> Iterator[StepRow]:
    index = 0
    for sequence, count, num_samples in scheduled:
        own = ids[index] if num_samples else ()
        num_tokens = sequence.num_tokens
        yield StepRow(sequence, sequence.num_computed_tokens, count, num_tokens, own, index, num_samples)
        index += num_samples
