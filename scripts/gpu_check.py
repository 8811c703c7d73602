"""Checks of a GPU, part by part, each in a process of its own and within its time: see gpu_check.sh.

    python scripts/gpu_check.py [--correctness | --speeds] [--only WORDS] [--list] [--out FILE] [--dry]
    python scripts/gpu_check.py --write-docs RESULTS.jsonl [--commit COMMIT]

Correctness parts run side by side, with those that fill Triton's cache for the speeds; parts that need the GPU for
themselves after them, then speeds, one at a time. A part that fails, is late or is not there takes no other down.

Prints one JSON line a part, {"part", "kind", "state", "seconds", "why", "figures", "result"}, the outputs of parts that
are not ok, a table, and last one JSON object: {"device", "python", "torch", "triton", "commit", "command", "date",
"seconds", "states": {part: state}, "failed", "not_run": {part: why}, "is_ok"}. `state` is "ok", "failed", "late",
"not offered" or "not run". Exits with 1 when a part failed, was late or did not run. Installs nothing.

--write-docs puts the figures of such a file into docs/lab/gpu_figures.md.
"""

import argparse
import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from threading import Lock

sys.path.insert(0, str(Path(__file__).resolve().parent))

import gpu_report

ROOT = Path(__file__).resolve().parents[1]
BACKEND = "triton"
"""Device backend of parts that ask for our kernels."""
DEFAULT_BACKEND = "auto"
"""Without a name: ours where it can be."""
NEEDED = ("torch", "triton", "numpy")
"""Modules without which there is nothing to ask."""
RUNTIME = ("hydra", "omegaconf", "yaml", "tokenizers", "jinja2", "tqdm")
NEEDS = {
    "scripts/gpu_bits.py": (*RUNTIME, "transformers"),
    "scripts/gpu_compare.py": (*RUNTIME, "transformers"),
    "scripts/gpu_media.py": (*RUNTIME, "transformers", "PIL"),
    "scripts/gpu_jobs.py": RUNTIME,
    "scripts/gpu_quality.py": RUNTIME,
    "scripts/gpu_speed.py": RUNTIME,
    "scripts/gpu_hybrid_speed.py": RUNTIME,
}
WITHOUT_TRITON = ("scripts/gpu_bits.py", "scripts/gpu_media.py", "scripts/gpu_jobs.py", "scripts/gpu_quality.py")
"""Dry runs of these use the CPU's own kernels."""
TESTS = (*RUNTIME, "pytest", "pytest_timeout", "hypothesis", "transformers")
OWN_PARTS = ("near_transformers", "kernels_on_a_gpu")
"""Words of the names of tests that are parts by themselves: `compare` and `cases`."""
EVERYTHING = ("uvicorn", "starlette")
"""Modules without which some module of the runtime cannot be imported."""
FORKING_FILES = ("test_embedding_manners.py",)
"""Files whose ranks are forked from a process that has imported all modules of the runtime."""
SPLIT_FILE = Path("scenarios") / "test_gpu.py"
ALONE = ("cache_is_sized",)
"""Words of the names of tests that have the GPU for themselves."""
FAMILIES = ("llama", "qwen3", "gemma3", "mixtral")
HYBRIDS = ("qwen3_5", "falcon_h1", "nemotron_h", "lfm2", "deepseek_v3", "gemma4")
"""Families with recurrent states, latent attention or heads of two sizes."""
BITS_MODELS = ("dense", "gemma", "experts", "encoder", "stored", "adapters", "expert_adapters")
BITS_MODELS += ("states", "mamba", "conv", "latent", "chosen", "compressed", "shapes")
CORRECTNESS_S, TOGETHER_S, ALL_S, DRY_S = 90.0, 105.0, 240.0, 1100.0
"""Seconds of the correctness parts alone, of these with those that warm speeds, of all, and of a dry run."""
LONGEST_CORRECTNESS_S, ALONE_S, SHORTEST_S = 85.0, 10.0, 3.0
SIDE_BY_SIDE = 24
"""Maximum number of processes: each has a GPU context of half a GiB, and most wait for the GPU."""


@dataclass(frozen=True)
class Part:
    """A command and the seconds that it may take. `kind`: "bits", "warm", "alone" or "speed". `needs`: modules beside
    NEEDED. What it ends with: a JSON object, or where it `is_tests` pytest's count.
    """

    name: str
    kind: str
    arguments: list[str]
    limit_s: float
    variables: dict[str, str] = field(default_factory=dict)
    needs: tuple[str, ...] = ()
    is_tests: bool = False


@dataclass(frozen=True)
class Outcome:
    """Result of a part. `why` explains it where it is not ok."""

    part: Part
    state: str
    seconds: float = 0.0
    why: str = ""
    result: dict[str, object] = field(default_factory=dict)
    lines: tuple[str, ...] = ()

    def record(self) -> dict[str, object]:
        """The part's JSON line."""
        result = dict(self.result)
        figures = result.pop("figures", [])
        named = {"part": self.part.name, "kind": self.part.kind, "state": self.state, "seconds": self.seconds}
        return {**named, "why": self.why, "figures": figures, "result": result}


def parts(*, is_dry: bool) -> list[Part]:
    """All of them, in the order in which they start."""
    # A dry run has minutes: what interprets is slow, and other work may be beside it.
    longest_s = DRY_S if is_dry else LONGEST_CORRECTNESS_S
    return [
        *(_part(name, "bits", command, longest_s, is_dry) for name, command in correctness_commands(is_dry).items()),
        *test_parts(ROOT / "tests", longest_s, is_dry=is_dry),
        *speed_parts(is_dry=is_dry),
    ]


def correctness_commands(is_dry: bool) -> dict[str, str]:
    """Commands by name; a dry run has fewer, with fewer rows."""
    dry, ours = " --dry" if is_dry else "", f"--device-backend {BACKEND}"
    found = {f"bits {name}": f"scripts/gpu_bits.py {name} {ours}{dry}" for name in BITS_MODELS}
    if is_dry:
        compare = "scripts/gpu_compare.py --device cpu --tiny --prompts 2 --tokens 3 --dtypes float32"
        found |= {
            "compare llama": f"{compare} --strict {ours}",
            "compare hybrids": f"{compare} --strict {ours} --families {' '.join(HYBRIDS)}",
            "compare plain torch": f"{compare} --device-backend torch",
        }
    else:
        compare = f"scripts/gpu_compare.py --prompts 256 --tokens 16 --device-backend {DEFAULT_BACKEND}"
        found |= {f"compare {name}": f"{compare} --strict --dtypes float32 --families {name}" for name in FAMILIES}
        found["compare llama bfloat16"] = f"{compare} --dtypes bfloat16"
        few = "scripts/gpu_compare.py --prompts 8 --tokens 16 --dtypes float32 float16 bfloat16"
        found["compare plain torch"] = f"{few} --device-backend torch"
        fewer = "scripts/gpu_compare.py --prompts 64 --tokens 16 --strict --dtypes float32 --families"
        found |= {f"compare {name}": f"{fewer} {name} --device-backend {DEFAULT_BACKEND}" for name in HYBRIDS}
        fewest = "scripts/gpu_compare.py --prompts 4 --tokens 4 --dtypes float32"
        found["compare hybrids plain torch"] = f"{fewest} --device-backend torch --families {' '.join(HYBRIDS)}"
    for name in ("images", "encoder_decoder"):
        found[f"compare {name}"] = f"scripts/gpu_media.py {name} --device-backend {BACKEND}{dry}"
        if not is_dry:
            found[f"compare {name} plain torch"] = f"scripts/gpu_media.py {name} --device-backend torch"
    for path in sorted((ROOT / "tests" / "ops" / "kernels").glob("triton_*cases.py")):
        name = f"cases {path.stem.removeprefix('triton_').removesuffix('cases').strip('_')}".strip()
        found[name] = f"{path.relative_to(ROOT)}{'' if is_dry else ' cuda'}"
    found["probe bits"] = f"scripts/gpu_probe.py --only bits{dry}"
    jobs = f"--device-backend {DEFAULT_BACKEND}{dry}"
    found |= {f"job {name}": f"scripts/gpu_jobs.py {name} {jobs}" for name in ("demo", "two_ranks", "leaves")}
    return {**found, "quality fp8": f"scripts/gpu_quality.py {ours}{dry}"}


def speed_parts(*, is_dry: bool) -> list[Part]:
    """Each with one before it that launches the same kernels once, so that they are compiled while others run."""
    ours = f"--device-backend {BACKEND}"
    commands = {
        "8b": (f"scripts/gpu_speed.py 8b {ours}", 90.0),
        "matmul": ("scripts/gpu_probe.py --only matmul,gated", 30.0),
        "attention": ("scripts/gpu_probe.py --only attention", 20.0),
        "leaves": ("scripts/gpu_leaves.py", 25.0),
        "adapter kernels": ("scripts/gpu_probe.py --only adapters", 15.0),
        "experts": (f"scripts/gpu_speed.py experts {ours}", 30.0),
        "135m": (f"scripts/gpu_speed.py 135m {ours}", 40.0),
        "fp8": (f"scripts/gpu_speed.py fp8 {ours}", 45.0),
        "adapters": (f"scripts/gpu_speed.py adapters {ours}", 45.0),
        "states": (f"scripts/gpu_hybrid_speed.py states {ours}", 25.0),
        "latent": (f"scripts/gpu_hybrid_speed.py latent {ours}", 25.0),
    }
    found = []
    for name, (command, limit_s) in commands.items():
        if is_dry:
            found.append(_part(f"speed {name}", "speed", f"{command} --dry", DRY_S, is_dry))
        else:
            found.append(_part(f"warm {name}", "warm", f"{command} --warm", LONGEST_CORRECTNESS_S, is_dry))
            found.append(_part(f"speed {name}", "speed", command, limit_s, is_dry))
    return found


def _part(name: str, kind: str, command: str, limit_s: float, is_dry: bool) -> Part:
    arguments = command.split()
    # Interpreted matmuls are numpy's: of OpenBLAS's kernels those for old processors add up all rows of a tile alike.
    interpreted = {"TRITON_INTERPRET": "1", "OPENBLAS_CORETYPE": "Nehalem"}
    is_interpreted = is_dry and arguments[0] not in WITHOUT_TRITON
    return Part(name, kind, arguments, limit_s, interpreted if is_interpreted else {}, NEEDS.get(arguments[0], ()))


def test_parts(folder: Path, limit_s: float, *, is_dry: bool) -> list[Part]:
    """Tests marked gpu that are no part of their own: each that `SPLIT_FILE` marks by itself, and those of other files
    together. What uses the GPU's free memory is alone.
    """
    split = folder / SPLIT_FILE
    # A dry run only collects them.
    has_split = split.exists() and not is_dry
    marked = re.findall(r"@pytest\.mark\.gpu\ndef (\w+)", split.read_text(encoding="utf-8")) if has_split else []
    found = []
    for name in marked:
        if not any(words in name for words in OWN_PARTS):
            is_alone = any(words in name for words in ALONE)
            command = pytest_of([f"{split}::{name}"], is_dry=is_dry)
            kind, limit = ("alone", 30.0) if is_alone else ("bits", limit_s)
            found.append(Part(f"test {name.removeprefix('test_')}", kind, command, limit, {}, TESTS, is_tests=True))
    others = [str(path) for path in marked_files(folder) if path != split or is_dry]
    forking = [path for path in others if Path(path).name in FORKING_FILES and not is_dry]
    plain = [path for path in others if path not in forking]
    found.append(Part("tests", "bits", pytest_of(plain, is_dry=is_dry), limit_s, {}, TESTS, is_tests=True))
    if forking:
        needs = (*TESTS, *EVERYTHING)
        found.append(Part("tests ranks", "bits", pytest_of(forking, is_dry=is_dry), limit_s, {}, needs, is_tests=True))
    return found


def pytest_of(asked: Sequence[str], *, is_dry: bool) -> list[str]:
    """Pytest command of these files' tests marked gpu that are no part of their own."""
    others = " and ".join(f"not {words}" for words in OWN_PARTS)
    how = ["--collect-only"] if is_dry else ["-p", "no:cacheprovider"]
    return ["-m", "pytest", "-q", "-m", "gpu", "-k", others, *how, *asked]


def marked_files(folder: Path) -> list[Path]:
    """The files in `folder` that mark tests as gpu, found without collecting the others. Its marker is what a file of
    tests has to name, in whichever way.
    """
    return [path for path in sorted(folder.rglob("test_*.py")) if "mark.gpu" in path.read_text(encoding="utf-8")]


def chosen_parts(found: Sequence[Part], kinds: Sequence[str], words: Sequence[str]) -> list[Part]:
    """Those of `kinds` whose name is among `words`, or has one of them; all if there are no words. Raises ValueError
    for a word that no part has.
    """
    unknown = [word for word in words if not any(word == part.name or word in part.name.split() for part in found)]
    if unknown:
        raise ValueError(f"--only {','.join(unknown)} names no part: --list has their names")
    return [
        part
        for part in found
        if part.kind in kinds and (not words or any(word == part.name or word in part.name.split() for word in words))
    ]


def run(part: Part, limit_s: float, cache: Path) -> Outcome:
    """Output is kept; of what it ends with, the JSON object counts."""
    began = time.monotonic()
    # Cases of the kernels have helpers in tests/.
    folders = [str(ROOT), str(ROOT / "tests" / "support"), os.environ.get("PYTHONPATH", "")]
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(folders), "TRITON_CACHE_DIR": str(cache)}
    if part.kind == "bits":
        # The cores are shared by many.
        variables.setdefault("OMP_NUM_THREADS", "1")
    behind = ["nice", "-n", "10"] if part.kind == "warm" else []
    command = [*behind, sys.executable, *part.arguments]
    # A file, not a pipe: whoever outlives the part would hold the pipe open.
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, env=variables | part.variables, stdout=output, stderr=output, start_new_session=True
        )
        _running[process.pid] = process
        try:
            is_late = not _has_ended(process, limit_s)
            if is_late:
                end(process)
        finally:
            del _running[process.pid]
        output.seek(0)
        lines = tuple(output.read().splitlines())
    seconds = round(time.monotonic() - began, 1)
    if is_late:
        return Outcome(part, "late", seconds, f"ended after {limit_s:.0f} s", lines=lines)
    return judged(part, process.returncode, seconds, lines)


_running: dict[int, "subprocess.Popen[bytes]"] = {}
"""Parts that run now, each with processes of its own."""


def _has_ended(process: "subprocess.Popen[bytes]", limit_s: float) -> bool:
    try:
        process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return False
    return True


def end(process: "subprocess.Popen[bytes]") -> None:
    """A launcher ends its ranks, which are in sessions of their own, when it is asked to end."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        if _has_ended(process, 3.0):
            return


def end_all(number: int, frame: object) -> None:
    """End all parts, on the signals that end the check."""
    del frame
    for pid in started():
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGTERM)
    os._exit(128 + number)


def started() -> set[int]:
    """Process ids of all parts, with one that is being started: it runs before this process knows its id."""
    found = set(_running)
    for children in Path("/proc/self/task").glob("*/children"):
        # A thread may have ended meanwhile.
        with suppress(OSError):
            found |= set(map(int, children.read_text().split()))
    return found


def judged(part: Part, returncode: int, seconds: float, lines: tuple[str, ...]) -> Outcome:
    """An exit status of 0 is not enough: a part has to say what it found, and that nothing is wrong."""
    if part.is_tests:
        counts = [line for line in lines[-5:] if re.search(r"\b[1-9]\d*(/\d+)? (passed|tests? collected)\b", line)]
        is_ok = returncode == 0 and bool(counts)
        last = lines[-1] if lines else "no output"
        result: dict[str, object] = {"tests": last}
        return Outcome(part, "ok" if is_ok else "failed", seconds, "" if is_ok else last, result, lines)
    result = result_of(lines)
    why = problem_of(part, result)
    if not why and returncode:
        why = f"exit status {returncode}"
    if why:
        return Outcome(part, "failed", seconds, why, result, lines)
    missing_parts = result.get("not_offered")
    if isinstance(missing_parts, dict) and missing_parts:
        why = "; ".join(f"{name}: {reason}" for name, reason in missing_parts.items())
        # What else the part found is in its figures and findings.
        return Outcome(part, "not offered", seconds, why[:300], result, lines)
    return Outcome(part, "ok", seconds, "", result, lines)


def problem_of(part: Part, result: dict[str, object]) -> str:
    """Problem that the part's result reports; "" if there is none."""
    if not result:
        return "it ended without a JSON object"
    if part.name.split()[0] == "cases":
        wrong = [name for name, error in result.items() if error]
        return f"wrong: {', '.join(wrong)}" if wrong else ""
    for name in ("failed", "wrong"):
        if isinstance(named := result.get(name), list) and named:
            return f"{name}: {', '.join(map(str, named))}"
    return "it is not near" if result.get("is_near") is False else ""


def result_of(lines: Sequence[str]) -> dict[str, object]:
    """The last line that is a JSON object."""
    for line in reversed(lines):
        if line.startswith("{"):
            try:
                found = json.loads(line)
            except json.JSONDecodeError:
                continue
            return found if isinstance(found, dict) else {}
    return {}


class Check:
    """Runs parts and keeps what became of them; `limit_s` of all of them together."""

    def __init__(self, out: Path | None, cache: Path, limit_s: float) -> None:
        self.out, self.cache = out, cache
        self.began, self.limit_s = time.monotonic(), limit_s
        self.outcomes: list[Outcome] = []
        self._lock = Lock()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    def note(self, outcome: Outcome) -> None:
        """Keep, print and write it."""
        with self._lock:
            self.outcomes.append(outcome)
            record = json.dumps(outcome.record())
            if outcome.state in ("failed", "late"):
                print(f"== {outcome.part.name}: {outcome.state}", *outcome.lines[-60:], sep="\n", flush=True)
            print(record, flush=True)
            self.write(record)

    def write(self, line: str) -> None:
        if self.out is not None:
            with self.out.open("a", encoding="utf-8") as file:
                file.write(f"{line}\n")

    def run_one(self, part: Part, until_s: float) -> None:
        lacking = missing(part.needs)
        left_s = until_s - self.seconds
        if lacking:
            self.note(Outcome(part, "not run", why=f"no {', '.join(lacking)}"))
        elif left_s < SHORTEST_S:
            self.note(Outcome(part, "not run", why="no time is left"))
        else:
            self.note(run(part, min(part.limit_s, left_s), self.cache))

    def run_side_by_side(self, some: Sequence[Part], until_s: float, count: int) -> None:
        with ThreadPoolExecutor(count) as pool:
            for done in [pool.submit(self.run_one, part, until_s) for part in some]:
                done.result()


def missing(names: Sequence[str]) -> list[str]:
    return [name for name in names if find_spec(name) is None]


def lacking_wheels(folder: Path) -> list[Path]:
    """Wheels in a folder of distributions that this interpreter does not have."""
    found = []
    for path in sorted(folder.glob("*.whl")):
        try:
            metadata.version(path.name.split("-")[0])
        except metadata.PackageNotFoundError:
            found.append(path)
    return found


def commit() -> str | None:
    """The commit of this checkout, and whether files differ from it; a copy without its history may be told by
    GPU_CHECK_COMMIT.
    """
    if given := os.environ.get("GPU_CHECK_COMMIT"):
        return given
    told = subprocess.run(
        ["git", "describe", "--always", "--abbrev=40", "--dirty", "--exclude=*"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    return told.stdout.strip() or None


def table(outcomes: Sequence[Outcome]) -> str:
    """All figures, then all parts."""
    lines = [gpu_report.figure_line(figure) for each in outcomes for figure in gpu_report.figures_of(each.record())]
    lines += ["", f"{'part':<52}{'state':<14}{'seconds':>8}  why"]
    lines += [f"{each.part.name:<52}{each.state:<14}{each.seconds:>8.1f}  {each.why[:150]}" for each in outcomes]
    return "\n".join(lines)


def summary(outcomes: Sequence[Outcome]) -> dict[str, object]:
    # What only fills a cache may be late: the speed that needs it is then slower to start.
    counted = [each for each in outcomes if each.part.kind != "warm"]
    failed = [each.part.name for each in counted if each.state in ("failed", "late")]
    not_run = {each.part.name: each.why for each in counted if each.state == "not run"}
    states = {each.part.name: each.state for each in outcomes}
    return {"states": states, "failed": failed, "not_run": not_run, "is_ok": not failed and not not_run}


def arguments_of() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry", action="store_true", help="the same code without a GPU: interpreted, and on the CPU")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--correctness", action="store_true", help="no speeds")
    which.add_argument("--speeds", action="store_true", help="nothing but speeds")
    parser.add_argument("--only", default="", help="parts by a word of their names, separated by commas")
    parser.add_argument("--list", action="store_true", help="print the names of the parts")
    parser.add_argument("--out", type=Path, help="file to which one JSON line a part is appended")
    parser.add_argument("--lacking", type=Path, metavar="FOLDER", help="print the wheels in it that are lacking here")
    parser.add_argument("--write-docs", type=Path, metavar="RESULTS", help="write a file of --out into the docs")
    parser.add_argument("--commit", help="with --write-docs: the commit that ran, where the file does not say it")
    return parser.parse_args()


def main() -> int:
    arguments = arguments_of()
    is_dry = arguments.dry
    if arguments.lacking is not None:
        print(*lacking_wheels(arguments.lacking), sep="\n", end="\n" if lacking_wheels(arguments.lacking) else "")
        return 0
    if arguments.write_docs is not None:
        gpu_report.write_docs(ROOT, arguments.write_docs, arguments.commit)
        return 0
    kinds = ["bits", "alone"] if arguments.correctness else ["warm", "speed"]
    if not arguments.correctness and not arguments.speeds:
        kinds = ["bits", "warm", "alone", "speed"]
    try:
        chosen = chosen_parts(parts(is_dry=is_dry), kinds, [word for word in arguments.only.split(",") if word])
    except ValueError as error:
        print(f"gpu_check: {error}", file=sys.stderr)
        return 1
    if arguments.list:
        print(*(f"{part.kind:<8}{part.name}" for part in chosen), sep="\n")
        return 0
    if lacking := missing(NEEDED):
        wheels = "install them, or put wheels of them into a folder and name it with WHEELS="
        print(f"gpu_check: {sys.executable} has no {', '.join(lacking)}: {wheels}", file=sys.stderr)
        return 1
    import torch
    import triton

    if not is_dry and not torch.cuda.is_available():
        print("gpu_check: torch finds no CUDA device here: --dry runs the same code without one", file=sys.stderr)
        return 1
    about: dict[str, object] = {
        "device": "none: a dry run" if is_dry else torch.cuda.get_device_name(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        # Of the module: distributions have other names (pytorch-triton).
        "triton": triton.__version__,
        "commit": commit(),
        "command": " ".join(["bash scripts/gpu_check.sh", *sys.argv[1:]]),
        "date": time.strftime("%Y-%m-%d"),
    }
    limit_s = DRY_S if is_dry else CORRECTNESS_S if arguments.correctness else ALL_S
    out = None if arguments.out is None else arguments.out.absolute()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end_all)
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        # Warm where the caller keeps one.
        cache = Path(os.environ.get("TRITON_CACHE_DIR", folder))
        check = Check(out, cache, limit_s)
        check.write(json.dumps({"about": about}))
        # Dry runs time nothing, and compute on the CPU's cores.
        together = [part for part in chosen if part.kind in ("bits", "warm") or is_dry]
        count = (os.cpu_count() or 1) if is_dry else SIDE_BY_SIDE
        until_s = limit_s if is_dry else min(limit_s - ALONE_S, TOGETHER_S)
        check.run_side_by_side(together, until_s, count)
        for part in chosen:
            if part not in together:
                check.run_one(part, limit_s)
    report = {**about, "seconds": round(check.seconds, 1), **summary(check.outcomes)}
    print(table(check.outcomes))
    check.write(json.dumps({"summary": report}))
    print(json.dumps(report))
    return 0 if report["is_ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
