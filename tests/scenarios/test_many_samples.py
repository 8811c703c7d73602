"""Prompts with more samples than run at once: they queue, and equal those of an engine that runs all together."""

import ast
from typing import Any

import pytest
import ranks
from reference_models import checkpoint_folder, mixed_prompts, random_prompt

from spmd_worker import LLM, RequestOutput, SamplingParams
from spmd_worker.engine import engine as engine_module
from spmd_worker.replica.scheduler import scheduler as scheduler_module
from spmd_worker.replica.sequence.sequence import Sequence, split_off

pytestmark = pytest.mark.finding(number="D2")

PROMPTS = [random_prompt(40, 3), *mixed_prompts(4, 30, seed=8)]
WIDE = SamplingParams(n=21, temperature=1.0, max_tokens=9, seed=7, logprobs=1)
PARAMS = [
    WIDE,
    SamplingParams(n=2, temperature=0.8, max_tokens=12, seed=1),
    SamplingParams(n=3, best_of=17, temperature=1.0, max_tokens=6, seed=2),
    SamplingParams(n=13, temperature=0, max_tokens=4),
    SamplingParams(n=9, temperature=1.0, max_tokens=5, prompt_logprobs=1, seed=3),
]
SETTINGS: dict[str, Any] = {"device": "cpu", "block_size": 4, "num_blocks": 600, "max_model_len": 128}
TIGHT = {"max_num_seqs": 12, "num_blocks": 34, "max_num_batched_tokens": 16}
WAYS: dict[str, dict[str, Any]] = {
    "four": {"max_num_seqs": 4},
    "one": {"max_num_seqs": 1},
    "without a cache of prefixes": {"max_num_seqs": 4, "enable_prefix_caching": False},
    "in chunks": {"max_num_seqs": 4, "max_num_batched_tokens": 7},
    "recomputed": {**TIGHT, "preemption_mode": "recompute"},
    "swapped": {**TIGHT, "preemption_mode": "swap", "swap_space": 0.01},
    "one step ahead": {"max_num_seqs": 4, "async_scheduling": True},
}


def shown(outputs: list[RequestOutput]) -> list[Any]:
    return [
        (
            output.prompt_logprobs,
            [(each.index, each.token_ids, each.logprobs, each.finish_reason) for each in output.outputs],
        )
        for output in outputs
    ]


@pytest.fixture(scope="module")
def expected() -> list[Any]:
    with LLM(checkpoint_folder("llama3"), **SETTINGS, max_num_seqs=64) as llm:
        return shown(llm.generate(PROMPTS, PARAMS, use_tqdm=False))


SLOW = ("one", "in chunks")


@pytest.mark.gate("one step ahead", "swapped", "recomputed")
@pytest.mark.guarantee("Samples beyond scheduler.max_num_seqs queue")
@pytest.mark.parametrize("way", [pytest.param(way, marks=pytest.mark.stress) if way in SLOW else way for way in WAYS])
def test_samples_beyond_max_num_seqs_queue(expected: list[Any], way: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(engine_module.CHECK_VARIABLE, "1")
    with LLM(checkpoint_folder("llama3"), **{**SETTINGS, **WAYS[way]}) as llm:
        most = 0
        seen = llm.llm_engine.scheduler.schedule

        def schedule() -> Any:
            nonlocal most
            plan = seen()
            most = max(most, len(llm.llm_engine.scheduler.running))
            return plan

        monkeypatch.setattr(llm.llm_engine.scheduler, "schedule", schedule)
        assert shown(llm.generate(PROMPTS, PARAMS, use_tqdm=False)) == expected
        assert 0 < most <= WAYS[way]["max_num_seqs"]
        if "recomputed" in way or "swapped" in way:
            assert llm.llm_engine.counters.num_preemptions
        assert llm.llm_engine.scheduler.cache.num_used_blocks == 0


def test_later_parts_find_the_prompt_in_the_cache():
    with LLM(checkpoint_folder("llama3"), **SETTINGS, max_num_seqs=4) as llm:
        llm.generate([PROMPTS[0]], WIDE, use_tqdm=False)
        counters = llm.llm_engine.counters
        # Its 40 tokens once, and at most one block and its tokens anew for each of the parts.
        assert counters.num_computed_tokens < 40 + 21 * (4 + 9)


def test_aborted_request_leaves_none_of_its_parts():
    with LLM(checkpoint_folder("llama3"), **SETTINGS, max_num_seqs=4) as llm:
        engine = llm.llm_engine
        number = engine.add_request(PROMPTS[0], WIDE)
        for _ in range(4):
            engine.step()
        engine.abort_request(number)
        (output,) = engine.step()
        assert [each.index for each in output.outputs] == sorted(each.index for each in output.outputs)
        assert {each.finish_reason for each in output.outputs} <= {"abort", "length"}
        engine.scheduler.check_integrity()
        assert not engine.scheduler.has_unfinished
        assert engine.scheduler.cache.num_used_blocks == 0


@pytest.mark.control("Samples beyond scheduler.max_num_seqs queue")
def test_samples_test_detects_repeated_parts(expected: list[Any], monkeypatch: pytest.MonkeyPatch):
    """Negative control: the samples of a part are those of its own indices."""

    def wrong(sequence: Sequence, num_samples: int) -> Sequence:
        others = split_off(sequence, num_samples)
        others.request = PARTS.setdefault(others.request.request_id, others.request)
        object.__setattr__(others.request, "stream", others.request.stream ^ 1)
        return others

    monkeypatch.setattr(scheduler_module, "split_off", wrong)
    with LLM(checkpoint_folder("llama3"), **{**SETTINGS, **WAYS["four"]}) as llm:
        assert shown(llm.generate(PROMPTS, PARAMS, use_tqdm=False)) != expected


PARTS: dict[int, Any] = {}

ON_RANKS = """
    import os, sys
    from spmd_worker import LLM, SamplingParams

    params = SamplingParams(n=21, temperature=1.0, max_tokens=9, seed=7)
    sizes, prompts = eval(sys.argv[2]), eval(sys.argv[3])
    with LLM(sys.argv[1], device="cpu", block_size=4, num_blocks=200, timeout_s=120, max_num_seqs=4, **sizes) as llm:
        said = [[each.token_ids for each in output.outputs] for output in llm.generate(prompts, params, use_tqdm=False)]
    os.write(1, f"{said}\\n".encode())
    """


@pytest.mark.gate("data_parallel_size")
@pytest.mark.parametrize(
    "key",
    [
        "tensor_parallel_size",
        "data_parallel_size",
        pytest.param("pipeline_parallel_size", marks=pytest.mark.stress),
    ],
)
def test_ranks_agree_on_parts(key: str):
    with LLM(checkpoint_folder("llama3"), **SETTINGS, max_num_seqs=64) as llm:
        params = SamplingParams(n=21, temperature=1.0, max_tokens=9, seed=7)
        outputs = llm.generate(PROMPTS[:3], params, use_tqdm=False)
        expected = [[each.token_ids for each in output.outputs] for output in outputs]
    arguments = [checkpoint_folder("llama3"), repr({key: 2}), repr(PROMPTS[:3])]
    done = ranks.run_ranks(ON_RANKS, nproc=2, timeout_s=240, arguments=arguments).checked()
    assert [ast.literal_eval(line) for line in done.stdout.splitlines()] == [expected, expected]
