"""Sleep and wake-up: memory is given back, nothing is computed with weights that are not there, all ranks or none.

As a script it is one of several ranks.
"""

import gc
import json
import logging
import os
import random
import re
import sys
import traceback
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
from context_fixtures import fixture_of
from forked_workers import forked
from safetensors.torch import load_file
from test_weight_updates import (
    DP,
    GREEDY,
    MODEL,
    NORM,
    PP,
    PROMPTS,
    TP,
    answers,
    open_llm,
    own_answers,
    trainers_model,
)

from spmd_worker import LLM
from spmd_worker.base.errors import MissingWeightsError, WorkerEventError
from spmd_worker.executor.executor import Executor
from spmd_worker.worker.memory import host

BOTH = ("weights", "kv_cache")


@pytest.fixture(scope="module")
def old() -> list[Any]:
    with open_llm() as llm:
        return answers(llm)


llm = fixture_of(open_llm, "function")


def load(llm: LLM, *, but: str = "") -> None:
    pairs = load_file(MODEL / "model.safetensors").items()
    trainers_model(llm).load_weights([(name, tensor) for name, tensor in pairs if name != but])


def poison(llm: LLM) -> None:
    """Weights and cache of a worker that is awake are no numbers."""
    worker = llm.llm_engine.model_executor.driver_worker.worker
    for held in trainers_model(llm).weights.held.values():
        held.write(torch.full(held.shape, torch.nan))
    worker.running.caches.engine.tensors[0].fill_(torch.nan)


def cached_tokens(llm: LLM) -> int:
    return sum(output.num_cached_tokens for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sleep_level_1_keeps_answers_and_drops_cache(dtype: str):
    with open_llm(dtype=dtype, enable_sleep_mode=True, host_tier_gib=0.01, swap_space=0.01) as llm:
        expected = answers(llm)
        assert cached_tokens(llm) > 0
        llm.sleep()
        assert (llm.is_sleeping, llm.sleeping_tags) == (True, BOTH)
        assert llm.llm_engine.model_executor.is_sleeping
        llm.wake_up()
        assert (llm.is_sleeping, llm.sleeping_tags) == (False, ())
        assert cached_tokens(llm) == 0
        assert answers(llm) == expected
        llm.sleep(level=2)
        llm.wake_up()
        llm.collective_rpc("reload_weights")
        assert answers(llm) == expected


def as_trl_does(llm: LLM) -> None:
    llm.wake_up(tags=["weights"])
    poison_weights_only(llm)
    for pair in load_file(MODEL / "model.safetensors").items():
        trainers_model(llm).load_weights([pair])
    llm.reset_prefix_cache()
    llm.wake_up(tags=["kv_cache"])


def poison_weights_only(llm: LLM) -> None:
    for held in trainers_model(llm).weights.held.values():
        held.write(torch.full(held.shape, torch.nan))


def all_at_once(llm: LLM) -> None:
    llm.wake_up()
    poison(llm)
    load(llm)


def cache_first(llm: LLM) -> None:
    llm.reset_prefix_cache()
    llm.wake_up(["kv_cache"])
    llm.set_weight_version(7)
    llm.wake_up(["weights"])
    llm.wake_up(["weights", "kv_cache"])
    poison(llm)
    llm.update_weights(load_file(MODEL / "model.safetensors").items())


def cache_before_the_load(llm: LLM) -> None:
    llm.wake_up(["weights"])
    llm.wake_up(["kv_cache"])
    poison(llm)
    with llm.weight_update() as put:
        for name, tensor in load_file(MODEL / "model.safetensors").items():
            put(name, tensor)


def in_two_partial_updates(llm: LLM) -> None:
    llm.wake_up()
    poison(llm)
    llm.start_weight_update(partial=True)
    load(llm, but=NORM)
    with pytest.raises(MissingWeightsError, match=rf"dropped .*:\n  {NORM}\nload .*$"):
        llm.finish_weight_update()
    llm.update_weights([(NORM, load_file(MODEL / "model.safetensors")[NORM])])


def asleep_again(llm: LLM) -> None:
    llm.wake_up()
    load(llm)
    answers(llm)
    llm.sleep(1)
    llm.wake_up(["weights"])
    load(llm, but=NORM)
    llm.sleep(2)
    llm.sleep(2)
    llm.wake_up(["kv_cache"])
    llm.wake_up()
    load(llm)


@pytest.mark.guarantee("sleep, wake_up")
@pytest.mark.parametrize(
    "wake", [as_trl_does, all_at_once, cache_first, cache_before_the_load, in_two_partial_updates, asleep_again]
)
def test_sleep_level_2_orders_end_with_loaded_weights(llm: LLM, wake: Any, old: Any):
    answers(llm)
    llm.sleep(level=2)
    wake(llm)
    assert answers(llm) == old


def test_wake_up_commits_complete_weights_alone(llm: LLM):
    llm.sleep(level=2)
    llm.wake_up(["weights"])
    load(llm, but=NORM)
    before = llm.weight_version
    llm.wake_up()
    assert llm.weight_version == before
    load(llm)
    llm.wake_up()
    assert llm.weight_version != before
    assert not llm.llm_engine.changes.weights.is_open


@pytest.mark.control("sleep, wake_up")
def test_control_weight_that_was_not_loaded_is_detected(llm: LLM, old: Any):
    """Negative control: without the rule of coverage the poison reaches the answers."""
    llm.sleep(level=2)
    llm.wake_up()
    poison(llm)
    load(llm, but=NORM)
    trainers_model(llm).weights.update.end()
    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False, on_error="row")
    assert [output.outputs[0].token_ids if output.outputs else None for output in outputs] != [each[0] for each in old]


CALLS: dict[str, Callable[[LLM], object]] = {
    "generate": answers,
    "gather": own_answers,
    "score": lambda llm: llm.score_tokens(["a"], [[3]]),
    "step": lambda llm: llm.llm_engine.step(),
    "add": lambda llm: llm.llm_engine.add_request([3, 4], GREEDY),
    "add by name": lambda llm: llm.llm_engine.add_request("a", {"prompt_token_ids": [3, 4]}, GREEDY),
    "layout": lambda llm: llm.reinitialize_distributed(),
}


def test_with_nothing_unanswered_vllms_modes_are_the_same(llm: LLM, old: Any):
    for call in (llm.sleep, llm.llm_engine.sleep):
        with pytest.raises(ValueError, match="mode='stop'"):
            call(1, mode="stop")
        assert not llm.is_sleeping
    for mode in ("abort", "wait", "keep"):
        llm.sleep(1, mode)
        llm.wake_up()
    assert answers(llm) == old


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_asleep_nothing_is_computed(llm: LLM, call: Callable[[LLM], object], old: Any):
    llm.sleep()
    assert llm.llm_engine.is_sleeping()
    for tags, left in (([], "weights and kv_cache"), (["kv_cache"], "weights")):
        llm.wake_up(tags)
        # It is said first, before an update that has not ended either.
        llm.start_weight_update()
        num_steps = llm.llm_engine.counters.num_steps
        with pytest.raises(RuntimeError, match=rf"asleep \({left}\)"):
            call(llm)
        assert llm.llm_engine.counters.num_steps == num_steps
        llm.finish_weight_update()
    llm.wake_up()
    assert answers(llm) == old


def test_weights_that_sleep_are_neither_written_nor_read(llm: LLM, old: Any):
    for level in (1, 2):
        llm.sleep(level)
        with pytest.raises(RuntimeError, match=r"wake_up\(tags=\['weights'\]\)"):
            load(llm)
        with pytest.raises(RuntimeError, match=r"asleep: .*\['weights'\]\) before "):
            llm.collective_rpc("reload_weights")
        with pytest.raises(RuntimeError, match=r"asleep: .*\['weights'\]\) first"):
            llm.apply_model(lambda model: model)
    assert "Decoder" in llm.collective_rpc("get_model_inspection")[0]
    llm.wake_up()
    load(llm)
    assert answers(llm) == old


def test_sleeping_worker_rejects_a_step(llm: LLM):
    """The last guard, behind all others: never a crash in memory that is not there."""
    llm.sleep(2)
    llm.llm_engine.executor.sleeping_tags = ()
    with pytest.raises(RuntimeError, match="wake_up"):
        answers(llm)


def test_arguments_and_times_that_are_wrong_change_nothing(llm: LLM, old: Any):
    for level in (-1, 3, True, "1", None):
        with pytest.raises(ValueError, match=r"^level=.* must be 0 .* 1 .* or 2 "):
            llm.sleep(level)
    for tags in ("weights", ["weight"], [1]):
        with pytest.raises(ValueError, match=r"^tags="):
            llm.wake_up(tags)
    llm.wake_up()
    request_id = llm.llm_engine.add_request([7, 8], GREEDY)
    for call in (llm.sleep, llm.wake_up):
        with pytest.raises(RuntimeError, match=r"^1 requests"):
            call()
    llm.llm_engine.step()
    with pytest.raises(RuntimeError, match=r"^1 requests of"):
        llm.llm_engine.sleep()
    llm.llm_engine.abort_request(request_id)
    llm.llm_engine.step()
    load(llm, but=NORM)
    with pytest.raises(MissingWeightsError):
        llm.sleep(1)
    load(llm)
    llm.start_weight_update()
    with pytest.raises(RuntimeError, match=r"update .*begun: call finish_weight_update"):
        llm.sleep(2)
    llm.finish_weight_update()
    assert not llm.is_sleeping
    assert answers(llm) == old


def given_back(llm: LLM, *, keeping: bool = False) -> tuple[int, int]:
    """Bytes of a cache that was written, and by how much a sleep makes this process smaller."""
    worker = llm.llm_engine.model_executor.driver_worker.worker
    cache = worker.running.caches.engine.tensors[0]
    cache.fill_(1.0)
    # What earlier tests have freed and the C library keeps would be given back by the sleep, too.
    gc.collect()
    host.give_back_freed()
    num_bytes, before = cache.nbytes, host.resident_bytes()
    if not keeping:
        del cache
    llm.sleep(2)
    return num_bytes, before - host.resident_bytes()


@pytest.mark.guarantee("sleep, wake_up")
def test_sleep_releases_memory_each_time(caplog: pytest.LogCaptureFixture):
    with open_llm(num_blocks=3000, swap_space=0) as llm, caplog.at_level(logging.INFO, "spmd_worker"):
        num_bytes, num_less = given_back(llm)
        assert num_less > 0.9 * num_bytes > 50e6
        assert f"asleep at level 2, freed 2691584 bytes of weights and {num_bytes} bytes of kv_cache in " in caplog.text
        llm.wake_up()
        load(llm)
        answers(llm)
        sizes = [host.resident_bytes()]
        for _ in range(4):
            for _ in range(5):
                llm.sleep(2)
                llm.wake_up()
                load(llm)
                answers(llm)
            sizes.append(host.resident_bytes())
        # Weights alone would be 13 MB in each part; something else of this process may grow, by less or once.
        assert min(after - before for before, after in pairwise(sizes)) < 10e6
        assert given_back(llm)[1] > 0.9 * num_bytes


@pytest.mark.control("sleep, wake_up")
def test_memory_that_somebody_keeps_is_seen():
    """Negative control."""
    with open_llm(num_blocks=3000, swap_space=0) as llm:
        num_bytes, num_less = given_back(llm, keeping=True)
        assert num_less < 0.5 * num_bytes


@pytest.mark.parametrize("seed", range(3))
def test_sleep_orders_compute_with_complete_weights_only(llm: LLM, seed: int, old: Any):
    draws, asleep, is_missing = random.Random(seed), set[str](), False
    for _ in range(40):
        kind = draws.choice(["sleep 1", "sleep 2", "weights", "kv_cache", "both", "load", "generate", "reset"])
        if kind.startswith("sleep"):
            level = int(kind[-1])
            if level == 1 and is_missing and "weights" not in asleep:
                with pytest.raises(MissingWeightsError):
                    llm.sleep(level)
                continue
            llm.sleep(level)
            asleep, is_missing = set(BOTH), is_missing or level == 2
        elif kind == "generate" and not asleep and not is_missing:
            assert answers(llm) == old
        elif kind == "generate":
            with pytest.raises(RuntimeError, match="asleep" if asleep else "dropped them"):
                answers(llm)
        elif kind == "reset":
            if is_missing and "weights" not in asleep:
                with pytest.raises(MissingWeightsError):
                    llm.reset_prefix_cache()
            else:
                llm.reset_prefix_cache()
        elif kind == "load" and "weights" in asleep:
            with pytest.raises(RuntimeError, match=r"asleep: .*\['weights'\]\) before "):
                load(llm)
        elif kind == "load":
            load(llm)
            is_missing = False
        else:
            tags = list(BOTH) if kind == "both" else [kind]
            llm.wake_up(tags)
            asleep -= set(tags)
        assert set(llm.sleeping_tags) == asleep


def on_ranks(llm: LLM, rank: int) -> dict[str, Any]:
    """What one rank sees: answers, the refusal of rank 1 that has no memory, answers."""
    seen: dict[str, Any] = {"before": answers(llm)}
    llm.sleep(2)
    available = host.available_bytes
    host.available_bytes = lambda: 1000 if rank == 1 else available()
    for tags in (["kv_cache"], None):
        try:
            llm.wake_up(tags)
        except WorkerEventError as error:
            seen[f"{tags}"] = str(error)
        assert llm.sleeping_tags == BOTH
    host.available_bytes = available
    llm.wake_up(["weights"])
    llm.collective_rpc("reload_weights")
    llm.reset_prefix_cache()
    llm.wake_up(["kv_cache"])
    seen["after"] = answers(llm)
    return seen


@pytest.mark.gate("{'tensor_parallel_size': 2}", "{'pipeline_parallel_size': 2}")
@pytest.mark.guarantee("Ranks wake together or not at all")
@pytest.mark.parametrize("layout", [TP, DP, pytest.param(PP, marks=pytest.mark.matrix)], ids=str)
def test_ranks_wake_together_or_not_at_all(layout: dict[str, int], tmp_path: Path):
    done = ranks.run_forked([__file__, json.dumps(layout), tmp_path], nproc=2, timeout_s=240)
    check_woken_together(done, tmp_path)


def check_woken_together(done: ranks.CompletedRanks, folder: Path) -> None:
    assert done.returncode == 0, done.output
    for rank in range(2):
        seen = json.loads((folder / f"{rank}.json").read_text())
        assert seen["before"] == seen["after"]
        for tags, sizes in (
            (["kv_cache"], r"\d+ bytes of kv_cache"),
            (None, r"\d+ bytes of weights and \d+ bytes of kv_cache"),
        ):
            undone = "worker event 'wake_up' was undone on every rank: rank 1: MemoryError: "
            found = re.fullmatch(rf"{undone}{sizes} are needed and 500 bytes are available .*", seen[f"{tags}"])
            assert found is not None, seen


@pytest.mark.control("Ranks wake together or not at all")
def test_control_partial_wake_up_is_detected(tmp_path: Path):
    """Negative control: rank 0 commits what rank 1 has refused."""
    done = ranks.run_forked([__file__, json.dumps(TP), tmp_path, "hasty"], nproc=2, timeout_s=240)
    with pytest.raises(AssertionError, match=r"assert llm\.sleeping_tags == BOTH"):
        check_woken_together(done, tmp_path)


def test_worker_processes_sleep_and_wake():
    with forked(), open_llm(distributed_executor_backend="multiproc", **PP) as llm:
        before = answers(llm)
        llm.sleep(2)
        llm.wake_up(["weights"])
        llm.wake_up()
        with pytest.raises(MissingWeightsError):
            answers(llm)
        llm.collective_rpc("reload_weights")
        assert answers(llm) == before


def end_hastily(self: Executor, is_committed: bool, end: Any = Executor.end_event) -> Any:
    return end(self, is_committed or self.environment.rank == 0)


def main(layout: dict[str, int], folder: Path) -> None:
    with open_llm(**layout) as llm:
        rank = int(os.environ["RANK"])
        try:
            seen = on_ranks(llm, rank)
        except AssertionError:
            # Before this LLM closes, whereupon the other rank fails: this one is then ended, maybe before it has said.
            traceback.print_exc()
            raise
        (folder / f"{rank}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    if "hasty" in sys.argv[3:]:
        Executor.end_event = end_hastily
    main(json.loads(sys.argv[1]), Path(sys.argv[2]))
