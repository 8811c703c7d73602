"""Entries of log-probabilities of sampled and top-k tokens."""

from collections.abc import Iterable

from spmd_worker.replica.sequence.outputs import Logprob, TokenLogprobs


def entries_of(
    token_id: int,
    logprob: float,
    rank: int,
    top: list[tuple[int, float]],
    listed: Iterable[tuple[int, float, int]] = (),
) -> TokenLogprobs:
    """The entry of a token, then those of `listed`: (token id, log-probability, rank), a negative id for none, then
    those of `top`: (token id, log-probability), most probable first.
    """
    entries: TokenLogprobs = {token_id: Logprob(logprob, rank)}
    for listed_id, value, its_rank in listed:
        if listed_id >= 0:
            entries.setdefault(listed_id, Logprob(value, its_rank))
    for top_rank, (top_id, value) in enumerate(top, start=1):
        entries.setdefault(top_id, Logprob(value, top_rank))
    return entries
