"""A model that is replaced in place by another fine-tune: the same files, sizes and headers, other weights."""

import os
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from spmd_worker.model.weights.safetensors_header import read_header


def retrain(folder: Path, *names: str) -> None:
    """Change the weights of each tensor, or of those of these names, by a twentieth."""
    path = folder / "model.safetensors"
    tensors, metadata = load_file(path), dict(read_header(path).metadata) or None
    for name in names or tensors:
        tensors[name] = tensors[name] + torch.full_like(tensors[name], 0.05)
    before, status = path.read_bytes(), path.stat()
    save_file(tensors, path, metadata)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    length = 8 + int.from_bytes(before[:8], "little")
    with path.open("rb") as file:
        assert file.read(length) == before[:length], "the same header"
    assert path.stat().st_size == len(before)
