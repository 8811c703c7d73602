"""The two records between scheduler and devices: the plan of a step, and its result."""

from dataclasses import dataclass
from typing import Final

from kv_cache.block import BlockId
from kv_cache.block_ops import BlockOps
from kv_cache.state_ops import NO_STATE_OPS, StateOps
from spmd_worker.replica.sequence.hit_comparison import HitComparison
from spmd_worker.replica.sequence.media_items import EncodeMedia
from spmd_worker.replica.sequence.metadata import GroupUpdate
from spmd_worker.replica.sequence.outputs import TokenLogprobs
from spmd_worker.replica.sequence.record_checks import CheckedRecord, check_num_ids
from spmd_worker.replica.sequence.request import RequestId
from spmd_worker.replica.sequence.sequence import SequenceKey

NO_BLOCK_OPS: Final = BlockOps()


@dataclass(frozen=True, slots=True)
class StepPlan(CheckedRecord):
    """Everything the workers need for step number `step`.

    `continuing` are the sequences that continue with the ids of their last sampling: each appends these, computes them
    and samples; one that got none recomputes its last token. `continuing_token_ids` are the ids, one sequence's after
    another's, and `continuing_num_ids` the number of each, empty where each has one. The first `num_ahead` of them go
    ahead of their ids: each appends the one id that the step before samples for it, which the host has not read yet, so
    these two lists cover only the others. `continuing_blocks` are the blocks newly allocated to some of them, as (index
    in `continuing`, block). Everything else that is computed is in `groups`, each group at most once; a sequence is in
    one of the two. Rows are computed and sampled in this order: `continuing`, then `groups` (`sampled.py`).

    `finished_sequences` ended in an earlier step and `finished_request_ids` are requests with nothing left: mirrors
    drop them before they apply the rest. `num_tokens` counts the tokens computed. `state_ops` move recurrent states
    when `block_ops` move blocks, also for sequences that the step does not compute. `hit_comparisons` are made after
    the forward pass. `repeated_rows`, indexes in `continuing`, are then computed once more, each alone. With
    `wants_drafts` the workers' drafter, if they have one, drafts what may follow this step's ids.

    Before the forward pass, and in this order, the rows of the images named by `drop_rows` are dropped, and those of
    `encode` are made.
    """

    step: int
    groups: tuple[GroupUpdate, ...] = ()
    block_ops: BlockOps = NO_BLOCK_OPS
    finished_sequences: tuple[SequenceKey, ...] = ()
    finished_request_ids: tuple[RequestId, ...] = ()
    num_tokens: int = 0
    continuing: tuple[SequenceKey, ...] = ()
    continuing_token_ids: tuple[int, ...] = ()
    continuing_num_ids: tuple[int, ...] = ()
    continuing_blocks: tuple[tuple[int, BlockId], ...] = ()
    num_ahead: int = 0
    state_ops: StateOps = NO_STATE_OPS
    encode: tuple[EncodeMedia, ...] = ()
    drop_rows: tuple[bytes, ...] = ()
    hit_comparisons: tuple[HitComparison, ...] = ()
    repeated_rows: tuple[int, ...] = ()
    wants_drafts: bool = False

    @property
    def has_rows(self) -> bool:
        """Whether anything is computed, so that there is a result to apply."""
        return bool(self.groups or self.continuing)


@dataclass(frozen=True, slots=True)
class StepResult:
    """Sampled ids of each sequence that the step samples for, in the order of `sampled.sampling_keys`.

    `num_token_ids` is the number of ids of each; it is empty where each got one; a sequence with drafts gets those that
    are right, and one more. `drafts` of the workers' own drafter, for the next step, are parallel to the sequences, or
    empty. `logprobs` is parallel to `token_ids`
    (None where the row did not ask) or empty when no row asked; `prompt_logprobs` has (request, first position, one
    entry a position) for requests that asked and prompt positions of this step. `vectors` has (request, little-endian
    float32) of pooling rows; their digests are in `token_ids` (`vector_digest`). `mask_checksums` has one number, of
    the masks of all rows with a grammar, if the step has such rows. `finished_transfers` is this rank's own report
    (`TransferEngine.finished`): only here may ranks differ.
    """

    step: int
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs | None, ...] = ()
    prompt_logprobs: tuple[tuple[RequestId, int, tuple[TokenLogprobs | None, ...]], ...] = ()
    finished_transfers: tuple[int, ...] = ()
    num_token_ids: tuple[int, ...] = ()
    vectors: tuple[tuple[RequestId, bytes], ...] = ()
    mask_checksums: tuple[int, ...] = ()
    drafts: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        check_num_ids("StepResult.num_token_ids", self.num_token_ids, self.token_ids)
