"""What a job takes on this machine, where its time goes, and how far that is from the least it could take.

    python scripts/bench_throughput.py MODEL WORKLOAD [KEY=VALUE...] [--threads N] [--no-split] [--no-job] [--ids FILE]
    torchrun --nproc-per-node 2 scripts/bench_throughput.py MODEL WORKLOAD parallel.tensor_parallel_size=2

MODEL is a Hugging Face folder, WORKLOAD a JSONL file of rows, KEY=VALUE as launch.py takes them. Three passes: the
rows, timed as a whole; the rows again with every part of a step timed (`--no-split` leaves out that and the floor); and
`python launch.py` on the same rows, from its start to its end (`--no-job`; not under torchrun). The floor is, step by
step, what has to be multiplied at the rate of products, or what has to be read at the rate of memory, both measured in
this process (machine_floor.py); generate / floor is what there is to gain. Beside it is the time of the job's matrix
products alone, at the shapes that the steps had, with the weights that the model holds, timed one after another: so far
do the products themselves stand above that floor. What is done in one call counts as one part: the
rotary embedding as attention, the gates of a feed-forward as a product; layers run one by one there, which in the first
pass are one call where they can be joined. What is beside the model is the time of a step
that only decodes but for forward, logits and sampling, where most sequences do. The last line is one JSON object.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from machine_floor import CachedLayers, StepWork, floor_s, measure_rates

if TYPE_CHECKING:
    from spmd_worker.ops.attention.metadata import AttentionMetadata

ROOT = Path(__file__).resolve().parents[1]
PARTS = ("schedule", "lockstep", "prepare", "linear", "attention", "other kernels", "sample", "output", "other")


def main(arguments: list[str] | None = None) -> None:
    options = parse_arguments(arguments)
    sys.path.insert(0, str(ROOT))
    from spmd_worker.worker.memory.garbage import hold_collections, resume_collections

    # As launch.py does, here and below.
    hold_collections()
    from launch import prefault_cache
    from spmd_worker.base.config.compose import compose_run
    from spmd_worker.ranks.environment import read_rank_environment

    environment = read_rank_environment()
    config = compose_run(ROOT / "conf", [f"model.path={options.model}", f"job.input={options.workload}", *options.keys])
    resolved = prefault_cache(config, environment)
    from spmd_worker.frontends.rank_program import prepare_torch

    prepare_torch()
    import torch

    from spmd_worker.engine.startup import read_run, start_engine
    from spmd_worker.worker.memory.host import keep_freed_memory

    resume_collections()
    keep_freed_memory()
    if options.threads:
        torch.set_num_threads(options.threads)
    engine = start_engine(resolved or read_run(config))
    start_s = time.time() - process_start_s()
    is_first = engine.is_first_rank
    whole = run_rows(engine) if is_first else engine.follow_round()
    figures: dict[str, Any] = {}
    if not options.no_split:
        watch = StepWatch()
        engine.executor.collective_rpc(watch.instrument)
        # The prefix cache would answer what the first pass computed.
        engine.changes.reset_prefix_cache()
        before = engine.times.phases()
        split = run_rows(engine, watch) if is_first else engine.follow_round()
        phases = [after - earlier for after, earlier in zip(engine.times.phases(), before, strict=True)]
        figures = watch.figures(split, phases) if split is not None else {}
        figures |= watch.floors()
    if is_first and whole is not None:
        figures = {**whole.figures(), "start_s": round(start_s, 3), **figures}
        figures["peak_memory_mib"] = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
        if "floor_s" in figures:
            figures["floor_ratio"] = round(figures["generate_s"] / figures["floor_s"], 3)
            figures["products_ratio"] = round(figures["generate_s"] / figures["products_s"], 3)
    engine.shutdown()
    if not is_first or whole is None:
        return
    if options.ids:
        Path(options.ids).write_text(json.dumps(whole.ids), encoding="utf-8")
    if not options.no_job and not environment.is_launched:
        figures["job_s"] = round(time_job(options, torch.get_num_threads()), 3)
    show(figures, options, torch.get_num_threads(), environment.world_size)


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a Hugging Face model folder")
    parser.add_argument("workload", type=Path, help="a JSONL file of rows")
    parser.add_argument("keys", nargs="*", metavar="KEY=VALUE", help="as launch.py takes them")
    parser.add_argument("--threads", type=int, help="of this rank; default: torch's")
    parser.add_argument("--no-split", action="store_true", help="no times of the parts, and no floor")
    parser.add_argument("--no-job", action="store_true", help="do not run launch.py")
    parser.add_argument("--ids", metavar="FILE", help="write the token ids of all rows, as the peers' scripts do")
    # Keys may stand between options.
    return parser.parse_intermixed_args(arguments)


def process_start_s() -> float:
    """When this process began, Unix time; imports and the interpreter's own start count."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    uptime_s = float(Path("/proc/uptime").read_text().split()[0])
    return time.time() - uptime_s + ticks / os.sysconf("SC_CLK_TCK")


class Pass:
    """All rows once."""

    def __init__(self) -> None:
        self.generate_s = self.output_s = 0.0
        self.num_prompt_tokens = self.num_output_tokens = self.num_error_rows = self.num_steps = 0
        self.ids: list[list[int]] = []

    def figures(self) -> dict[str, Any]:
        return {
            "generate_s": round(self.generate_s, 3),
            "rows": len(self.ids),
            "error_rows": self.num_error_rows,
            "prompt_tokens": self.num_prompt_tokens,
            "output_tokens": self.num_output_tokens,
            "output_tokens_per_s": round(self.num_output_tokens / self.generate_s, 1),
            "steps": self.num_steps,
        }


def run_rows(engine: Any, watch: "StepWatch | None" = None, path: str | None = None) -> Pass:
    """The job's work without its files: parse, admit, step, format. `path`: rows other than the configuration's."""
    from spmd_worker.frontends.batch.input.row_reader import RowReader
    from spmd_worker.frontends.batch.row_runner import RowRunner
    from spmd_worker.frontends.openai.row import Row
    from spmd_worker.frontends.openai.row_parser import parse_row

    done = Pass()
    runner = RowRunner(engine, "model")
    rows = iter(RowReader.of(path or engine.config.job.input))
    most_unfinished, has_ended = 2 * engine.max_num_seqs, False
    answers: dict[int, list[int]] = {}
    num_steps, began_s = engine.times.step, time.perf_counter()
    while runner.num_rows or not has_ended:
        while not has_ended and runner.num_rows < most_unfinished:
            index, line = next(rows, (-1, b""))
            has_ended = index < 0
            row = None if has_ended else parse_row(index, line, engine.default_sampling)
            refused = not has_ended and (not isinstance(row, Row) or runner.admit(row) is not None)
            if refused:
                done.num_error_rows += 1
                answers[index] = []
        if runner.num_rows:
            step_s = engine.times.total_s
            step_began_s = time.perf_counter()
            for answer in runner.step():
                done.num_prompt_tokens += answer.num_prompt_tokens
                done.num_output_tokens += answer.num_output_tokens
                done.num_error_rows += answer.error_code is not None
                body = json.loads(answer.line)
                answers[answer.index] = [token for each in body.get("outputs", ()) for token in each["token_ids"]]
            spent_s = time.perf_counter() - step_began_s
            done.output_s += spent_s - (engine.times.total_s - step_s)
            if watch is not None:
                watch.end_step(spent_s)
    done.generate_s = time.perf_counter() - began_s
    done.num_steps = engine.times.step - num_steps
    if engine.channel.size > 1 or engine.engine_channel.size > 1:
        engine.end_round()
    done.ids = [answers[index] for index in sorted(answers)]
    return done


class StepWatch:
    """Times the parts of a step on this rank's worker, and notes the shapes of its products."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self.products: Counter[tuple[int, int]] = Counter()
        self._weights: dict[int, tuple[Callable[..., Any], Any, Any]] = {}
        self._dtype: Any = None
        self._num_tokens, self._num_rows, self._model_s = 0, 0, 0.0
        self._steps: list[tuple[int, int, float]] = []
        self._works: list[StepWork] = []
        self._attended: list[AttentionMetadata] = []
        self._kernels: Any = None
        self._layers: tuple[CachedLayers, ...] = ()
        self._block_size = 0

    def instrument(self, worker: Any) -> None:
        """Everything that the model and the runner call goes through a stopwatch from now on."""
        from spmd_worker.worker.runner import model_runner

        runner, self._kernels, self._layers = (
            worker.model_runner,
            worker.loaded.operations.kernels,
            cached_layers(worker),
        )
        self._block_size = worker.get_kv_cache_spec().block_size
        # All layers in one call have no parts to time.
        worker.loaded.model.model.joined_layers = None
        kernels, backend = None, None
        for module in worker.loaded.model.modules():
            if hasattr(module, "_kernels"):
                kernels = kernels or _TimedKernels(module._kernels, self)
                module._kernels = kernels
            if hasattr(getattr(module, "argmax_module", None), "find"):
                module.argmax_module.find = self.timed("other kernels", module.argmax_module.find)
            if hasattr(module, "_backend"):
                backend = backend or _Timed(module._backend, self, "attention")
                module._backend = backend
        worker.loaded.model.forward = self._within_model(worker.loaded.model.forward)
        worker.loaded.model.compute_logits = self._within_model(worker.loaded.model.compute_logits)
        worker.loaded.model.argmax_logits = self._within_model(worker.loaded.model.argmax_logits)
        if runner.sampler is not None:
            runner.sampler.launch = self._within_model(self.timed("sample", runner.sampler.launch))
            largest = self.timed("sample", runner.sampler.launch_argmax)
            runner.sampler.launch_argmax = self._within_model(largest)
        model_runner.build_batch = self._noting_rows(self.timed("prepare", model_runner.build_batch))

    def _noting_rows(self, build: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **keywords: Any) -> Any:
            batch = build(*arguments, **keywords)
            self._works.append(StepWork())
            self._attended.append(batch.attention)
            return batch

        return run

    def _add_attention(self, work: StepWork, attended: "AttentionMetadata") -> None:
        lengths, starts = attended.context_lengths, attended.query_starts
        repeated = num_tokens_read_before(attended.block_tables.tolist(), lengths, self._block_size)
        for start, end, length, num_read in zip(starts, starts[1:], lengths, repeated, strict=False):
            for layers in self._layers:
                work.add_attention(end - start, length, layers, num_read)

    def timed(self, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **keywords: Any) -> Any:
            began_s = time.perf_counter()
            result = call(*arguments, **keywords)
            self.seconds[part] += time.perf_counter() - began_s
            return result

        return run

    def _within_model(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(first: Any, *arguments: Any, **keywords: Any) -> Any:
            began_s = time.perf_counter()
            result = call(first, *arguments, **keywords)
            self._model_s += time.perf_counter() - began_s
            # Token ids, hidden states of rows that sample, logits: as many as there are rows in a step that decodes.
            self._num_tokens, self._num_rows = max(self._num_tokens, len(first)), len(first)
            return result

        return run

    def end_step(self, step_s: float) -> None:
        """After each step of rank 0, with what it took from the rows' side."""
        self._steps.append((self._num_tokens, self._num_rows, step_s - self._model_s))
        self._num_tokens, self._model_s = 0, 0.0

    def beside_model(self) -> dict[str, Any]:
        """Of the steps in which most sequences decode and nothing else: what is not forward, logits or sampling."""
        decoding = [(rows, seconds) for tokens, rows, seconds in self._steps if tokens == rows]
        most = max((rows for rows, _ in decoding), default=0)
        spent_ms = sorted(1000 * seconds for rows, seconds in decoding if rows == most)
        if not spent_ms:
            return {}
        median, p90 = statistics.median(spent_ms), spent_ms[int(0.9 * (len(spent_ms) - 1))]
        return {"sequences": most, "steps": len(spent_ms), "median_ms": round(median, 3), "p90_ms": round(p90, 3)}

    def note_product(self, multiply: Callable[..., Any], x: Any, weight: Any, bias: Any) -> None:
        self._dtype = x.dtype
        self._weights.setdefault(id(weight), (multiply, weight, bias))
        self.products[x.shape[0], id(weight)] += 1
        if self._works:
            self._works[-1].add_product(x.shape[0], weight.numel(), weight.nbytes)

    def figures(self, done: Pass, phases: list[float]) -> dict[str, Any]:
        """Milliseconds a step, by part. `phases` are schedule, lockstep, execute, apply."""
        seconds = {**self.seconds, "schedule": phases[0] + phases[3], "lockstep": phases[1], "output": done.output_s}
        seconds["other"] = done.generate_s - sum(seconds.values())
        return {
            "ms_a_step": {part: round(1000 * seconds.get(part, 0.0) / done.num_steps, 3) for part in PARTS},
            "split_generate_s": round(done.generate_s, 3),
            "beside_model": self.beside_model(),
        }

    def floors(self) -> dict[str, float]:
        """The steps' floor with the rates it was found by, and their products alone."""
        for work, attended in zip(self._works, self._attended, strict=True):
            self._add_attention(work, attended)
        self._attended.clear()
        rates = measure_rates(self._kernels, self._dtype)
        return {
            "floor_s": round(floor_s(self._works, rates), 6),
            "products_s": self._products_s(),
            "gflops": round(rates.flops_per_s / 1e9, 1),
            "gb_per_s": round(rates.bytes_per_s / 1e9, 2),
        }

    def _products_s(self) -> float:
        """All products again, step by step in spirit: each shape as often as it came, weights in the model's order."""
        import torch

        total_s = 0.0
        by_rows: dict[int, list[tuple[int, int]]] = {}
        for (num_rows, key), count in self.products.items():
            by_rows.setdefault(num_rows, []).append((key, count))
        with torch.inference_mode():
            for num_rows, items in by_rows.items():
                total_s += self._time_gemms(num_rows, items)
        return round(total_s, 6)

    def _input_kind(self, weight: Any) -> tuple[int, Any]:
        """Inputs of a weight and their dtype: routers are float32 in every model."""
        return _num_inputs(weight), weight.dtype if weight.dtype.is_floating_point else self._dtype

    def _time_gemms(self, num_rows: int, items: list[tuple[int, int]]) -> float:
        import torch

        inputs: dict[tuple[int, Any], Any] = {}
        repeats = min(min(count for _, count in items), 3)
        for key, _ in items:
            _, weight, _ = self._weights[key]
            size, dtype = self._input_kind(weight)
            if (size, dtype) not in inputs:
                generator = torch.Generator().manual_seed(size)
                inputs[size, dtype] = torch.randn(num_rows, size, generator=generator).to(dtype)
        spent: dict[int, float] = dict.fromkeys((key for key, _ in items), 0.0)
        for _ in range(repeats):
            # All layers in turn, so that weights come from where they come from in a step.
            for key, _ in items:
                multiply, weight, bias = self._weights[key]
                began_s = time.perf_counter()
                multiply(inputs[self._input_kind(weight)], weight, bias)
                spent[key] += time.perf_counter() - began_s
        return sum(spent[key] / repeats * count for key, count in items)


def num_tokens_read_before(tables: list[list[int]], lengths: Sequence[int], block_size: int) -> list[int]:
    """Of each sequence, how many of its tokens lie in blocks that a sequence before it has too."""
    counts, known = [], set[int]()
    for table, length in zip(tables, lengths, strict=True):
        whole = set(table[: length // block_size])
        counts.append(len(whole & known) * block_size)
        known |= whole
    return counts


def cached_layers(worker: Any) -> tuple[CachedLayers, ...]:
    """Cached layers of a worker's stage, one entry for each size of heads."""
    from spmd_worker.worker.memory.estimate import rank_layers

    spec = worker.get_kv_cache_spec()
    windows: dict[tuple[int, int, float], Counter[int]] = {}
    shares = rank_layers(worker.model_config, worker.layout, worker.environment.rank)
    for (layer, share), cached in zip(shares, spec.layers, strict=True):
        if cached is not None:
            kind = (share.num_heads, layer.head_size, spec.layer_block_bytes(cached) / spec.block_size)
            windows.setdefault(kind, Counter())[layer.window or 0] += 1
    return tuple(CachedLayers(dict(counts), *kind) for kind, counts in windows.items())


def _num_inputs(weight: Any) -> int:
    """Of a packed or a plain weight."""
    import torch

    if weight.dtype == torch.int8:
        from spmd_worker.ops.kernels.cpu.int8 import int8_shape

        return int8_shape(weight)[1]
    return int(weight.shape[-3] * 2 if weight.ndim > 2 else weight.shape[1])


class _Timed:
    """Another object, each of whose calls counts as one part."""

    def __init__(self, target: Any, watch: StepWatch, part: str) -> None:
        self._target, self._watch, self._part = target, watch, part

    def __getattr__(self, name: str) -> Any:
        call = self._watch.timed(self._part, getattr(self._target, name))
        setattr(self, name, call)
        return call


class _TimedKernels(_Timed):
    def __init__(self, target: Any, watch: StepWatch) -> None:
        super().__init__(target, watch, "other kernels")
        self._linear = watch.timed("linear", target.linear)
        self._gated_linear = watch.timed("linear", target.gated_linear)
        self._linear_of_leaves = watch.timed("linear", target.linear_of_leaves)
        self._linear_argmax = watch.timed("linear", target.linear_argmax)

    def linear(self, x: Any, weight: Any, bias: Any, room: Any = None) -> Any:
        self._watch.note_product(self._target.linear, x, weight, bias)
        return self._linear(x, weight, bias, room)

    def gated_linear(self, x: Any, weight: Any, bias: Any) -> Any:
        self._watch.note_product(self._target.gated_linear, x, weight, bias)
        return self._gated_linear(x, weight, bias)

    def linear_of_leaves(self, x: Any, weight: Any, bias: Any, ends: Any, dtype: Any, room: Any = None) -> Any:
        self._watch.note_product(partial(self._target.linear_of_leaves, ends=ends, dtype=dtype), x, weight, bias)
        return self._linear_of_leaves(x, weight, bias, ends, dtype, room)

    def linear_argmax(self, x: Any, weight: Any, count: int) -> Any:
        self._watch.note_product(self._target.linear, x, weight, None)
        return self._linear_argmax(x, weight, count)


def time_job(options: argparse.Namespace, num_threads: int) -> float:
    """The command that people run, from its start to its end."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            *(sys.executable, str(ROOT / "launch.py"), f"model.path={options.model}", f"job.input={options.workload}"),
            *(f"job.output={folder}/out.jsonl", *options.keys),
        ]
        began_s = time.perf_counter()
        environment = {**os.environ, "OMP_NUM_THREADS": str(num_threads)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        spent_s = time.perf_counter() - began_s
    if done.returncode:
        raise SystemExit(f"launch.py failed:\n{done.stderr}")
    return spent_s


def show(figures: dict[str, Any], options: argparse.Namespace, num_threads: int, num_ranks: int) -> None:
    name = f"{options.model.parent.name}/{options.model.name}, {options.workload.name}"
    print(f"{name}: {num_ranks} ranks, {num_threads} threads each")
    print(f"  start to ready   {figures['start_s']:8.2f} s")
    print(f"  generate         {figures['generate_s']:8.2f} s   {figures['output_tokens_per_s']:,.1f} output tokens/s")
    if figures["error_rows"]:
        print(f"  errors           {figures['error_rows']:8,} of {figures['rows']:,} rows: speeds are of the others")
    if "job_s" in figures:
        print(f"  whole job        {figures['job_s']:8.2f} s")
    if "floor_s" in figures:
        rates = f"{figures['gflops']:,.0f} GFLOP/s, {figures['gb_per_s']:.1f} GB/s"
        print(f"  floor            {figures['floor_s']:8.2f} s   generate / it {figures['floor_ratio']:.2f} ({rates})")
        print(f"  products alone   {figures['products_s']:8.2f} s   generate / them {figures['products_ratio']:.2f}")
        print("  milliseconds a step:")
        for part, value in figures["ms_a_step"].items():
            print(f"    {part:<14} {value:8.3f}")
        beside = figures["beside_model"]
        if beside:
            about = f"{beside['sequences']} sequences decode ({beside['steps']} steps)"
            print(
                f"  beside the model {beside['median_ms']:8.2f} ms  a step in which {about}, p90 {beside['p90_ms']:.2f}"
            )
    print(f"  peak memory      {figures['peak_memory_mib']:8,} MiB")
    about = {"model": str(options.model), "workload": options.workload.name, "threads": num_threads, "ranks": num_ranks}
    print(json.dumps({**about, **figures}))


if __name__ == "__main__":
    main()
