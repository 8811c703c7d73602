"""The store of a pool: named objects that can be created once, and the operations of the protocol on them.

Protocol functions are generators that yield operations and receive their results, so that a real store and a simulator
run the same code.
"""

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, TypeVar


@dataclass(frozen=True, slots=True)
class Listed:
    """An object of a listing. `time_s` is the server's time of its last write."""

    name: str
    num_bytes: int
    time_s: float


class PoolStore(Protocol):
    """Objects by name ("a/b"; parts of a name do not begin with "."). Thread-safe. Every method raises OSError; any of
    them may then be repeated, whether or not it took effect.
    """

    def create(self, name: str, data: bytes) -> bool:
        """Create an object, which is complete and durable when this returns. False: the name exists already."""

    def read(self, name: str) -> bytes | None:
        """All bytes of an object; None if the name does not exist."""

    def list(self, prefix: str) -> list[Listed]:
        """Objects whose name begins with `prefix`, in order of their names; prefixes have their last "/"."""

    def touch(self, name: str, data: bytes) -> None:
        """Create or replace an object; readers see all of the old data or of the new. Sets its time."""

    def now_s(self, own: str) -> float:
        """The server's clock: the time of the object `own`, which this touches."""

    def delete(self, name: str) -> None:
        """Delete an object, if it exists."""


@dataclass(frozen=True, slots=True)
class Create:
    """`PoolStore.create` -> bool."""

    name: str
    data: bytes


@dataclass(frozen=True, slots=True)
class Read:
    """`PoolStore.read` -> bytes | None."""

    name: str


@dataclass(frozen=True, slots=True)
class List:
    """`PoolStore.list` -> list[Listed]."""

    prefix: str


@dataclass(frozen=True, slots=True)
class Touch:
    """`PoolStore.touch` -> None."""

    name: str
    data: bytes


@dataclass(frozen=True, slots=True)
class Now:
    """`PoolStore.now_s` -> float."""

    own: str


@dataclass(frozen=True, slots=True)
class Delete:
    """`PoolStore.delete` -> None."""

    name: str


Operation: TypeAlias = Create | Read | List | Touch | Now | Delete
_Value = TypeVar("_Value")
Steps: TypeAlias = Generator[Operation, Any, _Value]
"""A protocol function: yields operations, receives their results, returns a value."""


def perform(store: PoolStore, operation: Operation) -> Any:
    """Perform one operation, and return its result. Raises OSError."""
    match operation:
        case Create(name, data):
            return store.create(name, data)
        case Read(name):
            return store.read(name)
        case List(prefix):
            return store.list(prefix)
        case Touch(name, data):
            return store.touch(name, data)
        case Now(own):
            return store.now_s(own)
        case Delete(name):
            return store.delete(name)
