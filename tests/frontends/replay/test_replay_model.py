"""Tokens of a run, recomputed from its step log on one rank: equal with its weights, reported if different."""

import json
import re
import shutil
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
import torch
from adapter_folders import write_lora, write_prompt_adapter
from retrained import retrain
from safetensors.torch import load_file
from tools_main import tool

from kv_cache.cache_engine import CacheEngine
from spmd_worker import LLM, LoRARequest, PromptAdapterRequest, SamplingParams
from spmd_worker.base.config.schema import (
    CacheConfig,
    JobConfig,
    ModelOptions,
    RunConfig,
    SamplingConfig,
    SchedulerConfig,
)
from spmd_worker.frontends.batch.job import run_job
from spmd_worker.frontends.batch.run_dir.run_records import open_step_log
from spmd_worker.frontends.replay.replay import read_messages
from spmd_worker.frontends.replay.step_log import StepLogWriter, read_step_log
from spmd_worker.ranks.environment import RankEnvironment
from spmd_worker.replica.sequence.events import RemoveAdapter

REPOSITORY = Path(__file__).parents[3]
DEMO = REPOSITORY / "scripts" / "demo"
DUMMY = {"load_format": "dummy", "weight_files": (), "weight_digests": ()}
"""Header of a run with dummy weights."""


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small job's log: sampled and greedy rows, one that forks, so little cache that some are preempted."""
    return run_logged(tmp_path_factory.mktemp("job"), CacheConfig(num_blocks=16), "auto")


@pytest.fixture(scope="module")
def log_of_moves(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same rows with a cache in FP8, swapped out and back, and blocks stored on the host and loaded again."""
    cache = CacheConfig(dtype="fp8", num_blocks=64, block_size=4, swap_space_gib=0.0005, host_tier_gib=0.005)
    return run_logged(tmp_path_factory.mktemp("moves"), cache, "swap")


@pytest.fixture(scope="module")
def log_ahead(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The job's log where steps were decided before the ids of the last were read."""
    return run_logged(tmp_path_factory.mktemp("ahead"), CacheConfig(num_blocks=16), "auto", is_async=True)


def run_logged(folder: Path, cache: CacheConfig, preemption_mode: str, *, is_async: bool | None = None) -> Path:
    lines = (DEMO / "prompts.jsonl").read_text().splitlines()[:10]
    rows = [json.loads(line) for line in lines]
    rows = [{**row, "temperature": number % 2, "max_tokens": 24} for number, row in enumerate(rows)]
    rows[3]["n"] = 2
    # Again with other names, once the cache has forgotten the first.
    rows += [{**row, "custom_id": f"again-{number}"} for number, row in enumerate(rows)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    job = JobConfig(
        input=str(folder / "rows.jsonl"),
        output=str(folder / "out.jsonl"),
        run_dir=str(folder),
        step_log=True,
        # In the order of the file: rows with one beginning together would fit.
        window_rows=1,
    )
    config = RunConfig(
        model=ModelOptions(path=str(DEMO / "model")),
        cache=cache,
        scheduler=SchedulerConfig(max_num_seqs=16, preemption_mode=preemption_mode, async_scheduling=is_async),
        sampling=SamplingConfig(),
        job=job,
        device="cpu",
    )
    run_job(config, RankEnvironment())
    assert json.loads((folder / "metrics.json").read_text())["preemptions"] > 0
    return folder / "steps.log"


@pytest.fixture
def run_script(capsys: pytest.CaptureFixture[str]):
    return tool("replay", capsys)


def with_header(source: Path, target: Path, **changes: object) -> Path:
    """The same messages under another header."""
    log = read_step_log(source)
    with StepLogWriter(target, replace(log.header, **changes)) as writer:
        for payload in log.messages():
            writer.write(payload)
    return target


def test_every_token_of_run_is_recomputed(log: Path, run_script):
    code, output, _ = run_script(log, "--with-model")
    assert code == 0
    assert re.search(r"\nreplayed \d+ steps, digests equal\n(\d+) of \1 tokens equal\n$", output)


def test_every_token_of_block_moving_run_is_recomputed(log_of_moves: Path, run_script):
    log = read_step_log(log_of_moves)
    assert log.header.cache_dtype == "fp8"
    messages = list(read_messages(log.messages()))
    for kind in ("swap_out", "swap_in", "store", "load"):
        assert any(getattr(message.plan.block_ops, kind) for message in messages), f"no {kind}"
    code, output, _ = run_script(log_of_moves, "--with-model")
    assert code == 0
    assert re.search(r"\nreplayed \d+ steps, digests equal\n(\d+) of \1 tokens equal\n$", output)


def test_every_token_of_async_run_is_recomputed(log_ahead: Path, run_script):
    log = read_step_log(log_ahead)
    assert sum(message.plan.num_ahead for message in read_messages(log.messages(), log.header.num_in_flight)) > 50
    code, output, _ = run_script(log_ahead, "--with-model")
    assert code == 0
    assert "steps planned ahead of ids" in output
    assert re.search(r"\nreplayed \d+ steps, digests equal\n(\d+) of \1 tokens equal\n$", output)
    # Negative control: of other weights each other token is named once, for the next step goes on by the log's.
    other = with_header(log_ahead, log_ahead.parent / "dummy", **DUMMY)
    code, output, _ = run_script(other, "--with-model")
    assert code == 1
    assert re.search(r"\n  step \d+, request \d+, sample 0, position \d+: \d+ in the log, \d+ recomputed\n", output)


def test_recomputation_detects_blocks_that_did_not_move(
    log_of_moves: Path, run_script, monkeypatch: pytest.MonkeyPatch
):
    """Negative control: swapped-in blocks matter."""
    right = CacheEngine.execute
    monkeypatch.setattr(CacheEngine, "execute", lambda self, moves: right(self, replace(moves, swap_in=())))
    code, output, _ = run_script(log_of_moves, "--with-model")
    assert code == 1
    num_equal, num_all = map(int, re.findall(r"\n(\d+) of (\d+) tokens equal\n$", output)[0])
    assert num_equal < num_all


def test_other_weights_give_other_tokens_each_named(log: Path, tmp_path: Path, run_script):
    other = with_header(log, tmp_path / "dummy", **DUMMY)
    code, output, _ = run_script(other, "--with-model")
    assert code == 1
    line = r"\n  step 2, request \d+, sample 0, position \d+: \d+ in the log, \d+ recomputed\n"
    assert re.search(line, output)
    assert re.search(r"\n  and \d+ more\n", output)
    num_equal, num_all = map(int, re.findall(r"\n(\d+) of (\d+) tokens equal\n$", output)[0])
    assert num_equal < num_all


def test_sums_that_one_rank_does_not_make_are_named(
    log: Path, tmp_path: Path, run_script, caplog: pytest.LogCaptureFixture
):
    """The first steps alone: the log's leaves are those of the recomputation."""
    source, words = read_step_log(log), "by 3 ranks (tensor_parallel_size 3)"
    assert (source.header.num_leaves, source.header.row_sums[:11]) == (4, "in 4 leaves")
    for number, changes in enumerate(
        ({"row_sums": words}, {"num_leaves": 2, "row_sums": "in 2 leaves (tensor_parallel_size 1 or 2)"}, {})
    ):
        caplog.clear()
        with StepLogWriter(tmp_path / f"{number}", replace(source.header, **changes)) as writer:
            for payload in islice(source.messages(), 3):
                writer.write(payload)
        assert run_script(writer.path, "--with-model")[0] == 0
        found = [each for each in caplog.messages if "the run added row-parallel sums" in each]
        assert len(found) == (number == 0)
        assert not found or f"added row-parallel sums {words}, and one rank adds them in 4 leaves" in found[0]


def test_moved_model_is_given_with_model_option(log: Path, tmp_path: Path, run_script):
    moved = with_header(log, tmp_path / "moved", model_path=str(tmp_path / "gone"))
    code, _, errors = run_script(moved, "--with-model")
    assert code == 2
    assert f"model.path={tmp_path / 'gone'} is not a folder" in errors
    assert run_script(moved, "--with-model", "--model", DEMO / "model")[0] == 0


def test_other_weights_are_refused(log: Path, tmp_path: Path, run_script):
    """Regression: a retrained model's tokens were reported as the run's fault."""
    shutil.copytree(DEMO / "model", tmp_path / "model")
    assert run_script(log, "--with-model", "--model", tmp_path / "model")[0] == 0
    retrain(tmp_path / "model")
    code, _, errors = run_script(log, "--with-model", "--model", tmp_path / "model")
    assert code == 2
    assert f"model.safetensors of {tmp_path / 'model'} has other weights than in the run: give --model" in errors
    unnamed = with_header(log, tmp_path / "unnamed", weight_files=(), weight_digests=())
    assert run_script(unnamed, "--with-model", "--model", tmp_path / "model")[0] == 1, "negative control"


def test_tokens_are_recomputed_only_before_new_weights(tmp_path: Path, run_script):
    greedy, weights = SamplingParams(temperature=0, max_tokens=8), load_file(DEMO / "model" / "model.safetensors")
    with LLM(DEMO / "model", num_blocks=64) as llm, open_step_log(llm.llm_engine, tmp_path) as writer:
        for _ in range(2):
            llm.generate("3 + 4 =", greedy, use_tqdm=False)
            llm.sleep()
            llm.wake_up()
        llm.generate("3 + 4 =", greedy, use_tqdm=False)
        before = writer.path.read_bytes()
        llm.update_weights((name, each * -1) for name, each in weights.items())
        llm.generate("3 + 4 =", greedy, use_tqdm=False)
    # Asleep and awake again, a model answers as before.
    assert writer.path.read_bytes().startswith(before)
    code, output, errors = run_script(writer.path, "--with-model")
    assert code == 2
    assert re.search(r"step \d+ computes with the new weights of version -?\d+ \(step \d+\), which the log", errors)
    num_equal, num_all = map(int, re.findall(r"\n(\d+) of (\d+) tokens equal\n$", output)[0])
    assert num_equal == num_all >= 3


def test_rows_with_adapters_are_recomputed(tmp_path: Path, run_script):
    """Adapters of the start, and one that a call has loaded in place of another, are read from their folders again."""
    greedy = SamplingParams(temperature=0, max_tokens=6)
    folders = {name: write_lora(tmp_path / name, seed) for seed, name in enumerate("abc")}
    requests = [LoRARequest(name, number, folders[name]) for number, name in enumerate("abc", 1)]
    options = {"adapters": {"a": folders["a"]}, "max_loras": 1, "max_cpu_loras": 2}
    with LLM(DEMO / "model", num_blocks=64, **options) as llm, open_step_log(llm.llm_engine, tmp_path) as writer:
        for others in (requests[1], requests[2]):
            adapters = [requests[0], None, others, requests[0]]
            llm.generate(["3 + 4 ="] * 4, greedy, lora_request=adapters, use_tqdm=False)
        assert llm.list_loras() == {1, 3}
        llm.remove_lora(3)
        llm.generate("3 + 4 =", greedy, use_tqdm=False)
    code, output, _ = run_script(writer.path, "--with-model")
    assert code == 0
    assert re.search(r"\nreplayed \d+ steps, digests equal\n(\d+) of \1 tokens equal\n$", output)
    messages = read_messages(read_step_log(writer.path).messages())
    removed = next(each.step for each in messages if RemoveAdapter(3) in each.events)
    assert "\n  then LoRA adapter 3 is removed\n" in run_script(writer.path, "--until", str(removed))[1]
    write_lora(tmp_path / "c", 9)
    code, _, errors = run_script(writer.path, "--with-model")
    assert code == 2
    assert f"LoRA adapter 3 ('c'), whose folder {folders['c']} has another content than in the run" in errors
    write_lora(tmp_path / "a", 9)
    _, _, errors = run_script(writer.path, "--with-model")
    assert f"the run had LoRA adapter 1 ('a'), whose folder {folders['a']} has another content" in errors


def test_prompt_adapters_are_read_again_and_embeddings_end_replay(tmp_path: Path, run_script):
    greedy = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    write_prompt_adapter(tmp_path / "start", 128, 8, 5)
    options = {"num_blocks": 64, "block_size": 8, "prompt_adapters": {"start": str(tmp_path / "start")}}
    with LLM(DEMO / "model", **options) as llm, open_step_log(llm.llm_engine, tmp_path) as writer:
        config = llm.llm_engine.resolved.model_config
        widths = {
            "PROMPT_TUNING": config.embedding_size,
            "PREFIX_TUNING": sum(2 * layer.num_kv_heads * layer.head_size for layer in config.layers),
        }
        start = PromptAdapterRequest("start", 1, str(tmp_path / "start"), 8)
        llm.generate("3 + 4 =", greedy, prompt_adapter_request=start, use_tqdm=False)
        for number, (kind, width) in enumerate(widths.items(), start=2):
            folder = write_prompt_adapter(tmp_path / kind, width, 9, number, kind)
            request = PromptAdapterRequest(kind, number, str(folder), 9)
            llm.generate(["3 + 4 =", "a b"], greedy, prompt_adapter_request=request, use_tqdm=False)
        llm.generate({"prompt_embeds": torch.zeros(7, config.embedding_size)}, greedy, use_tqdm=False)
    code, output, errors = run_script(writer.path, "--with-model")
    assert code == 2
    assert re.search(
        r"step \d+ computes with the embeddings of request 5 \(prompt_embeds\), which the log does not", errors
    )
    num_equal, num_all = map(int, re.findall(r"\n(\d+) of (\d+) tokens equal\n$", output)[0])
    assert num_equal == num_all == 25
    code, output, _ = run_script(writer.path)
    assert code == 0
    assert "digests equal" in output
    assert "7 prompt tokens" in run_script(writer.path, "--row", "5")[1]
    (tmp_path / "PREFIX_TUNING" / "adapter_model.safetensors").unlink()
    code, output, errors = run_script(writer.path, "--with-model")
    assert code == 2
    assert "prompt adapter 3 ('PREFIX_TUNING')" in errors
    write_prompt_adapter(tmp_path / "start", 128, 8, 6)
    _, _, errors = run_script(writer.path, "--with-model")
    assert f"the run had prompt adapter 1 ('start'), whose folder {tmp_path}/start has another content" in errors


def test_as_many_prompt_adapters_as_in_the_run_are_recomputed(tmp_path: Path, run_script):
    """The executor of a replay had the default limit, and evicted adapters that the run had kept."""
    greedy = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    requests = [
        PromptAdapterRequest(f"{seed}", seed, str(write_prompt_adapter(tmp_path / f"{seed}", 128, 8, seed)), 8)
        for seed in range(1, 18)
    ]
    options = {"num_blocks": 64, "block_size": 8, "max_prompt_adapters": 17, "enable_prefix_caching": False}
    with LLM(DEMO / "model", **options) as llm, open_step_log(llm.llm_engine, tmp_path) as writer:
        for request in requests:
            llm.add_prompt_adapter(request)
        llm.generate("3 + 4 =", greedy, prompt_adapter_request=requests[0], use_tqdm=False)
    code, output, errors = run_script(writer.path, "--with-model")
    assert code == 0, errors
    assert output.endswith("2 of 2 tokens equal\n")
