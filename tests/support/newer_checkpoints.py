"""Small checkpoints of families that transformers has after the tested release, with logits and greedy ids that a newer
one gave (`newer_reference.json`).

The record is made by `python tests/support/newer_checkpoints.py` where that release is imported. Tensors are not in it:
they are drawn anew from their names and shapes. Knows nothing of the runtime under test.
"""

import json
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import torch
from safetensors.torch import load_file, save_file

RECORD: Final = Path(__file__).with_name("newer_reference.json")
NEWER: Final = {
    "ExaoneForCausalLM": "exaone",
    "SarvamMoEForCausalLM": "sarvam_moe",
    "Param2MoEForCausalLM": "param2moe",
    "SarvamMLAForCausalLM": "sarvam_mla",
    "MiniCPM5MoeForCausalLM": "minicpm5_moe",
    "MiniCPM5MoEForCausalLM": "minicpm5_moe",
    "LaraMiniForCausalLM": "lara_mini",
}
"""transformers' `model_type` of each architecture of the family table that the tested release does not have."""
_SIZES: Final[dict[str, Any]] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 0.03,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_DENSE: Final = {"intermediate_size": 96, "num_hidden_layers": 3}
_SPARSE: Final = {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "n_shared_experts": 2}
_GROUPS: Final = {"n_group": 4, "topk_group": 2}
_LATENT: Final = {"kv_lora_rank": 32, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 48}
_YARN: Final = {"type": "deepseek_yarn", "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 8}
_LLAMA3: Final = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_STRETCHED: Final = {**_LLAMA3, "rope_theta": 10000.0, "original_max_position_embeddings": 32}
_NETS: Final = {f"linear_num_{part}_heads": number for part, number in (("key", 2), ("value", 4))}
CASES: Final[dict[str, dict[str, Any]]] = {
    "exaone": {**_DENSE, "rope_parameters": _STRETCHED},
    "sarvam_moe": {**_DENSE, **_SPARSE, **_GROUPS, "head_dim": 16, "attention_bias": True},
    "param2moe": {**_DENSE, **_SPARSE, "head_dim": 32},
    "sarvam_mla": {
        **_DENSE,
        **_SPARSE,
        **_LATENT,
        "num_key_value_heads": 4,
        "head_dim": 48,
        "rope_scaling": {**_YARN, "beta_slow": 0.5, "mscale": 1.0, "mscale_all_dim": 0.7},
    },
    "minicpm5_moe": {**_DENSE, **_SPARSE, **_GROUPS, "head_dim": 16, "attention_bias": True},
    "lara_mini": {
        **_NETS,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 12,
        "num_hidden_layers": 6,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 48,
        "head_dim": 16,
        "sliding_window": 5,
        "attention_bias": True,
    },
}
PROMPTS: Final = [[(7 * number + number * number) % 86 + 10 for number in range(length)] for length in (1, 17, 40)]
NUM_GREEDY: Final = 8


@cache
def record(name: str) -> Mapping[str, Any]:
    """What was recorded of a case: `config`, `defaults` of its class, `shapes` of tensors by their names in files, the
    last `logits` of each prompt, and `greedy` ids behind the second.
    """
    found: Mapping[str, Any] = json.loads(RECORD.read_text())["models"][name]
    return found


def write_newer(folder: Path, name: str) -> None:
    """The checkpoint of a case, as transformers saves it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(record(name)["config"]))
    save_file(_drawn(record(name)["shapes"]), folder / "model.safetensors", {"format": "pt"})


def _drawn(shapes: Mapping[str, list[int]]) -> dict[str, torch.Tensor]:
    """Tensors of these shapes, none of which is what a mistake would leave it at."""
    generator, found = torch.Generator().manual_seed(7), {}
    for name in sorted(shapes):
        noise = torch.randn(shapes[name], generator=generator)
        if noise.ndim < 2:
            found[name] = 0.3 * noise + float("norm" in name or ".ln_" in name)
            continue
        is_table = any(word in name for word in ("embed", "wte", "lm_head"))
        is_score = any(word in name for word in ("q_proj", "k_proj", "query_key_value", "gate.weight"))
        found[name] = noise * (0.5 if is_table else (2.0 if is_score else 1.4) * noise.shape[-1] ** -0.5)
    return found


def _recorded(name: str) -> dict[str, Any]:
    import transformers

    config = transformers.AutoConfig.for_model(name, **{**_SIZES, **CASES[name]})
    with TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        transformers.AutoModelForCausalLM.from_config(config).float().save_pretrained(folder)
        shapes = {each: list(tensor.shape) for each, tensor in load_file(path).items()}
        save_file(_drawn(shapes), path, {"format": "pt"})
        written = json.loads((Path(folder) / "config.json").read_text())
        config._experts_implementation = "eager"
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, config=config, dtype=torch.float32, attn_implementation="eager", use_kernels=False
        ).eval()

        def logits_of(prompt: list[int]) -> torch.Tensor:
            with torch.no_grad():
                return model(torch.tensor([prompt]), use_cache=False).logits[0, -1].float()

        logits, row = [[round(each, 6) for each in logits_of(prompt).tolist()] for prompt in PROMPTS], [*PROMPTS[1]]
        for _ in range(NUM_GREEDY):
            row.append(int(logits_of(row).argmax()))
    defaults = transformers.AutoConfig.for_model(name).to_dict()
    found = {"config": written, "defaults": defaults, "shapes": shapes, "logits": logits}
    return {**found, "greedy": row[-NUM_GREEDY:]}


def main() -> None:
    """Record all cases with the release of transformers that is imported."""
    import transformers

    found = {"transformers": transformers.__version__, "models": {name: _recorded(name) for name in CASES}}
    RECORD.write_text(json.dumps(found, sort_keys=True) + "\n")
    sys.stdout.write(f"{RECORD}: {', '.join(CASES)} by transformers {transformers.__version__}\n")


if __name__ == "__main__":
    main()
