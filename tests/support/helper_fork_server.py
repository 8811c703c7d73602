"""A fork server for helper processes of tokenizers and media (`bounded_process.py`), which imports what they import.

It has no torch, whose address space alone is more than a helper may have, and a fork of it takes few milliseconds.
Helpers read their standard input: its descriptor is the first argument of this module's command line in a fork.

    python helper_fork_server.py DESCRIPTOR            serve
    -m helper_fork_server {0} MODULE                   in a fork: MODULE as `__main__`, with that standard input
"""

import importlib
import os
import socket
import sys

import fork_server

HELPERS = (
    "spmd_worker.tokenizer.template_process",
    "spmd_worker.tokenizer.encoder_process",
    "spmd_worker.media.prepare_process",
    "spmd_worker.media.audio_process",
)


def import_helpers() -> None:
    for name in (*HELPERS, "helper_fork_server"):
        importlib.import_module(name)
    assert "torch" not in sys.modules
    fork_server.check_that_forks_are_safe()


if __name__ == "__main__" and len(sys.argv) == 2:
    order = fork_server.serve(socket.socket(fileno=int(sys.argv[1])), import_helpers)
    fork_server.run_to_its_end(order["command"])
elif __name__ == "__main__":
    given, module = sys.argv[1:]
    os.dup2(int(given), 0)
    os.close(int(given))
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115  # until the end
    fork_server.run(["-m", module])
