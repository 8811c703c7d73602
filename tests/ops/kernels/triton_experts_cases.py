"""All experts of a sparse layer at once on a GPU, interpreted on CPU tensors: see triton_cases.py.

OPENBLAS_CORETYPE=Nehalem TRITON_INTERPRET=1 python tests/ops/kernels/triton_experts_cases.py
                                                              prints {case: what went wrong, or ""}
python tests/ops/kernels/triton_experts_cases.py gate         a few of them
python tests/ops/kernels/triton_experts_cases.py cuda         all on a GPU, in bfloat16 too
"""

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from triton_cases import report, set_device

from spmd_worker.model.layers.context import LayerContext
from spmd_worker.model.layers.experts import SparseFeedForward, _weighted_sum, select_experts
from spmd_worker.model_config.layer_config import ExpertsConfig, LayerConfig, NormConfig
from spmd_worker.ops.attention.sdpa import SdpaBackend
from spmd_worker.ops.kernels.reference import ReferenceKernels
from spmd_worker.ops.kernels.triton import expert_kernels, experts, matmul, placing, router_kernels
from spmd_worker.ops.kernels.triton.kernels import TritonKernels
from spmd_worker.ops.kernels.triton.launching import is_interpreted
from spmd_worker.ops.kernels.triton.tiles import Tile
from spmd_worker.ranks.communicator import GroupHandle, single_group
from spmd_worker.ranks.expert_layout import ExpertLayout

HIDDEN = 32
CONFIG = ExpertsConfig(num_experts=7, num_chosen=3, intermediate_size=24)
CLAMPED = replace(CONFIG, score="softmax_chosen", has_router_bias=True, has_bias=True, limit=0.7)
MIXED = replace(CONFIG, num_chosen=2, score="sparsemixer", renormalises=False, jitter=0.4)
TILES = (Tile(16, 16, 16, 4, 2), Tile(16, 32, 16, 4, 2))
OTHER_TILES = (Tile(32, 32, 16, 4, 2), Tile(32, 16, 16, 4, 2))


def floats() -> tuple[torch.dtype, ...]:
    return (torch.float32, torch.float16, *(() if is_interpreted() else (torch.bfloat16,)))


def new_layer(
    config: ExpertsConfig = CONFIG,
    dtype: torch.dtype = torch.float32,
    owners: tuple[int, ...] | None = None,
    rank: int = 0,
    *,
    activation: str = "silu",
    is_exact: bool = False,
    is_reference: bool = False,
    shares_columns: bool = False,
) -> SparseFeedForward:
    """A layer with the same weights whatever the rank and kernels; of two ranks if `owners` are given or each has half
    of the columns.
    """
    norm = NormConfig()
    layer = LayerConfig(4, 2, 16, 64, 0.25, norm, experts=config, activation=activation)
    group = GroupHandle((0, 1), rank, None) if owners is not None or shares_columns else single_group()
    layout = None if owners is None else ExpertLayout((owners,), is_exact)
    kernels = ReferenceKernels() if is_reference else TritonKernels()
    device = torch.device(torch.get_default_device())
    context = LayerContext(group, kernels, SdpaBackend(), dtype, device, layout)
    found = SparseFeedForward(context, layer, HIDDEN)
    for name, parameter in found.named_parameters():
        generator = torch.Generator().manual_seed(sum(map(ord, name)))
        values = torch.randn(parameter.shape, generator=generator, device="cpu") * parameter.shape[-1] ** -0.5
        parameter.data.copy_(values)
    return found


def tokens(count: int, dtype: torch.dtype, seed: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    found = torch.randn(count, HIDDEN, generator=generator, device="cpu")
    return found.to(torch.get_default_device(), dtype)


def routing(count: int, kind: str = "any") -> Tensor:
    """int64 [count, 3], ascending in each row."""
    if kind == "one":
        return torch.tensor([2, 4, 6]).repeat(count, 1)
    generator = torch.Generator().manual_seed(count)
    rows = [torch.randperm(7, generator=generator, device="cpu")[:3].sort().values for _ in range(count)]
    return torch.stack(rows).to(torch.get_default_device())


def outputs(layer: SparseFeedForward, x: Tensor, ids: Tensor, slots: Tensor | None = None, **options: bool) -> Tensor:
    options = {"others_are_zero": True} | options
    return layer._expert_kernels.outputs(x, ids, layer._stacked.get(), slots, layer._totals, **options)


def dense(layer: SparseFeedForward, x: Tensor, ids: Tensor) -> Tensor:
    """Outputs of experts called one by one, in other tiles."""
    return layer._results(x, ids, True)


def rows_have_the_bits_of_the_dense_gemm_for_any_routing() -> None:
    for dtype in floats():
        layer, x = new_layer(dtype=dtype), tokens(21, dtype)
        for kind in ("any", "one"):
            ids = routing(21, kind)
            found = outputs(layer, x, ids)
            assert torch.equal(found, dense(layer, x, ids)), (dtype, kind)
            assert found.abs().sum(-1).min() > 0


def tiles_and_descriptors_change_no_bit() -> None:
    for dtype in floats():
        layer, x, ids = new_layer(dtype=dtype), tokens(45, dtype), routing(45)
        first = outputs(layer, x, ids)
        with mock.patch.object(experts, "tiles_for", return_value=OTHER_TILES):
            assert torch.equal(outputs(layer, x, ids), first), "tiles"
        with mock.patch.object(experts, "can_describe", return_value=False):
            assert torch.equal(outputs(layer, x, ids), first), "pointers"


def a_token_alone_has_its_bits_in_a_batch() -> None:
    for config in (CONFIG, CLAMPED):
        layer, x = new_layer(config), tokens(19, torch.float32)
        batched = layer(x)
        for row in (0, 7, 18):
            assert torch.equal(layer(x[row : row + 1]), batched[row : row + 1])
        assert torch.equal(layer(x.flip(0)), batched.flip(0))
        assert not torch.equal(batched[:1], batched[1:2])


def a_layer_is_the_reference_layer() -> None:
    shared = replace(CONFIG, shared_size=24, has_shared_gate=True, score="sigmoid", scaling=1.7)
    weighs_inputs = replace(shared, has_shared_gate=False, weighs_inputs=True, score="sigmoid_chosen")
    weighs_inputs = replace(weighs_inputs, renormalises=False, scaling=1.0)
    for config in (CONFIG, CLAMPED, shared, weighs_inputs, replace(CONFIG, are_beside_dense=True)):
        x = tokens(19, torch.float32)
        ours, reference = new_layer(config), new_layer(config, is_reference=True)
        assert torch.allclose(ours(x), reference(x), rtol=1e-5, atol=1e-6), config
        assert ours.num_tokens == reference.num_tokens


def other_activations_are_applied_between_the_gemms() -> None:
    layer, x, ids = new_layer(activation="gelu_tanh"), tokens(11, torch.float32), routing(11)
    assert torch.equal(outputs(layer, x, ids), dense(layer, x, ids))


def experts_without_gates_are_the_reference() -> None:
    """Between two projections of the layer, too."""
    for latent_size in (0, 32):
        config = replace(CONFIG, is_gated=False, latent_size=latent_size, shared_size=24)
        layer, x, ids = new_layer(config, activation="relu2"), tokens(11, torch.float32), routing(11)
        inputs = x if layer.fc1_latent_proj is None else layer.fc1_latent_proj(x)
        assert torch.equal(outputs(layer, inputs, ids), dense(layer, inputs, ids))
        reference = new_layer(config, activation="relu2", is_reference=True)
        assert torch.allclose(layer(x), reference(x), rtol=1e-5, atol=1e-5), latent_size


def bounded_gates_have_the_bits_of_the_dense_gemm() -> None:
    for activation in ("silu", "gelu_tanh"):
        # Rows of whole vectors, so that torch's silu on a CPU has no scalar tail.
        config = replace(CONFIG, bound=0.3, intermediate_size=32)
        layer, x, ids = new_layer(config, activation=activation), tokens(11, torch.float32), routing(11)
        found = outputs(layer, x, ids)
        assert torch.equal(found, dense(layer, x, ids))
        unbounded = new_layer(replace(config, bound=0.0), activation=activation)
        assert not torch.allclose(found, outputs(unbounded, x, ids), rtol=1e-3)


def clamped_gates_are_near_the_reference() -> None:
    layer, x, ids = new_layer(CLAMPED), tokens(23, torch.float32), routing(23)
    found = outputs(layer, x, ids)
    assert torch.allclose(found, dense(layer, x, ids), rtol=1e-5, atol=1e-6)
    # Bounds are reached on both sides.
    columns = F.linear(x, layer.experts["0"].gate_up_proj.weight, layer.experts["0"].gate_up_proj.bias)
    assert (columns[:, ::2] > 0.7).any()
    assert (columns[:, 1::2] < -0.7).any()
    assert (columns[:, 1::2] > 0.7).any()
    x[5] = torch.nan
    found = outputs(layer, x, ids).view(23, 3, -1)
    assert found[5].isnan().all()
    assert not found[[4, 6]].isnan().any()


def _on_first(rank: int, complete: Tensor) -> Tensor:
    return complete if rank == 0 else torch.zeros_like(complete)


def ranks_with_experts_apart_sum_to_one_rank() -> None:
    x, whole = tokens(17, torch.float32), new_layer()
    ids, weights, _ = whole.gate(x)
    for owners in ((0, 1, 0, 1, 1, 0, 1), (1,) * 7):
        ranks = [new_layer(owners=owners, rank=rank, is_exact=True) for rank in (0, 1)]
        parts = [outputs(each, x, ids) for each in ranks]
        total = parts[0] + parts[1]
        assert torch.equal(total, outputs(whole, x, ids)), owners
        summed = ranks[0]._expert_kernels.weighted_sum(total, ids, weights, None, None)
        assert torch.equal(summed, whole(x)), owners
        for rank, each in enumerate(ranks):
            # Both ranks have the sum, and the first adds it to the next one.
            once = partial(_on_first, rank)
            each._group = SimpleNamespace(all_reduce=lambda part, is_exact, total=total: total, once=once)
            assert torch.equal(each(x), whole(x) if rank == 0 else torch.zeros_like(x)), owners
            each.forget_num_tokens()
            outputs(each, x, ids)
        # Not exact: what other ranks' experts left is not read.
        ours = []
        for each in ranks:
            results = outputs(each, x, ids)
            is_own = torch.tensor([owner == ranks.index(each) for owner in owners])
            results.view(17, 3, -1)[~is_own[ids]] = torch.nan
            ours.append(each._expert_kernels.weighted_sum(results, ids, weights, None, each._stacked.is_own))
        assert torch.allclose(ours[0] + ours[1], summed, rtol=1e-5, atol=1e-6), owners
        counts = [each._totals.tolist() for each in ranks]
        assert counts[0] == counts[1] == (2 * ids.flatten().bincount(minlength=7)).tolist()


def ranks_with_columns_of_each_expert_add_biases_once() -> None:
    x, ids, config = tokens(17, torch.float32), routing(17), replace(CONFIG, has_bias=True)
    for rank in (0, 1):
        layer = new_layer(config, rank=rank, shares_columns=True)
        stack = layer._stacked.get()
        assert stack.gate_up.shape == (7, 24, HIDDEN)
        assert (stack.down_bias is not None) == (rank == 0)
        assert torch.equal(outputs(layer, x, ids), dense(layer, x, ids))


def padding_has_no_experts_and_is_not_counted() -> None:
    layer, x, ids = new_layer(), tokens(20, torch.float32), routing(20)
    slots = torch.arange(20, dtype=torch.int32)
    slots[13:] = -1
    x[13:] = torch.nan
    assert torch.equal(outputs(layer, x, ids, slots)[: 13 * 3], outputs(layer, x[:13], ids[:13]))
    assert outputs(layer, x, ids, slots)[13 * 3 :].eq(0).all()
    layer.forget_num_tokens()
    padded = layer(x, slots=slots)
    assert sum(layer.num_tokens) == 13 * 3
    assert torch.equal(padded[:13], layer(x[:13]))
    assert padded[13:].eq(0).logical_or(padded[13:].isnan()).all()


def tokens_of_experts_are_counted_on_the_device() -> None:
    layer = new_layer()
    layer(tokens(40, torch.float32))
    first = layer.gate(tokens(40, torch.float32))[0].flatten().bincount(minlength=7)
    assert layer.num_tokens == first.tolist()
    layer(tokens(40, torch.float32), is_fused=False)
    assert layer.num_tokens == (2 * first).tolist()
    layer.forget_num_tokens()
    assert layer.num_tokens == [0] * 7


def weights_stay_side_by_side_or_are_moved_there() -> None:
    layer, x = new_layer(CLAMPED), tokens(9, torch.float32)
    before = layer(x)
    stack = layer._stacked.get()
    names = [name for name, _ in layer.named_parameters()]
    assert stack.gate_up[3].data_ptr() == layer.experts["3"].gate_up_proj.weight.data_ptr()
    # In place: the stack has it.
    layer.experts["3"].down_proj.weight.data.mul_(2)
    changed = layer(x)
    assert not torch.equal(changed, before)
    layer.experts["3"].down_proj.weight.data.div_(2)
    for parameter in layer.parameters():
        parameter.data = parameter.data * 2
    layer.forget_addresses()
    for parameter in layer.parameters():
        parameter.data.div_(2)
    assert torch.equal(layer(x), before)
    assert layer._stacked.get().down[6].data_ptr() == layer.experts["6"].down_proj.weight.data_ptr()
    assert [name for name, _ in layer.named_parameters()] == names


def routed(layer: SparseFeedForward, x: Tensor, config: ExpertsConfig) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Ids and weights of the kernel, and of torch."""
    gate = layer.gate
    ids, weights, _ = gate(x)
    logits = F.linear(x.double(), gate.weight[: config.num_choices].double()).float()
    expected = select_experts(logits if gate.bias is None else logits + gate.bias, gate.choice_bias, config)
    return ids, weights, *expected


def routers_choose_what_the_reference_chooses() -> None:
    grouped = replace(CONFIG, num_experts=12, score="sigmoid", num_groups=4, num_chosen_groups=2, scaling=1.7)
    grouped = replace(grouped, has_choice_bias=True)
    plain = replace(CONFIG, num_experts=12, num_chosen=4, renormalises=False)
    least = replace(CONFIG, has_choice_bias=True, min_sum=0.7)
    forms = (replace(grouped, num_groups=1, num_chosen_groups=1), replace(grouped, groups_by_best=True))
    identities = replace(plain, num_identity=5, has_choice_bias=True)
    for config in (CONFIG, CLAMPED, grouped, plain, least, MIXED, identities, *forms):
        for dtype in floats():
            layer, x = new_layer(config, dtype), tokens(37, dtype)
            ids, weights, expected, values = routed(layer, x, config)
            assert torch.equal(ids, expected), config
            assert torch.allclose(weights, values, rtol=1e-5, atol=1e-6), config
            for rows in (slice(0, 1), slice(20, 37)):
                assert torch.equal(layer.gate(x[rows])[1], weights[rows])
            with mock.patch.object(experts, "router_tile", return_value=Tile(32, 16, 16, 4, 2)):
                assert torch.equal(layer.gate(x)[1], weights), "tiles"


def identity_experts_return_their_inputs_on_one_rank() -> None:
    config = replace(CONFIG, num_identity=4, num_chosen=5, renormalises=False)
    x = tokens(19, torch.float32)
    layer = new_layer(config)
    whole, apart = layer(x), layer(x, is_fused=False)
    ids, weights, _ = layer.gate(x)
    assert (ids >= 7).any()
    identity = (weights * (ids >= 7)).sum(1, keepdim=True) * x
    layer.experts["3"].down_proj.weight.data.fill_(torch.nan)
    assert layer(x).isnan().any(1).equal((ids == 3).any(1)), "no other expert is computed in their place"
    assert torch.allclose(whole, apart, atol=1e-5)
    owners = (0, 1, 1, 0, 0, 1, 0)
    parts = [new_layer(config, rank=rank, owners=owners)(x) for rank in (0, 1)]
    assert torch.allclose(parts[0] + parts[1], whole, atol=1e-5)
    assert not torch.allclose(whole - identity, whole, atol=1e-2)
    assert len(layer.num_tokens) == 7


def routers_choose_the_lower_of_equals_and_report_nan() -> None:
    for config in (CONFIG, CLAMPED, MIXED):
        layer, x = new_layer(config), tokens(9, torch.float32)
        layer.gate.weight[3] = layer.gate.weight[5]
        if layer.gate.bias is not None:
            layer.gate.bias.fill_(0.5)
        ids, _, expected, _ = routed(layer, x, config)
        assert torch.equal(ids, expected)
        # Both or the lower one.
        has_three, has_five = (ids == 3).any(1), (ids == 5).any(1)
        assert (has_three | ~has_five).all()
        assert (has_three & ~has_five).any()
        layer.gate.weight[2] = torch.nan
        ids, weights, _ = layer.gate(x)
        assert weights.isnan().all()
        assert (ids.diff(dim=1) > 0).all()
        assert ids.min() >= 0
        assert ids.max() < config.num_experts
        layer.gate.weight.zero_()
        assert layer.gate(x)[0].eq(torch.arange(config.num_chosen)).all()


def control_an_unstable_order_of_slots_is_found() -> None:
    """Slots of an expert from last to first, and rows where they are not looked for."""
    layer, x, ids = new_layer(), tokens(21, torch.float32), routing(21)
    place = placing.place

    def reversed_places(*arguments: object) -> object:
        placed = place(*arguments)
        return replace(placed, order=placed.order.roll(1))

    with mock.patch.object(placing, "place", reversed_places):
        assert not torch.equal(outputs(layer, x, ids), dense(layer, x, ids))


def control_a_descending_sum_has_other_bits() -> None:
    layer, x = new_layer(), tokens(40, torch.float32)
    ids, weights, _ = layer.gate(x)
    results = outputs(layer, x, ids)
    ascending = layer._expert_kernels.weighted_sum(results, ids, weights, None, None)
    assert torch.equal(ascending, _weighted_sum(results.view(40, 3, -1), weights))
    backwards = results.view(40, 3, -1).flip(1).flatten(0, 1), ids.flip(1), weights.flip(1)
    assert not torch.equal(layer._expert_kernels.weighted_sum(*backwards, None, None), ascending)


def control_weights_of_the_next_expert_are_found() -> None:
    layer, x, ids = new_layer(), tokens(21, torch.float32), routing(21)
    stack = layer._stacked.get()
    shifted = replace(stack, gate_up=stack.gate_up.roll(1, 0))
    with mock.patch.object(layer._stacked, "get", return_value=shifted):
        assert not torch.equal(outputs(layer, x, ids), dense(layer, x, ids))


GATE: tuple[Callable[[], None], ...] = (
    rows_have_the_bits_of_the_dense_gemm_for_any_routing,
    padding_has_no_experts_and_is_not_counted,
    routers_choose_the_lower_of_equals_and_report_nan,
    control_an_unstable_order_of_slots_is_found,
    control_weights_of_the_next_expert_are_found,
)
OTHERS: tuple[Callable[[], None], ...] = (
    tiles_and_descriptors_change_no_bit,
    a_token_alone_has_its_bits_in_a_batch,
    a_layer_is_the_reference_layer,
    routers_choose_what_the_reference_chooses,
    identity_experts_return_their_inputs_on_one_rank,
    other_activations_are_applied_between_the_gemms,
    experts_without_gates_are_the_reference,
    bounded_gates_have_the_bits_of_the_dense_gemm,
    clamped_gates_are_near_the_reference,
    ranks_with_experts_apart_sum_to_one_rank,
    ranks_with_columns_of_each_expert_add_biases_once,
    tokens_of_experts_are_counted_on_the_device,
    weights_stay_side_by_side_or_are_moved_there,
    control_a_descending_sum_has_other_bits,
)


def main() -> None:
    set_device()
    if is_interpreted():
        # numpy adds a step along K in its own order.
        matmul.tile_for = lambda *sizes, is_gated: Tile(32, 16, 16, 4, 2, False, False, False)
        experts.FLOAT32 = experts.FEW_ROWS = experts.SOME_ROWS = TILES
        expert_kernels.BLOCK, router_kernels.PIECE = 32, 16
        experts.ROUTER = experts.ROUTER_MANY_ROWS = Tile(16, 16, 16, 4, 2)
    with torch.inference_mode():
        chosen = GATE if "gate" in sys.argv else (*GATE, *OTHERS)
        report(chosen)


if __name__ == "__main__":
    main()
