"""The job's output: a file that appears under its name when it is complete, in the format of its suffix.

answers.jsonl         one line per row
answers.jsonl.gz      the same, compressed (.zst too); equal lines make equal bytes
answers.parquet       one row per row: index, custom_id, outputs, token counts, error, and the line of JSON itself; with
                      pooling also a row's vector, if it has one of the model's length, or those of its tokens
"""

import contextlib
import gzip
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any, BinaryIO, Final, Protocol, cast

from spmd_worker.base.config.extras import raise_missing_package
from spmd_worker.base.files import NamedErrors, create_job_file, partial_path, rename_durably, sync_stream
from spmd_worker.base.remote_names import FilePath, RemotePath
from spmd_worker.base.remote_upload import write_remote
from spmd_worker.frontends.batch.input.input_files import open_bytes, open_input
from spmd_worker.frontends.batch.output_parts import PART_ROWS, CommittedParts, LineDigest, Part, is_parts, write_parts
from spmd_worker.frontends.batch.parquet_rows import VectorColumns, parquet_row

_GZIP_LEVEL: Final = 6
_ZSTD_LEVEL: Final = 3
_PARQUET: Final = ".parquet"
_PARQUET_ROWS: Final = 1024
_PARQUET_BYTES: Final = 64 << 20
"""A row group ends at this many rows, or bytes of lines."""


@dataclass(frozen=True, slots=True)
class WrittenOutput:
    """A complete output: a digest of its lines (`write_lines`), of the images of its rows (`chained_digest`), and the
    number of its error rows.
    """

    digest: dict[str, Any]
    images: dict[str, Any] | None
    num_error_rows: int


class LineSink(Protocol):
    """Encodes lines as bytes of a file."""

    def write(self, line: bytes, /) -> Any:
        """Write a line, with its line end."""

    def close(self) -> None:
        """Flush; the file itself remains open."""


class WholeStream(Protocol):
    """A file being written that appears when it is closed."""

    def write(self, data: Any, /) -> int: ...

    def close(self) -> None:
        """Give the file its name, durably. Raises OSError."""

    def abandon(self) -> None:
        """Leave it for the next writer to begin again."""

    def discard(self) -> None:
        """Remove what is written."""


class OutputFile:
    """Writes lines to `<name>.partial` next to the output, which `close` makes durable and renames. As a context
    manager it closes on success and, on an exception, leaves neither output nor partial file.
    """

    def __init__(self, stream: WholeStream, sink: LineSink) -> None:
        self._stream, self._sink = stream, sink

    @staticmethod
    def open(path: FilePath, vectors: VectorColumns | None = None, writer: str | None = None) -> "OutputFile":
        """Begin the file; `vectors` for pooling rows. A `writer` has a partial file of its own.

        Raises OSError if it cannot be created, FileExistsError if another kind of file exists, and ConfigError if its
        format needs a missing package.
        """
        return OutputFile.over(open_whole(path, writer), path.suffix, vectors)

    @staticmethod
    def over(
        stream: WholeStream, suffix: str, vectors: VectorColumns | None = None, first_row: int = 0
    ) -> "OutputFile":
        """`open` with an open stream, which is discarded on an error, of rows from `first_row`."""
        try:
            return OutputFile(stream, _sink_of(suffix, cast(BinaryIO, stream), vectors, first_row))
        except BaseException:
            stream.discard()
            raise

    def write(self, line: bytes) -> None:
        """Write the next line, with its line end. Raises OSError."""
        assert line.find(b"\n") == len(line) - 1, line[:100]
        self._sink.write(line)

    def close(self) -> None:
        """Make the file durable and give it its name. Raises OSError."""
        self._sink.close()
        self._stream.close()

    def abandon(self) -> None:
        """Close without renaming, for the next writer to begin the file again."""
        self._sink.close()
        self._stream.abandon()

    def discard(self) -> None:
        """Remove the partial file; an existing output is unchanged."""
        with contextlib.suppress(OSError, ValueError):
            # A sink would write its buffer when it is garbage-collected, to a closed file.
            self._sink.close()
        self._stream.discard()

    def __enter__(self) -> "OutputFile":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self.discard()


def write_lines(
    lines: Iterable[bytes],
    path: FilePath,
    vectors: VectorColumns | None = None,
    part_rows: int = PART_ROWS,
    run_dir: Path | None = None,
    writer: str | None = None,
    run: str = "",
    key: str = "job.output",
) -> dict[str, Any]:
    """Write all lines to a file that appears when it is complete, or to parts of `part_rows` lines. Returns their
    number, bytes and a digest of the uncompressed lines: for plain JSONL as `sha256sum`. Parts that `run_dir` records
    are not written again; `run` names who writes parts, `key` is the user's word for the output. Raises as
    `OutputFile.open` and `claim_folder` do.
    """
    digest = LineDigest()
    counted = digest.read(lines)
    if is_parts(path):
        parts = CommittedParts.open(path, part_rows, run_dir, run, key)
        write_parts(counted, digest, parts, partial(_write_part, vectors=vectors, writer=writer))
    else:
        with OutputFile.open(path, vectors, writer) as output:
            for line in counted:
                output.write(line)
    return digest.as_dict()


def _write_part(
    lines: Iterable[bytes], path: FilePath, first_row: int, vectors: VectorColumns | None, writer: str | None
) -> Part:
    num_rows, stream = 0, _DigestedStream(open_whole(path, writer), str(path))
    with OutputFile.over(stream, path.suffix, vectors, first_row) as output:
        for line in lines:
            output.write(line)
            num_rows += 1
    return Part(path.name, num_rows, stream.num_bytes, stream.digest.hexdigest())


class _DigestedStream:
    """A stream of a file whose bytes are digested on the way."""

    mode = "wb"
    closed = False

    def __init__(self, stream: WholeStream, name: str) -> None:
        self.name, self.num_bytes, self.digest = name, 0, sha256()
        self._stream = stream
        self.close, self.abandon, self.discard = stream.close, stream.abandon, stream.discard

    def write(self, data: Any, /) -> int:
        self._stream.write(data)
        self.digest.update(data)
        num_bytes = memoryview(data).nbytes
        self.num_bytes += num_bytes
        return num_bytes

    def tell(self) -> int:
        return self.num_bytes

    def flush(self) -> None:
        """No effect: the file appears when it is closed."""

    def readable(self) -> bool:
        return False

    def writable(self) -> bool:
        return True


def open_whole(path: FilePath, writer: str | None = None) -> WholeStream:
    """Begin a file. Raises OSError if it cannot be created, FileExistsError if another kind of file exists."""
    return write_remote(path.raw) if isinstance(path, RemotePath) else _LocalStream(path, writer)


def own_partial(path: Path, writer: str | None) -> Path:
    """Partial file of a writer next to others."""
    return partial_path(path if writer is None else path.with_name(f"{path.name}.{writer}"))


class _LocalStream:
    """`<name>.partial`, which `close` renames."""

    def __init__(self, path: Path, writer: str | None) -> None:
        if path.exists() and not path.is_file():
            raise FileExistsError(f"{path} exists and is not a regular file: choose another output")
        self._path, self._partial = path, own_partial(path, writer)
        self._stream = create_job_file(self._partial, buffering=-1)
        self.name, self._named, self.tell = str(path), NamedErrors(self._partial), self._stream.tell
        self.readable, self.writable = self._stream.readable, self._stream.writable
        self.abandon = self._stream.close

    @property
    def closed(self) -> bool:
        return self._stream.closed

    def write(self, data: Any, /) -> int:
        with self._named:
            return self._stream.write(data)

    def flush(self) -> None:
        with self._named:
            self._stream.flush()

    def close(self) -> None:
        with self._named:
            sync_stream(self._stream)
        self._stream.close()
        rename_durably(self._partial, self._path)

    def discard(self) -> None:
        with contextlib.suppress(OSError):
            # What is left in its buffer does not fit on a full disk.
            self._stream.close()
        self._partial.unlink(missing_ok=True)


def read_lines(path: FilePath) -> Iterator[bytes]:
    """The lines of a job's output, of any format. Raises OSError."""
    if path.suffix != _PARQUET:
        with open_input(path) as stream:
            yield from stream
        return
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise_missing_package("pyarrow", "parquet", f"output {path}", error)
    with open_bytes(path) as file:
        try:
            parquet = pyarrow.parquet.ParquetFile(file)
            if "json" not in parquet.schema_arrow.names or parquet.schema_arrow.field("json").type != pyarrow.string():
                raise OSError(f"{path} is no output of a job: it has no column json of texts")
            for batch in parquet.iter_batches(batch_size=256, columns=["json"]):
                for text in batch.column(0):
                    yield (text.as_py() or "").encode() + b"\n"
        except pyarrow.ArrowException as error:
            raise OSError(f"{path} is damaged ({error})") from None


class _PlainSink:
    def __init__(self, stream: BinaryIO) -> None:
        self.write = stream.write
        self.close = stream.flush


def _gzip_sink(stream: BinaryIO) -> LineSink:
    # Without name and time, so that equal lines give equal bytes.
    return gzip.GzipFile(filename="", mode="wb", compresslevel=_GZIP_LEVEL, fileobj=stream, mtime=0)


def _zstd_sink(stream: BinaryIO) -> LineSink:
    try:
        import zstandard
    except ImportError as error:
        raise_missing_package("zstandard", "zstd", f"the output {stream.name}", error)
    compressor = zstandard.ZstdCompressor(level=_ZSTD_LEVEL, write_checksum=True)
    sink: LineSink = compressor.stream_writer(stream, closefd=False)
    return sink


class _ParquetSink:
    """One row group at a time."""

    def __init__(self, stream: BinaryIO, vectors: VectorColumns | None, first_row: int = 0) -> None:
        try:
            import pyarrow
            import pyarrow.parquet
        except ImportError as error:
            raise_missing_package("pyarrow", "parquet", f"the output {stream.name}", error)
        text, number = pyarrow.string(), pyarrow.int64()
        output = {"index": number, "text": text, "token_ids": pyarrow.list_(number)}
        output |= {"finish_reason": text, "stop_reason": text}
        columns = {"index": number, "custom_id": text, "outputs": pyarrow.list_(pyarrow.struct(output))}
        columns |= {"prompt_tokens": number, "completion_tokens": number}
        columns |= {"error": pyarrow.struct({"code": text, "message": text}), "json": text}
        if vectors is not None and vectors.size:
            columns[vectors.name] = pyarrow.list_(pyarrow.float32(), vectors.size)
        if vectors is not None and vectors.token_size:
            columns[vectors.token_name] = pyarrow.list_(pyarrow.list_(pyarrow.float32(), vectors.token_size))
        self._schema = pyarrow.schema(columns)
        self._vectors = vectors
        self._make_batch = pyarrow.RecordBatch.from_pylist
        self._writer = pyarrow.parquet.ParquetWriter(stream, self._schema, compression="zstd")
        self._lines: list[bytes] = []
        self._num_bytes = 0
        self._num_rows = first_row

    def write(self, line: bytes, /) -> None:
        self._lines.append(line)
        self._num_bytes += len(line)
        if len(self._lines) == _PARQUET_ROWS or self._num_bytes >= _PARQUET_BYTES:
            self._write_group()

    def close(self) -> None:
        self._write_group()
        self._writer.close()

    def _write_group(self) -> None:
        rows = [parquet_row(self._num_rows + number, line, self._vectors) for number, line in enumerate(self._lines)]
        self._num_rows += len(rows)
        self._lines, self._num_bytes = [], 0
        if rows:
            self._writer.write_batch(self._make_batch(rows, schema=self._schema))


def _sink_of(suffix: str, stream: BinaryIO, vectors: VectorColumns | None, first_row: int) -> LineSink:
    if suffix == _PARQUET:
        return _ParquetSink(stream, vectors, first_row)
    return _SINKS.get(suffix, _PlainSink)(stream)


_SINKS: Final[dict[str, Callable[[BinaryIO], LineSink]]] = {
    ".gz": _gzip_sink,
    ".zst": _zstd_sink,
}
