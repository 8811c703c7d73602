"""Starts ranks on this machine as torchrun does, in half its time: `NUM_RANKS SCRIPT ARGUMENT...`.

torchrun imports torch before it starts a rank, which takes longer than most tests. What tests say of torchrun itself
they say under torchrun. Each rank has the variables that torch.distributed reads and a session of its own; when one
fails the others are ended, and the exit code is 1. Knows nothing of torch.
"""

import os
import signal
import socket
import subprocess
import sys
import time

GRACE_S = 10.0


def main(num_ranks: int, command: list[str]) -> int:
    """Until all have ended."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    started = [
        subprocess.Popen([sys.executable, *command], env=environment(rank, num_ranks, port), start_new_session=True)
        for rank in range(num_ranks)
    ]
    running, has_failed = list(started), False
    while running:
        time.sleep(0.01)
        running = [each for each in running if each.poll() is None]
        if not has_failed and any(each.returncode for each in started):
            has_failed = True
            end(running)
    return int(has_failed)


def environment(rank: int, num_ranks: int, port: int) -> dict[str, str]:
    """The launcher's, and a rank's place."""
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks, "GROUP_RANK": 0}
    place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return {**os.environ, **{name: str(value) for name, value in place.items()}}


def end(running: list[subprocess.Popen[bytes]]) -> None:
    for each in running:
        each.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + GRACE_S
    while any(each.poll() is None for each in running):
        if time.monotonic() > deadline:
            for each in running:
                each.kill()
        time.sleep(0.01)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
