"""What the log-probabilities that trainers ask for cost `LLM.generate`: pairs of calls with and without them."""

import argparse
import json
import os
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def bench_logprobs(options: argparse.Namespace) -> int:
    """What log-probabilities cost `LLM.generate`, under tensor parallelism where torchrun starts several ranks.

        torchrun --nproc-per-node 2 scripts/bench_runtime.py logprobs MODEL

    The same rows with `logprobs` and without, in turn, in one engine, after one call of each that is not counted:
    random token ids, each row with a seed of its own, sampled to its last token (a greedy row without log-probabilities
    takes a shorter way). The token ids must be equal. `overhead` is the median of the pairs' ratios, less one.
    """
    sys.path.insert(0, str(ROOT))
    from spmd_worker import LLM, SamplingParams

    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    common: dict[str, Any] = {"temperature": options.temperature, "max_tokens": options.tokens, "ignore_eos": True}
    params = {
        which: [SamplingParams(**common, seed=row, logprobs=asked) for row in range(options.rows)]
        for which, asked in (("with", options.logprobs), ("without", None))
    }
    seconds: dict[str, list[float]] = {"with": [], "without": []}
    with LLM(options.model, tensor_parallel_size=size, dtype=options.dtype, num_blocks=options.num_blocks) as llm:
        prompts = _prompts(options, llm.llm_engine.resolved.model_config.vocab_size)
        for number in range(1 + options.pairs):
            ids = {}
            # Which is first changes, because the machine warms up, or something else starts on it.
            for which in ("with", "without") if number % 2 else ("without", "with"):
                llm.reset_prefix_cache()
                began_s = time.perf_counter()
                outputs = llm.generate(prompts, params[which], use_tqdm=False)
                seconds[which].append(time.perf_counter() - began_s)
                ids[which] = [output.outputs[0].token_ids for output in outputs]
            if ids["with"] != ids["without"]:
                raise SystemExit("the token ids differ")
    if rank == 0:
        _show({which: spent[1:] for which, spent in seconds.items()}, options, size)
    return 0


def _prompts(options: argparse.Namespace, vocab_size: int) -> list[dict[str, list[int]]]:
    chance = random.Random(0)
    return [
        {"prompt_token_ids": chance.choices(range(vocab_size), k=options.prompt_tokens)} for _ in range(options.rows)
    ]


def _show(seconds: dict[str, list[float]], options: argparse.Namespace, num_ranks: int) -> None:
    ratios = [own / other for own, other in zip(seconds["with"], seconds["without"], strict=True)]
    for own, other, ratio in zip(seconds["with"], seconds["without"], ratios, strict=True):
        print(f"with {own:8.3f} s   without {other:8.3f} s   ratio {ratio:.4f}")
    about = {"rows": options.rows, "output_tokens": options.rows * options.tokens, "ranks": num_ranks}
    overhead = round(statistics.median(ratios) - 1, 4)
    print(json.dumps({**about, "logprobs": options.logprobs, **seconds, "overhead": overhead}))
