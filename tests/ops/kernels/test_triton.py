"""Kernels of a GPU, without one: interpreted, and compiled for chips that are not there. Each in a process of its own,
because triton is told at its import which of the two it is.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from ranks import IMPORT_PATH

HERE = Path(__file__).parent
LEAST_CASES = 10
LONGEST_S = 500.0


def run_alone(script: str, *arguments: str, cache: Path, interpret: bool = False, timeout_s: float = LONGEST_S) -> dict:
    variables = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    folders = os.pathsep.join(IMPORT_PATH)
    variables |= {"PYTHONPATH": folders, "OMP_NUM_THREADS": "1", "TRITON_CACHE_DIR": str(cache)}
    if interpret:
        # Interpreted matmuls are numpy's. OpenBLAS adds up some rows of a tile in another order than others where the
        # processor has AVX2 and no AVX-512; in its kernels for older ones all rows of a tile are alike.
        variables |= {"TRITON_INTERPRET": "1", "OPENBLAS_CORETYPE": "Nehalem"}
    command = [sys.executable, str(HERE / script), *arguments]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=timeout_s, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.matrix
@pytest.mark.timeout(600)
def test_interpreted_kernels_have_row_independent_bits(tmp_path: Path):
    found = run_alone("triton_cases.py", cache=tmp_path, interpret=True)
    assert len(found) >= LEAST_CASES
    assert {name: error for name, error in found.items() if error} == {}


@pytest.mark.matrix
@pytest.mark.timeout(600)
def test_interpreted_quantised_kernels_are_their_definitions(tmp_path: Path):
    found = run_alone("triton_quantised_cases.py", "gate", cache=tmp_path, interpret=True)
    assert len(found) >= LEAST_CASES
    assert {name: error for name, error in found.items() if error} == {}


@pytest.mark.stress
@pytest.mark.timeout(600)
def test_interpreted_quantised_tiles_have_equal_bits(tmp_path: Path):
    found = run_alone("triton_quantised_cases.py", cache=tmp_path, interpret=True)
    assert {name: error for name, error in found.items() if error} == {}


@pytest.mark.matrix
@pytest.mark.timeout(600)
def test_kernels_compile_for_sm_90_without_spills(tmp_path: Path):
    found = run_alone("compile_gate.py", "--planted", "90", cache=tmp_path)
    assert found["wrong"] == {}
    assert len(found["resources"]) >= 8
    # Controls: each failure that was planted is found, and called what it is.
    assert len(found["planted"]) == 5
    for word, wrong in found["planted"].items():
        assert any(word in each for each in wrong), (word, wrong)


@pytest.mark.stress
@pytest.mark.timeout(600)
def test_replayed_steps_have_the_bits_of_launched_steps(tmp_path: Path):
    found = run_alone("triton_graphs.py", cache=tmp_path, interpret=True)
    assert len(found) == 13
    assert [name for name, is_so in found.items() if not is_so] == []


@pytest.mark.stress
def test_interpreted_engine_generates_the_tokens_of_the_cpu(tmp_path: Path):
    found = run_alone("triton_engine.py", cache=tmp_path, interpret=True, timeout_s=1150)
    assert len(found) == 8
    assert [name for name, is_so in found.items() if not is_so] == []


@pytest.mark.gpu
@pytest.mark.parametrize("script", ["triton_cases.py", "triton_quantised_cases.py"])
def test_kernels_on_a_gpu_have_row_independent_bits(tmp_path: Path, script: str):
    found = run_alone(script, "cuda", cache=tmp_path)
    assert {name: error for name, error in found.items() if error} == {}


@pytest.mark.stress
@pytest.mark.parametrize("capability", ["80", "90", "100", "120"])
def test_kernels_compile_for_every_chip_and_model(tmp_path: Path, capability: str):
    found = run_alone("compile_gate.py", "--all", capability, cache=tmp_path, timeout_s=1150)
    assert found["wrong"] == {}
