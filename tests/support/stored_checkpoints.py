"""Tiny checkpoints with experts in MXFP4, as GPT-OSS's, and in FP8, as Qwen3's with blocks of 128 x 128 and those of
compressed-tensors with a scale a row; with FP8 linear layers beside plain stacks of experts, which are no linear
layers (`fp8_linear`); with all matrices in 4 bits or FP8; and GGUF. Needs no transformers.
"""

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast
from unittest import mock

import quantised_files
import torch
from gguf_files import write_gguf
from quantised_files import FORMATS, Format, awq, compressed, fp8_block, fp8_row, fp8_tensor, gptq, packed_int
from safetensors.torch import save_file

from spmd_worker.model.layers.context import LayerContext
from spmd_worker.model.layers.weight_slice import full_rectangle
from spmd_worker.model.registry import build_model
from spmd_worker.model.weights.store import WeightStore
from spmd_worker.model_config.model_config import model_config_of
from spmd_worker.ops.attention.sdpa import SdpaBackend
from spmd_worker.ops.kernels.api import ExpertKernels
from spmd_worker.ops.kernels.reference import ReferenceKernels
from spmd_worker.ranks.communicator import single_group
from spmd_worker.ranks.topology import complete_model

SIZES = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "vocab_size": 64}
SIZES |= {"max_position_embeddings": 128, "eos_token_id": 2, "num_experts_per_tok": 2}
_GPT_OSS = {"architectures": ["GptOssForCausalLM"], "hidden_size": 96, "intermediate_size": 64, "num_local_experts": 4}
_QWEN3 = {"architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 192, "moe_intermediate_size": 256}
_QWEN3 |= {"num_experts": 4, "intermediate_size": 48, "norm_topk_prob": True}
_GRANITE = {"architectures": ["GraniteMoeForCausalLM"], "hidden_size": 64, "intermediate_size": 128}
_GRANITE |= {"num_local_experts": 4, "tie_word_embeddings": False}
_DENSE = {"hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 4, "num_key_value_heads": 2}
_DENSE |= {"head_dim": 32, "tie_word_embeddings": False}
_SHARED = {**_DENSE, "architectures": ["Qwen2MoeForCausalLM"], "moe_intermediate_size": 64, "num_experts": 4}
_SHARED |= {"shared_expert_intermediate_size": 128, "mlp_only_layers": [1]}
_NIBBLES = 32
"""Inputs of a group of 4 bits."""
_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": _NIBBLES, "desc_act": False, "sym": False}
_AWQ = {**FORMATS["awq"].config, "group_size": _NIBBLES}
_BLOCKS = Format({"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3"}, fp8_block)
_MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router"]}
KINDS: dict[str, tuple[Mapping[str, Any], Format]] = {
    "mxfp4": (_GPT_OSS, Format(_MXFP4, lambda weight: ({}, weight))),
    "fp8_block": (_QWEN3, _BLOCKS),
    "fp8_row": (_QWEN3, Format(FORMATS["float_row"].config, fp8_row)),
    "fp8_linear": (_GRANITE, Format(FORMATS["float_row"].config, fp8_row)),
    "fp8_tensor": (_QWEN3, Format(FORMATS["fp8_tensor"].config, fp8_tensor)),
    # Ranks have 64 rows of keys, half of a block.
    "fp8_dense": ({**_DENSE, "architectures": ["Qwen3ForCausalLM"], "head_dim": 64, "intermediate_size": 256}, _BLOCKS),
    "fp8_shared": (_SHARED, Format(FORMATS["float_row"].config, fp8_row)),
    "fp8_whole": ({**_DENSE, "architectures": ["LlamaForCausalLM"]}, FORMATS["fp8_tensor"]),
    "gptq": (
        {**_DENSE, "architectures": ["LlamaForCausalLM"]},
        Format(_GPTQ, partial(gptq, bits=4, is_symmetric=False, has_order=False, is_second=False, size=_NIBBLES)),
    ),
    "awq": (_SHARED, Format(_AWQ, awq)),
    "w4a16": (
        {**_DENSE, "architectures": ["Qwen2ForCausalLM"]},
        Format(
            compressed("pack-quantized", num_bits=4, type="int", strategy="channel"),
            partial(packed_int, bits=4, size=-1, is_symmetric=True),
        ),
    ),
    "nf4": ({**_DENSE, "architectures": ["LlamaForCausalLM"], "intermediate_size": 256}, FORMATS["nf4_nested"]),
}
_GGUF = {**_DENSE, "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 256, "head_dim": 64}
_GGUF |= {"intermediate_size": 512, "rms_norm_eps": 1e-6, "rope_theta": 1e4}
_TIED = {"tie_word_embeddings": True}
_GGUF_EXPERTS = {**_GGUF, "architectures": ["Qwen2MoeForCausalLM"], "model_type": "qwen2_moe", "num_experts": 4}
_GGUF_EXPERTS |= {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 128, "norm_topk_prob": False}
GGUF_ARCHITECTURES: dict[str, Mapping[str, Any]] = {
    name: {**_GGUF, "architectures": [f"{model}ForCausalLM"], "model_type": kind, **own}
    for name, model, kind, own in (
        ("mixtral", "Mixtral", "mixtral", {"num_local_experts": 4}),
        ("qwen2", "Qwen2", "qwen2", {}),
        ("qwen3", "Qwen3", "qwen3", {}),
        ("qwen3moe", "Qwen3Moe", "qwen3_moe", {"num_experts": 4, "moe_intermediate_size": 256, "norm_topk_prob": True}),
        ("gemma", "Gemma", "gemma", {**_TIED, "hidden_act": "gelu_pytorch_tanh"}),
        ("gemma2", "Gemma2", "gemma2", {**_TIED, "sliding_window": 16}),
        ("gemma3", "Gemma3", "gemma3_text", {**_TIED, "sliding_window": 16}),
        ("phi3", "Phi3", "phi3", {"pad_token_id": 0, "sliding_window": None}),
        (
            *("granite", "Granite", "granite"),
            {"attention_multiplier": 0.1, "embedding_multiplier": 2.0, "residual_multiplier": 0.5}
            | {"logits_scaling": 2.0},
        ),
        ("olmo2", "Olmo2", "olmo2", {}),
        ("smollm3", "SmolLM3", "smollm3", {}),
        (
            *("starcoder2", "Starcoder2", "starcoder2"),
            {"norm_epsilon": 1e-5, "use_bias": True, "sliding_window": None, "hidden_act": "gelu_pytorch_tanh"},
        ),
    )
}
"""Configurations by `general.architecture`, which is `llama` of mixtral. Others are in `GGUF_KINDS`."""
GGUF_KINDS: dict[str, tuple[Mapping[str, Any], Mapping[str, str]]] = {
    # In one layer as in files of Q4_K_M, in the other all other formats.
    "gguf": (_GGUF, {"0.attn_v": "Q6_K", "0.ffn_down": "Q6_K", "1.ffn_down": "IQ4_XS", "1.ffn_": "Q4_0"}),
    "gguf_experts": (_GGUF_EXPERTS, {"ffn_down_exps": "Q5_0", "ffn_down_shexp": "Q4_1", "attn_v": "Q5_K"}),
}
"""Sizes, and types of tensors that are not Q4_K."""


def write_stored_gguf(folder: Path, kind: str, seed: int = 0, **types: str) -> Path:
    """The file of one of `GGUF_KINDS`; `types` by words in names."""
    config, usual = GGUF_KINDS[kind]
    return write_gguf_of(config, folder / f"{seed}{'-'.join(types.values())}", {**types, **usual}, seed)


def write_gguf_of(config: Mapping[str, Any], folder: Path, types: Mapping[str, str], seed: int = 0) -> Path:
    """The file of a configuration, beside `SIZES`, in Q4_K but for `types`; the checkpoint is beside it."""
    config = {**SIZES, **config}
    weights = _weights(config, folder)
    source = weights.dummy(seed)
    tensors = {name: source.read(name, full_rectangle(shape)).contiguous() for name, shape in weights.shapes.items()}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return write_gguf(folder, folder / "m.gguf", "Q4_K", types={"token_embd": "F32", **types})


def _weights(config: Mapping[str, Any], folder: Path) -> WeightStore:
    """The weights' names and shapes of the model of a configuration, which will be in this new folder."""
    folder.mkdir(parents=True)
    model_config = model_config_of(config, folder / "config.json")
    context = LayerContext(single_group(), ReferenceKernels(), SdpaBackend(), torch.float32, torch.device("meta"))
    return build_model(context, model_config, complete_model(model_config)).weights


@torch.no_grad()
def write_stored(folder: Path, kind: str, seed: int = 0, **keys: Any) -> Path:
    """The folder, or the file of one of `GGUF_KINDS`. `keys` replace those of config.json."""
    if kind in GGUF_KINDS:
        return write_stored_gguf(folder, kind, seed)
    config, format_ = KINDS[kind]
    config = {**SIZES, **config, **keys}
    weights = _weights(config, folder)
    source, tensors = weights.dummy(seed), {}
    for name, shape in weights.shapes.items():
        weight = source.read(name, full_rectangle(shape)).contiguous()
        if kind == "mxfp4" and name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            tensors |= _mxfp4(name, shape, seed)
        elif kind != "mxfp4" and ".layers." in name and weight.dim() == 2 and not name.endswith("gate.weight"):
            with mock.patch.multiple(quantised_files, BLOCK=(128, 128), GROUP=_NIBBLES):
                parts, _ = format_.pack(weight)
            tensors |= {name.removesuffix(".weight") + ending: part.contiguous() for ending, part in parts.items()}
        else:
            tensors[name] = weight
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": dict(format_.config)}))
    return folder


class StackingKernels(ReferenceKernels):
    """Experts are stacked, and never multiplied."""

    def expert_kernels(self) -> ExpertKernels:
        return cast("ExpertKernels", object())


def _mxfp4(name: str, shape: tuple[int, ...], seed: int) -> dict[str, torch.Tensor]:
    num_experts, inputs, outputs = shape
    generator = torch.Generator().manual_seed(seed + len(name))
    blocks = torch.randint(0, 256, (num_experts, outputs, inputs // 32, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(122, 126, blocks.shape[:3], dtype=torch.uint8, generator=generator)
    return {f"{name}_blocks": blocks, f"{name}_scales": scales}
