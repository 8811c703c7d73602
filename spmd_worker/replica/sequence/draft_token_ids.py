"""Drafts of a step in vLLM's words (`DraftTokenIds` of its executors and workers)."""

from collections.abc import Iterable
from dataclasses import dataclass

from spmd_worker.replica.sequence.sequence import SequenceKey


@dataclass(frozen=True, slots=True)
class DraftTokenIds:
    """`draft_token_ids` of the requests `req_ids`; a sample after a request's first is `INDEX_REQUEST`, as in vLLM."""

    req_ids: tuple[str, ...]
    draft_token_ids: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, keys: Iterable[SequenceKey], drafts: Iterable[tuple[int, ...]]) -> "DraftTokenIds":
        """Drafts of the sequences that have some."""
        found = [(key, own) for key, own in zip(keys, drafts, strict=True) if own]
        return cls(tuple([_name(key) for key, _ in found]), tuple([own for _, own in found]))


def _name(key: SequenceKey) -> str:
    return f"{key.sample_index}_{key.request_id}" if key.sample_index else str(key.request_id)
