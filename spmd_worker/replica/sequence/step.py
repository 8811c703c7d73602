"""The two records in which the scheduler and the devices meet: what a step computes, and what came of it."""

from dataclasses import dataclass
from typing import Final

from kv_cache.block import BlockId
from kv_cache.block_ops import BlockOps
from spmd_worker.replica.sequence.metadata import GroupUpdate
from spmd_worker.replica.sequence.outputs import TokenLogprobs
from spmd_worker.replica.sequence.record_checks import check_fields, check_num_ids
from spmd_worker.replica.sequence.request import RequestId
from spmd_worker.replica.sequence.sequence import SequenceKey

NO_BLOCK_OPS: Final = BlockOps()


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Everything the workers need for step number `step`.

    `continuing` are the sequences that continue by the ids they were given when they last sampled: each appends these,
    computes them and samples; where it was given none, it computes its last token again. `continuing_token_ids` are the
    ids, one sequence's after another's, and `continuing_num_ids` how many each has, empty where each has one. The first
    `num_ahead` of them go ahead of their ids: each appends the one id that the step before samples for it, which nobody
    has read yet, so that these two lists are of the others. `continuing_blocks` are the blocks that some of them take
    for it, as (index in `continuing`, block). Whatever else
    is computed is in `groups`, each group at most once; a sequence is in one of the two. Rows are computed and sampled
    in this order: `continuing`, then `groups` (`sampled.py`).

    `finished_sequences` ended in an earlier step and `finished_request_ids` are requests with nothing left: mirrors
    forget them before they apply the rest. `num_tokens` counts the tokens computed.
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

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def has_rows(self) -> bool:
        """Whether anything is computed, and so a result to be applied."""
        return bool(self.groups or self.continuing)


@dataclass(frozen=True, slots=True)
class StepResult:
    """What was sampled: the ids of each sequence that the step samples for, in the order of `sampled.sampling_keys`.

    `num_token_ids` says how many each was given; it is empty where each was given one. `logprobs` is parallel to
    `token_ids` (None where the row did not ask) or empty when no row asked; `prompt_logprobs` has (request, first
    position, one entry a position) for requests that asked and prompt positions of this step. `vectors` has (request,
    little-endian float32) of rows that are pooled; their digests stand in `token_ids` (`vector_digest`).
    `mask_checksums` has one number, of the masks of all rows whose answers have a form, where the step has such rows.
    `finished_transfers` is this rank's own report (`TransferEngine.finished`): here alone ranks may differ.
    """

    step: int
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs | None, ...] = ()
    prompt_logprobs: tuple[tuple[RequestId, int, tuple[TokenLogprobs | None, ...]], ...] = ()
    finished_transfers: tuple[int, ...] = ()
    num_token_ids: tuple[int, ...] = ()
    vectors: tuple[tuple[RequestId, bytes], ...] = ()
    mask_checksums: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        check_num_ids("StepResult.num_token_ids", self.num_token_ids, self.token_ids)
