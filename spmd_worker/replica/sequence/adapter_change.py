"""Payload of the worker events that load and remove LoRA and prompt adapters, as rank 0 decides it."""

from dataclasses import dataclass
from typing import Final

from spmd_worker.replica.sequence.record_checks import CheckedRecord

ADD_LORA: Final = "add_lora"
REMOVE_LORA: Final = "remove_lora"


@dataclass(frozen=True, slots=True)
class AdapterChange(CheckedRecord):
    """The adapter's id, name, folder ("" for tensors), and the digest of its content on rank 0; `evicted` are ids that
    give way, `dropped` contents that no id has afterwards. With a `problem` every rank refuses the event. A prompt
    adapter has `num_tokens` virtual tokens.
    """

    int_id: int
    name: str
    path: str
    digest: int
    evicted: tuple[int, ...] = ()
    dropped: tuple[int, ...] = ()
    problem: str = ""
    num_tokens: int = 0
