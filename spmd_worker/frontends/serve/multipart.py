"""Reads a body of multipart/form-data in memory: its fields as text, and its files as bytes."""

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from spmd_worker.base.config.plain_values import shown
from spmd_worker.tokenizer.messages import InvalidRequestError

if TYPE_CHECKING:
    from python_multipart.multipart import Field, File

MULTIPART: Final = "multipart/form-data"
_MAX_PARTS: Final = 100
_MAX_BOUNDARY: Final = 70
"""RFC 2046's limit."""
_SETTINGS: Final = {"MAX_MEMORY_FILE_SIZE": float("inf"), "UPLOAD_ERROR_ON_BAD_CTE": True}
# It warns of what it refuses, which is in the answer.
logging.getLogger("python_multipart").setLevel(logging.ERROR)


@dataclass(frozen=True, slots=True)
class FormField:
    """One part of a form: text, or the bytes of a file."""

    name: str
    value: str | bytes


def is_multipart(content_type: str) -> bool:
    """Whether a Content-Type is that of a form with files."""
    return content_type.split(";", 1)[0].strip().lower() == MULTIPART


def read_form(data: bytes, content_type: str) -> list[FormField]:
    """The fields of a body, in their order. Raises InvalidRequestError, whose code is invalid_multipart."""
    # Of the extra `serve`, which readers of JSON alone do without.
    from python_multipart.exceptions import FormParserError
    from python_multipart.multipart import FormParser, parse_options_header

    boundary = parse_options_header(content_type)[1].get(b"boundary", b"")
    if not 0 < len(boundary) <= _MAX_BOUNDARY or not boundary.isascii():
        raise _invalid(f"has Content-Type {shown(content_type)}, which needs boundary=, 1 to {_MAX_BOUNDARY} of ASCII")
    fields: list[FormField] = []
    ends: list[None] = []

    def add(part: "Field | File") -> None:
        if len(fields) == _MAX_PARTS:
            raise _invalid(f"has more than {_MAX_PARTS} parts")
        fields.append(_field(part))

    parser = FormParser(MULTIPART, add, add, lambda: ends.append(None), boundary, config=_SETTINGS)
    try:
        parser.write(data)
    except FormParserError as error:
        raise _invalid(f"is no form with the boundary of its Content-Type: {error}") from None
    if not ends:
        raise _invalid("has no last boundary: it is cut, or its Content-Type has another boundary")
    return fields


def _field(part: "Field | File") -> FormField:
    name = (part.field_name or b"").decode("utf-8", "replace")
    if hasattr(part, "file_object"):
        part.file_object.seek(0)
        return FormField(name, part.file_object.read())
    value = part.value or b""
    try:
        return FormField(name, value.decode("utf-8"))
    except UnicodeDecodeError:
        # A file without filename=: urllib3 1 writes other names than ASCII as filename*=, which is not read.
        return FormField(name, value)


def _invalid(message: str) -> InvalidRequestError:
    return InvalidRequestError(f"the body {message}", "invalid_multipart")
