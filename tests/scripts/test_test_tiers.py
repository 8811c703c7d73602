"""scripts/test.sh: which tests each tier runs, and how it ends. Python is a script that says what it was asked for."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from ranks import REPOSITORY

ANSWERS = """#!/usr/bin/env bash
[[ "$*" == *pytest* ]] || exit 0
echo "asked: $*"
[[ "$*" == *"not timed"* ]] && { echo "$FIRST"; exit "$FIRST_CODE"; }
echo "$SECOND"
exit "$SECOND_CODE"
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    for name in (".venv/bin", "scripts"):
        (tmp_path / name).mkdir(parents=True)
    for name, text in {"python": ANSWERS, "ruff": "#!/bin/sh\n", "mypy": "#!/bin/sh\n"}.items():
        (tmp_path / ".venv/bin" / name).write_text(text)
        (tmp_path / ".venv/bin" / name).chmod(0o755)
    (tmp_path / "scripts/setup_env.sh").write_text("#!/bin/sh\n")
    return Path(shutil.copy(REPOSITORY / "scripts/test.sh", tmp_path / "scripts"))


def run(script: Path, *arguments: str, **variables: str) -> tuple[int, list[str]]:
    given = {
        "FIRST": "3 failed, 1290 passed, 2 skipped in 4000.50s (1:06:40)",
        "SECOND": "200 passed, 1 skipped in 1800.75s (0:30:00)",
        "FIRST_CODE": "1",
        "SECOND_CODE": "0",
    }
    environment = {**{key: each for key, each in os.environ.items() if key != "TESTS_SEED"}, **given, **variables}
    done = subprocess.run(
        ["bash", str(script), *arguments], env=environment, capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout.splitlines()


def asked(lines: list[str]) -> list[str]:
    return [line.removeprefix("asked: ") for line in lines if line.startswith("asked: ")]


def test_stress_tier_is_two_runs_with_summed_results(script: Path):
    """The output ends with both closing lines and their sum."""
    code, lines = run(script, "--stress", "tests/test_x.py")
    beside, alone = asked(lines)
    assert beside.startswith("-m pytest -q -m stress and not timed and not gpu -n 3 ")
    assert beside.endswith(" tests/test_x.py")
    assert alone == "-m pytest -q -m stress and timed and not gpu tests/test_x.py"
    assert code == 1
    assert lines[0].startswith("stress tier, seed 1: TESTS_SEED=1 draws the same again")
    assert lines[-4:] == [
        "stress tier, seed 1:",
        "  three at a time: exit code 1, 3 failed, 1290 passed, 2 skipped in 4000.50s (1:06:40)",
        "  timed, alone: exit code 0, 200 passed, 1 skipped in 1800.75s (0:30:00)",
        "  together: 1490 passed, 3 failed, 0 errors, 3 skipped in 1:36:41",
    ]


@pytest.mark.parametrize(
    ("first", "second", "expected"), [("0", "0", 0), ("0", "1", 1), ("2", "0", 2), ("5", "0", 0), ("5", "5", 5)]
)
def test_stress_tier_fails_when_either_run_fails(script: Path, first: str, second: str, expected: int):
    """A run that has no test does not fail it."""
    code, lines = run(script, "--stress", FIRST_CODE=first, SECOND_CODE=second, TESTS_SEED="7")
    assert code == expected
    assert lines[0].startswith("stress tier, seed 7: ")


def test_other_tiers_are_one_run_with_closing_line(script: Path):
    code, lines = run(script)
    assert len(asked(lines)) == 1
    assert "-m not matrix and not stress and not gpu -n 3 --dist loadfile" in asked(lines)[0]
    assert (code, lines[-1]) == (0, "200 passed, 1 skipped in 1800.75s (0:30:00)")
    assert "-m not stress and not gpu -n 3" in asked(run(script, "--matrix")[1])[0]


@pytest.mark.parametrize("tier", [[], ["--matrix"], ["--matrix", "tests/test_x.py"]])
def test_found_types_fail_a_tier_whose_tests_pass(script: Path, tier: list[str]):
    """`.ci/run` runs mypy beside the tests."""
    (script.parents[1] / ".venv/bin/mypy").write_text("#!/bin/sh\necho 'x.py:1: error: no such type'\nexit 1\n")
    code, lines = run(script, *tier)
    assert code == 1
    assert "x.py:1: error: no such type" in lines


def test_setup_leaves_a_linked_environment_alone(tmp_path: Path):
    """`venv --clear` emptied the environment of another checkout."""
    (tmp_path / "scripts").mkdir()
    shutil.copy(REPOSITORY / "scripts/setup_env.sh", tmp_path / "scripts")
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "constraints.txt").touch()
    theirs = tmp_path / "theirs"
    (theirs / "bin").mkdir(parents=True)
    (theirs / "bin/python").symlink_to(sys.executable)
    (theirs / ".setup-stamp").write_text("/another/checkout\n1 2\nrun\n")
    (tmp_path / ".venv").symlink_to(theirs)
    done = subprocess.run(["bash", str(tmp_path / "scripts/setup_env.sh")], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert f".venv is a link to {theirs}" in done.stderr
    assert (theirs / "bin/python").exists()


PIP = """#!/bin/sh
case "$*" in
  "-c import pip"*) echo $PIP_MAJOR ;;
  *"--upgrade pip>="*) echo "$*" | sed 's/.*pip>=/upgrade to /'; [ "${*##*>=}" -le "$PIP_NEWEST" ] ;;
  *--editable*) : > "$(dirname "$0")/../installed" ;;
esac
"""


@pytest.mark.parametrize(
    ("major", "newest", "is_installed"), [(25, 0, True), (24, 25, True), (24, 23, True), (22, 23, True), (22, 0, False)]
)
def test_setup_upgrades_pip_where_it_can(tmp_path: Path, major: int, newest: int, is_installed: bool):
    """One of 23 does where none of 25 can be had, without a network say; an older one ends the setup."""
    (tmp_path / "scripts").mkdir()
    script = shutil.copy(REPOSITORY / "scripts/setup_env.sh", tmp_path / "scripts")
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "constraints.txt").touch()
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / ".venv/bin/python").write_text(PIP)
    (tmp_path / ".venv/bin/python").chmod(0o755)
    variables = {**os.environ, "PIP_MAJOR": str(major), "PIP_NEWEST": str(newest)}
    done = subprocess.run(["bash", script], env=variables, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode == 0) == is_installed == (tmp_path / ".venv/installed").exists(), done.stderr
    assert is_installed or "upgrade to 23" in done.stderr
