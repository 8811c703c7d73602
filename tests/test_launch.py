"""The command, as people use it: what it prints and how often, exit codes, the files it makes and no others."""

import json
import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ranks
from bad_rows import BAD_ROWS
from model_configs import LLAMA_8B

import launch
from spmd_worker.base.config.options import command_text, keys_of
from spmd_worker.base.config.schema import RunConfig
from spmd_worker.frontends import rank_program
from spmd_worker.model.weights.weight_files import check_local_files

LAUNCH = ranks.REPOSITORY / "launch.py"
MODEL = ranks.REPOSITORY / "scripts" / "demo" / "model"
START_S = 240.0
DEMO = [f"model.path={MODEL}", "cache.num_blocks=512", "device=cpu"]
SMALL_CACHE = (
    "cache.num_blocks=3 holds 48 tokens but model.max_model_len is 256: "
    "raise cache.num_blocks to at least 16 or lower max_model_len"
)


def test_ctrl_c_during_import_leaves_no_traceback(tmp_path: Path):
    (tmp_path / "hydra.py").write_text("print('imports', flush=True)\nimport time\ntime.sleep(3600)\n")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ranks.REPOSITORY}"}
    # A program in the background of a shell may ignore Ctrl-C, and so would what it starts.
    heed = "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); os.execv(sys.argv[1], sys.argv[1:])"
    command = [sys.executable, "-S", "-c", heed, sys.executable, str(LAUNCH), *DEMO]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, text=True, env=environment, **pipes) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "imports\n"
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=START_S)
    assert process.returncode == -signal.SIGINT
    assert errors == ""


@pytest.fixture(autouse=True)
def _signals_stay_the_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program of ours takes them for itself, for good; here the process is pytest's."""
    monkeypatch.setattr(rank_program.EndingSignals, "install", lambda self: None)


def write_rows(path: Path, rows: list[Any]) -> Path:
    """Strings are lines as they stand, anything else becomes JSON."""
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def read_rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def folder_listing(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_help_config_and_plan_print_once_without_torch(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    # One start for all three: what is printed by one rank only shows in the count.
    done = ranks.run_ranks(
        """
        import os, sys, time
        import launch
        assert launch.main(["--help"]) == 0
        assert launch.main(["--cfg", "job", "cache.num_blocks=77"]) == 0
        of_two = ["plan=true", f"model.path={sys.argv[1]}", "parallel.tensor_parallel_size=2", "plan.memory_gib=64"]
        assert launch.main(of_two) == 0
        # In one piece: the ranks share a pipe.
        os.write(1, f"torch imported {'torch' in sys.modules}\\n".encode())
        """,
        nproc=2,
        timeout_s=START_S,
        arguments=[tmp_path],
        cwd=tmp_path,
        under_torchrun=True,
        is_fresh=True,
    ).checked()
    for text in (
        "usage: torchrun --nproc-per-node N launch.py",
        "experiment=demo",
        "The paged KV cache, and host memory for blocks that leave it",
        # Its last line, whose end may come behind a line of the other rank.
        " keys: --help=all prints every key",
        "num_blocks: 77",
        "model      LlamaForCausalLM, 8,030,261,248 parameters",
        "0-1        32     16         4    7,168      64,128  7.7 GiB",
    ):
        assert done.output.count(text) == 1, (text, done.output)
    assert done.stdout.count("torch imported False") == 2
    assert folder_listing(tmp_path) == ["config.json"]


def test_plan_rejects_a_part_of_the_weight_files(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    """A folder without any is planned for: a plan needs config.json alone."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    shards = {"weight_map": {"a": "a.safetensors", "b": "b.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(shards))
    check_local_files(tmp_path)
    (tmp_path / "a.safetensors").write_bytes(b"")
    assert launch.main(["plan=true", f"model.path={tmp_path}"]) == 1
    assert "names b.safetensors, which is not there: download it again" in capfd.readouterr().err


UNDER_RANKS = [
    (["cache.num_block=3"], "cache.num_block=3: there is no key cache.num_block; did you mean cache.num_blocks?"),
    (["--multirun", "seed=1,2"], "--multirun is not supported"),
    (
        [*DEMO, "job.input=rows.jsonl", "job.output=out/x.jsonl", "cache.num_blocks=3"],
        SMALL_CACHE,
    ),
]


@pytest.mark.gate("misspelled")
@pytest.mark.parametrize(("arguments", "message"), UNDER_RANKS, ids=["misspelled", "multirun", "small cache"])
def test_error_prints_once_on_two_ranks(tmp_path: Path, arguments: list[str], message: str):
    # A rank that waits too short a while for rank 0, which may be late, says it too.
    source = """
        import sys
        from spmd_worker.frontends import rank_program
        rank_program._PATIENCE_S = 200.0
        import launch
        sys.exit(launch.main())
        """
    arguments = [*arguments, "parallel.tensor_parallel_size=2"]
    done = ranks.run_ranks(source, 2, START_S, arguments, cwd=tmp_path, under_torchrun=True)
    assert done.returncode == 1, done.output
    assert done.output.count(f"error: {message}") == done.output.count("error: ") == 1, done.output
    # torchrun's summary, which is printed last, has it in place of a page about tracebacks.
    assert done.output.count(f"traceback : {message}") == done.output.count(message) - 1 == 1, done.output
    assert 'launch.py", line' not in done.output
    assert folder_listing(tmp_path) == []


ALONE = [
    (
        ["plan=true"],
        "model.path is not set: give a Hugging Face model folder, such as scripts/demo/model (for plan=true its "
        "config.json is enough)",
    ),
    (["plan=true", "model.path=/nosuch"], "model.path=/nosuch is not a folder: give a Hugging Face model folder"),
    (["model=demo"], "job.input is not set: give a JSONL or Parquet file of rows, or - for standard input"),
    (["model=demo", "job.input=x"], "job.output is not set: give the file to write"),
    (["--bogus"], "unrecognized arguments: --bogus: give KEY=VALUE, --help, --cfg job, --config-dir DIR, --input"),
    (
        ["--tensor-parallel-size", "2", "--model=x", "--bogus"],
        "unrecognized arguments: --tensor-parallel-size --model=x --bogus: write parallel.tensor_parallel_size=... "
        "model.path=...; give KEY=VALUE, --help,",
    ),
    (["--help=some"], "argument --help/-h: ignored explicit argument 'some': give KEY=VALUE, --help, --cfg job,"),
    (["--cfg", "hydra"], "argument --cfg/-c: invalid choice: 'hydra'"),
    (["--config-dir", "nosuch"], "--config-dir nosuch is not a folder: give one with GROUP/NAME.yaml"),
    (["model.dtype=float8"], "model.dtype=float8 is not one of auto, float32, bfloat16, float16"),
]


@pytest.mark.parametrize(("arguments", "message"), ALONE, ids=[" ".join(each) for each, _ in ALONE])
def test_error_is_one_line_on_stderr(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str):
    assert launch.main(arguments) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith(f"error: {message}")
    assert (captured.err.count("\n"), captured.out) == (1, "")


def help_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[dict[str, str], str]:
    """Keys that are printed with their values, and the entire text."""
    assert launch.main(list(arguments)) == 0
    text = capsys.readouterr().out
    return dict(re.findall(r"(?m)^  ([a-z_.]+)=(\S*)", text.split("keys, with the values")[1])), text


def test_help_prints_keys_that_people_set(capsys: pytest.CaptureFixture[str]):
    keys = keys_of(RunConfig)
    printed, text = help_of(capsys, "--help")
    assert list(printed) == [name for name, key in keys.items() if key.option.is_common]
    assert 25 <= len(printed) <= 35
    assert text.splitlines()[-1] == f"{len(printed)} of {len(keys)} keys: --help=all prints every key"
    # Others where the command line sets them.
    others, _ = help_of(capsys, "--help", "cache.block_size=32", "seed=3")
    assert others == {**printed, "cache.block_size": "32", "seed": "3"}


def test_help_all_prints_every_key_and_its_meaning(capsys: pytest.CaptureFixture[str]):
    keys = keys_of(RunConfig)
    printed, text = help_of(capsys, "seed=3", "--help=all", "sampling.stop=[a,b]")
    values = {name: command_text(key.default) for name, key in keys.items()}
    assert printed == {**values, "seed": "3", "sampling.stop": "[a,b]"}
    assert text.splitlines()[-1] == f"{len(keys)} of {len(keys)} keys"
    words = " ".join(text.split())
    assert [name for name, key in keys.items() if key.option.meaning not in words] == []


@pytest.mark.parametrize("option", ["--help", "--help=all"])
def test_help_fits_100_columns(capsys: pytest.CaptureFixture[str], option: str):
    _, text = help_of(capsys, option)
    assert [line for line in text.splitlines() if len(line) > 100] == []
    # Two screens of 50 lines.
    assert option != "--help" or text.count("\n") <= 100


def test_version_is_the_packages(capsys: pytest.CaptureFixture[str]):
    assert launch.main(["--version"]) == 0
    assert re.fullmatch(r"spmd-worker \d+\.\d+\.\d+\S*\n", capsys.readouterr().out)


def test_key_with_several_values_warns_once(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    """The last one counted without a word."""
    given = ["--cfg", "job", "seed=1", "job.output=s3://me:secret@a/b", "+seed=2", "device=cpu", "device=cpu"]
    assert launch.main([*given, "seed=3", "--output", "c"]) == 0
    found = capsys.readouterr()
    assert "\nseed: 3\n" in found.out
    assert "  output: c\n" in found.out
    assert found.err == (
        "WARNING seed is given 3 times, as 1 and 2 and 3: the last one counts: leave the others out\n"
        "WARNING job.output is given 2 times, as s3://a/b and c: the last one counts: leave the others out\n"
    )
    for name, value in {"RANK": 1, "WORLD_SIZE": 2, "LOCAL_RANK": 1, "MASTER_ADDR": "x", "MASTER_PORT": 1}.items():
        monkeypatch.setenv(name, str(value))
    assert launch.main(given) == 0
    assert capsys.readouterr().err == ""


def test_incomplete_launcher_environment_is_an_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert launch.main(["--help"]) == 1
    assert capsys.readouterr().err.startswith("error: RANK is set but LOCAL_RANK, MASTER_ADDR, MASTER_PORT is not")


def test_rank_that_fails_alone_reports_after_rank_0(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    for name, value in {"RANK": 1, "WORLD_SIZE": 2, "LOCAL_RANK": 1, "MASTER_ADDR": "x", "MASTER_PORT": 1}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(rank_program, "_PATIENCE_S", 0.05)
    assert launch.main(["seed=x"]) == 1
    assert capsys.readouterr().err == "[rank 1] error: seed=x must be a whole number\n"


@pytest.mark.guarantee("Exit codes 70 and 1")
def test_diverged_ranks_exit_with_70_others_with_1(tmp_path: Path):
    assert exit_codes(tmp_path, lambda command: ranks.run_script(command, START_S)) == EXIT_CODES


@pytest.mark.stress
def test_fresh_interpreters_exit_with_70_and_1(tmp_path: Path):
    assert exit_codes(tmp_path, lambda command: ranks.run_command([sys.executable, *command], START_S)) == EXIT_CODES


EXIT_CODES = {"diverged": 70, "failed": 1}


def exit_codes(tmp_path: Path, run: Callable[[list[str]], ranks.CompletedRanks], planted: str = "") -> dict[str, int]:
    """Of a rank that fails in two ways, each in a process of its own, which begins with the lines `planted`."""
    source = """
        import sys
        import launch
        import spmd_worker.frontends.batch.job as job
        from spmd_worker.base.errors import RankFailedError, ReplicaDivergedError
        kinds = {"diverged": ReplicaDivergedError, "failed": RankFailedError}
        def fail(config, environment, watchdog, resolved):
            raise kinds[sys.argv[1]]("these are the words")
        job.run_job = fail
        sys.exit(launch.main([]))
        """
    script = tmp_path / "script.py"
    script.write_text(planted + "\n".join(line[8:] for line in source.splitlines()))
    codes = {}
    for kind in EXIT_CODES:
        done = run([str(script), kind])
        assert done.stderr == "error: these are the words\n", done.output
        codes[kind] = done.returncode
    return codes


@pytest.mark.control("Exit codes 70 and 1")
def test_comparison_detects_exchanged_exit_codes(tmp_path: Path):
    """Negative control: ranks that diverged have lost their code, and others end with it."""
    planted = """
from spmd_worker.base import errors
from spmd_worker.frontends import rank_program
errors.ReplicaDivergedError.exit_code = errors.SpmdError.exit_code
rank_program._end = lambda error, environment, watchdog: rank_program.fail(str(error), environment, 70)
"""
    codes = exit_codes(tmp_path, lambda command: ranks.run_script(command, START_S), planted)
    assert codes == {"diverged": 1, "failed": 70} != EXIT_CODES


def good_row(index: int) -> dict[str, Any]:
    """Five shapes in turn; short answers, because what matters here is that each row has one."""
    text, ending = f"add {index % 90} {index % 70} =", {"max_tokens": 3}
    messages = [{"role": "user", "content": text}]
    shapes: list[dict[str, Any]] = [
        {"prompt": text, **ending},
        {"prompt_token_ids": [65 + index % 20, 66, 67], **ending},
        {"messages": messages, **ending},
        {"method": "POST", "url": "/v1/completions", "body": {"model": "demo", "prompt": text, **ending}},
        {"method": "POST", "url": "/v1/chat/completions", "body": {"messages": messages, **ending}},
    ]
    return {"custom_id": f"row-{index}", **shapes[index % 5]}


@pytest.mark.guarantee("Exit 0: every row has its line, in input order")
def test_thousand_rows_with_errors_are_answered_in_order(tmp_path: Path):
    bad = {10 * number + 7: BAD_ROWS[number % 10](number) for number in range(100)}
    rows = [bad.get(index, good_row(index)) for index in range(1000)]
    write_rows(tmp_path / "rows.jsonl", rows)
    done = ranks.run_torchrun(
        [
            *(LAUNCH, *DEMO, "parallel.tensor_parallel_size=2", "job.input=rows.jsonl", "job.output=answers/out.jsonl"),
            "executor.timeout_s=60",
        ],
        nproc=2,
        timeout_s=START_S,
        cwd=tmp_path,
    ).checked()
    # Rank 0 made one run directory, beside the output, and nothing else.
    assert folder_listing(tmp_path) == [
        *("answers", "answers/out.jsonl", "answers/out.jsonl.run"),
        *(
            f"answers/out.jsonl.run/{name}"
            for name in ("lock", "manifest.json", "metrics.json", "provenance.json", "steps.csv")
        ),
        "rows.jsonl",
    ]
    outputs = read_rows(tmp_path / "answers" / "out.jsonl")
    check_rows(rows, outputs, bad)
    metrics = json.loads((tmp_path / "answers" / "out.jsonl.run" / "metrics.json").read_text())
    check_metrics(metrics, outputs)
    check_screen(done, metrics)


def check_rows(rows: list[Any], outputs: list[dict[str, Any]], bad: dict[int, Any]) -> None:
    assert len(outputs) == 1000
    codes: dict[str, int] = {}
    for index, (row, output) in enumerate(zip(rows, outputs, strict=True)):
        if index in bad:
            assert "outputs" not in output
            assert output.get("response") is None
            codes[output["error"]["code"]] = codes.get(output["error"]["code"], 0) + 1
            continue
        assert (output["custom_id"], output["error"]) == (row["custom_id"], None), output
        if "url" not in row:
            assert output["index"] == index
            assert list(output) == ["custom_id", "index", "outputs", "usage", "error"]
            assert 1 <= len(output["outputs"][0]["token_ids"]) == output["usage"]["completion_tokens"] <= 3
        else:
            check_openai_response(row, output)
    assert len(codes) == 10
    assert sum(codes.values()) == 100


def check_openai_response(row: dict[str, Any], output: dict[str, Any]) -> None:
    assert list(output) == ["id", "custom_id", "response", "error"]
    response = output["response"]
    assert (response["status_code"], type(response["request_id"])) == (200, str)
    body, choice = response["body"], response["body"]["choices"][0]
    assert body["usage"]["total_tokens"] == body["usage"]["prompt_tokens"] + body["usage"]["completion_tokens"]
    assert 1 <= body["usage"]["completion_tokens"] <= 3
    assert choice["finish_reason"] in ("stop", "length")
    if row["url"] == "/v1/completions":
        assert (body["object"], body["model"], type(choice["text"])) == ("text_completion", "demo", str)
    else:
        assert (body["object"], body["model"], choice["message"]["role"]) == ("chat.completion", "model", "assistant")


def check_metrics(metrics: dict[str, Any], outputs: list[dict[str, Any]]) -> None:
    usages = [
        output["usage"] if "usage" in output else output["response"]["body"]["usage"]
        for output in outputs
        if output["error"] is None
    ]
    assert (metrics["rows"], metrics["error_rows"]) == (1000, 100)
    assert sum(metrics["error_codes"].values()) == 100
    assert metrics["prompt_tokens"] == sum(usage["prompt_tokens"] for usage in usages)
    assert metrics["output_tokens"] == sum(usage["completion_tokens"] for usage in usages)
    assert metrics["cached_prompt_tokens"] + metrics["computed_prompt_tokens"] == metrics["prompt_tokens"]
    assert metrics["wall_s"] >= metrics["load_s"] + metrics["generate_s"] > 0
    assert metrics["peak_memory_bytes"] > 2**20
    assert metrics["preemptions"] >= 0
    assert metrics["steps"] > 0


def check_screen(done: ranks.CompletedRanks, metrics: dict[str, Any]) -> None:
    """Lines, not a bar; from rank 0 only; the summary says what metrics.json says."""
    assert "\r" not in done.output
    assert done.output.count("INFO loaded") == 1
    assert "[rank 1]" not in done.output
    tokens = metrics["output_tokens"]
    assert done.output.count(f"\n1,000 of 1,000 rows, {tokens:,} output tokens, ") == 1
    for line in (
        r"rows +1,000",
        r"error rows +100 \(.*10 invalid_json.*\)",
        rf"prompt tokens +{metrics['prompt_tokens']:,} \({metrics['computed_prompt_tokens']:,} computed, "
        rf"{metrics['cached_prompt_tokens']:,} from the cache\)",
        rf"output tokens +{tokens:,}",
        r"time to load +[\d.]+ s",
        r"time to generate +[\d.]+ s",
        r"peak memory +[\d.]+ [MG]iB",
        rf"preemptions +{metrics['preemptions']}",
    ):
        assert len(re.findall(f"(?m)^{line}$", done.stderr)) == 1, (line, done.stderr)


def test_terminal_shows_a_bar(tmp_path: Path):
    write_rows(tmp_path / "rows.jsonl", [good_row(index) for index in range(5)])
    controller, terminal = pty.openpty()
    arguments = [*DEMO, "job.input=rows.jsonl", "job.output=out.jsonl"]
    process = subprocess.Popen(
        [sys.executable, str(LAUNCH), *arguments],
        stderr=terminal,
        stdout=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TERM": "xterm", "COLUMNS": "100"},
    )
    os.close(terminal)
    screen = read_to_end(controller)
    assert process.wait(START_S) == 0, screen
    assert "\r" in screen
    assert re.search(r"rows: 100%\|.*\| 5/5 \[.*tokens/s\]", screen), screen
    assert "5 of 5 rows" not in screen


def read_to_end(descriptor: int) -> str:
    pieces = []
    while True:
        try:
            piece = os.read(descriptor, 65536)
        except OSError:  # Linux's way of saying that the other side was closed
            break
        if not piece:
            break
        pieces.append(piece)
    os.close(descriptor)
    return b"".join(pieces).decode(errors="replace")


@pytest.mark.guarantee("The host's random states stay", is_control_inside=True)
def test_import_and_run_leave_the_host_process_unchanged():
    # Trainers import us: their seeds, signal handlers, environment and threads are theirs.
    source = f"""
        import os, random, signal, sys, threading, logging
        import numpy, torch

        def state():
            return {{
                "environment": dict(os.environ),
                "random": random.getstate(),
                "numpy": [str(part) for part in numpy.random.get_state()],
                "torch": torch.get_rng_state().tolist(),
                "signals": {{number: signal.getsignal(number) for number in signal.valid_signals()}},
                "threads": torch.get_num_threads(),
                "dtype": torch.get_default_dtype(),
                "grad": torch.is_grad_enabled(),
                "deterministic": torch.are_deterministic_algorithms_enabled(),
                "hooks": (sys.excepthook, threading.excepthook),
                "folder": os.getcwd(),
                "root handlers": list(logging.getLogger().handlers),
                "our handlers": list(logging.getLogger("spmd_worker").handlers),
            }}

        before = state()
        from spmd_worker import LLM, RequestOutput, SamplingParams
        import spmd_worker.frontends.batch.job
        after_import = state()
        with LLM({str(MODEL)!r}, num_blocks=64, device="cpu") as llm:
            outputs = llm.generate(["add 12 30 ="] * 3, SamplingParams(temperature=0.8, max_tokens=4), use_tqdm=False)
        after_running = state()
        assert len(outputs) == 3 and outputs[0].error is None, outputs
        for moment, now in (("importing", after_import), ("running", after_running)):
            print([f"{{moment}} changed {{name}}" for name in before if now[name] != before[name]])
        random.random()
        print("control", state()["random"] != before["random"])
        """
    done = ranks.run_ranks(source, nproc=1, timeout_s=START_S).checked()
    assert done.stdout.splitlines() == ["[]", "[]", "control True"], done.output
