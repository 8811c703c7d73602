"""Runs with `parallel.invariant_tensor_parallel` on GPUs: refused ones, with the way out, and their groups."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from expert_checkpoints import expert_folder
from ranks import REPOSITORY

from spmd_worker.base.config.parallel import ParallelConfig
from spmd_worker.base.config.schema import ExecutorConfig, ModelOptions, RunConfig
from spmd_worker.base.errors import ConfigError
from spmd_worker.ranks.communicator import GroupHandle, single_group
from spmd_worker.ranks.groups import ParallelGroups
from spmd_worker.resolved import ResolvedRun, resolve_run
from spmd_worker.worker.backends.choice import with_device_backend
from spmd_worker.worker.backends.plain_torch import TorchDevice
from spmd_worker.worker.backends.triton import TritonDevice

DEMO = REPOSITORY / "scripts" / "demo" / "model"


def resolved(
    folder: Path = DEMO, device: str = "cuda", backend: str = "auto", quantization: str | None = None,
    is_invariant: bool | None = True, **parallel: object,
) -> ResolvedRun:  # fmt: skip
    options = ParallelConfig(invariant_tensor_parallel=is_invariant, **parallel)  # type: ignore[arg-type]  # of any key
    model = ModelOptions(path=str(folder), quantization=quantization)
    run = RunConfig(model, options, executor=ExecutorConfig(device_backend=backend), device=device)
    return resolve_run(run, device)


def test_gpu_run_has_leaves_only_when_asked():
    assert resolved().layout.num_leaves == 4
    assert resolved(is_invariant=None).layout.num_leaves == 1
    # For what adapters add to sums of integers.
    assert resolved(quantization="int8").layout.num_leaves == 4
    # Interpreted kernels are those of GPUs.
    assert resolved(device="cpu", is_invariant=None).layout.num_leaves == 4
    assert resolved(device="cpu", backend="triton", is_invariant=None).layout.num_leaves == 1
    assert with_device_backend(resolved(device="cpu", is_invariant=None), "triton").layout.num_leaves == 1


@pytest.mark.parametrize(("device", "backend"), [("cuda", "auto"), ("cpu", "triton")])
def test_fp8_with_leaves_is_refused(device: str, backend: str):
    with pytest.raises(ConfigError, match=r"fp8 a rank's share .* scales of its own: use model\.quantization=int8"):
        resolved(device=device, backend=backend, quantization="fp8")
    resolved(device=device, backend=backend, quantization="fp8", is_invariant=None)


@pytest.mark.parametrize(("device", "backend"), [("cuda", "auto"), ("cpu", "triton")])
def test_columns_of_experts_with_leaves_are_refused(device: str, backend: str):
    folder = expert_folder("qwen3_moe")
    with pytest.raises(ConfigError, match=r"size=2 .* set parallel\.enable_expert_parallel=true"):
        resolved(folder, device, backend, tensor_parallel_size=2)
    resolved(folder, device, backend, tensor_parallel_size=2, is_invariant=None)
    resolved(folder, device, backend)
    # Experts of 32 columns have one leaf, which one rank has the bits of.
    complete = resolved(folder, device, backend, enable_expert_parallel=True)
    assert complete.layout.experts is not None
    assert complete.layout.experts.is_exact


def test_plain_torch_with_leaves_is_refused():
    way_out = r"choose the order of their sums by the shape: use .* executor\.device_backend=triton on a GPU"
    for device in ("cuda", "cpu"):
        with pytest.raises(ConfigError, match=way_out):
            resolved(device=device, backend="torch")
    # Chosen by `auto`, for a model that Triton does not compute.
    with pytest.raises(ConfigError, match=way_out):
        TorchDevice(resolved(), torch.device("cuda", 0)).operations()
    TorchDevice(resolved(is_invariant=None), torch.device("cuda", 0)).operations()
    TorchDevice(resolved(device="cpu", backend="torch", is_invariant=None), torch.device("cpu")).operations()


@pytest.mark.parametrize(
    ("size", "is_invariant", "by_tree"), [(2, True, True), (4, True, True), (2, None, False), (8, True, False)]
)
def test_triton_group_adds_by_tree_when_asked(size: int, is_invariant: bool | None, by_tree: bool):
    run = resolved(is_invariant=is_invariant)
    run = replace(run, layout=replace(run.layout, tensor_parallel_size=size))
    alone, group = single_group(), GroupHandle(tuple(range(size)), 0, group=object())  # type: ignore[arg-type]  # unused
    groups = ParallelGroups(run.layout, group, alone, alone, alone)
    tensor = TritonDevice(run, torch.device("meta")).wrap_groups(groups).tensor
    assert (tensor.adds_by_tree, tensor.adds_in_order) == (by_tree, True)
