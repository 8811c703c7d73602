"""An extension of a worker, for controls: one rank computes with weights, or finds blocks, that are not the others'.

Knows the model's norms, and layer 0 of the cache. Computes nothing.
"""

from typing import Any

from spmd_worker import LLM

ONE_BIT_MORE = 1 + 2**-23
"""What makes a float32 number another one, and no more."""


class ScaledNorms:
    """Methods that a worker does not have."""

    environment: Any
    get_model: Any
    kv_cache: Any

    def scale_norms(self, rank: int, factor: float) -> int:
        """How many weights are scaled here: on one rank those of all norms."""
        norms = [weight for name, weight in self.get_model().named_parameters() if "norm" in name]
        return len([norm.data.mul_(factor) for norm in norms]) if self.environment.rank == rank else 0

    def change_block(self, rank: int, block_id: int) -> bool:
        """Change a byte on one rank."""
        if self.environment.rank == rank:
            self.kv_cache[0][0][block_id].view(-1)[5] += 1
        return self.environment.rank == rank


def scale_norms(llm: LLM, rank: int, factor: float) -> None:
    """In the worker of one rank of an engine that was made with `ScaledNorms`, while it computes nothing."""
    counts = llm.collective_rpc("scale_norms", args=(rank, factor))
    assert [number for number, count in enumerate(counts) if count] == [rank], counts
    llm.reset_prefix_cache()
