"""Records of a mirror: a worker's state of a sequence, and a step's work on it."""

import struct
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kv_cache.block import BlockId
from spmd_worker.replica.sequence.request import Request
from spmd_worker.replica.sequence.sequence import SequenceKey


class MirrorError(ValueError):
    """A plan does not follow from the plans before it. The message names step, request, field, value and rule."""


@dataclass(slots=True, eq=False)
class MirroredSequence:
    """One sequence as of the last plan that listed it: `num_scheduled_tokens` computed from `num_computed_tokens` on.

    It is the mirror's own record: the next plan that lists the sequence changes it. A list of blocks only grows; if
    blocks are removed, the record gets a new list. While a sequence is ahead of its id, its last output token is
    `NOT_READ` until the id is read. `is_plain`: it needs only the argmax of its logits, at every token, and reports
    nothing else. `state_slot` holds its recurrent states: -1 in a model without any, and once another sequence was
    given its slot. The last plan computed `draft_token_ids` behind its tokens. The slot's states are
    `num_lagging_tokens` behind `num_computed_tokens`.
    """

    request: Request
    sample_index: int
    output_token_ids: list[int]
    block_ids: list[BlockId]
    num_computed_tokens: int
    num_scheduled_tokens: int
    state_slot: int = -1
    draft_token_ids: tuple[int, ...] = ()
    num_lagging_tokens: int = 0
    key: SequenceKey = field(init=False)
    num_prompt_tokens: int = field(init=False)
    decode_row: "ScheduledSequence" = field(init=False)
    is_plain: bool = field(init=False)
    _prompt: NDArray[np.int64] | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.key = SequenceKey(self.request.request_id, self.sample_index)
        # Made once: the row of a sequence with one id is always the same.
        self.decode_row = ScheduledSequence(self, num_scheduled_tokens=1, num_samples=1)
        self.set_request(self.request)

    def set_request(self, request: Request) -> None:
        """Replace the request by the one sent last."""
        sampling = request.sampling
        reports = sampling.scores_prompt or sampling.return_routed_experts
        is_plain = sampling.needs_argmax_only and not sampling.min_tokens and not reports
        self.request, self.is_plain, self._prompt = request, is_plain, None
        self.num_prompt_tokens = len(request.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens + len(self.output_token_ids)

    def token_ids(self, start: int, stop: int) -> list[int]:
        """Tokens at positions [start, stop) of prompt, output and drafts together."""
        num_tokens = self.num_tokens
        if self.draft_token_ids and stop > num_tokens:
            drafts = self.draft_token_ids[max(start - num_tokens, 0) : stop - num_tokens]
            return [*self.token_ids(min(start, num_tokens), num_tokens), *drafts]
        assert 0 <= start <= stop <= num_tokens, (start, stop, num_tokens)
        prompt = self.request.prompt_token_ids
        if start >= len(prompt):
            return self.output_token_ids[start - len(prompt) : stop - len(prompt)]
        if stop <= len(prompt):
            return list(prompt[start:stop])
        return [*prompt[start:], *self.output_token_ids[: stop - len(prompt)]]

    def token_array(self, start: int, stop: int) -> NDArray[np.int64]:
        """`token_ids` as an array; a prompt's is made once."""
        prompt = self.request.prompt_token_ids
        if stop > len(prompt):
            return np.array(self.token_ids(start, stop), dtype=np.int64)
        if self._prompt is None:
            self._prompt = np.frombuffer(struct.pack(f"<{len(prompt)}q", *prompt), dtype=np.int64)
        return self._prompt[start:stop]


class ScheduledSequence(NamedTuple):
    """One sequence's scheduled tokens, its drafts included, and the number of tokens to sample from the logits of the
    last position; one at each draft too, and at the token before them, if the sequence has drafts.
    """

    sequence: MirroredSequence
    num_scheduled_tokens: int
    num_samples: int


@dataclass(slots=True, eq=False)
class MirroredGroup:
    """A request and those of its sequences that were sent to the worker and have not ended."""

    request: Request
    sequences: dict[int, MirroredSequence] = field(default_factory=dict)
