"""A merged weight is W + B A, rounded once, with the same bits in whatever rectangles it is read."""

from pathlib import Path

import pytest
import torch
from weight_files import save_single

from spmd_worker.model.layers.weight_slice import full_rectangle
from spmd_worker.model.weights import merged_weights
from spmd_worker.model.weights.checkpoint import Checkpoint
from spmd_worker.model.weights.merged_weights import LowRankUpdate, MergedWeights

SHAPE, NUM_RANKS = (48, 40), 7


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.fixture(params=[torch.float32, torch.bfloat16])
def weights(request: pytest.FixtureRequest, tmp_path: Path) -> MergedWeights:
    save_single(tmp_path, {"w": drawn(*SHAPE).to(request.param), "other": drawn(3)})
    update = LowRankUpdate(drawn(NUM_RANKS, SHAPE[1]), drawn(SHAPE[0], NUM_RANKS))
    return MergedWeights(Checkpoint.open(tmp_path), {"w": update}, digest=1)


def test_merged_weight_is_the_sum_in_float32(weights: MergedWeights):
    update, plain = weights.updates["w"], weights.source.read("w", full_rectangle(SHAPE))
    merged = weights.read("w", full_rectangle(SHAPE))
    assert merged.dtype == weights.dtype("w") == torch.float32
    torch.testing.assert_close(merged, plain.float() + update.b @ update.a, rtol=1e-6, atol=1e-5)
    assert torch.equal(weights.read("other", ((0, 3),)), weights.source.read("other", ((0, 3),)))
    assert weights.dtype("other") == torch.float32
    assert (weights.names(), weights.shape("w"), weights.num_bytes_read > 0) == (["other", "w"], SHAPE, True)


def test_merged_weight_has_equal_bits_in_parts(weights: MergedWeights, monkeypatch: pytest.MonkeyPatch):
    """Ranks read slices, and a reload the complete tensor."""
    merged = weights.read("w", full_rectangle(SHAPE))
    for region in (((0, 48), (7, 19)), ((5, 6), (0, 40)), ((30, 48), (39, 40)), ((8, 8), (0, 40))):
        part = merged[slice(*region[0]), slice(*region[1])]
        assert torch.equal(weights.read("w", region), part)
    blocks = list(weights.blocks("w", full_rectangle(SHAPE), 1000))
    assert len(blocks) > 1
    assert torch.equal(torch.cat([weights.read("w", block) for block in blocks]), merged)
    monkeypatch.setattr(merged_weights, "_TILE_ELEMENTS", 1)
    assert torch.equal(weights.read("w", full_rectangle(SHAPE)), merged)


def test_transposed_update_is_of_the_transposed_weight(weights: MergedWeights):
    update, region = weights.updates["w"], full_rectangle(SHAPE)
    plain = weights.source.read("w", region)
    transposed = update.transposed().added(plain.t(), region[::-1])
    assert update.transposed().shape == SHAPE[::-1]
    assert torch.equal(transposed.t(), weights.read("w", region))
