"""Rows that an engine's encoder or tower has made: its store, and changes of it. Brings no transformers."""

from typing import Any

import pytest

from spmd_worker import LLM
from spmd_worker.worker.runner.media_store import MediaStore


def store_of(llm: LLM) -> MediaStore:
    store = llm.llm_engine.executor.driver_worker.mm_receiver_cache
    assert isinstance(store, MediaStore)
    return store


def shift_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows of each step turned by one, for controls."""
    of_step = MediaStore.of_step

    def shifted(store: MediaStore, scheduled: Any) -> Any:
        media = of_step(store, scheduled)
        return media and media._replace(rows=media.rows.roll(1, 0))

    monkeypatch.setattr(MediaStore, "of_step", shifted)


def noted_owners() -> list[int]:
    """Owners of what is made from now on, for a process that ends with its test."""
    owners: list[int] = []
    apply = MediaStore.apply

    def noted(store: MediaStore, plan: Any, *args: Any) -> None:
        owners.extend(each.owner for each in plan.encode)
        apply(store, plan, *args)

    MediaStore.apply = noted  # type: ignore[method-assign]  # this process ends with the test
    return owners
