"""Ranks that load adapters without comparing them: what the test of adapters on ranks says to that."""

import json
import sys
from pathlib import Path

import pytest
import test_adapters_on_ranks

from spmd_worker.replica.sequence.adapter_change import AdapterChange
from spmd_worker.worker.adapters import StagedAddition, WorkerAdapters


@pytest.mark.stress
@pytest.mark.control("An adapter is loaded on all ranks or on none")
def test_control_uncompared_contents_are_detected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, control):
    """Negative control: a rank with another file loads it."""
    monkeypatch.setattr(test_adapters_on_ranks, "SCRIPT", __file__)
    with control("DID NOT RAISE"):
        test_adapters_on_ranks.test_adapters_are_loaded_on_all_ranks(test_adapters_on_ranks.TP, tmp_path)


def prepare_whatever_there_is(self: WorkerAdapters, change: AdapterChange) -> StagedAddition:
    loaded, source = self._check(change), self._source(change)
    return StagedAddition(change, None if self.has(source.digest) else loaded.prepare(source))


if __name__ == "__main__":
    WorkerAdapters.prepare_add_lora = prepare_whatever_there_is
    test_adapters_on_ranks.main(Path(sys.argv[2]), **json.loads(sys.argv[1]))
