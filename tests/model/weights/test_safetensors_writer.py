"""Safetensors files of our own writer: what the library reads, where data lies, what a digest sees."""

from pathlib import Path

import pytest
import torch
from file_limit import file_limit
from safetensors import safe_open
from safetensors.torch import load_file

from spmd_worker.model.weights.safetensors_header import read_header
from spmd_worker.model.weights.safetensors_writer import SafetensorsWriter, TensorToWrite, divided, in_file_order

TENSORS = {
    "odd": torch.arange(7, dtype=torch.bfloat16),
    "page": torch.randn(64, 32, generator=torch.Generator().manual_seed(1)),
    "number": torch.tensor(3.5),
    "empty": torch.empty(0, 4),
    "words": torch.arange(6, dtype=torch.float64).view(2, 3).t(),
    "flags": torch.tensor([True, False, True]),
    "pages": torch.arange(8192, dtype=torch.bfloat16).view(2, 4096),
}


def to_write(names: list[str]) -> list[TensorToWrite]:
    return [TensorToWrite(name, TENSORS[name].dtype, tuple(TENSORS[name].shape)) for name in names]


def written(path: Path, alignment: int, **changes: torch.Tensor) -> tuple[list[str], str]:
    """Names in the order of the file, and its digest."""
    order = in_file_order(to_write([*TENSORS]), alignment)
    with SafetensorsWriter(path, order, {"format": "pt", "other": "x"}, alignment) as writer:
        for each in order:
            writer.write(changes.get(each.name, TENSORS[each.name]))
    return [each.name for each in order], writer.digest


@pytest.mark.parametrize("alignment", [8, 4096])
def test_library_reads_what_was_written(alignment: int, tmp_path: Path):
    path = tmp_path / "a.safetensors"
    order, _ = written(path, alignment)
    read, header = load_file(path), read_header(path)
    assert read.keys() == TENSORS.keys()
    assert all(torch.equal(read[name], TENSORS[name]) and read[name].dtype == TENSORS[name].dtype for name in TENSORS)
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt", "other": "x"}
    assert header.data_start % alignment == 0
    assert (
        order
        == {
            8: ["page", "empty", "words", "pages", "number", "odd", "flags"],
            4096: ["page", "empty", "pages", "words", "number", "odd", "flags"],
        }[alignment]
    )
    for name, each in header.tensors.items():
        assert each.begin % TENSORS[name].element_size() == 0, name


def test_digest_sees_header_and_every_chunk(tmp_path: Path):
    digests = [written(tmp_path / str(number), alignment)[1] for number, alignment in enumerate((8, 8, 4096))]
    changed = TENSORS["pages"].clone()
    changed[1, -1] = 0
    digests.append(written(tmp_path / "changed", 8, pages=changed)[1])
    assert digests[0] == digests[1]
    assert len(set(digests)) == 3


def test_files_have_a_maximum_size(tmp_path: Path):
    names = ["page", "pages", "words", "number", "odd"]
    sizes = [[each.name for each in part] for part in divided(to_write(names), 8300)]
    assert sizes == [["page"], ["pages"], ["words", "number", "odd"]]
    assert [len(part) for part in divided(to_write(names), None)] == [5]
    assert divided([], 8) == [[]]


def test_failed_write_is_an_error_and_closes(tmp_path: Path):
    with file_limit(20_000), pytest.raises(OSError, match="File too large"):
        written(tmp_path / "a.safetensors", 4096)
