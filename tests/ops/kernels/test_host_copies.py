"""Uploads for which the host does not wait: through pinned memory, which a copy to a CUDA device needs for that."""

import pytest
import torch
from ranks import REPOSITORY

from spmd_worker.ops.kernels.host_copies import to_device

FOLDERS = ("worker/runner", "ops/attention", "model/layers", "ops/sampling", "ops/kernels/triton")
STEP = [REPOSITORY / "spmd_worker" / name for name in FOLDERS]


def test_on_the_cpu_numbers_stay_where_they_are():
    numbers = torch.arange(3)
    assert to_device(numbers, torch.device("cpu")) is numbers


@pytest.mark.parametrize(("device", "expected"), [("cuda:0", ["pinned", "cuda:0"]), ("meta", ["meta"])])
def test_only_copies_to_cuda_use_pinned_memory(monkeypatch: pytest.MonkeyPatch, device: str, expected: list[str]):
    calls: list[str] = []

    def pin(numbers: torch.Tensor) -> torch.Tensor:
        calls.append("pinned")
        # As torch does: another tensor, so that whoever has the first may write to it.
        return numbers.clone()

    def to(numbers: torch.Tensor, where: torch.device, *, non_blocking: bool) -> torch.Tensor:
        assert non_blocking
        calls.append(str(where))
        return numbers

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    monkeypatch.setattr(torch.Tensor, "to", to)
    numbers = torch.arange(3)
    found = to_device(numbers, torch.device(device))
    assert calls == expected
    assert (found is numbers) == (device == "meta")


def test_device_tensors_are_not_pinned(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda _: pytest.fail("only memory of the host can be pinned"))
    monkeypatch.setattr(torch.Tensor, "to", lambda numbers, where, *, non_blocking: numbers)
    numbers = torch.empty(3, device="meta")
    assert to_device(numbers, torch.device("cuda:0")) is numbers


def test_steps_upload_no_other_way():
    """Without waiting, that is; those that wait are counted on the meta device."""
    files = [path for folder in STEP for path in folder.rglob("*.py")]
    found = [str(path) for path in files if "non_blocking" in path.read_text()]
    assert (len(files) > 20, found) == (True, [])
    assert "non_blocking" in (REPOSITORY / "spmd_worker/ops/kernels/host_copies.py").read_text()
