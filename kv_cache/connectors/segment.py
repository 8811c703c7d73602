"""Blocks in shared memory: one segment a producing rank, which other processes of the machine read.

A segment is a file in /dev/shm:

    16 KiB       header: magic, key of the identity, bytes of a block, number of slots, counter of changes; the identity
                 as JSON
    64 bytes     for each slot: name and checksum of its block; no name while the block is being replaced
    slots        the blocks' bytes

Its producer holds a lock on it while it lives. A reader copies a block and then compares the checksum, so that it never
uses one that was replaced meanwhile, or that a producer was killed in the middle of.
"""

import fcntl
import json
import mmap
import os
import struct
from collections.abc import Mapping
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import Final

from kv_cache.block import BlockHash
from kv_cache.connectors.interface import ConnectorContext, ConnectorError

FOLDER: Final = Path("/dev/shm")

_MAGIC: Final = b"SPMDSHM1"
_HEADER: Final = struct.Struct("<8s32sQQQI")
"""Magic, key, bytes of a block, slots, counter of changes, bytes of JSON."""
_HEADER_BYTES: Final = 2**14
_COUNTER: Final = struct.Struct("<Q")
_COUNTER_OFFSET: Final = 8 + 32 + 8 + 8
_ENTRY: Final = struct.Struct("<16s16s32x")
_NO_NAME: Final = bytes(16)
_MAX_WORDS: Final = 200


class Producer:
    """Writes one segment. The oldest block is replaced first."""

    def __init__(self, path: Path, context: ConnectorContext, block_bytes: int, limit_bytes: int) -> None:
        """Raises ConnectorError if another producer has the name, or memory is short."""
        self.path = path
        self._block_bytes, self._num_slots = block_bytes, limit_bytes // (block_bytes + _ENTRY.size)
        if self._num_slots < 1:
            raise ConnectorError(f"gib={limit_bytes / 2**30:g} holds no block of {block_bytes} bytes: raise it")
        # One name for all producers: what a killed one has left there is taken over, not kept in memory.
        new = path.with_name(f"{path.name}.new")
        size = _HEADER_BYTES + self._num_slots * (_ENTRY.size + block_bytes)
        descriptor = self._locked(new, os.O_CREAT)
        assert descriptor is not None, "it is made"
        try:
            self._check_free()
            os.ftruncate(descriptor, 0)
            # Taken now: memory that is short later would be a bus error.
            os.posix_fallocate(descriptor, 0, size)
            self._memory = mmap.mmap(descriptor, size)
            words = _in_words(context.identity)
            header = _HEADER.pack(_MAGIC, context.key.encode(), block_bytes, self._num_slots, 0, len(words))
            self._memory[: len(header) + len(words)] = header + words
            os.replace(new, path)
        except BaseException as error:
            with suppress(OSError):
                new.unlink()
            os.close(descriptor)
            if not isinstance(error, OSError):
                raise
            raise ConnectorError(f"{size} bytes of shared memory for {path} are not available: {error}") from None
        self._descriptor = descriptor
        self._slots: dict[BlockHash, int] = {}
        self._num_changes = 0
        self._is_closed = False

    def write(self, name: BlockHash, content: memoryview) -> None:
        """Publish a block, unless it is there."""
        if name in self._slots:
            return
        slot = len(self._slots)
        if slot == self._num_slots:
            oldest = next(iter(self._slots))
            slot = self._slots.pop(oldest)
        entry, start = _offsets(slot, self._num_slots, self._block_bytes)
        self._memory[entry : entry + _ENTRY.size] = _ENTRY.pack(_NO_NAME, _NO_NAME)
        self._memory[start : start + self._block_bytes] = content
        self._memory[entry : entry + _ENTRY.size] = _ENTRY.pack(name, checksum(name, content))
        self._slots[name] = slot
        self._num_changes += 1
        self._memory[_COUNTER_OFFSET : _COUNTER_OFFSET + _COUNTER.size] = _COUNTER.pack(self._num_changes)

    def close(self) -> None:
        """Remove the segment. Readers that have it open keep what they have. Idempotent."""
        if not self._is_closed:
            self._is_closed = True
            with suppress(OSError):
                self.path.unlink()
            self._memory.close()
            os.close(self._descriptor)

    def _check_free(self) -> None:
        """Check that no living producer has the segment; one that a killed producer has left is replaced."""
        descriptor = self._locked(self.path)
        if descriptor is not None:
            os.close(descriptor)

    def _locked(self, path: Path, flags: int = 0) -> int | None:
        """Descriptor of a file with a producer's lock; None if there is no file. Raises ConnectorError."""
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | flags, 0o600)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise ConnectorError(f"{path} cannot be opened ({error.strerror}): choose another name") from None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            raise ConnectorError(
                f"{self.path} belongs to another producer, which is alive: choose another name, or close that engine"
            ) from None
        return descriptor


class Segment:
    """One segment, open for reading."""

    def __init__(self, path: Path, context: ConnectorContext) -> None:
        """Raises OSError if there is none, ConnectorError for one of another kind, of other weights or layout."""
        self.path = path
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self.inode, size = os.fstat(descriptor).st_ino, os.fstat(descriptor).st_size
            if size < _HEADER_BYTES:
                raise ConnectorError(f"{path} is not a segment of blocks: choose another name")
            self._memory = mmap.mmap(descriptor, size, access=mmap.ACCESS_READ)
        finally:
            os.close(descriptor)
        magic, key, self.block_bytes, self._num_slots, _, num_words = _HEADER.unpack_from(self._memory)
        if magic != _MAGIC or size != _HEADER_BYTES + self._num_slots * (_ENTRY.size + self.block_bytes):
            raise ConnectorError(f"{path} is not a segment of blocks of this version: choose another name")
        if key != context.key.encode():
            words = _read_words(self._memory[_HEADER.size : _HEADER.size + num_words])
            if words is None:
                raise ConnectorError(
                    f"{path} has a damaged header: start the engine with role=producer again, or choose another name"
                )
            raise ConnectorError(_difference(path, words, _read_words(_in_words(context.identity)) or {}))
        self._num_changes = -1
        self._slots: dict[BlockHash, int] = {}

    def has(self, name: BlockHash) -> bool:
        self._refresh()
        return name in self._slots

    def read(self, name: BlockHash) -> bytearray | None:
        """A copy of the block; None if it is not there, or was replaced meanwhile."""
        self._refresh()
        slot = self._slots.get(name)
        if slot is None:
            return None
        entry, start = _offsets(slot, self._num_slots, self.block_bytes)
        content = bytearray(self._memory[start : start + self.block_bytes])
        found, expected = _ENTRY.unpack_from(self._memory, entry)
        return content if found == name and checksum(name, content) == expected else None

    def close(self) -> None:
        self._memory.close()

    def _refresh(self) -> None:
        (num_changes,) = _COUNTER.unpack_from(self._memory, _COUNTER_OFFSET)
        if num_changes != self._num_changes:
            end = _HEADER_BYTES + self._num_slots * _ENTRY.size
            entries = _ENTRY.iter_unpack(self._memory[_HEADER_BYTES:end])
            self._slots = {BlockHash(name): slot for slot, (name, _) in enumerate(entries) if name != _NO_NAME}
            self._num_changes = num_changes


def checksum(name: BlockHash, content: memoryview | bytearray) -> bytes:
    """16 bytes over a block and its name."""
    digest = blake2b(name, digest_size=16, person=b"spmd-kv-segment")
    digest.update(content)
    return digest.digest()


def _offsets(slot: int, num_slots: int, block_bytes: int) -> tuple[int, int]:
    """Positions of a slot's entry and of its bytes."""
    return _HEADER_BYTES + slot * _ENTRY.size, _HEADER_BYTES + num_slots * _ENTRY.size + slot * block_bytes


def _in_words(identity: Mapping[str, str]) -> bytes:
    """JSON of the identity: for each topic a digest, and the beginning of its text."""
    words = {
        topic: [blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest(), text[:_MAX_WORDS]]
        for topic, text in identity.items()
    }
    encoded = json.dumps(words).encode()
    assert len(encoded) <= _HEADER_BYTES - _HEADER.size, len(encoded)
    return encoded


def _read_words(encoded: bytes) -> dict[str, list[str]] | None:
    """The JSON of `_in_words`; None if it is damaged."""
    try:
        words = json.loads(encoded)
    except (ValueError, RecursionError):
        return None
    is_valid = isinstance(words, dict) and all(
        isinstance(each, list) and len(each) == 2 and all(isinstance(text, str) for text in each)
        for each in words.values()
    )
    return words if is_valid else None


def _difference(path: Path, theirs: Mapping[str, list[str]], own: Mapping[str, list[str]]) -> str:
    """The first topic that differs, with both texts from where they do."""
    for topic in (*own, *theirs):
        if own.get(topic) != theirs.get(topic):
            texts = [each[topic][1] if topic in each else "nothing" for each in (theirs, own)]
            equal = [one == two for one, two in zip(*texts)]
            start = equal.index(False) if len(texts[0]) > 60 and False in equal else 0
            first, other = (text[max(0, start - 30) : start + 60] for text in texts)
            return (
                f"{path} has blocks of another {topic}: {first!r} there, {other!r} here; run both engines with the "
                f"same model, options and layout, or choose another name"
            )
    return f"{path} has another key: choose another name"
