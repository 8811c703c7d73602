"""The launcher's store for replicas: integers that only grow, and bytes of any length.

The store takes values up to 8 MiB, so longer ones are split. Nothing that is read is unpickled.
"""

from typing import Final, Protocol

_PIECE_BYTES: Final = 1 << 20


class Store(Protocol):
    """The used part of torch's stores. `get` waits for a missing key; call `check` first."""

    def add(self, key: str, amount: int, /) -> int:
        """Add to a number that begins at 0, atomically; returns the sum."""

    def check(self, keys: list[str], /) -> bool:
        """Whether all keys have values."""

    def get(self, key: str, /) -> bytes:
        """A key's value."""

    def set(self, key: str, value: bytes, /) -> None:
        """Give a key a value."""

    def delete_key(self, key: str, /) -> bool:
        """Delete a key; False if it was missing."""


def put_bytes(store: Store, key: str, payload: bytes) -> None:
    """Store `payload`; `key` is set last, so a reader that sees it finds all pieces."""
    starts = range(0, len(payload), _PIECE_BYTES)
    for number, start in enumerate(starts):
        store.set(f"{key}/{number}", payload[start : start + _PIECE_BYTES])
    store.set(key, str(len(starts)).encode())


def take_bytes(store: Store, key: str) -> bytes | None:
    """Remove and return the bytes of `put_bytes`; None if there are none yet. One reader per key."""
    if not store.check([key]):
        return None
    pieces = [f"{key}/{number}" for number in range(int(store.get(key)))]
    payload = b"".join([store.get(piece) for piece in pieces])
    for each in (key, *pieces):
        store.delete_key(each)
    return payload
