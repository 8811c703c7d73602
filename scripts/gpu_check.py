"""What a GPU has to show, part by part, each in a process of its own and within its time: see gpu_check.sh.

    python scripts/gpu_check.py [--dry]

Prints what the parts print and, last, one JSON object: {"device", "python", "torch", "triton", "parts": {part:
{"returncode", "seconds", "result"}}, "failed", "not_run": {part: packages that it lacks}, "is_ok"}. `result` is the
JSON object that a part ends with, or its last lines. Exits with 1 when a part failed or did not run. Installs nothing.
"""

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NEEDED = ("torch", "triton", "numpy")
"""Modules without which there is nothing to ask."""
RUNTIME = ("hydra", "omegaconf", "yaml", "tokenizers", "jinja2", "tqdm")
TESTS = (*RUNTIME, "pytest", "pytest_timeout", "hypothesis", "transformers")
BENCHMARKS = {
    "llama-135m-like": (576, 1536, 30, 9, 3, 64, 49152),
    "qwen2.5-0.5b-like": (896, 4864, 24, 14, 2, 64, 151936),
    "llama-3.1-8b-like": (4096, 14336, 32, 32, 8, 128, 128256),
}
"""Hidden size, intermediate size, layers, query heads, key-value heads, head size, vocabulary."""
LARGEST, SMALLEST = "llama-3.1-8b-like", ("llama-135m-like", "tiny")
WORKER = "spmd_worker.worker.triton_worker.TritonWorker"
TRITON = f"executor.worker_cls={WORKER}"
OWN_PARTS = ("near_transformers", "kernels_on_a_gpu")
"""Words of the names of tests that are parts by themselves: `compare` and `kernels`."""
DRY_BENCHMARK = {"tiny": (64, 96, 2, 4, 2, 16, 320)}


@dataclass(frozen=True)
class Part:
    """A command and the seconds that it may take. `needs`: modules beside NEEDED. What it ends with: a JSON object, or
    where it `is_tests` pytest's count. `num_output_tokens`: what the rows of a benchmark have to answer.
    """

    name: str
    arguments: list[str]
    limit_s: float
    variables: dict[str, str] = field(default_factory=dict)
    needs: tuple[str, ...] = ()
    is_tests: bool = False
    num_output_tokens: int | None = None


def parts(folder: Path, *, is_dry: bool) -> list[Part]:
    """In the order of what is asked first. 565 seconds at most, on a GPU."""
    # Interpreted matmuls are numpy's: of OpenBLAS's kernels those for old processors add up all rows of a tile alike.
    interpreted = {"TRITON_INTERPRET": "1", "OPENBLAS_CORETYPE": "Nehalem"} if is_dry else {}
    probe = ["scripts/gpu_probe.py", *(["--dry"] if is_dry else [])]
    few = ["--device", "cpu", "--prompts", "2", "--tokens", "4"] if is_dry else []
    # Triton's interpreter does not support bfloat16.
    with_triton = ["--worker-cls", WORKER, *(["--dtypes", "float32"] if is_dry else [])]
    compared_by = (*RUNTIME, "transformers")
    # A dry run has minutes: what interprets is slow, and other work may be beside it. The tests build the library of
    # the CPU's kernels where it is not built yet.
    limits = (600.0,) * 7 if is_dry else (100.0, 55.0, 115.0, 35.0, 40.0, 30.0, 40.0)
    found = [
        Part("probe", probe, limits[0], interpreted),
        Part("kernels", ["tests/ops/kernels/triton_cases.py", *([] if is_dry else ["cuda"])], limits[1], interpreted),
        Part("tests", tests_of(ROOT / "tests", is_dry=is_dry), limits[2], needs=TESTS, is_tests=True),
        Part("compare", ["scripts/gpu_compare.py", *few], limits[3], needs=compared_by),
        Part("compare, triton", ["scripts/gpu_compare.py", *few, *with_triton], limits[4], interpreted, compared_by),
    ]
    for name, sizes in (DRY_BENCHMARK if is_dry else BENCHMARKS).items():
        write_model(folder / name, sizes)
        # Plain torch launches each sequence's attention by itself: fewer rows, and not the largest.
        plain, triton = ((2, 5, 3), (2, 5, 3)) if is_dry else ((64, 300, 32), (256, 300, 100))
        if name != LARGEST:
            command = benchmark(folder, name, "", sizes[-1], plain, is_dry=is_dry)
            found.append(Part(f"benchmark {name}", command, limits[5], {}, RUNTIME, num_output_tokens=asked(plain)))
        command = [*benchmark(folder, name, "-triton", sizes[-1], triton, is_dry=is_dry), TRITON]
        part = f"benchmark {name}, triton"
        found.append(Part(part, command, limits[6], interpreted, RUNTIME, num_output_tokens=asked(triton)))
        if name in SMALLEST:
            # What whole steps as graphs are worth, where launches cost most.
            command = [*command, "executor.enforce_eager=true"]
            part = f"benchmark {name}, eager triton"
            found.append(Part(part, command, limits[6], interpreted, RUNTIME, num_output_tokens=asked(triton)))
    return found


def tests_of(folder: Path, *, is_dry: bool) -> list[str]:
    """Of all files in `folder` that mark tests so, without collecting the others, those that are no part of their own.
    Its marker is what a file of tests has to name, in whichever way.
    """
    files = [path for path in sorted(folder.rglob("test_*.py")) if "mark.gpu" in path.read_text(encoding="utf-8")]
    others = " and ".join(f"not {words}" for words in OWN_PARTS)
    return ["-m", "pytest", "-q", "-m", "gpu", "-k", others, *(["--collect-only"] if is_dry else []), *map(str, files)]


def write_model(folder: Path, sizes: tuple[int, ...]) -> None:
    """A model of these sizes without weights."""
    hidden, intermediate, layers, heads, kv_heads, head_size, vocabulary = sizes
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_size,
        "vocab_size": vocabulary,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))


def benchmark(
    folder: Path, name: str, suffix: str, vocabulary: int, workload: tuple[int, int, int], *, is_dry: bool
) -> list[str]:
    """Rows of token ids: how many, of how many tokens, for how many more; the command that times them."""
    num_rows, prompt, output = workload
    rows = [
        {
            "prompt_token_ids": [3 + (row * 7919 + at * 31) % (vocabulary - 3) for at in range(prompt)],
            "max_tokens": output,
            "ignore_eos": True,
            "temperature": 0.0,
        }
        for row in range(num_rows)
    ]
    path = folder / f"{name}{suffix}.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    keys = ["model.load_format=dummy", f"device={'cpu' if is_dry else 'cuda'}", "cache.num_blocks=8192"]
    dry_keys = ("cache.num_blocks=64", "model.max_model_len=64", "model.dtype=float32")
    keys = [*keys[:2], *dry_keys] if is_dry else keys
    return ["scripts/bench_throughput.py", str(folder / name), str(path), *keys, "--no-job", "--no-split"]


def asked(workload: tuple[int, int, int]) -> int:
    """Output tokens of all rows."""
    return workload[0] * workload[2]


def run(part: Part) -> dict[str, object]:
    """Its output is shown as it comes; of what it ends with, the JSON object."""
    print(f"== {part.name}", flush=True)
    began = time.monotonic()
    # Cases of the kernels have helpers in tests/.
    folders = [str(ROOT), str(ROOT / "tests" / "support"), os.environ.get("PYTHONPATH", "")]
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(folders)}
    lines: list[str] = []
    process = subprocess.Popen(
        [sys.executable, *part.arguments],
        cwd=ROOT,
        env=variables | part.variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=part.limit_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        output, _ = process.communicate()
        output += f"\nended after {part.limit_s:.0f} s\n"
    print(output, flush=True)
    lines = output.splitlines()
    seconds = round(time.monotonic() - began, 1)
    result = lines[-5:] if part.is_tests else result_of(lines)
    return {"returncode": process.returncode, "seconds": seconds, "result": result}


def result_of(lines: list[str]) -> object:
    """The last line that is a JSON object, else the last five."""
    for line in reversed(lines):
        if line.startswith("{"):
            try:
                return json.loads(line)
            except json.JSONDecodeError:
                continue
    return lines[-5:]


def has_failed(part: Part, found: dict[str, object]) -> bool:
    """An exit status of 0 is not enough: a part has to say what it found, and that nothing is wrong."""
    result = found["result"]
    if found["returncode"] != 0:
        return True
    if part.is_tests:
        lines = result if isinstance(result, list) else []
        return not any(re.search(r"\b[1-9]\d*(/\d+)? (passed|tests? collected)\b", line) for line in lines)
    if not isinstance(result, dict) or not result:
        return True
    if part.num_output_tokens is not None and (
        result.get("error_rows") != 0 or result.get("output_tokens") != part.num_output_tokens
    ):
        return True
    if part.name == "kernels":
        return any(result.values())
    return bool(result.get("failed") or result.get("wrong")) or result.get("is_near") is False


def missing(names: Sequence[str]) -> list[str]:
    return [name for name in names if find_spec(name) is None]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry", action="store_true", help="the same code without a GPU: interpreted, and on the CPU")
    is_dry = parser.parse_args().dry
    wheels = "install them, or put wheels of them into a folder and name it with WHEELS="
    if lacking := missing(NEEDED):
        print(f"gpu_check: {sys.executable} has no {', '.join(lacking)}: {wheels}", file=sys.stderr)
        return 1
    import torch
    import triton

    if not is_dry and not torch.cuda.is_available():
        print("gpu_check: torch finds no CUDA device here: --dry runs the same code without one", file=sys.stderr)
        return 1
    about = {
        "device": "none: a dry run" if is_dry else torch.cuda.get_device_name(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        # Of the module: distributions have other names (pytorch-triton).
        "triton": triton.__version__,
    }
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        chosen = parts(Path(folder), is_dry=is_dry)
        not_run = {part.name: lacking for part in chosen if (lacking := missing(part.needs))}
        for name, lacking in not_run.items():
            print(f"gpu_check: {name} does not run without {', '.join(lacking)}: {wheels}", file=sys.stderr)
        found = {part.name: (part, run(part)) for part in chosen if part.name not in not_run}
    report = about | summary(found, not_run)
    print(json.dumps(report))
    return 0 if report["is_ok"] else 1


def summary(found: dict[str, tuple[Part, dict[str, object]]], not_run: dict[str, list[str]]) -> dict[str, object]:
    failed = [name for name, (part, each) in found.items() if has_failed(part, each)]
    results = {name: each for name, (_, each) in found.items()}
    return {"parts": results, "failed": failed, "not_run": not_run, "is_ok": not failed and not not_run}


if __name__ == "__main__":
    sys.exit(main())
