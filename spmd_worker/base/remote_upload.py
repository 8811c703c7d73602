"""Files written to a remote store, whole or not at all.

S3: a multipart upload, completed at the end; nothing has the name before. Elsewhere fsspec's own upload of the store,
committed at the end.
"""

import contextlib
import logging
import uuid
from collections.abc import Iterator
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any, Final

from spmd_worker.base.files import name_pattern
from spmd_worker.base.remote_names import check_writable, shown_name
from spmd_worker.base.remote_store import Store, open_store

logger = logging.getLogger(__name__)

_PART_BYTES: Final = 8 << 20
_PARTS_PER_SIZE: Final = 1000
"""Parts double in size every so many: S3 allows 10,000 parts, and memory holds one."""
_NONCE: Final = "spmd-upload"


class RemoteUpload:
    """A file being written: `write` pieces, then `close`, which gives the file its name, or `discard`, which leaves
    none. As a context manager it closes on success and discards on an exception. All raise OSError.
    """

    def __init__(self, store: Store) -> None:
        self.name = shown_name(store.name)
        self._writer: _S3Writer | _PlainWriter = _S3Writer(store) if store.is_s3 else _PlainWriter(store)
        self._is_open = True

    def write(self, data: Any, /) -> int:
        """Accept all bytes; they may be sent later."""
        self._writer.write(data)
        return memoryview(data).nbytes

    def flush(self) -> None:
        """No effect: parts are sent when they are large enough."""

    def tell(self) -> int:
        return self._writer.num_bytes

    def readable(self) -> bool:
        return False

    def writable(self) -> bool:
        return True

    @property
    def closed(self) -> bool:
        return not self._is_open

    def close(self) -> None:
        if self._is_open:
            self._writer.complete()
            self._is_open = False

    def discard(self) -> None:
        """Leave nothing; a failure to do so is logged, and found by the next start."""
        if self._is_open:
            self._is_open = False
            try:
                self._writer.abort()
            except OSError as error:
                logger.warning("%s: an incomplete upload could not be removed: %s", self.name, error)

    abandon = discard

    def __enter__(self) -> "RemoteUpload":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.discard()
            return
        try:
            self.close()
        except BaseException:
            self.discard()
            raise


def write_remote(name: str) -> RemoteUpload:
    """Begin a file. Raises ConfigError as `open_store` does, and for a scheme that is only read."""
    check_writable("name", name)
    return RemoteUpload(open_store(name))


def remove_leftovers(name: str) -> int:
    """Abort uploads of this name, or of parts (a `*` in it), that killed writers left behind; returns their number.
    Raises OSError.
    """
    store = open_store(name)
    if not store.is_s3:
        return 0
    bucket, pattern = store.bucket_and_key().values()
    num_aborted = 0
    for upload in _uploads(store):
        if fnmatchcase(upload["Key"], name_pattern(pattern)):
            _abort(replace(store, path=f"{bucket}/{upload['Key']}"), upload["UploadId"])
            num_aborted += 1
    return num_aborted


def check_creatable(name: str) -> None:
    """Begin a file and discard it. Raises OSError if it could not be written."""
    store = open_store(name)
    if store.is_s3:
        writer = _S3Writer(store)
        writer.begin()
        writer.abort()


class _S3Writer:
    """Parts of a multipart upload; a small file is one request."""

    def __init__(self, store: Store) -> None:
        self.num_bytes = 0
        self._store, self._where = store, store.bucket_and_key()
        self._buffer = bytearray()
        self._upload: str | None = None
        self._parts: list[dict[str, Any]] = []
        # Tells a file completed by a lost answer from another writer's.
        self._metadata = {_NONCE: uuid.uuid4().hex}

    def write(self, data: Any) -> None:
        self._buffer += data
        self.num_bytes += memoryview(data).nbytes
        while len(self._buffer) >= self._part_bytes:
            self._send(self._part_bytes)

    @property
    def _part_bytes(self) -> int:
        return _PART_BYTES << (len(self._parts) // _PARTS_PER_SIZE)

    def begin(self) -> None:
        if self._upload is None:
            answer = self._call("create_multipart_upload", Metadata=self._metadata)
            self._upload = answer["UploadId"]

    def complete(self) -> None:
        if self._upload is None:
            self._call("put_object", Body=bytes(self._buffer), Metadata=self._metadata)
            return
        if self._buffer:
            self._send(len(self._buffer))
        parts = {"Parts": self._parts}
        call = {**self._where, "UploadId": self._upload, "MultipartUpload": parts}
        self._store.retried(
            lambda: self._store.fs.call_s3("complete_multipart_upload", **call), on_retry=self._completed
        )

    def abort(self) -> None:
        upload, self._upload = self._upload, None
        if upload is not None:
            _abort(self._store, upload)

    def _send(self, num_bytes: int) -> None:
        self.begin()
        number = len(self._parts) + 1
        body = bytes(self._buffer[:num_bytes])
        answer = self._call("upload_part", UploadId=self._upload, PartNumber=number, Body=body)
        checksums = {
            key: value for key, value in answer.items() if key.startswith("Checksum") and key != "ChecksumType"
        }
        self._parts.append({"PartNumber": number, "ETag": answer["ETag"], **checksums})
        del self._buffer[:num_bytes]

    def _completed(self) -> Any:
        """The object, if the try whose answer was lost has made it; None if it has not."""
        with contextlib.suppress(FileNotFoundError):
            head = self._store.fs.call_s3("head_object", **self._where)
            if head.get("Metadata", {}).get(_NONCE) == self._metadata[_NONCE]:
                return head
        return None

    def _call(self, method: str, **arguments: Any) -> Any:
        return self._store.retried(lambda: self._store.fs.call_s3(method, **self._where, **arguments))


class _PlainWriter:
    """fsspec's file of another store."""

    def __init__(self, store: Store) -> None:
        self.num_bytes = 0
        self._store = store
        self._file: Any = None

    def write(self, data: Any) -> None:
        self.begin()
        self.num_bytes += memoryview(data).nbytes
        # Not tried again: the library may have sent a part.
        self._guarded(lambda: self._file.write(bytes(data)))

    def begin(self) -> None:
        if self._file is None:
            fs, path = self._store.fs, self._store.path
            fs.makedirs(fs._parent(path), exist_ok=True)
            self._file = self._store.retried(lambda: fs.open(path, "wb", autocommit=False))

    def complete(self) -> None:
        self.begin()
        self._guarded(self._file.close)
        self._guarded(self._file.commit)

    def abort(self) -> None:
        if self._file is not None:
            with contextlib.suppress(Exception):  # a library's own clean-up: nothing has the name either way
                self._file.discard()
            with contextlib.suppress(AttributeError):
                # Else its destructor would complete the file.
                self._file.closed = True
            self._file = None

    def _guarded(self, call: Any) -> None:
        try:
            call()
        except Exception as error:  # any library's, without credentials
            raise self._store.explained(error) from None


def _uploads(store: Store) -> Iterator[dict[str, Any]]:
    """Uploads that were begun with this name as their prefix."""
    bucket, key = store.bucket_and_key().values()
    marks: dict[str, str] = {}
    while True:
        arguments = {"Bucket": bucket, "Prefix": key.partition("*")[0], **marks}
        answer = store.retried(lambda: store.fs.call_s3("list_multipart_uploads", **arguments))  # noqa: B023
        yield from answer.get("Uploads", ())
        if not answer.get("IsTruncated"):
            return
        marks = {"KeyMarker": answer["NextKeyMarker"], "UploadIdMarker": answer["NextUploadIdMarker"]}


def _abort(store: Store, upload: str) -> None:
    # Missing: completed or aborted since.
    with contextlib.suppress(FileNotFoundError):
        store.retried(lambda: store.fs.call_s3("abort_multipart_upload", **store.bucket_and_key(), UploadId=upload))
