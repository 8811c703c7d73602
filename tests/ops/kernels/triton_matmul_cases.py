"""Matmul kernels of a GPU, interpreted on CPU tensors, in a process of its own: see triton_cases.py.

    OPENBLAS_CORETYPE=Nehalem TRITON_INTERPRET=1 python tests/ops/kernels/triton_matmul_cases.py
                                                                  prints {case: what went wrong, or ""}
    python tests/ops/kernels/triton_matmul_cases.py cuda              the same on a GPU, with all tiles of its kind

Interpreted, a step along K is one numpy product, so only tiles with the same step have the same bits; on a GPU all do.
"""

import multiprocessing
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor
from triton_cases import report, set_device

from spmd_worker.ops.kernels.reference import ReferenceKernels
from spmd_worker.ops.kernels.triton import launching, matmul, tile_table, tiles
from spmd_worker.ops.kernels.triton.tiles import Tile

REFERENCE = ReferenceKernels()
SMALL = (
    Tile(16, 16, 16, 4, 2, False, False, False),
    Tile(16, 16, 16, 4, 2),
    Tile(32, 16, 16, 4, 2, x_by_tma=False),
    Tile(16, 32, 16, 4, 2, weight_by_tma=False),
    Tile(32, 32, 16, 4, 2, out_by_tma=False),
    Tile(64, 64, 16, 4, 2, is_specialized=True),
    Tile(16, 16, 16, 4, 2, rest_columns=16),
    Tile(16, 16, 16, 4, 2, False, False, False, rest_columns=32),
)
WIDE = (Tile(16, 32, 128, 4, 5, x_by_tma=False, rest_columns=16), Tile(128, 128, 64, 8, 3, rest_columns=64))
"""Widths that are no power of two."""
Case = tuple[int, int, int, torch.dtype]


def is_on_gpu() -> bool:
    return not launching.is_interpreted()


def tested_tiles(*, is_gated: bool) -> tuple[Tile, ...]:
    """The first is the base."""
    if not is_on_gpu():
        return tuple(tile for tile in SMALL if not (is_gated and tile.rest_columns))
    chip = tiles.chip_of(torch.device("cuda", torch.cuda.current_device()))
    shipped = [tile for key, entry in tile_table.shipped(chip).items() if key[0] == is_gated for tile in entry]
    safe = tiles.GATED_SAFE if is_gated else tiles.SAFE
    found = dict.fromkeys((safe, *tiles.family(chip, is_gated=is_gated), *shipped, *WIDE))
    by_pointers = dict.fromkeys(Tile(*sizes(tile), False, False, False) for tile in [*found][::4])
    return tuple(tile for tile in {**found, **by_pointers} if tiles.fits(tile, chip, is_gated=is_gated))


def sizes(tile: Tile) -> tuple[int, int, int, int, int]:
    return tile.rows, tile.columns, tile.inputs, tile.num_warps, tile.num_stages


def cases() -> tuple[Case, ...]:
    """Rows, outputs, inputs: fewer than a tile has, one more than a whole number of tiles, no multiples of 16."""
    if is_on_gpu():
        return (
            *((70, 328, 1040, torch.bfloat16), (257, 520, 512, torch.bfloat16), (257, 520, 512, torch.float16)),
            (5, 40, 75, torch.bfloat16),
        )
    return (5, 24, 32, torch.float32), (33, 33, 38, torch.float16)


def launches() -> Iterator[tuple[bool, Case, bool, list[Tile]]]:
    """Gated or not, case, with a bias or without, tiles. Sizes that no copy is aligned for take few tiles."""
    for is_gated in (False, True):
        every = list(tested_tiles(is_gated=is_gated))
        for case in cases():
            found = every if not is_on_gpu() or case[2] % 8 == 0 else every[:2]
            # Interpreted, each tile has one case with a bias and one without.
            for has_bias in (False, True) if case[0] == 70 else (case[0] == 33,):
                yield is_gated, case, has_bias, found


def compile_one(index: int) -> None:
    """In a process of its own: the kernels of every `NUM_PROCESSES`-th tile, for the cache."""
    torch.set_default_device("cuda")
    for is_gated, case, has_bias, found in launches():
        x, weight, bias = operands(case)
        for tile in found[index::NUM_PROCESSES]:
            multiply(x, weight, bias if has_bias else None, tile, is_gated=is_gated)


NUM_PROCESSES = 12


def operands(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """x [M, K], two halves of a weight [2 N, K], bias [2 N]."""
    m, n, k, dtype = case
    return torch.randn(m, k).to(dtype), torch.randn(2 * n, k).to(dtype) * k**-0.5, torch.randn(2 * n).to(dtype)


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None, tile: Tile, *, is_gated: bool) -> Tensor:
    """`linear` of the first half, or `gated_linear`."""
    if is_gated:
        return matmul.gated_linear(x, weight, bias, tile)
    half = len(weight) // 2
    return matmul.linear(x, weight[:half], None if bias is None else bias[:half], tile)


def expected(x: Tensor, weight: Tensor, bias: Tensor | None, *, is_gated: bool) -> Tensor:
    whole = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    return REFERENCE.silu_and_mul(whole) if is_gated else whole[:, : len(weight) // 2]


def assert_near(got: Tensor, wanted: Tensor) -> None:
    tolerance = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[got.dtype]
    difference = (got.double() - wanted).abs().max().item()
    assert difference < tolerance * max(1.0, wanted.abs().max().item()), difference


def every_tile_and_way_has_the_same_bits() -> None:
    for is_gated, case, has_bias, (base, *others) in launches():
        x, weight, bias = operands(case)
        added = bias if has_bias else None
        first = multiply(x, weight, added, base, is_gated=is_gated)
        assert_near(first, expected(x, weight, added, is_gated=is_gated))
        for tile in others:
            found = multiply(x, weight, added, tile, is_gated=is_gated)
            assert torch.equal(found, first), (tile, case, is_gated, has_bias)
    assert matmul.REPLACED == {}, matmul.REPLACED


def a_row_has_the_same_bits_alone() -> None:
    """In a tile that holds it alone, moved back from the last row, and in the middle."""
    m, n, k, dtype = (257, 520, 512, torch.bfloat16) if is_on_gpu() else (35, 24, 32, torch.float16)
    x, weight, _ = operands((m, n, k, dtype))
    for is_gated in (False, True):
        base = tested_tiles(is_gated=is_gated)[0]
        for tile in tested_tiles(is_gated=is_gated):
            whole = multiply(x, weight, None, tile, is_gated=is_gated)
            for row in (0, m - 1):
                alone = multiply(x[row : row + 1], weight, None, base, is_gated=is_gated)
                assert torch.equal(alone[0], whole[row]), (tile, row)


def chosen_tiles_have_the_same_bits() -> None:
    """By the number of rows, with nothing said about tiles; interpreted in float32, whose tile is always the same."""
    n, k, dtype = (520, 512, torch.bfloat16) if is_on_gpu() else (24, 32, torch.float32)
    x, weight, _ = operands((700 if is_on_gpu() else 40, n, k, dtype))
    half = weight[:n]
    whole, gated = matmul.linear(x, half, None), matmul.gated_linear(x, weight, None)
    for m in (1, 16, 17, 33, 64, 65, 300, 513):
        if m <= len(x):
            assert torch.equal(matmul.linear(x[:m], half, None), whole[:m]), m
            assert torch.equal(matmul.gated_linear(x[:m], weight, None), gated[:m]), m


def operands_may_be_strided_and_unaligned() -> None:
    m, n, k, dtype = (70, 72, 128, torch.bfloat16) if is_on_gpu() else (20, 16, 32, torch.float16)
    x, weight, bias = operands((m, n, k, dtype))
    room = torch.zeros(m, 3 * k + 8, dtype=dtype)
    wide, shifted = room[:, k : 2 * k].copy_(x), torch.zeros(m * k + 1, dtype=dtype)[1:].view(m, k).copy_(x)
    columns = torch.zeros(k, m, dtype=dtype).t().copy_(x)
    heavy = torch.zeros(2 * n * k + 1, dtype=dtype)[1:].view(2 * n, k).copy_(weight)
    for is_gated in (False, True):
        tile = tested_tiles(is_gated=is_gated)[1]
        first = multiply(x, weight, bias, tile, is_gated=is_gated)
        for rows in (wide, shifted, columns):
            assert torch.equal(multiply(rows, weight, bias, tile, is_gated=is_gated), first), rows.stride()
        assert torch.equal(multiply(x, heavy, bias, tile, is_gated=is_gated), first)


def gated_is_linear_and_silu() -> None:
    for case in cases():
        x, weight, bias = operands(case)
        for added in (None, bias):
            whole = matmul.linear(x, weight, added, tested_tiles(is_gated=False)[0])
            gated = matmul.gated_linear(x, weight, added, tested_tiles(is_gated=True)[0])
            assert_near(gated, REFERENCE.silu_and_mul(whole).double())


def float32_is_never_tf32() -> None:
    x, weight, _ = operands((40, 48, 256, torch.float32))
    assert_near(matmul.linear(x, weight, None), F.linear(x.double(), weight.double()))


def nothing_is_launched_for_no_rows() -> None:
    x, weight, _ = operands((4, 24, 32, torch.float32))
    assert matmul.linear(x[:0], weight, None).shape == (0, 48)
    assert matmul.gated_linear(x.view(2, 2, 32), weight, None).shape == (2, 2, 24)


def control_another_chain_has_other_bits() -> None:
    """A split of K whose sums are joined in float32; interpreted, another step along K too."""
    case = (40, 64, 512, torch.bfloat16) if is_on_gpu() else (40, 24, 96, torch.float32)
    x, weight, _ = operands(case)
    k = case[2]
    tile = tested_tiles(is_gated=False)[0]
    whole = matmul.linear(x, weight, None, tile)
    halves = [matmul.linear(x[:, part], weight[:, part], None, tile) for part in (slice(0, k // 2), slice(k // 2, k))]
    assert not torch.equal(halves[0] + halves[1], whole)
    if not is_on_gpu():
        other = matmul.linear(x, weight, None, Tile(16, 16, 32, 4, 2))
        assert not torch.equal(other, whole)
        assert_near(other, whole.double())


CASES: tuple[Callable[[], None], ...] = (
    every_tile_and_way_has_the_same_bits,
    a_row_has_the_same_bits_alone,
    chosen_tiles_have_the_same_bits,
    operands_may_be_strided_and_unaligned,
    gated_is_linear_and_silu,
    float32_is_never_tf32,
    nothing_is_launched_for_no_rows,
    control_another_chain_has_other_bits,
)


def main() -> None:
    set_device()
    if is_on_gpu():
        with multiprocessing.get_context("spawn").Pool(NUM_PROCESSES) as pool:
            pool.map(compile_one, range(NUM_PROCESSES))
    report(CASES)


if __name__ == "__main__":
    main()
