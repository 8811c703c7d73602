"""Records of a mirror: a worker's state of a sequence, and a step's work on it."""

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray

from kv_cache.block import BlockId
from spmd_worker.replica.sequence.input_rows import InputRows
from spmd_worker.replica.sequence.media_items import MediaItem
from spmd_worker.replica.sequence.metadata import SequenceData, SequenceDataDelta
from spmd_worker.replica.sequence.request import Request
from spmd_worker.replica.sequence.sequence import SequenceKey
from spmd_worker.replica.sequence.step import StepPlan

Inputs = tuple[int, int, tuple[InputRows, ...], tuple[MediaItem, ...]]
"""Adapter, regime of rotary angles, rows and images."""


class MirrorError(ValueError):
    """A plan does not follow from the plans before it. The message names step, request, field, value and rule."""


def reject(plan: StepPlan, name: str, value: object, expected: object, *key: int) -> NoReturn:
    """Raise MirrorError for field `name`; `key`: the request's id, and the sample's index if it is about one."""
    where = "".join([f", {kind} {number}" for kind, number in zip(("request", "sample"), key)])
    raise MirrorError(f"step {plan.step}{where}: field {name} is {value}, the mirror expects {expected}")


@dataclass(slots=True, eq=False)
class MirroredSequence:
    """One sequence as of the last plan that listed it: `num_scheduled_tokens` computed from `num_computed_tokens` on.

    It is the mirror's own record: the next plan that lists the sequence changes it. A list of blocks only grows; if
    blocks are removed, the record gets a new list. While a sequence is ahead of its id, its last output token is
    `NOT_READ` until the id is read. `is_plain`: it needs only the argmax of its logits, at every token, and reports
    nothing else. `state_slot` holds its recurrent states: -1 in a model without any, and once another sequence was
    given its slot. The last plan computed `draft_token_ids` behind its tokens. The slot's states are
    `num_lagging_tokens` behind `num_computed_tokens`.

    It `is_displaced` while others write its blocks: it was preempted. `computed` names it in what memory holds.
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
    is_displaced: bool = field(init=False, default=False)
    computed: "Computed" = field(init=False, repr=False)
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
        self.computed = Computed(self)

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

    @property
    def num_written_tokens(self) -> int:
        """Tokens whose keys and values are there, drafts included."""
        return self.num_computed_tokens + self.num_scheduled_tokens + len(self.draft_token_ids)

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


@dataclass(slots=True, eq=False)
class Computed:
    """The sequence whose keys, values or states something is: a record's; once that has left the mirror, because its
    sequence has ended or another record has taken its place, `tokens` are all that is left of it, until these are
    forgotten. `inputs` are what was computed from besides. `block_ids` and `num_written_tokens` are its last ones.
    """

    record: MirroredSequence | None
    key: SequenceKey = field(init=False)
    block_ids: list[BlockId] = field(init=False, default_factory=list)
    num_written_tokens: int = field(init=False, default=0)
    tokens: bytes | None = field(init=False, default=None)
    inputs: Inputs = field(init=False, default=(0, 0, (), ()))

    def __post_init__(self) -> None:
        assert self.record is not None
        self.key = self.record.key

    def table(self) -> list[BlockId]:
        return self.block_ids if self.record is None else self.record.block_ids

    def num_written(self) -> int:
        return self.num_written_tokens if self.record is None else self.record.num_written_tokens

    def leave(self) -> None:
        """Keep what is compared of the record alone, 8 bytes a token."""
        record = self.record
        assert record is not None, self.key
        self.block_ids, self.num_written_tokens = record.block_ids, record.num_written_tokens
        ids = (*record.request.prompt_token_ids, *record.output_token_ids, *record.draft_token_ids)
        self.tokens, self.inputs = pack_tokens(ids), inputs_of(record.request)
        self.record = None


def pack_tokens(token_ids: Sequence[int]) -> bytes:
    """8 bytes a token."""
    return struct.pack(f"<{len(token_ids)}q", *token_ids)


def inputs_of(request: Request) -> Inputs:
    """All that a request's keys, values and states are computed from, besides its tokens."""
    return request.adapter, request.rope_regime, request.rows, request.media


class PlannedRow(NamedTuple):
    """A row of a plan's groups: a new record of a sequence that is sent completely, or has just forked, as it is after
    the step; else the record that the mirror holds, as it was before, of whose table `num_kept_blocks` entries stay.
    """

    sequence: MirroredSequence
    request: Request
    data: SequenceData | SequenceDataDelta
    is_new: bool

    @property
    def num_computed_tokens(self) -> int:
        return self.data.num_computed_tokens

    @property
    def num_kept_blocks(self) -> int:
        return 0 if isinstance(self.data, SequenceData) else self.data.num_kept_blocks

    @property
    def new_blocks(self) -> tuple[BlockId, ...]:
        """Entries of the table behind those that stay."""
        return self.data.block_ids if isinstance(self.data, SequenceData) else self.data.appended_block_ids

    @property
    def output_token_ids(self) -> Sequence[int]:
        """Those that are known when the step begins."""
        if isinstance(self.data, SequenceData):
            return self.data.output_token_ids
        known = [] if self.is_new else self.sequence.output_token_ids
        return [*known, *self.data.appended_token_ids]

    @property
    def after(self) -> MirroredSequence:
        """A copy of the record, as it is after the step."""
        held, data = self.sequence, self.data
        table = [*held.block_ids[: self.num_kept_blocks], *self.new_blocks]
        counts = (data.num_computed_tokens, data.num_scheduled_tokens - len(data.draft_token_ids))
        slot, drafts = held.state_slot, data.draft_token_ids
        return MirroredSequence(
            self.request, held.sample_index, list(self.output_token_ids), table, *counts, slot, drafts
        )


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
