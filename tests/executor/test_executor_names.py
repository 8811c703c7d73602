"""Names of vLLM's executor and worker: sleep, dummy batches, profile, ranks. As a script it is one of several ranks."""

import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
from context_fixtures import fixture_of

from spmd_worker import LLM, SamplingParams
from spmd_worker.base.errors import WorkerEventError
from spmd_worker.compat.methods import EXECUTOR_NAMES, WORKER_NAMES
from spmd_worker.executor.executor import Executor

MODEL = ranks.REPOSITORY / "scripts" / "demo" / "model"
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
PROMPTS = ["copy q =", "a much longer prompt that fills more than one block of sixteen tokens, and then some"]


def open_llm(**options: Any) -> LLM:
    return LLM(MODEL, **{"device": "cpu", "num_blocks": 64, "timeout_s": 120.0, **options})


llm = fixture_of(open_llm)


@pytest.fixture
def executor(llm: LLM) -> Iterator[Executor]:
    made = llm.llm_engine.model_executor
    yield made
    if made.is_sleeping:
        llm.wake_up()


def answers(llm: LLM) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


def num_cached_tokens(llm: LLM) -> int:
    return sum(output.num_cached_tokens for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False))


def test_executor_and_worker_have_all_listed_names(executor: Any):
    for name in EXECUTOR_NAMES:
        assert hasattr(executor, name), name
    for name in WORKER_NAMES:
        assert hasattr(executor.driver_worker.worker, name), name


def test_wrapper_passes_public_attributes_of_its_worker(executor: Any):
    wrapper = executor.driver_worker
    names = ("rank", "local_rank", "is_driver_worker", "do_metadata_broadcast", "vocab_size")
    assert [getattr(wrapper, name) for name in names] == [0, 0, True, False, wrapper.worker.vocab_size]
    assert len(wrapper.kv_cache[0]) == 4
    assert wrapper.kv_cache[0][3].data_ptr() == wrapper.running.caches.engine.tensors[0][3].data_ptr()
    with pytest.raises(AttributeError, match=r"^'Worker' .*'frobnicate'"):
        _ = wrapper.frobnicate
    with pytest.raises(AttributeError, match=r"^WorkerWrapper .*'_running'"):
        _ = wrapper._running
    # Regression: a property was read as a method, which ended calls of a sleeping engine with an assertion.
    with pytest.raises(AttributeError, match=r"a worker has no method 'kv_cache'$"):
        wrapper.execute_method("kv_cache")


def test_available_memory_counts_complete_blocks(executor: Executor):
    (block_bytes,) = executor.collective_rpc("get_cache_block_size_bytes")
    assert executor.determine_available_memory() == [64 * block_bytes]


def test_dummy_batch_leaves_cache_and_answers_unchanged(llm: LLM, executor: Any):
    expected, cache = answers(llm), executor.driver_worker.running.caches.engine.tensors[0].clone()
    executor.execute_dummy_batch()
    assert torch.equal(executor.driver_worker.running.caches.engine.tensors[0], cache)
    assert answers(llm) == expected
    llm.llm_engine.add_request("a", PROMPTS[0], GREEDY)
    llm.llm_engine.step()
    with pytest.raises(RuntimeError, match=r"^1 requests .*being answered"):
        executor.execute_dummy_batch()
    while llm.llm_engine.has_unfinished_requests():
        llm.llm_engine.step()


def test_executor_sleep_forgets_the_prefix_cache(llm: LLM, executor: Executor, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO, logger="spmd_worker")
    expected = answers(llm)
    executor.sleep(1)
    assert executor.sleeping_tags == ("weights", "kv_cache")
    assert "fell asleep in" in caplog.text
    assert "sleep already" not in caplog.text
    executor.sleep(level=1)
    assert "sleep(level=1): weights and kv_cache sleep already" in caplog.text
    with pytest.raises(ValueError, match="level=3"):
        executor.sleep(3)
    with pytest.raises(ValueError, match=r"tags=\['memory'\]"):
        executor.wake_up(["memory"])
    with pytest.raises(RuntimeError, match="sleep: call wake_up"):
        executor.execute_dummy_batch()
    executor.wake_up(["weights"])
    executor.wake_up()
    assert not llm.is_sleeping
    assert num_cached_tokens(llm) == 0
    caplog.clear()
    executor.wake_up()
    assert "wake_up(): nothing of it sleeps" in caplog.text
    assert answers(llm) == expected


def test_executor_that_is_not_attached_serves_lost_blocks(llm: LLM, executor: Any, monkeypatch: pytest.MonkeyPatch):
    """Negative control: the scheduler was not told, and its index names blocks that the sleep has dropped."""
    answers(llm)
    monkeypatch.setattr(executor, "_engine", lambda: None)
    executor.sleep()
    executor.wake_up()
    assert num_cached_tokens(llm) > 0
    llm.reset_prefix_cache()


def test_executor_profile_writes_a_trace(executor: Executor, tmp_path: Path):
    executor.profile(folder=tmp_path)
    assert executor.profile(is_start=False) == [str(tmp_path / "trace.rank0.json")]
    assert executor.collective_rpc("profile", args=(True, str(tmp_path / "own"))) == [None]
    assert executor.collective_rpc("profile", args=(False,)) == [str(tmp_path / "own" / "trace.rank0.json")]
    with pytest.raises(ValueError, match="needs the folder"):
        executor.profile()
    with pytest.raises(WorkerEventError, match="no profile is running"):
        executor.profile(False)
    with pytest.raises(RuntimeError, match="no profile is running"):
        executor.collective_rpc("profile", args=(False,))


def test_names_without_effect_answer(executor: Any):
    executor.reset_mm_cache()
    # A model of text keeps nothing of images.
    assert executor.driver_worker.mm_receiver_cache is None
    assert executor.driver_worker._apply_mm_cache(None) is None
    assert executor.take_draft_token_ids() is None
    assert (executor.uses_ray, executor.supports_pp) == (False, True)


@pytest.mark.gate("pipeline_parallel_size")
@pytest.mark.matrix
@pytest.mark.parametrize("layout", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_names_answer_on_two_ranks(layout: str):
    done = ranks.run_forked([Path(__file__), layout], nproc=2, timeout_s=240).checked()
    is_first_stage = layout == "pipeline_parallel_size"
    assert sorted(done.stdout.splitlines()) == ["0 0 True", f"1 1 {is_first_stage}"]


def on_a_rank(layout: str) -> None:
    with open_llm(**{layout: 2}) as llm:
        executor = llm.llm_engine.model_executor
        expected = answers(llm)
        executor.execute_dummy_batch()
        assert answers(llm) == expected
        executor.sleep()
        executor.wake_up()
        assert answers(llm) == expected
        wrapper = executor.driver_worker
        os.write(1, f"{wrapper.rank} {wrapper.local_rank} {wrapper.is_driver_worker}\n".encode())


if __name__ == "__main__":
    on_a_rank(sys.argv[1])
