"""Ranks divided anew: nothing that was cached is found, answers stay, what cannot be is refused and changes nothing."""

import ast
import functools
from typing import Any

import pytest
import ranks

from kv_cache.cache_manager import CacheManager
from spmd_worker import LLM, SamplingParams
from spmd_worker.base.errors import ConfigError
from spmd_worker.base.liveness.heartbeat import Heartbeat, Moment
from spmd_worker.replica.scheduler import factory

MODEL = ranks.REPOSITORY / "scripts" / "demo" / "model"
OPTIONS: dict[str, Any] = {"device": "cpu", "dtype": "float32", "num_blocks": 64, "timeout_s": 120.0}
PROMPT = "sort 21 87 57 15 42 99 33 64 ="
LONG = SamplingParams(temperature=0, max_tokens=16)
TP = {"tensor_parallel_size": 2}

ON_RANKS = """
    import os, sys
    from spmd_worker import LLM, SamplingParams
    from spmd_worker.base.errors import ConfigError

    def text():
        (output,) = llm.generate([sys.argv[2]], SamplingParams(temperature=0, max_tokens=16), use_tqdm=False)
        return output.outputs[0].text, output.num_cached_tokens

    with LLM(sys.argv[1], device="cpu", dtype="float32", num_blocks=64, timeout_s=120, tensor_parallel_size=2) as llm:
        said = [text(), text()]
        for sizes in ({"pipeline_parallel_size": 2}, {"tensor_parallel_size": 2}, {"data_parallel_size": 2}):
            llm.reinitialize_distributed(**sizes)
            said += [text()]
        try:
            llm.reinitialize_distributed(tensor_parallel_size=4)
        except ConfigError as error:
            said += [str(error), text()[0]]
    os.write(1, "".join(f"{os.environ['RANK']} {line}\\n" for line in said).encode())
    """


def answer(llm: LLM) -> tuple[str, int | None]:
    (output,) = llm.generate([PROMPT], LONG, use_tqdm=False)
    return output.outputs[0].text, output.num_cached_tokens


@pytest.fixture(scope="module")
def expected() -> str:
    with LLM(MODEL, **OPTIONS) as llm:
        return answer(llm)[0]


UNEVENLY = """
    import os, sys
    from spmd_worker import LLM, SamplingParams

    greedy = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    drawn = SamplingParams(temperature=1, max_tokens=4, ignore_eos=True)

    def tokens(prompts, params=greedy):
        return [each.outputs[0].token_ids for each in llm.generate(prompts, params, use_tqdm=False)]

    def sizes(name, number=2):
        llm.reinitialize_distributed(**{name: number} if number > 1 else {})

    with LLM(sys.argv[1], device="cpu", dtype="float32", num_blocks=64, timeout_s=120, data_parallel_size=2) as llm:
        prompts = [f"copy {letter} =" for letter in "abcdefg"]
        said = [tokens(prompts[:3]), tokens(prompts[:1])]
        for layout in ("tensor_parallel_size", "data_parallel_size", "pipeline_parallel_size", "data_parallel_size"):
            sizes(layout)
            said += [tokens(prompts[:3]), tokens(prompts[:1]), tokens(prompts[:5])]
        llm.sleep()
        llm.wake_up()
        sizes("tensor_parallel_size")
        try:
            llm.llm_engine.add_request(tuple(range(1, 9)), greedy)
            sizes("data_parallel_size")
        except RuntimeError as error:
            said += ["are not answered yet" in str(error)]
        while llm.llm_engine.has_unfinished_requests():
            llm.llm_engine.step()
        said += [tokens(prompts, drawn), tokens(prompts), llm.llm_engine.requests.num_requests]
    os.write(1, f"{said}\\n".encode())
    """


@pytest.mark.finding(number="B6")
def test_uneven_replicas_divided_anew_answer_on():
    """The ranks of two replicas had numbered their own requests, and went on with two numbers for one."""
    done = ranks.run_ranks(UNEVENLY, nproc=2, timeout_s=240, arguments=[MODEL]).checked()
    first, second = map(ast.literal_eval, done.stdout.splitlines())
    assert first == second
    three, one = first[:2]
    for again in (first[2 + 3 * layout : 5 + 3 * layout] for layout in range(4)):
        assert again[:2] == [three, one]
        assert again[2][:3] == three
    is_refused, _, seven, _ = first[14:]
    assert is_refused
    assert seven[:3] == three


@pytest.mark.guarantee("reinitialize_distributed: empty caches, same answers")
def test_launcher_ranks_change_layout_with_equal_answers(expected: str):
    done = ranks.run_ranks(ON_RANKS, nproc=2, timeout_s=240, arguments=[MODEL, PROMPT]).checked()
    for rank in ("0", "1"):
        first, second, *anew, refused, after = [x[2:] for x in done.stdout.splitlines() if x.startswith(rank)]
        assert first == str((expected, 0))
        assert second.startswith(f"({expected!r}, ")
        assert second != first
        assert anew == [first] * 3
        assert refused == (
            "tensor_parallel_size=4 x pipeline_parallel_size=1 x data_parallel_size=1 is 4 "
            "ranks, but this engine has 2, which it did not start: choose sizes of 2 ranks, or use "
            "distributed_executor_backend=multiproc"
        )
        assert after == expected


@pytest.mark.matrix
@pytest.mark.usefixtures("forked_workers")
def test_multiproc_layout_change_restarts_workers_with_empty_cache(expected: str):
    """Without `reset_prefix_cache` it answered from blocks that nobody had computed."""
    with LLM(MODEL, **OPTIONS, distributed_executor_backend="multiproc") as llm:
        assert answer(llm) == (expected, 0)
        llm.reinitialize_distributed(**TP)
        assert answer(llm) == (expected, 0)
        with pytest.raises(ConfigError, match=r"^tensor_parallel_size=3 .*not divide"):
            llm.reinitialize_distributed(tensor_parallel_size=3)
        text, num_cached = answer(llm)
        assert text == expected
        assert num_cached


@pytest.mark.finding(number="B8")
def test_restart_is_a_start_to_the_watchdog(monkeypatch: pytest.MonkeyPatch):
    """Of step 0, where files and processes may take any time: stacks were printed when workers took 6 s to start."""
    moments: list[Moment] = []
    enter = Heartbeat.enter

    def noting(self: Heartbeat, phase: str, step: int | None = None) -> None:
        enter(self, phase, step)
        moments.append(self.now)

    monkeypatch.setattr(Heartbeat, "enter", noting)
    with LLM(MODEL, **OPTIONS) as llm:
        answer(llm)
        moments.clear()
        llm.reinitialize_distributed()
        start = [
            each for each in moments if each.phase in ("joining the other ranks", "loading the model", "warming up")
        ]
        assert [each.step for each in start] == [0, 0, 0]


def test_restart_rejects_unanswered_requests():
    with LLM(MODEL, **OPTIONS) as llm:
        for _ in range(2):
            llm.llm_engine.add_request((7, 8, 9), SamplingParams(max_tokens=3))
        llm.llm_engine.step()
        with pytest.raises(RuntimeError, match=r"^2 requests"):
            llm.reinitialize_distributed()
        outputs = []
        while llm.llm_engine.has_unfinished_requests():
            outputs += llm.llm_engine.step()
        assert len(outputs) == 2
        engine = llm.llm_engine
        llm.reinitialize_distributed()
        assert llm.llm_engine is not engine
        # Requests go on being numbered, because their numbers name their randomness.
        assert llm.llm_engine.add_request((7, 8, 9), SamplingParams(max_tokens=1)) == 2
        with pytest.raises(RuntimeError, match=r"^this LLM .*closed"):
            engine.life.check_open()


@pytest.mark.control("reinitialize_distributed: empty caches, same answers")
def test_control_kept_block_index_is_detected(expected: str, monkeypatch: pytest.MonkeyPatch):
    """Negative control: the new workers with the old names of blocks."""
    monkeypatch.setattr(factory, "CacheManager", functools.cache(CacheManager))
    with LLM(MODEL, **OPTIONS) as llm:
        assert answer(llm) == (expected, 0)
        llm.reinitialize_distributed()
        assert answer(llm) != (expected, 0)
