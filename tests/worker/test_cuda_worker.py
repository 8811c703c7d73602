"""What a worker does with a GPU, said by a torch.cuda that only notes what it is asked."""

from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from ranks import REPOSITORY
from torch.distributed import distributed_c10d

from kv_cache.host_memory import LazyHostMemory, PlainHostMemory
from spmd_worker.base.config.parallel import ParallelConfig
from spmd_worker.base.config.schema import ExecutorConfig, ModelOptions, RunConfig
from spmd_worker.base.errors import ConfigError
from spmd_worker.model.weights.weight_update import WeightUpdate
from spmd_worker.ops.attention.sdpa import SdpaBackend
from spmd_worker.ops.kernels.reference import ReferenceKernels
from spmd_worker.ranks import groups
from spmd_worker.ranks.communicator import single_group
from spmd_worker.ranks.environment import RankEnvironment
from spmd_worker.resolved import resolve_run
from spmd_worker.worker import caches, opened_device, start
from spmd_worker.worker.backends import choice, cpu
from spmd_worker.worker.backends.backend import Operations
from spmd_worker.worker.backends.choice import new_backend, with_device_backend
from spmd_worker.worker.backends.cpu import CpuDevice
from spmd_worker.worker.backends.plain_torch import TorchDevice
from spmd_worker.worker.backends.triton import TritonDevice
from spmd_worker.worker.caches import WorkerCaches
from spmd_worker.worker.loaded_model import LoadedModel
from spmd_worker.worker.memory import device as device_memory
from spmd_worker.worker.opened_device import OpenedDevice
from spmd_worker.worker.sleep import GoingToSleep, WorkerSleep
from spmd_worker.worker.worker import Worker
from spmd_worker.worker.worker_wrapper import WorkerWrapper

GPU = torch.device("cuda", 3)


class FakeCuda:
    """A node of eight. `notes` has the device that was current, entered and left."""

    def __init__(self, capability: tuple[int, int] = (9, 0), name: str = "H200") -> None:
        self.capability, self.name, self.notes, self.current = capability, name, [], 0

    @contextmanager
    def device(self, device):
        before, self.current = self.current, device.index
        try:
            yield
        finally:
            self.current = before

    def install(self, monkeypatch: pytest.MonkeyPatch) -> "FakeCuda":
        fakes = {
            "is_available": lambda: True,
            "device_count": lambda: 8,
            "get_device_capability": lambda device: self.capability,
            "get_device_name": lambda device: self.name,
            "get_device_properties": lambda device: SimpleNamespace(
                major=self.capability[0], minor=self.capability[1], shared_memory_per_block_optin=227 * 1024
            ),
            # As torch says it of older chips, which emulate it.
            "is_bf16_supported": lambda including_emulation=True: including_emulation,
            "mem_get_info": lambda device: (self.notes.append(self.current), (80, 80))[1],
            "memory_reserved": lambda device: 10,
            "set_device": lambda device: self.notes.append(f"set {device.index}"),
            "device": self.device,
            "current_device": lambda: self.current,
        }
        for name, fake in fakes.items():
            monkeypatch.setattr(torch.cuda, name, fake)
        return self


def new_worker(dtype: str = "bfloat16", num_ranks: int = 1) -> Worker:
    model = ModelOptions(path=str(REPOSITORY / "scripts" / "demo" / "model"), dtype=dtype)
    parallel = ParallelConfig(tensor_parallel_size=num_ranks)
    # Of one rank's tests the groups are real.
    executor = ExecutorConfig(device_backend="auto" if num_ranks == 1 else "torch")
    resolved = resolve_run(RunConfig(model=model, parallel=parallel, executor=executor, device="cuda"), "cuda")
    return Worker(resolved, RankEnvironment(world_size=num_ranks, local_rank=3))


def test_bfloat16_is_rejected_without_hardware_support(monkeypatch: pytest.MonkeyPatch):
    FakeCuda((7, 5), "T4").install(monkeypatch)
    with pytest.raises(ConfigError, match=r"dtype=bfloat16 .*capability 8\.0 .*T4 has 7\.5: .*model\.dtype=float16"):
        new_worker().init_device()
    new_worker("float16").init_device()
    FakeCuda((8, 0), "A100").install(monkeypatch)
    new_worker().init_device()


def test_worker_restores_the_process_current_device(monkeypatch: pytest.MonkeyPatch):
    cuda = FakeCuda().install(monkeypatch)
    wrapper = WorkerWrapper()
    wrapper.worker = new_worker()
    wrapper.execute_method("init_device")
    # Memory is read before the groups are joined and after.
    assert cuda.notes == [3, 3]
    assert cuda.current == 0
    monkeypatch.setattr(Worker, "check_health", lambda self: cuda.notes.append(f"checked on {cuda.current}"))
    wrapper.execute_method("check_health")
    with pytest.raises(AssertionError):
        wrapper.execute_method("sample_tokens")
    assert (cuda.notes[2:], cuda.current) == (["checked on 3"], 0)


@pytest.mark.parametrize("is_callers", [False, True])
def test_process_device_is_set_only_in_own_world(monkeypatch: pytest.MonkeyPatch, is_callers: bool):
    cuda = FakeCuda().install(monkeypatch)
    monkeypatch.setattr(opened_device, "join_groups", lambda *arguments: cuda.notes.append(f"joined on {cuda.current}"))
    monkeypatch.setattr(opened_device.dist, "is_initialized", lambda: is_callers)
    new_worker(num_ranks=2).init_device()
    assert cuda.notes == [*([] if is_callers else ["set 3"]), 3, "joined on 3", 3]


def test_plain_torch_has_no_same_bits():
    run = RunConfig(
        model=ModelOptions(path=str(REPOSITORY / "scripts" / "demo" / "model")),
        parallel=ParallelConfig(tensor_parallel_size=2, invariant_tensor_parallel=True),
    )
    for device in (GPU, torch.device("cpu")):
        with pytest.raises(ConfigError, match="invariant_tensor_parallel=true is not supported by plain torch"):
            TorchDevice(resolve_run(run, device.type), device).operations()


@pytest.mark.parametrize("is_invariant", [True, None])
def test_missing_kernels_are_no_same_bits(monkeypatch: pytest.MonkeyPatch, is_invariant: bool | None):
    """Without a compiler the CPU backend is plain torch, which only runs that asked for the same bits refuse."""
    monkeypatch.setattr(cpu, "cpu_backend_or_reason", lambda *arguments: "no C++ compiler was found")
    run = RunConfig(
        model=ModelOptions(path=str(REPOSITORY / "scripts" / "demo" / "model")),
        parallel=ParallelConfig(tensor_parallel_size=2, invariant_tensor_parallel=is_invariant),
    )
    device = CpuDevice(resolve_run(run, "cpu"), torch.device("cpu"))
    if is_invariant:
        with pytest.raises(ConfigError, match=r"_parallel=true is not .* leave .* out\. .* no C\+\+ compiler was"):
            device.operations()
    else:
        assert isinstance(device.operations().attention, SdpaBackend)


def test_plain_torch_names_the_number_of_ranks():
    """Its products of a rank's share have other bits: a job went on with another number, and policies were equal."""
    found = set()
    for size in (1, 2, 4):
        device = CpuDevice(new_worker(num_ranks=size).resolved, torch.device("cpu"))
        group = replace(single_group(), ranks=tuple(range(size)), adds_by_tree=True)
        policy = device.numerical_policy(Operations(ReferenceKernels(), SdpaBackend()), group)
        found.add((device.arithmetic(SdpaBackend()), policy.digest))
    assert len({name for name, _ in found}) == len({digest for _, digest in found}) == 3


def test_arithmetic_depends_on_device_and_versions(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91900)
    FakeCuda().install(monkeypatch)

    def arithmetic_of(device: torch.device) -> str:
        resolved = with_device_backend(new_worker().resolved, "torch" if device.type == "cuda" else "auto")
        return new_backend(resolved, device).arithmetic(SdpaBackend())

    here = arithmetic_of(GPU)
    assert here.startswith(f"torch {torch.__version__} on H200 (sm_90)")
    assert "cuDNN 91900" in here
    assert arithmetic_of(GPU) == here
    FakeCuda((8, 0), "A100").install(monkeypatch)
    other_device = arithmetic_of(GPU)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 92000)
    assert len({here, other_device, arithmetic_of(GPU)}) == 3
    own = arithmetic_of(torch.device("cpu"))
    assert own == f"torch, {torch.backends.cpu.get_cpu_capability()}"
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "another")
    assert arithmetic_of(torch.device("cpu")) == "torch, another"


def test_auto_takes_triton_where_it_computes_the_model(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """It took plain torch, which is 200 times slower."""
    choice._warn_once.cache_clear()
    FakeCuda().install(monkeypatch)
    assert isinstance(new_backend(new_worker().resolved, GPU), TritonDevice)
    assert isinstance(new_backend(new_worker().resolved, torch.device("cpu")), CpuDevice)
    assert not caplog.records
    FakeCuda((7, 5), "T4").install(monkeypatch)
    resolved = new_worker("float16").resolved
    for _ in range(2):
        assert isinstance(new_backend(resolved, GPU), TorchDevice)
    (said,) = [record.getMessage() for record in caplog.records]
    assert "executor.device_backend=triton needs compute capability 8.0, and T4 has 7.5" in said
    FakeCuda().install(monkeypatch)
    monkeypatch.setattr(choice, "find_spec", lambda name: None)
    assert isinstance(new_backend(resolved, GPU), TorchDevice)
    assert "needs the package triton" in caplog.records[-1].getMessage()
    # Control: who names triton gets no other.
    FakeCuda((7, 5), "T4").install(monkeypatch)
    with pytest.raises(ConfigError, match=r"triton needs compute capability 8\.0, .* at auto"):
        new_backend(with_device_backend(resolved, "triton"), GPU).operations()


def test_groups_are_made_in_an_unbound_world(monkeypatch: pytest.MonkeyPatch):
    """Bound, torch has ranks split NCCL's communicator for a group of gloo that they are not in."""
    world = SimpleNamespace(bound_device_id=GPU)
    monkeypatch.setattr(distributed_c10d, "_get_default_group", lambda: world)
    with groups._without_splits():
        assert world.bound_device_id is None
    assert world.bound_device_id == GPU
    with pytest.raises(RuntimeError), groups._without_splits():
        raise RuntimeError
    assert world.bound_device_id == GPU


@pytest.mark.parametrize(("device", "filters"), [(GPU, True), (torch.device("cpu"), False)])
def test_max_step_filters_most_rows_on_gpu(monkeypatch: pytest.MonkeyPatch, device: torch.device, filters: bool):
    asked = []
    monkeypatch.setattr(start, "max_step", lambda *sizes, **keywords: asked.append(keywords) or ())
    monkeypatch.setattr(start, "longest_chunk", lambda *sizes: ())
    monkeypatch.setattr(start, "prepared_step", lambda *arguments: None)
    monkeypatch.setattr(LoadedModel, "new_cache_engine", lambda *arguments: None)
    worker = new_worker()
    opened = OpenedDevice(worker.resolved, worker.environment, device, None, None)
    start.prepare_max_step(LoadedModel(opened, None, None), worker.get_kv_cache_spec())
    assert asked == [{"all_filtered": filters}]


def test_worker_uses_the_callers_device(monkeypatch: pytest.MonkeyPatch):
    cuda = FakeCuda().install(monkeypatch)
    cuda.current = 5
    monkeypatch.setattr(opened_device, "join_groups", lambda *arguments: None)
    monkeypatch.setattr(opened_device.dist, "is_initialized", lambda: True)
    worker = new_worker(num_ranks=2)
    worker.init_device()
    assert worker.device == torch.device("cuda", 5)


def test_freed_and_pinned_memory_is_returned(monkeypatch: pytest.MonkeyPatch):
    """Pinned memory of the host stayed with torch, for weights that slept and blocks that were swapped."""
    calls = []
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda *device, name=name: calls.append((name, *device)))
    monkeypatch.setattr(torch._C, "_host_emptyCache", lambda: calls.append(("pinned",)), raising=False)
    monkeypatch.setattr(device_memory.host, "give_back_freed", lambda: calls.append(("host",)))
    expected = [("synchronize", GPU), ("empty_cache",), ("pinned",), ("host",)]
    device_memory.give_back_freed(GPU)
    assert calls == expected
    calls.clear()
    device_memory.give_back_freed(torch.device("cpu"))
    assert calls == [("host",)]
    monkeypatch.delattr(torch._C, "_host_emptyCache")
    device_memory.give_back_freed(GPU)
    calls.clear()
    monkeypatch.setattr(torch._C, "_host_emptyCache", lambda: calls.append(("pinned",)), raising=False)
    worker = new_worker()
    worker.device, worker._loaded = GPU, object()
    worker.shutdown()
    assert calls == expected
    assert worker._loaded is None, "attention and kernels keep tensors of the last step"


def test_sleep_reports_only_allocated_host_memory():
    """Swap space that no block ever went to is not pinned, and counted as given back."""
    cuda, model = torch.device("meta"), SimpleNamespace(weights=SimpleNamespace(update=WeightUpdate()))
    made, held = [], [0]
    memory = LazyHostMemory(lambda: made.append(PlainHostMemory(torch.zeros(1, 4, 2), 3)) or made[0])
    assert (memory.num_bytes, made) == (0, [])
    memory.move_out([(0, 1)])
    assert memory.num_bytes == 3 * 2 * 4
    for held[0], expected in ((0, 100), (memory.num_bytes, 124)):
        cache = WorkerCaches(
            SimpleNamespace(num_device_blocks=4, num_host_blocks=9, allocate=lambda: None, states=None), 25, cuda
        )
        cache.engine.num_host_bytes, cache.engine.release = held[0], lambda: None
        sleeper = WorkerSleep(model, SimpleNamespace(is_allocated=True, num_bytes=7), cache, cuda, 1)
        assert sleeper.commit_sleep(GoingToSleep(1, None)) == {"weights": 0, "kv_cache": expected}
        taken = sleeper.commit_wake_up(sleeper.prepare_wake_up(["weights", "kv_cache"]))
        assert taken["kv_cache"] == 100


def test_host_memory_is_lazy_only_on_gpu(monkeypatch: pytest.MonkeyPatch):
    for device, taken in ((GPU, 0), (torch.device("cpu"), 5)):
        monkeypatch.setattr(caches, "HostTierEngine", lambda engine, num_slots: SimpleNamespace(num_host_bytes=6))
        engine = SimpleNamespace(num_host_blocks=3, num_device_blocks=4, num_host_bytes=10, states=None)
        memory = WorkerCaches(engine, 100, device)
        memory.add_tier(2)
        assert (memory.num_device_bytes, memory.num_host_bytes) == (4 * 100, taken * 100)
        assert memory.held_host_bytes == 16
