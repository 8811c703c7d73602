"""The launcher's store as a dictionary, for ranks that are watchdogs of one process. Knows nothing of heartbeats."""

import threading


class MadeUpStore:
    """`is_gone` set: every call raises, as a store does whose machine is gone."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.is_gone = False
        self._lock = threading.Lock()

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self._check()
        return [self.values[key] for key in keys]

    def set(self, key: str, value: str) -> None:
        self._check()
        self.values[key] = value.encode()

    def add(self, key: str, amount: int) -> int:
        self._check()
        with self._lock:
            value = int(self.values.get(key, b"0")) + amount
            self.values[key] = str(value).encode()
        return value

    def check(self, keys: list[str]) -> bool:
        self._check()
        return all(key in self.values for key in keys)

    def _check(self) -> None:
        if self.is_gone:
            raise RuntimeError("Broken pipe")
