"""Experts in MXFP4 and FP8, decoded while they are loaded, beside the same experts dequantised: see triton_cases.py.

OPENBLAS_CORETYPE=Nehalem TRITON_INTERPRET=1 python tests/ops/kernels/triton_stored_experts_cases.py
                                                              prints {case: what went wrong, or ""}
python tests/ops/kernels/triton_stored_experts_cases.py gate  a few of them
python tests/ops/kernels/triton_stored_experts_cases.py cuda  all on a GPU, in bfloat16 too

Both layers have the same numbers: those of the dequantised one are `dequantise.mxfp4` and `e4m3 * scale`, as a
checkpoint's are when it is loaded, not what the product decodes for itself.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from unittest import mock

import torch
from torch import Tensor
from triton_cases import report, set_device
from triton_experts_cases import floats, outputs

from spmd_worker.model.layers.context import LayerContext
from spmd_worker.model.layers.experts import SparseFeedForward
from spmd_worker.model.weights.dequantise import mxfp4
from spmd_worker.model_config.layer_config import ExpertsConfig, LayerConfig, NormConfig
from spmd_worker.model_config.stored_format import EXPERTS, MXFP4, StoredFormat
from spmd_worker.ops.attention.sdpa import SdpaBackend
from spmd_worker.ops.kernels import stored_weights
from spmd_worker.ops.kernels.triton import expert_kernels, experts, matmul, router_kernels, stored_kernels
from spmd_worker.ops.kernels.triton.kernels import TritonKernels
from spmd_worker.ops.kernels.triton.launching import is_interpreted
from spmd_worker.ops.kernels.triton.tiles import Tile
from spmd_worker.ranks.communicator import GroupHandle, single_group

BLOCKS, ROWS, GROUPS = StoredFormat("e4m3", 128, 128), StoredFormat("e4m3", 1, 0), StoredFormat("e4m3", 1, 128)
HIDDEN = 64
PLAIN = ExpertsConfig(num_experts=3, num_chosen=2, intermediate_size=64)
CLAMPED = replace(PLAIN, score="softmax_chosen", has_router_bias=True, has_bias=True, limit=0.7)
TILES = (Tile(16, 32, 32, 4, 2), Tile(16, 64, 64, 4, 2))
OTHER_TILES = (Tile(32, 16, 128, 4, 2), Tile(32, 128, 32, 4, 2))


@dataclass
class Pair:
    """Layers with the same weights, stored and dequantised."""

    stored: SparseFeedForward
    plain: SparseFeedForward

    def both(self, x: Tensor, ids: Tensor, **options: bool) -> tuple[Tensor, Tensor]:
        return outputs(self.stored, x, ids, **options), outputs(self.plain, x, ids, **options)


def new_layer(
    config: ExpertsConfig, hidden: int, dtype: torch.dtype, stored: StoredFormat | None, group: GroupHandle, name: str
) -> SparseFeedForward:
    layer = LayerConfig(4, 2, 16, 64, 0.25, NormConfig(), experts=config, activation=name)
    device = torch.device(torch.get_default_device())
    formats = {} if stored is None else {0: {EXPERTS: stored}}
    context = LayerContext(group, TritonKernels(), SdpaBackend(), dtype, device, stored=formats)
    found = SparseFeedForward(context, layer, hidden)
    for name, parameter in found.named_parameters():
        if parameter.is_floating_point():
            generator = torch.Generator().manual_seed(sum(map(ord, name)))
            parameter.data.copy_(0.3 * torch.randn(parameter.shape, generator=generator, device="cpu"))
    return found


def dequantised(blocks: Tensor, scales: Tensor) -> Tensor:
    # Powers of two are made on the default device, and a GPU might round them.
    with torch.device("cpu"):
        return mxfp4(blocks, scales)


def file_parts(stored: StoredFormat, shape: tuple[int, int], seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Numbers and scales of a random matrix as a file has them, and its values in float32."""
    generator, (outputs_, inputs) = torch.Generator().manual_seed(seed), shape
    if stored.is_mxfp4:
        numbers = torch.randint(0, 256, (outputs_, inputs // 2), generator=generator, device="cpu").to(torch.uint8)
        scales = torch.randint(118, 125, (outputs_, inputs // 32), generator=generator, device="cpu").to(torch.uint8)
        return numbers, scales, dequantised(numbers.view(outputs_, -1, 16), scales)
    numbers = torch.randn(shape, generator=generator, device="cpu").mul_(90).to(torch.float8_e4m3fn)
    # Subnormal numbers and both zeros.
    numbers.view(torch.uint8)[0, :32] = torch.arange(32).to("cpu", torch.uint8) % 16 + 128 * (
        torch.arange(32).cpu() > 15
    )
    scales_shape = stored.scales_shape(*shape)
    scales = torch.rand(scales_shape, generator=generator, device="cpu") * 1e-3 + 1e-4
    wide = scales.repeat_interleave(stored.group_rows, 0)[:outputs_]
    wide = wide.repeat_interleave(stored.group_inputs or inputs, 1)[:, :inputs]
    return numbers.view(torch.uint8), scales, numbers.float() * wide


def new_pair(
    stored: StoredFormat,
    config: ExpertsConfig = PLAIN,
    dtype: torch.dtype = torch.float32,
    hidden: int = HIDDEN,
    group: GroupHandle | None = None,
    activation: str = "silu",
) -> Pair:
    """Two blocks of columns at least if scales are of blocks."""
    if stored.group_rows > 1:
        hidden, config = max(hidden, 192), replace(config, intermediate_size=max(config.intermediate_size, 128))
    group = single_group() if group is None else group
    found = Pair(*(new_layer(config, hidden, dtype, each, group, activation) for each in (stored, None)))
    for index, expert in found.stored.experts.items():
        for matrix in ("gate_up_proj", "down_proj"):
            packed, plain = getattr(expert, matrix), getattr(found.plain.experts[index], matrix)
            shape = packed.shape_of("weight")
            numbers, scales, values = file_parts(stored, shape, 10 * int(index) + len(matrix))
            packed.write_stored(0, *(each.to(packed.weight.device) for each in (numbers, scales)))
            plain.weight.data.copy_(values)
            assert torch.equal(packed.plain_weight(), plain.weight)
    return found


def tokens(count: int, dtype: torch.dtype, hidden: int = HIDDEN) -> Tensor:
    generator = torch.Generator().manual_seed(count)
    return torch.randn(count, hidden, generator=generator, device="cpu").to(torch.get_default_device(), dtype)


def chosen(count: int) -> Tensor:
    """int64 [count, 2], ascending in each row."""
    return torch.tensor([(0, 1), (0, 2), (1, 2), (0, 2)]).repeat(count, 1)[:count]


def hidden_of(pair: Pair) -> int:
    return pair.plain.gate.weight.shape[1]


def check(pair: Pair, dtype: torch.dtype, what: object, count: int = 19) -> Tensor:
    x, ids = tokens(count, dtype, hidden_of(pair)), chosen(count)
    found, expected = pair.both(x, ids)
    assert torch.equal(found, expected), (what, dtype, (found.float() - expected.float()).abs().max())
    assert found.abs().sum(-1).min() > 0, what
    return found


def mxfp4_experts_have_the_bits_of_dequantised_ones() -> None:
    for dtype in floats():
        check(new_pair(MXFP4, CLAMPED, dtype), dtype, "clamped", 9)
    check(new_pair(MXFP4), torch.float32, "plain", 9)


def fp8_experts_have_the_bits_of_dequantised_ones() -> None:
    check(new_pair(ROWS), torch.float32, "rows", 9)
    for dtype in floats()[1:]:
        check(new_pair(BLOCKS, dtype=dtype), dtype, "blocks", 5)


def fp8_experts_of_other_scales_have_these_bits() -> None:
    for stored, config in ((GROUPS, PLAIN), (GROUPS, CLAMPED), (ROWS, CLAMPED), (BLOCKS, CLAMPED)):
        check(new_pair(stored, config), torch.float32, (stored, config))
    check(new_pair(GROUPS, CLAMPED, floats()[-1]), floats()[-1], "groups")


def widths_need_not_be_multiples_of_steps() -> None:
    """Groups past the last of a step of 128, tiles past the last output, a last block of half the inputs, and ups that
    begin at no multiple of 16 bytes.
    """
    narrow, odd = replace(PLAIN, intermediate_size=96), replace(CLAMPED, intermediate_size=160)
    sizes = (MXFP4, narrow, 160), (MXFP4, odd, 96), (ROWS, narrow, 48), (BLOCKS, PLAIN, 192), (ROWS, odd, 40)
    for stored, config, hidden in sizes:
        pair = new_pair(stored, config, hidden=hidden)
        check(pair, torch.float32, (stored, hidden))
        with mock.patch.object(experts, "tiles_for", return_value=OTHER_TILES):
            check(pair, torch.float32, (stored, "tiles"))


def tiles_and_descriptors_change_no_bit() -> None:
    """Numpy adds a step in its own order: interpreted, other steps have other bits, of dequantised weights too."""
    for stored in (MXFP4, BLOCKS, ROWS):
        for config in (PLAIN, CLAMPED):
            pair = new_pair(stored, config)
            first = check(pair, torch.float32, stored, 45)
            with mock.patch.object(experts, "tiles_for", return_value=OTHER_TILES):
                found = check(pair, torch.float32, "tiles", 45)
                assert is_interpreted() or torch.equal(found, first)
            with mock.patch.object(experts, "can_describe", return_value=False):
                assert torch.equal(check(pair, torch.float32, "pointers", 45), first)


def other_activations_are_applied_between_the_gemms() -> None:
    check(new_pair(BLOCKS, activation="gelu_tanh"), torch.float32, "gelu")


def ranks_with_columns_of_each_expert_decode_their_share() -> None:
    for stored, config in ((MXFP4, CLAMPED), (MXFP4, PLAIN), (BLOCKS, replace(PLAIN, intermediate_size=256))):
        for rank in (0, 1):
            check(new_pair(stored, config, group=GroupHandle((0, 1), rank, None)), torch.float32, (stored, rank))


def experts_one_by_one_are_dequantised() -> None:
    """Steps with adapters call experts so."""
    for stored in (MXFP4, BLOCKS):
        pair = new_pair(stored)
        x, ids = tokens(11, torch.float32, hidden_of(pair)), chosen(11)
        assert torch.equal(pair.stored._results(x, ids, False), pair.plain._results(x, ids, False)), stored


def extreme_scales_are_exact() -> None:
    """Every number with the smallest exponents, the largest, and the last that is finite as a factor."""
    for exponents in (range(8), range(120, 128), range(233, 241)):
        numbers = torch.arange(256).to("cpu", torch.uint8).view(16, 16).repeat(1, 8)
        scales = torch.tensor([*exponents], dtype=torch.uint8, device="cpu").repeat(16, 1)
        found = stored_weights.values(MXFP4, numbers, scales)
        assert torch.equal(found, dequantised(numbers.view(16, -1, 16), scales)), exponents
    beyond = stored_weights.values(MXFP4, numbers, torch.full_like(scales, 241))
    assert beyond.isnan().all()
    for scale in (1e-38, 1.0, 1e34):
        every = torch.arange(256).to("cpu", torch.uint8).view(1, -1)
        found = stored_weights.values(ROWS, every, torch.tensor([[scale]], device="cpu"))
        assert torch.equal(found.nan_to_num(7.0), (every.view(torch.float8_e4m3fn).float() * scale).nan_to_num(7.0))


def control_swapped_nibbles_are_found() -> None:
    pair = new_pair(MXFP4)
    stack = pair.stored._stacked.get()
    swapped = replace(stack, gate_up=((stack.gate_up >> 4) | (stack.gate_up << 4)))
    with mock.patch.object(pair.stored._stacked, "get", return_value=swapped):
        found, expected = pair.both(tokens(9, torch.float32, hidden_of(pair)), chosen(9))
    assert not torch.equal(found, expected)


def control_shifted_scales_are_found() -> None:
    for stored in (MXFP4, ROWS):
        pair = new_pair(stored)
        stack = pair.stored._stacked.get()
        moved = stack.down_scales.roll(1, 2 if stored.is_mxfp4 else 1)
        shifted = replace(stack, down_scales=moved)
        with mock.patch.object(pair.stored._stacked, "get", return_value=shifted):
            found, expected = pair.both(tokens(9, torch.float32, hidden_of(pair)), chosen(9))
        assert not torch.equal(found, expected), stored


def control_a_wrong_block_is_found() -> None:
    pair = new_pair(BLOCKS)
    stack = pair.stored._stacked.get()
    assert stack.gate_up_scales.shape == (3, 2, 2)
    stack = replace(stack, gate_up_scales=stack.gate_up_scales.flip(1))
    with mock.patch.object(pair.stored._stacked, "get", return_value=stack):
        found, expected = pair.both(tokens(9, torch.float32, hidden_of(pair)), chosen(9))
    assert not torch.equal(found, expected)


GATE: tuple[Callable[[], None], ...] = (
    mxfp4_experts_have_the_bits_of_dequantised_ones,
    fp8_experts_have_the_bits_of_dequantised_ones,
    extreme_scales_are_exact,
    control_swapped_nibbles_are_found,
    control_shifted_scales_are_found,
)
OTHERS: tuple[Callable[[], None], ...] = (
    fp8_experts_of_other_scales_have_these_bits,
    widths_need_not_be_multiples_of_steps,
    tiles_and_descriptors_change_no_bit,
    other_activations_are_applied_between_the_gemms,
    ranks_with_columns_of_each_expert_decode_their_share,
    experts_one_by_one_are_dequantised,
    control_a_wrong_block_is_found,
)


def main() -> None:
    set_device()
    if is_interpreted():
        # numpy adds a step along K in its own order, so both layers have the same tiles.
        matmul.tile_for = lambda *sizes, is_gated: Tile(32, 16, 32, 4, 2, False, False, False)
        experts.FLOAT32 = experts.FEW_ROWS = experts.SOME_ROWS = TILES
        experts.STORED_FEW_ROWS = experts.STORED_SOME_ROWS = experts.STORED_SOME_ROWS_OTHER_CHIPS = TILES
        expert_kernels.BLOCK, router_kernels.PIECE = 32, 16
        experts.ROUTER = experts.ROUTER_MANY_ROWS = Tile(16, 16, 16, 4, 2)
    assert stored_kernels.PLAIN.value == 0
    with torch.inference_mode():
        asked = GATE if "gate" in sys.argv else (*GATE, *OTHERS)
        report(asked)


if __name__ == "__main__":
    main()
