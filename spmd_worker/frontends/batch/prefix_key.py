"""Sort keys of rows: rows whose prompts begin alike have keys that begin alike, at every length of what they share.

A key is made of what a row says, before its chat template and its tokenizer: both begin alike where this does. It is
bounded: a prompt's first _NUM_EXACT_BYTES as they are, then a checksum of each further piece and all before it. Keys
that collide, or are cut, cost sharing and nothing else.
"""

import json
import struct
from collections.abc import Iterator, Mapping
from typing import Any, Final
from zlib import crc32

from spmd_worker.frontends.openai.row import (
    ChatPrompt,
    EncoderPrompt,
    Prompt,
    ReadPrompt,
    Row,
    TextPrompt,
    TokensPrompt,
)
from spmd_worker.tokenizer.video_parts import VideoPart

_NUM_EXACT_BYTES: Final = 2048
_PIECE_BYTES: Final = 256
_MAX_BYTES: Final = 64 << 10
"""Bytes of a prompt that its key covers."""
_MIN_SHARED_BYTES: Final = 64
"""Rows that share less share no block of tokens."""


def prefix_key(row: Row) -> bytes:
    """The row's key: rows with another adapter or salt share nothing, so these come first."""
    salt = row.sampling.cache_salt
    names = [row.adapter or "", row.prompt_adapter or "", row.model or "", salt or ""]
    prompt = row.prompt if row.pooling is None else row.pooling.prompts[0]
    return _bytes("\0".join(names)) + b"\0" + _bounded(_prompt_bytes(row, prompt))


def share_beginning(key: bytes, other: bytes, quarters: int) -> bool:
    """Whether two keys share so many quarters of the shorter one, at least what fills a block of tokens."""
    num_bytes = max(min(len(key), len(other)) * quarters // 4, _MIN_SHARED_BYTES)
    return len(key) >= num_bytes and key[:num_bytes] == other[:num_bytes]


def _prompt_bytes(row: Row, prompt: Prompt) -> bytes:
    """Bytes that begin alike where prompts do; empty for prompts whose contents are not text or ids."""
    if isinstance(prompt, EncoderPrompt):
        # Decoders attend to the encoder's input: they share it completely or nothing.
        return _prompt_bytes(row, prompt.encoder)
    if not isinstance(prompt, ReadPrompt):
        return b""
    if isinstance(prompt, ChatPrompt):
        tools = () if row.request is None else row.request.tools
        return _joined(_chat_parts(prompt, tools))
    # A placeholder of the prompt stands for each of its images.
    images = b"".join([_digest(_media_text(image)) for image in prompt.images])
    return images + (_bytes(prompt.text[:_MAX_BYTES]) if isinstance(prompt, TextPrompt) else _ids(prompt))


def _ids(prompt: TokensPrompt) -> bytes:
    ids = prompt.token_ids[: _MAX_BYTES // 8]
    try:
        return struct.pack(f"<{len(ids)}q", *ids)
    except struct.error:
        # No id of a vocabulary: the row is rejected later.
        return b""


def _chat_parts(prompt: ChatPrompt, tools: tuple[Mapping[str, Any], ...]) -> Iterator[bytes]:
    """A conversation's parts in the order in which templates write them: tools are in the system message."""
    if tools or prompt.template_kwargs:
        yield _json([tools, prompt.template_kwargs])
    for message in prompt.messages:
        content = message.get("content")
        yield _bytes(str(message.get("role")))
        for part in content if isinstance(content, list | tuple) else (content,):
            yield _part(part)
        others = [[name, value] for name, value in message.items() if name not in ("role", "content")]
        if others:
            yield _json(others)


def _part(part: Any) -> bytes:
    """A content part: text as it is, an image by a digest, because a data URL may be long."""
    if isinstance(part, str):
        return _bytes(part[:_MAX_BYTES])
    if isinstance(part, Mapping) and isinstance(text := part.get("text"), str):
        return _bytes(text[:_MAX_BYTES])
    return struct.pack("<I", crc32(_json(part)))


def _joined(parts: Iterator[bytes]) -> bytes:
    found, num_bytes = [], 0
    for part in parts:
        found.append(part)
        num_bytes += len(part) + 1
        if num_bytes >= _MAX_BYTES:
            break
    return b"\0".join(found)


def _bounded(data: bytes) -> bytes:
    if len(data) <= _NUM_EXACT_BYTES:
        return data
    # Each covers all pieces before it, so keys that begin alike differ from the first piece that differs on.
    checksum, checksums = 0, []
    for start in range(_NUM_EXACT_BYTES, min(len(data), _MAX_BYTES), _PIECE_BYTES):
        checksum = crc32(data[start : start + _PIECE_BYTES], checksum)
        checksums.append(checksum)
    return data[:_NUM_EXACT_BYTES] + struct.pack(f"<{len(checksums)}I", *checksums)


def _media_text(source: str | VideoPart) -> str:
    return str([source.fps, *source.texts]) if isinstance(source, VideoPart) else source


def _digest(text: str) -> bytes:
    return struct.pack("<I", crc32(_bytes(text)))


def _json(value: Any) -> bytes:
    return _bytes(json.dumps(value, default=str))


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")
