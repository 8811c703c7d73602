"""Connections to remote stores through fsspec, and retries of their transient faults.

Every request is made here once per try: the retries of the libraries are switched off where they can be, so that a
fault is retried for a known time, and errors come without credentials.
"""

import errno
import logging
import random
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, TypeVar

from spmd_worker.base.config.extras import raise_missing_package
from spmd_worker.base.errors import ConfigError
from spmd_worker.base.picklable_error import PicklableError
from spmd_worker.base.remote_names import EXTRAS, PACKAGES, scheme_of, shown_name, without_secrets

logger = logging.getLogger(__name__)

_Value = TypeVar("_Value")

_MAX_TRIES: Final = 10
_FIRST_PAUSE_S = 0.1
_MOST_PAUSE_S: Final = 8.0
"""Pauses double: the tries of one request end after about half a minute of faults."""
_TRANSIENT_STATUS: Final = frozenset((408, 409, 425, 429, 500, 502, 503, 504))
_TRANSIENT_CODES: Final = ("SlowDown", "InternalError", "RequestTimeout", "ServiceUnavailable", "Throttl")
_TRANSIENT_MODULES: Final = ("aiohttp", "botocore", "urllib3", "aiobotocore", "httpx", "requests")
_TRANSIENT_WORDS: Final = (
    "Connection",
    "Timeout",
    "Disconnected",
    "Payload",
    "IncompleteRead",
    "Parse",
    "Protocol",
    "HTTPClient",
)
"""Errors of these packages with such a word in their class's name."""
_ABOUT_PATHS: Final = (FileNotFoundError, IsADirectoryError, NotADirectoryError, KeyError)
"""Errors whose text is a path, in which a code says nothing; KeyError is the cause of fsspec's of memory://."""
_BROKEN: Final = ("HTTPClientError", "ClientPayloadError", "HttpProcessingError")
"""Errors of botocore and aiohttp without a complete answer."""
_CREDENTIALS: Final = "Credentials"
"""Part of the names of errors of libraries that find none."""
_NO_BUCKET: Final = "NoSuchBucket"
_QUIET_LOGGERS: Final = ("botocore", "aiobotocore", "s3fs", "gcsfs", "adlfs", "azure", "fsspec", "urllib3")


class RemoteError(PicklableError, OSError):
    """A remote file that cannot be read or written; the message has no credentials. `is_transient`: after all tries."""

    def __init__(self, name: str, fault: str, number: int = errno.EIO, *, is_transient: bool = False) -> None:
        super().__init__(number, fault, shown_name(name))
        self.is_transient = is_transient

    def __str__(self) -> str:
        return f"{self.filename}: {self.strerror}"


class RemoteDeniedError(PermissionError):
    """A remote file that may not be read or written; the message has no credentials, and says what to do."""

    def __str__(self) -> str:
        return f"{self.filename}: {self.strerror}"


class RemoteChangedError(RemoteError):
    """A remote file was replaced while it was read."""

    def __init__(self, name: str) -> None:
        super().__init__(name, "changed while it was read: start again when nothing writes it", errno.ESTALE)


@dataclass(frozen=True, slots=True)
class Store:
    """An fsspec file system and a path in it. `name` is the complete name."""

    name: str
    fs: Any
    path: str

    @property
    def is_s3(self) -> bool:
        return scheme_of(self.name) == "s3"

    def full_name(self, path: str) -> str:
        """Name of another path of this store."""
        scheme = scheme_of(self.name)
        return path if "://" in path else f"{scheme}://{path.removeprefix('/') if scheme != 'file' else path}"

    def bucket_and_key(self) -> dict[str, str]:
        """Arguments of S3's calls."""
        bucket, _, key = self.path.partition("/")
        return {"Bucket": bucket, "Key": key}

    def retried(self, call: Callable[[], _Value], *, on_retry: Callable[[], _Value | None] | None = None) -> _Value:
        """The call's value, tried again after transient faults. `on_retry` looks, before another try, whether a try
        whose answer was lost has succeeded: a value other than None ends the tries.

        Raises FileNotFoundError, FileExistsError and PermissionError as they come (without credentials), RemoteError
        for every other error.
        """
        for number in range(_MAX_TRIES):
            try:
                found = on_retry() if number and on_retry is not None else None
                return call() if found is None else found
            except ConfigError:
                raise
            except Exception as error:  # libraries raise anything; what is unknown is not transient
                if isinstance(error, RemoteError) or number + 1 == _MAX_TRIES or not is_transient(error):
                    raise self.explained(error) from None
                logger.debug("%s: try %d: %s", shown_name(self.name), number + 1, type(error).__name__)
            time.sleep(min(_FIRST_PAUSE_S * 2**number, _MOST_PAUSE_S) * random.uniform(0.5, 1.0))
        raise AssertionError("the last try returns or raises")

    def explained(self, error: Exception) -> Exception:
        if isinstance(error, RemoteError):
            return error
        name, status = shown_name(self.name), status_of(error)
        reason = without_secrets(" ".join(str(error).split()), getattr(self.fs, "storage_options", None))
        if is_transient(error):
            fault = f"{type(error).__name__} after {_MAX_TRIES} tries: {reason}"
            return RemoteError(self.name, fault, is_transient=True)
        if isinstance(error, PermissionError) or status in (401, 403):
            return RemoteDeniedError(errno.EACCES, f"access is denied ({reason}): check the credentials", name)
        if any(_CREDENTIALS in type(each).__name__ for each in causes(error)):
            return RemoteDeniedError(errno.EACCES, f"no credentials are found ({reason}): set those of the store", name)
        if isinstance(error, FileNotFoundError):
            is_bucket = any(_NO_BUCKET in _code_of(each) for each in causes(error))
            return FileNotFoundError(errno.ENOENT, "no such bucket" if is_bucket else "no such file", name)
        if isinstance(error, FileExistsError) or status == 412:
            return FileExistsError(errno.EEXIST, "exists", name)
        return RemoteError(self.name, f"{type(error).__name__}: {reason}")


def open_store(name: str) -> Store:
    """The store of a remote name. Raises ConfigError for an unsupported scheme, a missing package or a malformed name.

    Credentials are found as each library finds them; fsspec's own configuration (FSSPEC_S3_ENDPOINT_URL=...) counts.
    """
    scheme = scheme_of(name)
    # fsspec knows lower case alone.
    name = scheme + name[len(scheme) :]
    try:
        from fsspec.config import conf
        from fsspec.core import url_to_fs
    except ImportError as error:
        raise_missing_package("fsspec", "remote", shown_name(name), error)
    _quieten()
    options = _s3_options(conf.get("s3", {})) if scheme == "s3" else {}
    try:
        fs, path = url_to_fs(name, **options)
    except ImportError as error:
        raise_missing_package(PACKAGES[scheme], EXTRAS.get(scheme), shown_name(name), error)
    except Exception as error:  # any library's, as for missing credentials
        reason = f"{type(error).__name__}: {without_secrets(str(error))}"
        raise ConfigError(f"{shown_name(name)} is not usable ({reason}): check the name and the credentials") from None
    if scheme == "s3":
        fs.retries = 1
    return Store(name, fs, path)


def _s3_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Options of s3fs besides fsspec's configuration: one try a request, and time limits."""
    limits = {"connect_timeout": 10, "read_timeout": 60, **given.get("config_kwargs", {})}
    return {"config_kwargs": {**limits, "retries": {"mode": "standard", "total_max_attempts": 1}}}


@lru_cache(maxsize=1)
def _quieten() -> None:
    """Raise the level of loggers that write headers of requests."""
    for name in _QUIET_LOGGERS:
        quiet = logging.getLogger(name)
        quiet.setLevel(max(quiet.level, logging.INFO))


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """The error and those that it comes from."""
    seen = 0
    while error is not None and seen < 10:
        yield error
        error, seen = error.__cause__ or error.__context__, seen + 1


def status_of(error: BaseException) -> int | None:
    """HTTP status of an error of any library."""
    for each in causes(error):
        response = getattr(each, "response", None)
        if isinstance(response, dict):
            return int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)) or None
        if any(kind.__name__ in _BROKEN for kind in type(each).__mro__):
            # To aiohttp an answer that cannot be parsed has the status 400.
            return None
        # aiohttp's, azure's, gcsfs's, huggingface_hub's.
        for of, name in ((each, "status"), (each, "status_code"), (each, "code"), (response, "status_code")):
            if isinstance(getattr(of, name, None), int):
                return int(getattr(of, name))
    return None


def _code_of(error: BaseException) -> str:
    """Code of an error of S3."""
    response = getattr(error, "response", None)
    return str(response.get("Error", {}).get("Code", "")) if isinstance(response, dict) else ""


def is_transient(error: BaseException) -> bool:
    """Whether the same request may succeed later."""
    status = status_of(error)
    if status is not None and status >= 300:
        return status in _TRANSIENT_STATUS
    if isinstance(error, FileExistsError | PermissionError):
        return False
    # fsspec calls a server that cannot be reached a missing file; the cause says it.
    for each in causes(error):
        text = "" if isinstance(each, _ABOUT_PATHS) else str(each)
        if isinstance(each, ConnectionError | TimeoutError) or any(code in text for code in _TRANSIENT_CODES):
            return True
        module, kind = type(each).__module__.partition(".")[0], type(each).__name__
        if module in _TRANSIENT_MODULES and any(word in kind for word in _TRANSIENT_WORDS):
            return True
    return False
