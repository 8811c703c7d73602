"""Whether ranks read the same weights: by the files they open where those are the same, else by content."""

import platform
from hashlib import blake2b
from pathlib import Path

import torch

from spmd_worker.layers.weight_slice import full_rectangle
from spmd_worker.process import boot_id
from spmd_worker.weights.checkpoint import Checkpoint
from spmd_worker.weights.region import split_region

_BLOCK_ELEMENTS = 1 << 22


def file_identities(folder: Path) -> list[list[str | int]]:
    """Machine, device, inode, size and time of change of every safetensors file of the folder."""
    machine = _machine()
    identities: list[list[str | int]] = []
    for path in sorted(folder.glob("*.safetensors")):
        status = path.stat()
        identities.append([machine, path.name, status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns])
    return identities


def tensor_digests(folder: Path) -> dict[str, str]:
    """A digest of the contents of every tensor, by name: reads the whole checkpoint once."""
    with Checkpoint.open(folder) as checkpoint:
        return {name: _digest(checkpoint, name) for name in checkpoint.names()}


def _digest(checkpoint: Checkpoint, name: str) -> str:
    shape = checkpoint.shape(name)
    digest = blake2b(digest_size=16)
    for block in split_region(shape, full_rectangle(shape), _BLOCK_ELEMENTS):
        digest.update(checkpoint.read_stored(name, block).contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _machine() -> str:
    """Inodes of two machines may be equal by chance; the id of this boot is not."""
    return boot_id() or platform.node()
