"""The sweep of matmul tiles, without a GPU: shapes, candidates, and which tiles it keeps."""

import importlib.util
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from ranks import REPOSITORY
from torch import Tensor
from waiting import LIMIT_S

pytestmark = pytest.mark.matrix
SCRIPT = REPOSITORY / "scripts" / "tune_kernels.py"
DEMO = REPOSITORY / "scripts" / "demo" / "model"


@pytest.fixture(scope="module")
def tune():
    spec = importlib.util.spec_from_file_location("tune_kernels", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["tune_kernels"] = module
    spec.loader.exec_module(module)
    return module


def test_model_shapes_are_a_ranks_matmuls(tune):
    whole = {str(shape) for shape in tune.model_shapes(DEMO, 1)}
    assert whole == {"256x128", "128x128", "gated:256x128", "128x256", "288x128"}
    assert {str(shape) for shape in tune.model_shapes(DEMO / "config.json", 2)} == {
        *("128x128", "128x64", "gated:128x128", "144x128")
    }


@pytest.mark.parametrize("text", ["6144", "6144x", "x4096", "up:6144x4096", "6144x4096x2"])
def test_malformed_shape_is_rejected(tune, text: str):
    assert str(tune.Shape.parse("gated:12x8")) == "gated:12x8"
    with pytest.raises(SystemExit, match=f"--shapes {text}: "):
        tune.Shape.parse(text)


def test_candidates_fit_the_chip(tune):
    tiles = tune.tiles
    chips = (
        tiles.INTERPRETED,
        tiles.Chip("A100", (8, 0), 108, 166_912),
        tiles.Chip("L4", (8, 9), 58, 101_376),
        tiles.Chip("B200", (10, 0), 148, 232_448),
    )
    for chip in chips:
        for text in ("6144x4096", "gated:14336x4096", "576x576", "128256x4096"):
            shape = tune.Shape.parse(text)
            for rows in (8, 16, 64, 256, 2048):
                found = tune.candidates(shape, rows, chip)
                assert 2 <= len(found) <= tune.NUM_CANDIDATES
                assert len(set(found)) == len(found)
                assert all(tiles.fits(tile, chip, is_gated=shape.is_gated) for tile in found)
                by_tma = any(tile.weight_by_tma for tile in found)
                assert by_tma == (chip.capability >= (9, 0))


def test_tile_with_other_bits_is_left_out(tune, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    wrong = tune.DRY_TILES[1]

    def multiply(shape: object, x: Tensor, weight: Tensor, tile: object) -> Tensor:
        return torch.nn.functional.linear(x, weight) + (tile == wrong)

    monkeypatch.setattr(tune, "_call", multiply)
    sweep = tune.Sweep(is_dry=True, deadline=math.inf)
    entry = sweep.measure(tune.Shape(False, 24, 32))
    assert entry is not None
    assert wrong not in entry
    assert f"{tune._short(wrong)} has other bits and is left out" in capsys.readouterr().out


def test_no_time_leaves_the_shape_out(tune, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tune, "_call", lambda shape, x, weight, tile: torch.nn.functional.linear(x, weight))
    assert tune.Sweep(is_dry=True, deadline=0.0).measure(tune.Shape(False, 24, 32)) is None


@pytest.mark.stress
def test_interpreted_sweep_ends_with_its_result(tmp_path: Path):
    variables = {"TRITON_INTERPRET": "1", "OPENBLAS_CORETYPE": "Nehalem", "XDG_CACHE_HOME": str(tmp_path)}
    variables["PYTHONPATH"] = str(REPOSITORY)
    command = [sys.executable, str(SCRIPT), "--shapes", "24x32,gated:24x32", "--dry"]
    done = subprocess.run(
        command, env={**os.environ, **variables}, capture_output=True, text=True, check=True, timeout=LIMIT_S
    )
    found = json.loads(done.stdout.splitlines()[-1])
    assert set(found["shapes"]) == {"24x32", "gated:24x32"}
    assert found["table"] is None
    assert list(tmp_path.iterdir()) == []


def test_fastest_tile_is_fast_with_all_rows(tune):
    few, many = tune.Tile(16, 16, 16, 4, 2, x_by_tma=False), tune.Tile(32, 16, 16, 4, 2)
    by_pointer = tune.as_launched(many, 8)
    assert by_pointer == tune.Tile(32, 16, 16, 4, 2, x_by_tma=False)
    assert tune.as_launched(many, 32) == many
    assert tune.fastest({8: {few: 1.0, by_pointer: 3.0}, 32: {few: 2.0, many: 1.9}}) == few
    # With 8 rows by pointer, with 32 by TMA: one tile.
    assert tune.fastest({8: {few: 1.0, by_pointer: 1.1}, 32: {few: 2.0, many: 1.0}}) == many
    # What was not reached with each is not taken.
    assert tune.fastest({8: {few: 1.0}, 32: {many: 1.0}}) is None
