"""The triton backend on GPUs that are not there, which torch.cuda only tells of; and TritonWorker, its earlier name."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from expert_checkpoints import expert_folder
from pooling_models import pooling_folder
from ranks import REPOSITORY
from state_models import state_folder

from kv_cache.cache_sizing import MemoryMeasurement
from spmd_worker.base.config.parallel import ParallelConfig
from spmd_worker.base.config.schema import ExecutorConfig, ModelOptions, RunConfig
from spmd_worker.base.errors import ConfigError
from spmd_worker.ops.attention.triton import TritonBackend
from spmd_worker.ops.kernels.triton.fp8 import Fp8TritonKernels
from spmd_worker.ops.kernels.triton.int8_model import Int8TritonKernels
from spmd_worker.ops.kernels.triton.peer_sums import PeerSums
from spmd_worker.ranks.communicator import GroupHandle, single_group
from spmd_worker.ranks.environment import RankEnvironment
from spmd_worker.ranks.groups import ParallelGroups
from spmd_worker.resolved import resolve_run
from spmd_worker.worker import opened_device, start
from spmd_worker.worker.backends import triton as triton_backend
from spmd_worker.worker.backends.backend import Operations
from spmd_worker.worker.backends.triton import TritonDevice
from spmd_worker.worker.opened_device import OpenedDevice
from spmd_worker.worker.triton_worker import TritonWorker
from spmd_worker.worker.worker import Worker

pytestmark = pytest.mark.matrix
DEMO = REPOSITORY / "scripts" / "demo" / "model"
KIB = 1024
H200, RTX_4090, SMALL = 227 * KIB, 99 * KIB, 24 * KIB


def chosen(
    monkeypatch: pytest.MonkeyPatch, shared_bytes: int = H200, dtype: str = "bfloat16", **changes: object
) -> Operations:
    """What computes the demo's model on a GPU with so much shared memory; `head_size` is of every layer."""
    capability = {"major": 9 if shared_bytes == H200 else 8, "minor": 0}
    properties = SimpleNamespace(shared_memory_per_block_optin=shared_bytes, **capability)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setattr(
        torch.cuda,
        "get_device_capability",
        lambda device: changes.pop("capability", (9, 0) if shared_bytes == H200 else (8, 0)),
    )
    quantization = changes.pop("quantization", None)
    model = ModelOptions(path=str(REPOSITORY / "scripts" / "demo" / "model"), dtype=dtype, quantization=quantization)
    resolved = resolve_run(RunConfig(model=model, device="cuda"), "cuda")
    config = resolved.model_config
    if head_size := changes.pop("head_size", None):
        changes["layers"] = tuple(replace(layer, head_size=head_size) for layer in config.layers)
    resolved = replace(resolved, model_config=replace(config, **changes))
    return TritonDevice(resolved, torch.device("cuda", 0)).operations()


def test_encoders_are_taken(monkeypatch: pytest.MonkeyPatch):
    assert isinstance(chosen(monkeypatch, is_encoder=True).attention, TritonBackend)


@pytest.mark.parametrize(("found", "is_supported"), [((8, 6), False), ((8, 9), True), ((9, 0), True), ((12, 0), True)])
def test_fp8_needs_a_gpu_that_multiplies_it(
    monkeypatch: pytest.MonkeyPatch, found: tuple[int, int], is_supported: bool
):
    monkeypatch.setattr(triton_backend, "capability", lambda device: found)
    integers = chosen(monkeypatch, quantization="int8")
    assert isinstance(integers.kernels, Int8TritonKernels)
    assert integers.quantised is integers.kernels
    if is_supported:
        operations = chosen(monkeypatch, quantization="fp8")
        assert isinstance(operations.kernels, Fp8TritonKernels)
        assert operations.quantised is operations.kernels
        return
    way_out = r"8\.9 or later, which multiplies FP8, and a GPU has 8\.6: use model\.quantization=int8"
    with pytest.raises(ConfigError, match=way_out):
        chosen(monkeypatch, quantization="fp8")


@pytest.mark.parametrize(("head_size", "is_taken"), [(8, False), (16, True), (96, True), (512, True), (544, False)])
def test_heads_that_no_gate_has_seen_are_refused(monkeypatch: pytest.MonkeyPatch, head_size: int, is_taken: bool):
    if is_taken:
        chosen(monkeypatch, head_size=head_size)
        return
    with pytest.raises(ConfigError, match=rf"sizes .*16 to 512 .*, not {head_size} "):
        chosen(monkeypatch, head_size=head_size)


def test_gpu_with_small_shared_memory_is_rejected(monkeypatch: pytest.MonkeyPatch):
    for shared_bytes, dtype, head_size in ((SMALL, "float16", 64), (RTX_4090, "float32", 256)):
        with pytest.raises(ConfigError, match=rf"heads of {head_size} in {dtype}, .* {shared_bytes:,}: "):
            chosen(monkeypatch, shared_bytes, dtype, head_size=head_size)
    for shared_bytes, dtype, head_size in (
        (RTX_4090, "bfloat16", 256),
        (RTX_4090, "float32", 64),
        (H200, "float32", 256),
    ):
        chosen(monkeypatch, shared_bytes, dtype, head_size=head_size)


def test_triton_sums_in_rank_order(monkeypatch: pytest.MonkeyPatch):
    """NCCL takes its order by the number of tokens: with tensor parallelism a row's bits depended on its neighbours."""
    model = ModelOptions(path=str(REPOSITORY / "scripts" / "demo" / "model"), dtype="float32")
    alone, pair = single_group(), GroupHandle(ranks=(0, 1), rank=0, group=object())
    monkeypatch.setattr(opened_device, "choose_device", lambda *arguments, **keywords: torch.device("meta"))
    found = []
    for worker_class, num_ranks in ((TritonWorker, 2), (TritonWorker, 1), (Worker, 2)):
        config = RunConfig(model=model, parallel=ParallelConfig(tensor_parallel_size=num_ranks), device="cpu")
        worker = worker_class(resolve_run(config, "cpu"), RankEnvironment(world_size=num_ranks))
        groups = ParallelGroups(worker.layout, pair if num_ranks > 1 else alone, alone, alone, alone)
        monkeypatch.setattr(opened_device, "join_groups", lambda *arguments, groups=groups: groups)
        worker.init_device()
        found.append(worker.groups.tensor.adds_in_order)
    # Control: another worker leaves its sums to NCCL.
    assert found == [True, True, False]


@pytest.mark.parametrize("failing", ["allocate", "exchange", "neither"])
def test_failed_allocation_disables_peer_sums_everywhere(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, failing: str
):
    """Another rank fails where this one does not: nothing is exchanged before all have allocated."""
    asked: list[str] = []

    class Memory:
        def __init__(self, group: object, own: torch.Tensor) -> None:
            asked.append("exchange")
            self.views = [own, own]

        @staticmethod
        def allocate(num_bytes: int, device: torch.device) -> torch.Tensor:
            asked.append("allocate")
            return torch.zeros(num_bytes, dtype=torch.uint8)

    def is_on_any_rank(control: GroupHandle, flag: bool) -> bool:
        return flag or asked[-1] == failing

    monkeypatch.setattr(triton_backend, "SymmetricMemory", Memory)
    monkeypatch.setattr(triton_backend, "is_on_any_rank", is_on_any_rank)
    model = ModelOptions(path=str(REPOSITORY / "scripts" / "demo" / "model"), dtype="float32")
    resolved, alone = resolve_run(RunConfig(model=model, device="cuda"), "cuda"), single_group()
    groups = ParallelGroups(resolved.layout, GroupHandle((0, 1), 0, object()), alone, alone, alone)
    sums = TritonDevice(resolved, torch.device("cuda", 0)).wrap_groups(groups).tensor.fast
    assert (sums is not None) == (failing == "neither")
    assert asked == (["allocate"] if failing == "allocate" else ["allocate", "exchange"])
    assert ("sums go through NCCL (another rank)" in caplog.text) == (failing != "neither")


def test_which_steps_are_recorded(monkeypatch: pytest.MonkeyPatch):
    """Not where the host waits or is asked not to: sums through NCCL, models that pool."""
    demo, alone = REPOSITORY / "scripts" / "demo" / "model", single_group()
    through_nccl = GroupHandle(ranks=(0, 1), rank=0, group=object())
    over_memory = replace(through_nccl, fast=PeerSums.__new__(PeerSums))
    for folder, tensor, is_eager, can_record in (
        (demo, alone, False, True),
        (demo, alone, True, False),
        (demo, through_nccl, False, False),
        (demo, over_memory, False, True),
        (expert_folder("qwen3_moe"), alone, False, True),
        (pooling_folder("mean"), alone, False, False),
        (state_folder("lfm2"), alone, False, True),
    ):
        model, executor = ModelOptions(path=str(folder), dtype="float32"), ExecutorConfig(enforce_eager=is_eager)
        config = RunConfig(model=model, executor=executor, device="cpu")
        resolved = resolve_run(config, "cpu")
        groups = ParallelGroups(resolved.layout, tensor, alone, alone, alone)
        device, environment = torch.device("cpu"), RankEnvironment(world_size=1)
        opened = OpenedDevice(resolved, environment, device, TritonDevice(resolved, device), groups)
        assert opened.backend.can_record(tensor) == can_record, (folder, tensor, is_eager)
        # What graphs hold beside is set aside.
        monkeypatch.setattr(start, "measure_step", lambda loaded, spec: MemoryMeasurement(100, 10, 7, 1))
        monkeypatch.setattr(start, "size_rank", lambda resolved, rank, measurement: measurement)
        measurement = start.measure(SimpleNamespace(opened=opened, model=SimpleNamespace(tower=None)), None)
        assert measurement.activation_bytes == 7 * (1 + can_record)


def test_triton_worker_class_warns_of_successor(caplog: pytest.LogCaptureFixture):
    resolved = resolve_run(RunConfig(model=ModelOptions(path=str(DEMO), dtype="float32"), device="cpu"), "cpu")
    worker = TritonWorker(resolved, RankEnvironment(world_size=1))
    worker.init_device()
    assert isinstance(worker.opened.backend, TritonDevice)
    TritonWorker(resolved, RankEnvironment(rank=1, world_size=2))
    (said,) = [record.getMessage() for record in caplog.records if "TritonWorker" in record.getMessage()]
    assert "set executor.device_backend=triton" in said
    # Control: a worker of the default class takes the CPU's.
    plain = Worker(resolved, RankEnvironment(world_size=1))
    plain.init_device()
    assert not isinstance(plain.opened.backend, TritonDevice)
