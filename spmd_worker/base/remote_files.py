"""Files of remote stores (`s3://bucket/rows.jsonl`), through fsspec: list, read, create, write whole or not at all.

Reading is by ranges, with bounded memory; all blocks are of one version of the file, or reading fails.
"""

import errno
import io
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any, BinaryIO, Final

from spmd_worker.base.remote_names import is_remote as is_remote
from spmd_worker.base.remote_names import scheme_of
from spmd_worker.base.remote_names import shown_name as shown_name
from spmd_worker.base.remote_store import RemoteChangedError, RemoteError, Store, is_transient, open_store, status_of
from spmd_worker.base.remote_upload import write_remote as write_remote

_BLOCK_BYTES: Final = 1 << 20
_MAX_BLOCKS: Final = 16
"""Blocks held of an open file: Parquet reads its columns in turn."""
_AHEAD: Final = 4
"""Blocks requested before they are asked for, once blocks are read in order."""
_BUFFER_BYTES: Final = 1 << 18
_VERSIONS: Final = ("ETag", "etag", "generation", "blob_id", "Content-MD5", "Digest", "Last-Modified")
_TIMES: Final = ("LastModified", "last_modified", "updated", "mtime", "modified", "created")


@dataclass(frozen=True, slots=True)
class RemoteState:
    """Size and version of a remote file: etag, generation or time. `time_s` is the server's time of the last write, or
    None.
    """

    num_bytes: int
    version: str
    time_s: float | None = field(default=None, compare=False)


def state_of(name: str) -> RemoteState:
    """The file's state now. Raises FileNotFoundError and other OSErrors."""
    return _state(open_store(name))


def list_remote(pattern: str) -> list[str]:
    """Names of the files that match the pattern, sorted; of one file, if the name is its. Raises OSError."""
    store = open_store(pattern)

    if "*" not in pattern:
        try:
            _state(store)
            return [pattern]
        except FileNotFoundError:
            if "[" not in pattern:
                return []

    def found() -> list[str]:
        store.fs.invalidate_cache()
        listed = store.fs.glob(store.path, detail=True)
        return [store.full_name(path) for path, info in sorted(listed.items()) if info["type"] == "file"]

    return store.retried(found)


def states_below(folder: str) -> dict[str, RemoteState]:
    """State of each file below a folder, by its name there. Raises OSError."""
    store = open_store(folder)

    def found() -> dict[str, RemoteState]:
        store.fs.invalidate_cache()
        try:
            listed = store.fs.find(store.path, detail=True)
        except FileNotFoundError:
            return {}
        base = store.path.rstrip("/") + "/"
        return {
            path[len(base) :]: state_in(store, info) for path, info in sorted(listed.items()) if path.startswith(base)
        }

    return store.retried(found)


def read_remote(name: str) -> bytes | None:
    """All bytes of a small file; None if there is none. Raises OSError."""
    store = open_store(name)
    try:
        return bytes(store.retried(lambda: store.fs.cat_file(store.path)))
    except FileNotFoundError:
        return None


def replace_remote(name: str, data: bytes) -> None:
    """Create or replace a small file, whole. Raises OSError."""
    store = open_store(name)
    _make_parents(store)
    store.retried(lambda: store.fs.pipe_file(store.path, data))


def create_remote(name: str, data: bytes) -> bool:
    """Create a small file, whole; False if the name exists with other bytes: those of two writers must differ. Raises
    OSError.
    """
    store = open_store(name)
    _make_parents(store)
    try:
        store.retried(lambda: store.fs.pipe_file(store.path, data, mode="create"))
    except FileExistsError:
        # Perhaps made by a try of this call whose answer was lost; aiohttp repeats a request by itself, too.
        return read_remote(name) == data
    return True


def delete_remote(name: str) -> None:
    """Delete a file, if it is there. Raises OSError."""
    store = open_store(name)
    try:
        store.retried(lambda: store.fs.rm_file(store.path))
    except FileNotFoundError:
        return


def open_remote(name: str) -> BinaryIO:
    """The file's bytes, read as they are needed; one can seek. Reading raises RemoteChangedError if the file is
    replaced, and other OSErrors.
    """
    store = open_store(name)
    return io.BufferedReader(RemoteFile(store, _state(store)), _BUFFER_BYTES)


class RemoteFile(io.RawIOBase):
    """Reads blocks of a file in one state. Blocks ahead are requested by threads, which end with their requests."""

    def __init__(self, store: Store, state: RemoteState) -> None:
        self.name = shown_name(store.name)
        self._store, self._state = store, state
        self._offset = 0
        self._blocks: OrderedDict[int, Future[bytes]] = OrderedDict()
        self._last = -1

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._offset

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._offset, io.SEEK_END: self._state.num_bytes}[whence]
        if base + offset < 0:
            raise OSError(errno.EINVAL, "negative offset", self.name)
        self._offset = base + offset
        return self._offset

    def readinto(self, buffer: Any, /) -> int:
        if self._offset >= self._state.num_bytes:
            return 0
        number, start = divmod(self._offset, _BLOCK_BYTES)
        piece = memoryview(self._block(number))[start : start + len(buffer)]
        buffer[: len(piece)] = piece
        self._offset += len(piece)
        return len(piece)

    def close(self) -> None:
        self._blocks.clear()
        super().close()

    def _block(self, number: int) -> bytes:
        is_next, self._last = number == self._last + 1, number
        num_blocks = -(-self._state.num_bytes // _BLOCK_BYTES)
        for each in range(number, min(number + 1 + (_AHEAD if is_next else 0), num_blocks)):
            if each not in self._blocks:
                self._blocks[each] = self._request(each)
        self._blocks.move_to_end(number)
        while len(self._blocks) > _MAX_BLOCKS:
            self._blocks.popitem(last=False)
        try:
            return self._blocks[number].result()
        except Exception:
            # The next read asks again.
            del self._blocks[number]
            raise

    def _request(self, number: int) -> "Future[bytes]":
        future: Future[bytes] = Future()
        start = number * _BLOCK_BYTES
        stop = min(start + _BLOCK_BYTES, self._state.num_bytes)

        def run() -> None:
            try:
                future.set_result(read_range(self._store, self._state, start, stop))
            except Exception as error:  # raised by the thread that reads
                future.set_exception(error)

        # Not of a pool: its threads would be joined at the end of the process, however long a server is silent.
        threading.Thread(target=run, name="spmd-remote", daemon=True).start()
        return future


def read_range(store: Store, state: RemoteState, start: int, stop: int) -> bytes:
    """Bytes of the file in this state. Raises RemoteChangedError if it is replaced, and other OSErrors.

    Where a store reads under a condition (S3, HTTP with an etag) no other version's bytes come at all. Elsewhere the
    state is compared after each range.
    """
    pieces: list[bytes] = []
    while start < stop:
        piece = store.retried(partial(_read_once, store, state, start, stop))
        if not piece:
            raise RemoteError(store.name, f"ends before byte {start} of {state.num_bytes}: give the complete file")
        # A short answer: the rest is asked for, of the same version.
        pieces.append(piece)
        start += len(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def _read_once(store: Store, state: RemoteState, start: int, stop: int) -> bytes:
    try:
        if store.is_s3:
            return _read_s3(store, state, start, stop)
        options = _http_condition(state) if scheme_of(store.name) in ("http", "https") else {}
        data = bytes(store.fs.cat_file(store.path, start=start, end=stop, **options))
    except Exception as error:  # any library's
        # 416: shorter now.
        if status_of(error) in (412, 416) or (isinstance(error, FileNotFoundError) and not is_transient(error)):
            raise RemoteChangedError(store.name) from None
        raise
    if len(data) > stop - start:
        raise RemoteError(store.name, "the server ignores ranges: download the file, and give its path")
    if not options and _state(store) != state:
        raise RemoteChangedError(store.name)
    return data


def _read_s3(store: Store, state: RemoteState, start: int, stop: int) -> bytes:
    from fsspec.asyn import sync

    async def read() -> bytes:
        response = await store.fs._call_s3(
            "get_object", **store.bucket_and_key(), Range=f"bytes={start}-{stop - 1}", IfMatch=state.version
        )
        async with response["Body"] as body:
            return bytes(await body.read())

    return bytes(sync(store.fs.loop, read))


def _http_condition(state: RemoteState) -> dict[str, Any]:
    is_strong = state.version.startswith('"')
    return {"headers": {"If-Match": state.version}} if is_strong else {}


def _state(store: Store) -> RemoteState:
    def found() -> RemoteState:
        store.fs.invalidate_cache()
        return state_in(store, store.fs.info(store.path))

    return store.retried(found)


def state_in(store: Store, info: dict[str, Any]) -> RemoteState:
    """State in a description of fsspec. Raises FileNotFoundError for a folder, RemoteError for an unknown size."""
    if info.get("type") == "directory":
        raise FileNotFoundError(store.path)
    if info.get("size") is None:
        raise RemoteError(store.name, "the server does not give its size: download the file, and give its path")
    version = _first(info, _VERSIONS) or _first(info, _TIMES)
    time = _first(info, _TIMES)
    if hasattr(time, "timestamp"):
        time = time.timestamp()
    return RemoteState(int(info["size"]), str(version or ""), float(time) if isinstance(time, int | float) else None)


def _first(info: dict[str, Any], keys: Sequence[str]) -> Any:
    return next((info[key] for key in keys if info.get(key)), None)


def _make_parents(store: Store) -> None:
    """Make folders where a store has some."""
    if scheme_of(store.name) in ("file", "memory"):
        store.fs.makedirs(store.fs._parent(store.path), exist_ok=True)
