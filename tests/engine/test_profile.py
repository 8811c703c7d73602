"""`start_profile` and `stop_profile`: one trace a rank, refused with words where it cannot be."""

import json
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import ranks
import torch
from context_fixtures import fixture_of

from spmd_worker import LLM, SamplingParams
from spmd_worker.base.errors import WorkerEventError

MODEL = ranks.REPOSITORY / "scripts" / "demo" / "model"
OPTIONS = {"device": "cpu", "num_blocks": 32, "timeout_s": 120.0}
SHORT = SamplingParams(temperature=0, max_tokens=3)

ON_RANKS = """
    import os, sys
    from spmd_worker import LLM, SamplingParams
    with LLM(sys.argv[1], device="cpu", num_blocks=32, timeout_s=120, tensor_parallel_size=2) as llm:
        llm.start_profile(sys.argv[2])
        llm.generate(["copy q ="], SamplingParams(temperature=0, max_tokens=3), use_tqdm=False)
        paths = llm.stop_profile()
    os.write(1, f"{paths}\\n".encode())
    """


ONE_NAME = """
    from spmd_worker.worker.trace_profiler import TraceProfiler
    make = TraceProfiler.__init__
    TraceProfiler.__init__ = lambda profiler, rank: make(profiler, 0)
    """
"""Every rank writes what rank 0 writes."""

llm = fixture_of(lambda: LLM(MODEL, **OPTIONS))


def names_in(path: Path) -> set[str]:
    return {event.get("name", "") for event in json.loads(path.read_text())["traceEvents"]}


def test_trace_covers_steps_between_start_and_stop(llm: LLM, tmp_path: Path):
    llm.start_profile(tmp_path / "traces")
    (output,) = llm.generate(["copy q ="], SHORT, use_tqdm=False)
    assert llm.stop_profile() == [str(tmp_path / "traces" / "trace.rank0.json")]
    assert output.outputs[0].text.strip() == "q"
    assert any(name.startswith("aten::") for name in names_in(tmp_path / "traces" / "trace.rank0.json"))


def test_profile_rejects_unmatched_start_and_stop(llm: LLM, tmp_path: Path):
    undone = r"'{}' .*undone .*RuntimeError: {}"
    with pytest.raises(WorkerEventError, match=undone.format("stop_profile", "no profile")):
        llm.stop_profile()
    llm.start_profile(tmp_path)
    with pytest.raises(WorkerEventError, match=undone.format("start_profile", "a profile .*already")):
        llm.start_profile(tmp_path / "other")
    assert llm.generate(["copy q ="], SHORT, use_tqdm=False)[0].outputs[0].text.strip() == "q"
    assert llm.stop_profile() == [str(tmp_path / "trace.rank0.json")]


def test_profile_ends_with_its_engine(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """A process that ended with a running profile crashed in torch."""
    with LLM(MODEL, **OPTIONS) as llm:
        llm.start_profile(tmp_path)
        llm.generate(["copy q ="], SHORT, use_tqdm=False)
        assert torch.autograd._profiler_enabled()
    assert not torch.autograd._profiler_enabled()
    assert "stop_profile was not called: rank 0 writes its trace" in caplog.text
    assert any(name.startswith("aten::") for name in names_in(tmp_path / "trace.rank0.json"))


def test_profile_is_stopped_by_its_thread(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    with LLM(MODEL, **OPTIONS) as llm, ThreadPoolExecutor(1) as other:
        other.submit(llm.start_profile, tmp_path).result()
        with pytest.raises(WorkerEventError, match="another thread's: call stop_profile in that which"):
            llm.stop_profile()
        assert other.submit(llm.stop_profile).result() == [str(tmp_path / "trace.rank0.json")]
        other.submit(llm.start_profile, tmp_path / "lost").result()
    assert "rank 0 has no trace, which another thread began" in caplog.text
    assert not (tmp_path / "lost" / "trace.rank0.json").exists()


LEFT_OPEN = """
    import sys, threading
    from spmd_worker import LLM
    llm = LLM(sys.argv[1], device="cpu", num_blocks=32)
    thread = threading.Thread(target=llm.start_profile, args=(sys.argv[2],))
    if sys.argv[3] == "here":
        thread.run()
    else:
        thread.start()
        thread.join()
    raise SystemExit(3)
    """


@pytest.mark.stress
@pytest.mark.parametrize("where", ["here", "in a thread"])
def test_process_with_a_profile_exits_as_told(tmp_path: Path, where: str):
    command = [sys.executable, "-c", textwrap.dedent(LEFT_OPEN), str(MODEL), str(tmp_path), where]
    assert subprocess.run(command, check=False).returncode == 3
    assert (tmp_path / "trace.rank0.json").exists() == (where == "here")


def test_profile_rejects_unwritable_folder(llm: LLM, tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(WorkerEventError, match=r"rank 0: (NotADirectoryError|FileExistsError)"):
        llm.start_profile(tmp_path / "file")


def test_worker_event_rejects_invalid_name_and_payload(llm: LLM):
    with pytest.raises(ValueError, match="worker event 'a b'"):
        llm.worker_event("a b")
    with pytest.raises(TypeError, match="type object"):
        llm.worker_event("start_profile", object())
    with pytest.raises(WorkerEventError, match=r"rank 0: .* no method prepare_fly"):
        llm.worker_event("fly")


def test_a_commit_that_raises_ends_the_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Workers may be in different states: nothing runs on them any more."""
    with LLM(MODEL, **OPTIONS) as llm:
        (worker,) = llm.collective_rpc(lambda worker: worker)
        monkeypatch.setattr(worker.running.event_handlers[1], "commit_start_profile", lambda path: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            llm.start_profile(tmp_path)
        with pytest.raises(RuntimeError, match="failed halfway"):
            llm.generate(["copy q ="], SHORT, use_tqdm=False)
    with pytest.raises(RuntimeError, match=r"^this LLM .*closed"):
        llm.stop_profile()


@pytest.mark.guarantee("A trace a rank")
@pytest.mark.matrix
def test_every_rank_writes_its_own_trace(tmp_path: Path):
    check_traces_of_ranks(tmp_path, ON_RANKS)


@pytest.mark.stress
@pytest.mark.control("A trace a rank")
@pytest.mark.matrix
def test_the_check_sees_ranks_that_write_one_trace(tmp_path: Path):
    """Negative control."""
    with pytest.raises(AssertionError, match=r"trace\.rank1\.json"):
        check_traces_of_ranks(tmp_path, ONE_NAME + ON_RANKS)


def check_traces_of_ranks(tmp_path: Path, script: str) -> None:
    done = ranks.run_ranks(script, nproc=2, timeout_s=240, arguments=[MODEL, tmp_path]).checked()
    paths = [tmp_path / f"trace.rank{rank}.json" for rank in range(2)]
    assert sorted(done.stdout.splitlines()) == [f"['{path}']" for path in paths]
    assert all(path.stat().st_size for path in paths)
