"""Embedded distances between query and key, with which scores multiply queries and keys (DeBERTa,
https://arxiv.org/abs/2006.03654).

T: tokens of the step; L: tokens of its longest sequence; W: rows of the table that it needs; Hq: query heads of this
rank; D: head size. A distance is here the query's position less the key's.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from spmd_worker.model.layers.checkpoint_layer import CheckpointLayer
from spmd_worker.model.layers.context import LayerContext
from spmd_worker.model.layers.norm import Norm
from spmd_worker.model_config.layer_config import DistanceConfig
from spmd_worker.ops.kernels.adapters import StepAdapters
from spmd_worker.ops.kernels.api import Kernels
from spmd_worker.ops.kernels.distance_scores import DistanceScores
from spmd_worker.ops.kernels.host_copies import to_device


@dataclass(frozen=True, slots=True)
class StepDistances:
    """Embedded distances [W, hidden] of a step, and `DistanceScores.columns`."""

    rows: Tensor
    columns: Tensor


class DistanceEmbeddings(CheckpointLayer):
    """The table of all layers, `weight` [2 * span, hidden], which every rank has."""

    def __init__(self, context: LayerContext, config: DistanceConfig, hidden_size: int) -> None:
        super().__init__()
        self._config = config
        self.weight = context.parameter(2 * config.span, hidden_size)

    def of_step(self, longest: int, norm: Norm | None) -> StepDistances:
        """Rows of all distances in sequences of up to `longest` tokens, normed if there is a norm."""
        # On the CPU: logarithms of devices differ, and a row may begin at an exact one.
        distances = torch.arange(longest - 1, -longest, -1, device="cpu")
        numbers = rows_of(distances, self._config)
        first, device = int(numbers.min()), self.weight.device
        wanted = torch.arange(first, first + self._config.num_columns(longest), device="cpu")
        # Rows behind the last fill a panel, and no distance has them.
        rows = self.weight.detach()[to_device(wanted.clamp(max=2 * self._config.span - 1), device)]
        return StepDistances(rows if norm is None else norm(rows), to_device((numbers - first).int(), device))


def rows_of(distances: Tensor, config: DistanceConfig) -> Tensor:
    """int64 distances -> their rows of the table, by transformers' arithmetic in float32."""
    buckets = distances
    if config.max_distance:
        num_exact = config.span // 2
        share = torch.log(distances.abs().clamp(min=num_exact) / num_exact)
        last = torch.full((), (config.max_distance - 1) / num_exact, device=distances.device)
        share = share / torch.log(last)
        shared = torch.ceil(share * (num_exact - 1)) + num_exact
        buckets = torch.where(distances.abs() <= num_exact, distances, (shared * distances.sign()).long())
    return (buckets + config.span).clamp(0, 2 * config.span - 1)


def distance_scores(
    kernels: Kernels,
    config: DistanceConfig,
    query: Tensor,
    key: Tensor,
    distances: StepDistances,
    project: Callable[[Tensor, StepAdapters | None], tuple[Tensor | None, Tensor | None]],
    adapters: StepAdapters | None,
) -> DistanceScores:
    """Products of queries and keys [T, Hq, D] with embedded distances. `project` gives these as queries and as keys [W,
    Hq * D], None for those that are not needed; `adapters` of the step's tokens, None if they change no projection.
    """
    num_tokens, num_heads, _ = query.shape
    rows = distances.rows
    scores = query.new_empty((config.num_products, num_heads, num_tokens, len(rows))).transpose(1, 2)
    for tokens, own in _by_adapter(adapters, len(rows)):
        as_queries, as_keys = project(rows, own)
        factors = [(query, as_keys)] * config.has_keys + [(key, as_queries)] * config.has_queries
        for (heads, embedded), out in zip(factors, scores.unbind(0), strict=True):
            assert embedded is not None, config
            weight = kernels.pack_heads(embedded.view(len(rows), num_heads, -1).transpose(0, 1).contiguous())
            if tokens is None:
                kernels.linear_of_heads(heads, weight, out)
                continue
            part = out.new_empty((len(tokens), *out.shape[1:]))
            kernels.linear_of_heads(heads[tokens], weight, part)
            out[tokens] = part
    of_queries = scores[0] if config.has_keys else None
    return DistanceScores(of_queries, scores[-1] if config.has_queries else None, distances.columns)


def _by_adapter(adapters: StepAdapters | None, num_rows: int) -> Iterator[tuple[Tensor | None, StepAdapters | None]]:
    """Tokens of each adapter, None for all, and the adapters of as many rows, all of that one."""
    if adapters is None:
        yield None, None
        return
    for slot in sorted(dict.fromkeys(adapters.slots.tolist())):
        tokens = (adapters.slots == slot).nonzero().squeeze(1)
        own = adapters.slots.new_full((num_rows,), slot)
        yield tokens, None if slot < 0 else adapters.of_rows(own)
