"""Plans of models whose weights stay in 4 bits on CPUs, at the sizes of real ones: the bytes of a rank's tensors."""

import json
from pathlib import Path
from typing import Any

import pytest
from test_plan_text import LLAMA_8B
from test_real_configs import distinct_ranks, folder_of, weight_bytes

from spmd_worker.base.config.parallel import ParallelConfig
from spmd_worker.base.config.schema import ExecutorConfig, ModelOptions, RunConfig
from spmd_worker.resolved import resolve_run
from spmd_worker.worker.memory.plan_text import describe_plan, make_plan

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "modules_to_not_convert": ["mlp.gate"]}
QWEN = {
    **LLAMA_8B,
    "architectures": ["Qwen3MoeForCausalLM"],
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 4,
    "num_key_value_heads": 4,
    "head_dim": 128,
}
"""Qwen3-30B-A3B, of fewer layers."""
GPT_OSS = {
    **LLAMA_8B,
    "architectures": ["GptOssForCausalLM"],
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 4,
    "num_attention_heads": 64,
    "head_dim": 64,
    "vocab_size": 201088,
}
"""gpt-oss-20b, of fewer layers."""
STAYS = "weights stay in 4-bit integers in groups of 128 in"
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], int, str]] = {
    "gptq": ({**LLAMA_8B, "num_hidden_layers": 2}, GPTQ, 2, f"{STAYS} 2 layers"),
    "gptq of 8": (LLAMA_8B, GPTQ, 8, f"{STAYS} 32 layers"),
    "awq": (QWEN, AWQ, 2, f"{STAYS} 4 layers"),
    # 192 columns are no groups of 128: experts are dequantised, attention is not.
    "awq of 4": (QWEN, AWQ, 4, "mlp.experts: inputs 0 to 192, a rank's share, do not"),
    # Delta nets and a shared expert; experts without gates, of a latent size, and Mamba.
    "Qwen3.6-35B-A3B": ({}, GPTQ, 2, f"{STAYS} 40 layers"),
    "Nemotron-3-Super-120B-A12B": ({}, GPTQ, 2, f"{STAYS} 48 layers"),
    "mxfp4": (GPT_OSS, {"quant_method": "mxfp4"}, 2, "experts stay in MXFP4 in 4 layers"),
}


@pytest.mark.gate("mxfp4", "gptq*", "awq*", "Qwen*")
@pytest.mark.guarantee("The plan's bytes are those of the run")
@pytest.mark.parametrize("name", CASES)
def test_plan_of_4_bits_equals_tensors(name: str, tmp_path: Path):
    keys, quantization, size, words = CASES[name]
    keys = keys or json.loads((folder_of(name, tmp_path) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**keys, "quantization_config": quantization}))
    options = ModelOptions(path=str(tmp_path), dtype="bfloat16")
    parts = {"plan": True, "device": "cpu", "executor": ExecutorConfig(argmax_screen=False)}
    run = resolve_run(RunConfig(options, ParallelConfig(size), **parts), "cpu")
    plan = make_plan(run)
    text = describe_plan(plan)
    assert words in text
    assert ("groups of 128: parallel.enable_expert_parallel=true keeps" in text) is (size == 4)
    for rank in distinct_ranks(plan):
        assert plan.shares[rank].weights_bytes == weight_bytes(run, rank)
