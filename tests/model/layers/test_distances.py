"""Embedded distances: rows against transformers' own functions at every distance, and a step's part of the table."""

import pytest
import torch
from transformers.models.deberta_v2.modeling_deberta_v2 import build_relative_position

from spmd_worker.model.layers.context import LayerContext
from spmd_worker.model.layers.distances import DistanceEmbeddings, rows_of
from spmd_worker.model.layers.weight_slice import full_rectangle
from spmd_worker.model_config.layer_config import DistanceConfig
from spmd_worker.ops.attention.sdpa import SdpaBackend
from spmd_worker.ops.kernels.reference import ReferenceKernels
from spmd_worker.ranks.communicator import single_group

SIZES = [(256, 512), (256, 1024), (128, 512), (320, 512), (21, 64), (2, 40), (3, 40), (16, 10), (64, 2048), (48, 0)]
"""Rows of each sign, and the distance from which all share the last; 0: each has its own."""


def config_of(span: int, max_distance: int) -> DistanceConfig:
    return DistanceConfig(span, max_distance, has_keys=True, has_queries=True, shares_projections=True, has_norm=False)


def their_rows(length: int, config: DistanceConfig) -> torch.Tensor:
    """[queries, keys] of a sequence."""
    states = torch.zeros(length, 1)
    buckets = (config.span, config.max_distance) if config.max_distance else (-1, -1)
    return (build_relative_position(states, states, *buckets)[0] + config.span).clamp(0, 2 * config.span - 1)


@pytest.mark.gate("64-2048", "2-40", "3-40", "16-10", "48-0")
@pytest.mark.parametrize(("span", "max_distance"), SIZES)
def test_rows_of_all_distances_are_those_of_transformers(span: int, max_distance: int):
    config, length = config_of(span, max_distance), 1060
    expected, at = their_rows(length, config), torch.arange(length)
    assert torch.equal(rows_of(at.unsqueeze(1) - at, config), expected)
    shifted = rows_of(at.unsqueeze(1) - at + 1, config)
    assert not torch.equal(shifted, expected), "negative control"
    # A distance has one row, whatever the order and number of them.
    for distance in (*range(-600, 600, 37), span // 2, -span // 2, span, max_distance - 1, max_distance):
        assert rows_of(torch.tensor([distance]), config) == rows_of(torch.arange(-3000, 3000), config)[distance + 3000]


@pytest.mark.parametrize(("span", "max_distance"), [(16, 64), (21, 64), (48, 0)])
@pytest.mark.parametrize("longest", [1, 2, 7, 8, 9, 40, 300])
def test_steps_take_the_rows_they_need(span: int, max_distance: int, longest: int):
    config = config_of(span, max_distance)
    context = LayerContext(single_group(), ReferenceKernels(), SdpaBackend(), torch.float32, torch.device("cpu"))
    layer = DistanceEmbeddings(context, config, 3)
    weight = torch.randn(2 * span, 3, generator=torch.Generator().manual_seed(0))
    layer.write_region("weight", full_rectangle((2 * span, 3)), weight)
    found, at = layer.of_step(longest, None), torch.arange(longest)
    columns = found.columns[at - at.unsqueeze(1) + longest - 1].long()
    assert torch.equal(found.rows[columns], weight[their_rows(longest, config)])
    assert len(found.rows) == config.num_columns(longest) <= min(2 * span, 2 * longest) + 15
