"""Feed-forward of a sparse layer: a router selects k of E experts for each token, which are feed-forwards of their own
(https://arxiv.org/abs/1701.06538), and there may be a shared expert for all tokens.

Every rank has the router, in float32. A rank of the tensor-parallel group has some columns of all experts (tensor
parallelism), or all columns of some experts (expert parallelism, `LayerContext.expert_layout`). Either way its output
is its part of a sum that the next norm makes, like that of a dense layer.

A token's output depends on it alone: kernels are row-wise over the tokens of an expert, and a token's expert outputs
are added in the order of the experts' indices. Experts are called one by one, with the number of their tokens read
back, or all at once, if the kernels have a way to do so: with weights in one stack (`Kernels.expert_kernels`), or where
they are (`Kernels.join_experts`).

T: tokens of the step; E: experts of the layer; k: experts of a token.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial, reduce
from math import nan
from typing import Any, Final, TypeGuard

import torch
from torch import Tensor, nn
from torch.func import functional_call

from spmd_worker.base.errors import CheckpointError
from spmd_worker.model.layers.checkpoint_layer import CheckpointLayer, is_as_built
from spmd_worker.model.layers.context import LayerContext
from spmd_worker.model.layers.expert_adapters import AddedToExperts, ExpertAdapters
from spmd_worker.model.layers.expert_stack import StackedExperts
from spmd_worker.model.layers.feed_forward import FeedForward
from spmd_worker.model.layers.linear import (
    AdaptableLayer,
    ColumnParallelLinear,
    GatedLinear,
    OutputPart,
    RowParallelLinear,
    gate_up_linear,
    replicated_linear,
)
from spmd_worker.model.layers.weight_slice import Rectangle, WeightSlice, empty_slice, full_rectangle, replicated
from spmd_worker.model_config.layer_config import ExpertsConfig, LayerConfig
from spmd_worker.model_config.stored_format import EXPERTS, StoredFormat
from spmd_worker.ops.kernels.adapters import AdapterKernels, StepAdapters
from spmd_worker.ops.kernels.api import ExpertSizes, ExpertWeights, JoinedExperts, StoredPanels
from spmd_worker.ops.kernels.gates import clamped_gates, sigmoid, sqrt_softplus
from spmd_worker.ranks.communicator import single_group

_SCORES: Final = {"sigmoid": sigmoid, "sqrt_softplus": sqrt_softplus}


class Router(AdaptableLayer):
    """Selects experts and their weights, in float32. A shared expert's gate is the last row of `weight`. With experts
    beside a dense feed-forward its input is normed, by a weight, `scale`, and experts have numbers that multiply their
    weights. `listed` are the experts of each token id, if ids choose them.
    """

    is_float32 = True

    def __init__(self, context: LayerContext, experts: ExpertsConfig, hidden_size: int, eps: float) -> None:
        super().__init__()
        self._eps = eps
        self._experts, self.input_size, self._kernels = experts, hidden_size, context.kernels.plain
        is_plain = context.quantised is None and experts.score != "sqrt_softplus"
        self._expert_kernels = context.kernels.expert_kernels() if is_plain else None
        context, has_list = replace(context, dtype=torch.float32), experts.num_listed_tokens > 0
        self.weight = context.parameter(experts.num_choices + experts.has_shared_gate, hidden_size)
        self.bias = context.parameter(experts.num_choices) if experts.has_router_bias else None
        self.choice_bias = context.parameter(experts.num_choices) if experts.has_choice_bias else None
        self.listed = context.parameter(experts.num_listed_tokens, experts.num_chosen) if has_list else None
        self.scale = self.per_expert_scale = None
        if experts.are_beside_dense:
            self.scale, self.per_expert_scale = context.parameter(hidden_size), context.parameter(experts.num_choices)

    def forward(
        self,
        x: Tensor,
        routes: list[Tensor] | None = None,
        adapters: StepAdapters | None = None,
        token_ids: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """[T, hidden] -> experts int64 [T, k] ascending, weights float32 [T, k], shared weight [T, 1] or None. The
        experts are appended to `routes`, int64 [T, k], the one of the largest weight first, ties by ascending id.
        `token_ids` int64 [T] are needed where ids choose.
        """
        if self.scale is not None:
            x = self._kernels.full_norm(x.float(), self.scale, None, self._eps, offset=0.0, is_centred=False)
            x = x * self.input_size**-0.5
        ids, weights, shared_gate = self._chosen(x, adapters, token_ids)
        if routes is not None:
            routes.append(ids.long().gather(1, weights.sort(dim=-1, descending=True, stable=True).indices))
        if self.per_expert_scale is None:
            return ids, weights, shared_gate
        return ids, weights * self.per_expert_scale[ids], shared_gate

    def _chosen(
        self, x: Tensor, adapters: StepAdapters | None, token_ids: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        kernels = self._expert_kernels
        if kernels is not None:
            add = partial(self.adapted, x=x.float(), step=adapters) if self.is_adapted(adapters) else None
            return kernels.route(x, self.weight, self.bias, self.choice_bias, self._experts, add)
        x, num_experts = x.float(), self._experts.num_choices
        logits = self.adapted(self._kernels.linear(x, self.weight, None), x, adapters)
        shared_gate = sigmoid(logits[:, num_experts:]) if self._experts.has_shared_gate else None
        logits = logits[:, :num_experts]
        logits = logits if self.bias is None else logits + self.bias
        listed = None
        if self.listed is not None:
            assert token_ids is not None, "ids of tokens choose their experts"
            listed = self.listed[token_ids].long()
        ids, weights = select_experts(logits, self.choice_bias, self._experts, listed)
        return ids, weights, shared_gate

    def check_changes(self, parameter: str, region: Rectangle, values: Tensor) -> None:
        super().check_changes(parameter, region, values)
        if parameter == "listed":
            self._check_listed(values)

    def write_region(self, parameter: str, region: Rectangle, values: Tensor) -> None:
        if parameter == "listed":
            self._check_listed(values)
        super().write_region(parameter, region, values)

    def _check_listed(self, values: Tensor) -> None:
        """Raise CheckpointError unless values are numbers of experts."""
        last = self._experts.num_experts - 1
        wrong = values[(values < 0) | (values > last) | (values != values.floor())]
        if len(wrong):
            raise CheckpointError(
                f"the table of the experts of each token id has {float(wrong[0]):g}, but experts are numbered from 0 "
                f"to {last}"
            )

    def weight_slices(self, prefix: str) -> Iterator[WeightSlice]:
        num_experts, size = self._experts.num_choices, self.input_size
        yield replicated(f"{prefix}.weight", (num_experts, size), f"{prefix}.weight")
        if self.bias is not None:
            yield replicated(f"{prefix}.bias", (num_experts,), f"{prefix}.bias")
        if self.scale is not None:
            yield replicated(f"{prefix}.scale", (size,), f"{prefix}.scale")
            yield replicated(f"{prefix}.per_expert_scale", (num_experts,), f"{prefix}.per_expert_scale")
        if self.choice_bias is not None:
            name = f"{prefix}.e_score_correction_bias"
            yield replicated(name, (num_experts,), f"{prefix}.choice_bias", is_buffer=True)
        if self.listed is not None:
            yield replicated(f"{prefix}.listed", self.shape_of("listed"), f"{prefix}.listed", is_buffer=True)
        if self._experts.has_shared_gate:
            name, last = f"{prefix.rpartition('.')[0]}.shared_expert_gate.weight", (num_experts, num_experts + 1)
            yield WeightSlice(name, (1, size), full_rectangle((1, size)), f"{prefix}.weight", (last, (0, size)))


def select_experts(
    logits: Tensor, choice_bias: Tensor | None, experts: ExpertsConfig, listed: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Router logits, float32 [T, E] -> expert indices of each token, int64 [T, k] ascending, and their weights,
    float32. With `listed`, int64 [T, k], the experts are these.

    Of equal scores the lower index is selected. The weights of a row with a NaN score are NaN.
    """
    if experts.score == "sparsemixer":
        return _mix_sparsely(logits, experts.jitter)
    scores = logits
    if experts.score == "softmax":
        scores = logits.softmax(-1)
    elif experts.score in _SCORES:
        scores = _SCORES[experts.score](logits)
    choice = scores if choice_bias is None else scores + choice_bias
    if experts.num_groups > 1:
        choice = _masked_to_best_groups(choice, experts)
    chosen = choice.sort(dim=-1, descending=True, stable=True).indices[:, : experts.num_chosen]
    ids = (chosen if listed is None else listed).sort(dim=-1).values
    weights = scores.gather(1, ids)
    if experts.score == "softmax_chosen":
        weights = weights.softmax(-1)
    elif experts.score == "sigmoid_chosen":
        weights = sigmoid(weights)
    if experts.renormalises:
        total = reduce(torch.add, weights.unbind(1)).unsqueeze(1)
        total = total + experts.added_to_sum
        weights = weights / (total.clamp(min=experts.min_sum) if experts.min_sum else total)
    return ids, (weights * experts.scaling).masked_fill(scores.isnan().any(-1, keepdim=True), nan)


def _masked_to_best_groups(choice: Tensor, experts: ExpertsConfig) -> Tensor:
    """[T, E] with minus infinity outside the groups whose two best scores have the highest sums, or whose best scores
    are the highest.
    """
    groups = choice.view(len(choice), experts.num_groups, -1)
    best = groups.sort(dim=-1, descending=True).values
    totals = best[..., 0] if experts.groups_by_best else best[..., 0] + best[..., 1]
    order = totals.sort(dim=-1, descending=True, stable=True).indices
    is_kept = torch.zeros(order.shape, dtype=torch.bool, device=order.device)
    is_kept.scatter_(1, order[:, : experts.num_chosen_groups], value=True)
    return groups.masked_fill(~is_kept.unsqueeze(-1), -torch.inf).flatten(1)


def _mix_sparsely(logits: Tensor, jitter: float) -> tuple[Tensor, Tensor]:
    """`select_experts` with the score "sparsemixer" (`ExpertsConfig`)."""
    left, chosen, weights = logits, [], []
    for _ in range(2):
        index = left.sort(dim=-1, descending=True, stable=True).indices[:, :1]
        best = left.gather(1, index)
        is_far = (best - logits) / torch.maximum(logits.abs(), best) > 2 * jitter
        chosen.append(index)
        weights.append(left.masked_fill(is_far, -torch.inf).softmax(-1).gather(1, index))
        left = left.scatter(1, index, -torch.inf)
    ids, order = torch.cat(chosen, dim=1).sort(dim=-1)
    is_nan = logits.isnan().any(-1, keepdim=True)
    return ids, torch.cat(weights, dim=1).gather(1, order).masked_fill(is_nan, nan)


class _ClampedGates(ColumnParallelLinear):
    """[T, input_size] -> [T, half of the outputs of this rank]. Gate and up alternate among the outputs, as in the
    checkpoint, and both are bounded (https://arxiv.org/abs/2508.10925).
    """

    def __init__(self, context: LayerContext, input_size: int, size: int, has_bias: bool, limit: float) -> None:
        start, stop = context.columns(size)
        super().__init__(context, input_size, (OutputPart("gate_up_proj", 2 * size, 2 * start, 2 * stop),), has_bias)
        self._limit = limit

    def forward(self, x: Tensor, adapters: StepAdapters | None = None, *, is_fused: bool = True) -> Tensor:
        assert adapters is None, "adapters of experts add to all of them at once"
        del is_fused
        return self.activated(super().forward(x))

    def activated(self, columns: Tensor) -> Tensor:
        gates, ups = columns.view(len(columns), -1, 2).unbind(-1)
        return clamped_gates(gates, ups, self._limit, self._kernels.activate)


class _WithoutGates(ColumnParallelLinear):
    """[T, input_size] -> act(up), [T, outputs of this rank]."""

    def __init__(self, context: LayerContext, input_size: int, size: int, has_bias: bool, activation: str) -> None:
        super().__init__(context, input_size, (OutputPart("up_proj", size, *context.columns(size)),), has_bias)
        self._activation = activation

    def forward(self, x: Tensor, adapters: StepAdapters | None = None, *, is_fused: bool = True) -> Tensor:
        assert adapters is None, "adapters of experts add to all of them at once"
        del is_fused
        return self.activated(super().forward(x))

    def activated(self, columns: Tensor) -> Tensor:
        return self._kernels.activate(columns, self._activation)


class _Down(RowParallelLinear):
    """Down projection of one expert, whose output is weighted before it is summed over ranks."""

    def forward(self, x: Tensor, adapters: StepAdapters | None = None) -> Tensor:
        assert adapters is None, "adapters of experts add to all of them at once"
        return self.product(x)

    @property
    def parts_leaf_ends(self) -> tuple[int, ...]:
        """Ends of the leaves in which `product` sums; none without leaves."""
        return self.leaf_ends if self._has_leaves else ()

    def part_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Dtype of `product` of inputs of `dtype`."""
        return self._group.part_dtype(dtype) if self._has_leaves else dtype


class Expert(nn.Module):
    """[tokens of this expert, hidden] -> this rank's part of the same."""

    def __init__(self, context: LayerContext, layer: LayerConfig, experts: ExpertsConfig, hidden_size: int) -> None:
        super().__init__()
        size, has_bias = experts.intermediate_size, experts.has_bias
        self.gate_up_proj: GatedLinear | _ClampedGates | _WithoutGates
        if experts.limit > 0:
            self.gate_up_proj = _ClampedGates(context, hidden_size, size, has_bias, experts.limit)
        elif experts.is_gated:
            self.gate_up_proj = gate_up_linear(context, hidden_size, size, has_bias, layer.activation, experts.bound)
        else:
            self.gate_up_proj = _WithoutGates(context, hidden_size, size, has_bias, layer.activation)
        self.down_proj = _Down(context, context.columns(size), size, hidden_size, has_bias)

    def forward(self, x: Tensor, *, is_fused: bool) -> Tensor:
        """One expert by itself: weights that products do not take as they are stored are dequantised for it."""
        output: Tensor
        if self.gate_up_proj.is_multiplied_as_held:
            output = self.down_proj(self.gate_up_proj(x, is_fused=is_fused))
        else:
            gates, down = ({"weight": each.plain_weight()} for each in (self.gate_up_proj, self.down_proj))
            gated = functional_call(self.gate_up_proj, gates, (x,), {"is_fused": is_fused})
            output = functional_call(self.down_proj, down, (gated,))
        return output

    def columns(self, x: Tensor) -> Tensor:
        """Outputs of `gate_up_proj` before the activation: [tokens of this expert, outputs of this rank]."""
        gates = self.gate_up_proj
        return gates.columns(x, gates.weight if gates.is_multiplied_as_held else gates.plain_weight())

    def down(self, gated: Tensor) -> Tensor:
        """[tokens of this expert, columns of this rank] -> this rank's part of [tokens, hidden]."""
        if self.down_proj.is_multiplied_as_held:
            return self.down_proj.product(gated)
        output: Tensor = functional_call(self.down_proj, {"weight": self.down_proj.plain_weight()}, (gated,))
        return output

    def weights(self) -> ExpertWeights:
        """Its parameters, for `Kernels.join_experts`."""
        gates, down = self.gate_up_proj, self.down_proj
        return ExpertWeights(gates.weight, gates.bias, down.weight, down.rank_bias)


_JOINABLE: Final = (Expert, GatedLinear, _ClampedGates, _WithoutGates, _Down)


def _is_plain(expert: nn.Module) -> TypeGuard[Expert]:
    """Whether the expert's weights say what it computes."""
    return type(expert) is Expert and is_as_built(expert, _JOINABLE)


def _hold_as_stored(experts: Iterable[nn.Module], stored: StoredFormat, panels: StoredPanels | None) -> None:
    """`PackedLayer.hold_as_stored` of all matrices."""
    for expert in experts:
        assert isinstance(expert, Expert), type(expert)
        expert.gate_up_proj.hold_as_stored(stored, panels)
        expert.down_proj.hold_as_stored(stored, panels)


class _RemoteExperts(CheckpointLayer):
    """The experts of other ranks: names and shapes of their tensors."""

    def __init__(self, indices: list[int], experts: ExpertsConfig, hidden_size: int) -> None:
        super().__init__()
        size, self._indices = experts.intermediate_size, indices
        gates = [("gate_up_proj", 2 * size)] if experts.limit > 0 else [("gate_proj", size), ("up_proj", size)]
        gates = gates if experts.is_gated else [("up_proj", size)]
        self._shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": (rows, hidden_size) for name, rows in gates}
        self._shapes["down_proj.weight"] = (hidden_size, size)
        if experts.has_bias:
            self._shapes |= {f"{name}.bias": (rows,) for name, rows in (*gates, ("down_proj", hidden_size))}

    def weight_slices(self, prefix: str) -> Iterator[WeightSlice]:
        parent = prefix.rpartition(".")[0]
        for index in self._indices:
            for name, shape in self._shapes.items():
                yield empty_slice(f"{parent}.experts.{index}.{name}", shape)


class SparseFeedForward(nn.Module):
    """[T, hidden] -> this rank's part of [T, hidden], like that of `FeedForward`."""

    def __init__(self, context: LayerContext, layer: LayerConfig, hidden_size: int) -> None:
        super().__init__()
        experts, layout = layer.experts, context.expert_layout
        assert experts is not None, "a dense layer has a FeedForward"
        self._config, self._group, self._parts_group = experts, context.tensor_group, context.parts_group
        self._is_exact = layout is not None and layout.is_exact
        assert layout is None or layout.is_exact or not self._group.has_tree, "a tree is over leaves of each expert"
        is_whole = self._group.size == 1 or self._is_exact
        assert context.quantised is None or is_whole, "parts of a quantised row have scales of their own"
        # Each expert's output is summed over ranks, and rounded, before it is weighted.
        self._sums_each = layout is None and self._group.has_tree
        unsharded = replace(context, tensor_group=single_group())
        owners = [self._group.rank] * experts.num_experts if layout is None else layout.owners_of(context.layer)
        own = [index for index, owner in enumerate(owners) if owner == self._group.rank]
        self._expert_kernels = None if context.quantised is not None else context.kernels.expert_kernels()
        of_expert = context if layout is None else unsharded
        if self._expert_kernels is not None:
            # These kernels sum a complete expert in one chain.
            of_expert = replace(of_expert, device=torch.device("meta"), num_leaves=1)
        self.gate = Router(context, experts, hidden_size, layer.norm.eps)
        expert_size = experts.latent_size or hidden_size
        self.experts = nn.ModuleDict({str(index): Expert(of_expert, layer, experts, expert_size) for index in own})
        remote = [index for index in range(experts.num_experts) if index not in own]
        self.remote_experts = _RemoteExperts(remote, experts, expert_size)
        self.fc1_latent_proj = self.fc2_latent_proj = None
        if experts.latent_size:
            self.fc1_latent_proj = replicated_linear(context, "fc1_latent_proj", hidden_size, expert_size)
            self.fc2_latent_proj = replicated_linear(context, "fc2_latent_proj", expert_size, hidden_size)
        # Identity experts are of the rank whose part of the sum has them, of every rank where results are complete.
        self.own = own
        self.expert_adapters: ExpertAdapters | None = None
        """None: experts take no adapters."""
        self._adds_identity = self._is_exact or self._sums_each or self._group.rank == 0
        identity = list(range(experts.num_experts, experts.num_choices)) if self._adds_identity else []
        self._num_tokens = [0] * experts.num_choices
        self._kernels, self._dtype, self._activation = context.kernels, context.dtype, layer.activation
        self._joined: JoinedExperts | None = None
        self._has_joined = False
        self._totals = torch.zeros(experts.num_choices, dtype=torch.int64, device=context.device)
        self._stacked: StackedExperts | None = None
        modules, stored = [*self.experts.values()], context.stored.get(context.layer, {}).get(EXPERTS)
        if stored is not None:
            panels = None if self._expert_kernels is not None else context.kernels.stored_panels(context.dtype)
            assert panels is not None or self._expert_kernels is not None, "no kernels take such weights"
            _hold_as_stored(modules, stored, panels)
        if self._expert_kernels is not None:
            size, bounds, is_gated = experts.num_choices, (experts.limit, experts.bound), experts.is_gated
            self._stacked = StackedExperts(
                *(modules, own, size, layer.activation, *bounds, context.device, stored),
                is_gated=is_gated,
                identity=identity,
            )
            self._stacked.allocate(context.device)
        self.shared_expert: FeedForward | None = None
        if experts.shared_size:
            has_bias = experts.has_shared_bias
            shared = replace(layer, intermediate_size=experts.shared_size, has_mlp_bias=has_bias)
            self.shared_expert = FeedForward(unsharded if self._is_exact else context, shared, hidden_size)

    def forward(
        self,
        x: Tensor,
        adapters: StepAdapters | None = None,
        *,
        is_fused: bool = True,
        slots: Tensor | None = None,
        router_input: Tensor | None = None,
        routes: list[Tensor] | None = None,
        token_ids: Tensor | None = None,
    ) -> Tensor:
        """`routes` and `token_ids`: see `Router`. `slots`: see `AttentionMetadata.slots`. The router reads
        `router_input`, or the same as experts. If not `is_fused`, experts are called one by one, without padding;
        clamped gates then have torch's exponential instead of that of `Kernels.expert_kernels`. If a step has adapters
        and one of experts is loaded, they add between the GEMMs of `Kernels.expert_kernels`; without these, experts are
        called one by one too. Rows without any have the same bits.
        """
        ids, weights, shared_gate = self.gate(x if router_input is None else router_input, routes, adapters, token_ids)
        inputs = x if self.fc1_latent_proj is None else self.fc1_latent_proj(x, adapters)
        chosen, padding = ids, slots
        if self._config.weighs_inputs:
            # Each chosen expert of a token has an input of its own.
            num_chosen = ids.shape[1]
            inputs = inputs.repeat_interleave(num_chosen, 0) * weights.view(-1, 1).to(x.dtype)
            chosen, weights = ids.view(-1, 1), torch.ones_like(weights)
            padding = None if slots is None else slots.repeat_interleave(num_chosen)
        kernels = self._expert_kernels if is_fused else None
        joined = self._joined_experts() if is_fused else None
        of_experts, added = self.expert_adapters, None
        if adapters is not None and of_experts is not None and not of_experts.is_empty:
            added = of_experts.step(adapters, chosen)
        if added is not None and kernels is None:
            joined = joined if joined is not None and joined.takes_activation and len(x) else None
            results = self._adapted_results(inputs, chosen, added, joined, padding)
        elif joined is not None:
            results = self._summed(joined.outputs(inputs, chosen, self._totals, padding), x.dtype)
        elif kernels is None:
            results = self._summed(self._results(inputs, chosen, is_fused), x.dtype)
        else:
            assert self._stacked is not None, "made with the kernels"
            stack, is_exact = self._stacked.get(), self._is_exact
            assert added is None or not self._sums_each, "complete experts, or parts that are added at last"
            outputs = kernels.outputs(
                inputs, chosen, stack, padding, self._totals, others_are_zero=is_exact, added=added
            )
            results = self._summed(outputs, x.dtype)
        shared: Tensor | None = None
        if self.shared_expert is not None:
            shared = self.shared_expert(x, adapters, is_fused=is_fused)
        if self._sums_each and shared is not None:
            shared = self._group.sum_parts(shared, x.dtype)
        if self._is_exact:
            # A result is zero on all ranks but one, so the sum is exact.
            results = self._group.all_reduce(results, is_exact=True)
        if self._config.num_identity and self._adds_identity:
            results = self._with_identity(results, inputs, ids)
        if joined is not None:
            output = joined.weighted_sum(results, weights)
        elif kernels is None:
            output = _weighted_sum(results.view(*ids.shape, results.shape[1]), weights).to(x.dtype)
        else:
            assert self._stacked is not None, "made with the kernels"
            is_own = None if self._is_exact else self._stacked.is_own
            output = kernels.weighted_sum(results, ids, weights, slots, is_own)
        if self.fc2_latent_proj is not None:
            output = self.fc2_latent_proj(output, adapters)
        if shared is not None:
            output = output + (shared if shared_gate is None else (shared.float() * shared_gate).to(x.dtype))
        return self._parts_group.once(output) if self._is_exact or self._sums_each else output

    def _summed(self, results: Tensor, dtype: torch.dtype) -> Tensor:
        """Outputs of experts summed over ranks and rounded, if each is before it is weighted."""
        return self._group.sum_parts(results, dtype) if self._sums_each else results

    def _with_identity(self, results: Tensor, inputs: Tensor, ids: Tensor) -> Tensor:
        """Outputs [T * k, hidden], those of identity experts replaced by their inputs [T, hidden]."""
        num_chosen, is_identity = ids.shape[1], ids.flatten() >= self._config.num_experts
        if results.device.type == "cpu":
            places = is_identity.nonzero().squeeze(1)
            return results.index_copy_(0, places, inputs.index_select(0, places // num_chosen).to(results.dtype))
        # Without a number of tokens that the host would have to know.
        return torch.where(is_identity.unsqueeze(1), inputs.repeat_interleave(num_chosen, 0), results)

    def accept_adapters(self, kernels: AdapterKernels, max_adapters: int) -> ExpertAdapters:
        """Adapters of experts, whose stacks the caller makes."""
        config, device = self._config, self._totals.device
        self.expert_adapters = ExpertAdapters(kernels, max_adapters, self.own, config.num_choices, device)
        return self.expert_adapters

    @property
    def num_tokens(self) -> list[int]:
        """Tokens of each expert with weights so far, on any rank, without padding. Waits for the device."""
        totals = self._totals.tolist()[: self._config.num_experts]
        return [sum(each) for each in zip(self._num_tokens, totals, strict=False)]

    def forget_num_tokens(self) -> None:
        """Count from zero."""
        self._num_tokens = [0] * len(self._num_tokens)
        self._totals.zero_()

    def forget_addresses(self) -> None:
        """Hold no weights but the parameters, and look at their addresses in the next step."""
        self._joined, self._has_joined = None, False
        if self._stacked is not None:
            self._stacked.forget()

    def _joined_experts(self) -> JoinedExperts | None:
        """All experts as one call, made in the first step after their addresses changed."""
        if self._expert_kernels is None and not self._has_joined:
            self._joined, self._has_joined = self._join(), True
        return self._joined

    def _join(self) -> JoinedExperts | None:
        experts = {int(index): expert for index, expert in self.experts.items() if _is_plain(expert)}
        if not experts or len(experts) < len(self.experts):
            return None
        down, config = next(iter(experts.values())).down_proj, self._config
        sizes = ExpertSizes(
            num_experts=config.num_choices,
            hidden_size=down.output_size,
            intermediate_size=down.input_range[1] - down.input_range[0],
            activation=self._activation,
            limit=config.limit,
            bound=config.bound,
            is_gated=config.is_gated,
            leaf_ends=down.parts_leaf_ends,
            dtype=self._dtype,
            part_dtype=down.part_dtype(self._dtype),
        )
        return self._kernels.join_experts({index: each.weights() for index, each in experts.items()}, sizes)

    def _results(self, x: Tensor, ids: Tensor, is_fused: bool) -> Tensor:
        """Outputs [T * k, hidden] of each token's experts, zero for experts of other ranks. `ids` is int64 [T, k]."""
        num_chosen = ids.shape[1]
        results = x.new_zeros((ids.numel(), x.shape[1]), dtype=self._results_dtype(x))
        for expert, slots in self._calls(ids):
            results[slots] = expert(x[slots // num_chosen], is_fused=is_fused)
        return results

    def _adapted_results(
        self, x: Tensor, ids: Tensor, added: AddedToExperts, joined: JoinedExperts | None, slots: Tensor | None
    ) -> Tensor:
        """`_results` with what adapters add, summed over ranks if each expert's output is, and rounded."""
        if joined is not None:
            first: Any = next(iter(self.experts.values()))
            seen: list[Tensor] = []

            def activated(columns: Tensor) -> Tensor:
                added.add_to_columns_(columns, x)
                seen.append(first.gate_up_proj.activated(columns))
                return seen[0]

            results = joined.outputs(x, ids, self._totals, slots, activated)
            return self._with_added(results, seen[0], x.dtype, added)
        num_chosen, calls = ids.shape[1], self._calls(ids)
        results = x.new_zeros((ids.numel(), x.shape[1]), dtype=self._results_dtype(x))
        if not calls:
            return results
        gates = calls[0][0].gate_up_proj
        columns = x.new_zeros((len(results), gates.num_outputs))
        for expert, slots in calls:
            columns[slots] = expert.columns(x[slots // num_chosen])
        added.add_to_columns_(columns, x)
        gated = gates.activated(columns)
        for expert, slots in calls:
            results[slots] = expert.down(gated[slots])
        return self._with_added(results, gated, x.dtype, added)

    def _with_added(self, results: Tensor, gated: Tensor, dtype: torch.dtype, added: AddedToExperts) -> Tensor:
        """Results of down projections, summed over ranks if each is, with what adapters add."""
        if self._sums_each:
            results = self._group.sum_parts(results, dtype)
            added.add_to_sums_(results, gated, self._group)
        else:
            added.add_to_parts_(results, gated)
        return results

    def _results_dtype(self, x: Tensor) -> torch.dtype:
        return torch.float32 if self._sums_each else x.dtype

    def _calls(self, ids: Tensor) -> list[tuple[Any, Tensor]]:
        """This rank's experts that have tokens, ascending, and the places of their tokens in int64 [T * k]."""
        flat = ids.flatten()
        # Stable: the tokens of an expert stay in the order of the batch.
        sorted_ids, order = flat.sort(stable=True)
        # The only read-back of a layer. `bincount` would need another, to find the maximum.
        indices = torch.arange(self._config.num_choices, device=flat.device)
        ends: list[int] = torch.searchsorted(sorted_ids, indices, right=True).tolist()
        start = 0
        calls: list[tuple[Any, Tensor]] = []
        for index, end in enumerate(ends):
            slots, count = order[start:end], end - start
            start = end
            self._num_tokens[index] += count
            if count and str(index) in self.experts:
                calls.append((self.experts[str(index)], slots))
        return calls


def _weighted_sum(results: Tensor, weights: Tensor) -> Tensor:
    """[T, k, hidden] and float32 [T, k] -> float32 [T, hidden], added from a token's first expert to its last."""
    total = torch.zeros((len(results), results.shape[2]), dtype=torch.float32, device=results.device)
    for column in range(results.shape[1]):
        total += results[:, column].float() * weights[:, column : column + 1]
    return total
