"""Bytes of an image or of audio from the places that a prompt may name: memory, data URLs, files under one folder.

Nothing is downloaded. A path is resolved, must lie under the root, and is then opened component by component without
following links, so that it cannot be exchanged between the check and the read.
"""

import base64
import binascii
import os
import re
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias, Union
from urllib.parse import unquote, unquote_to_bytes, urlsplit

from spmd_worker.base.urls import shortened
from spmd_worker.media.errors import MediaError
from spmd_worker.media.prepared import Pixels

if TYPE_CHECKING:
    from PIL.Image import Image

ImageSource: TypeAlias = Union[bytes, str, Path, Pixels, "Image"]
"""Bytes of a file, a data URL, a file URL, a path, pixels [height, width, 3], or an image of Pillow's."""


class Medium(NamedTuple):
    """Names of what is read, in messages and codes. `one` and `many` are of single images or recordings."""

    name: str
    plural: str
    not_downloaded: str
    one: str
    many: str

    def error(self, what: str, message: str) -> MediaError:
        return MediaError(f"{self.name}_{what}", message)


IMAGE: Final = Medium("image", "images", "images are not downloaded", "image", "images")
VIDEO: Final = Medium("video", "videos", "videos are not downloaded", "video", "videos")
AUDIO: Final = Medium("audio", "audio", "audio is not downloaded", "recording", "recordings")
_SCHEME: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):")
_MAX_SHOWN: Final = 103
_MAX_CHARACTERS_PER_BYTE: Final = 4


def read_source(source: bytes | str | Path, root: Path | None, max_bytes: int, medium: Medium = IMAGE) -> bytes:
    """Contents of a source that is neither pixels nor samples. Relative paths are below `root`; without a root there
    are no paths. Raises MediaError.
    """
    if isinstance(source, bytes):
        return _checked(source, max_bytes, medium)
    if isinstance(source, Path):
        return _read_file(str(source), root, max_bytes, medium)
    scheme = _SCHEME.match(source)
    name = scheme[1].lower() if scheme else ""
    if name == "data":
        return _read_data_url(source, max_bytes, medium)
    if name == "file":
        return _read_file(_path_of_url(source, medium), root, max_bytes, medium)
    if name and source[len(name) + 1 :].startswith("//"):
        message = f"{_shown(source)}: {medium.not_downloaded}: download it first, and give a path or a data URL"
        raise MediaError(f"{medium.plural}_unsupported", message)
    return _read_file(source, root, max_bytes, medium)


def _checked(data: bytes, max_bytes: int, medium: Medium) -> bytes:
    if len(data) > max_bytes:
        raise _too_large(f"{len(data):,}", max_bytes, medium)
    return data


def _too_large(size: str, max_bytes: int, medium: Medium) -> MediaError:
    rule = f"limits.max_{medium.name}_bytes={max_bytes} allows {max_bytes:,}"
    message = f"the {medium.name} has {size} bytes: {rule}"
    return medium.error("too_large", message)


def _shown(text: str) -> str:
    return repr(shortened(text, _MAX_SHOWN))


# Data URLs (RFC 2397).


def _read_data_url(url: str, max_bytes: int, medium: Medium) -> bytes:
    """The bytes decide what they are: the URL's media type is not read."""
    head, comma, content = url.partition(",")
    if not comma:
        raise medium.error("unreadable", f"{_shown(url)} is not a data URL: it has no comma before its contents")
    is_base64 = head.lower().rstrip().endswith(";base64")
    # Before anything is copied: a percent-encoded byte takes three characters.
    if len(content) > _MAX_CHARACTERS_PER_BYTE * max_bytes:
        raise _too_large(f"up to {len(content):,}", max_bytes, medium)
    data = unquote_to_bytes(content)
    return _checked(_from_base64(data, max_bytes, medium) if is_base64 else data, max_bytes, medium)


def _from_base64(text: bytes, max_bytes: int, medium: Medium) -> bytes:
    """Blanks and missing padding are accepted, as in browsers."""
    text = b"".join(text.split()).rstrip(b"=")
    num_bytes = len(text) * 3 // 4
    if num_bytes > max_bytes:
        raise _too_large(f"{num_bytes:,}", max_bytes, medium)
    try:
        return base64.b64decode(text + b"=" * (-len(text) % 4), validate=True)
    except (binascii.Error, ValueError) as error:
        raise medium.error("unreadable", f"the data URL is not base64: {error}") from None


# Files.


def _path_of_url(url: str, medium: Medium) -> str:
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise medium.error("missing", f"{_shown(url)} is not a URL: {error}") from None
    if parts.netloc not in ("", "localhost"):
        raise medium.error("outside_root", f"{_shown(url)} names another machine: give file:///path")
    return unquote(parts.path)


def _read_file(path: str, root: Path | None, max_bytes: int, medium: Medium) -> bytes:
    if root is None:
        rule = "need a folder that may be read: set job.media_root"
        raise medium.error("outside_root", f"{_shown(path)}: paths of {medium.plural} {rule}")
    try:
        base = os.path.realpath(root, strict=True)
        found = os.path.realpath(os.path.join(base, path), strict=True)
        if os.path.commonpath([base, found]) != base:
            message = f"{_shown(path)} is outside of {base}, the folder that may be read (job.media_root)"
            raise medium.error("outside_root", message)
        with open(_open_beneath(base, Path(found).relative_to(base).parts), "rb") as stream:
            size = _file_size(stream.fileno(), path, medium)
            if size > max_bytes:
                raise _too_large(f"{size:,}", max_bytes, medium)
            # It may grow while it is read.
            return _checked(stream.read(max_bytes + 1), max_bytes, medium)
    except (OSError, ValueError, RuntimeError) as error:
        if isinstance(error, MediaError):
            raise
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise medium.error("missing", f"{_shown(path)} cannot be read: {why}") from None


def _open_beneath(base: str, parts: tuple[str, ...]) -> int:
    """Descriptor of a file below `base`; no link is followed."""
    folder = os.open(base, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for name in parts[:-1]:
            inner = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
            os.close(folder)
            folder = inner
        # O_NONBLOCK: neither a FIFO nor a device may block.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        return os.open(parts[-1] if parts else ".", flags, dir_fd=folder)
    finally:
        os.close(folder)


def _file_size(descriptor: int, path: str, medium: Medium) -> int:
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode):
        kinds = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a FIFO", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}
        kind = kinds.get(stat.S_IFMT(found.st_mode), "not a regular file")
        raise medium.error("missing", f"{_shown(path)} is {kind}: give a regular file")
    return found.st_size
