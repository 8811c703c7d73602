"""Prefaults the memory of a job's cache while the program starts: about as much as the job will need.

A guess from the size of the input; too little costs some time later, too much some memory.
"""

import logging
import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Final

from kv_cache import host_reserve
from kv_cache.cache_spec import CacheSpec
from kv_cache.host_reserve import HostReserve
from spmd_worker.base.config.schema import RunConfig
from spmd_worker.worker.memory import host

logger = logging.getLogger(__name__)

_BYTES_A_TOKEN: Final = 4
"""Bytes of an input line per token, including its share of the answer."""
_SAMPLE_BYTES: Final = 1 << 19
_PROMPT: Final = re.compile(rb'"(prompt|messages)')
_TIMES_COMPRESSED: Final = 5
_COMPRESSED: Final = (".gz", ".zst", ".parquet")
_MOST_SHARE: Final = 8
"""The maximum is this part of the free memory."""


def prefault(config: RunConfig, spec: CacheSpec, inputs: Sequence[Path], max_model_len: int, num_ranks: int) -> int:
    """Start the prefault; returns its bytes. `spec` is this rank's cache, `num_ranks` the node's ranks."""
    num_bytes = min(
        guess_tokens(inputs, shares_beginnings=config.cache.enable_prefix_caching)
        // config.parallel.data_parallel_size
        // spec.block_size
        * spec.block_bytes,
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


def guess_tokens(inputs: Sequence[Path], *, shares_beginnings: bool) -> int:
    """Tokens of prompts and answers of all rows; common beginnings, if rows share their blocks, count once."""
    num_tokens = 0
    for path in inputs:
        num_bytes = path.stat().st_size * (_TIMES_COMPRESSED if path.suffix in _COMPRESSED else 1)
        if shares_beginnings and path.suffix not in _COMPRESSED:
            num_bytes = int(num_bytes * _own_share(path))
        num_tokens += num_bytes // _BYTES_A_TOKEN
    return num_tokens


def _own_share(path: Path) -> float:
    """Share of a file's lines that is not also the beginning of another line's prompt, estimated from a sample."""
    with path.open("rb") as file:
        lines = sorted(map(_from_prompt, file.read(_SAMPLE_BYTES).splitlines()[:-1]))
    num_bytes = sum(map(len, lines))
    if not num_bytes:
        return 1.0
    return 1.0 - sum(_common_length(before, line) for before, line in pairwise(lines)) / num_bytes


def _from_prompt(line: bytes) -> bytes:
    """Drop ids and settings before the prompt, which rows do not share."""
    found = _PROMPT.search(line)
    return line[found.start() :] if found else line


def _common_length(first: bytes, second: bytes) -> int:
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if first[:middle] == second[:middle]:
            low = middle
        else:
            high = middle - 1
    return low
