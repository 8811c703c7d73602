"""launch.py, whose worlds append `WORKER ROW` to the file that COMPUTED_ROWS names for each row that is answered."""

import os
import runpy
from typing import Any

from ranks import REPOSITORY

from spmd_worker.frontends.batch.pool_world.pool_worker import PoolWorker


def count_rows(path: str) -> None:
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    append = PoolWorker.append

    def counted(worker: PoolWorker, key: Any, answer: Any) -> None:
        os.write(log, f"{worker.member.worker} {answer.index}\n".encode())
        append(worker, key, answer)

    PoolWorker.append = counted  # type: ignore[method-assign]  # counted on its way


if __name__ == "__main__":
    count_rows(os.environ["COMPUTED_ROWS"])
    runpy.run_path(str(REPOSITORY / "launch.py"), run_name="__main__")
