"""A job in this process that ends as one that is killed does, when so many rows are in its journal."""

from typing import Any

import pytest

from spmd_worker.frontends.batch.run_dir.journal import RowJournal


class Ended(BaseException):
    """Stands for a killed process: no handler of ours catches it."""


def end_after(monkeypatch: pytest.MonkeyPatch, num_rows: int) -> None:
    """The job raises Ended when so many rows are in the journal."""
    append = RowJournal.append

    def counted(journal: RowJournal, key: Any, answer: Any) -> None:
        append(journal, key, answer)
        if journal.num_rows >= num_rows:
            raise Ended

    monkeypatch.setattr(RowJournal, "append", counted)
