"""Kernels of latent attention for GPUs, interpreted on CPU tensors: see triton_cases.py, whose process and words these
share.

TRITON_INTERPRET=1 python tests/ops/kernels/triton_latent_cases.py          prints {case: what went wrong, or ""}
python tests/ops/kernels/triton_latent_cases.py cuda                        the same on a GPU
"""

import json
import math
import sys
from collections.abc import Callable
from itertools import accumulate, islice
from unittest import mock

import torch
from decoding_steps import decoding
from triton_attention_cases import tiles
from triton_cases import BLOCK, assert_near, in_gate, run

from spmd_worker.model.layers import chosen_keys
from spmd_worker.model.layers.chosen_keys import ChosenKeys, IndexQueries, KeptKeys
from spmd_worker.model_config.layer_config import IndexerConfig
from spmd_worker.ops.attention.metadata import AttentionMetadata
from spmd_worker.ops.attention.triton import TritonBackend, TritonFixedAttention
from spmd_worker.ops.kernels.triton import attention, attention_kernels, head_products
from spmd_worker.ops.kernels.triton.attention import Tile
from spmd_worker.ops.kernels.triton.kernels import TritonKernels
from spmd_worker.ops.kernels.triton.launching import is_interpreted
from spmd_worker.worker.runner.batch_state import BatchState

Chunk = tuple[int, int]
"""First token of a sequence that a step computes, and the end."""
SHAPES = ((18, 48, 32, torch.float32), (6, 40, 24, torch.float16), (1, 576, 512, torch.float16))
"""Query heads, sizes of a key and of a value: one tile of keys that is its values too, one that is not, the largest."""


class Latents:
    """Sequences in a paged cache of keys alone, blocks in random order. What no sequence has written is NaN."""

    def __init__(self, lengths: list[int], num_heads: int, size: int, value_size: int, dtype: torch.dtype) -> None:
        self.value_size, self.backend = value_size, TritonBackend()
        counts = [-(-length // BLOCK) for length in lengths]
        shape = self.backend.block_shape(1, BLOCK, size, has_values=False)
        self.cache = torch.full((sum(counts) + 2, *shape), math.nan, dtype=dtype)
        order = torch.randperm(len(self.cache))
        self.tables = torch.zeros(len(lengths), max(counts), dtype=torch.int64)
        for row, blocks in zip(self.tables, order[: sum(counts)].split(counts), strict=True):
            row[: len(blocks)] = blocks
        self.queries = [torch.randn(length, num_heads, size).to(dtype) for length in lengths]
        self.keys = [torch.randn(length, 1, size).to(dtype) for length in lengths]
        self.attend([(0, length) for length in lengths])

    def attend(self, chunks: list[Chunk]) -> list[torch.Tensor]:
        """The rows of each sequence's chunk, whose keys are written first."""
        used = [(index, *chunk) for index, chunk in enumerate(chunks) if chunk[0] < chunk[1]]
        counts, tables = [end - first for _, first, end in used], self.tables[[index for index, _, _ in used]]
        positions = [torch.arange(first, end) for _, first, end in used]
        blocks = torch.cat([table[at // BLOCK] for table, at in zip(tables, positions, strict=True)])
        metadata = AttentionMetadata(
            *((0, *accumulate(counts)), tuple(end for _, _, end in used), tables, blocks, torch.cat(positions) % BLOCK)
        )
        keys = torch.cat([self.keys[index][first:end] for index, first, end in used])
        queries = torch.cat([self.queries[index][first:end] for index, first, end in used])
        self.backend.write(keys, None, self.cache, metadata)
        size = queries.shape[2]
        out = self.backend.attend(queries, self.cache, metadata, size**-0.5, 0, value_size=self.value_size)
        return list(out.split(counts))

    def reference(self, index: int) -> torch.Tensor:
        """All rows of a sequence, in float64."""
        q, k = self.queries[index].double(), self.keys[index][:, 0].double()
        scores = torch.einsum("thd,sd->hts", q, k) * q.shape[2] ** -0.5
        seen = torch.ones(len(k), len(k)).tril().bool()
        weights = scores.masked_fill(~seen, -math.inf).softmax(-1)
        return torch.einsum("hts,sv->thv", weights, k[:, : self.value_size])


def latents_are_attended_as_the_formula_says() -> None:
    assert [attention.latent_groups(count) for count in (1, 16, 20, 32, 128, 17)] == [1, 1, 2, 2, 8, 17]
    for num_heads, size, value_size, dtype in SHAPES:
        longest = 37 if size < 512 else 20
        step = Latents([1, longest], num_heads, size, value_size, dtype)
        for index, found in enumerate(step.attend([(0, 1), (0, longest)])):
            assert_near(found, step.reference(index), dtype)


def a_rows_bits_do_not_depend_on_how_it_was_cut() -> None:
    for num_heads, size, value_size, dtype in SHAPES[: 1 if in_gate() else 2]:
        step = Latents([50, 13], num_heads, size, value_size, dtype)
        whole, other = step.attend([(0, 50), (0, 13)])
        assert torch.equal(step.attend([(49, 50), (13, 13)])[0][0], whole[-1])
        part, decoded = step.attend([(31, 50), (12, 13)])
        assert torch.equal(part, whole[31:])
        assert torch.equal(decoded[0], other[-1])
        with tiles(few=Tile(32, 4, 2, 1), many=Tile(64, 4, 2, 1)):
            step.backend = TritonBackend()
            assert torch.equal(step.attend([(40, 50), (12, 13)])[0], whole[40:])


def a_plan_in_tensors_that_stay_gives_the_same_bits() -> None:
    num_heads, size, value_size = 18, 48, 32
    device, cache = torch.get_default_device(), torch.randn(64, 1, 1, BLOCK, size)
    state, backend, fixed = BatchState(BLOCK, device), TritonBackend(), TritonFixedAttention(6, 4, 8, BLOCK, device)
    for scheduled in islice(decoding(3, attention_kernels.SEGMENT - 1, BLOCK, 2), 3):
        metadata, queries = state.build(scheduled).attention, torch.randn(5, num_heads, size)
        expected = TritonBackend().attend(queries[:3], cache, metadata, 0.2, 0, value_size=value_size)
        found = backend.attend(queries, cache, fixed.fill(metadata, 5), 0.2, 0, value_size=value_size)
        assert torch.equal(found[:3], expected)


def heads_are_multiplied_with_their_own_weights() -> None:
    kernels = TritonKernels()
    for dtype in (torch.float32, torch.float16):
        x, weight = torch.randn(37, 3, 48).to(dtype)[..., 8:], torch.randn(3, 40, 56).to(dtype).transpose(1, 2) * 0.2
        out = torch.full((37, 3, 64), math.nan, dtype=dtype)
        kernels.linear_of_heads(x, weight, out[..., 8:])
        assert_near(out[..., 8:], torch.einsum("thi,hoi->tho", x.double(), weight.double()), dtype)
        assert out[..., :8].isnan().all()
        alone = torch.empty(1, 3, 56, dtype=dtype)
        kernels.linear_of_heads(x[5:6], weight, alone)
        assert torch.equal(alone[0], out[5, :, 8:])
        other = torch.empty(37, 3, 56, dtype=dtype)
        head_products.linear_of_heads(x, weight, other, head_products.HeadTile(64, 64, 32, 4, 2))
        assert torch.equal(other, out[..., 8:])
    # Control: two sums of halves, added, are another chain.
    halves = [torch.empty(37, 3, 56) for _ in range(2)]
    x, weight = x.float(), weight.float()
    whole = torch.empty(37, 3, 56)
    kernels.linear_of_heads(x, weight, whole)
    for half, part in zip(halves, (slice(20), slice(20, 40)), strict=True):
        kernels.linear_of_heads(x[..., part], weight[..., part], half)
    assert not torch.equal(halves[0] + halves[1], whole)


def chosen_keys_are_those_of_the_highest_scores() -> None:
    """Tokens that see all keys and tokens that choose, in tiles of keys."""
    length, num_chosen, step = 21, 6, Latents([21], 2, 48, 32, torch.float32)
    indexer = IndexerConfig(2, 16, num_chosen, is_interleaved=False)
    chosen = ChosenKeys(step.backend, TritonKernels(), indexer, KeptKeys(1, 48, 32))
    at, keys = torch.arange(length), torch.randn(len(step.cache), BLOCK, 16)
    places = (step.tables[0, at // BLOCK], at % BLOCK)
    metadata = AttentionMetadata((0, length), (length,), step.tables, *places)
    choosing = IndexQueries(torch.randn(length, 2, 16), torch.randn(length, 2))
    with mock.patch.object(chosen_keys, "TILE", 16):
        positions = chosen.choose(choosing, keys, metadata)
    found = chosen.attend(step.queries[0], step.cache, metadata, 0.2, positions)
    products = torch.einsum("thd,sd->hts", choosing.queries.double(), keys[places].double()).relu()
    scores = (products * choosing.weights.double().T.unsqueeze(2)).sum(0)
    for token in range(length):
        # A score of 0 is that of several keys.
        order = scores[token, : token + 1].sort(descending=True, stable=True).indices
        seen = step.keys[0][order[:num_chosen].sort().values, 0].double()
        weights = (step.queries[0][token].double() @ seen.T * 0.2).softmax(-1)
        assert_near(found[token], weights @ seen[:, :32], torch.float32)


CASES: tuple[Callable[[], None], ...] = (
    chosen_keys_are_those_of_the_highest_scores,
    latents_are_attended_as_the_formula_says,
    a_rows_bits_do_not_depend_on_how_it_was_cut,
    a_plan_in_tensors_that_stay_gives_the_same_bits,
    heads_are_multiplied_with_their_own_weights,
)


def main() -> None:
    torch.set_default_device("cuda" if "cuda" in sys.argv else "cpu")
    assert is_interpreted() == ("cuda" not in sys.argv), "set TRITON_INTERPRET=1, or say cuda"
    torch.set_num_threads(1)
    attention_kernels.TILE, attention_kernels.SEGMENT = 16, 32
    with tiles(few=Tile(32, 4, 2, 1), many=Tile(32, 4, 2, 1)):
        print(json.dumps({case.__name__: run(case) for case in CASES}))


if __name__ == "__main__":
    main()
