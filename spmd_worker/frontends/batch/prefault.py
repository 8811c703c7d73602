"""Prefaults a job's cache at startup, by an estimate from its input: too little costs time, too much memory."""

import logging
import re
from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Final

from kv_cache import host_reserve
from kv_cache.cache_spec import CacheSpec
from kv_cache.host_reserve import HostReserve
from spmd_worker.base.config.schema import RunConfig
from spmd_worker.base.remote_names import FilePath, RemotePath
from spmd_worker.frontends.batch.run_dir.shard import Shard
from spmd_worker.resolved import highest_num_seqs
from spmd_worker.worker.memory import host

logger = logging.getLogger(__name__)

_BYTES_PER_TOKEN: Final = 4
"""Bytes of an input line per token, including its share of the answer."""
_SAMPLE_BYTES: Final = 1 << 19
_PROMPT: Final = re.compile(rb'"(prompt|messages)')
_COMPRESSION_RATIO: Final = 5
_COMPRESSED: Final = (".gz", ".zst", ".parquet")
_FREE_MEMORY_DIVISOR: Final = 8
"""The ranks of a node prefault at most one part in this many of its free memory."""


def prefault(config: RunConfig, spec: CacheSpec, inputs: Sequence[FilePath], max_model_len: int, num_ranks: int) -> int:
    """Start the prefault; returns its bytes. `spec` is this rank's cache, `num_ranks` the node's ranks."""
    shard = Shard.of(config.job)
    num_bytes = min(
        estimate_tokens(inputs, shares_prefixes=config.cache.enable_prefix_caching)
        // (1 if shard is None else shard.count)
        // config.parallel.data_parallel_size
        // spec.block_size
        * spec.row_block_bytes,
        highest_num_seqs(config) * spec.groups.num_blocks(max_model_len, spec.block_size) * spec.block_bytes,
        host.available_bytes() // _FREE_MEMORY_DIVISOR // num_ranks,
    )
    if config.cache.num_blocks is not None:
        num_bytes = min(num_bytes, config.cache.num_blocks * spec.row_block_bytes)
    try:
        reserve = HostReserve()
    except OSError as error:
        logger.debug("the cache's memory is not prefaulted: %s", error)
        return 0
    reserve.commit(num_bytes)
    host_reserve.offer(reserve)
    return num_bytes


def estimate_tokens(inputs: Sequence[FilePath], *, shares_prefixes: bool) -> int:
    """Tokens of prompts and answers of all rows; common prefixes, if rows share their blocks, count once."""
    num_tokens = 0
    for path in inputs:
        if isinstance(path, RemotePath):
            continue
        num_bytes = path.stat().st_size * (_COMPRESSION_RATIO if path.suffix in _COMPRESSED else 1)
        if shares_prefixes and path.suffix not in _COMPRESSED:
            num_bytes = int(num_bytes * _unshared_fraction(path))
        num_tokens += num_bytes // _BYTES_PER_TOKEN
    return num_tokens


def _unshared_fraction(path: Path) -> float:
    """Fraction of a file's bytes that is not a prefix common to two prompts, estimated from a sample."""
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
    lengths = range(1, min(len(first), len(second)) + 1)
    return bisect_left(lengths, True, key=lambda length: first[:length] != second[:length])
