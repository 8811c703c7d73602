"""Files of `job.input`, each as a stream of bytes or rows.

-                          standard input; a FIFO and /dev/stdin work alike: read once, by the job
rows.jsonl                 a file, plain or compressed, by its suffix (.gz, .zst)
parts/*.jsonl.gz           all files that match, in the order of their names
rows.parquet               a row group at a time, each of its rows as a line of JSON
s3://bucket/rows.jsonl     any of these in a remote store, or a pattern
"""

import base64
import glob
import gzip
import io
import json
import logging
import os
import re
import stat
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Final

from spmd_worker.base.config.extras import raise_missing_package
from spmd_worker.base.errors import ConfigError
from spmd_worker.base.remote_files import list_remote, open_remote
from spmd_worker.base.remote_names import FilePath, RemotePath, is_remote, scheme_of, shown_name
from spmd_worker.frontends.openai.row_parser import ROW_KEYS
from spmd_worker.model_config.unreadable_files import LFS_POINTER

logger = logging.getLogger(__name__)

STANDARD_INPUT: Final = "-"
_STANDARD_INPUT_DEVICE: Final = "/dev/stdin"
PARQUET_SUFFIX: Final = ".parquet"
_FOREIGN: Final = (
    *(".bz2", ".xz", ".lzma", ".lz4", ".br", ".7z", ".zip", ".tar", ".tgz"),
    *(".csv", ".tsv", ".xlsx", ".arrow", ".feather", ".orc", ".avro"),
)
"""Suffixes of other formats, whose lines would all be error rows."""
_CONTENTS: Final = (
    (b"\x1f\x8b", "gzip", "name it with .gz, or decompress it"),
    (b"\x28\xb5\x2f\xfd", "zstd", "name it with .zst, or decompress it"),
    (b"PAR1", "Parquet", "name it with .parquet"),
    (b"\xfd7zXZ\x00", "xz", "decompress it"),
    (b"BZh", "bzip2", "decompress it"),
    (b"\xff\xfe", "UTF-16", "convert it to UTF-8"),
    (b"\xfe\xff", "UTF-16", "convert it to UTF-8"),
    (LFS_POINTER, "a pointer of Git LFS", "run `git lfs pull` in its folder"),
)
"""First bytes of other formats, which no line of JSON begins with: format, way out."""
_CONTENT_BYTES: Final = max(len(mark) for mark, _, _ in _CONTENTS)
_ZSTD_PIECE_BYTES: Final = 1024
"""Compressed bytes per read: their decompressed data, up to 32,768 times as much, is held in memory."""
_BUFFER_BYTES: Final = 1 << 18
_PARQUET_ROWS: Final = 1024
_PARQUET_BYTES: Final = 32 << 20
"""Bound of the values held at a time, next to the number of rows."""
_GROUP_BYTES: Final = 64 << 20
"""Row groups above this size are read row by row."""
_INDEX_NAME: Final = re.compile(r"__index_level_[0-9]+__")
"""Column name of an unnamed pandas index."""
_MAX_EXACT_INTEGER: Final = 2**53
"""Integers up to this are unique as floats."""
_INVALID_UTF8: Final = b"\xff"
"""A line that its parser rejects as not UTF-8."""
_SCALARS: Final = ("null", "boolean", "integer", "floating", "string", "large_string", "string_view")
"""Types of scalars that JSON has, by pyarrow's names."""
MEDIA_COLUMNS: Final = re.compile(r"((images|audios)(\[\])?|audio|body\.file)(\.bytes)?")
"""Columns that may have bytes: files of images or of audio, or the structs of datasets, `{bytes, path}`."""
_DATA_URL: Final = "data:application/octet-stream;base64,"
_VALUE_BYTES: Final = 16
"""Least bytes of a value in memory, however few bits it takes in the file."""


def is_stream(name: str) -> bool:
    """Whether `job.input` can be read only once: standard input, or a FIFO; not a file redirected to it."""
    if name == STANDARD_INPUT:
        return True
    try:
        mode = os.stat(name).st_mode
    except OSError:
        return False
    is_terminal = stat.S_ISCHR(mode) and name == _STANDARD_INPUT_DEVICE
    return is_terminal or stat.S_ISFIFO(mode)


def open_stream(name: str) -> BinaryIO:
    """Decompressed bytes of a stream (`is_stream`). Raises OSError and ConfigError."""
    if name in (STANDARD_INPUT, _STANDARD_INPUT_DEVICE) and sys.stdin is None:
        # The device is /dev/null then (`open_standard_streams`), and has no rows.
        raise ConfigError(f"job.input={name}, and standard input is closed: give it rows, as by '< rows.jsonl'")
    if name != STANDARD_INPUT:
        if Path(name).suffix == PARQUET_SUFFIX:
            raise ConfigError(
                f"job.input={name} is a FIFO, and a Parquet file is read from its end: give a regular file"
            )
        return _checked_stream(name, open_input(Path(name)))
    # A separate file object: the interpreter closes `sys.stdin` at its end, and aborts if a thread waits in it.
    return _checked_stream(name, open(os.dup(sys.stdin.fileno()), "rb"))


def _checked_stream(name: str, stream: BinaryIO) -> BinaryIO:
    """The stream, closed if its content is of another format."""
    assert isinstance(stream, io.BufferedReader), type(stream)
    try:
        _check_content(name, stream.peek())
    except BaseException:
        stream.close()
        raise
    return stream


def find_inputs(name: str, is_own: Callable[[Path], bool] = lambda path: False) -> tuple[FilePath, ...]:
    """The files of `job.input`, without the job's own (`is_own`). Raises ConfigError if there is none."""
    if is_remote(name):
        return _find_remote(name)
    if os.path.isfile(name):
        paths = [Path(name)]
    elif glob.has_magic(name):
        _check_folders(name)
        paths = [path for path in map(Path, sorted(glob.glob(name, recursive=True))) if _is_input(name, path)]
        if not paths:
            bracket = " ([ that is part of a name is [[] in a pattern)" if "[" in name else ""
            raise ConfigError(f"job.input={name} matches no file: give a pattern that does{bracket}")
    else:
        kind = "is not a file but a folder" if os.path.isdir(name) else "is not a file"
        raise ConfigError(
            f"job.input={name} {kind}: give a JSONL or Parquet file of rows, or a pattern such as 'rows/*.jsonl'"
        )
    for path in paths:
        if not os.access(path, os.R_OK):
            raise ConfigError(f"job.input={path} cannot be read (permission denied): change its mode, or give another")
    others = tuple(path for path in paths if not is_own(path))
    for path in others:
        check_format("job.input", path, name)
        with open(path, "rb") as file:
            _check_content(path, file.read(_CONTENT_BYTES), is_plain=path.suffix not in (*_COMPRESSED, PARQUET_SUFFIX))
    if not others:
        raise ConfigError(
            f"job.input={name} matches only files that the job itself writes (job.output with .partial after its name, "
            f"or files of job.run_dir or job.pool): give another input, or another output, run directory or pool"
        )
    return others


def _check_folders(pattern: str) -> None:
    """Raise ConfigError for a folder that cannot be searched: `glob` would leave its files out without a word."""
    parts = Path(pattern).parts
    for depth in range(1, len(parts)):
        # Below ** every folder is listed, whatever the next name.
        is_listed = glob.has_magic(parts[depth]) or parts[depth - 1] == "**"
        needed = os.R_OK | os.X_OK if is_listed else os.X_OK
        for folder in glob.glob(os.path.join(*parts[:depth]), recursive=True):
            # The file system's own, at the top of a volume.
            is_own = os.path.basename(folder) == "lost+found"
            if not is_own and os.path.isdir(folder) and not os.access(folder, needed):
                raise ConfigError(
                    f"job.input={pattern}: its folder {folder} cannot be read (permission denied): change its mode, or "
                    f"give another pattern"
                )


def _is_input(pattern: str, path: Path) -> bool:
    """True for a regular file. Raises ConfigError for a link to nothing, whose rows would be missing."""
    if path.is_symlink() and not path.exists():
        raise ConfigError(
            f"job.input={pattern} matches {path}, a link to a file that is not there: restore the file, or remove the "
            f"link"
        )
    return path.is_file()


def _find_remote(name: str) -> tuple[FilePath, ...]:
    try:
        paths = [RemotePath(each) for each in list_remote(name)]
    except OSError as error:
        # Its reason of a denied access has its own way out.
        way_out = "" if isinstance(error, PermissionError) else ": give another"
        raise ConfigError(f"job.input={shown_name(name)} cannot be read: {error.strerror or error}{way_out}") from None
    if not paths:
        raise ConfigError(f"job.input={shown_name(name)} is no file, and matches none: give one of rows, or a pattern")
    for path in paths:
        check_format("job.input", path, name)
    return tuple(paths)


def check_format(key: str, path: FilePath, pattern: str = "") -> None:
    """Raise ConfigError for a file of rows whose suffix is that of a format that is neither read nor written; `pattern`
    is the name that matched it, if another. Of `https://host/export.csv?format=jsonl` the query may choose the format.
    """
    suffix = path.suffix
    if isinstance(path, RemotePath) and scheme_of(path.raw) in ("http", "https") and "?" in path.raw:
        return
    if suffix.lower() in _FOREIGN:
        message = f"{key}={path}: {suffix} is not supported: give JSONL, also as .gz or .zst, or .parquet"
        if glob.has_magic(pattern) and pattern != (path.raw if isinstance(path, RemotePath) else str(path)):
            narrower = f"{shown_name(pattern[: pattern.rfind('/') + 1])}*.jsonl"
            message += f": {shown_name(pattern)} matches it, {narrower} would not"
        raise ConfigError(message)
    if suffix != suffix.lower() and suffix.lower() in (*_COMPRESSED, PARQUET_SUFFIX):
        raise ConfigError(f"{key}={path}: {suffix} is not known: write {suffix.lower()}")


def _check_content(name: str | Path, start: bytes, *, is_plain: bool = True) -> None:
    """Raise ConfigError for a file or stream of plain lines that begins with `start` and is of another format, and for
    a pointer of Git LFS in place of any file.
    """
    for mark, form, way_out in _CONTENTS:
        if not start.startswith(mark):
            continue
        if not is_plain and mark == LFS_POINTER:
            raise ConfigError(f"job.input={name} is {form}, not the file itself: {way_out}")
        if is_plain:
            raise ConfigError(f"job.input={name} is {form} by its first bytes, and is read as lines of JSON: {way_out}")


def open_bytes(path: FilePath) -> BinaryIO:
    """The file's bytes as they are stored. Raises OSError."""
    return open_remote(path.raw) if isinstance(path, RemotePath) else open(path, "rb")


def is_compressed(path: FilePath) -> bool:
    """Whether the file is decompressed, and so read from its beginning."""
    return path.suffix in _COMPRESSED


def open_input(path: FilePath) -> BinaryIO:
    """The file's bytes, decompressed. Reading raises OSError, also for a damaged or truncated file."""
    return decompressed(path, open_bytes(path))


def decompressed(path: FilePath, file: BinaryIO) -> BinaryIO:
    """The bytes of an open file, decompressed; closed with it. Reading raises as that of `open_input` does."""
    decompress = _COMPRESSED.get(path.suffix)
    try:
        return file if decompress is None else io.BufferedReader(decompress(path, file), _BUFFER_BYTES)
    except BaseException:
        file.close()
        raise


class _GzipFile(io.RawIOBase):
    """gzip's reader, with its exceptions unified."""

    def __init__(self, path: FilePath, file: BinaryIO) -> None:
        self._path, self._file = path, file
        self._stream = gzip.GzipFile(fileobj=file, mode="rb")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        try:
            num_bytes = self._stream.readinto(buffer)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise OSError(f"{self._path} is damaged or truncated ({error}): give the complete file") from None
        # Time of the last header: the reader accepts a file without one.
        if not num_bytes and self._stream.mtime is None:
            raise OSError(f"{self._path} is truncated (it has no bytes): give the complete file")
        return num_bytes

    def close(self) -> None:
        self._stream.close()
        self._file.close()
        super().close()


class _ZstdFile(io.RawIOBase):
    """Reads consecutive frames of zstd. The package's own reader accepts a truncated frame as the end."""

    def __init__(self, path: FilePath, file: BinaryIO) -> None:
        try:
            import zstandard
        except ImportError as error:
            raise_missing_package("zstandard", "zstd", f"job.input={path}", error)
        self._path, self._module, self._file = path, zstandard, file
        self._frame: Any = None
        self._compressed = b""
        self._ready = memoryview(b"")
        self._has_begun = False

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        while not self._ready:
            piece = self._compressed or self._file.read(_ZSTD_PIECE_BYTES)
            self._compressed = b""
            if not piece:
                if self._frame is not None:
                    raise OSError(f"{self._path} is truncated in the middle of a frame: give the complete file")
                if not self._has_begun:
                    raise OSError(f"{self._path} is truncated (it has no bytes): give the complete file")
                return 0
            self._has_begun = True
            self._frame = self._frame or self._module.ZstdDecompressor().decompressobj()
            try:
                self._ready = memoryview(self._frame.decompress(piece))
            except self._module.ZstdError as error:
                raise OSError(f"{self._path} is damaged ({error}): give the complete file") from None
            if self._frame.eof:
                self._compressed, self._frame = self._frame.unused_data, None
        num_bytes = min(len(buffer), len(self._ready))
        buffer[:num_bytes] = self._ready[:num_bytes]
        self._ready = self._ready[num_bytes:]
        return num_bytes

    def close(self) -> None:
        self._file.close()
        super().close()


_COMPRESSED: Final[dict[str, Callable[[FilePath, BinaryIO], io.RawIOBase]]] = {".gz": _GzipFile, ".zst": _ZstdFile}


class ParquetRows:
    """Rows of a Parquet file as lines of JSON, without nulls and without the index of a pandas frame, unless it has the
    name of a row's key. Integers that pandas stored as floats, in a column with nulls, become integers again.

    A row with texts longer than `max_line_bytes` becomes `max_line_bytes + 1` spaces, without being assembled; one with
    invalid UTF-8 becomes an invalid line. Bytes, in the columns of media, become data URLs. Memory is
    bounded by the file's pages and one row, also if a few bytes of dictionary and run lengths encode huge rows: the
    texts of a small row group are decoded from its dictionaries row by row, a large row group is read row by row.

    Raises ConfigError for column types that JSON lacks, for duplicate names, for rows of more values than a line has
    bytes, and for an invalid Parquet file.
    """

    def __init__(self, path: FilePath, max_line_bytes: int) -> None:
        try:
            import pyarrow
            import pyarrow.compute
            import pyarrow.parquet
        except ImportError as error:
            raise_missing_package("pyarrow", "parquet", f"job.input={path}", error)
        self._path, self._max_line_bytes, self._pyarrow = path, max_line_bytes, pyarrow
        try:
            # Of a remote file its ranges are read.
            source = open_bytes(path) if isinstance(path, RemotePath) else path
            metadata = pyarrow.parquet.read_metadata(source)
            self._plain = pyarrow.parquet.ParquetFile(source, metadata=metadata, buffer_size=_BUFFER_BYTES)
            columns = [metadata.schema.column(index) for index in range(metadata.num_columns)]
            texts = [column.path for column in columns if column.physical_type == "BYTE_ARRAY"]
            self._encoded = pyarrow.parquet.ParquetFile(
                source, metadata=metadata, read_dictionary=texts, buffer_size=_BUFFER_BYTES
            )
        except pyarrow.ArrowInvalid as error:
            raise ConfigError(
                f"job.input={path} is not a complete Parquet file ({error}): give a complete one"
            ) from None
        self.num_rows = int(metadata.num_rows)
        self.groups = tuple([_group_of(metadata.row_group(group)) for group in range(metadata.num_row_groups)])
        """(number of rows, offset of the first byte) of each row group."""
        schema = self._plain.schema_arrow
        indices = _pandas_indices(schema.metadata, schema.names)
        if indices:
            logger.info("job.input=%s: %s: the index of a pandas frame is left out", path, ", ".join(indices))
        fields = [field for field in schema if field.name not in indices]
        # A dot in a name would be read as a path.
        self._names = [field.name for field in fields] if indices else None
        self._floats = tuple([field.name for field in fields if pyarrow.types.is_floating(field.type)])
        _check_names(path, "columns", [field.name for field in fields])
        for field in fields:
            _check_type(path, field.name, field.type, pyarrow.types)

    def __iter__(self) -> Iterator[bytes]:
        """Iterate the lines. Raises OSError."""
        return self.lines(range(len(self.groups)))

    def lines(self, groups: Sequence[int]) -> Iterator[bytes]:
        """Lines of some row groups. Raises OSError."""
        try:
            for group in groups:
                for batch in self._batches(group):
                    yield from self._lines_of(batch)
        except self._pyarrow.ArrowException as error:
            raise OSError(f"{self._path} is damaged or has unsupported content ({error}): give another") from None

    def _batches(self, group: int) -> Iterator[Any]:
        """Batches of a row group, with few rows each if rows are large."""
        metadata = self._plain.metadata.row_group(group)
        columns = [metadata.column(index) for index in range(metadata.num_columns)]
        num_values = max((column.num_values for column in columns), default=0)
        if num_values > max(metadata.num_rows, 1) * self._max_line_bytes:
            raise ConfigError(
                f"job.input={self._path}: row group {group} has {num_values:,} values in {metadata.num_rows:,} rows, "
                f"more than limits.max_line_bytes={self._max_line_bytes:,} a row: leave those rows out"
            )
        num_bytes = max(metadata.total_byte_size, 1)
        if num_bytes > _GROUP_BYTES:
            # Its dictionaries would grow with it.
            yield from self._plain.iter_batches(batch_size=1, row_groups=[group], columns=self._names)
            return
        num_rows = _PARQUET_BYTES * metadata.num_rows // max(num_bytes, _VALUE_BYTES * num_values)
        batch_size = max(1, min(_PARQUET_ROWS, num_rows))
        for batch in self._encoded.iter_batches(batch_size=batch_size, row_groups=[group], columns=self._names):
            arrays = [array for column in batch.columns for array in self._flat(column)]
            held = sum(each.dictionary.nbytes for each in arrays if self._pyarrow.types.is_dictionary(each.type))
            if held > 2 * _GROUP_BYTES:
                raise ConfigError(
                    f"job.input={self._path}: row group {group} claims {num_bytes:,} bytes in its metadata, but has "
                    f"more than {held:,}: write the file again"
                )
            yield batch

    def _lines_of(self, batch: Any) -> Iterator[bytes]:
        if self._size_of(batch) <= min(_PARQUET_BYTES, self._max_line_bytes):
            try:
                rows = batch.to_pylist()
            except UnicodeDecodeError:
                rows = None
            if rows is not None:
                yield from map(self._line_of, rows)
                return
        for index in range(batch.num_rows):
            row = batch.slice(index, 1)
            if self._size_of(row) > self._max_line_bytes:
                yield b" " * (self._max_line_bytes + 1)
                continue
            try:
                (values,) = row.to_pylist()
            except UnicodeDecodeError:
                # Writers do not check a file's strings: only this row is an error row.
                yield _INVALID_UTF8
            else:
                yield self._line_of(values)

    def _line_of(self, row: dict[str, Any]) -> bytes:
        for name in self._floats:
            value = row[name]
            is_integer = value is not None and value.is_integer() and abs(value) <= _MAX_EXACT_INTEGER
            row[name] = int(value) if is_integer else value
        line = json.dumps(_without_nulls(row), ensure_ascii=False).encode("utf-8", "surrogatepass")
        return line[: self._max_line_bytes + 1]

    def _size_of(self, batch: Any) -> int:
        """Bytes of all its texts and images, and one for each other value: a lower bound of the lines' bytes."""
        types, compute = self._pyarrow.types, self._pyarrow.compute
        size = 0
        for array in [array for column in batch.columns for array in self._flat(column)]:
            kind = array.type.value_type if types.is_dictionary(array.type) else array.type
            is_text = types.is_string(kind) or types.is_large_string(kind)
            if types.is_dictionary(array.type):
                lengths = compute.binary_length(array.dictionary).take(array.indices)
            elif is_text or types.is_binary(kind) or types.is_large_binary(kind):
                lengths = compute.binary_length(array)
            else:
                size += len(array) - int(array.null_count)
                continue
            num_bytes = compute.sum(lengths).as_py() or 0
            size += num_bytes if is_text else num_bytes * 4 // 3
        return size

    def _flat(self, array: Any) -> Iterator[Any]:
        """Arrays of the values inside structs and lists."""
        if self._pyarrow.types.is_struct(array.type):
            for field in array.flatten():
                yield from self._flat(field)
        elif _is_list(array.type, self._pyarrow.types):
            yield from self._flat(array.flatten())
        else:
            yield array


def _group_of(group: Any) -> tuple[int, int]:
    columns = [group.column(index) for index in range(group.num_columns)]
    # Without a dictionary its offset is None; some writers say 0.
    offsets = [each.dictionary_page_offset or each.data_page_offset for each in columns]
    return int(group.num_rows), min(offsets, default=0)


def _is_list(kind: Any, types: Any) -> bool:
    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


def _pandas_indices(metadata: Mapping[bytes, bytes] | None, names: Sequence[str]) -> list[str]:
    """Columns that are the index of a pandas frame and not a key of a row."""
    try:
        listed = json.loads((metadata or {}).get(b"pandas", b"{}"))["index_columns"]
    except (ValueError, KeyError, TypeError, RecursionError):
        listed = []
    # A range has a description instead of a name.
    own = [each for each in listed if isinstance(each, str)] if isinstance(listed, list) else []
    return [each for each in names if _INDEX_NAME.fullmatch(each) or (each in own and each not in ROW_KEYS)]


def _check_names(path: FilePath, kind: str, names: Sequence[str]) -> None:
    """Check that names differ: a row would keep only the last of two values with one name."""
    for name, count in Counter(names).items():
        if count > 1:
            raise ConfigError(
                f"job.input={path}: {count} {kind} have the name {name!r}: rename them, or leave them out"
            )


def _check_type(path: FilePath, name: str, kind: Any, types: Any) -> None:
    if types.is_dictionary(kind):
        _check_type(path, name, kind.value_type, types)
    elif types.is_struct(kind):
        _check_names(path, f"fields of {name}", [kind.field(index).name for index in range(kind.num_fields)])
        for index in range(kind.num_fields):
            _check_type(path, f"{name}.{kind.field(index).name}", kind.field(index).type, types)
    elif _is_list(kind, types):
        _check_type(path, f"{name}[]", kind.value_type, types)
    elif (types.is_binary(kind) or types.is_large_binary(kind)) and MEDIA_COLUMNS.fullmatch(name):
        return
    elif not any(getattr(types, f"is_{each}")(kind) for each in _SCALARS):
        raise ConfigError(
            f"job.input={path}: column {name} has the unsupported type {kind}: cast it to string, number, boolean, "
            f"list or struct, or leave it out"
        )


def _without_nulls(value: Any) -> Any:
    """The value without null members of objects, and with bytes as data URLs; in a list a null is an item."""
    if isinstance(value, bytes):
        return _DATA_URL + base64.b64encode(value).decode("ascii")
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value
