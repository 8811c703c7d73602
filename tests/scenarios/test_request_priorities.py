"""Priorities through the doors: who is answered first, on any layout, and answers that do not depend on them."""

import ast
from typing import Any

import pytest
import ranks
from reference_models import checkpoint_folder, random_prompt

from spmd_worker import LLM, SamplingParams

SETTINGS: dict[str, Any] = {"device": "cpu", "block_size": 4, "num_blocks": 200, "max_model_len": 128}
PROMPTS = [random_prompt(9 + 3 * number, number) for number in range(8)]
PRIORITIES = [3, -1, 0, 2, -1, 0, 5, 1]
ORDER = [1, 4, 2, 5, 7, 3, 0, 6]
PARAMS = SamplingParams(n=2, temperature=1.0, max_tokens=7, seed=5, logprobs=0)


def shown(outputs: list[Any]) -> list[Any]:
    return [[(each.token_ids, each.logprobs) for each in output.outputs] for output in outputs]


def order_of_answers(llm: LLM) -> list[str]:
    """With room for one sequence."""
    engine = llm.llm_engine
    for number, (prompt, priority) in enumerate(zip(PROMPTS, PRIORITIES)):
        engine.add_request(f"{number}", {"prompt_token_ids": prompt}, SamplingParams(max_tokens=2), priority=priority)
    answered: list[str] = []
    while engine.has_unfinished_requests():
        answered += [output.request_id for output in engine.step()]
    return answered


@pytest.mark.gate("{'max_num_seqs': 8}", "{'max_num_seqs': 8, 'num_blocks': 32}")
@pytest.mark.parametrize(
    "sizes", [{"max_num_seqs": 8}, {"max_num_seqs": 8, "num_blocks": 32}, {"max_num_seqs": 1}], ids=str
)
def test_answers_do_not_depend_on_priorities(sizes: dict[str, int]):
    with LLM(checkpoint_folder("llama3"), **SETTINGS) as llm:
        expected = shown(llm.generate(PROMPTS, PARAMS, use_tqdm=False))
    with LLM(checkpoint_folder("llama3"), **{**SETTINGS, **sizes}, scheduling_policy="priority") as llm:
        assert shown(llm.generate(PROMPTS, PARAMS, use_tqdm=False, priority=PRIORITIES)) == expected
        assert shown(llm.generate(PROMPTS, PARAMS, use_tqdm=False, priority=-(2**63))) == expected
        assert bool(llm.llm_engine.counters.num_preemptions) == ("num_blocks" in sizes)
        if sizes["max_num_seqs"] == 1:
            assert order_of_answers(llm) == [str(number) for number in ORDER]


def test_first_come_policy_refuses_priorities():
    with LLM(checkpoint_folder("llama3"), **SETTINGS) as llm:
        with pytest.raises(ValueError, match=r"^priority=3 needs scheduling_policy=priority: set it, or leave"):
            llm.generate(PROMPTS, PARAMS, use_tqdm=False, priority=PRIORITIES)
        with pytest.raises(ValueError, match=r"^priority=-1 needs scheduling_policy=priority"):
            llm.llm_engine.add_request(PROMPTS[0], PARAMS, priority=-1)
        assert not llm.llm_engine.has_unfinished_requests()


ON_RANKS = """
    import os, sys
    from spmd_worker import LLM, SamplingParams

    sizes, prompts, priorities = map(eval, sys.argv[2:5])
    params = SamplingParams(n=2, temperature=1.0, max_tokens=7, seed=5)
    given = {"block_size": 4, "num_blocks": 200, "timeout_s": 120, "max_num_seqs": 2, "scheduling_policy": "priority"}
    with LLM(sys.argv[1], device="cpu", **given, **sizes) as llm:
        scheduler, served = llm.llm_engine.scheduler, []
        schedule = scheduler.schedule

        def seen():
            plan = schedule()
            served.extend(list(each.request.prompt_token_ids) for each in scheduler.running)
            return plan

        scheduler.schedule = seen
        outputs = llm.generate(prompts, params, use_tqdm=False, priority=priorities)
        ids = [[each.token_ids for each in output.outputs] for output in outputs]
    order = list(dict.fromkeys(map(prompts.index, served)))
    os.write(1, f"{(ids, order)}\\n".encode())
    """


@pytest.mark.gate("tensor_parallel_size")
@pytest.mark.parametrize("key", ["tensor_parallel_size", "data_parallel_size"])
def test_ranks_serve_by_priority(key: str):
    with LLM(checkpoint_folder("llama3"), **SETTINGS) as llm:
        params = SamplingParams(n=2, temperature=1.0, max_tokens=7, seed=5)
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
        expected = [[each.token_ids for each in output.outputs] for output in outputs]
    arguments = [checkpoint_folder("llama3"), repr({key: 2}), repr(PROMPTS), repr(PRIORITIES)]
    done = ranks.run_ranks(ON_RANKS, nproc=2, timeout_s=240, arguments=arguments).checked()
    said = [ast.literal_eval(line) for line in done.stdout.splitlines()]
    assert [ids for ids, _ in said] == [expected, expected]
    for _, order in said:
        # Replicas begin with the longest prompts of a priority.
        assert [PRIORITIES[number] for number in order] == sorted(PRIORITIES[number] for number in order)
        assert order == ORDER or key == "data_parallel_size"
    num_served = sum(len(order) for _, order in said)
    assert num_served == len(PROMPTS) * (2 if key == "tensor_parallel_size" else 1)
