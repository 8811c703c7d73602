"""Engines of 1, 2 and 4 ranks with kernels of a GPU, interpreted, that sum in leaves: a process of its own.

    OPENBLAS_CORETYPE=Nehalem TRITON_INTERPRET=1 python tests/ops/kernels/triton_leaves_engine.py
                                                                  prints one JSON object

Models of one layer in float32, a dense one with biases and one with experts, which ranks hold completely. Rows are
greedy and drawn, with log-probabilities.
"""

import json
import logging
import tempfile
from pathlib import Path

import torch

from spmd_worker import LLM, SamplingParams

SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "vocab_size": 64,
    "max_position_embeddings": 128,
    "eos_token_id": 2,
}
MODELS = {
    "dense": {
        "architectures": ["LlamaForCausalLM"],
        "intermediate_size": 160,
        "attention_bias": True,
        "mlp_bias": True,
    },
    "experts": {
        "architectures": ["Qwen2MoeForCausalLM"],
        "intermediate_size": 128,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 128,
        "shared_expert_intermediate_size": 128,
    },
}
BACKEND = "small_leaves.SmallLeaves"


def answers(folder: Path, size: int, *, is_invariant: bool = True, **settings: object) -> list:
    """Ids and log-probabilities of each row."""
    prompts = [{"prompt_token_ids": [3 + (row * 31 + at * 17) % 60 for at in range(1 + 18 * row)]} for row in range(2)]
    ways = ({"temperature": 0.0}, {"temperature": 1.0, "seed": 5, "top_k": 20})
    params = [SamplingParams(max_tokens=2, ignore_eos=True, logprobs=20, **way) for way in ways]
    executor = {} if size == 1 else {"distributed_executor_backend": "mp"}
    with LLM(
        folder, dtype="float32", device="cpu", load_format="dummy", device_backend=BACKEND, num_blocks=64,
        tensor_parallel_size=size, invariant_tensor_parallel=is_invariant, **executor, **settings,
    ) as llm:  # fmt: skip
        outputs = llm.generate(prompts, params, use_tqdm=False)
    found = []
    for output in outputs:
        completion = output.outputs[0]
        entries = completion.logprobs or []
        found.append(
            (list(completion.token_ids), [{token: each.logprob for token, each in at.items()} for at in entries])
        )
    return found


def main() -> None:
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    found: dict[str, bool] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for model, keys in MODELS.items():
            (folder / "config.json").write_text(json.dumps(SIZES | keys))
            settings = {"enable_expert_parallel": True} if model == "experts" else {}
            alone = answers(folder, 1)
            for size in (2, 4):
                found[f"{model}: {size} ranks have the bits of one"] = answers(folder, size, **settings) == alone
            if model == "dense":
                found["same bits in chunks"] = answers(folder, 1, max_num_batched_tokens=16, max_num_seqs=8) == alone
                without = [answers(folder, size, is_invariant=False) for size in (1, 4)]
                found["control: without leaves other bits"] = without[0] != without[1]
                found["control: leaves have bits of their own"] = without[0] != alone
    print(json.dumps(found))


if __name__ == "__main__":
    main()
