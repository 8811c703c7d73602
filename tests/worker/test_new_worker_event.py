"""A worker event of one's own in one file: an extension with prepare, commit and undo, on every worker or on none."""

import os
from pathlib import Path
from typing import Any

import pytest
from plain_executors import MODEL, plain

from spmd_worker import LLM
from spmd_worker.base.errors import WorkerEventError


class LabelExtension:
    """The added piece: event `set_label` writes a file per rank while it prepares, and renames it when it commits."""

    def prepare_set_label(self: Any, payload: dict[str, str]) -> Path:
        staged = Path(payload["folder"], f"rank{self.environment.rank}.part")
        staged.write_text(payload["label"])
        if payload["label"] == f"not on rank {self.environment.rank}":
            raise ValueError(f"label {payload['label']!r} is invalid")
        return staged

    def commit_set_label(self, staged: Path) -> str:
        return os.fspath(staged.rename(staged.with_suffix(".label")).name)

    def undo_set_label(self: Any, staged: Path | None) -> None:
        self.undone = staged is not None
        if staged is not None:
            staged.unlink()

    def has_undone(self) -> bool:
        return bool(getattr(self, "undone", None))


NAME = f"{__name__}.LabelExtension"


@pytest.mark.usefixtures("forked_workers")
def test_new_worker_event_commits_everywhere_or_nowhere(tmp_path: Path):
    with plain(2, worker_extension_cls=NAME) as executor:
        assert executor.prepare_event("set_label", {"folder": str(tmp_path), "label": "a"}) == ""
        assert executor.end_event(is_committed=True) == ["rank0.label", "rank1.label"]
        problem = executor.prepare_event("set_label", {"folder": str(tmp_path), "label": "not on rank 1"})
        assert problem == "rank 1: ValueError: label 'not on rank 1' is invalid"
        executor.end_event(is_committed=False)
        assert executor.collective_rpc("has_undone") == [True, False]
    assert [(tmp_path / f"rank{rank}.label").read_text() for rank in range(2)] == ["a", "a"]
    assert not (tmp_path / "rank0.part").exists()
    # The same event as a user's call, which undoes it on all ranks.
    with LLM(MODEL, device="cpu", num_blocks=32, worker_extension_cls=NAME) as llm:
        with pytest.raises(WorkerEventError, match=r"'set_label' .*undone .*rank 0: ValueError"):
            llm.worker_event("set_label", {"folder": str(tmp_path), "label": "not on rank 0"})
        assert llm.worker_event("set_label", {"folder": str(tmp_path), "label": "b"}) == ["rank0.label"]
