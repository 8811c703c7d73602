"""Names of remote files (`s3://bucket/rows.jsonl`), and their form in messages, without credentials.

Imports nothing of fsspec: names that are not remote cost nothing.
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any, Final
from urllib.parse import urlsplit

from spmd_worker.base.errors import ConfigError
from spmd_worker.base.urls import without_credentials

PACKAGES: Final = {
    "s3": "s3fs",
    "gs": "gcsfs",
    "az": "adlfs",
    "hf": "huggingface_hub",
    "https": "aiohttp",
    "http": "aiohttp",
    "memory": "fsspec",
    "file": "fsspec",
}
"""Package that each scheme needs, besides fsspec."""
EXTRAS: Final = {**dict.fromkeys(("s3", "https", "http", "memory", "file"), "remote"), "hf": "hub"}
"""Extra that brings the package; the others are installed by their own names."""
READ_ONLY: Final = ("https", "http", "hf")
"""Schemes that are only read."""

_SCHEME: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_SECRET_NAME: Final = re.compile(
    r"secret|token|password|(account|access)_?key|connection_string|sas|^key$|^pass$", re.IGNORECASE
)
_LEAST_SECRET: Final = 6
"""Shorter values are too likely a part of a word."""


class RemotePath:
    """A remote name that stands where a local path may. As text it has no credentials; `raw` has."""

    __slots__ = ("raw",)

    def __init__(self, raw: str) -> None:
        self.raw = raw

    @property
    def suffix(self) -> str:
        return path_in(self.raw).suffix

    @property
    def name(self) -> str:
        return path_in(self.raw).name

    def with_name(self, name: str) -> "RemotePath":
        """Another file of the same folder."""
        return RemotePath(f"{self.raw.rpartition('/')[0]}/{name}")

    def __str__(self) -> str:
        return shown_name(self.raw)

    def __repr__(self) -> str:
        return f"RemotePath({str(self)!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RemotePath) and self.raw == other.raw

    def __hash__(self) -> int:
        return hash(self.raw)


FilePath = Path | RemotePath


def file_path(name: str) -> FilePath:
    """The path that a name means, on this machine or not."""
    return RemotePath(name) if is_remote(name) else Path(name)


def absolute_name(path: FilePath, *, follows_links: bool = True) -> str:
    """The path as text, without credentials, independent of the working directory."""
    if isinstance(path, RemotePath):
        return str(path)
    return str(path.resolve() if follows_links else path.absolute())


def is_remote(name: str) -> bool:
    """Whether it is `scheme://...`: no path of this machine."""
    return _SCHEME.match(name) is not None


def scheme_of(name: str) -> str:
    """Scheme of a remote name. Raises ConfigError for an unsupported one."""
    found = _SCHEME.match(name)
    assert found is not None, name
    scheme = found[1].lower()
    if scheme not in PACKAGES:
        raise ConfigError(
            f"{shown_name(name)}: {scheme}:// is not supported: give a path, or one of {', '.join(PACKAGES)}"
        )
    return scheme


def check_writable(key: str, name: str) -> None:
    """Raise ConfigError for a scheme that is only read."""
    if scheme_of(name) in READ_ONLY:
        others = ", ".join(f"{each}://" for each in PACKAGES if each not in READ_ONLY)
        raise ConfigError(
            f"{key}={shown_name(name)}: {scheme_of(name)}:// is only read: give a path, or one of {others}"
        )


def check_outlasting(key: str, name: str, fault: str) -> None:
    """Raise ConfigError for a name in the memory of this process, which no other process sees."""
    if scheme_of(name) == "memory":
        others = ", ".join(f"{each}://" for each in PACKAGES if each not in (*READ_ONLY, "memory"))
        raise ConfigError(f"{key}={shown_name(name)} is in memory, and {fault}: give a path, or one of {others}")


def path_in(name: str) -> PurePosixPath:
    """Bucket and key, or host and path, without a query."""
    parts = urlsplit(name)
    rest = parts.path if scheme_of(name) in ("http", "https") else name.split("://", 1)[1].split("?versionId=")[0]
    return PurePosixPath(f"{parts.hostname}{rest}" if scheme_of(name) in ("http", "https") else rest)


def shown_name(text: str) -> str:
    """The name without user and query, which may hold a password or a signature; a local path is unchanged."""
    return without_credentials(text) if _SCHEME.match(text) else text


def without_secrets(text: str, options: Mapping[str, Any] | None = None) -> str:
    """The text without users and queries of URLs, and without secret values of the environment and of `options`."""
    for secret in sorted(_secrets(os.environ) | _secrets(options or {}), key=len, reverse=True):
        text = text.replace(secret, "***")
    return without_credentials(text)


def _secrets(values: Mapping[str, Any]) -> set[str]:
    found: set[str] = set()
    for name, value in values.items():
        if isinstance(value, Mapping):
            found |= _secrets({str(key): item for key, item in value.items()})
        elif isinstance(value, str) and len(value) >= _LEAST_SECRET and _SECRET_NAME.search(name):
            found.add(value)
    return found
