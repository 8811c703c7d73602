"""Rows of a small Gemma 3-like model with and without block tables of window groups: blocks in use, and seconds.

    python scripts/bench_windows.py [--num-tokens 32000] [--num-rows 1] [--num-new 32]

6 layers, the last with full attention, the others with a window of 1,024 tokens; random weights. Prints a line for
each turn, and one JSON object at the end.
"""

import argparse
import json
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from spmd_worker import LLM, SamplingParams

CONFIG = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "vocab_size": 2048,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 6,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "max_position_embeddings": 131072,
    "sliding_window": 1024,
    "query_pre_attn_scalar": 64,
    "eos_token_id": 1,
}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-tokens", type=int, default=32_000, help="tokens of each prompt")
    parser.add_argument("--num-rows", type=int, default=1, help="rows, all of them there at once")
    parser.add_argument("--num-new", type=int, default=32, help="tokens that each row generates")
    return parser.parse_args()


def run(folder: str, options: argparse.Namespace, *, window_groups: bool) -> tuple[dict[str, Any], list[list[int]]]:
    """Figures of one turn, and the ids of its rows."""
    chance = random.Random(0)
    rows = [
        {"prompt_token_ids": [chance.randrange(2, 2048) for _ in range(options.num_tokens)]}
        for _ in range(options.num_rows)
    ]
    length = options.num_tokens + options.num_new
    settings: dict[str, Any] = {"dtype": "bfloat16", "device": "cpu", "load_format": "dummy", "max_model_len": length}
    num_blocks = -(-length // 16) * options.num_rows + options.num_rows
    with LLM(folder, num_blocks=num_blocks, window_groups=window_groups, swap_space=0, **settings) as llm:
        scheduler, most = llm.llm_engine.scheduler, [0]
        schedule = scheduler.schedule

        def counted() -> Any:
            plan = schedule()
            most.append(scheduler.cache.num_used_blocks)
            return plan

        scheduler.schedule = counted  # type: ignore[method-assign]  # the blocks of each step are counted
        began_s = time.perf_counter()
        outputs = llm.generate(rows, SamplingParams(max_tokens=options.num_new, temperature=0, ignore_eos=True))
        seconds = time.perf_counter() - began_s
        block_bytes = llm.llm_engine.executor.get_kv_cache_specs()[0].block_bytes
    figures = {
        "window_groups": window_groups,
        "num_groups": scheduler.cache.num_groups,
        "seconds": round(seconds, 1),
        "most_blocks": max(most),
        "most_mib": round(max(most) * block_bytes / 2**20, 1),
        "last_mib": round(most[-1] * block_bytes / 2**20, 1),
    }
    return figures, [list(output.outputs[0].token_ids) for output in outputs]


def main() -> int:
    options = arguments()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(CONFIG))
        turns = [run(folder, options, window_groups=is_on) for is_on in (False, True)]
    for figures, _ in turns:
        print(*(f"{name}={value}" for name, value in figures.items()))
    are_equal = turns[0][1] == turns[1][1]
    print(json.dumps({"turns": [figures for figures, _ in turns], "equal_ids": are_equal}))
    return 0 if are_equal else 1


if __name__ == "__main__":
    sys.exit(main())
