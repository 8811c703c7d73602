"""The rows of bench_adapters.py in vLLM, without and with the same LoRA adapters, in turns in one engine.

    python scripts/bench_adapters.py MODEL WORKLOAD --write FOLDER
    VLLM_PYTHON scripts/vllm_adapters.py MODEL FOLDER [--rows N] [--turns 1]

VLLM_PYTHON is the interpreter of an environment with vLLM, or its CPU build. FOLDER has what `--write` kept: adapters,
and rows.jsonl whose rows name them. Prefix caching is off, so that a turn computes every prompt, as there. The last
line is one JSON object.
"""

import argparse
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a Hugging Face model folder")
    parser.add_argument("folder", type=Path, help="of bench_adapters.py --write")
    parser.add_argument("--rows", type=int, help="the first N; default: all")
    parser.add_argument("--turns", type=int, default=1)
    options = parser.parse_args()
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    lines = (options.folder / "rows.jsonl").read_text(encoding="utf-8").splitlines()[: options.rows]
    run(options, [json.loads(line) for line in lines])


def run(options: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    from vllm import LLM, SamplingParams, __version__
    from vllm.inputs import TokensPrompt
    from vllm.lora.request import LoRARequest

    paths = sorted(path.parent for path in options.folder.glob("*/adapter_config.json"))
    adapters = {path.name: LoRARequest(path.name, index + 1, str(path)) for index, path in enumerate(paths)}
    rank = json.loads((paths[0] / "adapter_config.json").read_text(encoding="utf-8"))["r"]
    llm = LLM(
        options.model,
        max_num_seqs=256,
        max_model_len=1024,
        enable_lora=True,
        max_loras=len(adapters),
        max_lora_rank=rank,
        enable_prefix_caching=False,
    )
    prompts = [TokensPrompt(prompt_token_ids=row["prompt_token_ids"]) for row in rows]
    settings = [
        SamplingParams(temperature=0, max_tokens=row["max_tokens"], ignore_eos=True, detokenize=False) for row in rows
    ]
    of_rows = [adapters[row["adapter"]] for row in rows]
    # Kernels are compiled at their first use.
    for given in (None, of_rows[:8]):
        llm.generate(prompts[:8], settings[:8], lora_request=given, use_tqdm=False)
    seconds: dict[str, list[float]] = {"without": [], "with": []}
    for _ in range(options.turns):
        for name, given in (("without", None), ("with", of_rows)):
            start_s = time.perf_counter()
            llm.generate(prompts, settings, lora_request=given, use_tqdm=False)
            seconds[name].append(time.perf_counter() - start_s)
            print(f"  {name:8} {seconds[name][-1]:8.2f} s", flush=True)
    medians = {name: statistics.median(each) for name, each in seconds.items()}
    ratio = round(medians["without"] / medians["with"], 3)
    print(json.dumps({"vllm": __version__, "rows": len(rows), "adapters": len(adapters), **medians, "ratio": ratio}))


if __name__ == "__main__":
    main()
