"""Without a compiler everything runs in plain torch, within the same tolerances, and one warning says so."""

import os
import sys
from pathlib import Path

import pytest
import ranks
from waiting import LIMIT_S

TESTS = Path(__file__).parent
EXPLAINED = "plain torch is used instead of native kernels"
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
    """No program is found and no library is cached."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    inherited = {name: value for name, value in os.environ.items() if name not in ("CXX", "CC")}
    return {
        **inherited,
        "PATH": str(tmp_path / "bin"),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "PYTHONPATH": str(ranks.REPOSITORY),
    }


def generate(folder: Path, environment: dict[str, str]) -> ranks.CompletedRanks:
    """Greedy ids of a new process."""
    (folder / "greedy.py").write_text(GREEDY)
    command = [folder / "greedy.py", ranks.REPOSITORY / "scripts" / "demo" / "model"]
    return ranks.run_script(command, timeout_s=LIMIT_S, env=environment)


@pytest.mark.matrix
def test_runs_without_compiler_and_warns_once(
    environment: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with_compiler = generate(tmp_path, {}).checked()
    for name in ("CXX", "CC"):
        monkeypatch.delenv(name, raising=False)
    done = generate(tmp_path, environment)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count(EXPLAINED) == 1, done.stderr
    assert "no C++ compiler" in done.stderr
    assert EXPLAINED not in with_compiler.stderr, "the control"
    assert with_compiler.stdout == done.stdout


@pytest.mark.stress
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "names",
    [
        pytest.param(
            (
                "test_against_transformers.py::test_logits_of_a_mixed_batch_are_transformers",
                "test_against_transformers.py::test_logits_computed_in_chunks_are_transformers",
            ),
            marks=pytest.mark.matrix,
            id="logits",
        ),
        pytest.param(
            ("test_greedy_against_transformers.py::test_greedy_tokens_of_prompts_alone_are_transformers",),
            marks=pytest.mark.stress,
            id="greedy",
        ),
    ],
)
def test_models_equal_transformers_without_compiler(environment: dict[str, str], names: tuple[str, ...]):
    files = [str(TESTS / name) for name in names]
    command = [
        "-m",
        "pytest",
        "-q",
        "-m",
        "not matrix and not gpu",
        "-p",
        "no:cacheprovider",
        "-k",
        "not computed_in_chunks or 7",
        *files,
    ]
    done = ranks.run_script(command, timeout_s=560, env=environment, cwd=ranks.REPOSITORY)
    assert done.returncode == 0, done.stdout[-4000:]
