"""Sampled digests of weight files: what they see, what they do not, and what they read."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import REPOSITORY
from retrained import retrain
from safetensors.torch import save_file

from spmd_worker.base.config.schema import ModelOptions, RunConfig
from spmd_worker.model.weights import content_digest as content_module
from spmd_worker.model.weights import sampled_digest as module
from spmd_worker.model.weights.content_digest import content_digest
from spmd_worker.model.weights.safetensors_header import read_header
from spmd_worker.model.weights.sampled_digest import (
    MAX_SAMPLES,
    SAMPLE_BYTES,
    file_digests,
    sample_offsets,
    sampled_digests,
)
from spmd_worker.resolved import resolve_run

NORM, HEAD = "norm.weight", "score.weight"
DISTANCE = 2**14
"""Between the even samples of the model."""
FILES = ("dense/model.safetensors", "model.safetensors")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model of 32 MiB, with small tensors behind large ones, and a module of its own in a folder inside."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    made = tmp_path / "model"
    (made / "dense").mkdir(parents=True)
    generator = torch.Generator().manual_seed(0)
    tensors = {f"layer.{i}.weight": torch.randn(1023, 1001 + i // 4, generator=generator) for i in range(8)}
    tensors["layer.8.weight"] = torch.ones(2000)
    save_file({**tensors, NORM: torch.ones(500), HEAD: torch.ones(2, 500)}, made / "model.safetensors")
    save_file({"linear.weight": torch.randn(16, 16, generator=generator)}, made / "dense" / "model.safetensors")
    return made


def digests(folder: Path) -> dict[str, str]:
    return file_digests(folder, ("dense",))


@pytest.mark.gate("every tensor", "layer.3.weight")
@pytest.mark.parametrize("name", ["every tensor", NORM, HEAD, "layer.3.weight"])
def test_trained_tensor_changes_the_files_digest(folder: Path, name: str):
    """A classifier or a norm that was trained alone, too, though no even distance would meet it."""
    before = digests(folder)
    retrain(folder, *([] if name == "every tensor" else [name]))
    after = digests(folder)
    assert [key for key in after if after[key] != before[key]] == ["model.safetensors"]
    (folder / "dense" / "model.safetensors").write_bytes((folder / "dense" / "model.safetensors").read_bytes()[:-4])
    with pytest.raises(ValueError, match=r"model\.safetensors: truncated"):
        digests(folder)


def test_small_tensors_lie_between_even_samples(folder: Path):
    """Negative control of the test before: samples at even distances do not see them."""
    header = read_header(folder / "model.safetensors")
    (offsets,) = sample_offsets([header])
    for name in (NORM, HEAD):
        start = header.data_start + header.tensors[name].begin
        inside = range(start - SAMPLE_BYTES + 1, header.data_start + header.tensors[name].end)
        assert start in offsets
        assert not [offset for offset in offsets if offset in inside and offset % DISTANCE == 0]


def test_copy_elsewhere_of_other_times_is_equal(folder: Path, tmp_path: Path):
    copy = shutil.copytree(folder, tmp_path / "copy", copy_function=shutil.copyfile)
    os.utime(copy / "model.safetensors", ns=(1, 1))
    assert digests(copy) == digests(folder)
    assert sorted(digests(copy)) == sorted(FILES)


def test_reads_are_bounded_and_not_repeated(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(content_module, "_SETTLED_NS", -1)
    read: list[int] = []
    pread = os.pread

    def counted(*given: Any) -> bytes:
        read.append(len(data := pread(*given)))
        return data

    monkeypatch.setattr(module.os, "pread", counted)
    first = digests(folder)
    assert MAX_SAMPLES // 2 < len(read) <= MAX_SAMPLES + 4
    assert sum(read) <= len(read) * SAMPLE_BYTES < 2**23 + 2**15
    del read[:]
    assert digests(folder) == first
    assert read == []
    retrain(folder)
    assert digests(folder) != first
    assert read != []


@pytest.mark.parametrize("is_settled", [False, True])
def test_new_file_is_read_again(folder: Path, monkeypatch: pytest.MonkeyPatch, is_settled: bool):
    """It could change within the same tick of the file system's clock; a settled one has another time (control)."""
    monkeypatch.setattr(module, "file_status", lambda path: (1, 2, 3, 4, 5))
    monkeypatch.setattr(content_module, "_SETTLED_NS", -1 if is_settled else 2**62)
    before = digests(folder)
    retrain(folder)
    assert (digests(folder) == before) == is_settled


def test_samples_never_exceed_their_number(monkeypatch: pytest.MonkeyPatch, folder: Path):
    """Evenly chosen ones of many tensors between the samples are read."""
    monkeypatch.setattr(module, "MAX_SAMPLES", 16)
    many = {f"{i:03}": torch.ones(1500 + i) for i in range(100)}
    save_file(many, folder / "model.safetensors")
    header = read_header(folder / "model.safetensors")
    (offsets,) = sample_offsets([header])
    of_tensors = [each for each in offsets if each % (1 << 16)]
    assert 8 < len(of_tensors) <= 16
    assert len(offsets) - len(of_tensors) <= 16
    begins = [header.data_start + each.begin for each in header.tensors.values()]
    assert max(begins) - max(of_tensors) < header.file_bytes / 8
    assert min(of_tensors) < header.file_bytes / 8


def test_single_byte_between_samples_is_not_seen(folder: Path):
    """The documented limit; the complete digest sees it."""
    path = folder / "model.safetensors"
    before, whole = digests(folder), content_digest(folder)
    data = bytearray(path.read_bytes())
    data[3 * DISTANCE + SAMPLE_BYTES + 77] ^= 1
    path.write_bytes(data)
    assert digests(folder) == before
    assert content_digest(folder) != whole


def test_sharded_state_is_known_by_its_description(tmp_path: Path):
    """It has the digests of all ranks' files, which are compared when they are read; dummy weights have none."""
    model = Path(shutil.copytree(REPOSITORY / "scripts" / "demo" / "model", tmp_path / "model"))
    state = model / "sharded_state.json"
    state.write_text("{}")

    def digests_of(load_format: str) -> dict[str, str]:
        options = ModelOptions(path=str(model), load_format=load_format)
        return sampled_digests(resolve_run(RunConfig(model=options, device="cpu"), "cpu"))

    first = digests_of("sharded_state")
    assert list(first) == ["sharded_state.json"]
    assert list(digests_of("auto")) == ["model.safetensors"]
    retrain(model)
    assert digests_of("sharded_state") == first
    state.write_text("{ }")
    assert digests_of("sharded_state") != first
    assert digests_of("dummy") == {}


def test_every_byte_of_small_files_is_seen(folder: Path):
    path = folder / "model.safetensors"
    save_file({"weight": torch.zeros(5000)}, path)
    data, found = path.read_bytes(), []
    for place in (len(data) - 1, len(data) - SAMPLE_BYTES - 7, len(data) // 2):
        path.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        found.append(digests(folder)["model.safetensors"])
    path.write_bytes(data)
    assert len({*found, digests(folder)["model.safetensors"]}) == 4
