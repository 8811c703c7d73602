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
LEAST_CASES = {
    "triton_cases.py": 10,
    "triton_matmul_cases.py": 8,
    "triton_attention_cases.py": 12,
    "triton_sampling_cases.py": 4,
}
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
@pytest.mark.parametrize("script", LEAST_CASES)
def test_interpreted_kernels_have_row_independent_bits(tmp_path: Path, script: str):
    found = run_alone(script, cache=tmp_path, interpret=True)
    assert len(found) >= LEAST_CASES[script]
    assert {name: error for name, error in found.items() if error} == {}


@pytest.mark.matrix
@pytest.mark.timeout(600)
def test_interpreted_quantised_kernels_are_their_definitions(tmp_path: Path):
    found = run_alone("triton_quantised_cases.py", "gate", cache=tmp_path, interpret=True)
    assert len(found) >= 4
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


@pytest.mark.matrix
@pytest.mark.timeout(600)
@pytest.mark.parametrize("part", ["experts", "stored_experts"])
def test_interpreted_kernels_of_parts_have_row_independent_bits(tmp_path: Path, part: str):
    found = run_alone(f"triton_{part}_cases.py", "gate", cache=tmp_path, interpret=True)
    assert len(found) >= 4
    assert {name: error for name, error in found.items() if error} == {}


@pytest.mark.stress
@pytest.mark.timeout(600)
@pytest.mark.parametrize("part", ["experts", "stored_experts"])
def test_all_interpreted_cases_of_parts(tmp_path: Path, part: str):
    found = run_alone(f"triton_{part}_cases.py", cache=tmp_path, interpret=True)
    assert len(found) >= 8
    assert {name: error for name, error in found.items() if error} == {}


@pytest.mark.stress
@pytest.mark.timeout(1200)
def test_interpreted_experts_generate_the_tokens_of_the_cpu(tmp_path: Path):
    found = run_alone("triton_experts_engine.py", cache=tmp_path, interpret=True, timeout_s=1150)
    assert len(found) >= 18
    assert [name for name, is_so in found.items() if not is_so] == []


@pytest.mark.stress
@pytest.mark.timeout(1200)
def test_stored_experts_generate_the_tokens_of_dequantised_ones(tmp_path: Path):
    found = run_alone("triton_stored_engine.py", cache=tmp_path, interpret=True, timeout_s=1150)
    assert len(found) >= 18
    assert [name for name, is_so in found.items() if not is_so] == []


@pytest.mark.stress
@pytest.mark.timeout(600)
def test_replayed_steps_have_the_bits_of_launched_steps(tmp_path: Path):
    found = run_alone("triton_graphs.py", cache=tmp_path, interpret=True)
    assert len(found) == 14
    assert [name for name, is_so in found.items() if not is_so] == []


@pytest.mark.stress
def test_interpreted_engine_generates_the_tokens_of_the_cpu(tmp_path: Path):
    found = run_alone("triton_engine.py", cache=tmp_path, interpret=True, timeout_s=1150)
    assert len(found) == 9
    assert [name for name, is_so in found.items() if not is_so] == []


@pytest.mark.stress
@pytest.mark.timeout(1200)
def test_interpreted_sampling_is_right_over_many_steps(tmp_path: Path):
    found = run_alone("triton_sampling_cases.py", "long", cache=tmp_path, interpret=True, timeout_s=1150)
    assert len(found) == 17
    assert {name: error for name, error in found.items() if error} == {}


@pytest.mark.stress
@pytest.mark.timeout(600)
def test_interpreted_attention_takes_wide_heads(tmp_path: Path):
    found = run_alone("triton_attention_cases.py", "wide", cache=tmp_path, interpret=True)
    assert {name: error for name, error in found.items() if error} == {}


@pytest.mark.gpu
@pytest.mark.parametrize(
    "script", [*LEAST_CASES, *(f"triton_{part}_cases.py" for part in ("experts", "stored_experts", "quantised"))]
)
def test_kernels_on_a_gpu_have_row_independent_bits(tmp_path: Path, script: str):
    found = run_alone(script, "cuda", cache=tmp_path)
    assert {name: error for name, error in found.items() if error} == {}


@pytest.mark.stress
@pytest.mark.parametrize("capability", ["80", "90", "100", "120"])
def test_kernels_compile_for_every_chip_and_model(tmp_path: Path, capability: str):
    found = run_alone("compile_gate.py", "--all", capability, cache=tmp_path, timeout_s=1150)
    assert found["wrong"] == {}
