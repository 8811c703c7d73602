"""Files that are complete or not there, durable where that is asked for, and JSON that no two readers understand
differently.
"""

import contextlib
import json
import os
import stat
from pathlib import Path
from typing import Any, BinaryIO, Final

CONFIG_BYTES: Final = 16 * 1024 * 1024
"""A configuration file is no larger."""
_MOST_NAME_BYTES: Final = 255
"""The longest that systems have."""


def is_plain_name(name: str) -> bool:
    """Whether it can only mean a file or folder directly inside another, on any system, and can be printed."""
    if not name.isprintable() or name in ("", ".", ".."):
        return False
    return len(name.encode()) <= _MOST_NAME_BYTES and "/" not in name and "\\" not in name


def write_file(path: Path, data: bytes, *, is_durable: bool = True) -> None:
    """Make a file that holds `data`, in place of one of that name: a reader sees the old one, or all of the new one.

    With `is_durable` it is on the disk, under its name, when this returns. Raises OSError; the old file is as it was.
    """
    partial = partial_path(path)
    try:
        with open(partial, "wb") as stream:
            stream.write(data)
            if is_durable:
                sync_stream(stream)
        if is_durable:
            rename_durably(partial, path)
        else:
            os.replace(partial, path)
    except OSError:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise


def write_json(path: Path, value: dict[str, Any]) -> None:
    """As `write_file`, durably, for people to read too. Raises ValueError for NaN and infinities: they are not JSON."""
    write_file(path, (json.dumps(value, indent=2, allow_nan=False) + "\n").encode("ascii"))


def partial_path(path: Path) -> Path:
    """Where a file is written before it is complete: in the same folder, so that it can be renamed."""
    return path.with_name(f"{path.name}.partial")


def sync_stream(stream: BinaryIO) -> None:
    """What was written is on the disk when this returns. Raises OSError."""
    stream.flush()
    os.fsync(stream.fileno())


def rename_durably(partial: Path, path: Path) -> None:
    """Give a file, which is on the disk, its name for good: a rename is durable once the folder is. Raises OSError."""
    os.replace(partial, path)
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """The names in it are on the disk when this returns: those made, changed and removed. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folder_durably(path: Path) -> None:
    """Make a folder, and those above it, that are not there; they are on the disk when this returns. Raises OSError."""
    missing = [each for each in (path, *path.parents) if not each.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for each in reversed(missing):
        sync_folder(each.parent)


def read_regular_file(path: Path, most_bytes: int = CONFIG_BYTES) -> bytes:
    """What is in a file of somebody else's. Raises OSError, also for what is no regular file, which may have no end or
    keep its reader waiting, and for a file of more than `most_bytes`.
    """
    # Neither a FIFO nor a device keeps this waiting.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(f"{path} is not a regular file: give one of at most {most_bytes:,} bytes")
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise OSError(f"{path} has more than {most_bytes:,} bytes: give one of at most so many")
    return content


class JsonError(ValueError):
    """Bytes that are not the JSON object they should be. The message is a predicate, to be put after what it is about;
    `code` is `invalid_utf8`, `invalid_json`, `nested_too_deeply` or `not_an_object`.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


def parse_json_object(data: bytes, *, max_nesting: int | None = None, allows_nan: bool = False) -> dict[str, Any]:
    """The JSON object in `data`, of at most `max_nesting` levels.

    Raises JsonError for invalid UTF-8, anything but one JSON object, a key that an object has twice, numbers of
    thousands of digits and what is nested deeper. So it does for NaN and Infinity, which are not JSON; `allows_nan` is
    for files of others, whose writers may have put them where nobody looks.
    """
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise JsonError("invalid_utf8", f"is not UTF-8: {error.reason} at byte {error.start}") from None
    try:
        value = _parse(text, allows_nan)
    except RecursionError:
        raise JsonError("nested_too_deeply", "is nested too deeply") from None
    can_be_deeper = max_nesting is not None and data.count(b"[") + data.count(b"{") > max_nesting
    if max_nesting is not None and can_be_deeper and _is_deeper_than(value, max_nesting):
        raise JsonError("nested_too_deeply", f"is nested more than {max_nesting} levels deep")
    if not isinstance(value, dict):
        raise JsonError("not_an_object", f"must be a JSON object, not {_kind(value)}")
    return value


def read_json_object(path: Path, *, allows_nan: bool = False) -> dict[str, Any]:
    """The object in a file. Raises JsonError as `parse_json_object` does, with the path before it, and OSError."""
    try:
        return parse_json_object(path.read_bytes(), allows_nan=allows_nan)
    except JsonError as error:
        raise JsonError(error.code, f"{path} {error}") from None


def _parse(text: str, allows_nan: bool) -> Any:
    refuse = None if allows_nan else _refuse_constant
    try:
        return json.loads(text, object_pairs_hook=_object_without_duplicates, parse_constant=refuse)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}" if "\n" in text.rstrip() else f"character {error.pos}"
        raise JsonError("invalid_json", f"is not JSON: {error.msg} at {where}") from None
    except JsonError:
        raise
    except ValueError:
        # Python refuses to convert whole numbers of more than 4,300 digits.
        raise JsonError("invalid_json", "is not JSON: it holds a whole number of thousands of digits") from None


def _object_without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        name = _first_duplicate(pairs)
        raise JsonError("invalid_json", f"is not strict JSON: the key {name[:100]!r} appears twice in one object")
    return value


def _first_duplicate(pairs: list[tuple[str, Any]]) -> str:
    seen: dict[str, None] = {}
    for name, _ in pairs:
        if name in seen:
            return name
        seen[name] = None
    raise AssertionError("no key appears twice")


def _refuse_constant(name: str) -> Any:
    raise JsonError("invalid_json", f"is not JSON: it holds {name}, which is not a JSON number")


def _is_deeper_than(value: Any, limit: int) -> bool:
    """Level by level, without recursion: the value may be as deep as the decoder allowed."""
    level = [value]
    for _ in range(limit + 1):
        containers = [item for item in level if isinstance(item, dict | list)]
        if not containers:
            return False
        level = [child for item in containers for child in (item.values() if isinstance(item, dict) else item)]
    return True


def _kind(value: Any) -> str:
    names = {list: "a list", str: "a string", bool: "true or false", int: "a number", float: "a number"}
    return names.get(type(value), "null")
