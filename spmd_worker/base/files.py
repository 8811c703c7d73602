"""Files that are complete or absent, durable on request, and strict JSON, which all readers understand alike."""

import contextlib
import errno
import glob
import json
import os
import secrets
import stat
from collections import Counter
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, Final

from spmd_worker.base.picklable_error import PicklableError

CONFIG_BYTES: Final = 16 * 1024 * 1024
"""Maximum size of a configuration file."""
_MAX_NAME_BYTES: Final = 255
"""Maximum length of a file name on common systems."""
_TOKEN_BYTES: Final = 8
"""Random bytes in the name of a file that is being created."""
_ROOM: Final = {
    errno.ENOSPC: "free space",
    errno.EDQUOT: "free space",
    errno.EFBIG: "raise the limit of files' sizes (ulimit -f)",
}
"""Ways out for a file that cannot grow."""


class JobFileError(PicklableError, OSError):
    """A path for a job's own file holds something else; a link would redirect the write or the read."""

    def __init__(self, path: Path, fault: str) -> None:
        rule = "files of a job must be regular files with one link: remove it, or give another folder"
        super().__init__(errno.ELOOP, f"{fault}, but {rule}", str(path))

    def __str__(self) -> str:
        return f"{self.filename} {self.strerror}"


class NamedErrors:
    """A context in which OSErrors of writes, which name no file, get the name of their file or folder."""

    def __init__(self, path: Path) -> None:
        self._name = str(path)

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, OSError) and error.errno is not None and error.filename is None:
            error.filename = self._name


def describe_os_error(error: Exception) -> str:
    """The error with its file first, and with the way out if it cannot grow; another error's own text."""
    if not isinstance(error, OSError) or error.errno is None or type(error).__str__ is not OSError.__str__:
        return str(error)
    name = "" if error.filename is None else f"{error.filename}: "
    room = _ROOM.get(error.errno)
    way_out = "" if room is None else f": finished rows are kept, so {room} and start the same command again"
    return f"{name}{error.strerror}{way_out}"


def is_plain_name(name: str) -> bool:
    """Whether it can only mean a file or folder directly inside another, on any system, and can be printed."""
    if not name.isprintable() or name in ("", ".", ".."):
        return False
    return len(name.encode()) <= _MAX_NAME_BYTES and "/" not in name and "\\" not in name


def name_pattern(name: str) -> str:
    """Pattern for fnmatch of the names that `name` means by a `*`: its `?` and brackets are themselves."""
    return glob.escape(name).replace("[*]", "*")


def write_file(path: Path, data: bytes, *, is_durable: bool = True) -> None:
    """Write `data` to a file, atomically: a reader sees the old file, or all of the new one. With `is_durable` it is on
    the disk, under its name, when this returns. Raises OSError; the old file is unchanged.
    """
    write_pieces(path, [data], is_durable=is_durable)


def write_pieces(path: Path, pieces: Iterable[bytes], *, is_durable: bool = True) -> None:
    """`write_file` with data in pieces; also an error of their iteration leaves the old file unchanged."""
    partial = partial_path(path)
    fault = job_file_fault(partial)
    if fault is not None:
        raise JobFileError(partial, fault)
    try:
        # A killed writer may have left one.
        partial.unlink(missing_ok=True)
        with NamedErrors(partial), open(partial, "xb") as stream:
            for piece in pieces:
                stream.write(piece)
            if is_durable:
                sync_stream(stream)
        if is_durable:
            rename_durably(partial, path)
        else:
            os.replace(partial, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink()
        # The name that the caller knows.
        error.filename = str(path) if error.filename == str(partial) else error.filename
        raise


def create_file(path: Path, data: bytes) -> bool:
    """Create a file, whole and durably; False if the name exists. Raises OSError."""
    partial = partial_path(path.with_name(f"{path.name}.{secrets.token_hex(_TOKEN_BYTES)}"))
    try:
        with open(partial, "xb") as stream:
            stream.write(data)
            sync_stream(stream)
        try:
            os.link(partial, path)
        except FileExistsError:
            return False
        except OSError:
            # A file system without hard links: a kill in between leaves a part of the data.
            with contextlib.suppress(FileExistsError), open(path, "xb") as stream:
                stream.write(data)
                sync_stream(stream)
                sync_folder(path.parent)
                return True
            return False
        sync_folder(path.parent)
        return True
    finally:
        with contextlib.suppress(OSError):
            partial.unlink()


def remove_uncreated(path: Path) -> None:
    """Remove what killed calls of `create_file` left. A call that runs goes on as on a file system without hard links.
    Raises OSError.
    """
    token = "[0-9a-f]" * 2 * _TOKEN_BYTES
    for partial in path.parent.glob(partial_path(path.with_name(f"{path.name}.{token}")).name):
        partial.unlink(missing_ok=True)


def write_json(path: Path, value: dict[str, Any]) -> None:
    """`write_file`, durably and indented. Raises ValueError for NaN and infinities: they are not JSON."""
    write_file(path, (json.dumps(value, indent=2, allow_nan=False) + "\n").encode("ascii"))


def partial_path(path: Path) -> Path:
    """Path of a file until it is complete: in the same folder, so that it can be renamed."""
    return path.with_name(f"{path.name}.partial")


def sync_stream(stream: BinaryIO) -> None:
    """Flush a stream to the disk before returning. Raises OSError."""
    stream.flush()
    os.fsync(stream.fileno())


def rename_durably(partial: Path, path: Path) -> None:
    """Rename a synced file, durably: a rename is durable once the folder is. Raises OSError."""
    os.replace(partial, path)
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Flush a folder's entries to the disk: those made, changed and removed. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folder_durably(path: Path) -> None:
    """Make a folder and its missing parents; they are on the disk when this returns. Raises OSError."""
    missing = [each for each in (path, *path.parents) if not each.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for each in reversed(missing):
        sync_folder(each.parent)


def job_file_fault(path: Path) -> str | None:
    """The reason why `path` cannot be a job's own file: `is a symbolic link`. None for a regular file with one link,
    and where there is nothing, or nothing that can be inspected.
    """
    try:
        found = os.lstat(path)
    except OSError:
        return None
    return _fault(found)


def open_job_file(path: Path, flags: int) -> int:
    """Descriptor of a job's own file; O_CREAT creates it. Raises OSError, and JobFileError for links, FIFOs and
    anything else but a regular file with one link: it is not opened, or neither written nor read.

    `flags` must not have O_TRUNC: the file is checked only after it is open.
    """
    assert not flags & os.O_TRUNC, path
    fault = job_file_fault(path)
    if fault is not None:
        raise JobFileError(path, fault)
    # O_NONBLOCK: a FIFO put there since the check must not block.
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    fault = _fault(os.fstat(descriptor))
    if fault is not None:
        os.close(descriptor)
        raise JobFileError(path, fault)
    return descriptor


def create_job_file(path: Path, buffering: int = 0) -> BinaryIO:
    """Create or empty a job's own file, for writing. Raises as `open_job_file` does."""
    return open(path, "wb", buffering, opener=_begin)


def _begin(name: str, flags: int) -> int:
    # Truncated after the check: O_TRUNC would come before it.
    descriptor = open_job_file(Path(name), flags & ~os.O_TRUNC)
    try:
        os.ftruncate(descriptor, 0)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def read_job_file(path: Path) -> bytes:
    """All bytes of a job's own file. Raises as `open_job_file` does."""
    with open(open_job_file(path, os.O_RDONLY), "rb") as stream:
        return stream.read()


def _fault(found: os.stat_result) -> str | None:
    if stat.S_ISREG(found.st_mode):
        return f"has {found.st_nlink} links" if found.st_nlink > 1 else None
    kinds = {stat.S_IFLNK: "a symbolic link", stat.S_IFDIR: "a folder", stat.S_IFIFO: "a FIFO"}
    kinds |= {stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}
    return f"is {kinds.get(stat.S_IFMT(found.st_mode), 'not a regular file')}"


def open_regular_file(path: Path) -> BinaryIO:
    """Open a file that a job did not make; links are followed. Raises OSError, also for anything but a regular file,
    which may have no end or block its reader.
    """
    # O_NONBLOCK: neither a FIFO nor a device may block.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(f"{path} is not a regular file: give one")
    return open(descriptor, "rb")


def read_regular_file(path: Path, max_bytes: int = CONFIG_BYTES) -> bytes:
    """Contents of a file that a job did not make. Raises OSError as `open_regular_file` does, and for a file of more
    than `max_bytes`.
    """
    with open_regular_file(path) as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise OSError(f"{path} has more than {max_bytes:,} bytes: give a file of at most that size")
    return content


class JsonError(PicklableError, ValueError):
    """Bytes that are not a JSON object. The message is a predicate, to follow its subject; `code` is `invalid_utf8`,
    `invalid_json`, `nested_too_deeply` or `not_an_object`.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


def parse_json_object(data: bytes, *, max_nesting: int | None = None, allows_nan: bool = False) -> dict[str, Any]:
    """The JSON object in `data`, of at most `max_nesting` levels.

    Raises JsonError for invalid UTF-8, anything but one JSON object, a duplicate key in an object, numbers of thousands
    of digits and deeper nesting. Also for NaN and Infinity, which are not JSON; `allows_nan` is for files of others,
    whose writers may have put them in unused values.
    """
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise JsonError("invalid_utf8", f"is not UTF-8: {error.reason} at byte {error.start}") from None
    try:
        value = _parse(text, allows_nan)
    except RecursionError:
        raise JsonError("nested_too_deeply", "is nested too deeply") from None
    # Counting is fast, and enough for most rows.
    num_containers = data.count(b"[") + data.count(b"{")
    if max_nesting is not None and num_containers > max_nesting and _is_deeper_than(value, max_nesting):
        raise JsonError("nested_too_deeply", f"is nested more than {max_nesting} levels deep")
    if not isinstance(value, dict):
        raise JsonError("not_an_object", f"must be a JSON object, not {_kind(value)}")
    return value


def read_json_object(path: Path) -> dict[str, Any]:
    """The object in a job's own file. Raises JsonError as `parse_json_object` does, prefixed with the path, and as
    `read_job_file` does.
    """
    try:
        return parse_json_object(read_job_file(path))
    except JsonError as error:
        raise JsonError(error.code, f"{path} {error}") from None


def _parse(text: str, allows_nan: bool) -> Any:
    parse_constant = None if allows_nan else _reject_constant
    try:
        return json.loads(text, object_pairs_hook=_object_without_duplicates, parse_constant=parse_constant)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}" if "\n" in text.rstrip() else f"character {error.pos}"
        # Some of Python's messages end in "at".
        raise JsonError("invalid_json", f"is not JSON: {error.msg.removesuffix(' at')} at {where}") from None
    except JsonError:
        raise
    except ValueError:
        # Python does not convert integers of more than 4,300 digits.
        raise JsonError("invalid_json", "is not JSON: it has an integer of thousands of digits") from None


def _object_without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        counts = Counter(name for name, _ in pairs)
        name = next(name for name in counts if counts[name] > 1)
        raise JsonError("invalid_json", f"is not strict JSON: the key {name[:100]!r} appears twice in one object")
    return value


def _reject_constant(name: str) -> Any:
    raise JsonError("invalid_json", f"is not JSON: it has {name}, which is not a JSON number")


def _is_deeper_than(value: Any, limit: int) -> bool:
    """Whether the nesting exceeds the limit; level by level, without recursion: it may be as deep as the decoder
    allowed.
    """
    level = [value]
    for _ in range(limit + 1):
        # Mostly in C: a vocabulary has 100,000 numbers and as many pairs of texts.
        if _CONTAINERS.isdisjoint(map(type, level)):
            return False
        objects = [item for item in level if type(item) is dict]
        arrays = [item for item in level if type(item) is list]
        level = [*chain.from_iterable(map(dict.values, objects)), *chain.from_iterable(arrays)]
    return True


_CONTAINERS: Final = frozenset((dict, list))


def _kind(value: Any) -> str:
    names = {list: "a list", str: "a string", bool: "true or false", int: "a number", float: "a number"}
    return names.get(type(value), "null")
