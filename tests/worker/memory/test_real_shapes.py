"""Plans of models that people run, from config.json alone, against transformers' own count and every rank's tensors."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import launch
from spmd_worker.base.config.parallel import ParallelConfig
from spmd_worker.base.config.schema import ModelOptions, RunConfig
from spmd_worker.model.layers.context import LayerContext
from spmd_worker.model.registry import build_model
from spmd_worker.ops.attention.sdpa import SdpaBackend
from spmd_worker.ops.kernels.reference import ReferenceKernels
from spmd_worker.ranks.communicator import GroupHandle
from spmd_worker.ranks.topology import stage_of
from spmd_worker.resolved import resolve_run
from spmd_worker.worker.memory.estimate import weights_bytes

SHAPES: dict[str, dict[str, Any]] = {
    "Qwen3-30B-A3B": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "intermediate_size": 6144,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "rope_theta": 1000000.0,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
    },
    "gpt-oss-20b": {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 24,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "attention_bias": True,
        "sliding_window": 128,
        "swiglu_limit": 7.0,
        "vocab_size": 201088,
        "max_position_embeddings": 131072,
        "rope_theta": 150000.0,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]},
    },
    "Gemma-3-27B": {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "text_config": {
            "model_type": "gemma3_text",
            "hidden_size": 5376,
            "intermediate_size": 21504,
            "num_hidden_layers": 62,
            "num_attention_heads": 32,
            "num_key_value_heads": 16,
            "head_dim": 128,
            "query_pre_attn_scalar": 168,
            "sliding_window": 1024,
            "vocab_size": 262208,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        },
        "vision_config": {
            "model_type": "siglip_vision_model",
            "hidden_size": 1152,
            "image_size": 896,
            "intermediate_size": 4304,
            "num_attention_heads": 16,
            "num_hidden_layers": 27,
            "patch_size": 14,
            "vision_use_head": False,
        },
        "mm_tokens_per_image": 256,
    },
    "GLM-4.5": {
        "architectures": ["Glm4MoeForCausalLM"],
        "model_type": "glm4_moe",
        "hidden_size": 5120,
        "intermediate_size": 12288,
        "moe_intermediate_size": 1536,
        "num_hidden_layers": 92,
        "num_attention_heads": 96,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "n_routed_experts": 160,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "first_k_dense_replace": 3,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "use_qk_norm": True,
        "attention_bias": True,
        "partial_rotary_factor": 0.5,
        "vocab_size": 151552,
        "max_position_embeddings": 131072,
        "rope_theta": 1000000,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
    },
}
LAYOUTS = {
    "Qwen3-30B-A3B": ParallelConfig(tensor_parallel_size=4, enable_expert_parallel=True),
    "gpt-oss-20b": ParallelConfig(tensor_parallel_size=2),
    "Gemma-3-27B": ParallelConfig(tensor_parallel_size=4, pipeline_parallel_size=2),
    "GLM-4.5": ParallelConfig(tensor_parallel_size=8, pipeline_parallel_size=2, enable_expert_parallel=True),
}
BILLIONS = {"Qwen3-30B-A3B": 30.5, "gpt-oss-20b": 20.9, "Gemma-3-27B": 27.0, "GLM-4.5": 352.8}


def write(folder: Path, name: str) -> Path:
    (folder / "config.json").write_text(json.dumps(SHAPES[name]))
    return folder


def number_of_parameters(folder: Path, name: str) -> int:
    """transformers' own, of a model without memory."""
    config = AutoConfig.from_pretrained(folder)
    config = getattr(config, "text_config", config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return sum(each.numel() for each in model.parameters()) + sum(
        each.numel() for key, each in model.named_buffers() if "correction_bias" in key
    )


@pytest.mark.gate("gpt-oss-20b", "Gemma-3-27B")
@pytest.mark.matrix
@pytest.mark.parametrize("name", SHAPES)
def test_plan_bytes_equal_real_model_shapes(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path, parallel = write(tmp_path, name), LAYOUTS[name]
    model = ModelOptions(path=str(path), dtype="bfloat16", max_model_len=4096)
    resolved = resolve_run(RunConfig(model=model, parallel=parallel, plan=True, device="cuda"), "cuda")
    config, layout = resolved.model_config, resolved.layout
    assert config.num_parameters == number_of_parameters(path, name)
    assert round(config.num_parameters / 1e9, 1) == BILLIONS[name]
    # Ranks of one stage differ in nothing but whose rows and experts they have.
    for rank in {0: None, layout.tensor_parallel_size - 1: None, layout.world_size - 1: None}:
        group = GroupHandle(
            ranks=tuple(range(parallel.tensor_parallel_size)), rank=layout.tensor_rank(rank), group=None
        )
        context = LayerContext(
            group, ReferenceKernels(), SdpaBackend(), torch.bfloat16, torch.device("meta"), layout.experts
        )
        tensors = build_model(context, config, stage_of(layout, config, rank)).parameters()
        assert weights_bytes(config, layout, rank, "bfloat16", "cuda") == sum(each.nbytes for each in tensors), rank
    capsys.readouterr()
    keys = [f"parallel.{key}={getattr(parallel, key)}" for key in ("tensor_parallel_size", "pipeline_parallel_size")]
    keys.append(f"parallel.enable_expert_parallel={parallel.enable_expert_parallel}")
    code = launch.main([f"model.path={path}", "model.max_model_len=4096", "device=cuda", "plan=true", *keys])
    assert code == 0
    assert f"{config.num_parameters:,} parameters" in capsys.readouterr().out
