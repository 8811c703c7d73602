"""Verification of drafts: a row keeps the ids that its drafts are, and the first that its draft is not."""

from collections.abc import Callable, Sequence

from spmd_worker.replica.sequence.outputs import TokenLogprobs
from spmd_worker.replica.sequence.sampled import SampledIds, num_equal

Logprobs = tuple[TokenLogprobs | None, ...]

Confirm = Callable[[int, Sequence[int]], int]
"""Number of the leading ids of the row with an index that were sampled as without drafts (`GrammarMasks.confirm`)."""


def verified(
    drafts: Sequence[tuple[int, ...]], sampled: SampledIds, logprobs: Logprobs, confirm: Confirm | None = None
) -> tuple[SampledIds, Logprobs]:
    """Ids of each sequence and their log-probabilities, given `drafts` of each and what was sampled: for a sequence
    with k drafts k + 1 entries, of which each is right only if all drafts before it are. The first has several ids
    where they are forced.
    """
    entries, reported = sampled.rows(), sampled.divide(logprobs) if logprobs else []
    rows: list[tuple[int, ...]] = []
    kept: list[TokenLogprobs | None] = []
    start = 0
    for own in drafts:
        ids = list(entries[start])
        if own and len(ids) == 1:
            ids += [token_id for row in entries[start + 1 : start + 1 + len(own)] for token_id in row[:1]]
            ids = ids[: num_equal(own, ids) + 1]
            if confirm is not None:
                ids = ids[: confirm(start, ids)]
        rows.append(tuple(ids))
        if logprobs:
            of_row = [entry for row in reported[start : start + 1 + len(own)] for entry in row]
            kept += of_row[: len(ids)]
        start += 1 + len(own)
    return SampledIds.from_rows(rows), tuple(kept)
