"""Worker events on ranks that break their contract, and on a rank that dies in one: what the others see."""

import sys
from pathlib import Path
from typing import Any

import pytest
import ranks
import test_worker_events

from spmd_worker.worker.worker_base import WorkerBase

DYING = """
    import os, sys
    from spmd_worker import LLM
    from spmd_worker.worker.trace_profiler import TraceProfiler
    TraceProfiler.prepare_start_profile = lambda self, folder: os._exit(0) if os.environ["RANK"] == "1" else folder
    llm = LLM(sys.argv[1], device="cpu", num_blocks=32, timeout_s=120, tensor_parallel_size=2)
    try:
        llm.start_profile(sys.argv[2])
    except RuntimeError as error:
        os.write(1, f"{type(error).__name__}: {error}".encode())
    """


@pytest.mark.stress
@pytest.mark.control("Worker events change all workers or none")
def test_control_early_commit_is_detected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, control):
    """Negative control: the test of what holds fails where ranks do not wait for each other."""
    monkeypatch.setattr(test_worker_events, "SCRIPT", __file__)
    with control():
        test_worker_events.test_a_worker_event(test_worker_events.TP, tmp_path)
    assert len(list(tmp_path.iterdir())) == 2


def test_rank_dying_in_prepare_is_named(tmp_path: Path):
    done = ranks.run_ranks(DYING, nproc=2, timeout_s=240, arguments=[ranks.REPOSITORY / "scripts/demo/model", tmp_path])
    assert done.stdout.startswith("RankFailedError: "), done.output
    assert "rank 1" in done.stdout, done.output


def commit_at_once(self: WorkerBase, name: str, payload: Any, prepare: Any = WorkerBase.prepare_event) -> str:
    """What a worker must not do. What it commits is what it had prepared; then it has prepared nothing more."""
    problem = prepare(self, name, payload)
    if not problem:
        self.end_event(is_committed=True)
        self._prepared = (name, [])
    return problem


if __name__ == "__main__":
    WorkerBase.prepare_event = commit_at_once
    test_worker_events.main(Path(sys.argv[2]), **test_worker_events.json.loads(sys.argv[1]))
