"""Adapters of one kind, LoRA or prompt, that every worker has loaded: replica state, which events alone change.

An adapter is named by the user's id, and by the digest of its content, which is all that workers and block hashes know.
Several ids may have one content, which is loaded once. `max_adapters` contents are loaded at most; one more evicts that
of the ids that were used longest ago, in the order of admissions and additions, never by a clock.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from spmd_worker.base.errors import AdapterError
from spmd_worker.replica.sequence.adapter_kind import LORA, AdapterKind
from spmd_worker.replica.sequence.events import AddAdapter, AddPromptAdapter


@dataclass(frozen=True, slots=True)
class RegisteredAdapter:
    """A loaded adapter, the `number`-th that an event has loaded. `path` is its folder on rank 0, or, at the start, on
    this rank; "" for tensors. `last_use` counts uses of all adapters. A prompt adapter has `num_tokens` virtual tokens.
    """

    int_id: int
    name: str
    path: str
    digest: int
    is_pinned: bool = False
    last_use: int = 0
    number: int = 0
    num_tokens: int = 0


class AdapterRegistry:
    """`entries` by id, in the order in which their contents were loaded; read-only for callers."""

    def __init__(
        self, max_adapters: int = 0, loaded: Iterable[RegisteredAdapter] = (), kind: AdapterKind = LORA
    ) -> None:
        self.max_adapters, self.kind = max_adapters, kind
        self.entries: dict[int, RegisteredAdapter] = {each.int_id: each for each in loaded}
        self.digests: tuple[int, ...] = ()
        """The loaded contents, each once: another tuple after each change, because other threads may read it."""
        self._num_uses = max([each.last_use for each in self.entries.values()], default=0)
        self._num_additions = 0
        self._note_contents()

    def has(self, digest: int) -> bool:
        return digest in self.digests

    def of_name(self, name: str) -> RegisteredAdapter | None:
        """The adapter of a name; of several ids, the one loaded last."""
        named = [each for each in self.entries.values() if each.name == name]
        return named[-1] if named else None

    def add(self, event: AddAdapter | AddPromptAdapter) -> None:
        """Add or replace an adapter; those that give way are in the event. A replaced one stays pinned."""
        before = self.remove(event.int_id)
        for int_id in event.evicted:
            self.remove(int_id)
        self._num_uses += 1
        self._num_additions += 1
        is_pinned = before is not None and before.is_pinned
        num_tokens = event.num_tokens if isinstance(event, AddPromptAdapter) else 0
        given = (event.int_id, event.name, event.path, event.digest, is_pinned)
        self.entries[event.int_id] = RegisteredAdapter(*given, self._num_uses, self._num_additions, num_tokens)
        self._note_contents()
        assert len(self.digests) <= self.max_adapters, (self.entries, self.max_adapters)

    def remove(self, int_id: int) -> RegisteredAdapter | None:
        removed = self.entries.pop(int_id, None)
        self._note_contents()
        return removed

    def pin(self, int_id: int) -> None:
        """Never evict this adapter. One that is not loaded any more is not an error."""
        if int_id in self.entries:
            self.entries[int_id] = replace(self.entries[int_id], is_pinned=True)

    def use(self, digest: int) -> None:
        """Note that a request with this content is admitted."""
        self._num_uses += 1
        users = [each for each in self.entries.values() if each.digest == digest]
        assert users, f"a request has adapter {digest}, which is not among {self.digests}"
        for each in users:
            self.entries[each.int_id] = replace(each, last_use=self._num_uses)

    def victims(self, int_id: int, digest: int, is_used: Callable[[int], bool]) -> tuple[int, ...]:
        """Ids that give way to content `digest` of id `int_id`; `is_used` tells whether requests still need a content.

        Raises AdapterError if too few are unpinned and unused.
        """
        contents: dict[int, list[RegisteredAdapter]] = {}
        for each in self.entries.values():
            if each.int_id != int_id:
                contents.setdefault(each.digest, []).append(each)
        num_too_many = len(contents) + (digest not in contents) - self.max_adapters
        if num_too_many <= 0:
            return ()
        free = [
            users
            for content, users in contents.items()
            if content != digest and not is_used(content) and not any(each.is_pinned for each in users)
        ]
        if len(free) < num_too_many:
            num_pinned = sum(any(each.is_pinned for each in users) for users in contents.values())
            raise AdapterError(
                f"{self.kind.counted(len(contents))} loaded, {num_pinned} of them pinned and the others with "
                f"unanswered requests, and {self.kind.limit_key} is {self.max_adapters}: raise it, or remove one first"
            )
        free.sort(key=lambda users: max(each.last_use for each in users))
        return tuple([each.int_id for users in free[:num_too_many] for each in users])

    def unneeded(self, removed: Iterable[int], digest: int = 0) -> tuple[int, ...]:
        """Contents that no id has once the ids `removed` are gone and `digest`, if not 0, was added."""
        gone = dict.fromkeys(removed)
        kept = dict.fromkeys([digest, *[each.digest for key, each in self.entries.items() if key not in gone]])
        return tuple(content for content in self.digests if content not in kept)

    def _note_contents(self) -> None:
        self.digests = tuple(dict.fromkeys(each.digest for each in self.entries.values()))
