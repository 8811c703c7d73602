"""Every family with states, latent caches or several shapes of layers, in float32 and bfloat16: whatever happens to a
row, its tokens, its log-probabilities and what the cache keeps of it have the bits of the row alone.

Each run checks queues, tables, pools and slots against each other after every step (SPMD_WORKER_CHECK).
"""

import json
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
from cut_jobs import Ended, end_after
from every_way import (
    KINDS,
    PREEMPTIONS,
    WAYS,
    Kept,
    differences,
    few_blocks,
    folder_of,
    kept_in,
    rows_for,
    settings_for,
)
from state_rows import answers_of

from kv_cache.cache_engine import CacheEngine
from kv_cache.state_engine import StateEngine
from spmd_worker import LLM
from spmd_worker.base.config.compose import compose_run
from spmd_worker.frontends.batch.job import run_job
from spmd_worker.ranks.environment import RankEnvironment

DTYPES = ("float32", "bfloat16")
NUM_DONE = 2
"""Rows that a job has answered when it ends."""

pytestmark = [pytest.mark.stress, pytest.mark.usefixtures("checks_after_every_step")]
each_kind = pytest.mark.parametrize("kind", KINDS)
each_dtype = pytest.mark.parametrize("dtype", DTYPES)


def started(kind: str, dtype: str, **settings: Any) -> LLM:
    return LLM(folder_of(kind), **{**settings_for(kind, dtype), **settings})


def alone(kind: str, dtype: str, num_samples: int = 1) -> tuple[list[Any], Kept]:
    """Answers of each row by itself, whole, with an empty cache; and all that the cache keeps of them."""
    rows, params = rows_for(kind, num_samples)
    found, kept = [], {}
    with started(kind, dtype) as llm:
        for row, sampling in zip(rows, params, strict=True):
            found += answers_of(llm.generate([row], [sampling], use_tqdm=False))
            kept |= kept_in(llm)
            llm.reset_prefix_cache()
    return found, kept


def check_kept(llm: LLM, kept: Kept, way: str) -> None:
    num_both, unlike = differences(kept, kept_in(llm))
    assert num_both > 0, way
    assert unlike == [], way


@pytest.mark.guarantee("A row's answer depends on the row alone")
@each_dtype
@each_kind
def test_row_and_its_cache_ignore_the_way(kind: str, dtype: str) -> None:
    """Together, cut, ahead, verified, four times in turn, scored, asleep between, beside rows that are aborted."""
    rows, params = rows_for(kind)
    expected, kept = alone(kind, dtype)
    for way, settings in WAYS.items():
        with started(kind, dtype, **settings) as llm:
            for _ in range(4 if way == "together" else 2):
                assert answers_of(llm.generate(rows, params, use_tqdm=False)) == expected, way
                check_kept(llm, kept, way)
            counters = llm.llm_engine.counters
            assert counters.num_cached_prompt_tokens + counters.num_verified_hits > 0, way
            if way == "together":
                check_scores(llm, rows, expected)
                llm.sleep(1)
                llm.wake_up()
                assert answers_of(llm.generate(rows, params, use_tqdm=False)) == expected, "after sleep"
                check_kept(llm, kept, "after sleep")
    check_aborted(kind, dtype, expected)


def check_scores(llm: LLM, rows: list[dict[str, Any]], expected: list[Any]) -> None:
    """Scores of the answers are the log-probabilities that came with them: those of `logprobs=1` are unscaled."""
    ids = [row["prompt_token_ids"] for row in rows]
    scores = llm.score_tokens(ids, [samples[0][0] for samples in expected])
    with_sampled = [set(samples[0][1]) for samples in expected]
    for row, (found, reported) in enumerate(zip(scores, with_sampled, strict=True)):
        assert set(found) <= reported, row


def check_aborted(kind: str, dtype: str, expected: list[Any]) -> None:
    rows, params = rows_for(kind)
    outputs = {}
    with started(kind, dtype, max_num_batched_tokens=40, max_num_seqs=4) as llm:
        engine = llm.llm_engine
        for index, (row, sampling) in enumerate(zip(rows, params, strict=True)):
            engine.add_request(str(index), row, sampling)
        num_steps = 0
        while engine.has_unfinished_requests():
            outputs |= {output.request_id: output for output in engine.step() if output.finished}
            num_steps += 1
            if num_steps == 5:
                engine.abort_request(["1"])
    left = [index for index in range(len(rows)) if index != 1]
    assert answers_of([outputs[str(index)] for index in left]) == [expected[index] for index in left], "beside aborted"


@each_dtype
@each_kind
def test_preempted_samples_ignore_the_way(kind: str, dtype: str) -> None:
    """Four samples a row: forked, and preempted both ways."""
    rows, params = rows_for(kind, 4)
    expected, kept = alone(kind, dtype, num_samples=4)
    for way, settings in PREEMPTIONS.items():
        with started(kind, dtype, **few_blocks(kind), **settings) as llm:
            assert answers_of(llm.generate(rows, params, use_tqdm=False)) == expected, way
            counters = llm.llm_engine.counters
            assert counters.num_preemptions > 0, way
            assert (counters.num_swapped_in > 0) == (way == "swap")
            check_kept(llm, kept, way)


ON_RANKS = """
import json, os, sys
from pathlib import Path
from spmd_worker import LLM
from spmd_worker.base.errors import ConfigError
from every_way import rows_for
from state_rows import answers_of

job, out = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
rows, params = rows_for(job["kind"])
answers = {}
for layout, sizes in job["layouts"].items():
    try:
        llm = LLM(job["folder"], **sizes, **job["settings"])
    except ConfigError as error:
        answers[layout] = str(error)
        continue
    with llm:
        # Twice: the second time from what is kept.
        answers[layout] = [answers_of(llm.generate(rows, params, use_tqdm=False)) for _ in range(2)]
(out / f"{os.environ['RANK']}.json").write_text(json.dumps(answers))
"""
LAYOUTS: dict[str, dict[str, Any]] = {
    "pipeline": {"pipeline_parallel_size": 2},
    "data": {"data_parallel_size": 2},
    "tensor": {"tensor_parallel_size": 2},
}


REFUSED = {"pipeline": "its layers read keys of other layers", "tensor": "row-parallel sums have 1 leaf"}
"""Words of errors about layouts that a model cannot have: stages if layers share keys, leaves of few columns."""


@each_dtype
@each_kind
def test_two_ranks_answer_as_one(kind: str, dtype: str, tmp_path: Path) -> None:
    """Stages and replicas bit for bit; shards too in bfloat16, with leaves, and to 1e-4 in float32, without."""
    rows, params = rows_for(kind)
    settings = {**settings_for(kind, dtype), "max_num_batched_tokens": 40}
    leaves = {"invariant_tensor_parallel": True} if dtype == "bfloat16" else {}
    layouts = {**LAYOUTS, "tensor": {**LAYOUTS["tensor"], **leaves}}
    (tmp_path / "job.json").write_text(
        json.dumps({"kind": kind, "folder": str(folder_of(kind)), "layouts": layouts, "settings": settings})
    )
    first, second = ranks.reports(ON_RANKS, 2, tmp_path, [tmp_path / "job.json"], timeout_s=600)
    assert first == second
    for layout, sizes in layouts.items():
        if isinstance(first[layout], str):
            assert REFUSED[layout] in first[layout], first[layout]
            continue
        shared = {key: value for key, value in sizes.items() if key == "invariant_tensor_parallel"}
        with started(kind, dtype, **shared) as llm:
            expected = json.loads(json.dumps(answers_of(llm.generate(rows, params, use_tqdm=False))))
        for found in first[layout]:
            if layout == "tensor" and not shared:
                assert_near(found, expected)
            else:
                assert found == expected, layout


def assert_near(found: list[Any], expected: list[Any]) -> None:
    for samples, their_samples in zip(found, expected, strict=True):
        for (ids, logprobs), (their_ids, their_logprobs) in zip(samples, their_samples, strict=True):
            assert ids == their_ids
            assert logprobs == pytest.approx(their_logprobs, abs=1e-4)


@each_dtype
@each_kind
def test_resumed_job_writes_the_same_bytes(kind: str, dtype: str, tmp_path: Path) -> None:
    rows, params = rows_for(kind)
    lines = [
        json.dumps({**row, "max_tokens": each.max_tokens, "temperature": 0.8, "ignore_eos": True, "logprobs": 1})
        for row, each in zip(rows, params, strict=True)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(f"{line}\n" for line in lines))

    def run(output: str) -> bytes:
        keys = {
            "model.path": folder_of(kind),
            "model.dtype": dtype,
            "model.max_model_len": settings_for(kind, dtype)["max_model_len"],
            "device": "cpu",
            "cache.num_blocks": 160,
            "scheduler.max_num_seqs": 3,
            "scheduler.max_num_batched_tokens": 40,
            "job.commit_rows": 1,
            "job.input": tmp_path / "rows.jsonl",
            "job.output": tmp_path / output,
        }
        words = [f"{key}={value}" for key, value in keys.items()]
        run_job(compose_run(ranks.REPOSITORY / "conf", words), RankEnvironment())
        return (tmp_path / output).read_bytes()

    whole = run("whole.jsonl")
    assert whole.count(b"\n") == len(rows)
    assert b"error" not in whole.replace(b'"error": null', b"")
    with pytest.MonkeyPatch.context() as monkeypatch:
        end_after(monkeypatch, NUM_DONE)
        with pytest.raises(Ended):
            run("resumed.jsonl")
    assert run("resumed.jsonl") == whole


@pytest.mark.control("A row's answer depends on the row alone")
@pytest.mark.parametrize("engine", [CacheEngine, StateEngine])
def test_changed_byte_of_the_cache_is_seen(engine: type) -> None:
    """The negative control of what is kept: the last byte of one block, or of one snapshot, is another."""
    kind, dtype = "delta nets qwen3_5", "bfloat16"
    rows, params = rows_for(kind)
    _, kept = alone(kind, dtype)
    with started(kind, dtype) as llm:
        llm.generate(rows, params, use_tqdm=False)
        check_kept(llm, kept, "unchanged")
        scheduler, caches = llm.llm_engine.scheduler, llm.llm_engine.executor.driver_worker.worker.running.caches
        if engine is CacheEngine:
            place, tensors = next(iter(scheduler.cache._pool._index.values())), caches.engine.model_tensors
        else:
            place, tensors = (
                next(iter(scheduler.state_slots._pool._index.values())),
                caches.engine.states.lasting_tensors,
            )
        tensors[-1][:, place].view(torch.uint8)[..., -1] ^= 1
        with pytest.raises(AssertionError):
            check_kept(llm, kept, "changed")
