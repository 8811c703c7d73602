"""Reads rows of input embeddings (`prompt_embeds`) and checks them for one model: tensors of callers, safetensors files
and their base64 text. Imports no torch; nothing is ever unpickled.
"""

import base64
import binascii
import os
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from spmd_worker.base.config.plain_values import shown
from spmd_worker.base.errors import CheckpointError
from spmd_worker.engine.request_error import RequestError
from spmd_worker.model.weights.safetensors_header import MAX_HEADER_BYTES, TensorEntry, parse_header
from spmd_worker.replica.sequence.input_rows import PromptRows, row_digests

KEY: Final = "prompt_embeds"
_DTYPES: Final[Mapping[str, str]] = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_NUM_LENGTH_BYTES: Final = 8
_ZIP: Final = b"PK\x03\x04"
"""Begins a file of torch.save."""
_SAVE: Final = f'save it as safetensors: safetensors.torch.save({{"{KEY}": tensor}})'


@dataclass(frozen=True, slots=True)
class EmbedsReader:
    """Reader for a model of `dtype`, whose embeddings are `width` numbers, and prompts of at most `max_rows`. Files are
    read under `root`, the folder of a job's input; None: no files are read. A model that `needs_ids` takes no rows.
    """

    width: int
    dtype: str
    max_rows: int
    root: Path | None = None
    needs_ids: bool = False

    def of_array(self, dtype: str, shape: Sequence[int], data: bytes | memoryview) -> PromptRows:
        """Rows from little-endian numbers of `dtype`: float32, bfloat16 or float16, rounded to the model's. `shape` is
        [tokens, width], or [1, tokens, width]. Raises RequestError for other shapes and dtypes, and for numbers that
        are not finite in the model's dtype.
        """
        sizes = self.checked_shape(dtype, shape)
        numbers = _as_dtype(np.frombuffer(data, dtype=_STORED[dtype]), dtype, self.dtype)
        is_finite = _is_finite(numbers, self.dtype)
        if not is_finite.all():
            row, column = divmod(int(is_finite.argmin()), self.width)
            raise RequestError(
                "invalid_embeddings",
                f"{KEY}[{row}][{column}] is not finite in {self.dtype}, the model's dtype: give finite numbers",
            )
        raw = numbers.tobytes()
        return PromptRows(row_digests(self.dtype, sizes[0], raw), sizes[0], raw)

    def checked_shape(self, dtype: str, shape: Sequence[int]) -> tuple[int, int]:
        """[tokens, width] of an array. Raises RequestError for an array that is not rows of this model's embeddings."""
        if dtype not in _STORED:
            raise RequestError("invalid_embeddings", f"{KEY} is {dtype}: give {', '.join(_DTYPES.values())}")
        if self.needs_ids:
            raise RequestError(
                "invalid_embeddings",
                f"{KEY} is not supported by this model, whose layers read inputs of each token id: give token ids",
            )
        sizes = tuple(shape[1:] if len(shape) == 3 and shape[0] == 1 else shape)
        if len(sizes) != 2 or sizes[1] != self.width:
            raise RequestError(
                "invalid_embeddings",
                f"{KEY} has the shape {list(shape)}: give [tokens, {self.width}], a row of the model's embedding for "
                f"each token",
            )
        if not sizes[0]:
            raise RequestError("empty_prompt", f"{KEY} has no rows: give at least one")
        if sizes[0] > self.max_rows:
            raise RequestError(
                "prompt_too_long", f"{KEY} has {sizes[0]} rows but model.max_model_len is {self.max_rows}: shorten it"
            )
        return sizes[0], sizes[1]

    def of_value(self, value: Any) -> PromptRows:
        """Rows of a batch row's `prompt_embeds`: base64 text of a safetensors file, or an object that names a file,
        `path`, relative to the job's input, and its `tensor`, if it has several. Raises RequestError.
        """
        if isinstance(value, str):
            return self._of_text(value)
        if isinstance(value, Mapping):
            return self._of_file(value)
        raise RequestError(
            "invalid_value", f"{KEY}={shown(value)} must be base64 text of a safetensors file, or an object with path"
        )

    def _of_text(self, text: str) -> PromptRows:
        try:
            data = base64.b64decode(text, validate=True)
        except (binascii.Error, ValueError) as error:
            raise RequestError("invalid_embeddings", f"{KEY} is not base64: {error}") from None
        name = f"{KEY} (base64)"
        start, entries = _header(data[:_NUM_LENGTH_BYTES], len(data), name, lambda size: data[8 : 8 + size])
        entry = _chosen(entries, None, name)
        self._check(entry)
        return self.of_array(
            _DTYPES[entry.dtype], entry.shape, memoryview(data)[start + entry.begin : start + entry.end]
        )

    def _of_file(self, value: Mapping[str, Any]) -> PromptRows:
        given, tensor = value.get("path"), value.get("tensor")
        unknown = [str(key) for key in value if key not in ("path", "tensor")]
        if unknown or not isinstance(given, str) or not isinstance(tensor, str | None):
            raise RequestError(
                "invalid_value", f"{KEY}={shown(dict(value))} must be an object with path and tensor, texts"
            )
        path = self._located(given)
        try:
            # `open` of a descriptor would not close that of a folder.
            with open(path, "rb", opener=_opened) as file:
                status = os.fstat(file.fileno())
                if not stat.S_ISREG(status.st_mode):
                    raise RequestError("embeddings_missing", f"{KEY}.path={given[:200]!r} is not a regular file")
                prefix = file.read(_NUM_LENGTH_BYTES)
                start, entries = _header(prefix, status.st_size, given[:200], file.read)
                entry = _chosen(entries, tensor, given[:200])
                # Only rows that may be computed are read: of a file of any size at most `max_rows`.
                self._check(entry)
                file.seek(start + entry.begin)
                data = file.read(entry.end - entry.begin)
        except OSError as error:
            raise RequestError("embeddings_missing", f"{KEY}.path={given[:200]!r}: {error.strerror}") from None
        if len(data) < entry.end - entry.begin:
            raise RequestError("invalid_embeddings", f"{given[:200]}: truncated while it was read")
        return self.of_array(_DTYPES[entry.dtype], entry.shape, data)

    def _check(self, entry: TensorEntry) -> None:
        self.checked_shape(_DTYPES.get(entry.dtype, entry.dtype), entry.shape)

    def _located(self, given: str) -> str:
        """Path of a file under `root`, with all links followed."""
        if self.root is None:
            raise RequestError(
                "embeddings_outside",
                f"{KEY}.path={given[:200]!r}: files are read for the rows of a job whose input is a file; give base64 "
                f"text of a safetensors file",
            )
        try:
            os.fsencode(given)
        except UnicodeEncodeError:
            message = f"{KEY}.path={given[:200]!r} cannot be the name of a file: it has a lone surrogate"
            raise RequestError("embeddings_missing", message) from None
        root = os.path.realpath(self.root)
        path = os.path.realpath(os.path.join(root, given)) if "\0" not in given else root
        if os.path.commonpath((root, path)) != root or path == root:
            raise RequestError(
                "embeddings_outside", f"{KEY}.path={given[:200]!r} is outside of {root}, the folder of the job's input"
            )
        return path


def _opened(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK | os.O_NOFOLLOW)


def _header(prefix: bytes, num_bytes: int, name: str, read: Any) -> tuple[int, Mapping[str, TensorEntry]]:
    """Offset of the data, and the tensors, of a safetensors file of `num_bytes` that begins with `prefix`."""
    if prefix.startswith(_ZIP):
        raise RequestError(
            "invalid_embeddings", f"{name} is a file of torch.save, a pickle, which is never read: {_SAVE}"
        )
    length = int.from_bytes(prefix, "little")
    if len(prefix) < _NUM_LENGTH_BYTES or length > min(num_bytes - _NUM_LENGTH_BYTES, MAX_HEADER_BYTES):
        raise RequestError("invalid_embeddings", f"{name} is not a safetensors file: {_SAVE}")
    try:
        header = parse_header(read(length), num_bytes, name)
    except CheckpointError as error:
        raise RequestError("invalid_embeddings", str(error)) from None
    return header.data_start, header.tensors


def _chosen(entries: Mapping[str, TensorEntry], tensor: str | None, name: str) -> TensorEntry:
    """The tensor of this name; None: of the name `prompt_embeds`, or the only one."""
    if tensor is None and len(entries) == 1:
        return next(iter(entries.values()))
    wanted = KEY if tensor is None else tensor
    if wanted not in entries:
        known = ", ".join(sorted(entries)[:8]) or "none"
        raise RequestError("invalid_embeddings", f"{name} has no tensor {wanted[:200]!r}: it has {known}")
    return entries[wanted]


_STORED: Final[Mapping[str, str]] = {"float32": "<f4", "float16": "<f2", "bfloat16": "<u2"}


def _as_dtype(numbers: NDArray[Any], dtype: str, wanted: str) -> NDArray[Any]:
    """Round to the nearest, to even; bfloat16 is the upper half of a float32."""
    if dtype == wanted:
        return numbers
    if dtype == "bfloat16":
        wide = (numbers.astype("<u4") << 16).view("<f4")
    else:
        wide = numbers.astype("<f4")
    if wanted != "bfloat16":
        with np.errstate(over="ignore"):
            return wide.astype(_STORED[wanted])
    bits = wide.view("<u4")
    # A NaN keeps its highest bits: rounded, it might become infinite.
    rounded = np.where(np.isnan(wide), bits, bits + 0x7FFF + ((bits >> 16) & 1))
    return (rounded >> 16).astype("<u2")


def _is_finite(numbers: NDArray[Any], dtype: str) -> NDArray[np.bool_]:
    found: NDArray[np.bool_] = (numbers & 0x7F80) != 0x7F80 if dtype == "bfloat16" else np.isfinite(numbers)
    return found
