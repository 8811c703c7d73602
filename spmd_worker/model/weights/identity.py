"""Identities of the weights that ranks read, to compare: of files, or of contents if ranks read different files."""

import platform
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path

import torch

from spmd_worker.base.process import boot_id
from spmd_worker.model.layers.weight_slice import full_rectangle
from spmd_worker.model.weights.checkpoint import Checkpoint
from spmd_worker.model.weights.checkpoint_files import open_checkpoint
from spmd_worker.model.weights.region import split_region
from spmd_worker.model.weights.weight_files import all_weight_files

_BLOCK_ELEMENTS = 1 << 22


def file_identities(folder: Path, inside: Sequence[str] = (), *, is_state: bool = False) -> list[list[str | int]]:
    """Machine, name, device, inode, size and mtime of each weight file of the folder and those `inside` it, or of a
    sharded state. Raises CheckpointError and OSError.
    """
    # Inodes of two machines may be equal; the id of this boot is unique.
    machine = boot_id() or platform.node()
    identities: list[list[str | int]] = []
    for path in sorted(folder.glob("*.safetensors")) if is_state else all_weight_files(folder, inside):
        status, name = path.stat(), str(path.relative_to(folder))
        identities.append([machine, name, status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns])
    return identities


def tensor_digests(folder: Path, inside: Sequence[str] = ()) -> dict[str, str]:
    """A digest of the contents of every tensor, by name, of the folder and of those `inside` it: reads all files."""
    digests: dict[str, str] = {}
    for each in ("", *inside):
        with open_checkpoint(folder / each) as checkpoint:
            names = checkpoint.names()
            digests |= {f"{each}/{name}" if each else name: _digest(checkpoint, name) for name in names}
    return digests


def _digest(checkpoint: Checkpoint, name: str) -> str:
    shape = checkpoint.shape(name)
    digest = blake2b(digest_size=16)
    for block in split_region(shape, full_rectangle(shape), _BLOCK_ELEMENTS):
        digest.update(checkpoint.read_stored(name, block).contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
