"""Updates of sequence groups for the workers: everything once, then only the changes.

A snapshot (`SequenceGroupMetadata`) introduces a group or replaces the listed sequences (after they were preempted and
lost their blocks). A delta (`SequenceGroupMetadataDelta`) appends. A sequence that continues needs neither: see
`StepPlan.continuing`. `replica/lockstep/wire/codec.py` packs these records, `replica/mirror/mirror.py` applies them.
"""

from dataclasses import dataclass

from kv_cache.block import BlockId
from spmd_worker.replica.sequence.request import Request, RequestId


def _check_number(name: str, value: int) -> None:
    if value < 0:
        raise ValueError(f"{name}={value} must be 0 or more")


@dataclass(frozen=True, slots=True)
class SequenceData:
    """All data of one scheduled sequence: the step computes `num_scheduled_tokens` tokens from `num_computed_tokens`
    on.

    `num_samples` tokens are sampled from the logits of the last one: 0 inside a prompt, 1 at its end and in decoding, n
    where n sequences are about to fork from this one. `state_slot` holds its recurrent states, -1 where the model has
    none. The last of the scheduled tokens are `draft_token_ids`, which may follow the known ones: one token is sampled
    at the last known one and at each of these, and the sequence gets those up to the first that its draft is not. The
    slot's states are `num_lagging_tokens` behind the computed tokens.
    """

    sample_index: int
    output_token_ids: tuple[int, ...]
    block_ids: tuple[BlockId, ...]
    num_computed_tokens: int
    num_scheduled_tokens: int
    num_samples: int
    state_slot: int = -1
    draft_token_ids: tuple[int, ...] = ()
    num_lagging_tokens: int = 0

    def __post_init__(self) -> None:
        _check_number("num_samples", self.num_samples)
        _check_number("num_lagging_tokens", self.num_lagging_tokens)


@dataclass(frozen=True, slots=True)
class SequenceDataDelta:
    """One scheduled sequence that the mirror knows: tokens to append, and blocks to append after the first
    `num_kept_blocks`.

    The other fields are those of `SequenceData`. `num_kept_blocks` is below the length of the known table only where
    copy-on-write replaced the table's tail. `state_slot` is given only for a sequence that has just forked, which the
    mirror does not know: it never changes while a sequence runs. The mirror knows how far its states lag: they have the
    tokens that the last step was given.
    """

    sample_index: int
    appended_token_ids: tuple[int, ...]
    num_kept_blocks: int
    appended_block_ids: tuple[BlockId, ...]
    num_computed_tokens: int
    num_scheduled_tokens: int
    num_samples: int
    state_slot: int = -1
    draft_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        _check_number("num_samples", self.num_samples)


@dataclass(frozen=True, slots=True)
class SequenceGroupMetadata:
    """Snapshot: the request, and all data of those of its sequences that this step computes."""

    request: Request
    sequences: tuple[SequenceData, ...]

    @property
    def request_id(self) -> RequestId:
        return self.request.request_id


@dataclass(frozen=True, slots=True)
class SequenceGroupMetadataDelta:
    """Changes of a known group, for those of its sequences that this step computes."""

    request_id: RequestId
    sequences: tuple[SequenceDataDelta, ...]


GroupUpdate = SequenceGroupMetadata | SequenceGroupMetadataDelta
