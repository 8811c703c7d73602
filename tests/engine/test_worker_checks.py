"""What an engine asks of its workers before the first step, and what it hears when they fail between two steps."""

import os
import signal
from pathlib import Path

import pytest
import ranks
from cache_specs import uniform_spec
from waiting import wait_until

from kv_cache.cache_spec import CacheSpec
from spmd_worker import LLM
from spmd_worker.base.errors import ConfigError, WorkerDiedError
from spmd_worker.executor.multiproc import MultiprocExecutor
from spmd_worker.ranks.transport.channel import ControlChannel
from spmd_worker.worker.worker import Worker
from spmd_worker.worker.worker_base import WorkerReport

MODEL = ranks.REPOSITORY / "scripts" / "demo" / "model"
HERE = Path(__file__).stem


class EmbeddingWorker(Worker):
    def get_supported_tasks(self) -> tuple[str, ...]:
        return ("embed",)


class OtherBlocksWorker(Worker):
    def get_kv_cache_spec(self) -> CacheSpec:
        return uniform_spec(num_layers=1, num_kv_heads=1, head_size=2, dtype_bytes=4, block_size=32)


class SickWorker(Worker):
    def check_health(self) -> None:
        raise RuntimeError("the device adds 1 and 1 to 3")


class WarmWorker(Worker):
    num_warmed_blocks = 0

    def compile_or_warm_up_model(self) -> None:
        self.num_warmed_blocks = self.running.caches.engine.num_device_blocks


class GpuWorker(Worker):
    def get_report(self) -> WorkerReport:
        return WorkerReport(gpu_identity="boot\tH200 GPU-4ed7")


def new_llm(worker: str, **options: object) -> LLM:
    return LLM(MODEL, device="cpu", num_blocks=32, timeout_s=120, worker_cls=worker, **options)


@pytest.mark.parametrize(
    ("worker", "kind", "message"),
    [
        ("EmbeddingWorker", ConfigError, "worker_cls={} supports embed on every rank, but not generate: name"),
        ("OtherBlocksWorker", ConfigError, "worker_cls={} has blocks of 32 tokens on worker 0, but"),
        ("SickWorker", RuntimeError, "the device adds 1 and 1 to 3"),
    ],
)
def test_unsuitable_worker_is_rejected_before_first_step(worker: str, kind: type, message: str):
    with pytest.raises(kind) as refused:
        new_llm(f"{HERE}.{worker}")
    assert str(refused.value).startswith(message.format(f"{HERE}.{worker}"))


def test_replicas_on_one_gpu_are_rejected_before_loading(monkeypatch: pytest.MonkeyPatch):
    """Which nothing else would notice: no collective of NCCL is between them."""
    loaded = []
    monkeypatch.setattr(GpuWorker, "load_model", lambda self: loaded.append(self))
    gather = ControlChannel.gather
    # The other rank has the same GPU, and shows otherwise what belongs to it.
    monkeypatch.setattr(
        ControlChannel, "gather", lambda self, payload: gather(self, payload) * (2 if b"H200" in payload else 1)
    )
    with pytest.raises(ConfigError, match="H200 GPU-4ed7"):
        new_llm(f"{HERE}.GpuWorker")
    assert loaded == []


def test_worker_warms_up_after_cache_allocation():
    with new_llm(f"{HERE}.WarmWorker") as llm:
        assert llm.collective_rpc(lambda worker: worker.num_warmed_blocks) == [32]


@pytest.mark.usefixtures("forked_workers")
def test_dead_idle_worker_is_named_by_next_call(monkeypatch: pytest.MonkeyPatch):
    """The engine is told by the executor's failure callback; nothing is queued and no step begins."""
    monkeypatch.syspath_prepend(ranks.REPOSITORY / "tests" / "executor")
    with new_llm("plain_worker.PlainWorker", distributed_executor_backend="multiproc") as llm:
        executor = llm.llm_engine.executor
        assert isinstance(executor, MultiprocExecutor)
        (pid,) = executor.worker_pids
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: executor.is_failed)
        with pytest.raises(WorkerDiedError, match=rf"pid {pid}\b.*SIGKILL"):
            llm.generate([[1, 2, 3]], use_tqdm=False)
        assert not llm.llm_engine.has_unfinished_requests()
