"""Kernels of a GPU, without one: interpreted, and compiled for chips that are not there. In processes of their own,
because triton is told at its import which of the two it is.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from ranks import IMPORT_PATH

HERE = Path(__file__).parent
GATE_CASES: dict[str, tuple[tuple[str, ...], int]] = {
    "triton_cases.py": ((), 10),
    "triton_matmul_cases.py": ((), 8),
    "triton_leaves_cases.py": ((), 9),
    "triton_attention_cases.py": (("gate",), 16),
    "triton_sampling_cases.py": (("gate",), 6),
    "triton_experts_cases.py": (("gate",), 4),
    "triton_stored_experts_cases.py": (("gate",), 4),
    "triton_quantised_cases.py": (("gate",), 4),
    "triton_adapter_cases.py": (("gate",), 7),
    "triton_expert_adapter_cases.py": (("gate",), 3),
    "triton_recurrent_cases.py": (("gate",), 8),
    "triton_latent_cases.py": (("gate",), 5),
    "triton_listed_cases.py": (("gate",), 6),
    "triton_tower_cases.py": (("gate",), 1),
    "triton_cross_cases.py": (("gate",), 1),
}
"""Arguments of scripts, and how many cases these run at least. Each runs all of its cases on a GPU."""
ALL_CASES = {
    "triton_experts_cases.py": ((), 19),
    "triton_stored_experts_cases.py": ((), 12),
    "triton_quantised_cases.py": ((), 23),
    "triton_adapter_cases.py": ((), 14),
    "triton_expert_adapter_cases.py": ((), 6),
    "triton_sampling_cases.py": (("long",), 17),
    "triton_attention_cases.py": (("wide",), 16),
    "triton_recurrent_cases.py": ((), 10),
    "triton_latent_cases.py": ((), 5),
    "triton_listed_cases.py": ((), 6),
    "triton_cross_cases.py": ((), 3),
    "triton_tower_cases.py": ((), 3),
}
ENGINES = {
    "triton_engine.py": 12,
    "triton_graphs.py": 16,
    "triton_leaves_engine.py": 7,
    "triton_experts_engine.py": 26,
    "triton_stored_engine.py": 19,
    "triton_adapters_engine.py": 17,
    "triton_expert_adapters_engine.py": 17,
    "triton_states_engine.py": 10,
    "triton_windows_engine.py": 4,
    "triton_listed_engine.py": 10,
}
"""Scripts, and how many comparisons of an engine they make."""
LONGEST_S = 500.0
LONGEST_OF_STRESS_S = 1150.0


def variables_for(cache: Path, *, interpret: bool = False) -> dict[str, str]:
    variables = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    folders = os.pathsep.join(IMPORT_PATH)
    variables |= {"PYTHONPATH": folders, "OMP_NUM_THREADS": "1", "TRITON_CACHE_DIR": str(cache)}
    if interpret:
        # Interpreted matmuls are numpy's. OpenBLAS adds up some rows of a tile in another order than others where the
        # processor has AVX2 and no AVX-512; in its kernels for older ones all rows of a tile are alike.
        variables |= {"TRITON_INTERPRET": "1", "OPENBLAS_CORETYPE": "Nehalem"}
    return variables


def run_alone(script: str, *arguments: str, cache: Path, interpret: bool = False, timeout_s: float = LONGEST_S) -> dict:
    variables = variables_for(cache, interpret=interpret)
    command = [sys.executable, str(HERE / script), *arguments]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=timeout_s, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., object]]:
    """A function that runs a script in a fork of a process that has imported what all of them do."""
    folder = tmp_path_factory.mktemp("interpreted")
    command, variables = [sys.executable, str(HERE / "triton_forks.py")], variables_for(folder, interpret=True)
    with (
        (folder / "errors").open("w") as errors,
        subprocess.Popen(
            command, env=variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
        ) as process,
    ):
        scripts, answers = process.stdin, process.stdout
        assert scripts is not None
        assert answers is not None

        def run(script: str, *arguments: str) -> object:
            print(json.dumps([str(HERE / script), *arguments]), file=scripts, flush=True)
            answer = answers.readline()
            assert answer, (folder / "errors").read_text()
            return json.loads(answer)

        yield run
        scripts.close()


@pytest.mark.matrix
@pytest.mark.timeout(600)
@pytest.mark.parametrize("script", GATE_CASES)
def test_interpreted_kernels_have_row_independent_bits(interpreted: Callable[..., object], script: str):
    arguments, num_least = GATE_CASES[script]
    found = interpreted(script, *arguments)
    assert isinstance(found, dict), found
    assert len(found) >= num_least
    assert {name: error for name, error in found.items() if error} == {}


@pytest.mark.stress
@pytest.mark.parametrize("script", ALL_CASES)
def test_all_interpreted_cases_are_right(tmp_path: Path, script: str):
    arguments, num_cases = ALL_CASES[script]
    found = run_alone(script, *arguments, cache=tmp_path, interpret=True, timeout_s=LONGEST_OF_STRESS_S)
    assert len(found) == num_cases
    assert {name: error for name, error in found.items() if error} == {}


@pytest.mark.stress
@pytest.mark.parametrize("script", ENGINES)
def test_interpreted_engines_agree_with_what_they_imitate(tmp_path: Path, script: str):
    """The CPU, launches without graphs, dequantised experts."""
    found = run_alone(script, cache=tmp_path, interpret=True, timeout_s=LONGEST_OF_STRESS_S)
    assert len(found) == ENGINES[script]
    assert [name for name, is_so in found.items() if not is_so] == []


@pytest.mark.stress
@pytest.mark.timeout(600)
def test_kernels_compile_for_sm_90_without_spills(tmp_path: Path):
    found = run_alone("compile_gate.py", "--planted", "90", cache=tmp_path)
    assert found["wrong"] == {}
    assert len(found["resources"]) >= 8
    # Controls: each failure that was planted is found, and called what it is.
    assert len(found["planted"]) == 8
    for word, wrong in found["planted"].items():
        assert any(word in each for each in wrong), (word, wrong)


@pytest.mark.gpu
@pytest.mark.parametrize("script", GATE_CASES)
def test_kernels_on_a_gpu_have_row_independent_bits(tmp_path: Path, script: str):
    found = run_alone(script, "cuda", cache=tmp_path)
    assert {name: error for name, error in found.items() if error} == {}


@pytest.mark.stress
@pytest.mark.parametrize("capability", ["80", "90", "100", "120"])
@pytest.mark.parametrize("part", ["0/4", "1/4", "2/4", "3/4"])
def test_kernels_compile_for_every_chip_and_model(tmp_path: Path, capability: str, part: str):
    """Up to 850 kernels a chip, half a second of a core each: in parts, so that a busy machine ends each in time."""
    found = run_alone("compile_gate.py", "--all", part, capability, cache=tmp_path, timeout_s=LONGEST_OF_STRESS_S)
    assert found["wrong"] == {}
    assert len(found["resources"]) > 50
