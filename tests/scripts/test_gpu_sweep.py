"""The sweep of a GPU's tiles, without a GPU: candidates, entries of tables, and other bits."""

import importlib
import json
import os
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from unittest import mock

import pytest
import torch
from ranks import REPOSITORY
from waiting import LIMIT_S

from spmd_worker.ops.kernels.triton import fp8, leaf_matmul, matmul, tiles
from spmd_worker.ops.kernels.triton.tiles import Tile

pytestmark = pytest.mark.matrix
H200 = tiles.Chip("NVIDIA H200", (9, 0), 132, 232_448)


@pytest.fixture(scope="module")
def subjects():
    sys.path.insert(0, str(REPOSITORY / "scripts"))
    try:
        yield importlib.import_module("gpu_tiles")
    finally:
        sys.path.remove(str(REPOSITORY / "scripts"))


@pytest.fixture
def _on_h200(monkeypatch: pytest.MonkeyPatch):
    for module in (tiles, matmul, leaf_matmul):
        monkeypatch.setattr(module, "chip_of", lambda device: H200)
    monkeypatch.setattr(fp8, "capability", lambda device: (9, 0))
    monkeypatch.setattr(fp8, "num_programs", lambda device, each=1: 132 * each)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))


@pytest.mark.usefixtures("_on_h200")
def test_candidates_begin_with_todays_tile_and_fit(subjects: ModuleType):
    device, hybrids = torch.device("cuda"), importlib.import_module("gpu_hybrid_tiles")
    for kind in hybrids.ALL_SUBJECTS.values():
        for subject in kind(is_dry=False):
            found = subject.candidates(device)
            assert 2 <= len(found) <= 24, subject.name
            assert len(set(found)) == len(found), subject.name
            assert hybrids.subject_of(subject.kind, json.loads(json.dumps(asdict(subject)))) == subject
    few = subjects.Matmul("down", 4096, 14336, False, 1).candidates(device)
    assert few[0] == matmul.tile_for(1, 4096, 14336, torch.bfloat16, device, is_gated=False)
    assert {tile.out_by_tma for tile in few if tile.rows == 16} == {True, False}
    assert all(tiles.fits(tile, H200, is_gated=False) for tile in few)


@pytest.mark.usefixtures("_on_h200")
def test_results_become_entries_of_tables(subjects: ModuleType):
    """What they say in Python is the fastest over the rows of a bucket."""
    device = torch.device("cuda")
    for kind, read in (("matmul", Tile), ("fp8", fp8.Fp8Tile), ("leaves", leaf_matmul.LeafTile)):
        results, fastest = [], {}
        for subject in subjects.SUBJECTS[kind](is_dry=False):
            found = subject.candidates(device)
            times = {str(each): 2.0 for each in found} | {str(found[0]): 1.0}
            results.append({"subject": asdict(subject), "name": subject.name, "library": 3.0, "times": times})
            fastest[subject.outputs, subject.inputs, matmul.bucket_of(subject.rows)] = found[0]
        names = {"Tile": Tile, "Fp8Tile": fp8.Fp8Tile}
        entries = eval("{" + "\n".join(subjects.SUBJECTS[kind].entries(results)) + "}", names)
        for (outputs, inputs, bucket), tile in fastest.items():
            sizes = slice(0, 2) if kind == "leaves" else slice(1, 3)
            given = next(found for key, found in entries.items() if key[sizes] == (outputs, inputs))[bucket]
            assert (read(*given) if kind == "leaves" else given) == tile, (kind, outputs, inputs, bucket)


def test_fastest_is_fast_with_all_rows_of_a_bucket(subjects: ModuleType):
    def result(rows: int, **times: float) -> dict[str, object]:
        return {"subject": {"rows": rows}, "times": times, "library": 1.0, "today": "a"}

    assert subjects._best([result(1, a=1.0, b=3.0), result(16, a=2.0, b=1.9)])[0] == "a"
    assert subjects._best([result(1, a=1.0), result(16, b=1.9)]) == ("a", "not measured")


def test_process_compiles_several_kernels_on_indexed_device(subjects: ModuleType, monkeypatch: pytest.MonkeyPatch):
    """A device without an index failed each thread that compiles, and so each kernel."""
    sweep, devices, compiled = importlib.import_module("gpu_sweep"), [], []

    class Four(subjects.Subject):
        def candidates(self, device: torch.device) -> list[str]:
            return ["a", "b", "c", "d"]

        def operands(self, device: torch.device, num_copies: int) -> int:
            return num_copies

        def calls(self, operands: int, candidate: str) -> list:
            if candidate == "b":
                raise ValueError("does not fit")
            return [lambda: compiled.append(candidate)]

        def work(self) -> tuple[float, float]:
            return 0.0, 0.0

        @classmethod
        def all(cls, *, is_dry: bool) -> list:
            return []

    def compiling(device: torch.device, num_threads: int) -> nullcontext[None]:
        devices.append(device)
        return nullcontext()

    monkeypatch.setattr(sweep, "subject_of", lambda kind, fields: Four(**fields))
    monkeypatch.setattr(sweep, "compiling", compiling)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert sweep.compile_some("four", {"name": "four"}, [0, 1, 2]) == ["ValueError: does not fit"]
    assert (compiled, devices) == (["a", "c"], [torch.device("cuda", 1)])


@pytest.mark.stress
def test_interpreted_sweep_measures_all_kinds(tmp_path: Path):
    variables = {"TRITON_INTERPRET": "1", "OPENBLAS_CORETYPE": "Nehalem", "XDG_CACHE_HOME": str(tmp_path)}
    variables["PYTHONPATH"] = str(REPOSITORY)
    command = [sys.executable, str(REPOSITORY / "scripts" / "gpu_sweep.py"), "--dry"]
    done = subprocess.run(
        command, env={**os.environ, **variables}, capture_output=True, text=True, check=True, timeout=LIMIT_S
    )
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["measured"] == found["of"] >= 10
    assert found["left_out"] == {}


def test_tile_with_other_bits_is_named(subjects: ModuleType):
    sweep = importlib.import_module("gpu_sweep")
    subject = subjects.Matmul("tiny", 24, 32, False, 3)
    first, second = Tile(16, 16, 16, 4, 2), Tile(32, 16, 16, 4, 2)
    of_wrong = mock.patch.object(
        subjects.Matmul, "calls", lambda self, operands, tile: [lambda: operands[0] + (tile == second)]
    )
    with of_wrong, mock.patch.object(subjects.Matmul, "candidates", return_value=[first, second]):
        result = sweep.measured(subject, sweep.NoTimer(), torch.device("cpu"), float("inf"))
    assert list(result.times) == [str(first)]
    assert result.wrong == [f"{second}: other bits"]
