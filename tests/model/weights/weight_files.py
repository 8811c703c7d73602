"""Safetensors files for tests: valid ones by the library, invalid ones by hand."""

import json
import struct
from pathlib import Path

import torch
from safetensors.torch import save_file


def write_raw(path: Path, header: object, data: bytes, *, length: int | None = None) -> Path:
    """Write a file whose header is `header` (an object, or the text itself), right or wrong."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def entry(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def save_single(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    return folder


def save_indexed(folder: Path, files: dict[str, dict[str, torch.Tensor]]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for file_name, tensors in files.items():
        save_file(tensors, folder / file_name)
    write_index(folder, {name: file_name for file_name, tensors in files.items() for name in tensors})
    return folder


def write_index(folder: Path, weight_map: object) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
