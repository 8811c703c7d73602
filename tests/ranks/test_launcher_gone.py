"""A rank whose launcher ended before the rank could see that it was its parent: it does not call until the timeout.

A process that is adopted by another program than the first one of the machine (a session's, a batch system's) has a
parent like any other, so nothing but the launcher's store, which is gone with it, tells.
"""

import socket
from pathlib import Path

import pytest
import ranks
from ranks import free_port

from spmd_worker.base.errors import LauncherGoneError
from spmd_worker.ranks import groups

MODEL = ranks.REPOSITORY / "scripts" / "demo" / "model"


def variables(port: int, **changes: str) -> dict[str, str]:
    """Of rank 0 of two that torchrun started on this node."""
    return {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        **changes,
    }


def test_rank_without_its_launcher_exits_before_the_timeout(tmp_path: Path):
    words = [f"model.path={MODEL}", "device=cpu", "parallel.tensor_parallel_size=2", "executor.timeout_s=600"]
    rows = [f"job.input={ranks.REPOSITORY / 'scripts/demo/prompts.jsonl'}", f"job.output={tmp_path / 'out.jsonl'}"]
    command = [ranks.REPOSITORY / "launch.py", *words, *rows]
    # In half of the timeout that the rank has: without the look at the store this is RanksTimedOut.
    done = ranks.run_script(command, 240, variables(free_port()))
    assert done.returncode == 1, done.output
    assert "error: the launcher is gone: nothing listens at 127.0.0.1:" in done.stderr, done.output


@pytest.mark.parametrize(
    ("changes", "is_said"),
    [
        ({}, True),
        ({"TORCHELASTIC_USE_AGENT_STORE": "False"}, False),
        # Of another node it may be the network.
        ({"LOCAL_WORLD_SIZE": "1"}, False),
        ({"MASTER_PORT": "none"}, False),
    ],
    ids=["gone", "rank 0 keeps the store", "another node", "no port"],
)
def test_missing_launcher_is_an_error_on_its_node(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, str], is_said: bool
):
    """An error only where torchrun keeps the store."""
    for name, value in variables(free_port(), **changes).items():
        monkeypatch.setenv(name, value)
    if is_said:
        with pytest.raises(LauncherGoneError, match=r"^the launcher .*gone: .*127\.0\.0\.1:\d+"):
            groups._check_launcher()
    else:
        groups._check_launcher()


def test_listening_launcher_is_accepted(monkeypatch: pytest.MonkeyPatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        for name, value in variables(server.getsockname()[1]).items():
            monkeypatch.setenv(name, value)
        groups._check_launcher()
