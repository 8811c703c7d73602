"""Digests of a trainer's tensors, whole or in shards, as `LLM.tensor_digests` has them of the weights that are held."""

import json
from collections.abc import Iterable

from torch import Tensor

from spmd_worker.engine.interruption import error_of_rank, error_text
from spmd_worker.model.weights.store import WeightStore
from spmd_worker.model.weights.trainer_digest import sums_from_json, trainer_sums
from spmd_worker.model.weights.weight_comparison import combined_digests
from spmd_worker.ranks.transport.tensor_exchange import TensorExchange


def trainer_digests(
    store: WeightStore, exchange: TensorExchange, tensors: Iterable[tuple[str, Tensor]]
) -> dict[str, str]:
    """Digests by checkpoint name. Every rank of the exchange calls this with what it has; nothing is gathered but two
    sums of 64 bits for each part. Raises what `trainer_sums` does, RankFailedError for another rank's error, and
    CheckpointError if ranks have different elements of a part, or no rank has one.
    """
    error: Exception | None = None
    try:
        own = {"sums": trainer_sums(store, tensors)}
    except Exception as found:  # any error is sent to the waiting ranks
        error, own = found, {}
    payload = json.dumps(own if error is None else {"error": error_text(error)}).encode()
    answers = [json.loads(each) for each in exchange.gather(payload)]
    if error is not None:
        raise error
    for rank, answer in enumerate(answers):
        if "error" in answer:
            raise error_of_rank(rank, answer["error"], "failed before the digests")
    by_rank = [sums_from_json(answer["sums"]) for answer in answers]
    names = {name for sums in by_rank for name in sums}
    return combined_digests({name: shape for name, shape in store.shapes.items() if name in names}, by_rank)
