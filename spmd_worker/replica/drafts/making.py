"""Makes the proposer of a method."""

from spmd_worker.base.config.speculation import SpeculativeConfig
from spmd_worker.replica.drafts.proposer import Proposer


def make_proposer(config: SpeculativeConfig, vocab_size: int) -> Proposer | None:
    """The replica's proposer; None for methods whose drafts come from the workers."""
    return None
