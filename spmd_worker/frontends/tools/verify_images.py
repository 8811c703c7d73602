"""Reads the images or the audio of a job again, and compares them with the digest in its provenance."""

import json
from collections.abc import Iterator
from hashlib import sha256
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

from spmd_worker.base.config.schema import RowLimits
from spmd_worker.base.errors import ConfigError
from spmd_worker.base.files import JsonError, read_json_object
from spmd_worker.base.remote_names import file_path
from spmd_worker.compat.image_prompts import media_digest
from spmd_worker.frontends.batch.input.row_reader import RowReader
from spmd_worker.frontends.batch.output_file import read_lines
from spmd_worker.frontends.batch.output_parts import files_of
from spmd_worker.frontends.batch.run_dir.job_files import MANIFEST_NAME, PROVENANCE_NAME
from spmd_worker.frontends.batch.run_dir.manifest import output_in, read_manifest
from spmd_worker.frontends.batch.run_dir.provenance import chained_digest
from spmd_worker.frontends.openai.row import AudioPrompt, Row, RowError, images_of_row, media_of_row
from spmd_worker.frontends.openai.row_parser import parse_row
from spmd_worker.frontends.tools.run_dir import NO_JOB, RunDirError, check_folder
from spmd_worker.media.errors import MediaError
from spmd_worker.media.source import AUDIO, IMAGE, VIDEO, Medium, read_source
from spmd_worker.replica.sequence.sampling_params import SamplingParams
from spmd_worker.tokenizer.video_parts import VideoPart


class ImagesError(Exception):
    """The images of a run cannot be read again; the message names the file or row, and the reason."""


def compare_images(run_dir: Path) -> tuple[int, str | None]:
    """The number of rows of an ended job that have images, and the difference between these and what its provenance
    has; None for the same ones. Raises ImagesError.
    """
    try:
        check_folder(run_dir)
        provenance = read_json_object(run_dir / PROVENANCE_NAME)
        manifest = read_manifest(run_dir / MANIFEST_NAME)
    except RunDirError as error:
        raise ImagesError(str(error)) from None
    except FileNotFoundError:
        reason = "the job has not ended: let it end" if (run_dir / MANIFEST_NAME).exists() else NO_JOB
        raise ImagesError(f"{run_dir} has no {PROVENANCE_NAME}: {reason}") from None
    except (OSError, JsonError, ConfigError) as error:
        raise ImagesError(f"{run_dir} is not the run directory of an ended job: {error}") from None
    if manifest is None or not isinstance(manifest.get("input"), list):
        raise ImagesError(f"{run_dir}: the job read a stream, which cannot be read again")
    if not manifest["has_ended"] and any(provenance.get(key) != manifest.get(key) for key in ("run", "starts")):
        raise ImagesError(f"{run_dir}: {PROVENANCE_NAME} is of an earlier job, and this one has not ended: let it end")
    recorded, found = provenance.get("images"), chained_digest(_digests(run_dir, manifest))
    difference = f"images or audio: {_shown(recorded)} when the job ran, {_shown(found)} now"
    return 0 if found is None else found["rows"], None if found == recorded else difference


def _digests(run_dir: Path, manifest: dict[str, Any]) -> Iterator[tuple[int, str]]:
    """(row, digest of its images or its audio) of the rows that ran with any."""
    config = manifest["config"]
    limits, root = RowLimits(**config["limits"]), manifest["answers"].get("job.media_root")
    inputs = RowReader([file_path(each) for each in manifest["input"]], limits.num_line_bytes)
    shard, output = manifest.get("shard") or {"start": 0, "stop": None}, output_in(run_dir, manifest)
    assert output is not None
    try:
        outputs = chain.from_iterable(map(read_lines, files_of(output)))
        for (index, line), answer in zip(islice(inputs, shard["start"], shard["stop"]), outputs):
            row = parse_row(index, line, SamplingParams(), limits)
            sources = () if isinstance(row, RowError) else _sources(row, limits)
            if not sources or json.loads(answer).get("error") is not None:
                continue
            yield index, media_digest([_digest(index, each, root) for each in sources])
    except (OSError, ValueError, ConfigError) as error:
        raise ImagesError(str(error)) from None


class _Source(NamedTuple):
    """A path or a data URL, and what it is of; or a video."""

    source: str | bytes | VideoPart
    max_bytes: int
    medium: Medium


def _sources(row: Row, limits: RowLimits) -> list[_Source]:
    if isinstance(row.prompt, AudioPrompt):
        return [_Source(row.prompt.source, limits.max_audio_bytes, AUDIO)]
    of_image, of_audio = (limits.max_image_bytes, IMAGE), (limits.max_audio_bytes, AUDIO)
    given = list(zip(images_of_row(row), media_of_row(row), strict=True))
    # In the order of `ImagesOfRow`.
    given.sort(key=lambda each: 2 if each[1] == "audio" else isinstance(each[0], VideoPart))
    return [
        _Source(each, limits.max_video_bytes, VIDEO)
        if isinstance(each, VideoPart) and each.is_file
        else _Source(each or "", *(of_audio if medium == "audio" else of_image))
        for each, medium in given
    ]


def _digest(row: int, given: _Source, root: str | None) -> bytes:
    if isinstance(given.source, VideoPart) and not given.source.is_file:
        frames = [_digest(row, given._replace(source=each), root) for each in given.source.texts]
        return sha256(b"".join(frames)).digest()
    source = given.source.video if isinstance(given.source, VideoPart) else given.source
    try:
        return sha256(read_source(source, None if root is None else Path(root), *given[1:])).digest()
    except MediaError as error:
        raise ImagesError(f"row {row}: {error}") from None


def _shown(images: Any) -> str:
    return f"{images['digest']} of {images['rows']} rows" if images else "none"
