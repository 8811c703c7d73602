"""Verification of drafts: a row keeps the ids that its drafts are, and the first that its draft is not."""

from collections.abc import Callable, Sequence
from typing import Any

from spmd_worker.replica.sequence.sampled import SampledIds, num_equal

Confirm = Callable[[int, Sequence[int]], int]
"""Number of the leading ids of the row with an index that were sampled as without drafts (`GrammarMasks.confirm`)."""


def verified(
    drafts: Sequence[tuple[int, ...]],
    sampled: SampledIds,
    reports: Sequence[tuple[Any, ...]],
    confirm: Confirm | None = None,
) -> tuple[SampledIds, list[tuple[Any, ...]]]:
    """Ids of each sequence and their `reports`, each parallel to the ids or empty, given `drafts` of each and what was
    sampled: for a sequence with k drafts k + 1 entries, of which each is right only if all drafts before it are. The
    first has several ids where they are forced.
    """
    entries, reported = sampled.rows(), [sampled.divide(report) if report else [] for report in reports]
    rows: list[tuple[int, ...]] = []
    kept: list[list[Any]] = [[] for _ in reports]
    start = 0
    for own in drafts:
        ids, stop = list(entries[start]), start + 1 + len(own)
        if own and len(ids) == 1:
            ids += [token_id for row in entries[start + 1 : stop] for token_id in row[:1]]
            ids = ids[: num_equal(own, ids) + 1]
            if confirm is not None:
                ids = ids[: confirm(start, ids)]
        rows.append(tuple(ids))
        for entries_of, found in zip(reported, kept):
            found += [entry for row in entries_of[start:stop] for entry in row][: len(ids)]
        start = stop
    return SampledIds.from_rows(rows), list(map(tuple, kept))
