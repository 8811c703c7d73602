"""Ranks that read different files compare what they load, not what else is in the folder."""

import shutil
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ranks import REPOSITORY
from retrained import retrain

from spmd_worker.base.config.schema import ModelOptions, RunConfig
from spmd_worker.base.errors import RanksDisagreeError
from spmd_worker.engine.startup import _agree_on_weights
from spmd_worker.model.weights.identity import file_identities
from spmd_worker.resolved import resolve_run

WATCHDOG: Any = SimpleNamespace(heartbeat=SimpleNamespace(enter=lambda phase: None))


class TwoRanks:
    """A channel of rank 0; `others` are the payloads of rank 1, which then gathers what rank 0 does."""

    rank, size = 0, 2

    def __init__(self, others: Iterable[bytes]) -> None:
        self.others, self.own = list(others), []

    def gather(self, payload: bytes) -> list[bytes]:
        self.own.append(payload)
        return [payload, self.others.pop(0) if self.others else payload]


def payloads(folder: Path, load_format: str, others: Iterable[bytes]) -> list[bytes]:
    options = ModelOptions(path=str(folder), load_format=load_format)
    channel: Any = TwoRanks(others)
    _agree_on_weights(channel, WATCHDOG, resolve_run(RunConfig(model=options, device="cpu"), "cpu"), "weights")
    return list(channel.own)


def test_state_beside_a_checkpoint_hides_no_difference(tmp_path: Path):
    """Regression: equal descriptions of a sharded state were compared, and the checkpoints beside them were loaded."""
    folders = [tmp_path / name for name in "ab"]
    for each in folders:
        shutil.copytree(REPOSITORY / "scripts" / "demo" / "model", each)
        (each / "sharded_state.json").write_text("{}")
    retrain(folders[1])
    found = payloads(folders[0], "auto", [b"", b"[]"])
    with pytest.raises(RanksDisagreeError, match=r"^ranks were given different weights: model\.\S+ is \"\w+\" on rank"):
        payloads(folders[1], "auto", found)
    # Negative control: of a state, ranks may have their own files alone.
    payloads(folders[1], "sharded_state", payloads(folders[0], "sharded_state", [b"", b"[]"]))


def test_files_that_are_not_loaded_are_not_compared(tmp_path: Path):
    """Regression: a broken link ended every start, and another file had ranks read all weights."""
    model = Path(shutil.copytree(REPOSITORY / "scripts" / "demo" / "model", tmp_path / "model"))
    before = file_identities(model)
    assert [each[1] for each in before] == ["model.safetensors"]
    (model / "consolidated.safetensors").symlink_to("nowhere")
    assert file_identities(model) == before
    with pytest.raises(FileNotFoundError):
        file_identities(model, is_state=True)
