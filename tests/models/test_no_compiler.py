"""Where no compiler is: everything works in plain torch, right within the same tolerances, and says so once."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import ranks

TESTS = Path(__file__).parent
EXPLAINED = "plain torch computes where native kernels would"
GREEDY = """
from spmd_worker import LLM, SamplingParams
import sys, logging
logging.basicConfig(level=logging.WARNING)
with LLM(sys.argv[1], num_blocks=64, device="cpu") as llm:
    outputs = llm.generate(["add 1 2 =", "add 3 4 ="], SamplingParams(max_tokens=8, temperature=0), use_tqdm=False)
    print([output.outputs[0].text for output in outputs])
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """No program can be found, and nothing was built before."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    inherited = {name: value for name, value in os.environ.items() if name not in ("CXX", "CC")}
    return {
        **inherited,
        "PATH": str(tmp_path / "bin"),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "PYTHONPATH": str(ranks.REPOSITORY),
    }


def generate(environment: dict[str, str]) -> subprocess.CompletedProcess:
    command = [sys.executable, "-c", GREEDY, str(ranks.REPOSITORY / "scripts" / "demo" / "model")]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.matrix
def test_without_a_compiler_it_works_and_says_so_once(environment: dict[str, str]):
    done = generate(environment)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count(EXPLAINED) == 1, done.stderr
    assert "no C++ compiler" in done.stderr
    with_compiler = generate({**os.environ, "PYTHONPATH": environment["PYTHONPATH"]})
    assert EXPLAINED not in with_compiler.stderr, "the control"
    assert with_compiler.stdout == done.stdout


@pytest.mark.matrix
def test_without_a_compiler_models_are_still_transformers(environment: dict[str, str]):
    names = (
        "test_against_transformers.py",
        "test_greedy_against_transformers.py::test_greedy_tokens_of_prompts_alone_are_transformers",
    )
    files = [str(TESTS / name) for name in names]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-m",
        "not matrix and not stress and not gpu",
        "-p",
        "no:cacheprovider",
        *files,
    ]
    done = subprocess.run(
        command, env=environment, cwd=ranks.REPOSITORY, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:]
