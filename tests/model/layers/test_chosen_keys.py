"""Attention to keys that an indexer chooses, against its definition in float64, over native and plain attention."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from kv_cache.cache_spec import BlockLayer
from spmd_worker.model.layers import choice_bytes, chosen_keys
from spmd_worker.model.layers.chosen_keys import ChosenKeys, IndexQueries, latent_keys
from spmd_worker.model_config.layer_config import IndexerConfig, LatentConfig
from spmd_worker.ops.attention.backend import AttentionBackend, block_shape_of
from spmd_worker.ops.attention.cache_dtype import FP8, from_cache, to_cache
from spmd_worker.ops.attention.cpu import CpuBackend, cpu_backend_or_reason
from spmd_worker.ops.attention.metadata import AttentionMetadata
from spmd_worker.ops.attention.sdpa import SdpaBackend
from spmd_worker.ops.kernels.cpu.native import cpu_kernels
from spmd_worker.ops.kernels.reference import ReferenceKernels

NUM_CHOSEN, NUM_HEADS, INDEX_HEADS, INDEX_SIZE = 9, 3, 4, 16
INDEXER = IndexerConfig(INDEX_HEADS, INDEX_SIZE, NUM_CHOSEN, is_interleaved=False)
LATENT = LatentConfig(32, 16, 16, 16, 32, INDEXER)
ROWS = ((40, 11), (70, 1), (9, 9), (12, 12), (5, 2))
"""Keys, and tokens of the step, which are the last ones."""
SCALE = 0.2


def native_backend(dtype: torch.dtype, block_size: int, cache_dtype: torch.dtype | None = None) -> CpuBackend:
    found = cpu_backend_or_reason(dtype, (LATENT.key_size, LATENT.rank), block_size, cache_dtype)
    assert isinstance(found, CpuBackend), found
    return found


@dataclass
class Step:
    """Rows in one cache, with blocks in reverse order, and NaN where nothing was written."""

    backend: AttentionBackend
    block_size: int
    dtype: torch.dtype = torch.float32
    cache_dtype: torch.dtype | None = None
    has_ties: bool = False

    def __post_init__(self) -> None:
        numbers = torch.Generator().manual_seed(5)

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=numbers).to(self.dtype)

        num_tokens = sum(count for _, count in ROWS)
        self.query, self.index_queries = random(num_tokens, NUM_HEADS, 48), random(num_tokens, INDEX_HEADS, INDEX_SIZE)
        self.weights = torch.randn(num_tokens, INDEX_HEADS, generator=numbers) * (not self.has_ties)
        self.keys = [random(length, LATENT.key_size) for length, _ in ROWS]
        self.index_keys = [random(length, INDEX_SIZE) for length, _ in ROWS]
        counts = [-(-length // self.block_size) for length, _ in ROWS]
        shape = block_shape_of(self.backend, BlockLayer(1, 48, 0, INDEX_SIZE), self.block_size)
        cache = torch.full((sum(counts) + 1, *shape), torch.nan, dtype=self.dtype)
        self.cache = to_cache(cache, self.cache_dtype or self.dtype)
        blocks = torch.arange(sum(counts), 0, -1).split(counts)
        self.tables = torch.nn.utils.rnn.pad_sequence(list(blocks), batch_first=True)

    def metadata(self, indices: list[int], counts: list[int]) -> AttentionMetadata:
        """Metadata of the last `counts` tokens of these rows."""
        starts, positions = [0], []
        for index, count in zip(indices, counts, strict=True):
            starts.append(starts[-1] + count)
            length = ROWS[index][0]
            positions.append((index, torch.arange(length - count, length)))
        return AttentionMetadata(
            query_starts=tuple(starts),
            context_lengths=tuple(ROWS[index][0] for index in indices),
            block_tables=self.tables[indices],
            token_blocks=torch.cat([self.tables[index, each // self.block_size] for index, each in positions]),
            token_offsets=torch.cat([each % self.block_size for _, each in positions]),
        )

    def attend(self, kernels: ReferenceKernels, indices: list[int]) -> Tensor:
        """Write all keys of rows, and attend from their tokens of the step."""
        chosen = ChosenKeys(self.backend, kernels, INDEXER, latent_keys(LATENT))
        caches = chosen.parts_of(self.cache)
        written = self.metadata(indices, [ROWS[index][0] for index in indices])
        self.backend.write(torch.cat([self.keys[each] for each in indices]).unsqueeze(1), None, caches[0], written)
        index_keys = torch.cat([self.index_keys[each] for each in indices])
        caches[1][written.token_blocks, written.token_offsets] = to_cache(index_keys, self.cache.dtype)
        ends = torch.tensor([count for _, count in ROWS]).cumsum(0).tolist()
        tokens = torch.cat([torch.arange(ends[each] - ROWS[each][1], ends[each]) for each in indices])
        choosing = IndexQueries(self.index_queries, self.weights).of_rows(tokens)
        step = self.metadata(indices, [ROWS[each][1] for each in indices])
        found = chosen.choose(choosing, caches[1], step)
        return chosen.attend(self.query[tokens], caches[0], step, SCALE, found)

    def expected(self) -> Tensor:
        """Each token by itself, keys sorted by score and then by position."""
        found, token = [], 0
        for keys, index_keys, (length, count) in zip(self.keys, self.index_keys, ROWS, strict=True):
            for end in range(length - count + 1, length + 1):
                products = self.index_queries[token].double() @ index_keys[:end].double().T
                scores = (self.weights[token].double().unsqueeze(1) * products.relu()).sum(0).tolist()
                order = sorted(range(end), key=lambda position: (-scores[position], position))
                chosen = keys[sorted(order[:NUM_CHOSEN])].double()
                shares = (self.query[token].double() @ chosen.T * SCALE).softmax(-1)
                found.append(shares @ chosen[:, : LATENT.rank])
                token += 1
        return torch.stack(found)


@pytest.mark.parametrize("has_ties", [False, True])
@pytest.mark.parametrize("is_native", [True, False])
def test_chosen_keys_are_of_highest_scores(*, is_native: bool, has_ties: bool, monkeypatch: pytest.MonkeyPatch):
    """Keys are in several tiles; with ties the first positions are chosen."""
    monkeypatch.setattr(chosen_keys, "TILE", 32)
    backend = native_backend(torch.float32, 4) if is_native else SdpaBackend()
    step = Step(backend, 4, has_ties=has_ties)
    kernels = cpu_kernels(torch.float32)[0] if is_native else ReferenceKernels()
    found = step.attend(kernels, list(range(len(ROWS))))
    assert torch.allclose(found.double(), step.expected(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cache_dtype", [None, FP8])
def test_tokens_have_equal_bits_alone_and_together(
    dtype: torch.dtype, cache_dtype: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
):
    """Blocks of other sizes, and parts of other sizes."""
    kernels, whole = cpu_kernels(dtype)[0], []
    for block_size, most in ((4, 64), (16, 3)):
        monkeypatch.setattr(choice_bytes, "_MAX_ROWS", most)
        step = Step(native_backend(dtype, block_size, cache_dtype), block_size, dtype, cache_dtype)
        whole.append(step.attend(kernels, list(range(len(ROWS)))))
        alone = [step.attend(kernels, [index]) for index in range(len(ROWS))]
        assert torch.equal(torch.cat(alone), whole[-1])
    assert torch.equal(*whole)
    assert not whole[0].isnan().any()


@pytest.mark.parametrize("weight", [torch.nan, torch.inf, -torch.inf])
def test_scores_that_are_not_finite_stay_with_their_token(weight: float):
    """It sees as many keys as others, none behind it, and they what they saw before."""
    backend, kernels, rows = native_backend(torch.float32, 4), cpu_kernels(torch.float32)[0], list(range(len(ROWS)))
    step = Step(backend, 4)
    before = step.attend(kernels, rows)
    step.weights[2] = weight
    found = step.attend(kernels, rows)
    others = torch.arange(len(found)) != 2
    assert torch.equal(found[others], before[others])
    assert not found.isnan().any()
    chosen, metadata = (
        ChosenKeys(backend, kernels, INDEXER, latent_keys(LATENT)),
        step.metadata(rows, [count for _, count in ROWS]),
    )
    positions = chosen.choose(IndexQueries(step.index_queries, step.weights), chosen.parts_of(step.cache)[1], metadata)[
        0
    ][2].tolist()
    length, count = ROWS[0]
    assert len(set(positions)) == NUM_CHOSEN
    assert positions == sorted(positions)
    assert positions[-1] <= length - count + 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cache_dtype", [None, FP8])
def test_keys_are_read_as_written(dtype: torch.dtype, cache_dtype: torch.dtype | None):
    for backend in (native_backend(dtype, 8, cache_dtype), SdpaBackend(cache_dtype)):
        step = Step(backend, 8, dtype, cache_dtype)
        latents, written = (
            ChosenKeys(backend, ReferenceKernels(), INDEXER, latent_keys(LATENT)).parts_of(step.cache)[0],
            step.metadata([0], [40]),
        )
        backend.write(step.keys[0].unsqueeze(1), None, latents, written)
        found = backend.read_keys(latents, written.token_blocks, written.token_offsets, dtype)
        assert torch.equal(found, from_cache(to_cache(step.keys[0], latents.dtype), dtype))
