"""Whether ranks read the same weights: by the files they open where those are the same, else by content."""

import platform
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path

import torch

from spmd_worker.base.process import boot_id
from spmd_worker.model.layers.weight_slice import full_rectangle
from spmd_worker.model.weights.checkpoint import Checkpoint
from spmd_worker.model.weights.region import split_region

_BLOCK_ELEMENTS = 1 << 22


def file_identities(folder: Path, inside: Sequence[str] = ()) -> list[list[str | int]]:
    """Machine, device, inode, size and time of change of every safetensors file of the folder, and of those `inside`
    it that the model has weights in, too.
    """
    machine = _machine()
    identities: list[list[str | int]] = []
    for path in [path for each in ("", *inside) for path in sorted((folder / each).glob("*.safetensors"))]:
        status, name = path.stat(), str(path.relative_to(folder))
        identities.append([machine, name, status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns])
    return identities


def tensor_digests(folder: Path, inside: Sequence[str] = ()) -> dict[str, str]:
    """A digest of the contents of every tensor, by name: reads the whole checkpoint once, and what is `inside` too."""
    digests: dict[str, str] = {}
    for each in ("", *inside):
        with Checkpoint.open(folder / each) as checkpoint:
            names = checkpoint.names()
            digests |= {f"{each}/{name}" if each else name: _digest(checkpoint, name) for name in names}
    return digests


def _digest(checkpoint: Checkpoint, name: str) -> str:
    shape = checkpoint.shape(name)
    digest = blake2b(digest_size=16)
    for block in split_region(shape, full_rectangle(shape), _BLOCK_ELEMENTS):
        digest.update(checkpoint.read_stored(name, block).contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _machine() -> str:
    """Inodes of two machines may be equal by chance; the id of this boot is not."""
    return boot_id() or platform.node()
