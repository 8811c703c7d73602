"""Choice of tiles, the user's table, and tiles that do not work: without a GPU, kernels replaced by stubs."""

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import triton
from triton.runtime.errors import OutOfResources

from spmd_worker.ops.kernels.triton import fp8, leaf_matmul, matmul, matmul_kernels, tile_files, tile_table, tiles
from spmd_worker.ops.kernels.triton.tiles import BUCKETS, ROWS, Chip, Tile
from spmd_worker.ranks.leaves import leaf_bounds

pytestmark = pytest.mark.matrix
CPU = torch.device("cpu")
CHIPS = (
    tiles.INTERPRETED,
    Chip("A100", (8, 0), 108, 166_912),
    Chip("L4", (8, 9), 58, 101_376),
    Chip("B200", (10, 0), 148, 232_448),
    Chip("RTX 5090", (12, 0), 170, 101_376),
)
SHAPES = ((6144, 4096), (4096, 14336), (128256, 4096), (960, 576), (72, 40), (16, 16))
KEY = (False, 48, 64)
ENTRY = tuple(Tile(16, 16, 16, 4, number + 2) for number in range(len(ROWS)))


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for cached in (matmul._tiles, matmul._table):
        cached.cache_clear()
    monkeypatch.setattr(matmul, "REPLACED", {})
    yield
    for cached in (matmul._tiles, matmul._table):
        cached.cache_clear()


def chosen(num_rows: int) -> Tile:
    return matmul.tile_for(num_rows, 48, 64, torch.bfloat16, CPU, is_gated=False)


@pytest.mark.parametrize("chip", CHIPS, ids=lambda chip: chip.name)
def test_estimated_tiles_fit_every_chip(chip: Chip):
    for outputs, inputs in SHAPES:
        for is_gated in (False, True):
            for rows in ROWS:
                tile = tiles.estimated(rows, outputs, inputs, chip, is_gated=is_gated)
                assert tiles.fits(tile, chip, is_gated=is_gated)
                assert chip.capability >= (9, 0) or not (tile.x_by_tma or tile.weight_by_tma or tile.out_by_tma)
    # Control: a tile with more stages does not fit, nor fewer rows than tcgen05 takes.
    assert not tiles.fits(Tile(128, 256, 64, 8, 5), chip, is_gated=False)
    assert tiles.fits(Tile(16, 32, 64, 4, 2), chip, is_gated=False) == (chip.capability[0] != 10)


def test_shipped_tiles_fit_and_cover_all_buckets():
    for (is_gated, outputs, inputs), entry in tile_table.shipped(tiles.INTERPRETED).items():
        assert len(entry) == len(ROWS)
        assert all(tiles.fits(tile, tiles.INTERPRETED, is_gated=is_gated) for tile in entry), (outputs, inputs)
    for (_, inputs, num_leaves), entry in tile_table.LEAVES.items():
        assert entry.keys() <= set(range(len(ROWS)))
        cut = leaf_matmul.cut_of(leaf_bounds(inputs, num_leaves)[1:])
        assert all(tiles.fits(tile, tiles.INTERPRETED, is_gated=False) for tile, _ in entry.values())
        assert all(tile.inputs <= cut.divisor for tile, _ in entry.values())
    other = replace(tiles.INTERPRETED, num_multiprocessors=114)
    assert tile_table.shipped(other) == {}


def test_chips_without_tma_get_no_leaf_tiles_of_it():
    """Regression: tiles of sm_90 with steps as short as leaves were offered to every chip."""
    cut = leaf_matmul.cut_of(leaf_bounds(2880, 8)[1:])
    found = leaf_matmul.family(cut, Chip("A100", (8, 0), 108, 163 * 1024))
    assert {each.tile.inputs for each in found} == {cut.divisor}
    assert not any(each.tile.x_by_tma or each.tile.weight_by_tma or each.tile.out_by_tma for each in found)


def test_measured_leaf_tiles_replace_estimates(monkeypatch: pytest.MonkeyPatch):
    """Of the buckets that were measured, on chips of that kind."""
    cut, measured = leaf_matmul.cut_of(leaf_bounds(1024, 8)[1:]), leaf_matmul.LeafTile(Tile(16, 64, 64, 4, 3), False)
    before = [leaf_matmul.tile_for(rows, 48, 1024, cut, torch.bfloat16, CPU) for rows in ROWS]
    assert measured not in before
    monkeypatch.setitem(tile_table.LEAVES, (48, 1024, 8), {2: (measured.tile, measured.in_registers)})
    leaf_matmul._tiles.cache_clear()
    found = [leaf_matmul.tile_for(rows, 48, 1024, cut, torch.bfloat16, CPU) for rows in ROWS]
    leaf_matmul._tiles.cache_clear()
    assert found == [*before[:2], measured, *before[3:]]
    assert tile_table.shipped_leaves(replace(tiles.INTERPRETED, num_multiprocessors=114), (48, 1024, 8)) == {}


def test_measured_fp8_tiles_replace_estimates(monkeypatch: pytest.MonkeyPatch):
    """Without scales of groups. Controls: other inputs, another chip, groups."""
    measured = fp8.Fp8Tile(64, 64, 4, 4, 2)
    monkeypatch.setitem(fp8.MEASURED, (False, 48, 1024), {2: measured})
    monkeypatch.setattr(fp8, "capability", lambda device: (9, 0))
    monkeypatch.setattr(fp8, "num_programs", lambda device, each=1: 132 * each)
    assert fp8.tile_for(CPU, 64, 48, 1024, is_gated=False) == measured
    others = [(64, 48, 512, False), (16, 48, 1024, False), (64, 48, 1024, True)]
    assert measured not in [fp8.tile_for(CPU, *sizes, is_gated=gated) for *sizes, gated in others]
    assert fp8.tile_for(CPU, 64, 48, 1024, is_gated=False, has_groups=True) != measured
    monkeypatch.setattr(fp8, "num_programs", lambda device, each=1: 114 * each)
    assert fp8.tile_for(CPU, 64, 48, 1024, is_gated=False) != measured


def test_many_fp8_gates_take_the_large_tile(monkeypatch: pytest.MonkeyPatch):
    """Of a plain matmul, as wide as both halves, from a bucket on. Controls: long inputs, groups, few tiles."""
    monkeypatch.setattr(fp8, "capability", lambda device: (9, 0))
    monkeypatch.setattr(fp8, "num_programs", lambda device, each=1: 132 * each)
    assert fp8.MOST_FUSED_ROWS in BUCKETS
    for rows in (fp8.MOST_FUSED_ROWS + 1, 256, 512, 2048):
        assert fp8.tile_for(CPU, rows, 28672, 4096, is_gated=False) == fp8.Fp8Tile(128, 256, 1, 8, 3)
    assert fp8.tile_for(CPU, 2048, 28672, 8192, is_gated=False) == fp8.Fp8Tile(128, 128, 1, 8, 6)
    others = [fp8.tile_for(CPU, 2048, 28672, 4096, is_gated=False, has_groups=True)]
    others.append(fp8.tile_for(CPU, 256, 4096, 2048, is_gated=False))
    assert {(tile.rows, tile.columns) for tile in others} == {(64, 128)}


def test_more_rows_never_get_smaller_tiles_estimated():
    for outputs, inputs in SHAPES[:3]:
        found = [tiles.estimated(rows, outputs, inputs, tiles.INTERPRETED, is_gated=False) for rows in ROWS]
        assert [tile.rows for tile in found] == sorted(tile.rows for tile in found)


def test_user_table_takes_precedence_by_bucket():
    before = chosen(1)
    path = tile_files.table_path(tiles.INTERPRETED)
    tile_files.write_table(path, tiles.INTERPRETED, {KEY: ENTRY})
    assert chosen(1) == before
    for cached in (matmul._tiles, matmul._table):
        cached.cache_clear()
    counts = (1, *(bucket for bucket in BUCKETS), *(bucket + 1 for bucket in BUCKETS))
    expected = [ENTRY[0], *ENTRY[:-1], *ENTRY[1:]]
    assert [chosen(count) for count in counts] == expected
    assert matmul.tile_for(1, 48, 65, torch.bfloat16, CPU, is_gated=False) not in ENTRY


def changed(**fields: object) -> Callable[[dict], None]:
    return lambda table: table["tiles"][0]["tiles"][3].update(fields)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda table: table.update(device="another GPU"),
        lambda table: table.update(triton="0.0"),
        lambda table: table["tiles"][0]["tiles"].pop(),
        lambda table: table["tiles"][0].pop("inputs"),
        lambda table: table.update(tiles=3),
        changed(rows=24),
        changed(rows=8),
        changed(columns=512),
        changed(num_stages=0),
        changed(num_warps="4"),
        changed(x_by_tma=1),
        changed(rows=256, columns=256, inputs=256),
    ],
)
def test_bad_table_is_reported_and_ignored(spoil: Callable[[dict], None], caplog: pytest.LogCaptureFixture):
    path = tile_files.table_path(tiles.INTERPRETED)
    tile_files.write_table(path, tiles.INTERPRETED, {KEY: ENTRY})
    table = json.loads(path.read_text())
    spoil(table)
    path.write_text(json.dumps(table))
    assert tile_files.read_table(tiles.INTERPRETED) == {}
    assert f"{path} is not used" in caplog.text
    assert "tune_kernels.py" in caplog.text


@pytest.mark.parametrize("content", [b"{", b"\xff\xfe", b"[]", b'{"tiles": {}}'])
def test_unreadable_table_is_reported_and_ignored(content: bytes, caplog: pytest.LogCaptureFixture):
    path = tile_files.table_path(tiles.INTERPRETED)
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    assert tile_files.read_table(tiles.INTERPRETED) == {}
    assert "is not used" in caplog.text


def test_table_path_names_device_and_triton(monkeypatch: pytest.MonkeyPatch):
    path = tile_files.table_path(Chip("NVIDIA H100 80GB HBM3", (9, 0), 132, 232_448))
    assert path.name == f"nvidia-h100-80gb-hbm3-triton-{triton.__version__}.json"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", "")
    monkeypatch.setattr("os.path.expanduser", lambda path: path)
    assert tile_files.table_path(tiles.INTERPRETED) is None


class Picky:
    """In a kernel's place: works only for tiles that `works` accepts; notes those it was launched with."""

    def __init__(self, works: Callable[[dict], bool], error: Exception) -> None:
        self.works, self.error, self.launched = works, error, []

    def __getitem__(self, grid: tuple[int, ...]) -> "Picky":
        return self

    def __call__(self, *arguments: object, **constants: object) -> None:
        self.launched.append((constants["BM"], constants["BN"], constants["SPECIALIZED"]))
        if not self.works(constants):
            raise self.error


X, WEIGHT = torch.zeros(130, 64, dtype=torch.bfloat16), torch.zeros(256, 64, dtype=torch.bfloat16)
LARGE = Tile(128, 256, 64, 8, 3, is_specialized=True)


@pytest.mark.parametrize(
    "error", [OutOfResources(300_000, 232_448, "shared memory"), RuntimeError("PassManager::run failed")]
)
def test_failing_tile_is_replaced_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception
):
    caplog.set_level(logging.WARNING)
    kernel = Picky(lambda constants: not constants["SPECIALIZED"], error)
    monkeypatch.setattr(matmul_kernels, "linear", kernel)
    for _ in range(2):
        matmul.linear(X, WEIGHT, None, LARGE)
    assert kernel.launched == [(128, 256, True), (128, 256, False), (128, 256, False)]
    assert caplog.text.count("does not work here") == 1


def test_failing_plain_tile_becomes_the_safe_one(monkeypatch: pytest.MonkeyPatch):
    error = OutOfResources(300_000, 100_000, "shared memory")
    kernel = Picky(lambda constants: constants["BM"] == tiles.SAFE.rows, error)
    monkeypatch.setattr(matmul_kernels, "linear", kernel)
    matmul.linear(X, WEIGHT, None, LARGE)
    assert [each[:2] for each in kernel.launched] == [(128, 256), (128, 256), (64, 64)]


@pytest.mark.parametrize("error", [RuntimeError("CUDA error: an illegal memory access"), ValueError("other")])
def test_other_errors_replace_no_tile(monkeypatch: pytest.MonkeyPatch, error: Exception):
    monkeypatch.setattr(matmul_kernels, "linear", Picky(lambda constants: False, error))
    with pytest.raises(type(error)):
        matmul.linear(X, WEIGHT, None, LARGE)
    assert matmul.REPLACED == {}


def test_safe_tile_that_fails_raises(monkeypatch: pytest.MonkeyPatch):
    error = OutOfResources(300_000, 100_000, "shared memory")
    monkeypatch.setattr(matmul_kernels, "gated_linear", Picky(lambda constants: False, error))
    with pytest.raises(OutOfResources):
        matmul.gated_linear(X, WEIGHT, None, LARGE)


def test_few_rows_go_by_pointer(monkeypatch: pytest.MonkeyPatch):
    """And what TMA cannot describe."""
    ways = []

    class Noted(Picky):
        def __call__(self, *arguments: object, **constants: object) -> None:
            ways.append("".join("pt"[constants[name]] for name in ("X_BY_TMA", "WEIGHT_BY_TMA", "OUT_BY_TMA")))

    monkeypatch.setattr(matmul_kernels, "linear", Noted(lambda constants: True, ValueError()))
    tile = Tile(64, 64, 64, 4, 4)
    matmul.linear(X, WEIGHT, None, tile)
    matmul.linear(X[:63], WEIGHT, None, tile)
    matmul.linear(X[:, 1:], WEIGHT[:, 1:], None, tile)
    matmul.linear(X, WEIGHT[:63], None, tile)
    assert ways == ["ttt", "ptt", "ppt", "tpp"]


def test_warm_up_rows_launch_every_kernel():
    """Of any tiles: each bucket's, with fewer rows than they have, and with as many."""
    for max_rows in (1, 15, 64, 100, 512, 513, 4096):
        counts = matmul.warm_up_rows(max_rows)
        assert max(counts) <= max_rows
        for tile_rows in (16, 32, 64, 128, 256):
            for first, last in zip((1, *(each + 1 for each in BUCKETS)), (*BUCKETS, max_rows), strict=True):
                wanted = {count >= tile_rows for count in range(first, min(last, max_rows) + 1)}
                assert wanted == {count >= tile_rows for count in counts if first <= count <= last}
