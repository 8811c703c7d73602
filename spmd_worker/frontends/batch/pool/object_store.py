"""A pool's store in an object store (S3 and what has its conditional writes): `job.pool=s3://bucket/pool`.

An object is created by a write that the server rejects if the name exists (If-None-Match: *); the server's clock is the
time of an object's last write, in whole seconds on S3.
"""

import errno
import secrets
from pathlib import Path
from typing import Any, Final

from spmd_worker.base.errors import ConfigError
from spmd_worker.base.remote_files import (
    RemoteState,
    create_remote,
    delete_remote,
    read_remote,
    replace_remote,
    state_in,
    state_of,
)
from spmd_worker.base.remote_names import check_writable, is_remote, shown_name
from spmd_worker.base.remote_store import Store, open_store
from spmd_worker.frontends.batch.pool.posix_store import open_folder
from spmd_worker.frontends.batch.pool.store import Listed, PoolStore

_PROBE: Final = "tmp/probe"


class ObjectStore:
    """Implements `PoolStore` below a remote name: `open_objects`."""

    def __init__(self, root: str) -> None:
        self._root = root.rstrip("/")

    def create(self, name: str, data: bytes) -> bool:
        # Recognised by its content if the answer is lost: entries name their writers.
        return create_remote(self._name(name), data)

    def read(self, name: str) -> bytes | None:
        return read_remote(self._name(name))

    def list(self, prefix: str) -> list[Listed]:
        folder, _, beginning = prefix.rpartition("/")
        below = f"{folder}/" if folder else ""
        root = open_store(self._root)
        states = _states_s3(root, prefix) if root.is_s3 else _states(open_store(f"{self._root}/{folder}"))
        return [
            Listed(f"{below}{name}", state.num_bytes, state.time_s or 0.0)
            for name, state in sorted(states.items())
            if name.startswith(beginning) and name[:1] not in ("", ".")
        ]

    def touch(self, name: str, data: bytes) -> None:
        replace_remote(self._name(name), data)

    def now_s(self, own: str) -> float:
        self.touch(own, b"")
        time_s = state_of(self._name(own)).time_s
        if time_s is None:
            raise OSError(errno.ENOTSUP, "the store gives no time of a write", shown_name(self._name(own)))
        return time_s

    def delete(self, name: str) -> None:
        delete_remote(self._name(name))

    def _name(self, name: str) -> str:
        return f"{self._root}/{name}"


def open_pool_store(name: str) -> PoolStore:
    """The store of `job.pool`: a folder or an object store. Raises ConfigError for one that is not usable."""
    return open_objects(name) if is_remote(name) else open_folder(Path(name))


def open_objects(root: str) -> ObjectStore:
    """The store below a remote name. Raises ConfigError for one that cannot be written, or that lets a name be created
    twice: found by creating a probe twice.
    """
    check_writable("job.pool", root)
    store, probe = ObjectStore(root), f"{_PROBE}.{secrets.token_hex(8)}"
    try:
        is_created, is_again = store.create(probe, b"first"), store.create(probe, b"second")
        found = store.read(probe)
        store.now_s(probe)
        store.delete(probe)
    except OSError as error:
        raise ConfigError(
            f"job.pool={shown_name(root)} cannot be written ({error.strerror}): give another name, or a folder"
        ) from None
    if not is_created or is_again or found != b"first":
        raise ConfigError(
            f"job.pool={shown_name(root)}: the store lets a name be created twice (it ignores If-None-Match), and two "
            f"worlds would write the same rows: give a store with conditional writes, or a folder"
        )
    return store


def _states_s3(store: Store, prefix: str) -> dict[str, RemoteState]:
    """State of each object below the path whose name there begins with `prefix` and has no further slash, by its last
    component.
    """
    bucket, key = store.bucket_and_key().values()
    found: dict[str, RemoteState] = {}
    mark: dict[str, str] = {}
    while True:
        call = {"Bucket": bucket, "Prefix": f"{key}/{prefix}", "Delimiter": "/", **mark}
        answer = store.retried(lambda: store.fs.call_s3("list_objects_v2", **call))  # noqa: B023
        for each in answer.get("Contents", ()):
            found[each["Key"].rpartition("/")[2]] = state_in(store, {**each, "size": each["Size"]})
        if not answer.get("IsTruncated"):
            return found
        mark = {"ContinuationToken": answer["NextContinuationToken"]}


def _states(store: Store) -> dict[str, RemoteState]:
    def listed() -> list[dict[str, Any]]:
        store.fs.invalidate_cache()
        try:
            return list(store.fs.ls(store.path, detail=True))
        except FileNotFoundError:
            return []

    files = [info for info in store.retried(listed) if info["type"] == "file"]
    return {str(info["name"]).rpartition("/")[2]: state_in(store, info) for info in files}
