"""Memory of a start from a streamed checkpoint: the weights and 64 MiB, as the kernel counts it in a process."""

import json
import os
from pathlib import Path

import pytest
import ranks
import torch
from json_files import edit
from reference_models import CheckpointSpec, LlamaConfig, write_checkpoint

from spmd_worker.model.weights.safetensors_writer import PAGE_BYTES, TensorToWrite, in_file_order
from spmd_worker.model.weights.saved_checkpoint import metadata_of

LIMIT = 64 * 2**20
SIZES = {"num_hidden_layers": 1, "hidden_size": 512, "vocab_size": 65536, "tie_word_embeddings": False}
"""An embedding and a head of 128 MiB each."""


def write_zeros(folder: Path, *, is_streamed: bool) -> Path:
    """A checkpoint of zeros, in a file that takes no space on the disk."""
    small = write_checkpoint(folder, CheckpointSpec(LlamaConfig, {**SIZES, "vocab_size": 16}))
    edit(small / "config.json", vocab_size=SIZES["vocab_size"])
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


LOADING = """
import ctypes, os, sys
from pathlib import Path
import torch
from our_model import load_model
from spmd_worker.worker.memory import host

# Large pages, which some systems give unasked, would round every thread's memory up.
PR_SET_THP_DISABLE = 41
ctypes.CDLL(None).prctl(*map(ctypes.c_ulong, (PR_SET_THP_DISABLE, 1, 0, 0, 0)))
# A forked process has no threads but its own: it would wait for those of a pool for ever.
torch.set_num_threads(1)
# Kernels are built, and libraries loaded.
load_model(Path(sys.argv[1]))
for folder in sys.argv[2:]:
    if os.fork() == 0:
        # A forked process begins with its memory as its peak, but without pages of libraries' files: the kernel maps
        # them again, in pieces as large as its cache has them, which the copying program decides.
        load_model(Path(sys.argv[1]))
        before = host.resident_bytes()
        model = load_model(Path(folder))
        weights = sum(each.nbytes for each in (*model.parameters(), *model.buffers()))
        print(host.peak_resident_bytes() - before - weights, weights, flush=True)
        os._exit(0)
    assert os.wait()[1] == 0
"""


@pytest.fixture(scope="module")
def extra_bytes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, int]:
    """Memory that loading takes at its peak beyond that of the weights, in a process that no other test has used."""
    folder = tmp_path_factory.mktemp("memory")
    small = write_checkpoint(folder / "small", CheckpointSpec(LlamaConfig))
    large = [write_zeros(folder / name, is_streamed=name == "streamed") for name in ("plain", "streamed")]
    (folder / "loading.py").write_text(LOADING)
    done = ranks.run_script([folder / "loading.py", small, *large], timeout_s=600).checked()
    figures = [[int(number) for number in line.split()] for line in done.stdout.splitlines()]
    assert all(weights > 256 * 2**20 for _, weights in figures)
    return {path.name: extra for path, (extra, _) in zip(large, figures, strict=True)}


@pytest.mark.guarantee("A streamed start takes the memory of the weights and 64 MiB")
def test_streamed_start_takes_weights_and_64_mib(extra_bytes: dict[str, int]):
    assert extra_bytes["streamed"] < LIMIT


@pytest.mark.control("A streamed start takes the memory of the weights and 64 MiB")
def test_memory_check_detects_a_plain_start(extra_bytes: dict[str, int], control):
    with control():
        assert extra_bytes["plain"] < LIMIT
