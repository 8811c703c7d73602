"""Speeds of layers with recurrent states and with latent attention on a GPU, with dummy weights, beside floors.

    python scripts/gpu_hybrid_speed.py {states,latent} [--device-backend triton] [--warm]
    OPENBLAS_CORETYPE=Nehalem TRITON_INTERPRET=1 python scripts/gpu_hybrid_speed.py states --dry

`states`: three gated delta nets and an attention of Qwen3.5 9B's sizes. `latent`: four layers of DeepSeek V3's
attention with small dense feed-forwards. Both: decode steps of 256, 64 and 1 rows, prefill steps of 2,048 tokens of
many rows, and of one. Floors are of the bytes of weights, states and keys, or the operations, whichever takes longer.
--warm runs a few steps, for Triton's cache. A line a figure, and one JSON object last.
"""

import argparse
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from gpu_figures import Findings
from gpu_speed import MAX_TOKENS, Model, Speeds

_COMMON: dict[str, Any] = {
    "num_hidden_layers": 4,
    "vocab_size": 32768,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
QWEN3_5: dict[str, Any] = {
    **_COMMON,
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
DEEPSEEK_V3: dict[str, Any] = {
    **_COMMON,
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "intermediate_size": 2048,
    "first_k_dense_replace": 4,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
_TINY: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "vocab_size": 320}
TINY_QWEN3_5 = {**_TINY, "num_key_value_heads": 2, "head_dim": 16, "linear_num_key_heads": 1}
TINY_QWEN3_5 |= {"linear_num_value_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16}
TINY_DEEPSEEK = {**_TINY, "num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16}
TINY_DEEPSEEK |= {"qk_rope_head_dim": 16, "v_head_dim": 16}
_LONG_PROMPT = 4000


@dataclass(frozen=True, slots=True)
class Work:
    """Sizes of a model's steps. `shapes`: outputs and inputs of the matmuls of all layers and of the head."""

    shapes: list[tuple[int, int]]
    key_bytes: int
    """Bytes of the keys and values of a token, all layers."""
    state_bytes: int = 0
    """Bytes of the states of a row, all layers."""
    key_flop: int = 0
    """Operations of a token with a key, all layers."""
    head: tuple[int, int] = field(default=(0, 0))


def delta_work(config: dict[str, Any]) -> Work:
    hidden, size = config["hidden_size"], config["intermediate_size"]
    key = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    num_values = config["linear_num_value_heads"]
    value = num_values * config["linear_value_head_dim"]
    query = config["num_attention_heads"] * config["head_dim"]
    kv = config["num_key_value_heads"] * config["head_dim"]
    mlp = [(2 * size, hidden), (hidden, size)]
    delta = [(2 * key + 2 * value + 2 * num_values, hidden), (hidden, value), *mlp]
    full = [(2 * query + 2 * kv, hidden), (hidden, query), *mlp]
    state = 4 * num_values * config["linear_key_head_dim"] * config["linear_value_head_dim"]
    return Work([*delta * 3, *full], 4 * kv, 3 * state, 4 * query, (config["vocab_size"], hidden))


def latent_work(config: dict[str, Any]) -> Work:
    hidden, heads, size = config["hidden_size"], config["num_attention_heads"], config["intermediate_size"]
    rank, nope, value = config["kv_lora_rank"], config["qk_nope_head_dim"], config["v_head_dim"]
    latent = rank + config["qk_rope_head_dim"]
    shapes = [
        (config["q_lora_rank"] + latent, hidden),
        (heads * (nope + config["qk_rope_head_dim"]), config["q_lora_rank"]),
        (heads * (nope + value), rank),
        (hidden, heads * value),
        (2 * size, hidden),
        (hidden, size),
    ]
    flop = 2 * heads * (latent + rank)
    return Work(shapes * 4, 4 * 2 * latent, key_flop=4 * flop, head=(config["vocab_size"], hidden))


class HybridSpeeds(Speeds):
    """Each method is one part."""

    def states(self) -> None:
        config = {**QWEN3_5, **(TINY_QWEN3_5 if self.is_dry else {})}
        self.steps("qwen3.5 9b, 4 layers", config, delta_work(config))

    def latent(self) -> None:
        config = {**DEEPSEEK_V3, **(TINY_DEEPSEEK if self.is_dry else {})}
        self.steps("deepseek v3 without experts, 4 layers", config, latent_work(config))

    def floor_ms(self, work: Work, num_tokens: int, num_rows: int, num_keys: float) -> float:
        """Milliseconds of a step of `num_tokens` in `num_rows`, all of which sample, each over `num_keys` keys."""
        matmuls = sum(self.chip.floor_us(2 * n * k, 2.0 * num_tokens * n * k) for n, k in work.shapes)
        n, k = work.head
        head = self.chip.floor_us(2 * n * k, 2.0 * num_rows * n * k)
        keys = self.chip.floor_us(num_rows * num_keys * work.key_bytes, num_tokens * num_keys * work.key_flop)
        # States are read and written.
        states = self.chip.floor_us(2 * num_rows * work.state_bytes)
        return (matmuls + head + keys + states) / 1e3

    def steps(self, name: str, config: dict[str, Any], work: Work) -> None:
        # Nothing is found in the cache, and no chunk ends early for a snapshot.
        model = self.open(name, config, enable_prefix_caching=False)
        rows, prompt, output = self.counts()
        model.run(model.prompts(rows, min(prompt, 24), 1), 3)
        steps = self.checked(name, model.run(model.prompts(rows, prompt, 2), output), rows * output)
        keys = prompt + output // 2
        found = {f"decode step, {rows} rows": (steps.decode_ms, self.floor_ms(work, rows, rows, keys))}
        prompts_a_step = max(1, MAX_TOKENS // prompt)
        floor = self.floor_ms(work, MAX_TOKENS, prompts_a_step, prompt / 2)
        found["prefill step of 2,048 tokens"] = (steps.prefill_ms, floor)
        for count in () if self.is_small else (64, 1):
            steps = self.checked(name, model.run(model.prompts(count, prompt, 3 + count), 24), count * 24)
            found[f"decode step, {count} rows"] = (steps.decode_ms, self.floor_ms(work, count, count, prompt))
        found["prefill of 2,048 tokens of one row"] = self.one_row(name, model, work)
        model.close()
        for each, (ms, floor) in found.items():
            self.findings.figure(f"{name}: {each}", ms, "ms", floor=floor)

    def one_row(self, name: str, model: Model, work: Work) -> tuple[float, float]:
        """Milliseconds of 2,048 tokens of a prompt that fills its steps alone, and their floor."""
        length = 40 if self.is_dry else _LONG_PROMPT
        for seed in (7, 8):
            steps = self.checked(name, model.run(model.prompts(1, length, seed), 1), 1)
        return steps.total_s * 1e3 * MAX_TOKENS / length, self.floor_ms(work, MAX_TOKENS, 1, length / 2)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="+", choices=("states", "latent"))
    parser.add_argument("--device-backend", default="triton", metavar="NAME")
    parser.add_argument("--warm", action="store_true", help="a few steps, so that kernels are compiled")
    parser.add_argument("--dry", action="store_true", help="float32 on the CPU, interpreted, tiny, nothing timed")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    findings = Findings()
    with tempfile.TemporaryDirectory(prefix="gpu-speed-") as folder:
        backend = arguments.device_backend
        speeds = HybridSpeeds(findings, Path(folder), backend, is_dry=arguments.dry, is_warming=arguments.warm)
        for part in arguments.parts:
            with findings.part(part):
                {"states": speeds.states, "latent": speeds.latent}[part]()
    return findings.report()


if __name__ == "__main__":
    sys.exit(main())
