"""The scripts that measure jobs: they run on the demo's model, and their figures mean what they say.

No test here looks at how long anything takes.
"""

import json
import shutil
import subprocess
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ranks
import torch
from constrained_rows import write_model
from safetensors.torch import load_file, save_file

from spmd_worker.ops.kernels.reference import ReferenceKernels

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "scripts" / "demo" / "model"
SETTINGS = ("cache.num_blocks=128", "device=cpu")


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    lines = [{"prompt": f"add {index} 7 =", "max_tokens": 5, "ignore_eos": True} for index in range(6)]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in [*lines, {"prompt": 7}]))
    return path


def run(script: str, *arguments: str | Path) -> ranks.CompletedRanks:
    return ranks.run_script([ROOT / "scripts" / script, *arguments], timeout_s=240)


@pytest.mark.stress
@pytest.mark.matrix
def test_throughput_reports_its_parts_floor_and_ids(rows: Path, tmp_path: Path):
    done = run("bench_throughput.py", MODEL, rows, *SETTINGS, "--ids", tmp_path / "ids.json")
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])
    assert (figures["rows"], figures["error_rows"], figures["output_tokens"], figures["ranks"]) == (7, 1, 30, 1)
    assert [len(ids) for ids in json.loads((tmp_path / "ids.json").read_text())] == [5] * 6 + [0]
    parts = figures["ms_a_step"]
    assert sum(parts.values()) * figures["steps"] / 1000 == pytest.approx(
        figures["split_generate_s"], rel=0.02, abs=1e-3
    )
    for part in ("linear", "attention", "other kernels", "sample", "schedule", "lockstep"):
        assert parts[part] > 0, part
    assert figures["floor_s"] > 0
    assert figures["floor_ratio"] == pytest.approx(figures["generate_s"] / figures["floor_s"], rel=0.1)
    assert min(figures[name] for name in ("products_s", "products_ratio", "gflops", "gb_per_s")) > 0
    beside = figures["beside_model"]
    assert (beside["sequences"], beside["steps"]) == (6, 4)
    assert 0 < beside["median_ms"] <= beside["p90_ms"]
    assert figures["job_s"] > 0


def test_floor_takes_the_slower_part_of_each_step(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    floor = import_module("machine_floor")
    layers = floor.CachedLayers({0: 2, 8: 1}, num_heads=4, head_size=16, token_bytes=64.0)
    decode, prefill = floor.StepWork(), floor.StepWork()
    decode.add_product(1, 1000, 2000)
    decode.add_attention(1, 100, layers)
    prefill.add_product(300, 1000, 2000)
    prefill.add_attention(300, 300, layers)
    # One token sees 100 keys in two layers, 8 in the one with a window.
    assert (decode.flops, decode.num_bytes) == (2 * 1000 + 4 * 64 * 208, 2000 + 64 * 208)
    # Of 300 tokens the first sees one key, the last all of them, or 8; all are read once.
    assert prefill.num_bytes == 2000 + 64 * (300 + 300 + 300)
    assert prefill.flops == pytest.approx(2 * 300 * 1000 + 4 * 64 * 300 * (2 * 150.5 + 8))
    # Of 100 keys 48 are read for another sequence, which spares both layers that see all; of 95 the window sees 3.
    for num_read, spared in ((48, 2 * 48), (95, 2 * 95 + 3)):
        beside = floor.StepWork()
        beside.add_attention(1, 100, layers, num_read=num_read)
        assert (beside.flops, beside.num_bytes) == (4 * 64 * 208, 64 * (208 - spared))
    tables = [[1, 2, 3, 0], [1, 2, 4, 5], [9, 0, 0, 0], [1, 2, 3, 7]]
    count = import_module("bench_throughput").num_tokens_read_before
    assert count(tables, (40, 64, 3, 63), 16) == [0, 32, 0, 32]
    rates = floor.Rates(flops_per_s=1e6, bytes_per_s=1e5)
    assert floor.floor_s([decode, prefill], rates) == pytest.approx(decode.num_bytes / 1e5 + prefill.flops / 1e6)


def test_products_in_leaves_count_as_linear(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    bench = import_module("bench_throughput")
    watch, x, weight = bench.StepWatch(), torch.ones(3, 64), torch.ones(32, 64)
    for kernels in (ReferenceKernels(), bench._TimedKernels(ReferenceKernels(), watch)):
        assert kernels.linear_of_leaves(x, weight, None, (32, 64), torch.float32).tolist() == [[64.0] * 32] * 3
    assert (list(watch.products.values()), list(watch.seconds)) == ([1], ["linear"])


@pytest.mark.stress
@pytest.mark.timed
def test_floor_and_host_part_are_below_measured_time(rows: Path):
    """On a quiet machine: each is measured by itself."""
    figures = json.loads(run("bench_throughput.py", MODEL, rows, *SETTINGS).stdout.splitlines()[-1])
    assert figures["floor_s"] < figures["split_generate_s"]
    assert figures["beside_model"]["p90_ms"] < 1000 * figures["split_generate_s"] / figures["steps"]


@pytest.mark.matrix
def test_rows_with_non_finite_numbers_are_error_rows(tmp_path: Path):
    """Only rows that were refused counted. Token 7 is a column of the logits too, so no row is answered."""
    model, rows = tmp_path / "model", tmp_path / "rows.jsonl"
    shutil.copytree(MODEL, model)
    tensors = load_file(model / "model.safetensors")
    tensors["model.embed_tokens.weight"][7] = torch.nan
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    lines = [{"prompt_token_ids": [each], "max_tokens": 3, "ignore_eos": True} for each in (5, 7)]
    rows.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    options = ("--no-split", "--no-job", "model.allow_nonfinite=true")
    figures = json.loads(run("bench_throughput.py", model, rows, *SETTINGS, *options).stdout.splitlines()[-1])
    assert (figures["rows"], figures["error_rows"]) == (2, 2)


@pytest.mark.stress
@pytest.mark.matrix
def test_throughput_reports_the_error_of_failed_job(rows: Path):
    done = run("bench_throughput.py", MODEL, rows, *SETTINGS, "--no-split", "job.max_error_rows=0")
    assert done.returncode != 0
    assert "1 error rows are more than job.max_error_rows=0" in done.stderr


@pytest.mark.matrix
def test_journal_compares_pairs_of_runs_with_equal_outputs(
    rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
):
    """Its jobs are forked."""

    def run_forked(command: list[str], *, env: Mapping[str, str], **_: Any) -> "subprocess.CompletedProcess[str]":
        _, *words = command
        if words[0] == "-c":
            script = tmp_path / "given.py"
            script.write_text(words[1])
            words[:2] = [str(script)]
        done = ranks.run_script(words, timeout_s=240, env=env)
        return subprocess.CompletedProcess(command, done.returncode, done.stdout, done.stderr)

    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    bench = import_module("bench_runtime")
    monkeypatch.setattr(import_module("control_path.journal"), "subprocess", SimpleNamespace(run=run_forked))
    assert bench.main(["journal", str(MODEL), str(rows), *SETTINGS, "--pairs", "1"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["overhead"] == pytest.approx(result["with"][0] / result["without"][0] - 1, abs=1e-3)


def test_figure_matches_the_published_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    draw = import_module("draw_benchmarks")
    figures = json.loads((ROOT / "docs" / "lab" / "benchmarks.json").read_text())
    assert draw.draw(figures) == (ROOT / "docs" / "lab" / "benchmarks.svg").read_text()
    figures[0]["bars"][0]["values"][0] += 1
    assert draw.draw(figures) != (ROOT / "docs" / "lab" / "benchmarks.svg").read_text(), "the control"


@pytest.mark.stress
@pytest.mark.matrix
def test_admission_bench_shows_watermark_saves_recomputation(monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    assert import_module("bench_runtime").main(["admission", "--rows", "64"]) == 0
    *rows, last = capsys.readouterr().out.splitlines()
    outcomes = json.loads(last)["outcomes"]
    assert len(outcomes) == len(rows) - 3 == 4 * 2 * 4
    recomputed = {(each["workload"], each["mode"], each["watermark"]): each["recomputed"] for each in outcomes}
    name = "prompts and answers, four samples"
    assert recomputed[name, "recompute", 0] > recomputed[name, "recompute", 4]
    assert all(share == 0 for (_, mode, _), share in recomputed.items() if mode == "swap")


def test_batches_are_compared_with_those_rebuilt(monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    sizes = ("--sequences", "8", "--contexts", "30,64", "--steps", "3", "--turns", "2")
    assert import_module("bench_runtime").main(["batches", *sizes]) == 0
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [each["context"] for each in figures["results"]] == [30, 64]
    for each in figures["results"]:
        assert each["ratio"] == pytest.approx(each["us"]["kept"] / each["us"]["anew"], rel=0.01, abs=1e-3)
        assert 4 * 8 <= each["bytes"]["kept"] < each["bytes"]["anew"]


def test_host_part_is_timed_with_and_without_async(monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    sizes = ("--sequences", "3", "--context", "20", "--steps", "6", "--turns", "2")
    assert import_module("bench_runtime").main(["host", *sizes]) == 0
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert list(figures["results"]) == ["ahead", "one at a time"]
    assert all(0 < each["median_us"] <= each["p90_us"] for each in figures["results"].values())


@pytest.mark.matrix
def test_log_probabilities_are_compared_on_the_same_rows(monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    sizes = ("--rows", "4", "--prompt-tokens", "6", "--tokens", "5", "--pairs", "2", "--num-blocks", "32")
    assert import_module("bench_runtime").main(["logprobs", str(MODEL), *sizes]) == 0
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (figures["output_tokens"], figures["ranks"], figures["logprobs"]) == (20, 1, 0)
    ratios = [own / other for own, other in zip(figures["with"], figures["without"], strict=True)]
    assert figures["overhead"] == pytest.approx(sum(ratios) / 2 - 1, abs=1e-3)


def test_serve_ratio_is_the_median_of_alternating_turns(monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    bench, order = import_module("bench_serve"), list[str]()
    seconds = {"serve": iter([[2.0], [1.0, 1.0, 9.0], [4.0]]), "generate": iter([[1.0], [0.9], [3.0]])}
    monkeypatch.setattr(bench, "serve", lambda _: (order.append("serve"), next(seconds["serve"]))[1])
    monkeypatch.setattr(bench, "start_generate", lambda *_: (order.append("generate"), next(seconds["generate"]))[1])
    assert bench.main([str(MODEL), "--rows", "6", "--tokens", "2"]) == 0
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert order == ["generate", "serve", "serve", "generate", "generate", "serve"]
    assert figures["tokens_per_second"] == {"generate": [12.0, 12 / 0.9, 4.0], "serve": [6.0, 12.0, 3.0]}
    assert figures["ratio"] == pytest.approx(0.75)


def test_masks_bench_times_steps_with_and_without_grammar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    bench, folder = import_module("bench_runtime"), str(write_model(tmp_path))
    sizes = ["--rows", "3", "--steps", "24", "--turns", "2"]
    assert bench.main(["masks", folder, "load_format=dummy", "max_model_len=400", *sizes]) == 0
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert {kind: len(each) for kind, each in figures["ms"].items()} == {"free": 2, "masked": 2, "forced": 2}
    assert figures["ratio"] > 0 < figures["ratio_forced"]
    assert figures["tokens_a_step"] > 1.1


@pytest.mark.stress
@pytest.mark.timed
def test_embed_bench_reports_speed_memory_and_equal_vectors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    """Its sides are forked."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    bench, order = import_module("bench_embed"), list[str]()
    shape = import_module("embed_sides.model_folder").Shape(2, 32, 4, 64, 400)

    def run_forked(command: list[str], **_: Any) -> "subprocess.CompletedProcess[str]":
        if command[1] == "-c":
            return subprocess.CompletedProcess(command, 1)
        order.append(command[command.index("--side") + 1])
        done = ranks.run_script(command[1:], timeout_s=240)
        assert done.returncode == 0, done.stderr
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(bench, "subprocess", SimpleNamespace(run=run_forked))
    settings = ["scheduler.max_num_seqs=8", "--rows", "20", "--turns", "1"]
    assert bench.main([str(tmp_path / "work"), *settings, "--sides", "job,embed,openvino"], shape) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    assert "left out: openvino" in lines[0]
    assert order == ["job", "embed"]
    figures = json.loads(last)
    assert figures["tokens"] > 20 * 5
    assert figures["largest_difference"] == {"job": 0.0, "embed": 0.0}
    assert figures["ratios"]["embed"] == 1.0 > 0 < figures["ratios"]["job"]
    for memory in figures["memory_mib"].values():
        assert [*memory] == ["0", "10", "50", "100"]
        assert min(memory.values()) > 0


@pytest.mark.stress
@pytest.mark.timed
def test_ranks_bench_measures_star_relays_and_models():
    done = run("bench_runtime.py", "ranks", "--ranks", "9", "--sequences", "8", "--steps", "4", "--rounds", "3")
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])
    assert [row["sequences"] for row in figures["replicas"]] == [8]
    assert [(row["ranks"], row["group"], row["sockets"]) for row in figures["exchanges"]] == [
        (9, 9, 8),
        (9, 3, 4),
        (3, 3, 2),
    ]
    assert [row["way"] for row in figures["models"]][:2] == ["star", "relays"]
    assert all(row["step_us"] > row["exchange_us"] > 0 for row in figures["models"])


@pytest.mark.stress
@pytest.mark.timed
def test_lockstep_bench_has_row_per_ranks_and_sequences():
    done = run("bench_runtime.py", "lockstep", "--ranks", "2", "--sequences", "4,16", "--steps", "5")
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout.splitlines()[-1])["results"]
    assert [(each["ranks"], each["sequences"]) for each in results] == [(2, 4), (2, 16)]
    for each in results:
        assert each["bytes_a_step_max"] >= each["bytes_a_step"] > 0
        assert all(value > 0 for key, value in each.items() if key.endswith("_us"))


@pytest.mark.matrix
def test_adapters_are_compared_in_turns(tmp_path: Path):
    path = tmp_path / "rows.jsonl"
    lines = [{"prompt": f"add {index} 7 =", "max_tokens": 5, "ignore_eos": True} for index in range(4)]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    options = ("--adapters", "3", "--rank", "4", "--turns", "2", "--write", tmp_path / "kept")
    figures = json.loads(run("bench_adapters.py", MODEL, path, *SETTINGS, *options).stdout.splitlines()[-1])
    assert (figures["adapters"], figures["rank"], len(figures["ratios"])) == (3, 4, 2)
    assert figures["ratio"] == pytest.approx(sum(figures["ratios"]) / 2, abs=1e-3)
    named = [json.loads(line)["adapter"] for line in (tmp_path / "kept" / "rows.jsonl").read_text().splitlines()]
    assert named == ["adapter-0", "adapter-1", "adapter-2", "adapter-0"]
    assert set(load_file(tmp_path / "kept" / "adapter-1" / "adapter_model.safetensors")) >= {
        f"base_model.model.model.layers.0.{part}.lora_{matrix}.weight"
        for part in ("self_attn.q_proj", "mlp.down_proj")
        for matrix in "AB"
    }
