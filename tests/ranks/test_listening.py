"""On one node no rank listens on an address that is reached from outside."""

import json
import socket
import sys
from pathlib import Path

import pytest
import ranks

MODEL = ranks.REPOSITORY / "scripts" / "demo" / "model"

SCRIPT = """
import json, os, sys
from pathlib import Path
from open_links import open_links
from spmd_worker import LLM, SamplingParams

def listening():
    # Of this process: the addresses of its sockets in the state LISTEN (0A), as the kernel writes them.
    own = [link.removeprefix("socket:[").rstrip("]") for link in open_links() if link.startswith("socket:[")]
    tables = [Path(f"/proc/net/{name}").read_text().splitlines()[1:] for name in ("tcp", "tcp6")]
    rows = [line.split() for table in tables for line in table]
    return sorted(row[1].split(":")[0] for row in rows if row[3] == "0A" and row[9] in own)

with LLM(sys.argv[1], tensor_parallel_size=2, num_blocks=64, device="cpu") as llm:
    llm.generate(["copy q ="], SamplingParams(max_tokens=2), use_tqdm=False)
    found = listening()
(Path(sys.argv[2]) / f"{os.environ['RANK']}.json").write_text(json.dumps(found))
"""

LOOPBACKS = ("0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000")
"""127.0.0.1 as the kernel writes it, in an IPv6 socket too, and ::1."""


def addresses(tmp_path: Path, **variables: str) -> list[str]:
    ranks.run_ranks(SCRIPT, 2, timeout_s=240, arguments=[MODEL, tmp_path], env=variables).checked()
    return [address for rank in (0, 1) for address in json.loads((tmp_path / f"{rank}.json").read_text())]


linux = pytest.mark.skipif(sys.platform != "linux", reason="the kernel is asked by way of /proc")


@linux
def test_ranks_of_one_node_listen_only_on_loopback(tmp_path: Path):
    found = addresses(tmp_path)
    assert found, "gloo listens"
    assert [address for address in found if address not in LOOPBACKS] == []


@linux
@pytest.mark.matrix
def test_listening_check_detects_another_interface(tmp_path: Path):
    """Negative control."""
    others = [name for _, name in socket.if_nameindex() if name.startswith(("eth", "en"))]
    if not others:
        pytest.skip("this machine has no interface but loopback")
    found = addresses(tmp_path, GLOO_SOCKET_IFNAME=others[0])
    assert [address for address in found if address not in LOOPBACKS] != []
