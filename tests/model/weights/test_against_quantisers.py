"""Dequantised weights equal those of other implementations: transformers' FP8 and MXFP4, compressed-tensors.

Where the run's dtype is that of the scales both round once, so the bits are equal.
"""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from quantised_files import FORMATS, Format
from test_dequantised_checkpoint import COLUMNS, NAME, ROWS, WHOLE, matrix, named, opened
from weight_files import save_single

from spmd_worker.model.layers.weight_slice import full_rectangle
from spmd_worker.model.weights import quantised_weight
from spmd_worker.model.weights.checkpoint import Checkpoint
from spmd_worker.model.weights.dequantise import E2M1
from spmd_worker.model.weights.dequantised_checkpoint import DequantisedCheckpoint
from spmd_worker.model_config.quantization import read_quantization

pytestmark = pytest.mark.matrix

UP_PROJ = "model.layers.0.mlp.up_proj"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scales", [torch.float32, torch.bfloat16, torch.float8_e8m0fnu])
def test_fp8_blocks_are_transformers(tmp_path: Path, dtype: torch.dtype, scales: torch.dtype):
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    parts, _ = FORMATS["fp8_block"].pack(matrix(64, COLUMNS))
    parts[".weight_scale_inv"] = parts[".weight_scale_inv"].to(scales)
    ours = opened(tmp_path, FORMATS["fp8_block"], named(parts)).read(NAME, ((0, 64), (0, COLUMNS)))
    theirs = Fp8Dequantize(None)._dequantize_one(parts[".weight"], parts[".weight_scale_inv"], dtype)
    assert torch.equal(ours.to(dtype), theirs)


def experts(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks [3 experts, 10 outputs, 4 groups, 16] and scales, every byte and many exponents among them."""
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randint(0, 256, (3, 10, 4, 16), dtype=torch.uint8, generator=generator)
    return blocks, torch.randint(90, 140, (3, 10, 4), dtype=torch.uint8, generator=generator)


def opened_experts(folder: Path, blocks: torch.Tensor, scales: torch.Tensor) -> DequantisedCheckpoint:
    name = "model.layers.0.mlp.experts.gate_up_proj"
    tensors = {f"{name}_blocks": blocks, f"{name}_scales": scales, f"{name}_bias": torch.zeros(3, 10)}
    config = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    quantization = read_quantization({"quantization_config": config}, folder)
    assert quantization is not None
    assert quantization.words == "FP4 in groups of 32 (mxfp4)"
    return DequantisedCheckpoint.open(Checkpoint.open(save_single(folder, tensors)), quantization)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mxfp4_is_transformers(tmp_path: Path, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch):
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    monkeypatch.setattr(quantised_weight, "_BLOCK_ELEMENTS", 500)
    blocks, scales = experts()
    checkpoint = opened_experts(tmp_path, blocks, scales)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    assert checkpoint.names() == [name, f"{name}_bias"]
    assert checkpoint.shape(name) == (3, 128, 10)
    theirs = convert_moe_packed_tensors(blocks, scales, dtype=dtype)
    assert torch.equal(checkpoint.read(name, full_rectangle((3, 128, 10))).to(dtype), theirs)
    part = checkpoint.read(name, ((1, 3), (37, 101), (4, 9)))
    assert torch.equal(part.to(dtype), theirs[1:3, 37:101, 4:9])


def test_fp4_numbers_are_those_of_the_standard():
    """Sign, two bits of exponent with bias 1, one of mantissa."""
    for code, value in enumerate(E2M1):
        sign, exponent, mantissa = code >> 3, code >> 1 & 3, code & 1
        size = mantissa / 2 if exponent == 0 else 2 ** (exponent - 1) * (1 + mantissa / 2)
        assert value == (-size if sign else size)


CASES: dict[str, dict[str, Any]] = {
    "pack-quantized 4 group": {"num_bits": 4, "strategy": "group", "group_size": 16},
    "pack-quantized 4 group asymmetric": {"num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": False},
    "pack-quantized 4 channel asymmetric": {"num_bits": 4, "strategy": "channel", "symmetric": False},
    "pack-quantized 8 channel": {"num_bits": 8, "strategy": "channel"},
    "pack-quantized 8 group asymmetric": {"num_bits": 8, "strategy": "group", "group_size": 16, "symmetric": False},
    "int-quantized channel": {"num_bits": 8, "strategy": "channel"},
    "int-quantized channel asymmetric": {"num_bits": 8, "strategy": "channel", "symmetric": False},
    "int-quantized tensor": {"num_bits": 8, "strategy": "tensor"},
    "int-quantized group": {"num_bits": 8, "strategy": "group", "group_size": 16},
    "float-quantized tensor": {"num_bits": 8, "type": "float", "strategy": "tensor"},
    "float-quantized channel": {"num_bits": 8, "type": "float", "strategy": "channel"},
    "float-quantized block": {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [32, 16]},
    "naive-quantized group": {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 16},
}


@pytest.mark.parametrize("case", CASES)
def test_every_compressed_tensors_strategy_equals_library(tmp_path: Path, case: str):
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    kind, weight = case.partition(" ")[0], matrix()
    arguments = QuantizationArgs(**CASES[case])
    scheme = QuantizationScheme(targets=["Linear"], weights=arguments)
    scales, zeros = calibrated(weight, CASES[case])
    state = {"weight": weight, "weight_scale": scales, "weight_zero_point": zeros}
    compressor = BaseCompressor.get_value_from_registry(kind)
    stored = compressor.compress(dict(state), scheme)
    theirs = compressor.decompress(dict(stored), scheme)["weight"].float()
    config = {"quant_method": "compressed-tensors", "format": kind, "quantization_status": "compressed"}
    config["config_groups"] = {"group_0": scheme.model_dump(mode="json", exclude_none=True)}
    parts = {f".{leaf}": tensor for leaf, tensor in stored.items()}
    if arguments.symmetric:
        assert ".weight_zero_point" not in parts
    checkpoint = opened(tmp_path, Format(config, lambda matrix: ({}, matrix)), named(parts))
    ours = checkpoint.read(NAME, WHOLE)
    assert torch.equal(ours, theirs)
    assert 0 < (ours - weight).abs().max() < 0.6


def test_nvfp4_equals_library_that_also_converts_it(tmp_path: Path):
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.entrypoints.convert import ModelOptNvfp4Converter
    from compressed_tensors.quantization import QuantizationScheme
    from compressed_tensors.quantization.quant_scheme import NVFP4A16

    weight = matrix()
    parts, _ = FORMATS["nvfp4_packed"].pack(weight)
    ours = opened(tmp_path / "packed", FORMATS["nvfp4_packed"], named(parts)).read(NAME, WHOLE)
    scheme = QuantizationScheme(targets=["Linear"], **NVFP4A16)
    compressor = BaseCompressor.get_value_from_registry("nvfp4-pack-quantized")
    stored = {ending.removeprefix("."): part for ending, part in parts.items()}
    # It rounds to bfloat16.
    assert torch.equal(ours.bfloat16(), compressor.decompress(dict(stored), scheme)["weight"])
    state = {"weight": ours, "weight_scale": stored["weight_scale"].float()}
    again = compressor.compress({**state, "weight_global_scale": stored["weight_global_scale"]}, scheme)
    assert torch.equal(again["weight_packed"], stored["weight_packed"])

    of_modelopt, _ = FORMATS["nvfp4"].pack(weight)
    values = opened(tmp_path / "modelopt", FORMATS["nvfp4"], named(of_modelopt)).read(NAME, WHOLE)
    converted = ModelOptNvfp4Converter(targets=["re:.*proj$"]).process(named(of_modelopt))
    theirs = opened(tmp_path / "converted", FORMATS["nvfp4_packed"], converted).read(NAME, WHOLE)
    assert torch.allclose(values, theirs, rtol=1e-6, atol=0)


def calibrated(weight: torch.Tensor, how: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 scales and int8 zero points of the library's rounded values."""
    shape = {"tensor": (ROWS, COLUMNS), "channel": (1, COLUMNS), "group": (1, how.get("group_size"))}
    rows, columns = shape.get(how["strategy"]) or how["block_structure"]
    places = [[weight[i : i + rows, j : j + columns] for j in range(0, COLUMNS, columns)] for i in range(0, ROWS, rows)]
    low = torch.tensor([[place.min() for place in line] for line in places])
    high = torch.tensor([[place.max() for place in line] for line in places])
    is_float, bits = how.get("type") == "float", how["num_bits"]
    if how.get("symmetric", True):
        most = 448.0 if is_float else 2 ** (bits - 1) - 0.5
        scales = torch.maximum(high, -low) / most
        zeros = torch.zeros(scales.shape, dtype=torch.int8)
    else:
        scales = (high - low) / (2**bits - 1)
        zeros = torch.round(-low / scales - 2 ** (bits - 1)).clamp(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
        zeros = zeros.to(torch.int8)
    if how["strategy"] == "tensor":
        scales, zeros = scales.reshape(1), zeros.reshape(1)
    return scales, zeros.to(torch.float8_e4m3fn) if is_float else zeros


@pytest.mark.parametrize("order", list(itertools.permutations(["Linear", "re:.*proj", "re:.*mlp.*proj", UP_PROJ])))
def test_module_has_group_that_library_selects(order: tuple[str, ...]):
    from compressed_tensors.utils.match import match_targets

    group = {"weights": {"num_bits": 4, "strategy": "group"}}
    config: dict[str, Any] = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
    config["config_groups"] = {
        str(number): {"targets": [target], "weights": {**group["weights"], "group_size": 16 << number}}
        for number, target in enumerate(order)
    }
    quantization = read_quantization({"quantization_config": config}, Path("/m/config.json"))
    assert quantization is not None
    for name in (UP_PROJ, "model.layers.0.mlp.gate_proj", "model.layers.0.self_attn.q_proj", "model.layers.0.mlp.gate"):
        first = match_targets(name, torch.nn.Linear(1, 1, device="meta"), order)[0]
        found = quantization.format_of(name)
        assert found is not None
        assert found.block_columns == 16 << order.index(first), (name, first)
