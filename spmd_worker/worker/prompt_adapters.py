"""Worker events `add_prompt_adapter` and `remove_prompt_adapter`: the prompt adapters of one rank.

As with LoRA adapters (`adapters.py`) every rank reads its own folder while the event is prepared, and a rank whose
content differs from rank 0's refuses it.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from spmd_worker.base.errors import AdapterError
from spmd_worker.model.adapters.prompt_adapter import (
    PromptAdapter,
    keys_values_for,
    read_prompt_adapter,
    rows_for,
)
from spmd_worker.model_config.model_config import ModelConfig
from spmd_worker.ranks.topology import Stage
from spmd_worker.replica.sequence.adapter_change import AdapterChange
from spmd_worker.replica.sequence.adapter_kind import PROMPT
from spmd_worker.replica.sequence.input_rows import EMBEDDINGS
from spmd_worker.replica.sequence.prompt_adapter_request import PromptAdapterRequest, content_of
from spmd_worker.worker.adapters import AdapterRefusal, RankAdapters
from spmd_worker.worker.runner.prefix_store import PrefixStore
from spmd_worker.worker.runner.row_store import RowStore


@dataclass(frozen=True, slots=True)
class StagedPromptAdapter:
    """A prepared event: rows, or keys and values; neither if the content is loaded or not held on this rank."""

    change: AdapterChange
    rows: Tensor | None = None
    keys_values: Tensor | None = None


class WorkerPromptAdapters(RankAdapters[PromptAdapter]):
    """Handles the two events. `rows` is the first stage's; `tensor_ranks` are this rank and the size of its group."""

    kind = PROMPT

    def __init__(
        self,
        rows: RowStore | None,
        prefixes: PrefixStore,
        model_config: ModelConfig,
        dtype: torch.dtype,
        stage: Stage,
        tensor_ranks: tuple[int, int],
        windows: tuple[int, ...] = (),
    ) -> None:
        """`windows` behind which blocks go back to the pool (`LayerGroups`)."""
        super().__init__(read_prompt_adapter)
        self._rows, self._prefixes = rows, prefixes
        self._model_config, self._dtype, self._stage, self._tensor_ranks = model_config, dtype, stage, tensor_ranks
        self._windows = windows

    def stage(self, int_id: int, path: str, num_tokens: int) -> tuple[int, str]:
        def read() -> PromptAdapter:
            adapter = read_prompt_adapter(path)
            if adapter.num_tokens != num_tokens:
                raise AdapterError(
                    f"{adapter.subject}: has {adapter.num_tokens} virtual tokens, and the request says "
                    f"prompt_adapter_num_virtual_tokens={num_tokens}"
                )
            return adapter

        return self._stage_source(int_id, read)

    def prepare_add_prompt_adapter(self, change: AdapterChange) -> StagedPromptAdapter:
        """Raises AdapterError for an adapter that cannot be used here, or differs from rank 0's."""
        if change.problem:
            raise AdapterRefusal(change.problem)
        adapter = self._same_source(change)
        if adapter.kind == EMBEDDINGS:
            rows = rows_for(adapter, self._model_config, self._dtype)
            return StagedPromptAdapter(change, rows=rows if self._rows is not None else None)
        shortest = min(map(abs, self._windows), default=adapter.num_tokens + 1)
        if adapter.num_tokens >= shortest:
            raise AdapterError(
                f"{adapter.subject}: {adapter.num_tokens} virtual tokens of keys and values fill a window of "
                f"{shortest} tokens, and blocks behind windows go back to the pool: set cache.window_groups=false"
            )
        sizes = (self._stage, self._tensor_ranks)
        return StagedPromptAdapter(
            change, keys_values=keys_values_for(adapter, self._model_config, self._dtype, *sizes)
        )

    def commit_add_prompt_adapter(self, staged: StagedPromptAdapter) -> bool:
        change = staged.change
        self._drop(change)
        content = content_of(change.digest)
        if staged.rows is not None and self._rows is not None:
            self._rows.keep(content, staged.rows)
        if staged.keys_values is not None:
            self._prefixes.keep(content, staged.keys_values)
        self.ids[change.int_id] = change.digest
        return True

    def undo_add_prompt_adapter(self, staged: StagedPromptAdapter | None) -> None:
        self.unstage()

    def prepare_remove_prompt_adapter(self, change: AdapterChange) -> AdapterChange:
        if change.problem:
            raise AdapterRefusal(change.problem)
        return change

    def commit_remove_prompt_adapter(self, change: AdapterChange) -> bool:
        return self._remove(change)

    def add(self, request: PromptAdapterRequest) -> bool:
        """Load an adapter on this worker alone, for a caller that drives it without an engine. Raises AdapterError."""
        int_id, path = request.prompt_adapter_id, request.prompt_adapter_local_path
        digest, problem = self.stage(int_id, path, request.prompt_adapter_num_virtual_tokens)
        if not problem and self.ids.get(int_id, digest) != digest:
            problem = f"prompt_adapter_id={int_id} has another content: remove it first"
        change = AdapterChange(int_id, request.prompt_adapter_name, path, digest, problem=problem)
        return self.commit_add_prompt_adapter(self.prepare_add_prompt_adapter(change))

    def remove(self, int_id: int) -> bool:
        """Remove an adapter from this worker alone; returns whether it was loaded."""
        return self._remove(self._removal(int_id))

    def pin(self, int_id: int) -> bool:
        """Whether the adapter is loaded: a worker never evicts one by itself."""
        return int_id in self.ids

    def _drop_content(self, digest: int) -> None:
        self._prefixes.drop(content_of(digest))
        if self._rows is not None:
            self._rows.drop(content_of(digest))
