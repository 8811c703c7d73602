"""Worker events `add_lora` and `remove_lora`: the LoRA adapters of one rank's model.

An adapter is read and checked while the event is prepared, so that a commit cannot fail. Contents are compared by their
digests: a rank whose file or tensors differ from rank 0's refuses the event, and no rank has the adapter.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from spmd_worker.base.errors import AdapterError
from spmd_worker.model.adapters.loaded import LoadedAdapters, StagedAdapter
from spmd_worker.model.adapters.source import AdapterSource, adapter_from_tensors, read_adapter
from spmd_worker.replica.sequence.adapter_change import AdapterChange
from spmd_worker.replica.sequence.lora_request import LoRARequest


@dataclass(frozen=True, slots=True)
class _Read:
    """An id's adapter as this rank's own caller has given it, or why it cannot be used."""

    int_id: int
    source: AdapterSource | None
    problem: str = ""


@dataclass(frozen=True, slots=True)
class StagedAddition:
    """A prepared event; `adapter` is None if its content is loaded."""

    change: AdapterChange
    adapter: StagedAdapter | None


class AdapterRefusal(AdapterError):
    """Rank 0 has refused a change, for reasons that it alone knows: requests that wait, adapters that are pinned."""


class WorkerAdapters:
    """Handles the two events. `loaded` None is a run without adapters, else `max_adapters` are loaded at once. `ids`
    maps the user's ids to contents.
    """

    def __init__(self, loaded: LoadedAdapters | None, max_adapters: int = 0) -> None:
        self.ids: dict[int, int] = {}
        self._loaded, self._max_adapters = loaded, max_adapters
        self._read: _Read | None = None
        self._has_engine = False

    def has(self, digest: int) -> bool:
        """Whether rows may have this content."""
        return self._loaded is not None and digest in self._loaded.digests

    def stage(
        self, int_id: int, path: str, peft_config: Mapping[str, Any] | None, tensors: Mapping[str, Any] | None
    ) -> tuple[int, str]:
        """Read an adapter for the event that follows, or `unstage`. Returns its digest and "", or 0 and the reason."""
        self._read = None
        try:
            source = read_adapter(path) if tensors is None else adapter_from_tensors(peft_config or {}, tensors)
            digest = source.digest
        except Exception as error:  # the other ranks must learn of any failure
            known = isinstance(error, AdapterError)
            self._read = _Read(int_id, None, str(error) if known else f"{type(error).__name__}: {error}")
            return 0, self._read.problem
        self._read = _Read(int_id, source)
        return digest, ""

    def unstage(self) -> None:
        """Forget what `stage` has read."""
        self._read = None

    def prepare_add_lora(self, change: AdapterChange) -> StagedAddition:
        """Raises AdapterError for an adapter that cannot be used here, or differs from rank 0's."""
        loaded = self._check(change)
        source = self._source(change)
        if source.digest != change.digest:
            raise AdapterError(
                f"{source.subject}: the content of LoRA adapter {change.int_id} ({change.name!r}) has the digest "
                f"{source.digest:016x} here and {change.digest:016x} on rank 0: give every rank the same"
            )
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
        self._drop(change)
        return self.ids.pop(change.int_id, None) is not None

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
        others = [content for key, content in self.ids.items() if key != int_id]
        dropped = tuple(content for key, content in self.ids.items() if key == int_id and content not in others)
        return self.commit_remove_lora(AdapterChange(int_id, "", "", 0, (), dropped))

    def pin(self, int_id: int) -> bool:
        """No effect: a worker evicts none by itself. Raises AdapterError unless it is loaded."""
        if int_id not in self.ids:
            raise AdapterError(f"LoRA adapter {int_id} cannot be pinned: it is not loaded")
        return True

    def list(self) -> set[int]:
        return set(self.ids)

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

    def _source(self, change: AdapterChange) -> AdapterSource:
        """The adapter that this rank's caller has given; without one, as in `follow`, that of rank 0's folder."""
        read, self._read = self._read, None
        if read is not None and read.int_id == change.int_id:
            if read.source is None:
                raise AdapterError(read.problem)
            return read.source
        if not change.path:
            raise AdapterError(
                f"LoRA adapter {change.int_id} ({change.name!r}) has tensors on rank 0 and none here: every rank gives "
                f"its own, or all read a folder"
            )
        return read_adapter(change.path)

    def _drop(self, change: AdapterChange) -> None:
        self._read = None
        for int_id in change.evicted:
            self.ids.pop(int_id, None)
        for digest in change.dropped:
            assert self._loaded is not None, "prepared"
            self._loaded.remove(digest)
