"""Sampled digest of each weight file: small reads all over its tensors, cheap enough for every start of a job.

Fine-tunes, merges and conversions are told apart. A change of few elements may lie between the samples:
`content_digest` reads all bytes, and `LLM.check_weights` compares all weights.
"""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import Final

from spmd_worker.base.files import read_regular_file
from spmd_worker.model.weights.content_digest import file_status, is_settled
from spmd_worker.model.weights.safetensors_header import MAX_HEADER_BYTES, SafetensorsHeader
from spmd_worker.model.weights.weight_files import all_weight_files
from spmd_worker.model.weights.weight_headers import read_weight_header
from spmd_worker.model_config.tensor_names import STATE_FILE
from spmd_worker.resolved import ResolvedRun

SAMPLE_BYTES: Final = 4096
MAX_SAMPLES: Final = 2048
"""Most samples at even distances, besides one a file; as many more are of tensors between these."""
_NUM_READERS: Final = 16
"""Reads in flight: a network file system takes milliseconds for each."""


def sampled_digests(resolved: ResolvedRun) -> dict[str, str]:
    """Digest of each weight file of a run, by its name in the model's folder: `state_digest` of a sharded state, empty
    for dummy weights. Raises CheckpointError and OSError.
    """
    folder, load_format = resolved.model_folder, resolved.config.model.load_format
    pooling = resolved.model_config.pooling
    if load_format == "dummy":
        return {}
    if load_format == "sharded_state":
        return state_digest(folder)
    return file_digests(folder, () if pooling is None else pooling.weight_folders)


def state_digest(folder: Path) -> dict[str, str]:
    """Digest of a sharded state's description, by its name, which has the digests of all files: ranks may have their
    own files alone. Raises OSError.
    """
    state = read_regular_file(folder / STATE_FILE, MAX_HEADER_BYTES)
    return {STATE_FILE: blake2b(state, digest_size=16).hexdigest()}


def file_digests(folder: Path, inside: Sequence[str] = ()) -> dict[str, str]:
    """Digest of each weight file of `folder` and those `inside` it: of its size, its header and samples.

    Files of at most 8 MiB together are read completely. Else samples of 4 KiB have distances of a power of two, so that
    there are at most 2,048 and one a file; the first 4 KiB of as many of the tensors between them are read, too: 16
    MiB. A process reads files again only if they are new or their identity has changed. Raises CheckpointError and
    OSError.
    """
    paths = tuple(all_weight_files(folder, inside))
    statuses = tuple(map(file_status, paths))
    # Another change of a new file may leave it the same status.
    digests = (_digests if all(map(is_settled, statuses)) else _digests.__wrapped__)(paths, statuses)
    return {str(path.relative_to(folder)): digest for path, digest in zip(paths, digests, strict=True)}


@lru_cache(maxsize=4)
def _digests(paths: tuple[Path, ...], statuses: tuple[tuple[int, ...], ...]) -> list[str]:
    """Digests of files of these `statuses`."""
    headers = [read_weight_header(path) for path in paths]
    with ThreadPoolExecutor(_NUM_READERS, thread_name_prefix="spmd-digest") as readers:
        offsets = sample_offsets(headers)
        return [_digest(readers, *each) for each in zip(paths, headers, offsets, strict=True)]


def sample_offsets(headers: Sequence[SafetensorsHeader]) -> list[list[int]]:
    """Offsets of the samples in each file, ascending."""
    num_bytes, distance = sum(header.file_bytes for header in headers), SAMPLE_BYTES
    while num_bytes > MAX_SAMPLES * distance:
        distance *= 2
    offsets = [set(range(0, header.file_bytes, distance)) for header in headers]
    # Trained alone, a small tensor, such as a classifier or a norm, would lie between samples.
    between = []
    for number, header in enumerate(headers):
        for entry in sorted(header.tensors.values(), key=lambda entry: entry.begin):
            begin, end = header.data_start + entry.begin, header.data_start + entry.end
            after_sample = begin % distance
            if after_sample >= SAMPLE_BYTES and after_sample + end - begin <= distance and begin < end:
                between.append((number, begin))
    for number, offset in between[:: max(-(-len(between) // MAX_SAMPLES), 1)]:
        offsets[number].add(offset)
    return [sorted(each) for each in offsets]


def _digest(readers: ThreadPoolExecutor, path: Path, header: SafetensorsHeader, offsets: Sequence[int]) -> str:
    digest = blake2b(f"{header.file_bytes} {header.digest}".encode(), digest_size=16)
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        # With read-ahead, samples would be most of the file.
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
        for sample in readers.map(lambda offset: os.pread(descriptor, SAMPLE_BYTES, offset), offsets):
            digest.update(sample)
    finally:
        os.close(descriptor)
    return digest.hexdigest()
