"""Events: input that a replica cannot compute itself. They enter through rank 0, in order, stamped with a step number.

A new event is a class here, listed in `Event`, plus the code that raises it and the code that applies it: its encoding,
its digest and the text of a difference follow from its fields.
"""

from dataclasses import dataclass

from kv_cache.block import BlockHash
from spmd_worker.replica.sequence.record_checks import CheckedRecord
from spmd_worker.replica.sequence.request import Request, RequestId, whole_number


@dataclass(frozen=True, slots=True)
class Admit(CheckedRecord):
    """A request joins the queue."""

    request: Request


@dataclass(frozen=True, slots=True)
class Abort:
    """A request ends now, in any state; one that has already ended is not an error."""

    request_id: RequestId

    def __post_init__(self) -> None:
        object.__setattr__(self, "request_id", whole_number("request_id", self.request_id))


@dataclass(frozen=True, slots=True)
class Close:
    """The engine ends after this step: ranks that follow leave their loop."""


@dataclass(frozen=True, slots=True)
class EndRound:
    """All requests of the replica are answered: following ranks return to their caller, and the engine goes on."""


@dataclass(frozen=True, slots=True)
class Interrupt(CheckedRecord):
    """The current call of the ranks ends with this step: a signal's handler raised `error` (its text) on `rank` of the
    replica. Requests that the call has left open are aborted in the same step.
    """

    rank: int
    error: str


@dataclass(frozen=True, slots=True)
class ResetPrefixCache(CheckedRecord):
    """Later requests find nothing that is in the cache now; requests in flight continue. Without `keeps_names` the
    weights may have changed without a new version, so nothing is loaded from outside the engine either from now on.
    """

    keeps_names: bool = False


@dataclass(frozen=True, slots=True)
class ResetMediaRows(CheckedRecord):
    """The workers drop the rows of all images in the next step; requests that need some make them again."""


@dataclass(frozen=True, slots=True)
class SetWeightVersion:
    """The weights change: `version` enters the block hashes."""

    version: int

    def __post_init__(self) -> None:
        """Raises TypeError or ValueError: later, when a step's message is encoded, it would end every rank."""
        object.__setattr__(self, "version", whole_number("version", self.version))


@dataclass(frozen=True, slots=True)
class PauseGeneration(CheckedRecord):
    """No request joins from now on; in `mode` "wait" those that have begun continue, otherwise none does. With
    `clear_cache` the cache is emptied, and requests that stay compute their tokens again after `ResumeGeneration`.
    """

    mode: str
    clear_cache: bool


@dataclass(frozen=True, slots=True)
class ResumeGeneration(CheckedRecord):
    """Requests are scheduled again."""


@dataclass(frozen=True, slots=True)
class FinishTransfers(CheckedRecord):
    """Every rank has finished these transfers (`BlockOps.transfer`); of negative numbers, some rank has failed to load
    the blocks.
    """

    numbers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class WorkerEvent(CheckedRecord):
    """Every worker prepares `name` with `payload` (bytes of the executor's encoding) before the next step; the answers
    are sent with that step. At most one is open: from its step to that of its `EndWorkerEvent`.
    """

    number: int
    name: str
    payload: bytes


@dataclass(frozen=True, slots=True)
class EndWorkerEvent(CheckedRecord):
    """Every worker commits worker event `number` before the next step, or undoes it if a rank had a `problem`."""

    number: int
    problem: str


@dataclass(frozen=True, slots=True)
class CommitWeights(CheckedRecord):
    """All ranks have loaded new weights: like `SetWeightVersion`. `version` is a digest of the loaded tensors,
    `num_tensors` their number; each rank compares both with its own before the step runs, unless they come with a
    worker event's commit.
    """

    version: int
    num_tensors: int


@dataclass(frozen=True, slots=True)
class AddAdapter(CheckedRecord):
    """Every worker has loaded a LoRA adapter, under an id that may have had another content, and dropped the `evicted`
    ids. `path` is its folder on rank 0, "" for tensors; `digest` is that of its content.
    """

    int_id: int
    name: str
    path: str
    digest: int
    evicted: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class RemoveAdapter(CheckedRecord):
    """A LoRA adapter is no longer loaded."""

    int_id: int


@dataclass(frozen=True, slots=True)
class PinAdapter(CheckedRecord):
    """A LoRA adapter is never evicted from now on."""

    int_id: int


@dataclass(frozen=True, slots=True)
class AddPromptAdapter(CheckedRecord):
    """Every worker has loaded a prompt adapter of `num_tokens` virtual tokens, otherwise as `AddAdapter`."""

    int_id: int
    name: str
    path: str
    digest: int
    evicted: tuple[int, ...] = ()
    num_tokens: int = 0


@dataclass(frozen=True, slots=True)
class RemovePromptAdapter(CheckedRecord):
    """A prompt adapter is no longer loaded."""

    int_id: int


@dataclass(frozen=True, slots=True)
class PinPromptAdapter(CheckedRecord):
    """A prompt adapter is never evicted from now on."""

    int_id: int


@dataclass(frozen=True, slots=True)
class FoundBlocks(CheckedRecord):
    """Rank 0 has found blocks of these names outside the engine (`kv_cache/connectors/interface.py`), and those of
    `missing` no longer.
    """

    hashes: tuple[BlockHash, ...]
    missing: tuple[BlockHash, ...] = ()


Event = (
    Admit
    | Abort
    | Close
    | EndRound
    | Interrupt
    | ResetPrefixCache
    | SetWeightVersion
    | FinishTransfers
    | WorkerEvent
    | EndWorkerEvent
    | CommitWeights
    | AddAdapter
    | RemoveAdapter
    | PinAdapter
    | AddPromptAdapter
    | RemovePromptAdapter
    | PinPromptAdapter
    | FoundBlocks
    | ResetMediaRows
    | PauseGeneration
    | ResumeGeneration
)


CommittedWith = (
    ResetPrefixCache
    | SetWeightVersion
    | CommitWeights
    | AddAdapter
    | RemoveAdapter
    | AddPromptAdapter
    | RemovePromptAdapter
)
"""Events that may take effect with the commit of a worker event."""


def concern_workers(events: tuple[Event, ...]) -> bool:
    """Whether workers change between this step and the next, or a call waits for that, so that no later step may be in
    flight on any stage.
    """
    kinds = WorkerEvent | EndWorkerEvent | PinAdapter | PinPromptAdapter | PauseGeneration
    return any(isinstance(event, kinds) for event in events)
