"""datatrove on this runtime without a server: a pipeline step with an engine in the task's own process.

    from datatrove.executor import LocalPipelineExecutor
    from spmd_worker.integrations.datatrove_step import AnswerDocuments

    pipeline = [reader, AnswerDocuments("MODEL", sampling={"max_tokens": 256}), writer]

Documents keep their order, and get the columns of `PipelineRows` in their metadata. A document's id is its row's
custom_id: its answer does not depend on tasks, workers or batches, and equals a job's.
"""

from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any, Final

from spmd_worker.base.config.extras import package_error

try:
    from datatrove.data import Document, DocumentsPipeline
    from datatrove.pipeline.base import PipelineStep
except ImportError as error:
    raise package_error("datatrove", "datatrove", error) from error

from spmd_worker.base.errors import ConfigError
from spmd_worker.integrations.pipeline_rows import PipelineRows
from spmd_worker.integrations.row_engine import KeyedRow

_BATCH_DOCUMENTS: Final = 1024


class AnswerDocuments(PipelineStep):  # type: ignore[misc]  # datatrove is no dependency
    """`row_of` makes a row of a job of a document; None: its text is the prompt. A row without custom_id gets the
    document's id. Other arguments are those of `PipelineRows`, without `prompt` and `key`.
    """

    name = "spmd-worker"
    type = "Model call"

    def __init__(
        self,
        model: str,
        *,
        row_of: Callable[[Document], Mapping[str, Any]] | None = None,
        batch_documents: int = _BATCH_DOCUMENTS,
        **options: Any,
    ) -> None:
        super().__init__()
        self.rows = PipelineRows(model, **options)
        self.row_of, self.batch_documents = row_of, batch_documents

    def run(self, data: DocumentsPipeline, rank: int = 0, world_size: int = 1) -> DocumentsPipeline:
        """The documents with their answers. The engine stays open for the process's next task."""
        documents: Iterator[Document] = iter(data)
        while batch := list(islice(documents, self.batch_documents)):
            with self.track_time("batch"):
                columns = self.rows.columns_of([self.keyed(document) for document in batch])
            for document, *values in zip(batch, *columns.values(), strict=True):
                document.metadata |= dict(zip(columns, values, strict=True))
                self.stat_update("failed_documents" if document.metadata[self.rows.names[2]] else "answered_documents")
                yield document

    def keyed(self, document: Document) -> KeyedRow:
        """The row of a document. Raises ConfigError for metadata that would be overwritten."""
        row = {"prompt": document.text} if self.row_of is None else dict(self.row_of(document))
        row.setdefault("custom_id", document.id)
        if given := [name for name in self.rows.names if name in document.metadata]:
            raise ConfigError(
                f"document {document.id} has metadata {given[0]!r} already: name the answers' with output="
            )
        return self.rows.keyed(row)
