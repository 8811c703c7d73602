"""Short texts to vectors: this runtime beside sentence-transformers and OpenVINO, in turns on one machine.

    python scripts/bench_embed.py WORK [--rows 100000] [--turns 3] [--sides job,embed,sentence-transformers,openvino]
                                  [--reference-python PATH] [--openvino-python PATH] [--openvino-model DIR]
                                  [--model DIR] [--dtype float32] [--threads N] [--output-format .parquet]
                                  [KEY=VALUE...]

WORK is a folder for what is made: a model in the shape of all-MiniLM-L6-v2 with random weights (unless `--model` names
one), the rows, their answers. Sides: `job` is `launch.py` on rows of /v1/embeddings, from the model that is loaded to
the output that is complete; `embed` one call of `LLM.embed`; `sentence-transformers` its own `encode`, with the best of
four batch sizes; `openvino` OpenVINO's embedding pipeline. The peers run in the environments whose interpreters are
named; a side whose environment lacks its package is left out and named. KEY=VALUE are keys of this runtime, such as
scheduler.max_num_batched_tokens=8192.

Every turn starts each side anew, one at a time; which is first changes. Tokens are those of the model's tokenizer, the
same for all. `ratios` are medians over the turns of a side's tokens per second by those of sentence-transformers, else
of `embed`; `largest_difference` is of the vectors of the first rows to those of the same side. Resident memory is in
MiB when 0, 10, 50 and 100 % of the rows are done. The last line is one JSON object.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from embed_sides.model_folder import Shape, draw_texts, write_folder

ROOT = Path(__file__).resolve().parents[1]
SIDES = ("job", "embed", "sentence-transformers", "openvino")
PEERS = {"sentence-transformers": "sentence_transformers", "openvino": "openvino_genai"}


def main(arguments: list[str] | None = None, shape: Shape | None = None) -> int:
    options = parse_arguments(arguments)
    options.rows_file = options.work / f"rows-{options.rows}.jsonl"
    if options.side:
        run_own(options)
        return 0
    prepare(options, shape or Shape())
    sides = [side for side in options.sides if has_package(options, side)]
    found: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
    for turn in range(options.turns):
        # Which is first changes, because the machine warms up, or something else starts on it.
        for side in sides[::-1] if turn % 2 else sides:
            found[side].append(start_side(options, side, found[side]))
            print(f"turn {turn + 1}: {side:<22} {found[side][-1]['seconds']:10.2f} s", flush=True)
    figures = summary(found)
    show(figures)
    about = {"rows": options.rows, "dtype": options.dtype, "threads": options.threads, "keys": options.keys}
    print(json.dumps({**about, **figures}))
    return 0


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path, help="a folder for what is made")
    parser.add_argument("keys", nargs="*", metavar="KEY=VALUE", help="of this runtime, as launch.py takes them")
    parser.add_argument("--rows", type=int, default=100_000, help="default 100000")
    parser.add_argument("--turns", type=int, default=3, help="default 3")
    parser.add_argument("--sides", type=lambda text: text.split(","), default=list(SIDES), help="default all four")
    parser.add_argument(
        "--reference-python", default=sys.executable, help="has sentence-transformers; default: this one"
    )
    parser.add_argument("--openvino-python", default=sys.executable, help="has openvino-genai; default: this one")
    parser.add_argument("--openvino-model", type=Path, help="exported before; default: exported once into WORK")
    parser.add_argument("--model", type=Path, help="a sentence-transformers folder; default: made in WORK")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"], help="default float32")
    parser.add_argument("--threads", type=int, help="of each side; default: what each takes by itself")
    parser.add_argument("--output-format", default=".parquet", choices=[".parquet", ".jsonl"], help="of the job")
    parser.add_argument("--side", help=argparse.SUPPRESS)
    # Keys may stand between options.
    options = parser.parse_intermixed_args(arguments)
    unknown = [side for side in options.sides if side not in SIDES]
    if unknown:
        parser.error(f"--sides has {unknown[0]!r}: give some of {', '.join(SIDES)}")
    options.work = options.work.resolve()
    options.model = (options.model or options.work / "minilm-l6-like").resolve()
    options.openvino_model = options.openvino_model and options.openvino_model.resolve()
    return options


def prepare(options: argparse.Namespace, shape: Shape) -> None:
    """Model folder and rows, once a WORK."""
    options.work.mkdir(parents=True, exist_ok=True)
    if not (options.model / "config.json").exists():
        write_folder(options.model, shape)
    if options.rows_file.exists():
        return
    made = options.rows_file.with_suffix(".partial")
    with made.open("w", encoding="utf-8") as stream:
        for index, text in enumerate(draw_texts(options.rows, shape.vocab_size)):
            body = {"model": "m", "input": text}
            row = {"custom_id": str(index), "method": "POST", "url": "/v1/embeddings", "body": body}
            stream.write(f"{json.dumps(row)}\n")
    made.rename(options.rows_file)


def has_package(options: argparse.Namespace, side: str) -> bool:
    """Whether a side can run; where not, it is named."""
    if side not in PEERS:
        return True
    source = f"import importlib.util as u, sys; sys.exit(u.find_spec({PEERS[side]!r}) is None)"
    python = interpreter(options, side)
    if subprocess.run([python, "-c", source], check=False).returncode == 0:
        return True
    print(f"left out: {side}, because {python} has no {PEERS[side]}", flush=True)
    return False


def interpreter(options: argparse.Namespace, side: str) -> str:
    return str({"openvino": options.openvino_python}.get(side, options.reference_python))


def start_side(options: argparse.Namespace, side: str, earlier: list[dict[str, Any]]) -> dict[str, Any]:
    """A side's figures, of a process of its own. A batch size that was found in an earlier turn is kept."""
    result = options.work / f"{side}.json"
    threads = [] if options.threads is None else ["--threads", str(options.threads)]
    if side in PEERS:
        own = [str(Path(__file__).resolve().parent / "embed_sides" / "peers.py"), side]
        own += [str(options.model), str(options.rows_file), str(result), "--dtype", options.dtype, *threads]
        own += ["--batch", str(earlier[0]["batch"])] if earlier else []
        own += ["--openvino-model", str(options.openvino_model)] if options.openvino_model else []
        command = [interpreter(options, side), *own]
    else:
        command = [sys.executable, str(Path(__file__).resolve()), str(options.work), *options.keys, "--side", side]
        command += ["--rows", str(options.rows), "--model", str(options.model), "--dtype", options.dtype]
        command += ["--output-format", options.output_format, *threads]
    variables = {} if options.threads is None else {"OMP_NUM_THREADS": str(options.threads)}
    subprocess.run(command, check=True, env={**os.environ, **variables})
    figures: dict[str, Any] = json.loads(result.read_text())
    return figures


def run_own(options: argparse.Namespace) -> None:
    """One side of this runtime, in this process."""
    sys.path.insert(0, str(ROOT))
    from embed_sides.ours import run_embed, run_job

    figures = {"job": run_job, "embed": run_embed}[options.side](options)
    (options.work / f"{options.side}.json").write_text(json.dumps(figures), encoding="utf-8")


def summary(found: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """What the turns come to."""
    counted = [each["tokens"] for turns in found.values() for each in turns if "tokens" in each]
    if not counted:
        raise SystemExit("no side of this runtime ran, so tokens were not counted: add job or embed to --sides")
    base = "sentence-transformers" if "sentence-transformers" in found else "embed" if "embed" in found else "job"
    rates = {side: [counted[0] / each["seconds"] for each in turns] for side, turns in found.items()}
    ratios = {
        side: statistics.median(own / other for own, other in zip(each, rates[base], strict=True))
        for side, each in rates.items()
    }
    return {
        "tokens": counted[0],
        "tokens_per_second": {side: [round(each, 1) for each in own] for side, own in rates.items()},
        "base": base,
        "ratios": {side: round(each, 4) for side, each in ratios.items()},
        "largest_difference": {side: largest_difference(turns[-1], found[base][-1]) for side, turns in found.items()},
        "memory_mib": {side: turns[-1]["memory_mib"] for side, turns in found.items()},
        "batch": {side: turns[0]["batch"] for side, turns in found.items() if "batch" in turns[0]},
    }


def largest_difference(own: dict[str, Any], other: dict[str, Any]) -> float:
    """Between numbers of the first rows' vectors."""
    pairs = zip(own["sample"], other["sample"], strict=True)
    return max(abs(x - y) for one, two in pairs for x, y in zip(one, two, strict=True))


def show(figures: dict[str, Any]) -> None:
    print(f"{figures['tokens']:,} tokens; beside {figures['base']}; memory in MiB by share of the rows")
    for side, rates in figures["tokens_per_second"].items():
        memory = ", ".join(f"{mark} %: {mib:,.0f}" for mark, mib in figures["memory_mib"][side].items())
        print(
            f"  {side:<22} {statistics.median(rates):12,.0f} tokens/s   ratio {figures['ratios'][side]:.3f}   "
            f"apart {figures['largest_difference'][side]:.1e}   {memory}"
        )


if __name__ == "__main__":
    sys.exit(main())
