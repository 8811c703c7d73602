"""Two network namespaces stand for two nodes: the same tokens, and an end on both sides when the cable is cut."""

import subprocess
import sys

import pytest
import ranks

SCRIPT = ranks.REPOSITORY / "scripts" / "two_nodes.sh"
NOT_ALLOWED = 77


def two_nodes(*arguments: str, **variables: str) -> ranks.CompletedRanks:
    environment = {"PYTHON": sys.executable, **variables}
    done = ranks.run_command(["bash", str(SCRIPT), *arguments], timeout_s=280, env=environment)
    if done.returncode == NOT_ALLOWED:
        pytest.skip(done.stderr.strip())
    return done


@pytest.mark.matrix
def test_two_nodes_answer_as_one_rank_does_though_only_one_has_the_files():
    done = two_nodes()
    assert done.returncode == 0, done.output
    assert "two nodes and one rank answered the same: 64 rows" in done.stdout


@pytest.mark.matrix
def test_both_sides_end_and_name_the_silent_rank_when_the_cable_is_cut():
    check_cut(two_nodes("--cut", LIMIT_S="120"))


@pytest.mark.stress
@pytest.mark.timed
def test_both_sides_end_in_time_when_the_cable_is_cut():
    """Within `executor.timeout_s` and five seconds."""
    done = two_nodes("--cut")
    print(f"\nCUT {done.stdout.splitlines()[-1]}")
    check_cut(done)


def check_cut(done: ranks.CompletedRanks) -> None:
    assert done.returncode == 0, done.output
    assert "error: rank 1 is silent" in done.stdout
    assert "error: rank 0 is silent" in done.stdout


def test_the_script_is_sound_and_says_what_it_is_for():
    assert subprocess.run(["bash", "-n", str(SCRIPT)], check=False).returncode == 0
    assert "Needs root." in SCRIPT.read_text()
