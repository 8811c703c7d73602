"""Experts that are held as their checkpoint has them: bytes are the file's, what is read is dequantised, shares are
cut where scales are, and only files replace them. Without kernels that multiply them: see
ops/kernels/triton_stored_experts_cases.py and triton_stored_engine.py.
"""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from stored_checkpoints import KINDS, SIZES, StackingKernels, write_stored
from torch import Tensor

from spmd_worker.base.errors import CheckpointError
from spmd_worker.model.decoder import DecoderForCausalLM
from spmd_worker.model.layers.context import LayerContext
from spmd_worker.model.registry import build_model
from spmd_worker.model.weight_memory import WeightMemory
from spmd_worker.model_config.model_config import ModelConfig, model_config_of, read_model_files
from spmd_worker.model_config.stored_format import EXPERTS, MXFP4, StoredFormat
from spmd_worker.ops.attention.sdpa import SdpaBackend
from spmd_worker.ranks.communicator import GroupHandle
from spmd_worker.ranks.expert_layout import ExpertLayout
from spmd_worker.ranks.stored_weights import find_stored_experts
from spmd_worker.ranks.topology import RankLayout, complete_model
from spmd_worker.worker.memory.estimate import expert_bytes, weights_bytes

FORMATS = {
    "mxfp4": MXFP4,
    "fp8_block": StoredFormat("e4m3", 128, 128),
    "fp8_row": StoredFormat("e4m3", 1, 0),
    "fp8_tensor": StoredFormat("e4m3", 1, 0),
}
ROWS = ("fp8_row", "fp8_tensor")
ONE, TWO = RankLayout(1), RankLayout(2)
APART = RankLayout(2, experts=ExpertLayout(((0, 1, 1, 0),)))


def config_of(folder: Path) -> ModelConfig:
    return read_model_files(folder).model_config


def loaded(
    folder: Path, layout: RankLayout = ONE, rank: int = 0, *, is_stored: bool = True, dtype: torch.dtype = torch.float32
) -> DecoderForCausalLM:
    config = config_of(folder)
    group = GroupHandle(tuple(range(layout.tensor_parallel_size)), rank, None)
    formats = find_stored_experts(config, layout).formats if is_stored else {}
    context = LayerContext(
        *(group, StackingKernels(), SdpaBackend(), dtype, torch.device("cpu"), layout.experts), stored=formats
    )
    model = build_model(context, config, complete_model(config))
    with model.weights.open(folder, config.quantization) as source:
        model.weights.fill(source)
    model.pack_weights()
    return model


def experts_of(model: DecoderForCausalLM) -> dict[str, Tensor]:
    """This rank's parts of experts' matrices, by checkpoint name, in the run's dtype."""
    return {
        name: held.read()
        for name, held in model.weights.held.items()
        if model.weights.names.layer_of_expert(name) is not None
    }


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert list(found) == list(expected)
    assert found
    for name in found:
        assert torch.equal(found[name], expected[name]), name


@pytest.mark.parametrize(
    "kind", ["mxfp4", "fp8_block", *(pytest.param(each, marks=pytest.mark.stress) for each in ROWS)]
)
@torch.no_grad()
def test_stored_experts_read_as_dequantised_ones(tmp_path: Path, kind: str):
    folder = write_stored(tmp_path / kind, kind)
    for layout in (ONE, TWO, APART):
        assert find_stored_experts(config_of(folder), layout).formats == {
            each: {EXPERTS: FORMATS[kind]} for each in (0, 1)
        }
        for rank in range(layout.tensor_parallel_size):
            for dtype in (torch.bfloat16,) if layout == ONE else (torch.float32,):
                found, expected = (loaded(folder, layout, rank, is_stored=each, dtype=dtype) for each in (True, False))
                assert_equal(experts_of(found), experts_of(expected))
    # Control: another file has other values.
    other = loaded(write_stored(tmp_path / "other", kind, seed=1), is_stored=False)
    name = next(iter(experts_of(other)))
    assert not torch.equal(experts_of(other)[name], experts_of(loaded(folder))[name])


@torch.no_grad()
def test_bytes_are_those_of_the_file(tmp_path: Path):
    folder = write_stored(tmp_path / "mxfp4", "mxfp4")
    model, file = loaded(folder, dtype=torch.bfloat16), load_file(folder / "model.safetensors")
    layer = model.sparse_layers[1].experts["2"]
    for matrix in ("gate_up_proj", "down_proj"):
        blocks, scales = (file[f"model.layers.1.mlp.experts.{matrix}_{part}"][2] for part in ("blocks", "scales"))
        held = getattr(layer, matrix)
        assert torch.equal(held.weight, blocks.flatten(1))
        steps = held.weight_scales.permute(1, 0, 2).flatten(1)
        assert torch.equal(steps[:, : scales.shape[1]], scales)
        assert steps[:, scales.shape[1] :].eq(0).all()
    folder = write_stored(tmp_path / "fp8", "fp8_block")
    model, file = loaded(folder, dtype=torch.bfloat16), load_file(folder / "model.safetensors")
    held = model.sparse_layers[0].experts["3"].gate_up_proj
    names = [f"model.layers.0.mlp.experts.3.{matrix}.weight" for matrix in ("gate_proj", "up_proj")]
    assert torch.equal(held.weight, torch.cat([file[name].view(torch.uint8) for name in names]))
    assert torch.equal(held.weight_scales, torch.cat([file[f"{name}_scale_inv"] for name in names]))


@pytest.mark.parametrize(
    "kind", ["mxfp4", *(pytest.param(each, marks=pytest.mark.stress) for each in ("fp8_block", "fp8_row"))]
)
def test_memory_of_stored_experts_is_planned_exactly(tmp_path: Path, kind: str):
    folder = write_stored(tmp_path / kind, kind)
    config = config_of(folder)
    for layout in (ONE, TWO, APART):
        stored = find_stored_experts(config, layout)
        for rank in range(layout.tensor_parallel_size):
            model = loaded(folder, layout, rank, dtype=torch.bfloat16)
            # Counts of tokens are no weights.
            held = sum(each.nbytes for each in (*model.parameters(), *model.buffers()))
            assert held == weights_bytes(config, layout, rank, "bfloat16", "cuda", stored=stored), (layout, rank)
            of_experts = [each for layer in model.sparse_layers.values() for each in layer.experts.modules()]
            tensors = [
                x for each in of_experts for x in (*each.parameters(recurse=False), *each.buffers(recurse=False))
            ]
            assert sum(x.nbytes for x in tensors) == expert_bytes(config, layout, rank, "bfloat16", stored)
    # 4.25 and 8 bits a weight, scales padded to steps of 128 inputs, and biases.
    plain = expert_bytes(config, ONE, 0, "bfloat16")
    share = expert_bytes(config, ONE, 0, "bfloat16", find_stored_experts(config, ONE)) / plain
    assert 0.25 < share < (0.31 if kind == "mxfp4" else 0.52)


def keys_of(kind: str, **keys: Any) -> ModelConfig:
    config, format_ = KINDS[kind]
    config = {**SIZES, **config, "quantization_config": dict(format_.config), **keys}
    return model_config_of(config, Path("config.json"))


def test_shares_that_cut_scales_are_dequantised():
    for kind, keys, words in (
        ("mxfp4", {"intermediate_size": 96}, r"48 to 96 of .* 96.*size=2, do not .* MXFP4 scales of 32"),
        ("fp8_block", {"moe_intermediate_size": 384}, r"0 to 192 of .* FP8 scales of 128"),
    ):
        found = find_stored_experts(keys_of(kind, **keys), TWO)
        assert found.formats == {}
        assert re.search(words, found.reason)
        # Complete experts are not cut, and one scale a row is not either.
        assert len(find_stored_experts(keys_of(kind, **keys), APART).formats) == 2
    assert len(find_stored_experts(keys_of("fp8_row", moe_intermediate_size=36), TWO).formats) == 2
    found = find_stored_experts(keys_of("fp8_block", moe_intermediate_size=192), ONE)
    assert (found.formats, "0 to 192" in found.reason) == ({}, True)


def test_other_formats_are_dequantised_with_a_reason():
    blocks = {"quant_method": "fp8", "weight_block_size": [64, 64]}
    found = find_stored_experts(keys_of("fp8_block", quantization_config=blocks), ONE)
    assert found.formats == {}
    assert "a multiple of 128 inputs" in found.reason
    gptq = {"quant_method": "gptq", "bits": 4, "group_size": 128}
    found = find_stored_experts(keys_of("fp8_block", quantization_config=gptq), ONE)
    assert (found.formats, found.reason) == ({}, "kernels do not read 4-bit integers in groups of 128")
    ignored = {**KINDS["fp8_block"][1].config, "modules_to_not_convert": ["model.layers.1.mlp.experts"]}
    found = find_stored_experts(keys_of("fp8_block", quantization_config=ignored), ONE)
    assert (list(found.formats), found.reason) == ([0], "")
    plain = replace(keys_of("mxfp4"), quantization=None)
    assert find_stored_experts(plain, ONE).formats == {}


@torch.no_grad()
def test_stacks_that_methods_leave_plain_stay_plain(tmp_path: Path):
    folder = write_stored(tmp_path / "linear", "fp8_linear")
    stacks = [name for name in load_file(folder / "model.safetensors") if "_linear" in name]
    assert len(stacks) == 4
    assert [name for name in stacks if name.endswith("_scale")] == []
    found = find_stored_experts(config_of(folder), ONE)
    assert (found.formats, found.reason) == ({}, "")
    assert_equal(experts_of(loaded(folder)), experts_of(loaded(folder, is_stored=False)))


@torch.no_grad()
def test_only_files_replace_stored_experts(tmp_path: Path):
    for kind in ("mxfp4", "fp8_block"):
        first, second = (write_stored(tmp_path / f"{kind}{seed}", kind, seed) for seed in (0, 1))
        model, expected = loaded(first), experts_of(loaded(second, is_stored=False))
        before, addresses = experts_of(model), [each.data_ptr() for each in (*model.parameters(), *model.buffers())]
        name = next(iter(before))
        full = torch.zeros(model.weights.shapes[name])
        with pytest.raises(CheckpointError, match=r"is held in (MXFP4|FP8).*dequantize_weights=true"):
            model.load_weights([(name, full)])
        assert_equal(experts_of(model), before)
        with pytest.raises(CheckpointError, match="replaced by reload_weights"):
            model.load_weights([(f"{name}_blocks", full)])
        # What is read may be written back, and not changed.
        with model.as_checkpoint() as view:
            assert torch.equal(view.get_parameter(name), before[name])
        with pytest.raises(CheckpointError, match="dequantize_weights"), model.as_checkpoint() as view:
            view.get_parameter(name).data.mul_(2)
        assert_equal(experts_of(model), before)
        with model.weights.open(second, config_of(second).quantization) as source:
            model.weights.reload(source)
        assert_equal(experts_of(model), expected)
        assert [each.data_ptr() for each in (*model.parameters(), *model.buffers())] == addresses
        # Others can be updated as ever.
        norm = "model.norm.weight"
        assert model.load_weights([(norm, torch.ones(model.weights.shapes[norm]))]) == {norm}


@pytest.mark.stress
@torch.no_grad()
def test_files_that_are_stored_otherwise_are_refused(tmp_path: Path):
    folder, other = write_stored(tmp_path / "blocks", "fp8_block"), write_stored(tmp_path / "rows", "fp8_row")
    model, before = loaded(folder), experts_of(loaded(folder))
    with (
        model.weights.open(other, config_of(other).quantization) as source,
        pytest.raises(CheckpointError, match=r"is not stored in FP8.*dequantize_weights=true"),
    ):
        model.weights.reload(source)
    assert_equal(experts_of(model), before)
    with pytest.raises(CheckpointError, match="has no quantised weights"):
        model.weights.fill(model.weights.dummy())


@torch.no_grad()
def test_scales_that_are_not_finite_are_refused(tmp_path: Path):
    folder = write_stored(tmp_path / "mxfp4", "mxfp4")
    file = folder / "model.safetensors"
    tensors = load_file(file)
    model, before = loaded(folder), experts_of(loaded(folder))
    # 242: finite in float32, and not as a factor of kernels.
    for exponent in (255, 242):
        tensors["model.layers.1.mlp.experts.down_proj_scales"][3, 5, 1] = exponent
        tensors["model.layers.1.mlp.experts.down_proj_blocks"][3, 5, 1] = 0x11
        save_file(tensors, file, metadata={"format": "pt"})
        words = r"layers\.1\.mlp\.experts\.down_proj' has .* at \[3, 32, 5\]"
        with pytest.raises(CheckpointError, match=words):
            loaded(folder)
        with (
            model.weights.open(folder, config_of(folder).quantization) as source,
            pytest.raises(CheckpointError, match=words),
        ):
            model.weights.reload(source)
        assert_equal(experts_of(model), before)


@torch.no_grad()
@pytest.mark.parametrize("keeps", [True, False])
def test_stored_experts_sleep_and_wake(tmp_path: Path, keeps: bool):
    folder = write_stored(tmp_path / "mxfp4", "mxfp4")
    model = loaded(folder)
    before, layer = experts_of(model), model.sparse_layers[0]
    assert layer._stacked is not None
    layer._stacked.get()
    memory = WeightMemory(model, StackingKernels())
    held = sum(each.nbytes for each in (*model.parameters(), *model.buffers()))
    assert memory.num_bytes == held
    memory.release(memory.copy_to_host() if keeps else None)
    assert memory.restore(memory.allocate()) == keeps
    if not keeps:
        with model.weights.open(folder, config_of(folder).quantization) as source:
            model.weights.reload(source)
    assert_equal(experts_of(model), before)
    stack = layer._stacked.get()
    assert stack.gate_up_scales is not None
    gates = layer.experts["3"].gate_up_proj
    assert stack.gate_up[3].data_ptr() == gates.weight.data_ptr()
    assert stack.gate_up_scales[3].data_ptr() == gates.weight_scales.data_ptr()
