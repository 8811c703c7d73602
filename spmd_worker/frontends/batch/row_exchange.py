"""Sends rows to the replicas of a job and answers to rank 0, through the launcher's store.

    claimed       number of chunks of rows that replicas have claimed, published or not
    rows/N        chunk N: lines of the input, as read by rank 0
    end           total number of chunks, once known
    answers/R/N   message N of replica R: output lines with their counts

The replica that claims a number owns that chunk, so nothing is handed out twice without further agreement. A message is
a line of JSON with the lengths of its parts, then the parts.
"""

import json
from typing import Any, Final

from spmd_worker.engine.data_parallel.round import ReplicaRound
from spmd_worker.engine.data_parallel.store import put_bytes, take_bytes
from spmd_worker.frontends.batch.row_window import NumberedLine
from spmd_worker.frontends.openai.row_writer import RowAnswer

_END: Final = "end"


class RowSender:
    """Rank 0's side: publishes chunks of rows, receives answers."""

    def __init__(self, round_: ReplicaRound) -> None:
        self._store, self._prefix = round_.store, round_.prefix
        self._num_chunks = 0
        self._num_received = {replica: 0 for replica in range(round_.num_replicas) if replica != round_.replica}

    @property
    def num_ahead(self) -> int:
        """Published chunks that no replica has claimed; below 0 when replicas wait for some."""
        return self._num_chunks - self._store.add(f"{self._prefix}/claimed", 0)

    def publish(self, rows: list[NumberedLine]) -> None:
        put_bytes(self._store, f"{self._prefix}/rows/{self._num_chunks}", pack_rows(rows))
        self._num_chunks += 1

    def end(self) -> None:
        """Publish the number of chunks; call once."""
        self._store.set(f"{self._prefix}/{_END}", str(self._num_chunks).encode())

    def receive(self) -> list[RowAnswer]:
        """Answers that arrived since the last call, without waiting."""
        answers: list[RowAnswer] = []
        for replica, number in self._num_received.items():
            while (payload := take_bytes(self._store, f"{self._prefix}/answers/{replica}/{number}")) is not None:
                answers += unpack_answers(payload)
                number += 1
            self._num_received[replica] = number
        return answers

    def forget(self) -> None:
        """Remove the remaining keys, once every replica has ended."""
        for name in ("claimed", _END):
            self._store.delete_key(f"{self._prefix}/{name}")


class RowClaimer:
    """A replica's side, also on rank 0: its leader claims chunks of rows and sends answers."""

    def __init__(self, round_: ReplicaRound) -> None:
        self._store, self._prefix, self._replica = round_.store, round_.prefix, round_.replica
        self._number: int | None = None
        self._num_sent = 0
        self.has_ended = False

    def claim(self) -> list[NumberedLine]:
        """The next chunk for this replica; empty when it is not published yet, or when `has_ended`."""
        if self.has_ended:
            return []
        if self._number is None:
            self._number = self._store.add(f"{self._prefix}/claimed", 1) - 1
        payload = take_bytes(self._store, f"{self._prefix}/rows/{self._number}")
        if payload is None:
            end = f"{self._prefix}/{_END}"
            self.has_ended = self._store.check([end]) and self._number >= int(self._store.get(end))
            return []
        self._number = None
        return unpack_rows(payload)

    def send(self, answers: list[RowAnswer]) -> None:
        put_bytes(self._store, f"{self._prefix}/answers/{self._replica}/{self._num_sent}", pack_answers(answers))
        self._num_sent += 1


def pack_rows(rows: list[NumberedLine]) -> bytes:
    """Encode rows."""
    return _pack([[row.index] for row in rows], [row.line for row in rows])


def unpack_rows(payload: bytes) -> list[NumberedLine]:
    """The inverse of `pack_rows`."""
    return [NumberedLine(index, line) for (index,), line in _unpack(payload)]


def pack_answers(answers: list[RowAnswer]) -> bytes:
    """Encode answers."""
    # By hand: `astuple` copies every value.
    heads = [
        [
            *(each.index, each.error_code, each.num_prompt_tokens, each.num_cached_tokens, each.num_output_tokens),
            each.media_digest,
        ]
        for each in answers
    ]
    return _pack(heads, [each.line for each in answers])


def unpack_answers(payload: bytes) -> list[RowAnswer]:
    """The inverse of `pack_answers`."""
    return [RowAnswer(index, line, *counts) for (index, *counts), line in _unpack(payload)]


def _pack(heads: list[list[Any]], parts: list[bytes]) -> bytes:
    head = json.dumps([[head, len(part)] for head, part in zip(heads, parts, strict=True)]).encode("ascii")
    return b"".join([head, b"\n", *parts])


def _unpack(payload: bytes) -> list[tuple[list[Any], bytes]]:
    start = payload.index(b"\n") + 1
    found = []
    for head, length in json.loads(payload[:start]):
        found.append((head, payload[start : start + length]))
        start += length
    assert start == len(payload), (start, len(payload))
    return found
