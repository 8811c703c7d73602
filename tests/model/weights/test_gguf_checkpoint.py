"""GGUF as checkpoints: tensors are those of the checkpoint that a file was converted from, whatever a rank reads."""

import json
from functools import cache
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
import transformers
from absent_package import remove_package
from expert_checkpoints import BASE, EXPERTS, expert_folder, stir
from family_checkpoints import family_folder
from gguf_files import checkpoint_tensors, write_gguf
from reference_models import CHECKPOINTS, checkpoint_folder
from run_folder import made_once

from spmd_worker.base.errors import CheckpointError, ConfigError
from spmd_worker.model.layers.weight_slice import full_rectangle
from spmd_worker.model.weights.checkpoint import Checkpoint
from spmd_worker.model.weights.checkpoint_files import open_checkpoint
from spmd_worker.model.weights.content_digest import content_digest
from spmd_worker.model.weights.dequantised_checkpoint import DequantisedCheckpoint
from spmd_worker.model.weights.identity import file_identities, tensor_digests
from spmd_worker.model.weights.sampled_digest import file_digests
from spmd_worker.model_config.gguf.tensor_types import TENSOR_TYPES
from spmd_worker.model_config.hub import locate_model
from spmd_worker.model_config.model_config import ModelConfig, read_model_files
from spmd_worker.model_config.stored_format import GGUF_FORMATS, MXFP4
from spmd_worker.model_config.weight_format import Quantization
from spmd_worker.ops.kernels import stored_weights

FAMILIES = (
    *("llama2", "llama3", "llama_tied", "llama_biased", "llama_head_dim", "linear", "yarn", "qwen2", "qwen3"),
    *("gemma", "gemma2", "gemma3", "smollm3", "granite", "olmo2", "starcoder2", "phi3", "phi3_long", "mixtral"),
    *("qwen2_moe", "qwen3_moe"),
)
NOT_STORED = {"gemma2": {"query_pre_attn_scalar": 16}, "gemma3": {"query_pre_attn_scalar": 16}}
NOT_STORED |= {"starcoder2": {"sliding_window": None}, "mixtral": {"sliding_window": None}}
"""Settings that no metadata have, which llama.cpp leaves out or derives."""
GATE = ("llama3", "qwen2", "gemma3", "phi3_long", "qwen2_moe")


@pytest.fixture(autouse=True)
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


@cache
def source(name: str) -> Path:
    if name == "qwen2_moe":
        return made_once("gguf qwen2_moe", _write_qwen2_moe)
    if name in CHECKPOINTS:
        return checkpoint_folder(name)
    return expert_folder(name) if name in ("mixtral", "qwen3_moe") else family_folder(name)


def _write_qwen2_moe(folder: Path) -> None:
    sizes = {**BASE, **EXPERTS, "rms_norm_eps": 0.03, "shared_expert_intermediate_size": 48}
    model = transformers.Qwen2MoeForCausalLM(transformers.Qwen2MoeConfig(**sizes)).float()
    stir(model)
    model.save_pretrained(folder)


def converted(name: str, folder: Path, kind: str = "F32", **options: object) -> Path:
    """The model folder of a GGUF of a checkpoint."""
    folder.mkdir(exist_ok=True)
    return located(write_gguf(source(name), folder / "m.gguf", kind, **options))


def located(path: Path) -> Path:
    return locate_model(str(path), None).folder


def read_all(folder: Path) -> dict[str, torch.Tensor]:
    with open_checkpoint(folder) as files:
        return {name: files.read(name, full_rectangle(files.shape(name))) for name in files.names()}


def config_of(folder: Path, changes: dict[str, object] | None = None) -> ModelConfig:
    if changes:
        copy = made_once(f"gguf config {folder.name}", lambda copy: copy.mkdir())
        (copy / "config.json").write_text(json.dumps(json.loads((folder / "config.json").read_text()) | changes))
        folder = copy
    return read_model_files(folder).model_config


@pytest.mark.gate(*GATE)
@pytest.mark.guarantee("A GGUF is the model that it was converted from")
@pytest.mark.parametrize("name", FAMILIES)
def test_gguf_is_the_checkpoint_it_came_from(name: str, tmp_path: Path):
    folder = converted(name, tmp_path / "files")
    assert config_of(folder) == config_of(source(name), NOT_STORED.get(name))
    ours, theirs = read_all(folder), checkpoint_tensors(source(name))
    assert ours.keys() == {each for each in theirs if each != "lm_head.weight" or "lm_head.weight" in ours}
    # Norms of Gemma are stored with 1 added, in float32.
    tolerance = 3e-7 if name.startswith("gemma") else 0
    for each, values in ours.items():
        torch.testing.assert_close(values, torch.from_numpy(theirs[each]), rtol=0, atol=tolerance)


@pytest.mark.control("A GGUF is the model that it was converted from")
@pytest.mark.parametrize(("name", "option"), [("llama2", {"permutes": False}), ("gemma", {"norm_offset": 0.0})])
def test_comparison_detects_another_converter(name: str, option: dict, tmp_path: Path):
    ours, theirs = read_all(converted(name, tmp_path / "files", **option)), checkpoint_tensors(source(name))
    other = {each for each, values in ours.items() if not np.allclose(values, theirs[each], atol=1e-6)}
    words = ("norm",) if name == "gemma" else ("q_proj", "k_proj")
    assert other == {each for each in ours if any(word in each for word in words)}


def write_random(kind: str, folder: Path, below: int) -> tuple[np.ndarray, torch.Tensor, torch.Tensor]:
    """Bytes of two matrices, in a model folder, the package's numbers, and those of permuted rows."""
    type_ = gguf.GGMLQuantizationType[kind]
    block, num_bytes = gguf.GGML_QUANT_SIZES[type_]
    raw = np.random.default_rng(1).integers(0, below, (64, 512 // block * num_bytes), np.uint8)
    path = folder / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in {"attention.head_count": 4, "embedding_length": 512, "block_count": 1}.items():
        writer.add_uint32(f"llama.{key}", value)
    writer.add_tensor("blk.0.ffn_up.weight", raw, raw_dtype=type_)
    writer.add_tensor("blk.0.attn_q.weight", raw, raw_dtype=type_)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    (folder / "folder").mkdir()
    (folder / "folder" / "linked-00001-of-00001.gguf").symlink_to(path)
    expected = torch.from_numpy(gguf.quants.dequantize(raw, type_))
    return raw, expected, expected.view(4, 8, 2, 512).transpose(1, 2).reshape(64, 512)


@pytest.mark.gate("Q4_K", "Q6_K")
@pytest.mark.filterwarnings("ignore:invalid value encountered")
@pytest.mark.parametrize("kind", GGUF_FORMATS)
def test_stored_parts_have_the_packages_numbers(kind: str, tmp_path: Path):
    """To the sign of a zero, in each format that holds the type. Bytes of any kind: some steps are not finite."""
    _, expected, pairs = write_random(kind, tmp_path, 256)
    with open_checkpoint(tmp_path / "folder") as files:
        weights = DequantisedCheckpoint.open(files, Quantization("gguf", ()))
        for name, wanted in (("mlp.up_proj", expected), ("self_attn.q_proj", pairs)):
            name = f"model.layers.0.{name}.weight"
            assert wanted.isfinite().float().mean() > 0.8
            for region in (((0, 64), (0, 512)), ((3, 21), (32, 288)), ((40, 41), (480, 512)), ((16, 32), (256, 512))):
                of_region = wanted[tuple(slice(*each) for each in region)]
                is_finite = of_region.isfinite()
                for stored in GGUF_FORMATS[kind]:
                    assert weights.is_stored_as(name, stored)
                    numbers, scales = weights.read_stored(name, region, stored)
                    found = stored_weights.values(stored, numbers, scales)
                    assert torch.equal(found.isfinite(), is_finite)
                    assert torch.equal(found[is_finite].view(torch.int32), of_region[is_finite].view(torch.int32))
                    surely = stored_weights.are_surely_finite(stored, numbers, scales, torch.bfloat16)
                    assert surely <= bool(is_finite.all())
                    # Negative control: another scale is seen.
                    scales.view(torch.uint8)[0, 0, 0] ^= 64
                    assert not torch.equal(stored_weights.values(stored, numbers, scales)[0], found[0])
        assert not weights.is_stored_as(name, MXFP4)


@pytest.mark.gate("Q4_0", "Q6_K")
@pytest.mark.parametrize("kind", [each.name for each in TENSOR_TYPES.values() if not each.is_plain])
def test_regions_have_the_packages_numbers(kind: str, tmp_path: Path):
    raw, expected, pairs = write_random(kind, tmp_path, 60)
    with open_checkpoint(tmp_path / "folder") as files:
        for region in (((0, 64), (0, 512)), ((3, 21), (17, 300)), ((40, 41), (255, 257)), ((16, 32), (256, 512))):
            inside = tuple(slice(*each) for each in region)
            assert torch.equal(files.read("model.layers.0.mlp.up_proj.weight", region), expected[inside])
            assert torch.equal(files.read("model.layers.0.self_attn.q_proj.weight", region), pairs[inside])
        assert files.num_bytes_read < 3 * 2 * raw.nbytes


def test_split_model_is_one(tmp_path: Path):
    whole = converted("qwen2", tmp_path / "whole", "BF16")
    (tmp_path / "split").mkdir()
    write_gguf(source("qwen2"), tmp_path / "split" / "m.gguf", "BF16", splits=True)
    parts = sorted((tmp_path / "split").iterdir())
    assert len(parts) == 2
    split = located(tmp_path / "split")
    assert located(parts[1]) == split
    assert (split / "config.json").read_bytes() == (whole / "config.json").read_bytes()
    ours, theirs = read_all(split), read_all(whole)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert len(file_identities(split)) == len(file_digests(split)) == 2
    assert tensor_digests(split) == tensor_digests(whole)


def test_changed_file_has_another_digest_and_folder(tmp_path: Path):
    folder = converted("qwen2", tmp_path / "files", "Q8_0")
    digest, path = file_digests(folder), tmp_path / "files" / "m.gguf"
    whole = content_digest(folder)
    content = bytearray(path.read_bytes())
    content[-100] ^= 1
    path.write_bytes(content)
    other = located(path)
    assert other != folder
    assert file_digests(other) != digest
    # The old folder still reads the file that is there.
    assert file_digests(folder) == file_digests(other)
    assert content_digest(folder) == content_digest(other) != whole


def test_quantised_file_needs_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    quantised = converted("qwen2", tmp_path / "q", "Q8_0")
    plain = converted("qwen2", tmp_path / "plain", "F16")
    with monkeypatch.context() as patch:
        from spmd_worker.model.weights import gguf_checkpoint

        gguf_checkpoint._quantisations.cache_clear()
        remove_package(patch, "gguf")
        with pytest.raises(ConfigError, match=r"needs gguf, which is not installed: pip install 'spmd-worker\[gguf\]'"):
            open_checkpoint(quantised)
        assert read_all(plain)["model.embed_tokens.weight"].dtype == torch.float16


def test_gguf_outside_of_a_model_is_refused(tmp_path: Path):
    write_gguf(source("qwen2"), tmp_path / "other.gguf")
    with pytest.raises(CheckpointError, match=r"has weights only as GGUF.*give model.path its file"):
        Checkpoint.open(tmp_path)
