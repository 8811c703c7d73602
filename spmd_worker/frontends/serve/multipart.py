"""Reads a body of multipart/form-data (RFC 7578): its fields as text, and its file as bytes.

A part ends at the next delimiter, which is searched in the bytes, so that a file may contain anything else. Nothing is
written to disk, and only the file's own bytes are copied.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from email.message import Message
from email.parser import BytesHeaderParser
from email.policy import HTTP
from typing import Final

from spmd_worker.base.config.plain_values import shown
from spmd_worker.tokenizer.messages import InvalidRequestError

MULTIPART: Final = "multipart/form-data"
_MAX_PARTS: Final = 100
_MAX_BOUNDARY: Final = 70
"""RFC 2046's limit."""
_MAX_HEADER_BYTES: Final = 4096
_LINE_END: Final = b"\r\n"
_ENCODINGS: Final = ("binary", "8bit", "7bit")


@dataclass(frozen=True, slots=True)
class FilePart:
    """A file of a form, with the name that the client gave it, "" without one."""

    name: str
    content: bytes


@dataclass(frozen=True, slots=True)
class FormField:
    """One part of a form."""

    name: str
    value: str | FilePart


def is_multipart(content_type: str) -> bool:
    """Whether a Content-Type is that of a form with files."""
    return content_type.split(";", 1)[0].strip().lower() == MULTIPART


def read_form(data: bytes, content_type: str) -> list[FormField]:
    """The fields of a body, in their order. Raises InvalidRequestError, whose code is invalid_multipart."""
    fields: list[FormField] = []
    for start, stop in _parts(data, _boundary(content_type)):
        if len(fields) == _MAX_PARTS:
            raise _invalid(f"has more than {_MAX_PARTS} parts")
        fields.append(_field(data, start, stop))
    return fields


def _boundary(content_type: str) -> bytes:
    header = Message()
    header["content-type"] = content_type
    boundary = header.get_param("boundary")
    if not isinstance(boundary, str) or not 0 < len(boundary) <= _MAX_BOUNDARY or not boundary.isascii():
        raise _invalid(f"has Content-Type {shown(content_type)}, which needs boundary=, 1 to {_MAX_BOUNDARY} of ASCII")
    return boundary.encode("ascii")


def _parts(data: bytes, boundary: bytes) -> Iterator[tuple[int, int]]:
    """Start of each part, at its headers, and its stop."""
    delimiter = _LINE_END + b"--" + boundary
    # The first delimiter may be at the beginning, and what stands before it is no part.
    at = 0 if data.startswith(delimiter[2:]) else data.find(delimiter) + 2
    if at == 1:
        raise _invalid(f"has no line --{boundary.decode()}, the boundary of its Content-Type")
    at += len(delimiter) - 2
    while not data.startswith(b"--", at):
        start = data.find(_LINE_END, at) + 2
        # Blanks alone may stand behind a boundary.
        if start == 1 or data[at : start - 2].strip(b" \t"):
            raise _invalid("has characters behind a boundary")
        # The delimiter of a part without headers begins with the line end of the one before it.
        stop = data.find(delimiter, start - 2)
        if stop < 0:
            raise _invalid("ends inside a part: its last boundary is missing")
        yield start, stop
        at = stop + len(delimiter)


def _field(data: bytes, start: int, stop: int) -> FormField:
    end = data.find(2 * _LINE_END, start, min(stop, start + _MAX_HEADER_BYTES))
    if end < 0:
        raise _invalid(f"has a part without an empty line in its first {_MAX_HEADER_BYTES} bytes")
    headers = BytesHeaderParser(policy=HTTP).parsebytes(data[start : end + 2])
    disposition = headers.get("content-disposition")
    parameters = {} if disposition is None else disposition.params
    name = parameters.get("name")
    if disposition is None or disposition.content_disposition != "form-data" or not name:
        raise _invalid('has a part without Content-Disposition: form-data; name="..."')
    if headers.get("content-transfer-encoding", "binary").strip().lower() not in _ENCODINGS:
        raise _invalid(f"has a part {name!r} with a Content-Transfer-Encoding: send its bytes as they are")
    content = data[end + 4 : stop]
    if "filename" in parameters:
        return FormField(name, FilePart(parameters["filename"], content))
    try:
        return FormField(name, content.decode("utf-8"))
    except UnicodeDecodeError:
        raise InvalidRequestError(f"the field {name[:100]!r} is not UTF-8", "invalid_utf8") from None


def _invalid(message: str) -> InvalidRequestError:
    return InvalidRequestError(f"the body {message}", "invalid_multipart")
