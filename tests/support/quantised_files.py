"""Weights packed as the formats of quantised checkpoints have them, from their published definitions, in plain loops.

Each packer takes a float matrix [outputs, inputs] and gives the tensors that the format stores, by the end of their
names, with the float32 values that the definition gives for them. Knows nothing of the reader under test.
"""

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from json_files import edit
from safetensors.torch import load_file, save_file

GROUP = 16
BLOCK = (32, 16)

Packed = tuple[dict[str, torch.Tensor], torch.Tensor]
"""Stored tensors by ending, and what they mean."""


@dataclass(frozen=True, slots=True)
class Format:
    """What config.json says, and how a matrix is packed."""

    config: Mapping[str, Any]
    pack: Callable[[torch.Tensor], Packed]


def fp8_block(weight: torch.Tensor) -> Packed:
    """https://huggingface.co/deepseek-ai/DeepSeek-V3 (README_WEIGHTS.md)."""
    rows, columns = weight.shape
    scales = torch.empty(-(-rows // BLOCK[0]), -(-columns // BLOCK[1]))
    stored, meant = torch.empty_like(weight, dtype=torch.float8_e4m3fn), torch.empty_like(weight)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            place = slice(i * BLOCK[0], (i + 1) * BLOCK[0]), slice(j * BLOCK[1], (j + 1) * BLOCK[1])
            scales[i, j] = weight[place].abs().max() / 448.0
            stored[place] = (weight[place] / scales[i, j]).to(torch.float8_e4m3fn)
            meant[place] = stored[place].float() * scales[i, j]
    return {".weight": stored, ".weight_scale_inv": scales}, meant


def fp8_tensor(weight: torch.Tensor) -> Packed:
    scale = weight.abs().max() / 448.0
    stored = (weight / scale).to(torch.float8_e4m3fn)
    parts = {".weight": stored, ".weight_scale": scale.reshape(()), ".input_scale": torch.tensor(0.5)}
    return parts, stored.float() * scale


def fp8_row(weight: torch.Tensor) -> Packed:
    scales = weight.abs().amax(dim=1, keepdim=True) / 448.0
    stored = (weight / scales).to(torch.float8_e4m3fn)
    return {".weight": stored, ".weight_scale": scales}, stored.float() * scales


def groups(weight: torch.Tensor, bits: int, size: int, is_symmetric: bool) -> tuple[torch.Tensor, ...]:
    """Unsigned numbers [O, I], float16 scales [O, G] and zero points [O, G]."""
    grouped = weight.reshape(len(weight), -1, size)
    most = (1 << bits) - 1
    if is_symmetric:
        scales = grouped.abs().amax(dim=2) * 2 / most
        zeros = torch.full_like(scales, (most + 1) // 2)
    else:
        low, high = grouped.amin(dim=2).clamp(max=0), grouped.amax(dim=2).clamp(min=0)
        scales = (high - low) / most
        zeros = torch.round(-low / scales).clamp(0, most)
    scales = scales.half()
    numbers = torch.round(grouped / scales.float()[..., None] + zeros[..., None]).clamp(0, most)
    return numbers.reshape(weight.shape).to(torch.int64), scales, zeros.to(torch.int64)


def pack(numbers: torch.Tensor, bits: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """int64 [A, B] -> int32 [A, B * bits / 32]: number `order[i]` of each run at bits i * `bits`."""
    num = 32 // bits
    padded = torch.nn.functional.pad(numbers, (0, -numbers.shape[1] % num))
    words = torch.zeros(len(numbers), padded.shape[1] // num, dtype=torch.int64)
    for i in range(num):
        words |= padded[:, (order or range(num))[i] :: num] << (bits * i)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def meant(numbers: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, group_of: torch.Tensor) -> torch.Tensor:
    """(q - zero) * scale of the group of each input."""
    return (numbers - zeros[:, group_of]).float() * scales.float()[:, group_of]


def gptq(
    weight: torch.Tensor, *, bits: int, is_symmetric: bool, has_order: bool, is_second: bool, size: int = GROUP
) -> Packed:
    """https://github.com/AutoGPTQ/AutoGPTQ (qlinear_cuda.pack); with `has_order`, groups by a shuffled order."""
    inputs = weight.shape[1]
    shuffled = torch.randperm(inputs, generator=torch.Generator().manual_seed(inputs))
    order = shuffled if has_order else torch.arange(inputs)
    numbers, scales, zeros = groups(weight[:, order], bits, size, is_symmetric)
    back = order.argsort()
    group_of = (torch.arange(inputs) // size)[back]
    numbers = numbers[:, back]
    parts = {
        ".qweight": pack(numbers, bits).T.contiguous(),
        # The first version is one less, of whole words: zero points of 0 borrow from the next.
        ".qzeros": pack(zeros.T, bits) - (0 if is_second else 0x11111111 if bits == 4 else 0x01010101),
        ".scales": scales.T.contiguous(),
        ".g_idx": group_of.to(torch.int32),
    }
    return parts, meant(numbers, scales, zeros, group_of)


AWQ_PACKS = (0, 2, 4, 6, 1, 3, 5, 7)


def awq(weight: torch.Tensor) -> Packed:
    """https://github.com/casper-hansen/AutoAWQ (WQLinear_GEMM.from_linear)."""
    numbers, scales, zeros = groups(weight, 4, GROUP, is_symmetric=False)
    parts = {
        ".qweight": pack(numbers.T, 4, AWQ_PACKS),
        ".qzeros": pack(zeros.T, 4, AWQ_PACKS),
        ".scales": scales.T.contiguous(),
    }
    return parts, meant(numbers, scales, zeros, torch.arange(weight.shape[1]) // GROUP)


def int8_row(weight: torch.Tensor, *, is_symmetric: bool = True) -> Packed:
    """compressed-tensors int-quantized: int8, a scale and perhaps a zero point a row."""
    numbers, scales, zeros = groups(weight, 8, weight.shape[1], is_symmetric)
    scales = scales.to(torch.bfloat16)
    signed, zeros = numbers - 128, zeros - 128
    parts = {".weight": signed.to(torch.int8), ".weight_scale": scales}
    if not is_symmetric:
        parts[".weight_zero_point"] = zeros.to(torch.int8)
    return parts, (signed - zeros).float() * scales.float()


def packed_int(weight: torch.Tensor, *, bits: int, size: int, is_symmetric: bool, has_order: bool = False) -> Packed:
    """compressed-tensors pack-quantized; `size` -1: a scale a row."""
    inputs = weight.shape[1]
    size = inputs if size == -1 else size
    order = torch.randperm(inputs, generator=torch.Generator().manual_seed(3)) if has_order else torch.arange(inputs)
    numbers, scales, zeros = groups(weight[:, order], bits, size, is_symmetric)
    back = order.argsort()
    group_of = (torch.arange(inputs) // size)[back]
    numbers = numbers[:, back]
    parts = {
        ".weight_packed": pack(numbers, bits),
        ".weight_scale": scales,
        ".weight_shape": torch.tensor(weight.shape, dtype=torch.int64),
    }
    if not is_symmetric:
        parts[".weight_zero_point"] = pack(zeros.T.contiguous(), bits).T.contiguous()
    if has_order:
        parts[".weight_g_idx"] = group_of.to(torch.int32)
    return parts, meant(numbers, scales, zeros, group_of)


NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334),
    *(-0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
FP4 = (0.0, 0.0052083333, 0.6666667, 1.0, 0.3333333, 0.5, 0.1666667, 0.25)
"""Positive numbers; negative ones follow in the same order."""
NESTED_STEPS = torch.linspace(-1, 1, 256) ** 3
"""Any table of 256 values: files have their own."""


def bitsandbytes_4(weight: torch.Tensor, *, kind: str, size: int, is_nested: bool, storage: torch.dtype) -> Packed:
    """https://github.com/bitsandbytes-foundation/bitsandbytes (functional.quantize_4bit, QuantState.as_dict)."""
    table = torch.tensor(NF4 if kind == "nf4" else [*FP4, *(-value for value in FP4)])
    flat = weight.flatten()
    num_blocks = -(-len(flat) // size)
    blocks = [flat[index * size : (index + 1) * size] for index in range(num_blocks)]
    absmax = torch.stack([block.abs().max() for block in blocks])
    state = {"quant_type": kind, "blocksize": size, "dtype": "bfloat16", "shape": list(weight.shape)}
    parts = {".weight.quant_map": table, ".weight.absmax": absmax}
    if is_nested:
        offset = absmax.mean()
        nested = [(absmax - offset)[first : first + 256] for first in range(0, num_blocks, 256)]
        most = torch.stack([each.abs().max() for each in nested])
        steps = [nearest(each / scale, NESTED_STEPS) for each, scale in zip(nested, most)]
        absmax = torch.cat([NESTED_STEPS[each] * scale for each, scale in zip(steps, most)]) + offset
        parts |= {".weight.absmax": torch.cat(steps).to(torch.uint8), ".weight.nested_absmax": most}
        parts[".weight.nested_quant_map"] = NESTED_STEPS.clone()
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset.item()}
    numbers = [nearest(block / scale, table) for block, scale in zip(blocks, absmax)]
    values = torch.cat([table[each] * scale for each, scale in zip(numbers, absmax)])
    flat_numbers = torch.nn.functional.pad(torch.cat(numbers), (0, weight.numel() % 2))
    packed = (flat_numbers[::2] << 4 | flat_numbers[1::2]).to(torch.uint8)
    text = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    parts[f".weight.quant_state.bitsandbytes__{kind}"] = text
    return {".weight": packed.view(storage).unsqueeze(1), **parts}, values.reshape(weight.shape)


def nearest(values: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Index of the nearest value of a table."""
    return (values[..., None] - table).abs().argmin(dim=-1)


def bitsandbytes_8(weight: torch.Tensor) -> Packed:
    """https://github.com/bitsandbytes-foundation/bitsandbytes (functional.int8_vectorwise_quant and _dequant)."""
    most = weight.abs().amax(dim=1)
    stored = torch.round(weight * 127 / most[:, None]).to(torch.int8)
    parts = {".weight": stored, ".SCB": most, ".weight_format": torch.tensor(0, dtype=torch.uint8)}
    return parts, stored.float() * most[:, None] * 7.874015718698502e-3


E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Positive numbers; negative ones follow in the same order."""


def nvfp4(weight: torch.Tensor, *, is_modelopt: bool) -> Packed:
    """https://github.com/vllm-project/compressed-tensors (compressors/nvfp4), and
    https://github.com/NVIDIA/Model-Optimizer (NVFP4QTensor), whose scale of the weight is the other's reciprocal.
    """
    table = torch.tensor([*E2M1, *(-value for value in E2M1)])
    grouped = weight.reshape(len(weight), -1, 16)
    of_weight = weight.abs().max() / (6 * 448)
    scales = (grouped.abs().amax(dim=2) / 6 / of_weight).to(torch.float8_e4m3fn)
    divisor = 1 / of_weight
    factors = scales.float() * of_weight if is_modelopt else scales.float() / divisor
    rows = [nearest(row / factor[:, None], table) for row, factor in zip(grouped, factors)]
    numbers = torch.stack(rows).reshape(weight.shape)
    values = table[numbers] * factors.repeat_interleave(16, dim=1)
    packed = (numbers[:, ::2] | numbers[:, 1::2] << 4).to(torch.uint8)
    if is_modelopt:
        parts = {".weight": packed, ".weight_scale": scales, ".weight_scale_2": of_weight}
        return {**parts, ".input_scale": torch.tensor(0.01)}, values
    parts = {".weight_packed": packed, ".weight_scale": scales, ".weight_global_scale": divisor.reshape(1)}
    return {**parts, ".input_global_scale": torch.tensor([100.0])}, values


def fp8_exponents(weight: torch.Tensor) -> Packed:
    """DeepSeek V4's matrices: FP8 in blocks, with exponents for scales (`Fp8Dequantize` of transformers)."""
    parts, _ = fp8_block(weight)
    scales = parts[".weight_scale_inv"].log2().ceil().exp2()
    of_elements = scales.repeat_interleave(BLOCK[0], dim=0).repeat_interleave(BLOCK[1], dim=1)
    of_elements = of_elements[: len(weight), : weight.shape[1]]
    stored = (weight / of_elements).to(torch.float8_e4m3fn)
    return {".weight": stored, ".scale": scales.to(torch.float8_e8m0fnu)}, stored.float() * of_elements


def fp4_exponents(weight: torch.Tensor) -> Packed:
    """DeepSeek V4's experts: two FP4 numbers a byte, an exponent for 32 of a row."""
    table = torch.tensor([*E2M1, *(-value for value in E2M1)])
    grouped = weight.reshape(len(weight), -1, 32)
    scales = (grouped.abs().amax(dim=2) / 6).log2().ceil().exp2()
    numbers = nearest(grouped / scales[..., None], table)
    values = (table[numbers] * scales[..., None]).reshape(weight.shape)
    numbers = numbers.reshape(weight.shape)
    packed = (numbers[:, ::2] | numbers[:, 1::2] << 4).to(torch.uint8).view(torch.int8)
    return {".weight": packed, ".scale": scales.to(torch.float8_e8m0fnu)}, values


def modelopt(kind: str, **others: Any) -> dict[str, Any]:
    """A quantization_config of TensorRT Model Optimizer."""
    cache = {"dynamic": False, "num_bits": 8, "type": "float"}
    return {"quant_method": "modelopt", "quant_algo": kind, "ignore": ["lm_head"], "kv_cache_scheme": cache, **others}


def compressed(kind: str, **weights: Any) -> dict[str, Any]:
    """A quantization_config of compressed-tensors."""
    group = {"targets": ["Linear"], "weights": {"num_bits": 8, "symmetric": True, "dynamic": False, **weights}}
    return {
        "quant_method": "compressed-tensors",
        "format": kind,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


def _gptq(bits: int, is_symmetric: bool, has_order: bool, kind: str, size: int = GROUP) -> Format:
    config = {"quant_method": "gptq", "bits": bits, "group_size": size if size == GROUP else -1}
    config |= {"desc_act": has_order, "sym": is_symmetric, "checkpoint_format": kind}
    return Format(
        config,
        lambda weight: gptq(
            weight,
            bits=bits,
            is_symmetric=is_symmetric,
            has_order=has_order,
            is_second=kind == "gptq_v2",
            size=size if size == GROUP else weight.shape[1],
        ),
    )


def _packed(bits: int, size: int, is_symmetric: bool, has_order: bool = False) -> Format:
    how = {"strategy": "channel"} if size == -1 else {"strategy": "group", "group_size": size}
    config = compressed("pack-quantized", num_bits=bits, type="int", symmetric=is_symmetric, **how)
    if has_order:
        config["config_groups"]["group_0"]["weights"]["actorder"] = "group"
    return Format(
        config,
        lambda weight: packed_int(weight, bits=bits, size=size, is_symmetric=is_symmetric, has_order=has_order),
    )


def _bitsandbytes_4(kind: str, size: int, is_nested: bool, storage: torch.dtype) -> Format:
    config = {"quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False, "bnb_4bit_quant_type": kind}
    config |= {"bnb_4bit_use_double_quant": is_nested, "bnb_4bit_quant_storage": str(storage).removeprefix("torch.")}
    return Format(
        {**config, "bnb_4bit_compute_dtype": "bfloat16", "llm_int8_skip_modules": ["lm_head"]},
        lambda weight: bitsandbytes_4(weight, kind=kind, size=size, is_nested=is_nested, storage=storage),
    )


FORMATS: dict[str, Format] = {
    "fp8_block": Format({"quant_method": "fp8", "weight_block_size": list(BLOCK), "fmt": "e4m3"}, fp8_block),
    "fp8_tensor": Format({"quant_method": "fp8", "activation_scheme": "static"}, fp8_tensor),
    "fbgemm_fp8": Format({"quant_method": "fbgemm_fp8", "modules_to_not_convert": ["lm_head"]}, fp8_row),
    "gptq": _gptq(4, True, False, "gptq"),
    "gptq_order": _gptq(4, False, True, "gptq"),
    "gptq_v2_8bits": _gptq(8, False, True, "gptq_v2"),
    "gptq_rows": _gptq(4, True, False, "gptq_v2", -1),
    "awq": Format({"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}, awq),
    "float_tensor": Format(compressed("float-quantized", type="float", strategy="tensor"), fp8_tensor),
    "float_row": Format(compressed("float-quantized", type="float", strategy="channel"), fp8_row),
    "int_row": Format(compressed("int-quantized", type="int", strategy="channel"), int8_row),
    "int_row_zeros": Format(
        compressed("int-quantized", type="int", strategy="channel", symmetric=False),
        lambda weight: int8_row(weight, is_symmetric=False),
    ),
    "w4a16": _packed(4, GROUP, True),
    "w4a16_zeros": _packed(4, GROUP, False),
    "w4a16_order": _packed(4, GROUP, True, has_order=True),
    "w8a16_rows": _packed(8, -1, True),
    "w8a16_rows_zeros": _packed(8, -1, False),
    "nf4_nested": _bitsandbytes_4("nf4", 64, True, torch.uint8),
    "fp4": _bitsandbytes_4("fp4", 32, False, torch.bfloat16),
    "nvfp4": Format(modelopt("NVFP4"), lambda weight: nvfp4(weight, is_modelopt=True)),
    "nvfp4_packed": Format(
        compressed("nvfp4-pack-quantized", type="float", num_bits=4, strategy="tensor_group", group_size=16),
        lambda weight: nvfp4(weight, is_modelopt=False),
    ),
    "modelopt_fp8": Format(modelopt("FP8"), fp8_tensor),
    "bnb_int8": Format({"quant_method": "bitsandbytes", "load_in_8bit": True}, bitsandbytes_8),
}
"""By a name of ours."""


def quantise(source: Path, folder: Path, name: str) -> tuple[Path, Path]:
    """A checkpoint folder with its layers' matrices in format `name`, and one with what these mean, in float32."""
    format_ = FORMATS[name]
    stored: dict[str, torch.Tensor] = {}
    plain: dict[str, torch.Tensor] = {}
    for key, tensor in load_file(source / "model.safetensors").items():
        if ".layers." in key and tensor.dim() == 2:
            parts, values = format_.pack(tensor)
            stored |= {key.removesuffix(".weight") + ending: part.contiguous() for ending, part in parts.items()}
            plain[key] = values
        else:
            stored[key] = plain[key] = tensor
    return _write_both(source, folder, name, stored, plain, format_.config)


def quantise_experts(source: Path, folder: Path) -> tuple[Path, Path]:
    """As `quantise`, of a gpt-oss checkpoint: the experts' matrices in MXFP4, which are drawn anew, the rest as it is.
    What they mean is by transformers' own function.
    """
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    generator = torch.Generator().manual_seed(11)
    stored: dict[str, torch.Tensor] = {}
    plain: dict[str, torch.Tensor] = {}
    for key, tensor in load_file(source / "model.safetensors").items():
        if not key.endswith(("experts.gate_up_proj", "experts.down_proj")):
            stored[key] = plain[key] = tensor
            continue
        num_experts, inputs, outputs = tensor.shape
        blocks = torch.randint(0, 256, (num_experts, outputs, inputs // 32, 16), dtype=torch.uint8, generator=generator)
        # Exponents have a bias of 127: about the size of the weights that are replaced.
        scales = torch.randint(122, 126, blocks.shape[:3], dtype=torch.uint8, generator=generator)
        stored |= {f"{key}_blocks": blocks, f"{key}_scales": scales}
        plain[key] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).contiguous()
    config = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router"],
    }
    return _write_both(source, folder, "mxfp4", stored, plain, config)


def _write_both(
    source: Path,
    folder: Path,
    name: str,
    stored: dict[str, torch.Tensor],
    plain: dict[str, torch.Tensor],
    config: Mapping[str, Any],
) -> tuple[Path, Path]:
    folders = []
    for kind, tensors in ((name, stored), (f"{name}_plain", plain)):
        shutil.copytree(source, folder / kind)
        save_file(tensors, folder / kind / "model.safetensors", metadata={"format": "pt"})
        folders.append(folder / kind)
    edit(folders[0] / "config.json", quantization_config=dict(config))
    return folders[0], folders[1]
