"""Nothing new waits for the device in the middle of a step, and each way of doing so is found."""

from pathlib import Path

import pytest
import sync_rules
from planting import REPOSITORY, plant
from sync_rules import read_back_violations

RUNNER, SAMPLER = "spmd_worker/worker/runner/model_runner.py", "spmd_worker/ops/sampling/filters.py"
HEAD = '"""Planted."""\n\nimport torch\n\n\ndef step(x, device):\n'

PLANTED = {
    "item": "    return x.sum().item()",
    "tolist": "    return x.tolist()",
    "cpu": "    return x.cpu()",
    "numpy": "    return x.detach().numpy()",
    "nonzero": "    return torch.nonzero(x)",
    "unique": "    return torch.unique(x)",
    "synchronize": "    torch.cuda.synchronize()",
    "tensor": "    return torch.tensor([1], device=device)",
    "as_tensor": "    return torch.as_tensor([1], device=device)",
}


def test_new_code_never_waits_for_the_device():
    assert read_back_violations(REPOSITORY) == []


@pytest.mark.parametrize("name", PLANTED)
def test_read_back_check_detects_call_at_its_line(tmp_path: Path, name: str):
    assert read_back_violations(plant(tmp_path, {RUNNER: f"{HEAD}{PLANTED[name]}\n"})) == [
        f"{RUNNER}:7: {name}: the host waits for the device: keep it there, or list it in house.py"
    ]


def test_read_back_check_detects_other_counts_than_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(
        sync_rules.house, "MAY_READ_BACK", {"spmd_worker.ops.sampling.filters": {"tensor": (1, "planted")}}
    )
    one, two = PLANTED["tensor"], f"    {PLANTED['tensor'].removeprefix('    return ')}\n{PLANTED['tensor']}"
    assert read_back_violations(plant(tmp_path, {SAMPLER: f"{HEAD}{one}\n"})) == []
    (found,) = read_back_violations(plant(tmp_path, {SAMPLER: f"{HEAD}{two}\n"}))
    assert found.startswith(f"{SAMPLER}:8: tensor: the host waits")
    assert read_back_violations(plant(tmp_path, {SAMPLER: HEAD + "    return x\n"})) == [
        f"{SAMPLER}:1: tensor: house.py lists 1 read-backs and there are 0"
    ]


def test_read_back_check_ignores_uploads_and_other_floors(tmp_path: Path):
    kept = "    y = torch.tensor([1])\n    return torch.from_numpy(x).to(device, non_blocking=True) + y.items()"
    files = {RUNNER: f"{HEAD}{kept}\n", "spmd_worker/worker/worker.py": f"{HEAD}    return x.item()\n"}
    assert read_back_violations(plant(tmp_path, files)) == []
