"""Low-rank adapters of a step on a GPU, interpreted on CPU tensors: see triton_cases.py.

OPENBLAS_CORETYPE=Nehalem TRITON_INTERPRET=1 python tests/ops/kernels/triton_adapter_cases.py
                                                              prints {case: what went wrong, or ""}
python tests/ops/kernels/triton_adapter_cases.py gate         a few of them
python tests/ops/kernels/triton_adapter_cases.py cuda         all on a GPU, in bfloat16 too
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from triton_cases import report, set_device

from spmd_worker.model.layers.distances import _by_adapter
from spmd_worker.ops.kernels.adapters import AdapterSizes, Matrices, ReferenceAdapterKernels
from spmd_worker.ops.kernels.triton import adapters, expert_kernels, matmul, placing, rows, tiles
from spmd_worker.ops.kernels.triton.adapters import AdapterTile, TritonAdapterKernels
from spmd_worker.ops.kernels.triton.launching import capability, is_interpreted
from spmd_worker.ranks.leaves import leaf_bounds, leaf_ends, tree_sum

INPUTS, MAX_RANK = 300, 40
QKV = ((0, 40), (40, 64), (64, 88))
ONE, NUM_LEAVES = ((0, 40),), 4
"""A layer whose inputs ranks share."""
RANKS = (40, 16, 5)
"""Of the adapters, by slot."""
ADAPTERS = list(range(len(RANKS)))


def floats() -> tuple[torch.dtype, ...]:
    return (torch.float32, torch.float16, *(() if is_interpreted() else (torch.bfloat16,)))


def matrices(number: int, parts: Sequence[tuple[int, int]], dtype: torch.dtype) -> list[Matrices | None]:
    """Those of one adapter, the same in any slot. The second has none for the second part."""
    generator, rank = torch.Generator().manual_seed(number), RANKS[number]

    def normal(*shape: int) -> Tensor:
        values = torch.randn(shape, generator=generator, device="cpu") * shape[1] ** -0.5
        return values.to(dtype)

    made = [(normal(rank, INPUTS), normal(stop - start, rank)) for start, stop in parts]
    return [None if (number, part) == (1, 1) else each for part, each in enumerate(made)]


class Layer:
    """One layer's stack with the adapters of `order`, by slot."""

    def __init__(
        self,
        dtype: torch.dtype,
        parts: tuple[tuple[int, int], ...] = QKV,
        order: Sequence[int] = ADAPTERS,
        *,
        max_rank: int = MAX_RANK,
        is_reference: bool = False,
        inputs: tuple[int, int] = (0, INPUTS),
        leaf_ends: tuple[int, ...] = (),
    ) -> None:
        """`inputs` are a rank's, of a layer that ranks share."""
        device = torch.device(torch.get_default_device())
        self.kernels = ReferenceAdapterKernels() if is_reference else TritonAdapterKernels()
        self.num_slots = len(order)
        sizes = (len(order), max_rank, inputs[1] - inputs[0], parts, dtype, device, leaf_ends)
        self.stack = self.kernels.new_stack(AdapterSizes(*sizes))
        for slot, number in enumerate(order):
            if RANKS[number] <= max_rank:
                found = matrices(number, parts, dtype)
                own = [None if each is None else (each[0][:, slice(*inputs)].contiguous(), each[1]) for each in found]
                self.stack.write(slot, self.stack.pack(own))

    def __call__(self, outputs: Tensor, x: Tensor, slots: Sequence[int]) -> Tensor:
        found = outputs.clone()
        self.stack.add_(found, x, self.kernels.step(torch.tensor(slots, dtype=torch.int32), self.num_slots))
        return found


def step(count: int, dtype: torch.dtype, width: int = QKV[-1][1]) -> tuple[Tensor, Tensor, list[int]]:
    """Outputs, inputs and slots of a step; every fifth row has no adapter."""
    generator = torch.Generator().manual_seed(3)
    outputs, x = (torch.randn(count, size, generator=generator, device="cpu") for size in (width, INPUTS))
    device = torch.get_default_device()
    return outputs.to(device, dtype), x.to(device, dtype), [(7 * row) % 5 % 4 - 1 for row in range(count)]


def adapters_add_what_the_reference_adds() -> None:
    for dtype in floats():
        for parts in (((0, 40),), ((0, 24), (24, 88)), QKV):
            # Outputs behind those of the parts are nobody's.
            outputs, x, slots = step(37, dtype, parts[-1][1] + 8)
            found, expected = (
                Layer(dtype, parts)(outputs, x, slots),
                Layer(dtype, parts, is_reference=True)(outputs, x, slots),
            )
            # A sum near the middle between two numbers may be rounded to either.
            room = 2e-5 if dtype == torch.float32 else torch.finfo(dtype).eps * expected.abs().max().item()
            assert (found - expected).abs().max().item() <= room, (dtype, parts)
            assert (found == expected).float().mean() > (0.3 if dtype == torch.float32 else 0.99), (dtype, parts)
            assert (found != outputs).any(1).tolist() == [slot >= 0 for slot in slots]


def rows_without_an_adapter_and_absent_parts_keep_their_bits() -> None:
    for dtype in floats():
        outputs, x, slots = step(37, dtype)
        # Adding zero would make it positive; inputs would spread.
        outputs[:, ::3] = -0.0
        x[slots.index(-1)] = torch.nan
        found = Layer(dtype)(outputs, x, slots)
        for row, slot in enumerate(slots):
            same = slice(0, None) if slot < 0 else slice(*QKV[1]) if slot == 1 else slice(0, 0)
            assert torch.equal(found[row, same].view(torch.uint8), outputs[row, same].view(torch.uint8)), (row, slot)
        nobody = Layer(dtype)(outputs, x, [-1] * 37)
        assert torch.equal(nobody.view(torch.uint8), outputs.view(torch.uint8))


def bits_of(layer: Layer, outputs: Tensor, x: Tensor, slots: list[int], chosen: Sequence[int]) -> Tensor:
    return layer(outputs[list(chosen)], x[list(chosen)], [slots[row] for row in chosen])


def a_row_alone_has_its_bits_in_a_batch() -> None:
    for dtype in floats()[: 1 if is_interpreted() else None]:
        layer, (outputs, x, slots) = Layer(dtype), step(37, dtype)
        batched, backwards = layer(outputs, x, slots), list(range(36, -1, -1))
        for row in (0, 4, 36):
            assert torch.equal(bits_of(layer, outputs, x, slots, [row]), batched[row : row + 1]), (dtype, row)
        assert torch.equal(bits_of(layer, outputs, x, slots, backwards), batched[backwards])
        # Beside other adapters, and in other slots.
        own = [row for row in range(37) if slots[row] == 2]
        assert torch.equal(bits_of(layer, outputs, x, slots, own), batched[own])
        moved = Layer(dtype, order=(2, 0, 1))
        assert torch.equal(moved(outputs, x, [slot if slot < 0 else (slot + 1) % 3 for slot in slots]), batched)
        # In a larger step, filled up as a graph's.
        padded = [torch.cat([each, each.flip(0)]) for each in (outputs, x)]
        assert torch.equal(layer(*padded, [*slots, *[-1] * 37])[:37], batched)


def tiles_change_no_bit() -> None:
    for dtype in floats():
        layer, (outputs, x, slots) = Layer(dtype), step(75, dtype)
        expected = layer(outputs, x, slots)
        usual = adapters.tile_for(75, dtype, (9, 0))
        others = [replace(usual, rows=32, rank=16), replace(usual, rows=64, rank=32, num_expand_warps=8)]
        # numpy adds a step in its own order.
        others += [] if is_interpreted() else [replace(usual, rank=16, inputs=64, rank_step=16)]
        others += [] if dtype != torch.bfloat16 else [adapters.MANY_ROWS]
        for tile in others:
            with mock.patch.object(adapters, "tile_for", return_value=tile):
                assert torch.equal(layer(outputs, x, slots), expected), (dtype, tile)


def zeros_that_fill_up_the_rank_change_no_bit() -> None:
    for dtype in floats():
        outputs, x, _ = step(11, dtype)
        narrow, wide = Layer(dtype, max_rank=16), Layer(dtype, max_rank=MAX_RANK)
        for slot in (1, 2):
            assert torch.equal(narrow(outputs, x, [slot] * 11), wide(outputs, x, [slot] * 11)), (dtype, slot)


def a_slot_that_is_filled_again_has_nothing_of_the_last() -> None:
    for dtype in floats():
        outputs, x, slots = step(23, dtype)
        layer, expected = Layer(dtype, order=(0, 0, 0)), Layer(dtype)(outputs, x, slots)
        assert not layer.stack.is_empty
        for slot in ADAPTERS:
            layer.stack.clear(slot)
        assert layer.stack.is_empty
        assert torch.equal(layer(outputs, x, slots), outputs)
        for slot in ADAPTERS:
            layer.stack.write(slot, layer.stack.pack(matrices(slot, QKV, dtype)))
        assert torch.equal(layer(outputs, x, slots), expected)


def numbers_between_the_products_keep_float32() -> None:
    """Three numbers of half the bits are exact; one is not."""
    dtype = torch.float16 if is_interpreted() else torch.bfloat16
    x = step(19, dtype)[1]
    a, b = (each.to(x.device) for each in matrices(0, ((0, 40),), dtype)[0])
    low = x.double() @ a.double().t()
    exact, rounded = (each @ b.double().t() for each in (low, low.to(dtype).double()))
    layer = Layer(dtype, ((0, 40),))
    layer.stack.b = layer.stack.b.to(dtype)
    zeros = torch.zeros(19, 40)
    expand = AdapterTile.expand_constants
    split = {"SPLITS": True}
    # Outputs are of another dtype than the stack, whose tiles are those of the launch.
    tile = adapters.tile_for(19, dtype, capability(x.device))
    with (
        mock.patch.object(AdapterTile, "expand_constants", lambda *args, **more: expand(*args, **more) | split),
        mock.patch.object(adapters, "tile_for", return_value=tile),
    ):
        found = layer(zeros, x, [0] * 19).double()
    # A matrix unit cuts off what it adds.
    assert (found - exact).abs().max().item() < 2e-5
    # Control: what is between them, rounded.
    assert (rounded - exact).abs().max().item() > 1e-4


def unfused_gates_have_the_bits_of_fused_ones() -> None:
    for dtype in floats():
        generator = torch.Generator().manual_seed(1)
        x, weight = (
            torch.randn(21, 96, generator=generator, device="cpu"),
            torch.randn(70, 96, generator=generator, device="cpu"),
        )
        x, weight = (each.to(torch.get_default_device(), dtype) for each in (x, weight))
        fused = matmul.gated_linear(x, weight, None)
        assert torch.equal(rows.silu_and_mul(matmul.linear(x, weight, None)), fused), dtype
        # Control: gates before they are rounded.
        if dtype != torch.float32:
            columns = matmul.linear(x.float(), weight.float(), None)
            assert not torch.equal(rows.silu_and_mul(columns).to(dtype), fused)


def on_ranks(dtype: torch.dtype, size: int, add: Callable[[list[Tensor]], Tensor] = tree_sum) -> Tensor:
    """Outputs of ranks that share the inputs of a layer of one part, the same on each."""
    outputs, x, slots = step(37, dtype, ONE[-1][1])
    bounds, each = leaf_bounds(INPUTS, NUM_LEAVES), NUM_LEAVES // size
    shares = [(bounds[rank * each], bounds[(rank + 1) * each]) for rank in range(size)]
    layers = [Layer(dtype, ONE, inputs=share, leaf_ends=leaf_ends(share, INPUTS, NUM_LEAVES)) for share in shares]
    placed = layers[0].kernels.step(torch.tensor(slots, dtype=torch.int32), len(ADAPTERS))
    sums = [layer.stack.input_sums(x[:, slice(*share)], placed) for layer, share in zip(layers, shares, strict=True)]
    none = torch.tensor(slots, dtype=torch.int32) < 0
    assert not any(each[none].any() for each in sums)
    found = [outputs.clone() for _ in layers]
    for result, layer in zip(found, layers, strict=True):
        layer.stack.add_sums_(result, add(sums), placed)
    assert all(torch.equal(each.view(torch.uint8), found[0].view(torch.uint8)) for each in found)
    assert torch.equal(found[0][none].view(torch.uint8), outputs[none].view(torch.uint8))
    return found[0]


def any_number_of_ranks_has_equal_bits() -> None:
    ends = leaf_bounds(INPUTS, NUM_LEAVES)[1:]
    for dtype in floats():
        outputs, x, slots = step(37, dtype, ONE[-1][1])
        one = Layer(dtype, ONE, leaf_ends=ends)(outputs, x, slots)
        for size in (1, 2, 4):
            assert torch.equal(on_ranks(dtype, size), one), (dtype, size)
        expected = Layer(dtype, ONE, leaf_ends=ends, is_reference=True)(outputs, x, slots)
        room = 2e-5 if dtype == torch.float32 else torch.finfo(dtype).eps * expected.abs().max().item()
        assert (one - expected).abs().max().item() <= room, dtype


def control_other_orders_and_boundaries_are_found() -> None:
    dtype, ends = torch.float32, leaf_bounds(INPUTS, NUM_LEAVES)[1:]
    outputs, x, slots = step(37, dtype, ONE[-1][1])
    one = Layer(dtype, ONE, leaf_ends=ends)(outputs, x, slots)
    assert not torch.equal(on_ranks(dtype, 4, lambda sums: ((sums[0] + sums[1]) + sums[2]) + sums[3]), one)
    assert not torch.equal(Layer(dtype, ONE, leaf_ends=(ends[0] + 1, *ends[1:]))(outputs, x, slots), one)
    assert not torch.equal(Layer(dtype, ONE)(outputs, x, slots), one)


def rows_of_distances_have_their_adapters() -> None:
    """They had none: new kernels knew no slots."""
    outputs, x, slots = step(37, torch.float32)
    layer = Layer(torch.float32)
    placed, found = layer.kernels.step(torch.tensor(slots, dtype=torch.int32), layer.num_slots), []
    for tokens, own in _by_adapter(placed, 9):
        assert tokens is not None
        slot = slots[int(tokens[0])]
        assert (own is None) == (slot < 0)
        if own is not None:
            found.append(slot)
            added = outputs[:9].clone()
            layer.stack.add_(added, x[:9], own)
            assert torch.equal(added, layer(outputs[:9], x[:9], [slot] * 9)), slot
    assert found == ADAPTERS


def broken(change: Callable[[], Any]) -> bool:
    """Whether answers of a step are others with `change`."""
    outputs, x, slots = step(37, torch.float32)
    expected = Layer(torch.float32)(outputs, x, slots)
    with change():
        return not torch.equal(Layer(torch.float32)(outputs, x, slots), expected)


def control_rows_in_another_place_are_found() -> None:
    place = placing.place

    def moved(*arguments: Any) -> placing.Placed:
        placed, num_placed = place(*arguments), int((arguments[0] >= 0).sum())
        return replace(placed, order=placed.order[:num_placed].roll(1))

    assert broken(lambda: mock.patch.object(placing, "place", moved))


def control_pieces_of_another_size_have_other_bits() -> None:
    """So bits would depend on the rows, if pieces did."""
    assert broken(lambda: mock.patch.object(adapters, "piece_of", return_value=512))


def control_matrices_of_the_next_adapter_are_found() -> None:
    outputs, x, slots = step(37, torch.float32)
    layer = Layer(torch.float32)
    expected = layer(outputs, x, slots)
    for name in ("a", "b", "ranks"):
        whole = getattr(layer.stack, name)
        setattr(layer.stack, name, whole.roll(1, 0))
        assert not torch.equal(layer(outputs, x, slots), expected), name
        setattr(layer.stack, name, whole)


GATE: tuple[Callable[[], None], ...] = (
    adapters_add_what_the_reference_adds,
    rows_without_an_adapter_and_absent_parts_keep_their_bits,
    a_row_alone_has_its_bits_in_a_batch,
    any_number_of_ranks_has_equal_bits,
    unfused_gates_have_the_bits_of_fused_ones,
    control_rows_in_another_place_are_found,
    control_other_orders_and_boundaries_are_found,
)
OTHERS: tuple[Callable[[], None], ...] = (
    tiles_change_no_bit,
    zeros_that_fill_up_the_rank_change_no_bit,
    a_slot_that_is_filled_again_has_nothing_of_the_last,
    numbers_between_the_products_keep_float32,
    rows_of_distances_have_their_adapters,
    control_pieces_of_another_size_have_other_bits,
    control_matrices_of_the_next_adapter_are_found,
)


def main() -> None:
    set_device()
    adapters.MIN_PIECE = 128
    if is_interpreted():
        expert_kernels.BLOCK = 64
        adapters.FLOAT16 = adapters.FLOAT32 = AdapterTile(16, 64, 64, 4, 2, 64, 16, 4)
        # numpy adds a step along K in its own order.
        matmul.tile_for = lambda *sizes, is_gated: tiles.Tile(32, 16, 16, 4, 2, False, False, False)
    with torch.inference_mode():
        chosen = GATE if "gate" in sys.argv else (*GATE, *OTHERS)
        report(chosen)


if __name__ == "__main__":
    main()
