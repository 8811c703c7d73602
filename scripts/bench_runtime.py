"""What the control path costs: admission and preemption, the cache's bookkeeping, agreeing on a step, the journal,
log-probabilities, the masks of forms, the batches of a device, the host's part of a step, a thousand ranks.

    python scripts/bench_runtime.py admission [--share 0.3] [--rows 256]
    python scripts/bench_runtime.py cache [--blocks 1000,1000000] [--rounds 400]
    python scripts/bench_runtime.py lockstep [--ranks 2,4] [--sequences 16,256,1024] [--steps 300]
    python scripts/bench_runtime.py journal MODEL WORKLOAD [KEY=VALUE...] [--pairs N]
    torchrun --nproc-per-node 2 scripts/bench_runtime.py logprobs MODEL [--logprobs 0] [--rows 256] [--pairs N]
    python scripts/bench_runtime.py masks MODEL [KEY=VALUE...] [--rows 256] [--steps 40] [--turns 5]
    python scripts/bench_runtime.py batches [--sequences 256] [--contexts 400,4096] [--steps 60] [--turns 6]
    python scripts/bench_runtime.py host [--sequences 256] [--context 200] [--steps 40] [--turns 6]
    python scripts/bench_runtime.py ranks [--ranks 1024] [--sequences 256,1024,4096] [--steps 200] [--rounds 100]

Each prints a table and, as its last line, one JSON object; NAME --help says what is measured. Only `journal`,
`logprobs` and `masks` run a model.
"""

import argparse
import inspect
import sys
from collections.abc import Callable
from pathlib import Path

from control_path.admission import bench_admission
from control_path.batches import bench_batches
from control_path.cache import bench_cache
from control_path.host import bench_host
from control_path.journal import bench_journal
from control_path.lockstep import bench_lockstep
from control_path.logprobs import bench_logprobs
from control_path.masks import bench_masks
from control_path.ranks import bench_ranks


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    return int(options.bench(options))


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    parsers = parser.add_subparsers(required=True, metavar="NAME")

    def add(name: str, bench: Callable[[argparse.Namespace], int]) -> argparse.ArgumentParser:
        text = inspect.getdoc(bench) or ""
        added = parsers.add_parser(name, help=text.splitlines()[0], description=text, formatter_class=layout)
        added.set_defaults(bench=bench)
        return added

    admission = add("admission", bench_admission)
    admission.add_argument("--share", type=float, default=0.3, help="of the blocks that the rows want (default 0.3)")
    admission.add_argument("--rows", type=int, default=256, help="sequences in all (default 256)")
    cache = add("cache", bench_cache)
    cache.add_argument("--blocks", type=parse_sizes, default=[1000, 1_000_000], help="default 1000,1000000")
    cache.add_argument("--rounds", type=int, default=400, help="rounds measured (default 400)")
    lockstep = add("lockstep", bench_lockstep)
    lockstep.add_argument("--ranks", type=parse_sizes, default=[2, 4], help="numbers of ranks (default 2,4)")
    lockstep.add_argument("--sequences", type=parse_sizes, default=[16, 256, 1024], help="default 16,256,1024")
    lockstep.add_argument("--steps", type=int, default=300, help="steps measured each way (default 300)")
    lockstep.add_argument("--results", type=Path, help=argparse.SUPPRESS)
    journal = add("journal", bench_journal)
    journal.add_argument("model", type=Path, help="a Hugging Face model folder")
    journal.add_argument("workload", type=Path, help="a JSONL file of rows")
    journal.add_argument("keys", nargs="*", metavar="KEY=VALUE", help="as launch.py takes them")
    journal.add_argument("--pairs", type=int, default=5, help="runs of each kind (default 5)")
    logprobs = add("logprobs", bench_logprobs)
    logprobs.add_argument("model", type=Path, help="a Hugging Face model folder")
    for name, default in (("logprobs", 0), ("rows", 256), ("prompt-tokens", 64), ("tokens", 128), ("pairs", 5)):
        logprobs.add_argument(f"--{name}", type=int, default=default, help=f"default {default}")
    logprobs.add_argument("--temperature", type=float, default=1.0, help="default 1")
    logprobs.add_argument("--dtype", default="auto", help="default auto")
    logprobs.add_argument("--num-blocks", type=int, help="default: by the memory there is")
    masks = add("masks", bench_masks)
    masks.add_argument("model", help="a Hugging Face model folder with a tokenizer")
    masks.add_argument(
        "keys", nargs="*", metavar="KEY=VALUE", help="arguments of LLM: dtype=bfloat16 load_format=dummy"
    )
    masks.add_argument("--rows", type=int, default=256, help="sequences (default 256)")
    masks.add_argument("--steps", type=int, default=40, help="steps measured in each turn (default 40)")
    masks.add_argument("--turns", type=int, default=5, help="turns (default 5)")
    batches = add("batches", bench_batches)
    batches.add_argument("--sequences", type=int, default=256, help="that decode (default 256)")
    batches.add_argument("--contexts", type=parse_sizes, default=[400, 4096], help="tokens of each (default 400,4096)")
    batches.add_argument("--steps", type=int, default=60, help="steps measured in each turn (default 60)")
    batches.add_argument("--turns", type=int, default=6, help="turns of both ways (default 6)")
    host = add("host", bench_host)
    host.add_argument("--sequences", type=int, default=256, help="that decode (default 256)")
    host.add_argument("--context", type=int, default=200, help="tokens of each prompt (default 200)")
    host.add_argument("--steps", type=int, default=40, help="steps measured in each turn (default 40)")
    host.add_argument("--turns", type=int, default=6, help="turns of both ways (default 6)")
    ranks = add("ranks", bench_ranks)
    ranks.add_argument("--ranks", type=int, default=1024, help="of one replica (default 1024)")
    ranks.add_argument("--sequences", type=parse_sizes, default=[256, 1024, 4096], help="default 256,1024,4096")
    ranks.add_argument("--prompt-tokens", type=int, default=256, help="of each row (default 256)")
    ranks.add_argument("--output-tokens", type=int, default=256, help="of each row (default 256)")
    ranks.add_argument("--steps", type=int, default=200, help="of a replica (default 200)")
    ranks.add_argument("--rounds", type=int, default=100, help="of an exchange (default 100)")
    ranks.add_argument("--fanouts", type=parse_sizes, default=[4, 8, 16, 32], help="modelled (default 4,8,16,32)")
    ranks.add_argument("--latency-us", type=float, default=60.0, help="of a hop, waking included (default 60)")
    ranks.add_argument("--gigabits", type=float, default=25.0, help="of a link, a second (default 25)")
    return parser.parse_args(arguments)


def parse_sizes(text: str) -> list[int]:
    return [int(size) for size in text.split(",")]


if __name__ == "__main__":
    sys.exit(main())
