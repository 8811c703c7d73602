"""Begins to commit the memory of a job's cache while the program starts: about as much as the job will need.

A guess from the size of the input; too little costs a little time later, too much some memory. Knows a configuration,
files' sizes and a model's. Knows nothing about what is committed.
"""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from kv_cache import host_reserve
from kv_cache.cache_spec import CacheSpec
from kv_cache.host_reserve import HostReserve
from spmd_worker.config import RunConfig
from spmd_worker.memory import host

logger = logging.getLogger(__name__)

_BYTES_A_TOKEN: Final = 4
"""Of an input line: about what a token takes in it, its share of the answer counted."""
_TIMES_COMPRESSED: Final = 5
_COMPRESSED: Final = (".gz", ".zst", ".parquet")
_MOST_SHARE: Final = 8
"""At most this part of the memory that is free."""


def commit_ahead(config: RunConfig, spec: CacheSpec, inputs: Sequence[Path], max_model_len: int, num_ranks: int) -> int:
    """`spec` is of this rank's cache, `num_ranks` how many ranks this node has. Returns how many bytes."""
    num_bytes = min(
        guess_tokens(inputs) // config.parallel.data_parallel_size // spec.block_size * spec.block_bytes,
        config.scheduler.max_num_seqs * -(-max_model_len // spec.block_size) * spec.block_bytes,
        host.available_bytes() // _MOST_SHARE // num_ranks,
    )
    if config.cache.num_blocks is not None:
        num_bytes = min(num_bytes, config.cache.num_blocks * spec.block_bytes)
    try:
        reserve = HostReserve()
    except OSError as error:
        logger.debug("the cache's memory is not committed ahead: %s", error)
        return 0
    reserve.commit(num_bytes)
    host_reserve.offer(reserve)
    return num_bytes


def guess_tokens(inputs: Sequence[Path]) -> int:
    """Of prompts and answers of all rows."""
    return sum(
        path.stat().st_size * (_TIMES_COMPRESSED if path.suffix in _COMPRESSED else 1) // _BYTES_A_TOKEN
        for path in inputs
    )
