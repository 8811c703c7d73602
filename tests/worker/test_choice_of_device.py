"""Which device a rank computes on, said by a torch.cuda that only counts."""

from types import SimpleNamespace

import pytest
import torch

from spmd_worker.base.errors import ConfigError, DeviceError
from spmd_worker.worker import device as device_module
from spmd_worker.worker.device import check_gpus_not_shared, choose_device, gpu_identity


def see(monkeypatch: pytest.MonkeyPatch, count: int, current: int = 0, visible: str | None = None) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)


def test_rank_uses_gpu_of_its_local_rank(monkeypatch: pytest.MonkeyPatch):
    see(monkeypatch, 8, current=5)
    assert choose_device("auto", 3) == torch.device("cuda", 3), "what is current counts in a caller's world alone"
    assert choose_device("cpu", 3) == torch.device("cpu")
    see(monkeypatch, 0)
    assert choose_device("auto", 3) == torch.device("cpu")
    with pytest.raises(ConfigError, match=r"torch .*no CUDA"):
        choose_device("cuda", 0)


def test_rank_uses_its_only_visible_gpu(monkeypatch: pytest.MonkeyPatch):
    """Ray's actors and tasks of srun --gpus-per-task=1 could not start: local rank 3 of a node of one GPU."""
    for visible in ("6", "GPU-4ed7"):
        see(monkeypatch, 1, visible=visible)
        assert choose_device("cuda", 3) == torch.device("cuda", 0)


@pytest.mark.parametrize(("count", "visible"), [(1, None), (1, ""), (2, "0,1")])
def test_rank_without_own_gpu_is_rejected(monkeypatch: pytest.MonkeyPatch, count: int, visible: str | None):
    see(monkeypatch, count, visible=visible)
    with pytest.raises(DeviceError, match=rf"^local rank 3 .* has {count}: "):
        choose_device("cuda", 3)


@pytest.mark.parametrize(("current", "expected"), [(5, 5), (0, 3)])
def test_callers_current_device_is_used(monkeypatch: pytest.MonkeyPatch, current: int, expected: int):
    """0 is current where nobody has set any."""
    see(monkeypatch, 8, current=current)
    assert choose_device("cuda", 3, is_callers_world=True) == torch.device("cuda", expected)


GPU = torch.device("cuda", 0)
"""Of every rank: each sees one."""


def identity_of(monkeypatch: pytest.MonkeyPatch, uuid: str, host: str = "one", variables: dict | None = None) -> str:
    """What a rank says of its GPU on `host`."""
    properties = SimpleNamespace(uuid=uuid, name="H200")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(device_module, "boot_id", lambda: host)
    return gpu_identity(GPU, variables or {})


@pytest.mark.guarantee("Ranks of one host take a GPU each", is_control_inside=True)
def test_ranks_on_the_same_gpu_are_rejected(monkeypatch: pytest.MonkeyPatch):
    """CUDA_VISIBLE_DEVICES=0 for all of them: replicas of one rank each ran on one GPU, and nothing said so."""
    one, other = (identity_of(monkeypatch, uuid) for uuid in ("4ed7", "51aa"))
    elsewhere = identity_of(monkeypatch, "4ed7", host="two")
    with pytest.raises(ConfigError, match=r"^ranks 0, 2, 5 .* H200 GPU-4ed7, .*ranks 1, 4 .*H200 GPU-51aa"):
        check_gpus_not_shared([one, other, one, elsewhere, other, one])
    check_gpus_not_shared([one, other, elsewhere])
    assert len({one, other, elsewhere}) == 3


@pytest.mark.guarantee("Ranks of one host take a GPU each", is_control_inside=True)
def test_ranks_may_share_gpu_by_variable(monkeypatch: pytest.MonkeyPatch):
    allowed = {"SPMD_WORKER_SHARE_GPUS": "1"}
    check_gpus_not_shared([identity_of(monkeypatch, "4ed7", variables=allowed)] * 2)
    check_gpus_not_shared([gpu_identity(torch.device("cpu"), {})] * 2)
    # Control: the same ranks with another value.
    with pytest.raises(ConfigError, match=r"^ranks 0, 1 .*one host"):
        check_gpus_not_shared([identity_of(monkeypatch, "4ed7", variables={"SPMD_WORKER_SHARE_GPUS": "0"})] * 2)
