"""Keys and values of prompt adapters (prefix tuning), written into the blocks of the rows that have them.

A row with such an adapter begins behind its virtual tokens: the scheduler allocates their blocks and counts them as
computed. What is written has their own positions already: no rotation is applied.

v: virtual tokens; Hkv: key-value heads of this rank; D: head size.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from kv_cache.block import BlockId
from kv_cache.cache_engine import LayerCaches
from spmd_worker.ops.attention.backend import AttentionBackend
from spmd_worker.ops.attention.metadata import AttentionMetadata
from spmd_worker.ops.kernels.host_copies import to_device
from spmd_worker.replica.mirror.mirror import ScheduledSequence
from spmd_worker.replica.sequence.input_rows import KEYS_VALUES


class PrefixStore:
    """Holds each adapter's [layers, 2, v, Hkv, D] of this stage in host memory, by the name of its content."""

    def __init__(self, attention: AttentionBackend, block_size: int, device: torch.device) -> None:
        self._attention, self._block_size, self._device = attention, block_size, device
        self._prefixes: dict[bytes, Tensor] = {}
        self.num_written = 0
        """Virtual tokens that were written so far."""

    def keep(self, content: bytes, keys_values: Tensor) -> None:
        self._prefixes[content] = keys_values

    def drop(self, content: bytes) -> None:
        self._prefixes.pop(content, None)

    @property
    def num_bytes(self) -> int:
        return sum(each.nbytes for each in self._prefixes.values())

    def write(
        self,
        scheduled: Sequence[ScheduledSequence],
        cache: LayerCaches,
        num_groups: int = 1,
        group_of: Sequence[int] = (),
    ) -> None:
        """Write the virtual tokens of the rows that begin behind them in this step into `cache` of each layer, whose
        group is in `group_of`. Blocks that were found hold the same bytes already.
        """
        for sequence, _, _ in scheduled:
            for rows in sequence.request.rows:
                if rows.kind == KEYS_VALUES and sequence.num_computed_tokens == rows.num_rows:
                    tables = [sequence.block_ids[group::num_groups] for group in range(num_groups)]
                    self._write(tables, self._prefixes[rows.content], cache, group_of)

    def _write(
        self, tables: Sequence[list[BlockId]], keys_values: Tensor, cache: LayerCaches, group_of: Sequence[int]
    ) -> None:
        num_tokens = keys_values.shape[2]
        of_groups = [self._metadata(table, num_tokens) for table in tables]
        on_device = to_device(keys_values, self._device)
        groups = group_of or (0,) * len(cache)
        for layer_cache, (keys, values), group in zip(cache, on_device, groups, strict=True):
            assert layer_cache is not None, "every layer keeps keys and values"
            self._attention.write(keys, values, layer_cache, of_groups[group])
        self.num_written += num_tokens

    def _metadata(self, block_ids: list[BlockId], num_tokens: int) -> AttentionMetadata:
        numbers, offsets = np.divmod(np.arange(num_tokens), self._block_size)
        table = np.array(block_ids, dtype=np.int64)
        columns = (table[None], table[numbers], offsets)
        tables, blocks, inside = (to_device(torch.from_numpy(each), self._device) for each in columns)
        return AttentionMetadata((0, num_tokens), (num_tokens,), tables, blocks, inside)
