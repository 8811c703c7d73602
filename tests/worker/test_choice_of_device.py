"""Which device a rank computes on, said by a torch.cuda that only counts."""

import pytest
import torch

from spmd_worker.errors import ConfigError, DeviceError
from spmd_worker.worker.device import choose_device


def see(monkeypatch: pytest.MonkeyPatch, count: int, current: int = 0, visible: str | None = None) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)


def test_a_rank_has_the_gpu_of_its_local_rank(monkeypatch: pytest.MonkeyPatch):
    see(monkeypatch, 8, current=5)
    assert choose_device("auto", 3) == torch.device("cuda", 3), "what is current counts in a caller's world alone"
    assert choose_device("cpu", 3) == torch.device("cpu")
    see(monkeypatch, 0)
    assert choose_device("auto", 3) == torch.device("cpu")
    with pytest.raises(ConfigError, match="finds no CUDA device"):
        choose_device("cuda", 0)


def test_a_rank_that_sees_its_own_gpu_alone_takes_it(monkeypatch: pytest.MonkeyPatch):
    """Ray's actors and tasks of srun --gpus-per-task=1 could not start: local rank 3 of a node of one GPU."""
    for visible in ("6", "GPU-4ed7"):
        see(monkeypatch, 1, visible=visible)
        assert choose_device("cuda", 3) == torch.device("cuda", 0)


@pytest.mark.parametrize(("count", "visible"), [(1, None), (1, ""), (2, "0,1")])
def test_ranks_that_see_the_same_gpus_need_one_each(monkeypatch: pytest.MonkeyPatch, count: int, visible: str | None):
    see(monkeypatch, count, visible=visible)
    with pytest.raises(DeviceError, match=f"local rank 3 needs a GPU of its own but this node has {count}"):
        choose_device("cuda", 3)


@pytest.mark.parametrize(("current", "expected"), [(5, 5), (0, 3)])
def test_in_a_callers_world_the_device_that_the_caller_set_counts(
    monkeypatch: pytest.MonkeyPatch, current: int, expected: int
):
    """0 is current where nobody has set any."""
    see(monkeypatch, 8, current=current)
    assert choose_device("cuda", 3, is_callers_world=True) == torch.device("cuda", expected)
