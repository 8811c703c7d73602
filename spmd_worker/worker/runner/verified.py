"""Verification of drafts: a row keeps the ids that its drafts are, and the first that its draft is not."""

from collections.abc import Sequence
from itertools import islice

from spmd_worker.replica.sequence.outputs import TokenLogprobs
from spmd_worker.replica.sequence.sampled import SampledIds, num_equal

Logprobs = tuple[TokenLogprobs | None, ...]


def verified(drafts: Sequence[tuple[int, ...]], sampled: SampledIds, logprobs: Logprobs) -> tuple[SampledIds, Logprobs]:
    """Ids of each sequence and their log-probabilities, given `drafts` of each and what was sampled: for a sequence
    with k drafts k + 1 entries of one id, of which each is right only if all drafts before it are.
    """
    entries = iter(sampled.rows())
    reported = iter(sampled.divide(logprobs)) if logprobs else None
    rows: list[tuple[int, ...]] = []
    kept: list[TokenLogprobs | None] = []
    for own in drafts:
        ids = [token_id for row in islice(entries, len(own) + 1) for token_id in row]
        num_kept = num_equal(own, ids) + 1 if own else len(ids)
        rows.append(tuple(ids[:num_kept]))
        if reported is not None:
            of_row = [entry for row in islice(reported, len(own) + 1) for entry in row]
            kept += of_row[:num_kept]
    return SampledIds.from_rows(rows), tuple(kept)
