"""One step ahead: the next step is decided, agreed on and launched before the ids of the last one are read, on one rank
and on several, and every row has the answer that it has one step at a time.

As a script it is one of several ranks.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ranks
from exact_answers import complete_answers
from forked_workers import forked
from slow_device import NAME, STATEFUL_NAME, slow_device

from spmd_worker import LLM, SamplingParams
from spmd_worker.base.config.parallel import ParallelConfig
from spmd_worker.base.config.schema import ModelOptions, RunConfig, SchedulerConfig
from spmd_worker.base.errors import ConfigError
from spmd_worker.resolved import resolve_run
from spmd_worker.worker.runner.chosen_tokens import ChosenTokens

MODEL = ranks.REPOSITORY / "scripts" / "demo" / "model"
TP = {"tensor_parallel_size": 2}
PLAIN = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=1)
KINDS = (
    PLAIN,
    replace(PLAIN, temperature=0.9, seed=5, logprobs=None),
    replace(PLAIN, ignore_eos=False),
    replace(PLAIN, temperature=0.8, seed=3, repetition_penalty=1.3, presence_penalty=0.2),
    replace(PLAIN, temperature=1.0, seed=7, n=3, top_p=0.9, min_tokens=4),
    replace(PLAIN, ignore_eos=False, stop=["1"], logprobs=None),
    replace(PLAIN, max_tokens=1, prompt_logprobs=1),
)
WORDS = ("sort 21 87 57 15 33 12 84 61 =", "reverse h x a f w =", "copy a m v s j l =", "copy q =")
LIMIT_S = 240.0


def rows() -> tuple[list[str], list[SamplingParams]]:
    return [WORDS[row % len(WORDS)] for row in range(21)], [KINDS[row % len(KINDS)] for row in range(21)]


def answers(llm: LLM) -> list[Any]:
    """Token ids and log-probabilities, bit for bit, why each ended, and its text."""
    return complete_answers(llm.generate(*rows(), use_tqdm=False))


def token_ids(found: list[Any]) -> list[Any]:
    return [[each[0] for each in row] for row in found]


def open_llm(**options: Any) -> LLM:
    settings = {"dtype": "float32", "device": "cpu", "num_blocks": 200, "timeout_s": 120.0, "max_num_seqs": 16}
    return LLM(MODEL, **{**settings, **options})


@pytest.fixture(scope="module")
def expected() -> list[Any]:
    with open_llm() as llm:
        return answers(llm)


def order_of(events: Sequence[tuple[str, int]], first: tuple[str, int], second: tuple[str, int]) -> bool:
    return events.index(first) < events.index(second)


def is_ahead(events: Sequence[tuple[str, int]], step: int) -> bool:
    """Whether the step after `step` was decided and launched before that one's ids were read."""
    read = ("read", step)
    return order_of(events, ("decided", step + 1), read) and order_of(events, ("launched", step + 1), read)


@pytest.mark.parametrize("is_async", [True, False], ids=["ahead", "one at a time"])
def test_async_step_launches_before_previous_ids_are_read(is_async: bool):
    """Negative control: one step at a time nothing is."""
    with slow_device(read_s=0.02) as device, open_llm(worker_cls=NAME, async_scheduling=is_async) as llm:
        device.events.clear()
        (output,) = llm.generate(WORDS[0], replace(PLAIN, max_tokens=6, logprobs=None), use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 6
    launched = [step for what, step in device.events if what == "launched"]
    # The first has no row yet, and behind the last one nothing is known to follow.
    computing = [step for step in launched if ("read", step) in device.events][:-1]
    assert len(computing) >= 5
    assert [is_ahead(device.events, step) for step in computing] == [is_async] * len(computing)
    assert (device.num_filled >= 5) == is_async


@pytest.mark.gate("preempted-slow, with state", "room-at once")
@pytest.mark.parametrize("worker_cls", [None, NAME, STATEFUL_NAME], ids=["at once", "slow", "slow, with state"])
@pytest.mark.parametrize("num_blocks", [200, 16], ids=["room", "preempted"])
def test_async_scheduling_answers_equal_synchronous_ones(expected: list[Any], worker_cls: str | None, num_blocks: int):
    options = {"worker_cls": worker_cls, "num_blocks": num_blocks, "max_model_len": 64, "block_size": 4}
    # torch's own kernels have other bits, and others for each batch.
    seen = token_ids if worker_cls == STATEFUL_NAME else list
    with slow_device() as device, open_llm(async_scheduling=True, **options) as llm:
        assert seen(answers(llm)) == seen(expected)
        # Twice, with what is cached now.
        assert seen(answers(llm)) == seen(expected)
        assert bool(llm.llm_engine.counters.num_preemptions) == (num_blocks == 16)
    assert device.num_filled > 20


def test_the_comparison_sees_ids_that_go_astray(expected: list[Any], monkeypatch: pytest.MonkeyPatch):
    keep = ChosenTokens.keep
    monkeypatch.setattr(ChosenTokens, "keep", lambda self, step, rows, ids: keep(self, step, rows, ids.roll(1)))
    with open_llm(async_scheduling=True) as llm:
        assert answers(llm) != expected


@pytest.mark.stress
def test_worker_processes_answer_as_one_does(expected: list[Any]):
    with (
        forked(),
        open_llm(distributed_executor_backend="multiproc", async_scheduling=True, **TP) as ahead,
        open_llm(distributed_executor_backend="multiproc", **TP) as plain,
    ):
        assert ahead.llm_engine.executor.max_concurrent_batches == 2
        assert token_ids(answers(ahead)) == token_ids(expected)
        assert answers(ahead) == answers(plain)


def test_ranks_agree_on_steps_that_are_ahead(expected: list[Any], tmp_path: Path):
    done = ranks.run_forked([__file__, tmp_path], 2, LIMIT_S)
    assert done.returncode == 0, done
    found = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)]
    assert found[0] == found[1]
    assert found[0]["ahead"] == found[0]["plain"]
    assert token_ids(found[0]["ahead"]) == token_ids(expected)
    assert found[0]["num_filled"] > 20


def test_sleep_and_weights_wait_for_steps_in_flight(expected: list[Any]):
    with slow_device(), open_llm(worker_cls=NAME, async_scheduling=True, enable_sleep_mode=True) as llm:
        assert answers(llm) == expected
        llm.sleep(level=1)
        llm.wake_up()
        assert answers(llm) == expected
        llm.reset_prefix_cache()
        assert answers(llm) == expected


def test_stages_and_steps_ahead_exclude_each_other():
    with pytest.raises(ConfigError, match=r"async_scheduling=True"):
        open_llm(async_scheduling=True, pipeline_parallel_size=2)


@pytest.mark.parametrize(
    ("device_type", "given", "num_stages", "num_ahead"),
    [("cpu", None, 1, 0), ("cpu", True, 1, 1), ("cuda", None, 1, 1), ("cuda", False, 1, 0), ("cuda", None, 2, 0)],
)
def test_async_scheduling_is_default_on_one_stage_gpus(
    device_type: str, given: bool | None, num_stages: int, num_ahead: int
):
    config = RunConfig(
        model=ModelOptions(path=str(MODEL)),
        parallel=ParallelConfig(pipeline_parallel_size=num_stages),
        scheduler=SchedulerConfig(async_scheduling=given),
    )
    assert resolve_run(config, device_type).num_steps_ahead == num_ahead


# As one of several ranks.


def main(folder: Path) -> None:
    found: dict[str, Any] = {}
    with slow_device() as device:
        for name, is_async in (("plain", False), ("ahead", True)):
            with open_llm(worker_cls=NAME, async_scheduling=is_async, **TP) as llm:
                found[name] = answers(llm)
                rank = llm.llm_engine.channel.rank
        found["num_filled"] = device.num_filled
    (folder / f"rank{rank}.json").write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
