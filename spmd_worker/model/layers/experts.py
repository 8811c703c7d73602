"""The feed-forward of a sparse layer: a router chooses some of many experts for each token, which are feed-forwards of
their own (https://arxiv.org/abs/1701.06538), and perhaps one more that every token visits.

The router is whole on every rank, in float32. Of the experts each rank of the tensor-parallel group has some columns
of all (tensor parallelism), or some experts whole (expert parallelism, `LayerContext.expert_layout`). Either way a rank
gives its part of a sum that is made with what follows, as dense layers do.

What a token gets depends on it alone: an expert's tokens are multiplied together, by kernels that are row-wise, and the
results of a token are added in the order of the experts' numbers.

T: tokens of the step; E: experts of the layer; k: experts of a token.
"""

from collections.abc import Iterator
from dataclasses import replace
from math import nan
from typing import Final

import torch
from torch import Tensor, nn

from spmd_worker.model.layers.checkpoint_layer import CheckpointLayer, PackedLayer
from spmd_worker.model.layers.context import LayerContext
from spmd_worker.model.layers.feed_forward import FeedForward
from spmd_worker.model.layers.linear import ColumnParallelLinear, OutputPart, RowParallelLinear, gate_up_linear
from spmd_worker.model.layers.weight_slice import WeightSlice, full_rectangle, nothing_of, whole
from spmd_worker.model_config.layer_config import ExpertsConfig, LayerConfig
from spmd_worker.ops.kernels.api import Kernels
from spmd_worker.ranks.communicator import single_group
from spmd_worker.ranks.topology import shard_range

_GATE_SLOPE: Final = 1.702
_LEAST_SUM: Final = 1e-20


class Router(PackedLayer):
    """[T, hidden] -> the experts of each token and their weights; and how far the shared expert's gate is open, whose
    row is the last of the weight. In float32.
    """

    is_float32 = True

    def __init__(self, context: LayerContext, experts: ExpertsConfig, hidden_size: int) -> None:
        super().__init__()
        self._experts, self._hidden_size, self._kernels = experts, hidden_size, context.kernels
        context = replace(context, dtype=torch.float32)
        self.weight = context.parameter(experts.num_experts + experts.has_shared_gate, hidden_size)
        self.bias = context.parameter(experts.num_experts) if experts.has_router_bias else None
        self.choice_bias = context.parameter(experts.num_experts) if experts.has_choice_bias else None

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """[T, hidden] -> int64 [T, k] ascending, float32 [T, k], and float32 [T, 1] or None."""
        logits, num_experts = self._kernels.linear(x.float(), self.weight, None), self._experts.num_experts
        shared_gate = _sigmoid(logits[:, num_experts:]) if self._experts.has_shared_gate else None
        logits = logits[:, :num_experts]
        ids, weights = choose(logits if self.bias is None else logits + self.bias, self.choice_bias, self._experts)
        return ids, weights, shared_gate

    def weight_slices(self, prefix: str) -> Iterator[WeightSlice]:
        """`prefix` is this layer's name."""
        num_experts, size = self._experts.num_experts, self._hidden_size
        shape = (num_experts, size)
        rectangle = full_rectangle(shape)
        yield WeightSlice(f"{prefix}.weight", shape, rectangle, f"{prefix}.weight", rectangle)
        if self.bias is not None:
            yield whole(f"{prefix}.bias", (num_experts,), f"{prefix}.bias")
        if self.choice_bias is not None:
            name = f"{prefix}.e_score_correction_bias"
            yield whole(name, (num_experts,), f"{prefix}.choice_bias", is_buffer=True)
        if self._experts.has_shared_gate:
            name, last = f"{prefix.rpartition('.')[0]}.shared_expert_gate.weight", (num_experts, num_experts + 1)
            yield WeightSlice(name, (1, size), full_rectangle((1, size)), f"{prefix}.weight", (last, (0, size)))


def choose(logits: Tensor, choice_bias: Tensor | None, experts: ExpertsConfig) -> tuple[Tensor, Tensor]:
    """Router's logits, float32 [T, E] -> experts of each token, int64 [T, k] ascending, and their weights, float32.

    Of equal scores the lower number's is taken. A row with a score that is no number gets no number as weights.
    """
    scores = {"softmax": _softmax, "sigmoid": _sigmoid, "softmax_chosen": _as_it_is}[experts.score](logits)
    choice = scores if choice_bias is None else scores + choice_bias
    if experts.num_groups > 1:
        choice = _in_best_groups(choice, experts)
    ids = choice.sort(dim=-1, descending=True, stable=True).indices[:, : experts.num_chosen].sort(dim=-1).values
    weights = scores.gather(1, ids)
    if experts.score == "softmax_chosen":
        weights = weights.softmax(-1)
    if experts.renormalises:
        weights = weights / (_sum_in_order(weights) + (_LEAST_SUM if experts.score == "sigmoid" else 0.0))
    return ids, (weights * experts.scaling).masked_fill(scores.isnan().any(-1, keepdim=True), nan)


def _in_best_groups(choice: Tensor, experts: ExpertsConfig) -> Tensor:
    """[T, E], minus infinity outside the groups whose two best scores have the largest sums."""
    groups = choice.view(len(choice), experts.num_groups, -1)
    best = groups.sort(dim=-1, descending=True).values
    order = (best[..., 0] + best[..., 1]).sort(dim=-1, descending=True, stable=True).indices
    is_left = torch.zeros(order.shape, dtype=torch.bool, device=order.device)
    is_left.scatter_(1, order[:, : experts.num_chosen_groups], value=True)
    return groups.masked_fill(~is_left.unsqueeze(-1), -torch.inf).flatten(1)


def _as_it_is(logits: Tensor) -> Tensor:
    return logits


def _softmax(logits: Tensor) -> Tensor:
    return logits.softmax(-1)


def _sigmoid(logits: Tensor) -> Tensor:
    """As a softmax of two, which is computed row by row: torch's sigmoid takes the last few numbers of a tensor by
    another function, so that bits would depend on how many rows there are.
    """
    return torch.stack((logits, torch.zeros_like(logits)), dim=-1).softmax(-1)[..., 0]


def _sum_in_order(rows: Tensor) -> Tensor:
    """[T, k] -> [T, 1], from the first to the last."""
    total = rows[:, :1]
    for column in range(1, rows.shape[1]):
        total = total + rows[:, column : column + 1]
    return total


class _ClampedGates(ColumnParallelLinear):
    """Gates and what they open take turns among the outputs, as in the checkpoint, and both are bounded
    (https://arxiv.org/abs/2508.10925): [T, input_size] -> [T, half of the outputs of this rank].
    """

    def __init__(self, context: LayerContext, input_size: int, size: int, has_bias: bool, limit: float) -> None:
        start, stop = shard_range(size, context.tensor_group.size, context.tensor_group.rank)
        super().__init__(context, input_size, (OutputPart("gate_up_proj", 2 * size, 2 * start, 2 * stop),), has_bias)
        self._limit = limit

    def forward(self, x: Tensor, *, is_fused: bool = True) -> Tensor:
        """[T, input_size] -> [T, half of the outputs of this rank], with the same bits either way."""
        del is_fused
        return clamped_gates(super().forward(x), self._limit, self._kernels)


def clamped_gates(columns: Tensor, limit: float, kernels: Kernels) -> Tensor:
    """[T, 2 I] -> [T, I]: gate * sigmoid(1.702 * gate) * (up + 1), in float32, rounded once."""
    gates, ups = columns.float().view(len(columns), -1, 2).unbind(-1)
    # x * sigmoid(a * x) is silu(a * x) / a: silu is a row-wise kernel, as torch's sigmoid is not.
    opened = kernels.activate((gates.clamp(max=limit) * _GATE_SLOPE).contiguous(), "silu") / _GATE_SLOPE
    gated: Tensor = opened * (ups.clamp(-limit, limit) + 1.0)
    return gated.to(columns.dtype)


class _Down(RowParallelLinear):
    """One expert's way back, which is not yet what is summed over ranks."""

    def forward(self, x: Tensor) -> Tensor:
        """[T, inputs of this rank] -> [T, output_size]."""
        return self._kernels.linear(x, self.weight, self.own_bias)


class Expert(nn.Module):
    """A feed-forward of its own: [tokens that chose it, hidden] -> this rank's part of the same."""

    def __init__(self, context: LayerContext, layer: LayerConfig, experts: ExpertsConfig, hidden_size: int) -> None:
        super().__init__()
        group, size, has_bias = context.tensor_group, experts.intermediate_size, experts.has_bias
        self.gate_up_proj = (
            _ClampedGates(context, hidden_size, size, has_bias, experts.limit)
            if experts.limit > 0
            else gate_up_linear(context, hidden_size, size, has_bias, layer.activation)
        )
        self.down_proj = _Down(context, shard_range(size, group.size, group.rank), size, hidden_size, has_bias)

    def forward(self, x: Tensor, *, is_fused: bool) -> Tensor:
        """[n, hidden] -> [n, hidden]."""
        output: Tensor = self.down_proj(self.gate_up_proj(x, is_fused=is_fused))
        return output


class _ExpertsElsewhere(CheckpointLayer):
    """The experts that other ranks hold: this rank knows their tensors by name and shape."""

    def __init__(self, numbers: list[int], experts: ExpertsConfig, hidden_size: int) -> None:
        super().__init__()
        size, self._numbers = experts.intermediate_size, numbers
        gates = [("gate_up_proj", 2 * size)] if experts.limit > 0 else [("gate_proj", size), ("up_proj", size)]
        self._shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": (rows, hidden_size) for name, rows in gates}
        self._shapes["down_proj.weight"] = (hidden_size, size)
        if experts.has_bias:
            self._shapes |= {f"{name}.bias": (rows,) for name, rows in (*gates, ("down_proj", hidden_size))}

    def weight_slices(self, prefix: str) -> Iterator[WeightSlice]:
        """Empty ones."""
        parent = prefix.rpartition(".")[0]
        for number in self._numbers:
            for name, shape in self._shapes.items():
                yield nothing_of(f"{parent}.experts.{number}.{name}", shape)


class SparseFeedForward(nn.Module):
    """[T, hidden] -> this rank's part of [T, hidden], as of `FeedForward`."""

    def __init__(self, context: LayerContext, layer: LayerConfig, hidden_size: int) -> None:
        super().__init__()
        experts, placed = layer.experts, context.expert_layout
        assert experts is not None, "a dense layer has a FeedForward"
        self._config, self._group = experts, context.tensor_group
        self._is_exact = placed is not None and placed.is_exact
        alone = replace(context, tensor_group=single_group())
        numbers = range(experts.num_experts)
        if placed is None:
            own = list(numbers)
        else:
            owners = placed.owners_of(context.layer)
            own = [number for number in numbers if owners[number] == context.tensor_group.rank]
        of_expert = context if placed is None else alone
        self.gate = Router(context, experts, hidden_size)
        self.experts = nn.ModuleDict({str(number): Expert(of_expert, layer, experts, hidden_size) for number in own})
        self.experts_elsewhere = _ExpertsElsewhere(
            [number for number in numbers if str(number) not in self.experts], experts, hidden_size
        )
        self.num_tokens = [0] * experts.num_experts
        """How many tokens have met each expert so far, on any rank."""
        self.shared_expert: FeedForward | None = None
        if experts.shared_size:
            shared = replace(layer, intermediate_size=experts.shared_size, has_mlp_bias=False)
            self.shared_expert = FeedForward(alone if self._is_exact else context, shared, hidden_size)

    def forward(self, x: Tensor, *, is_fused: bool = True) -> Tensor:
        """[T, hidden] -> [T, hidden], this rank's part."""
        ids, weights, shared_gate = self.gate(x)
        results = self._results(x, ids, is_fused)
        shared = None if self.shared_expert is None else self._shared(x, shared_gate, is_fused)
        if self._is_exact:
            # Each result is one rank's and zero elsewhere, so the sum is the result.
            results = self._group.all_reduce(results, is_exact=True)
        output = _weighted_sum(results.view(*ids.shape, -1), weights).to(x.dtype)
        output = output if shared is None else output + shared
        return self._once(output) if self._is_exact else output

    def _results(self, x: Tensor, ids: Tensor, is_fused: bool) -> Tensor:
        """[T * k, hidden]: what each token's experts give, zero for those of other ranks."""
        num_chosen = ids.shape[1]
        flat = ids.flatten()
        # Stable: within an expert tokens stay in the order of the batch.
        sorted_ids, order = flat.sort(stable=True)
        # The one thing that a layer has the host wait for: `bincount` would be another, as it looks for the largest.
        numbers = torch.arange(self._config.num_experts, device=flat.device)
        ends: list[int] = torch.searchsorted(sorted_ids, numbers, right=True).tolist()
        results = x.new_zeros((len(flat), x.shape[1]))
        start = 0
        for number, end in enumerate(ends):
            slots, count = order[start:end], end - start
            start = end
            self.num_tokens[number] += count
            if count and str(number) in self.experts:
                results[slots] = self.experts[str(number)](x[slots // num_chosen], is_fused=is_fused)
        return results

    def _shared(self, x: Tensor, shared_gate: Tensor | None, is_fused: bool) -> Tensor:
        assert self.shared_expert is not None, "the caller looks"
        output: Tensor = self.shared_expert(x, is_fused=is_fused)
        return output if shared_gate is None else (output.float() * shared_gate).to(x.dtype)

    def _once(self, output: Tensor) -> Tensor:
        """The part of one rank, zero for the others. Adding zero leaves no zero with a sign, as the sum does."""
        return output + 0.0 if self._group.rank == 0 else torch.zeros_like(output)


def _weighted_sum(results: Tensor, weights: Tensor) -> Tensor:
    """[T, k, hidden] and float32 [T, k] -> float32 [T, hidden], from the first of each token to the last."""
    total = torch.zeros((len(results), results.shape[2]), dtype=torch.float32, device=results.device)
    for column in range(results.shape[1]):
        total += results[:, column].float() * weights[:, column : column + 1]
    return total


def new_feed_forward(context: LayerContext, layer: LayerConfig, hidden_size: int) -> "FeedForward | SparseFeedForward":
    """Of a dense or a sparse layer."""
    return (FeedForward if layer.experts is None else SparseFeedForward)(context, layer, hidden_size)
