"""Memory of a start from a streamed checkpoint: the weights and 64 MiB, as the kernel counts it in a process."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from forked_child import in_child
from our_model import load_model
from reference_models import CheckpointSpec, LlamaConfig, write_checkpoint

from spmd_worker.model.weights.safetensors_writer import PAGE_BYTES, TensorToWrite, in_file_order
from spmd_worker.model.weights.saved_checkpoint import metadata_of
from spmd_worker.worker.memory import host

LIMIT = 64 * 2**20
SIZES = {"num_hidden_layers": 1, "hidden_size": 512, "vocab_size": 65536, "tie_word_embeddings": False}
"""An embedding and a head of 128 MiB each."""


def write_zeros(folder: Path, *, is_streamed: bool) -> Path:
    """A checkpoint of zeros, in a file that takes no space on the disk."""
    small = write_checkpoint(folder, CheckpointSpec(LlamaConfig, {**SIZES, "vocab_size": 16}))
    config = json.loads((small / "config.json").read_text())
    (small / "config.json").write_text(json.dumps({**config, "vocab_size": SIZES["vocab_size"]}))
    path = small / "model.safetensors"
    content = path.read_bytes()
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    header.pop("__metadata__", None)
    shapes = {name: [SIZES["vocab_size"] if n == 16 else n for n in each["shape"]] for name, each in header.items()}
    tensors = in_file_order([TensorToWrite(name, torch.float32, tuple(shape)) for name, shape in shapes.items()])
    position, entries = 0, {"__metadata__": metadata_of(is_streamed=is_streamed)}
    for each in tensors:
        end = position + each.num_bytes
        entries[each.name] = {"dtype": "F32", "shape": list(each.shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(entries).encode()
    text += b" " * (-(8 + len(text)) % PAGE_BYTES)
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    os.truncate(path, 8 + len(text) + position)
    return folder


def extra_bytes(folder: Path, result: Path) -> int:
    """Memory that loading takes at its peak beyond that of the weights."""

    def load() -> None:
        # A forked process begins with its memory as its peak.
        before = host.resident_bytes()
        model = load_model(folder)
        weights = sum(each.nbytes for each in (*model.parameters(), *model.buffers()))
        assert weights > 256 * 2**20
        result.write_text(str(host.peak_resident_bytes() - before - weights))

    assert in_child(load) == 0
    return int(result.read_text())


@pytest.fixture(scope="module", autouse=True)
def _kernels_are_built(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    load_model(write_checkpoint(tmp_path_factory.mktemp("small") / "model", CheckpointSpec(LlamaConfig)))
    # A forked process waits for ever for threads of torch that an earlier test has started here.
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.guarantee("A streamed start takes the memory of the weights and 64 MiB")
def test_streamed_start_takes_weights_and_64_mib(tmp_path: Path):
    assert extra_bytes(write_zeros(tmp_path / "model", is_streamed=True), tmp_path / "bytes") < LIMIT


@pytest.mark.control("A streamed start takes the memory of the weights and 64 MiB")
def test_memory_check_detects_a_plain_start(tmp_path: Path, control):
    extra = extra_bytes(write_zeros(tmp_path / "model", is_streamed=False), tmp_path / "bytes")
    with control():
        assert extra < LIMIT
