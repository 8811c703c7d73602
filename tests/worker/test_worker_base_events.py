"""A worker's side of a worker event: which methods run, with what, and what a refusal says."""

from typing import Any

import pytest
from plain_worker import FakeWorker


class EventWorker(FakeWorker):
    def prepare_grow(self, payload: Any) -> str:
        self._note("prepare_grow", payload)
        if payload == "too much":
            raise MemoryError("no room")
        return f"staged {payload}"

    def commit_grow(self, staged: str) -> int:
        self._note("commit_grow", staged)
        return 7

    def undo_grow(self, staged: str | None) -> None:
        self._note("undo_grow", staged)

    def prepare_shrink(self, payload: Any) -> None:
        self._note("prepare_shrink")

    def commit_shrink(self, staged: None) -> None:
        raise RuntimeError("broken")


def test_commit_gets_the_staged_value():
    worker = EventWorker()
    assert worker.prepare_event("grow", 3) == ""
    assert worker.end_event(is_committed=True) == 7
    assert worker.calls == [("prepare_grow", 3), ("commit_grow", "staged 3")]


def test_undo_gets_the_staged_value():
    worker = EventWorker()
    worker.prepare_event("grow", 3)
    assert worker.end_event(is_committed=False) is None
    assert worker.calls == [("prepare_grow", 3), ("undo_grow", "staged 3")]


def test_undo_runs_after_failed_prepare():
    worker = EventWorker()
    assert worker.prepare_event("grow", "too much") == "MemoryError: no room"
    worker.end_event(is_committed=False)
    assert worker.calls == [("prepare_grow", "too much"), ("undo_grow", None)]


def test_undo_is_optional():
    worker = EventWorker()
    worker.prepare_event("shrink", None)
    worker.end_event(is_committed=False)
    assert worker.calls == [("prepare_shrink",)]


def test_event_without_methods_names_missing_one():
    worker = EventWorker()
    expected = "EventWorker has no method prepare_fly, which worker event 'fly' needs"
    assert worker.prepare_event("fly", None) == expected
    worker.end_event(is_committed=False)
    assert worker.calls == []


def test_commit_error_is_raised():
    worker = EventWorker()
    worker.prepare_event("shrink", None)
    with pytest.raises(RuntimeError, match="broken"):
        worker.end_event(is_committed=True)
