"""Two network namespaces as two nodes: the same tokens, and an end on both sides when the connection is cut."""

import os
import subprocess
import sys
from pathlib import Path

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


@pytest.mark.guarantee("Two nodes answer as one rank")
@pytest.mark.stress
def test_two_nodes_equal_one_rank_with_one_copy():
    done = two_nodes().checked()
    assert "two nodes and one rank answered the same: 64 rows" in done.stdout


@pytest.mark.guarantee("A cut cable: both sides name the silent rank")
@pytest.mark.stress
def test_both_sides_name_silent_rank_when_disconnected():
    check_cut(two_nodes("--cut", LIMIT_S="120"))


@pytest.mark.stress
@pytest.mark.timed
def test_both_sides_end_in_time_when_disconnected():
    """Within `executor.timeout_s` and five seconds."""
    done = two_nodes("--cut")
    print(f"\nCUT {done.stdout.splitlines()[-1]}")
    check_cut(done)


def check_cut(done: ranks.CompletedRanks) -> None:
    assert done.returncode == 0, done.output
    assert "error: rank 1 is silent" in done.stdout
    assert "error: rank 0 is silent" in done.stdout


@pytest.mark.control("A cut cable: both sides name the silent rank")
@pytest.mark.parametrize(
    ("code", "silent"), [(1, (1, 0)), (0, (1,)), (0, (0,)), (0, ())], ids=["late", "one side", "the other", "neither"]
)
def test_check_detects_side_without_silent_rank_name(code: int, silent: tuple[int, ...], control):
    """Negative control."""

    def ended(code: int, ranks_named: tuple[int, ...]) -> ranks.CompletedRanks:
        said = (f"--- node {1 - rank}\nerror: rank {rank} is silent: last seen\n" for rank in ranks_named)
        return ranks.CompletedRanks(code, "".join(said), "", 0.0)

    check_cut(ended(0, (1, 0)))
    with control():
        check_cut(ended(code, silent))


STAND_INS = {
    "id": "echo 0",
    "ip": """case "$1 $2" in
        "netns exec") shift 3; exec "$@" ;;
        "netns pids") [ -e "$PYTHON.cut" ] || cat "$PYTHON.${3%-*}" ;;
        esac
        [ "$5 $6" != "cable0 down" ] || : >"$PYTHON.cut"
        """,
    "unshare": 'while [ "${1#--}" != "$1" ]; do shift; done\nexec "$@"',
    "mount": "exit 0",
    # In place of ranks: rows go where the job's output is to be.
    "python": """for word; do case $word in
        job.output=*/both.jsonl) echo "$BOTH" >"${word#*=}" ;;
        job.output=*/alone.jsonl) echo row >"${word#*=}" ;;
        esac; done""",
    # In place of ranks that are cut off: they are there, with some steps, and say what they are to say at the end.
    "cut": r"""[ "$1" != - ] || exit 0
        case $* in *"--local-addr 10.213.77.1 "*) node=0 said=$SAID0 ;; *) node=1 said=$SAID1 ;; esac
        for word; do case $word in job.run_dir=*) folder=${word#*=} ;; esac; done
        mkdir -p "$folder"
        TORCHELASTIC_RUN_ID=two-nodes sh -c 'echo $$ >"$PYTHON.spmd-node$0"
            until [ -s "$PYTHON.spmd-node1" ]; do sleep 0.02; done
            [ "$0" = 1 ] || seq 301 >"$1/steps.csv"
            until [ -e "$PYTHON.cut" ]; do sleep 0.02; done
            printf "rank status at the last heartbeats\n%s\n" "$2"' $node "$folder" "$said"
        """,
}


def run_with_stand_ins(folder: Path, python: str, *arguments: str, **variables: str) -> ranks.CompletedRanks:
    """The script, where nothing that it starts is real: stand-ins are found first."""
    for name, body in STAND_INS.items():
        (folder / name).write_text(f"#!/bin/sh\n{body}\n")
        (folder / name).chmod(0o755)
    variables |= {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}", "PYTHON": str(folder / python)}
    return ranks.run_command(["bash", str(SCRIPT), *arguments], timeout_s=280, env=variables)


@pytest.mark.control("Two nodes answer as one rank")
@pytest.mark.parametrize(
    ("both", "exit_code"), [("row", 0), ("another", 1), ("row\nrow", 1)], ids=["same", "another", "more"]
)
def test_script_detects_a_different_answer_of_two_nodes(tmp_path: Path, both: str, exit_code: int):
    """Negative control: nothing of it is real but its comparison."""
    done = run_with_stand_ins(tmp_path, "python", BOTH=both)
    assert done.returncode == exit_code, done.output
    assert ("two nodes and one rank answered the same: 1 rows" in done.stdout) == (exit_code == 0)
    assert ("alone.jsonl" in done.stdout + done.stderr) == (exit_code == 1), "cmp says where they differ"


@pytest.mark.stress
@pytest.mark.control("A cut cable: both sides name the silent rank")
@pytest.mark.matrix
@pytest.mark.parametrize(
    ("said", "complaints"),
    [
        ((1, 0), []),
        ((0, 0), ["node 0 does not name rank 1"]),
        ((1, 1), ["node 1 does not name rank 0"]),
        ((0, 1), ["node 0 does not name rank 1", "node 1 does not name rank 0"]),
    ],
    ids=["both sides", "node 1 alone", "node 0 alone", "each itself"],
)
def test_script_detects_side_without_silent_rank_name(tmp_path: Path, said: tuple[int, int], complaints: list[str]):
    """Negative control: nothing of it is real but its look at what each node says. `said` are the ranks they name."""
    said0, said1 = (f"error: rank {rank} is silent" for rank in said)
    done = run_with_stand_ins(tmp_path, "cut", "--cut", SAID0=said0, SAID1=said1, LIMIT_S="120")
    assert [line for line in done.stderr.splitlines() if "does not name" in line] == complaints, done.output
    assert done.returncode == bool(complaints), done.output
    if not complaints:
        check_cut(done)


def test_two_node_script_is_valid_and_documented():
    assert subprocess.run(["bash", "-n", str(SCRIPT)], check=False).returncode == 0
    assert "Needs root." in SCRIPT.read_text()
