"""Adapters of one rank: the worker events that load and remove them, of LoRA adapters `add_lora` and `remove_lora`.

An adapter is read and checked while the event is prepared, so that a commit cannot fail. Contents are compared by their
digests: a rank whose file or tensors differ from rank 0's refuses the event, and no rank has the adapter.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

from spmd_worker.base.errors import AdapterError
from spmd_worker.model.adapters.loaded import LoadedAdapters, StagedAdapter
from spmd_worker.model.adapters.prompt_adapter import PromptAdapter
from spmd_worker.model.adapters.source import AdapterSource, adapter_from_tensors, read_adapter
from spmd_worker.replica.sequence.adapter_change import AdapterChange
from spmd_worker.replica.sequence.adapter_kind import LORA, AdapterKind
from spmd_worker.replica.sequence.lora_request import LoRARequest

_Adapter = TypeVar("_Adapter", bound=AdapterSource | PromptAdapter)


class AdapterRefusal(AdapterError):
    """Rank 0 has refused a change, for reasons that it alone knows: requests that wait, adapters that are pinned."""


class RankAdapters(ABC, Generic[_Adapter]):
    """Adapters of one kind on one rank: `ids` maps the user's ids to contents."""

    kind: ClassVar[AdapterKind]

    def __init__(self, read_folder: Callable[[str], _Adapter]) -> None:
        self.ids: dict[int, int] = {}
        self._read_folder = read_folder
        self._read: tuple[int, _Adapter | None, str] | None = None

    @abstractmethod
    def _drop_content(self, digest: int) -> None:
        """Drop a content that no id has."""

    def _stage_source(self, int_id: int, read: Callable[[], _Adapter]) -> tuple[int, str]:
        """Read an adapter for the event that follows, or `unstage`. Returns its digest and "", or 0 and the reason."""
        self._read = None
        try:
            source = read()
            digest = source.digest
        except Exception as error:  # the other ranks must learn of any failure
            problem = str(error) if isinstance(error, AdapterError) else f"{type(error).__name__}: {error}"
            self._read = (int_id, None, problem)
            return 0, problem
        self._read = (int_id, source, "")
        return digest, ""

    def unstage(self) -> None:
        """Forget what `stage` has read: no event follows."""
        self._read = None

    def list(self) -> set[int]:
        """Ids of the loaded adapters."""
        return set(self.ids)

    def _source(self, change: AdapterChange) -> _Adapter:
        """The adapter that this rank's caller has given; without one, as in `follow`, that of rank 0's folder."""
        read, self._read = self._read, None
        if read is not None and read[0] == change.int_id:
            if read[1] is None:
                raise AdapterError(read[2])
            return read[1]
        if not change.path:
            raise AdapterError(
                f"{self.kind.noun} {change.int_id} ({change.name!r}) has tensors on rank 0 and none here: every rank "
                f"gives its own, or all read a folder"
            )
        return self._read_folder(change.path)

    def _same_source(self, change: AdapterChange) -> _Adapter:
        """`_source`. Raises AdapterError for a content that differs from rank 0's."""
        source = self._source(change)
        if source.digest != change.digest:
            raise AdapterError(
                f"{source.subject}: the content of {self.kind.noun} {change.int_id} ({change.name!r}) has the digest "
                f"{source.digest:016x} here and {change.digest:016x} on rank 0: give every rank the same"
            )
        return source

    def _drop(self, change: AdapterChange) -> None:
        self._read = None
        for int_id in change.evicted:
            self.ids.pop(int_id, None)
        for digest in change.dropped:
            self._drop_content(digest)

    def _remove(self, change: AdapterChange) -> bool:
        self._drop(change)
        return self.ids.pop(change.int_id, None) is not None

    def _removal(self, int_id: int) -> AdapterChange:
        """The removal of an adapter from this worker alone."""
        others = [digest for key, digest in self.ids.items() if key != int_id]
        dropped = tuple(digest for key, digest in self.ids.items() if key == int_id and digest not in others)
        return AdapterChange(int_id, "", "", 0, (), dropped)


@dataclass(frozen=True, slots=True)
class StagedAddition:
    """A prepared event; `adapter` is None if its content is loaded."""

    change: AdapterChange
    adapter: StagedAdapter | None


class WorkerAdapters(RankAdapters[AdapterSource]):
    """Handles the two events. `loaded` None is a run without adapters, else `max_adapters` are loaded at once."""

    kind = LORA

    def __init__(self, loaded: LoadedAdapters | None, max_adapters: int = 0) -> None:
        super().__init__(read_adapter)
        self._loaded, self._max_adapters, self._has_engine = loaded, max_adapters, False

    def has(self, digest: int) -> bool:
        """Whether rows may have this content."""
        return self._loaded is not None and digest in self._loaded.digests

    def stage(
        self, int_id: int, path: str, peft_config: Mapping[str, Any] | None, tensors: Mapping[str, Any] | None
    ) -> tuple[int, str]:
        if tensors is None:
            return self._stage_source(int_id, lambda: read_adapter(path))
        return self._stage_source(int_id, lambda: adapter_from_tensors(peft_config or {}, tensors))

    def prepare_add_lora(self, change: AdapterChange) -> StagedAddition:
        """Raises AdapterError for an adapter that cannot be used here, or differs from rank 0's."""
        loaded, source = self._check(change), self._same_source(change)
        if source.digest in loaded.merged:
            raise AdapterError(
                f"{source.subject}: LoRA adapter {change.int_id} ({change.name!r}) is merged into the weights for all "
                f"rows (model.lora_merge), and those that name it would have it twice: name no adapter in rows that "
                f"need this one alone, or leave model.lora_merge out"
            )
        return StagedAddition(change, None if self.has(source.digest) else loaded.prepare(source))

    def commit_add_lora(self, staged: StagedAddition) -> bool:
        self._drop(staged.change)
        if staged.adapter is not None:
            assert self._loaded is not None, "prepared"
            self._loaded.commit(staged.adapter)
        self.ids[staged.change.int_id] = staged.change.digest
        return True

    def undo_add_lora(self, staged: StagedAddition | None) -> None:
        self._read = None
        if staged is not None and staged.adapter is not None and self._loaded is not None:
            self._loaded.discard(staged.adapter)

    def prepare_remove_lora(self, change: AdapterChange) -> AdapterChange:
        self._check(change)
        return change

    def commit_remove_lora(self, change: AdapterChange) -> bool:
        return self._remove(change)

    def leave_to_engine(self) -> None:
        """Reject `add` and `remove` from now on: an engine's adapters are those of all ranks."""
        self._has_engine = True

    def add(self, request: LoRARequest) -> bool:
        """Load an adapter on this worker alone, for a caller that drives it without an engine. Nothing is evicted.
        Raises AdapterError.
        """
        self._check_alone("add_lora")
        int_id = request.lora_int_id
        digest, problem = self.stage(int_id, request.lora_path, request.peft_config, request.lora_tensors)
        before = self.ids.get(int_id, digest)
        others = [content for key, content in self.ids.items() if key != int_id]
        dropped = () if before in (digest, *others) else (before,)
        if not problem and before != digest and not request.load_inplace:
            problem = f"lora_int_id={int_id} has another content: give load_inplace=True, or remove it first"
        if not problem and len(dict.fromkeys([digest, *others])) > self._max_adapters:
            problem = f"model.max_cpu_loras={self._max_adapters} LoRA adapters are loaded: remove one first"
        change = AdapterChange(int_id, request.lora_name, request.lora_path, digest, (), dropped, problem)
        return self.commit_add_lora(self.prepare_add_lora(change))

    def remove(self, int_id: int) -> bool:
        """Remove an adapter from this worker alone; returns whether it was loaded."""
        self._check_alone("remove_lora")
        return self._remove(self._removal(int_id))

    def pin(self, int_id: int) -> bool:
        """No effect: a worker evicts none by itself. Raises AdapterError unless it is loaded."""
        if int_id not in self.ids:
            raise AdapterError(f"LoRA adapter {int_id} cannot be pinned: it is not loaded")
        return True

    def _check_alone(self, call: str) -> None:
        if self._has_engine:
            raise AdapterError(
                f"{call} on one worker would make its adapters differ from other ranks': call LLM.{call}"
            )

    def _check(self, change: AdapterChange) -> LoadedAdapters:
        if change.problem:
            raise AdapterRefusal(change.problem)
        if self._loaded is None:
            raise AdapterError("this run has no LoRA adapters: set model.enable_lora=true")
        return self._loaded

    def _drop_content(self, digest: int) -> None:
        assert self._loaded is not None, "prepared"
        self._loaded.remove(digest)
