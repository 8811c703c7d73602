"""Attention of grouped heads to runs of keys that an indexer chooses, against its definition in float64."""

from itertools import accumulate

import pytest
import torch
from torch import Tensor

from kv_cache.cache_spec import BlockLayer
from spmd_worker.model.layers import choice_bytes, chosen_keys
from spmd_worker.model.layers.chosen_keys import ChosenKeys, IndexQueries, KeptKeys
from spmd_worker.model_config.layer_config import IndexerConfig
from spmd_worker.ops.attention.backend import AttentionBackend, block_shape_of
from spmd_worker.ops.attention.cache_dtype import FP8, from_cache, to_cache
from spmd_worker.ops.attention.cpu import cpu_backend_or_reason
from spmd_worker.ops.attention.metadata import AttentionMetadata
from spmd_worker.ops.attention.sdpa import SdpaBackend
from spmd_worker.ops.kernels.cpu.native import cpu_kernels

HEADS, KV_HEADS, SIZE, INDEX_HEADS, INDEX_SIZE, RUN = 4, 2, 32, 3, 16, 4
INDEXER = IndexerConfig(INDEX_HEADS, INDEX_SIZE, 3 * RUN, is_interleaved=False, run_length=RUN)
ROWS = ((45, 12), (70, 1), (16, 16), (5, 2))
"""Keys, and tokens of the step, which are the last ones."""


class Step:
    """Rows in one cache, whose blocks are in reverse order, with NaN where nothing was written."""

    def __init__(self, backend: AttentionBackend, block_size: int, dtype: torch.dtype, cache_dtype: torch.dtype):
        numbers = torch.Generator().manual_seed(3)

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=numbers).to(dtype)

        lengths, counts = zip(*ROWS)
        self.backend, self.block_size, self.dtype = backend, block_size, dtype
        self.query, self.index_queries = random(sum(counts), HEADS, SIZE), random(sum(counts), INDEX_HEADS, INDEX_SIZE)
        self.keys, self.values = ([random(each, KV_HEADS, SIZE) for each in lengths] for _ in range(2))
        self.run_keys = [random(each // RUN, INDEX_SIZE) for each in lengths]
        nums_blocks = [-(-each // block_size) for each in lengths]
        shape = block_shape_of(backend, BlockLayer(KV_HEADS, SIZE, SIZE, INDEX_SIZE), block_size)
        self.cache = to_cache(torch.full((sum(nums_blocks) + 1, *shape), torch.nan, dtype=dtype), cache_dtype)
        blocks = torch.arange(sum(nums_blocks), 0, -1).split(nums_blocks)
        self.tables = torch.nn.utils.rnn.pad_sequence(list(blocks), batch_first=True)

    def metadata(self, rows: list[int], counts: list[int]) -> AttentionMetadata:
        """Metadata of the last `counts` tokens of these rows."""
        lengths = [ROWS[row][0] for row in rows]
        at = [torch.arange(length - count, length) for length, count in zip(lengths, counts)]
        places = [(self.tables[row, each // self.block_size], each % self.block_size) for row, each in zip(rows, at)]
        starts = (0, *accumulate(counts))
        return AttentionMetadata(starts, tuple(lengths), self.tables[rows], *map(torch.cat, zip(*places)))

    def attend(self, rows: list[int]) -> Tensor:
        """Write all keys of rows, and attend from their tokens of the step."""
        kernels, _ = cpu_kernels(torch.float32)
        chosen = ChosenKeys(self.backend, kernels, INDEXER, KeptKeys(KV_HEADS, SIZE))
        keys, index_keys = chosen.parts_of(self.cache)
        of_all = self.metadata(rows, [ROWS[row][0] for row in rows])
        self.backend.write(*(torch.cat([part[row] for row in rows]) for part in (self.keys, self.values)), keys, of_all)
        for row in rows:
            ends = torch.arange(len(self.run_keys[row])) * RUN + RUN - 1
            places = self.tables[row, ends // self.block_size], ends % self.block_size
            index_keys[places] = to_cache(self.run_keys[row], self.cache.dtype)
        ends = [0, *accumulate(count for _, count in ROWS)]
        tokens = torch.cat([torch.arange(ends[row], ends[row + 1]) for row in rows])
        step = self.metadata(rows, [ROWS[row][1] for row in rows])
        choosing = IndexQueries(self.index_queries[tokens], torch.ones(len(tokens), INDEX_HEADS))
        return chosen.attend(self.query[tokens], keys, step, 0.2, chosen.choose(choosing, index_keys, step))

    def expected(self, num_runs: int = 3, tail: int = RUN) -> Tensor:
        """Each token by itself: the best runs, and up to `tail` of the tokens behind the last complete one."""
        found: list[Tensor] = []
        for keys, values, run_keys, (length, count) in zip(self.keys, self.values, self.run_keys, ROWS, strict=True):
            for end in range(length - count + 1, length + 1):
                complete = end // RUN
                products = self.index_queries[len(found)].double() @ run_keys[:complete].double().T
                best = products.relu().sum(0).sort(descending=True, stable=True).indices[:num_runs].tolist()
                seen = [run * RUN + offset for run in sorted(best) for offset in range(RUN)]
                seen += range(complete * RUN, min(end, complete * RUN + tail))
                query = self.query[len(found)].double().view(KV_HEADS, -1, SIZE)
                shares = (query @ keys[seen].double().permute(1, 2, 0) * 0.2).softmax(-1)
                found.append((shares @ values[seen].double().transpose(0, 1)).view(HEADS, SIZE))
        return torch.stack(found)


def new_step(block_size: int, dtype: torch.dtype, cache_dtype: torch.dtype, *, is_native: bool = True) -> Step:
    kept = None if cache_dtype == dtype else cache_dtype
    backend = cpu_backend_or_reason(dtype, (SIZE,), block_size, kept) if is_native else SdpaBackend(kept)
    assert not isinstance(backend, str), backend
    return Step(backend, block_size, dtype, cache_dtype)


@pytest.mark.parametrize("is_native", [True, False])
def test_tokens_see_the_best_runs(*, is_native: bool, monkeypatch: pytest.MonkeyPatch):
    """Keys in several tiles; controls see one run less, or none of the tokens behind the last run."""
    monkeypatch.setattr(chosen_keys, "TILE", 16)
    step = new_step(8, torch.float32, torch.float32, is_native=is_native)
    found = step.attend(list(range(len(ROWS)))).double()
    assert torch.allclose(found, step.expected(), rtol=1e-5, atol=1e-5)
    assert not torch.allclose(found, step.expected(num_runs=2), rtol=1e-2, atol=1e-2)
    assert not torch.allclose(found[:12], step.expected(tail=2)[:12], rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_fp8", [False, True])
def test_runs_are_seen_alike_alone_and_together(*, dtype: torch.dtype, is_fp8: bool, monkeypatch: pytest.MonkeyPatch):
    """Blocks of other sizes, and parts of other sizes."""
    whole, rows = [], list(range(len(ROWS)))
    for block_size, most in ((2, 64), (16, 3)):
        monkeypatch.setattr(choice_bytes, "_MAX_ROWS", most)
        step = new_step(block_size, dtype, FP8 if is_fp8 else dtype)
        whole.append(step.attend(rows))
        assert torch.equal(torch.cat([step.attend([row]) for row in rows]), whole[-1])
    assert torch.equal(*whole)
    assert not whole[0].isnan().any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_fp8", [False, True])
@pytest.mark.parametrize("is_native", [True, False])
def test_keys_and_values_are_read_as_written(*, dtype: torch.dtype, is_fp8: bool, is_native: bool):
    step = new_step(8, dtype, FP8 if is_fp8 else dtype, is_native=is_native)
    step.attend([0])
    chosen = ChosenKeys(step.backend, cpu_kernels(torch.float32)[0], INDEXER, KeptKeys(KV_HEADS, SIZE))
    written = step.metadata([0], [45])
    cache = chosen.parts_of(step.cache)[0]
    found = step.backend.read_tokens(cache, KV_HEADS, written.token_blocks, written.token_offsets, dtype)
    for read, given in zip(found, (step.keys[0], step.values[0]), strict=True):
        assert torch.equal(read, from_cache(to_cache(given, step.cache.dtype), dtype))
