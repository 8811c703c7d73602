"""Entries of log-probabilities of sampled and top-k tokens."""

from spmd_worker.replica.sequence.outputs import Logprob, TokenLogprobs


def entries_of(token_id: int, logprob: float, rank: int, top: list[tuple[int, float]]) -> TokenLogprobs:
    """The entry of a token, then those of `top`: (token id, log-probability), most probable first."""
    entries: TokenLogprobs = {token_id: Logprob(logprob, rank)}
    for top_rank, (top_id, value) in enumerate(top, start=1):
        entries.setdefault(top_id, Logprob(value, top_rank))
    return entries
