"""Weights through pinned buffers, whose copies end late: no buffer is overwritten before, and nothing else changes."""

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hand_made_store import plain_store
from quantised_files import FORMATS
from test_dummy import build as build_dummy
from test_loader import assert_holds, build, expected, full_tensors
from torch import Tensor
from weight_files import save_indexed, save_single

from spmd_worker.base.errors import CheckpointError
from spmd_worker.model.weights import dequantise, store
from spmd_worker.model.weights.checkpoint import Checkpoint
from spmd_worker.model.weights.dequantised_checkpoint import DequantisedCheckpoint
from spmd_worker.model.weights.staging import HOST, HostStaging, PinnedStaging, staging_for
from spmd_worker.model_config.quantization import read_quantization

NUM_THREADS = 3


class Copy:
    """An event's replacement: the copy ends when it is waited for."""

    def __init__(self, buffer: Tensor) -> None:
        self._buffer, self._sent = buffer, buffer.clone()

    def synchronize(self) -> None:
        bits, sent = (each.view(torch.uint8) for each in (self._buffer, self._sent))
        assert torch.equal(bits, sent), "overwritten before it was copied"


class LateStaging(PinnedStaging):
    """Without a GPU: tensors are on the CPU."""

    def __init__(self) -> None:
        self.num_pinned_bytes, self.copies, self.threads, self.num_finished = 0, [], set(), 0
        self.lock = threading.Lock()
        super().__init__(torch.device("cuda", 0))

    def _copy(self, buffer: Tensor) -> tuple[Tensor, Any]:
        copy = Copy(buffer)
        self.copies.append(copy)
        return buffer.clone(), copy

    def _pinned(self, num_bytes: int) -> Tensor:
        with self.lock:
            self.num_pinned_bytes += num_bytes
        return torch.empty(num_bytes, dtype=torch.uint8)

    @contextmanager
    def thread(self) -> Iterator[None]:
        self.threads.add(threading.get_ident())
        yield


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> LateStaging:
    calls: list[str] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: calls.append("synchronized"))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch._C, "_host_emptyCache", lambda: None, raising=False)
    monkeypatch.setattr(store, "_BLOCK_BYTES", 64)
    return LateStaging()


def load(folder: Path, staging: HostStaging, rank: int = 0, parts: int = 1, **options: Any) -> torch.nn.Module:
    model, slices, paddings = build(rank, parts)
    with Checkpoint.open(folder, staging) as checkpoint:
        plain_store(model, slices, paddings, **options).fill(checkpoint, NUM_THREADS)
    return model


@pytest.mark.parametrize(("rank", "parts"), [(0, 1), (1, 2), (5, 6)])
def test_staged_weights_equal_the_files(tmp_path: Path, late: LateStaging, rank: int, parts: int):
    model = load(save_single(tmp_path, full_tensors()), late, rank, parts)
    assert_holds(model, expected(rank, parts))
    assert len(late.copies) > 8
    assert 0 < late.num_pinned_bytes <= 2 * NUM_THREADS * 2**20


def test_buffers_are_reused_after_their_copies_only(tmp_path: Path, late: LateStaging):
    load(save_single(tmp_path, full_tensors()), late)
    for copy in late.copies[-2:]:
        copy.synchronize()
    # More blocks than buffers: earlier ones were overwritten since, each after it was waited for.
    overwritten = [copy for copy in late.copies if not torch.equal(copy._buffer, copy._sent)]
    assert overwritten


def test_check_detects_reuse_before_the_copy(tmp_path: Path, late: LateStaging, monkeypatch: pytest.MonkeyPatch):
    """Negative control: nobody waits for copies before the buffers are filled again."""
    waits = []
    right = PinnedStaging.buffer

    def hasty(self: LateStaging, *arguments: Any) -> Tensor:
        buffer = right(self, *arguments)
        waits.extend(each.copied for each in self._local.buffers if each.copied is not None)
        for each in self._local.buffers:
            each.copied = None
        return buffer

    monkeypatch.setattr(PinnedStaging, "buffer", hasty)
    load(save_single(tmp_path, full_tensors()), late)
    with pytest.raises(AssertionError, match="overwritten before"):
        list(map(Copy.synchronize, waits))


def test_staged_dummy_weights_have_equal_bits(late: LateStaging, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(store, "_BLOCK_BYTES", 1 << 16)
    filled = []
    for staging in (HOST, late):
        model, slices = build_dummy(1, 2, torch.bfloat16)
        weights = plain_store(model, slices, [])
        weights.fill(weights.dummy(staging=staging), NUM_THREADS)
        filled.append(model)
    assert late.copies
    for (name, one), (_, other) in zip(*(model.named_parameters() for model in filled), strict=True):
        assert torch.equal(one, other), name


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_staged_nonfinite_element_is_named(tmp_path: Path, late: LateStaging, value: float):
    """The flags come after all is written: of two the first in the files is named, as on the CPU."""
    tensors = full_tensors()
    tensors["down.weight"][3, 9] = value
    tensors["q.weight"][7, 7] = value
    save_single(tmp_path, tensors)
    errors = []
    for staging in (HOST, late):
        with pytest.raises(CheckpointError) as caught:
            load(tmp_path, staging)
        errors.append(str(caught.value))
    assert errors[0] == errors[1]
    assert re.search(rf"'down.weight' has {value:g} at \[3, 9\]", errors[0])
    load(tmp_path, late, allows_nonfinite=True)


@pytest.mark.control("Weights that are not finite are refused")
def test_comparison_detects_flags_that_nobody_reads(tmp_path: Path, late: LateStaging, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(store.WeightStore, "_raise_not_finite", lambda *arguments: None)
    with pytest.raises(pytest.fail.Exception):
        test_staged_nonfinite_element_is_named(tmp_path, late, float("nan"))


def test_threads_count_every_byte_they_read(tmp_path: Path, late: LateStaging):
    tensors = full_tensors()
    files = {f"{index}.safetensors": {name: tensors[name]} for index, name in enumerate(tensors)}
    model, slices, paddings = build()
    with Checkpoint.open(save_indexed(tmp_path, files), late) as checkpoint:
        report = plain_store(model, slices, paddings).fill(checkpoint, NUM_THREADS)
        assert len(checkpoint._descriptors) == len(files)
    assert report.num_bytes_read == sum(tensor.nbytes for tensor in tensors.values())
    assert_holds(model, expected())


def test_file_that_shrinks_ends_the_threads(tmp_path: Path, late: LateStaging):
    save_single(tmp_path, full_tensors())
    file, weights = tmp_path / "model.safetensors", plain_store(*build())
    with Checkpoint.open(tmp_path, late) as checkpoint:
        file.write_bytes(file.read_bytes()[:-8])
        with pytest.raises(CheckpointError, match="but had"):
            weights.fill(checkpoint, NUM_THREADS)
    assert not [each for each in threading.enumerate() if each.name.startswith("fill-weights")]


def test_dequantisation_stays_on_its_tensors_device():
    """On the meta device: a constant of the CPU among them would be an error."""
    meta = torch.device("meta")
    blocks = torch.empty((2, 3, 16), dtype=torch.uint8, device=meta)
    assert dequantise.mxfp4(blocks, torch.empty((2, 3), dtype=torch.uint8, device=meta)).device == meta
    words = torch.empty((4, 6), dtype=torch.int32, device=meta)
    for dim in (0, 1):
        assert dequantise.unpack(words, 4, dim, dequantise.AWQ_ORDER).device == meta
    scales, groups = torch.empty((2, 3), dtype=torch.bfloat16, device=meta), torch.zeros(12, dtype=torch.int64)
    numbers = torch.empty((12, 12), device=meta)
    assert dequantise.apply_scales(numbers, scales, scales, groups, groups).device == meta


def test_powers_of_mxfp4_scales_are_exact():
    _, powers = dequantise._fp4_tables(torch.device("cpu"))
    assert powers.tolist() == [2.0 ** (exponent - 127) for exponent in range(255)] + [float("inf")]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_on_a_gpu_equal_the_cpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype):
    """Files and dummy weights, by several threads, with one block after another in each pinned buffer."""
    monkeypatch.setattr(store, "_BLOCK_BYTES", 1 << 16)
    save_single(tmp_path, full_tensors())
    filled = []
    for device in (torch.device("cpu"), torch.device("cuda", torch.cuda.current_device())):
        model, slices, paddings = build(1, 2, dtype)
        with Checkpoint.open(tmp_path, staging_for(device)) as checkpoint:
            plain_store(model.to(device), slices, paddings).fill(checkpoint, NUM_THREADS)
        dummy_model, dummy_slices = build_dummy(1, 2, dtype)
        weights = plain_store(dummy_model.to(device), dummy_slices, [])
        weights.fill(weights.dummy(staging=staging_for(device)), NUM_THREADS)
        filled.append([each.detach().cpu() for each in (*model.parameters(), *dummy_model.parameters())])
    assert all(map(torch.equal, *filled))


@pytest.mark.gpu
@pytest.mark.parametrize("name", FORMATS)
def test_dequantised_weights_on_a_gpu_equal_the_cpus(tmp_path: Path, name: str):
    parts, _ = FORMATS[name].pack(torch.randn(72, 96, generator=torch.Generator().manual_seed(0)))
    module = "model.layers.0.mlp.up_proj"
    save_single(tmp_path, {module + ending: part.contiguous() for ending, part in parts.items()})
    quantization = read_quantization({"quantization_config": FORMATS[name].config}, tmp_path / "config.json")
    assert quantization is not None
    read = []
    for device in (torch.device("cpu"), torch.device("cuda", torch.cuda.current_device())):
        with Checkpoint.open(tmp_path, staging_for(device)) as files:
            found = DequantisedCheckpoint.open(files, quantization).read(f"{module}.weight", ((7, 50), (3, 90)))
        assert found.device == device
        read.append(found.cpu().view(torch.int32))
    assert torch.equal(*read)
