"""A model with windows through the whole engine with kernels of a GPU, interpreted: a process of its own.

    OPENBLAS_CORETYPE=Nehalem TRITON_INTERPRET=1 python tests/ops/kernels/triton_windows_engine.py
                                                                       prints one JSON object

Rows have the same bits whether blocks behind a window go back to the pool or not; the device keeps tables of groups.
"""

import json
import tempfile
from pathlib import Path

from state_rows import answers_of

from spmd_worker import LLM, SamplingParams

CONFIG = {
    "architectures": ["GptOssForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 96,
    "num_local_experts": 2,
    "num_experts_per_tok": 1,
    "max_position_embeddings": 128,
    "sliding_window": 5,
    "eos_token_id": 2,
}
SETTINGS = {
    "dtype": "float32",
    "device": "cpu",
    "device_backend": "triton",
    "load_format": "dummy",
    "max_model_len": 64,
    "max_num_batched_tokens": 24,
    "max_num_seqs": 4,
    "block_size": 16,
    "num_blocks": 20,
}
HEAD = [5 + index * 7 % 80 for index in range(34)]
ROWS = [{"prompt_token_ids": [*HEAD, 7]}, {"prompt_token_ids": [*HEAD, 9]}, {"prompt_token_ids": [11, 12]}]
PARAMS = [
    SamplingParams(temperature=0.8, seed=index, max_tokens=3, ignore_eos=True, logprobs=1) for index in range(len(ROWS))
]


def main() -> None:
    found: dict[str, bool] = {}
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "config.json").write_text(json.dumps(CONFIG))
        with LLM(name, window_groups=False, **SETTINGS) as llm:
            expected = answers_of(llm.generate(ROWS, PARAMS, use_tqdm=False))
        with LLM(name, **SETTINGS) as llm:
            together, again = (answers_of(llm.generate(ROWS, PARAMS, use_tqdm=False)) for _ in range(2))
            found["there are three groups"] = llm.llm_engine.scheduler.cache.num_groups == 3
            planned = [*llm.llm_engine.executor.driver_worker.loaded.operations.attention._planned.values()]
            # Of the last step; two groups have one window.
            buffers = {plan.partial_sums.data_ptr() for each in planned for plan in each.plans.values()}
            found["groups of one window share a plan"] = len(planned) == 3 and len(buffers) == 2
            found["from the cache"] = llm.llm_engine.counters.num_cached_prompt_tokens > 32 and again == together
        found["bits of one group"] = together == expected
    print(json.dumps(found))


if __name__ == "__main__":
    main()
