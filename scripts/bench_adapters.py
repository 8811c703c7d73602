"""Speed of rows with LoRA adapters beside the same rows without, in turns in one engine.

    python scripts/bench_adapters.py MODEL WORKLOAD [KEY=VALUE...] [--adapters 8] [--rank 16] [--turns 3]
    torchrun --nproc-per-node 2 scripts/bench_adapters.py MODEL WORKLOAD parallel.tensor_parallel_size=2

MODEL is a Hugging Face folder, WORKLOAD a JSONL file of plain rows, KEY=VALUE as launch.py takes them. Adapters of all
linear modules with random matrices are written to a temporary folder (`--write FOLDER` keeps them, for peers). Row i
has adapter i modulo their number. Each turn runs all rows without adapters, then all rows with them, each with an empty
prefix cache; the ratio is that of a turn's two times. The last line is one JSON object.
"""

import argparse
import json
import statistics
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bench_throughput import Pass, run_rows

ROOT = Path(__file__).resolve().parents[1]
CONFIG = {"peft_type": "LORA", "bias": "none", "target_modules": "all-linear"}


def main(arguments: list[str] | None = None) -> None:
    options = parse_arguments(arguments)
    sys.path.insert(0, str(ROOT))
    with TemporaryDirectory() as scratch:
        # Each rank writes its own: the same files, of the same digests.
        run(options, options.write or Path(scratch))


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a Hugging Face model folder")
    parser.add_argument("workload", type=Path, help="a JSONL file of plain rows")
    parser.add_argument("keys", nargs="*", metavar="KEY=VALUE", help="as launch.py takes them")
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--threads", type=int, help="of this rank; default: torch's")
    parser.add_argument("--write", type=Path, metavar="FOLDER", help="keep the adapters and the rows there")
    # Keys may stand between options.
    return parser.parse_intermixed_args(arguments)


def run(options: argparse.Namespace, folder: Path) -> None:
    import torch

    from spmd_worker.base.config.compose import compose_run
    from spmd_worker.engine.startup import read_run, start_engine

    adapters = {f"adapter-{index}": folder / f"adapter-{index}" for index in range(options.adapters)}
    for seed, each in enumerate(adapters.values()):
        write_adapter(options.model, each, options.rank, seed)
    rows = write_rows(options.workload, folder / "rows.jsonl", list(adapters))
    if options.threads:
        torch.set_num_threads(options.threads)
    named = ",".join(f"{name}: {path}" for name, path in adapters.items())
    keys = [f"model.path={options.model}", f"model.max_lora_rank={options.rank}", f"model.adapters={{{named}}}"]
    config = compose_run(ROOT / "conf", [*keys, f"job.input={options.workload}", *options.keys])
    engine = start_engine(read_run(config))
    plain, adapted = [], []
    for _ in range(options.turns):
        for passes, path in ((plain, options.workload), (adapted, rows)):
            engine.changes.reset_prefix_cache()
            done = run_rows(engine, path=str(path)) if engine.is_first_rank else engine.follow_round()
            passes.append(done)
    is_first = engine.is_first_rank
    engine.shutdown()
    if is_first:
        show(plain, adapted, options, torch.get_num_threads())


def write_adapter(model: Path, folder: Path, rank: int, seed: int) -> None:
    """Random matrices for every matrix of a layer, as PEFT would write them, in bfloat16."""
    import torch
    from safetensors import safe_open
    from safetensors.torch import save_file

    generator, tensors = torch.Generator().manual_seed(seed), {}
    for path in sorted(model.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in sorted(file.keys()):
                shape, module = file.get_slice(name).get_shape(), name.removesuffix(".weight")
                if len(shape) == 2 and ".layers." in name and module != name:
                    a = torch.randn(rank, shape[1], generator=generator) * shape[1] ** -0.5
                    b = torch.randn(shape[0], rank, generator=generator) * 0.02
                    tensors[f"base_model.model.{module}.lora_A.weight"] = a.bfloat16()
                    tensors[f"base_model.model.{module}.lora_B.weight"] = b.bfloat16()
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    (folder / "adapter_config.json").write_text(json.dumps({**CONFIG, "r": rank, "lora_alpha": rank}))


def write_rows(workload: Path, path: Path, names: list[str]) -> Path:
    """The rows, each with the next adapter."""
    lines = workload.read_text(encoding="utf-8").splitlines()
    rows = [{**json.loads(line), "adapter": names[index % len(names)]} for index, line in enumerate(lines)]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return path


def show(plain: list[Pass], adapted: list[Pass], options: argparse.Namespace, num_threads: int) -> None:
    assert not any(each.num_error_rows for each in (*plain, *adapted)), "some rows had errors"
    ratios = [without.generate_s / each.generate_s for without, each in zip(plain, adapted, strict=True)]
    for without, each, ratio in zip(plain, adapted, ratios, strict=True):
        print(f"  without {without.generate_s:8.2f} s   with {each.generate_s:8.2f} s   speed {ratio:.3f}")
    figures: dict[str, Any] = {
        "model": str(options.model),
        "workload": options.workload.name,
        "adapters": options.adapters,
        "rank": options.rank,
        "threads": num_threads,
        "without": statistics.median([each.generate_s for each in plain]),
        "with": statistics.median([each.generate_s for each in adapted]),
        "ratios": [round(each, 3) for each in ratios],
        "ratio": round(statistics.median(ratios), 3),
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
