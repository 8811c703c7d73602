"""The launcher's store as replicas use it: whole numbers that only grow, and bytes of any length.

The store takes values up to 8 MiB, so longer ones travel in pieces. Nothing that is read is unpickled.
"""

from typing import Final, Protocol

_PIECE_BYTES: Final = 1 << 20


class Store(Protocol):
    """What of torch's stores is used. `get` waits for a key that is not there; ask `check` first."""

    def add(self, key: str, amount: int, /) -> int:
        """Add to a number that begins at 0, as one act; returns the sum."""

    def check(self, keys: list[str], /) -> bool:
        """Whether all keys have values."""

    def get(self, key: str, /) -> bytes:
        """A key's value."""

    def set(self, key: str, value: bytes, /) -> None:
        """Give a key a value."""

    def delete_key(self, key: str, /) -> bool:
        """Forget a key; False where there was none."""


def put_bytes(store: Store, key: str, payload: bytes) -> None:
    """Whoever sees `key` finds all pieces: it comes last."""
    starts = range(0, len(payload), _PIECE_BYTES)
    for number, start in enumerate(starts):
        store.set(f"{key}/{number}", payload[start : start + _PIECE_BYTES])
    store.set(key, str(len(starts)).encode())


def take_bytes(store: Store, key: str) -> bytes | None:
    """What `put_bytes` left there, which is then gone; None when nothing is there yet. One taker a key."""
    if not store.check([key]):
        return None
    pieces = [f"{key}/{number}" for number in range(int(store.get(key)))]
    payload = b"".join([store.get(piece) for piece in pieces])
    for each in (key, *pieces):
        store.delete_key(each)
    return payload
