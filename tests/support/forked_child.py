"""A child of this process that does one thing, as a forked process of a user's program does, and ends."""

import os
import signal
import traceback
from collections.abc import Callable

from waiting import wait_until


def in_child(action: Callable[[], object]) -> int:
    """Its exit code: 0 when `action` returned, 1 when it raised, minus the number of the signal that ended it."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            action()
            code = 0
        except BaseException:  # the child must not go on as a second test run
            traceback.print_exc()
        finally:
            os._exit(code)
    ended: list[int] = []

    def has_ended() -> bool:
        pid, status = os.waitpid(child, os.WNOHANG)
        ended.extend([os.waitstatus_to_exitcode(status)] if pid else [])
        return bool(pid)

    try:
        wait_until(has_ended)
    finally:
        if not ended:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    return ended[0]
