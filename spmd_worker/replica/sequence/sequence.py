"""One sample of one request in the scheduler: its tokens, the number computed, the blocks that hold them.

A `Sequence` is what is scheduled, preempted and finished; a `SequenceGroup` is the request with its sequences, of which
one computes the prompt and the others fork from it when the first tokens are sampled. If a request has more samples
than run at once, the joining sequence represents as many as fit, and another computes the prompt for the rest.
"""

from bisect import insort
from dataclasses import dataclass, field
from enum import Enum
from operator import attrgetter
from typing import NamedTuple

from kv_cache.block import BlockHash
from kv_cache.block_table import BlockTable
from kv_cache.state_ops import SlotId
from spmd_worker.replica.sequence.outputs import TokenLogprobs
from spmd_worker.replica.sequence.prompt_scores import ScoredRows
from spmd_worker.replica.sequence.request import Request, RequestId
from spmd_worker.replica.sequence.routed_experts import RoutedExperts, RoutedTokens
from spmd_worker.replica.sequence.weight_spans import WeightSpans


class SequenceStatus(Enum):
    """Scheduling state of a sequence. PREEMPTED has lost its blocks and waits, at its old position, to be recomputed;
    SWAPPED waits there too, with its blocks in host memory; LOADING waits for a transfer of its first blocks.
    """

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    SWAPPED = "swapped"
    LOADING = "loading"
    FINISHED = "finished"


class SequenceKey(NamedTuple):
    """Key of a sequence on every rank; among requests of one priority the order of keys is the service order."""

    request_id: RequestId
    sample_index: int


class FinishReason(Enum):
    """OpenAI's finish reasons, and vLLM's. ERROR: its logits were not finite; GRAMMAR_ERROR: its grammar allowed no
    token; REPETITION: it repeats itself (`repetition_detection`).
    """

    STOP = "stop"
    LENGTH = "length"
    REPETITION = "repetition"
    ABORT = "abort"
    ERROR = "error"
    GRAMMAR_ERROR = "grammar_error"


@dataclass(slots=True, eq=False)
class Sequence:
    """Tokens [0, num_computed_tokens) have their keys and values in the blocks of `table`, or of `host_table` while the
    sequence is swapped out.

    The workers' mirrors hold `num_sent_tokens` of `output_token_ids`; `is_known`: they hold the sequence at all, with
    its tokens. `block_hashes` are those of its leading full blocks that are computed, None if nothing of it may be
    shared; the first `num_hashed_blocks` blocks of `table` have theirs. `num_lost_tokens` were computed and must be
    recomputed. `shares_tail`: it forked and has not written since, so the block it writes to next may be another's too.
    `has_loaded`: a transfer was waited for since it last had blocks. `repeats_last`: it sampled without getting an id,
    so its last token is recomputed, though the mirrors have it. `is_new_fork`: it forked and the mirrors were never
    sent it. `must_compile`: its answer has a grammar, which the workers compile when it next samples. While it has
    fewer output tokens than `num_outputs_ahead`, the step after the one that samples for it may compute the token
    before the host has read it: then `num_computed_tokens` counts one token more than it has. While it has fewer than
    `num_outputs_plain`, only one of `end_ids` can end it. Until it forks it represents `num_samples` samples of its
    request, from its own on. `order` is its position in the service order. `weight_spans` are those of its output
    tokens, the last one of those to come.

    `drafts` are those of the step in flight: it computes them behind the given tokens, and `num_computed_tokens` counts
    those of them that its ids turn out to be once these are known. `worker_drafts` came with its last ids. Of
    about `num_drafted` latest drafts `num_accepted` were right (`record_drafts`).

    In a model with recurrent states `state_slot` holds the state after its computed tokens while it runs, and
    `host_state_slot` while it is swapped out. `snapshot_stops` are the positions, with names, at which its state is
    still to be kept; `prompt_snapshots` and `answer_snapshot` name those that were. The slot has no draft's tokens: it
    is `num_lagging_tokens` behind the computed ones after a step whose drafts were accepted, until the next one.
    """

    request: Request
    sample_index: int
    output_token_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    table: BlockTable = field(default_factory=BlockTable)
    host_table: BlockTable = field(default_factory=BlockTable)
    block_hashes: list[BlockHash] | None = field(default_factory=list)
    num_hashed_blocks: int = 0
    num_lost_tokens: int = 0
    shares_tail: bool = False
    has_loaded: bool = False
    repeats_last: bool = False
    status: SequenceStatus = SequenceStatus.WAITING
    is_known: bool = False
    is_new_fork: bool = False
    num_sent_tokens: int = 0
    num_outputs_ahead: int = 0
    num_outputs_plain: int = 0
    end_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    text: str | None = None
    cumulative_logprob: float = 0.0
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    kept_ids: list[bytes] = field(default_factory=list)
    routed_experts: RoutedExperts = field(default_factory=RoutedExperts)
    num_samples: int = 1
    weight_spans: WeightSpans = ()
    state_slot: SlotId | None = None
    host_state_slot: SlotId | None = None
    snapshot_stops: tuple[tuple[int, BlockHash], ...] = ()
    prompt_snapshots: tuple[BlockHash, ...] = ()
    answer_snapshot: BlockHash | None = None
    last_snapshot_position: int = 0
    drafts: tuple[int, ...] = ()
    worker_drafts: tuple[int, ...] = ()
    num_drafted: int = 0
    num_accepted: int = 0
    num_lagging_tokens: int = 0
    key: SequenceKey = field(init=False)
    order: tuple[int, RequestId, int] = field(init=False)
    num_prompt_tokens: int = field(init=False)
    must_compile: bool = field(init=False)

    def __post_init__(self) -> None:
        self.must_compile = self.request.sampling.structured_outputs is not None
        self.key = SequenceKey(self.request.request_id, self.sample_index)
        self.order = (self.request.priority, *self.key)
        self.num_prompt_tokens = len(self.request.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens + len(self.output_token_ids)

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens whose keys and values are still to be computed; 1 while it decodes, 0 while its next token is being
        sampled, and -1 where that token is computed already (`num_outputs_ahead`).
        """
        return self.num_prompt_tokens + len(self.output_token_ids) - self.num_computed_tokens

    def token_ids(self, start: int, stop: int) -> tuple[int, ...]:
        """Tokens at positions [start, stop) of prompt and output together."""
        num_prompt_tokens = self.num_prompt_tokens
        prompt = self.request.prompt_token_ids[start:stop]
        if stop <= num_prompt_tokens:
            return prompt
        outputs = self.output_token_ids[max(start - num_prompt_tokens, 0) : stop - num_prompt_tokens]
        return (*prompt, *outputs)


@dataclass(slots=True, eq=False)
class SequenceGroup:
    """A request and its sequences, in sample order. Before the first fork only sample 0 exists."""

    request: Request
    sequences: list[Sequence]
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    num_preemptions: int = 0
    num_cached_tokens: int | None = None
    """Prompt tokens that were found in the cache when the request was first scheduled; None before that."""
    prompt_spans: WeightSpans = ()
    """Weights that computed `prompt_logprobs`, or the vector."""
    prompt_scores: list[ScoredRows] = field(default_factory=list)
    prompt_routed_experts: RoutedExperts = field(default_factory=RoutedExperts)
    vector: bytes | None = None
    """Vector of a pooling row, little-endian float32. A replay of a log knows only its digest."""

    @property
    def is_forked(self) -> bool:
        """Whether every sample that the request runs has its sequence."""
        return len(self.sequences) == self.request.sampling.num_sequences

    @property
    def is_finished(self) -> bool:
        return self.is_forked and all(sequence.status is SequenceStatus.FINISHED for sequence in self.sequences)

    def take_routed(self, tokens: RoutedTokens) -> None:
        """Keep experts of tokens: of the prompt, which sample 0 computes, and of the sample's output."""
        num_prompt, count = len(self.request.prompt_token_ids), tokens.num_tokens
        num_before = min(max(num_prompt - tokens.first, 0), count)
        if tokens.sample_index == 0:
            self.prompt_routed_experts.put(tokens.first, tokens, 0, num_before)
        for sequence in self.sequences:
            if sequence.sample_index == tokens.sample_index:
                sequence.routed_experts.put(max(tokens.first - num_prompt, 0), tokens, num_before, count)

    def add(self, sequence: Sequence) -> None:
        insort(self.sequences, sequence, key=attrgetter("sample_index"))


def new_group(request: Request, weight_version: int = 0) -> SequenceGroup:
    """Group of a request that was just admitted: one sequence, nothing computed."""
    spans, num_samples = ((0, weight_version),), request.sampling.num_sequences
    first = Sequence(request=request, sample_index=0, num_samples=num_samples, weight_spans=spans)
    return SequenceGroup(request=request, sequences=[first])


def split_off(sequence: Sequence, num_samples: int) -> Sequence:
    """Leave `sequence` the first `num_samples` of its samples; returns an uncomputed one for the others."""
    assert 0 < num_samples < sequence.num_samples, (sequence.key, num_samples, sequence.num_samples)
    others = Sequence(
        request=sequence.request,
        sample_index=sequence.sample_index + num_samples,
        num_samples=sequence.num_samples - num_samples,
        weight_spans=sequence.weight_spans,
        block_hashes=None if sequence.block_hashes is None else list(sequence.block_hashes),
    )
    sequence.num_samples = num_samples
    return others


def fork_of(parent: Sequence, sample_index: int, table: BlockTable) -> Sequence:
    """Another sample of the same prompt, computed as far as `parent`, over `table`, which shares its blocks."""
    return Sequence(
        request=parent.request,
        sample_index=sample_index,
        num_computed_tokens=parent.num_computed_tokens,
        table=table,
        shares_tail=True,
        weight_spans=parent.weight_spans,
        block_hashes=None if parent.block_hashes is None else list(parent.block_hashes),
        num_hashed_blocks=parent.num_hashed_blocks,
        is_new_fork=True,
        status=SequenceStatus.RUNNING,
    )
