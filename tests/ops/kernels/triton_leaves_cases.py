"""Matmuls in leaves and sums of ranks by a tree, interpreted on CPU tensors, in a process of its own: see
triton_cases.py.

    OPENBLAS_CORETYPE=Nehalem TRITON_INTERPRET=1 python tests/ops/kernels/triton_leaves_cases.py
                                                                  prints {case: what went wrong, or ""}
    python tests/ops/kernels/triton_leaves_cases.py cuda              the same on a GPU, with all tiles of its kind

Interpreted, a step along K is one numpy product, so only tiles with the same step have the same bits; on a GPU all do.
"""

import multiprocessing
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from triton_cases import Peers, report, set_device

from spmd_worker.ops.kernels.triton import launching, leaf_kernels, leaf_matmul, matmul, peer_sums, rows, tiles
from spmd_worker.ops.kernels.triton.kernels import TritonKernels
from spmd_worker.ops.kernels.triton.leaf_matmul import LeafTile, cut_of, linear_of_leaves
from spmd_worker.ops.kernels.triton.peer_sums import PeerSums
from spmd_worker.ops.kernels.triton.tiles import Tile
from spmd_worker.ranks.leaves import GRANULE, leaf_bounds, tree_sum

SMALL = (
    Tile(16, 16, 32, 4, 2, False, False, False),
    Tile(16, 32, 32, 4, 2),
    Tile(32, 16, 32, 4, 2, x_by_tma=False, out_by_tma=False),
)
SIZES = (2, 4, 8)
"""Numbers of ranks."""


@dataclass(frozen=True)
class Case:
    """Rows, outputs, inputs and their leaves, dtype of operands and of the result."""

    rows: int
    outputs: int
    inputs: int
    num_leaves: int
    dtype: torch.dtype
    result: torch.dtype

    @property
    def ends(self) -> tuple[int, ...]:
        return leaf_bounds(self.inputs, self.num_leaves)[1:]

    def operands(self) -> tuple[Tensor, Tensor, Tensor]:
        """x, weight, bias."""
        x, weight = torch.randn(self.rows, self.inputs), torch.randn(self.outputs, self.inputs) * self.inputs**-0.5
        return x.to(self.dtype), weight.to(self.dtype), torch.randn(self.outputs).to(self.dtype)


def is_on_gpu() -> bool:
    return not launching.is_interpreted()


def half() -> torch.dtype:
    return torch.bfloat16 if is_on_gpu() else torch.float16


def cases() -> list[Case]:
    """Equal leaves, unequal ones, more levels than registers hold, and leaves that a step passes."""
    dtype, f32 = half(), torch.float32
    if is_on_gpu():
        large = Case(257, 520, 4096, 8, dtype, dtype), Case(70, 328, 1408, 8, dtype, f32)
        return [
            *large,
            Case(33, 72, 1024, 32, dtype, dtype),
            Case(35, 40, 80, 4, dtype, f32),
            Case(35, 24, 352, 8, f32, f32),
        ]
    small = Case(17, 24, 128, 4, dtype, dtype), Case(19, 16, 288, 8, f32, f32)
    return [*small, Case(5, 16, 512, 16, f32, f32), Case(17, 16, 80, 4, dtype, f32)]


def choices(case: Case) -> list[LeafTile]:
    """Tiles, in each way to keep levels that they have. Interpreted, all have one step. On a GPU the first case has all
    tiles, and the others some.
    """
    cut = cut_of(case.ends)
    if not is_on_gpu():
        ways = (
            (False, True)
            if cut.divisor >= GRANULE and cut.num_levels <= leaf_matmul.MAX_LEVELS_IN_REGISTERS
            else (False,)
        )
        return [LeafTile(tile, way) for tile in SMALL for way in ways]
    if case.dtype == torch.float32:
        return [LeafTile(tiles.FLOAT32, way) for way in (False, True)]
    chip = tiles.chip_of(torch.device("cuda", torch.cuda.current_device()))
    found = leaf_matmul.family(cut, chip)[:: 1 if case == cases()[0] else 4]
    pointers = [replace(each, tile=replace(each.tile, x_by_tma=False, weight_by_tma=False)) for each in found[::4]]
    return [leaf_matmul._SAFE, *dict.fromkeys(found + pointers)]


def compile_one(index: int) -> None:
    """In a process of its own: the kernels of every `NUM_PROCESSES`-th tile, for the cache."""
    torch.set_default_device("cuda")
    launches = [(case, choice) for case in cases() for choice in choices(case)]
    for case, choice in launches[index::NUM_PROCESSES]:
        x, weight, bias = case.operands()
        linear_of_leaves(x, weight, bias, case.ends, case.result, choice)


NUM_PROCESSES = 12


def definition(case: Case, x: Tensor, weight: Tensor, bias: Tensor | None, tile: Tile) -> Tensor:
    """Leaf by leaf, each a product of its own, and the tree in torch."""
    bounds = zip((0, *case.ends), case.ends, strict=False)
    plain = replace(tile, x_by_tma=False, weight_by_tma=False)
    sums = [
        matmul.linear(x[:, start:stop], weight[:, start:stop], None if start else bias, plain, torch.float32)
        for start, stop in bounds
    ]
    return tree_sum(sums).to(case.result)


def every_tile_and_way_is_the_tree_of_its_leaves() -> None:
    for case in cases():
        x, weight, bias = case.operands()
        # Each has a bias or none; a bias has its place in each kernel.
        for added in (bias,) if case != cases()[-1] else (None,):
            found = choices(case)
            expected = definition(case, x, weight, added, found[0].tile)
            for choice in found:
                got = linear_of_leaves(x, weight, added, case.ends, case.result, choice)
                assert got.dtype == case.result
                assert torch.equal(got, expected), (case, choice, added is None)
            exact = x.double() @ weight.double().T + (0 if added is None else added.double())
            tolerance = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[expected.dtype]
            assert (expected.double() - exact).abs().max() < tolerance * max(1.0, exact.abs().max().item())
    assert leaf_matmul.REPLACED == {}, leaf_matmul.REPLACED


def a_row_has_the_same_bits_alone() -> None:
    case = cases()[0]
    x, weight, bias = case.operands()
    for choice in choices(case) if is_on_gpu() else choices(case)[2:4]:
        whole = linear_of_leaves(x, weight, bias, case.ends, case.result, choice)
        for row in (0, case.rows - 1):
            alone = linear_of_leaves(x[row : row + 1], weight, bias, case.ends, case.result, choices(case)[0])
            assert torch.equal(alone[0], whole[row]), (choice, row)


def chosen_tiles_have_the_same_bits() -> None:
    """By the number of rows; interpreted in float32, whose tile is always the same."""
    inputs, dtype = (2048, torch.bfloat16) if is_on_gpu() else (256, torch.float32)
    case = Case(700 if is_on_gpu() else 20, 520 if is_on_gpu() else 24, inputs, 8, dtype, dtype)
    x, weight, _ = case.operands()
    multiply = TritonKernels().linear_of_leaves
    whole = multiply(x, weight, None, case.ends, dtype)
    for m in (1, 16, 17, 33, 64, 65, 300, 513):
        if m <= len(x):
            assert torch.equal(multiply(x[:m], weight, None, case.ends, dtype), whole[:m]), m
    assert multiply(x[:0], weight, None, case.ends, dtype).shape == (0, case.outputs)


def shares(case: Case, size: int) -> list[tuple[slice, tuple[int, ...]]]:
    """Columns of each rank, and the ends of its leaves from the first of them on."""
    bounds, each = (0, *case.ends), case.num_leaves // size
    found = []
    for rank in range(size):
        own = bounds[rank * each : (rank + 1) * each + 1]
        found.append((slice(own[0], own[-1]), tuple(end - own[0] for end in own[1:])))
    return found


def parts_of(case: Case, size: int, x: Tensor, weight: Tensor, bias: Tensor) -> list[Tensor]:
    """Each rank's part, as its layer computes it."""
    multiply = TritonKernels().linear_of_leaves
    return [
        multiply(x[:, own], weight[:, own], None if own.start else bias, ends, torch.float32)
        for own, ends in shares(case, size)
    ]


def two_four_and_eight_ranks_have_the_bits_of_one() -> None:
    """Interpreted in float32: its step is the same for all leaves."""
    dtype = torch.bfloat16 if is_on_gpu() else torch.float32
    for inputs in (288, 256):
        case = Case(4, 40, inputs, 8, dtype, dtype)
        x, weight, bias = case.operands()
        expected = TritonKernels().linear_of_leaves(x, weight, bias, case.ends, dtype)
        for size in SIZES:
            parts = parts_of(case, size, x, weight, bias)
            assert torch.equal(tree_sum(parts).to(dtype), expected), (inputs, size)
        # Controls: as they arrive; and the bias on each rank.
        parts = parts_of(case, 8, x, weight, bias)
        assert not torch.equal(sum(parts).to(torch.float32), tree_sum(parts)), inputs
        biased = [part + bias.float() for part in parts]
        assert not torch.equal(tree_sum(biased).to(dtype), expected)


def control_a_moved_end_has_other_bits() -> None:
    """Ends are part of the definition: a granule more in one leaf, or another number of leaves."""
    dtype = torch.float32
    case = Case(4, 16, 288, 8, dtype, dtype)
    x, weight, _ = case.operands()
    expected = linear_of_leaves(x, weight, None, case.ends, dtype)
    tile = SMALL[0]
    moved = (case.ends[0] - GRANULE, *case.ends[1:])
    other = replace_ends(case, moved)
    assert not torch.equal(definition(other, x, weight, None, tile), definition(case, x, weight, None, tile))
    two = leaf_bounds(case.inputs, 2)[1:]
    assert not torch.equal(linear_of_leaves(x, weight, None, two, dtype), expected)
    try:
        cut_of(moved)
    except AssertionError:
        return
    raise AssertionError("leaves of other lengths were cut")


def replace_ends(case: Case, ends: tuple[int, ...]) -> Case:
    class Moved(Case):
        @property
        def ends(self) -> tuple[int, ...]:
            return ends

    return Moved(case.rows, case.outputs, case.inputs, case.num_leaves, case.dtype, case.result)


def a_leaf_reads_nothing_of_the_next() -> None:
    """Steps that pass a leaf's end are zero past it in both operands: infinity times zero would be NaN."""
    case = Case(3, 24, 80, 4, half(), torch.float32)
    x, weight, _ = case.operands()
    x[:, case.ends[0]], weight[:, case.ends[0]] = float("inf"), 1.0
    assert case.ends[0] == 20
    for choice in choices(case):
        found = linear_of_leaves(x, weight, None, case.ends, torch.float32, choice)
        assert torch.equal(found, torch.full_like(found, float("inf"))), choice


def ranks_add_float32_parts_by_the_tree() -> None:
    """In one round, in two and in pieces, alone and with the norm behind them."""
    for size, dtype in ((2, torch.float32), (4, half()), (8, torch.float32)):
        parts = [torch.randn(4, 24) * 10.0 ** (rank % 3) for rank in range(size)]
        expected, weight, residual = tree_sum(parts).to(dtype), torch.randn(24).to(dtype), torch.randn(4, 24).to(dtype)
        stream = residual.clone()
        normed = rows.add_rms_norm(expected, stream, weight, 1e-5)
        for room, one_round in ((4096, 4096), (4096, 64), (256, 64))[0 if size == 4 else 1 : 3 if size == 4 else 2]:
            peer_sums.ONE_ROUND_BYTES = one_round
            streams = [residual.clone() for _ in parts]

            def add(sums: PeerSums, rank: int, given: tuple = (parts, streams, dtype, weight)) -> Tensor:
                ours, own, kind, scales = given
                total = sums.sum_parts(ours[rank].clone(), kind)
                return torch.cat((total, sums.all_reduce_add_rms_norm(ours[rank].clone(), own[rank], scales, 1e-5)))

            for found in Peers(size, room, adds_by_tree=True).on_each(add):
                assert torch.equal(found, torch.cat((expected, normed))), (size, dtype, room, one_round)
            assert all(torch.equal(each, stream) for each in streams)
        # Control: in the order of ranks other bits, from four on.
        in_order = Peers(size, 4096).on_each(lambda sums, rank, given=parts: sums.all_reduce(given[rank].clone()))
        assert torch.equal(in_order[0], tree_sum(parts)) == (size == 2)


def control_levels_in_one_place_have_other_bits() -> None:
    """A counter that forgets a level: leaves are added as they come."""
    case = Case(4, 16, 256, 8, torch.float32, torch.float32)
    x, weight, _ = case.operands()
    tile = SMALL[0]
    bounds = zip((0, *case.ends), case.ends, strict=False)
    sums = [matmul.linear(x[:, a:b], weight[:, a:b], None, tile, torch.float32) for a, b in bounds]
    in_order = sums[0]
    for each in sums[1:]:
        in_order = in_order + each
    assert not torch.equal(in_order, linear_of_leaves(x, weight, None, case.ends, case.result, LeafTile(tile, True)))


def interpreted_kernels_are_both_launched() -> None:
    """By the choice of tiles itself: few rows keep sums in registers, and many rows do not."""
    cut, chip = cut_of(leaf_bounds(14336, 8)[1:]), tiles.INTERPRETED
    few, many = (leaf_matmul.estimated(count, 4096, 14336, cut, chip) for count in (16, 2048))
    assert few.in_registers
    assert not many.in_registers
    assert few.tile.rows < many.tile.rows
    assert leaf_kernels.linear_of_leaves is not leaf_kernels.linear_of_leaf_pairs


CASES: tuple[Callable[[], None], ...] = (
    every_tile_and_way_is_the_tree_of_its_leaves,
    a_row_has_the_same_bits_alone,
    chosen_tiles_have_the_same_bits,
    two_four_and_eight_ranks_have_the_bits_of_one,
    a_leaf_reads_nothing_of_the_next,
    ranks_add_float32_parts_by_the_tree,
    interpreted_kernels_are_both_launched,
    control_a_moved_end_has_other_bits,
    control_levels_in_one_place_have_other_bits,
)


def main() -> None:
    set_device()
    if is_on_gpu():
        with multiprocessing.get_context("spawn").Pool(NUM_PROCESSES) as pool:
            pool.map(compile_one, range(NUM_PROCESSES))
    report(CASES)


if __name__ == "__main__":
    main()
