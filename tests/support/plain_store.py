"""A store in this process, with the five calls that replicas make. `get` of a key that is not there is a mistake."""

import threading


class PlainStore:
    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self._lock = threading.Lock()

    def add(self, key: str, amount: int) -> int:
        with self._lock:
            total = int(self.values.get(key, b"0")) + amount
            self.values[key] = str(total).encode()
            return total

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)

    def get(self, key: str) -> bytes:
        return self.values[key]

    def set(self, key: str, value: bytes) -> None:
        assert len(value) <= 8 << 20, "torch's store takes no more"
        self.values[key] = value

    def delete_key(self, key: str) -> bool:
        return self.values.pop(key, None) is not None
