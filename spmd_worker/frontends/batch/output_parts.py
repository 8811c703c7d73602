"""The output as parts: `answers/part-*.jsonl.zst` -> part-00000.jsonl.zst ... and `manifest.json` beside them.

Each part is written whole as soon as its rows are there, also while the job runs. It is committed once it is recorded
in the run directory: a resumed job does not write it again, and writes the others with the same bytes.
"""

import contextlib
import errno
import json
import logging
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from itertools import chain, islice
from pathlib import Path
from typing import Any, Final

from spmd_worker.base.errors import ConfigError
from spmd_worker.base.files import (
    JsonError,
    create_file,
    parse_json_object,
    read_json_object,
    remove_uncreated,
    write_file,
    write_json,
)
from spmd_worker.base.remote_files import create_remote, delete_remote, read_remote, replace_remote, state_of
from spmd_worker.base.remote_names import FilePath, RemotePath

logger = logging.getLogger(__name__)

PART_ROWS: Final = 100_000
PARTS_NAME: Final = "parts.json"
"""Record of the committed parts, in the run directory."""
MANIFEST_NAME: Final = "manifest.json"
FORMAT_VERSION: Final = 1


def is_parts(path: FilePath) -> bool:
    """Whether the output is written as parts: its name has a `*`."""
    return "*" in path.name


def last_path(output: FilePath) -> FilePath:
    """The file that an output's writer writes last."""
    return output.with_name(MANIFEST_NAME) if is_parts(output) else output


def part_path(pattern: FilePath, number: int) -> FilePath:
    """File of a part."""
    return pattern.with_name(pattern.name.replace("*", f"{number:05d}"))


def files_of(output: FilePath) -> list[FilePath]:
    """The files of a complete output, in order. Raises OSError for one that is not there, ConfigError for parts that
    are not complete, or another output's.
    """
    if not is_parts(output):
        return [output]
    path = output.with_name(MANIFEST_NAME)
    if (data := _read(path)) is None:
        raise FileNotFoundError(errno.ENOENT, f"no {path}, which lists its parts")
    manifest = _parse(data)
    if manifest is None or _pattern_in(manifest, output) != output.name or _other_part(output, manifest) is not None:
        raise ConfigError(f"{output}: {path} is not of this output: give the output as in job.output")
    names = _names_in(manifest)
    if not manifest.get("is_complete"):
        raise ConfigError(f"{output} is not complete ({len(names)} parts in {path}): let its job end")
    return [output.with_name(name) for name in names]


class LineDigest:
    """Number, bytes and digest of the uncompressed lines of an output: for plain JSONL as `sha256sum`."""

    def __init__(self) -> None:
        self.num_lines = self._num_bytes = 0
        self._digest = sha256()

    def read(self, lines: Iterable[bytes]) -> Iterator[bytes]:
        """The lines, counted as they are taken."""
        for line in lines:
            self._digest.update(line)
            self.num_lines, self._num_bytes = self.num_lines + 1, self._num_bytes + len(line)
            yield line

    def as_dict(self) -> dict[str, Any]:
        return {"lines": self.num_lines, "bytes": self._num_bytes, "sha256": self._digest.hexdigest()}


@dataclass(frozen=True, slots=True)
class Part:
    """A committed part: its name, its rows, and the bytes and digest of the file itself, as of `sha256sum`."""

    part: str
    rows: int
    bytes: int
    sha256: str


class CommittedParts:
    """Committed parts of an output. `run` names who writes it, in the manifest until it is complete; "" is not
    compared. `earlier` are names of an earlier job's parts, which this one's replace; `over` is the digest of the
    manifest that it began with.
    """

    def __init__(
        self,
        pattern: FilePath,
        part_rows: int,
        run_dir: Path | None,
        parts: list[Part],
        earlier: list[str],
        run: str = "",
        over: str = "",
        key: str = "job.output",
    ) -> None:
        self.pattern, self.part_rows = pattern, part_rows
        self._run_dir, self._parts, self._earlier = run_dir, parts, earlier
        self._run, self._over, self._key = run, over, key

    @staticmethod
    def open(
        pattern: FilePath, part_rows: int, run_dir: Path | None, run: str = "", key: str = "job.output"
    ) -> "CommittedParts":
        """The parts that the run directory records, unless another job has replaced them. Raises as `claim_folder`."""
        record = {}
        if run_dir is not None:
            with contextlib.suppress(FileNotFoundError, JsonError):
                record = read_json_object(run_dir / PARTS_NAME)
        data, names = _read(pattern.with_name(MANIFEST_NAME)), [record.get(each) for each in ("output", "run")]
        if (*names, record.get("part_rows")) == (str(pattern), run, part_rows):
            parts = [Part(**each) for each in record["parts"]]
            found = CommittedParts(pattern, part_rows, run_dir, parts, record["earlier"], run, record["over"], key)
            if not run or (data is not None and found._is_own(data)):
                return found
        claim_folder(pattern, key, run)
        earlier = earlier_parts(pattern, key, run)
        return CommittedParts(pattern, part_rows, run_dir, [], earlier, run, _digest_of(data), key)

    def check_own(self) -> None:
        """Raise ConfigError if another job has shown parts since this one began. Only remote folders have no lock."""
        if self._run and isinstance(self.pattern, RemotePath):
            data = _read(self.pattern.with_name(MANIFEST_NAME))
            if data is not None and not self._is_own(data):
                raise _of_another_job(self.pattern, self._key)

    def _is_own(self, data: bytes) -> bool:
        """True for a manifest of this job, or the one that it began with."""
        manifest = _parse(data) or {}
        is_this = bool(manifest.get("is_complete")) and manifest["parts"] == [asdict(each) for each in self._parts]
        return manifest.get("run") == self._run or is_this or _digest_of(data) == self._over

    def has(self, number: int) -> bool:
        """Whether the part is committed, complete and there. A shorter one was the last, and may not be it now."""
        if number >= len(self._parts) or self._parts[number].rows != self.part_rows:
            return False
        return size_of(part_path(self.pattern, number)) == self._parts[number].bytes

    def add(self, number: int, part: Part) -> None:
        """Commit a written part: record it, then show it."""
        self._parts[number : number + 1] = [part]
        self._record()
        self._show()

    def end(self, lines: dict[str, Any]) -> None:
        """Describe the complete output, and remove an earlier one's parts beyond it."""
        del self._parts[-(-lines["lines"] // self.part_rows) :]
        self._record()
        # While the manifest lists them: after a kill the next writer does.
        for name in self._surplus():
            _delete(self.pattern.with_name(name))
        self._show(lines)

    def _surplus(self) -> list[str]:
        names = {each.part for each in self._parts}
        return [name for name in self._earlier if name not in names]

    def _record(self) -> None:
        if self._run_dir is not None:
            record = {"output": str(self.pattern), "part_rows": self.part_rows, "run": self._run}
            record |= {"over": self._over, "earlier": self._earlier}
            write_json(self._run_dir / PARTS_NAME, record | {"parts": [asdict(each) for each in self._parts]})

    def _show(self, lines: dict[str, Any] | None = None) -> None:
        self.check_own()
        data = _manifest_of(self.pattern, self.part_rows, self._parts, lines, self._surplus(), self._run)
        _replace(self.pattern.with_name(MANIFEST_NAME), data)


def _manifest_of(
    pattern: FilePath,
    part_rows: int | None,
    parts: Sequence[Part],
    lines: dict[str, Any] | None = None,
    earlier: Sequence[str] = (),
    run: str = "",
) -> bytes:
    """Bytes of a manifest; until it is complete (`lines`) with the names of an earlier output's other parts."""
    manifest = {
        "format_version": FORMAT_VERSION,
        "pattern": pattern.name,
        "is_complete": lines is not None,
        "part_rows": part_rows,
        "rows": sum(each.rows for each in parts),
        "parts": [asdict(each) for each in parts],
        "lines": lines,
    }
    if lines is None and earlier:
        manifest["earlier"] = list(earlier)
    if lines is None and run:
        # Equal jobs end with equal bytes.
        manifest["run"] = run
    return (json.dumps(manifest, indent=1) + "\n").encode("ascii")


def write_parts(
    lines: Iterator[bytes],
    digest: LineDigest,
    parts: CommittedParts,
    write_part: Callable[[Iterable[bytes], FilePath, int], Part],
) -> None:
    """Write the parts that are not committed by `write_part(lines, path, first row)`. `digest` counts `lines`. Raises
    OSError.
    """
    for number, first in enumerate(lines):
        first_row = digest.num_lines - 1
        own = chain([first], islice(lines, parts.part_rows - 1))
        if parts.has(number):
            # Only for the digest of all lines.
            deque(own, maxlen=0)
        else:
            parts.check_own()
            parts.add(number, write_part(own, part_path(parts.pattern, number), first_row))
    parts.end(digest.as_dict())


def claim_folder(pattern: FilePath, key: str = "job.output", run: str = "") -> None:
    """Make the folder this output's, written by `run`, by its manifest, which one of several jobs can create. Raises
    ConfigError as `earlier_parts` does if it is another's, OSError.
    """
    path = pattern.with_name(MANIFEST_NAME)
    # Some stores ignore the condition of a conditional write, and would replace it.
    if _read(path) is None:
        _create(path, _manifest_of(pattern, None, [], run=run))
    if isinstance(path, Path):
        remove_uncreated(path)
    earlier_parts(pattern, key, run)


def earlier_parts(pattern: FilePath, key: str = "job.output", run: str = "") -> list[str]:
    """Names of the parts in an earlier output's manifest. Raises ConfigError for the manifest of anything else, which
    would be replaced, its files removed; and for a remote output that is not complete and not `run`'s.
    """
    path = pattern.with_name(MANIFEST_NAME)
    data = _read(path)
    if data is None:
        return []
    way_out = "would be replaced: give parts a folder of their own"
    manifest = _parse(data)
    if manifest is None:
        # On a file system without hard links a kill can leave it so.
        way_out += "" if data.strip() else ", or remove that file, which is empty"
        raise ConfigError(f"{key}={pattern}: {path} is not of an output in parts, and {way_out}")
    if (name := _pattern_in(manifest, pattern)) != pattern.name:
        raise ConfigError(
            f"{key}={pattern}: {path} is of the output {name}, whose job may be running, and {way_out}, or remove that "
            f"file if its job has ended and is not to go on"
        )
    if (other := _other_part(pattern, manifest)) is not None:
        raise ConfigError(f"{key}={pattern}: {path} lists {other}, a part of another output, and {way_out}")
    is_open = manifest.get("is_complete") is False and isinstance(pattern, RemotePath)
    if run and is_open and manifest.get("run") != run:
        raise _of_another_job(pattern, key)
    return [*_names_in(manifest), *manifest.get("earlier", ())]


def _of_another_job(pattern: FilePath, key: str) -> ConfigError:
    return ConfigError(
        f"{key}={pattern}: {pattern.with_name(MANIFEST_NAME)} is of another job with this output, which may be "
        f"running, and whose parts would be replaced: give parts a folder of their own, resume that job with its "
        f"run directory, or remove that file if its job has ended and is not to go on"
    )


def _digest_of(data: bytes | None) -> str:
    return "" if data is None else sha256(data).hexdigest()


def _parse(data: bytes) -> dict[str, Any] | None:
    """A manifest; None for anything else."""
    try:
        manifest = parse_json_object(data)
        names = [*_names_in(manifest), *manifest.get("earlier", ())]
    except (JsonError, TypeError, LookupError):
        return None
    return manifest if all(isinstance(name, str) for name in names) else None


def _names_in(manifest: dict[str, Any]) -> list[str]:
    return [each["part"] for each in manifest["parts"]]


def _pattern_in(manifest: dict[str, Any], pattern: FilePath) -> str:
    """The name of the manifest's output; early manifests have none."""
    return str(manifest.get("pattern", pattern.name))


def _other_part(pattern: FilePath, manifest: dict[str, Any]) -> str | None:
    """A part that is not of the pattern, if the manifest lists one."""
    number = re.compile(r"\d{5,}".join(map(re.escape, pattern.name.split("*"))))
    names = [*_names_in(manifest), *manifest.get("earlier", ())]
    return next((name for name in names if number.fullmatch(name) is None), None)


def _read(path: FilePath) -> bytes | None:
    if isinstance(path, RemotePath):
        return read_remote(path.raw)
    return path.read_bytes() if path.is_file() else None


def _create(path: FilePath, data: bytes) -> None:
    """Create a file unless it exists."""
    if not isinstance(path, RemotePath):
        create_file(path, data)
        return
    try:
        create_remote(path.raw, data)
    except (OSError, NotImplementedError) as error:
        if isinstance(error, PermissionError) or getattr(error, "is_transient", False):
            raise
        # A store without conditional writes, which cannot tell two jobs that start at once.
        logger.warning("%s cannot be created exclusively: %s", path, error)
        if read_remote(path.raw) is None:
            replace_remote(path.raw, data)


def _replace(path: FilePath, data: bytes) -> None:
    if isinstance(path, RemotePath):
        replace_remote(path.raw, data)
    else:
        write_file(path, data)


def _delete(path: FilePath) -> None:
    if isinstance(path, RemotePath):
        delete_remote(path.raw)
    else:
        path.unlink(missing_ok=True)


def size_of(path: FilePath) -> int | None:
    """Bytes of a file; None if it is missing."""
    try:
        return state_of(path.raw).num_bytes if isinstance(path, RemotePath) else path.stat().st_size
    except FileNotFoundError:
        return None
