"""torchrun, with exit codes from which a queue knows a preemption from a failure.

    python -m spmd_worker.tools.torchrun --standalone --nproc-per-node 8 launch.py KEY=VALUE...
    python -m spmd_worker.tools.torchrun --standalone --nproc-per-node 8 --no-python spmd-worker KEY=VALUE...

Arguments and messages are torchrun's. torchrun exits with 1 however its ranks end; this exits with

    0      every rank ended well
    143    SIGTERM ended it, or its ranks: preempted; start it again (130: Ctrl-C, 138: SIGUSR1)
    1, 70  the code of the rank that failed first: the job failed; the ranks diverged
    137    a rank was killed, for example for its memory

Started by nohup, it goes on when its terminal is closed, which torchrun does not.
"""

import os
import signal
import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    # Imported here because it brings torch, which the other tools do without.
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as run_ranks

    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        # torchrun's default of --signals-to-handle has SIGHUP, too.
        os.environ.setdefault("PET_SIGNALS_TO_HANDLE", "SIGTERM,SIGINT,SIGQUIT")
    try:
        run_ranks(sys.argv[1:] if arguments is None else arguments)
    except SignalException as error:
        print(f"torchrun received {error.sigval.name}", file=sys.stderr)
        return 128 + error.sigval
    except ChildFailedError as error:
        print(error, file=sys.stderr)
        _, failure = error.get_first_failure()
        # Negative for a process that a signal has ended.
        return failure.exitcode if failure.exitcode >= 0 else 128 - failure.exitcode
    return 0
