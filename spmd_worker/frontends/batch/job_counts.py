"""Sums over the rows of a job."""

from dataclasses import dataclass, field
from typing import NamedTuple

from spmd_worker.frontends.batch.run_dir.journal import JournalRecord
from spmd_worker.frontends.openai.row_writer import RowAnswer


class LostRows(NamedTuple):
    """Rows of leases that a world of a pool has lost: `computed` in vain, or `dropped` while they waited."""

    computed: int = 0
    dropped: int = 0


@dataclass(slots=True)
class JobCounts:
    """Sums over the answered rows; `resumed_rows` and `resumed_output_tokens` are of an earlier start."""

    rows: int = 0
    resumed_rows: int = 0
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    output_tokens: int = 0
    resumed_output_tokens: int = 0
    error_codes: dict[str, int] = field(default_factory=dict)

    @property
    def error_rows(self) -> int:
        """Rows that did not run."""
        return sum(self.error_codes.values())

    def add(self, answer: RowAnswer) -> None:
        self.rows += 1
        self.prompt_tokens += answer.num_prompt_tokens
        self.cached_prompt_tokens += answer.num_cached_tokens
        self.output_tokens += answer.num_output_tokens
        if answer.error_code is not None:
            self.error_codes[answer.error_code] = self.error_codes.get(answer.error_code, 0) + 1

    def add_record(self, record: JournalRecord) -> None:
        """Count one row that an earlier start of the job answered."""
        counts = (record.num_prompt_tokens, record.num_cached_tokens, record.num_output_tokens)
        self.add(RowAnswer(record.row, b"", record.error_code, *counts))
        self.resumed_rows += 1
        self.resumed_output_tokens += record.num_output_tokens
