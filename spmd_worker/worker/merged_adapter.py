"""`model.lora_merge`: the adapter that is merged into all weights that are read from files."""

import logging
from collections.abc import Collection

from spmd_worker.base.config.adapter_limits import MERGED
from spmd_worker.base.config.schema import ModelOptions
from spmd_worker.base.errors import AdapterError
from spmd_worker.base.metrics.log import SAME_ON_EVERY_RANK
from spmd_worker.model.adapters.merge import weight_updates
from spmd_worker.model.adapters.source import read_adapter
from spmd_worker.model.weights.merged_weights import MergedWeights
from spmd_worker.model.weights.store import WeightStore
from spmd_worker.model.weights.weight_source import WeightSource

logger = logging.getLogger(__name__)


def with_merged_adapter(
    source: WeightSource, weights: WeightStore, options: ModelOptions, loaded: Collection[int] = ()
) -> WeightSource:
    """`source` with the run's adapter merged into it, if there is one. Raises AdapterError before a weight is read,
    also if the adapter is among `loaded`, the digests of those that rows may name.
    """
    folder = options.merged_adapter
    if folder is None:
        return source
    adapter = read_adapter(folder)
    if adapter.digest in loaded:
        raise AdapterError(
            f"model.lora_merge={folder} has by now the content of an adapter that rows may name, and they would have "
            f"it twice: call remove_lora for that one first"
        )
    updates = weight_updates(adapter, weights.names, weights.shapes)
    logger.info(
        "the adapter %s, digest %016x, of %d weights is %s",
        *(folder, adapter.digest, len(updates), MERGED),
        extra=SAME_ON_EVERY_RANK,
    )
    return MergedWeights(source, updates, adapter.digest)
