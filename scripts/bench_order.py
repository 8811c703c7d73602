"""Prompt tokens that a job computes, in the order of its file and in that of `job.window_rows`.

    python scripts/bench_order.py shared [--rows 20000] [--beginnings 200] [--windows 1,8192]
    python scripts/bench_order.py base [--rows 2000] [--windows 1,8192] [--pairs 5]

Jobs of a tiny model with random weights, through launch.py. `shared`: rows with common beginnings, in random order, and
a cache for a tenth of the beginnings; the least is what has to be computed if nothing is computed twice. `base`: rows
that share nothing, each window once in a pair, for the cost of the order: processor seconds and steps, because other
programs of a machine move the wall clock. The last line is one JSON object.
"""

import argparse
import json
import random
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[1]
BLOCK_SIZE: Final = 16
VOCABULARY: Final = 512
MODEL: Final = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}
FIGURES: Final = ("computed_prompt_tokens", "steps", "preemptions", "generate_s", "wall_s", "peak_memory_bytes")


def main(arguments: list[str] | None = None) -> None:
    options = parse_arguments(arguments)
    prompts = shared_prompts(options) if options.kind == "shared" else own_prompts(options)
    num_blocks = options.blocks or cache_blocks(options)
    figures: dict[int, list[dict[str, Any]]] = {window: [] for window in options.windows}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_inputs(folder, prompts, options.output_tokens)
        for _ in range(options.pairs):
            for window in options.windows:
                keys = [f"job.window_rows={window}", f"cache.num_blocks={num_blocks}", *options.keys]
                figures[window].append(run_job(folder, keys, options.replicas))
                print(window, figures[window][-1], flush=True)
    least = least_tokens(prompts)
    print(f"{len(prompts)} rows, cache of {num_blocks} blocks, least computed prompt tokens {least:,}")
    for window, runs in figures.items():
        medians = {key: statistics.median([run[key] for run in runs]) for key in runs[0]}
        ratio = medians["computed_prompt_tokens"] / least
        print(f"window {window}: {ratio:.3f} of the least; {medians}")
    print(json.dumps({"kind": options.kind, "rows": len(prompts), "least": least, "figures": figures}))


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    parser.add_argument("kind", choices=("shared", "base"))
    parser.add_argument("keys", nargs="*", metavar="KEY=VALUE", help="as launch.py takes them")
    parser.add_argument("--rows", type=int, help="default 20000, or 2000 of `base`")
    parser.add_argument("--beginnings", type=int, default=200, help="default 200")
    parser.add_argument("--windows", type=parse_sizes, default=[1, 8192], help="job.window_rows, default 1,8192")
    parser.add_argument("--pairs", type=int, default=1, help="runs with each window, in turns (default 1)")
    parser.add_argument("--replicas", type=int, default=1, help="data-parallel ranks (default 1)")
    parser.add_argument("--blocks", type=int, help="of the cache; default: for a tenth of the beginnings, or 2048")
    for name, default in (("beginning-tokens", 256), ("own-tokens", 32), ("output-tokens", 2), ("seed", 1)):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default {default}")
    options = parser.parse_args(arguments)
    options.rows = options.rows or (20_000 if options.kind == "shared" else 2_000)
    return options


def parse_sizes(text: str) -> list[int]:
    return [int(size) for size in text.split(",")]


def shared_prompts(options: argparse.Namespace) -> list[list[int]]:
    """Rows of every beginning, as many of each as of the others, in random order."""
    source = random.Random(options.seed)
    beginnings = [random_ids(source, options.beginning_tokens) for _ in range(options.beginnings)]
    prompts = [
        beginnings[row % options.beginnings] + random_ids(source, options.own_tokens) for row in range(options.rows)
    ]
    source.shuffle(prompts)
    return prompts


def own_prompts(options: argparse.Namespace) -> list[list[int]]:
    """Rows of different lengths that share nothing."""
    source = random.Random(options.seed)
    return [random_ids(source, source.randint(8, options.beginning_tokens)) for _ in range(options.rows)]


def random_ids(source: random.Random, count: int) -> list[int]:
    return [source.randrange(3, VOCABULARY) for _ in range(count)]


def cache_blocks(options: argparse.Namespace) -> int:
    if options.kind == "base":
        return 2048
    num_blocks: int = options.beginnings // 10 * -(-options.beginning_tokens // BLOCK_SIZE)
    return num_blocks


def least_tokens(prompts: Sequence[Sequence[int]]) -> int:
    """Prompt tokens to compute if no full block is computed twice; a row's last token always is."""
    names: dict[tuple[int, ...], int] = {}
    known: set[tuple[int, int]] = set()
    num_tokens = 0
    for prompt in prompts:
        parent = -1
        num_blocks = (len(prompt) - 1) // BLOCK_SIZE
        for index in range(num_blocks):
            tokens = tuple(prompt[index * BLOCK_SIZE : (index + 1) * BLOCK_SIZE])
            block = (parent, names.setdefault(tokens, len(names)))
            num_tokens += 0 if block in known else BLOCK_SIZE
            known.add(block)
            parent = hash(block)
        num_tokens += len(prompt) - num_blocks * BLOCK_SIZE
    return num_tokens


def write_inputs(folder: Path, prompts: Iterable[Sequence[int]], output_tokens: int) -> None:
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps(MODEL))
    with open(folder / "rows.jsonl", "w") as stream:
        for prompt in prompts:
            row = {"prompt_token_ids": prompt, "max_tokens": output_tokens, "ignore_eos": True}
            stream.write(json.dumps(row) + "\n")


def run_job(folder: Path, keys: Sequence[str], num_replicas: int = 1) -> dict[str, Any]:
    """Figures of one job; its processor seconds are those of its process from start to end."""
    before = processor_s()
    given = [f"model.path={folder / 'model'}", "model.load_format=dummy", "model.dtype=float32", "device=cpu"]
    given += [f"job.input={folder / 'rows.jsonl'}", f"job.output={folder / 'out.jsonl'}", "job.resume=never"]
    given += [f"cache.block_size={BLOCK_SIZE}", "scheduler.max_num_seqs=32", *keys]
    start = []
    if num_replicas > 1:
        given.append(f"parallel.data_parallel_size={num_replicas}")
        start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_replicas)]
    command = [sys.executable, *start, str(ROOT / "launch.py"), *given]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    run_dir = folder / "out.jsonl.run"
    metrics = json.loads((run_dir / "metrics.json").read_text())
    subprocess.run(["rm", "-r", str(run_dir)], check=True)
    return {key: metrics[key] for key in FIGURES} | {"processor_s": round(processor_s() - before, 2)}


def processor_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
