"""Prompts, parameters and shortcuts of the tests that call `LLM.generate`."""

from reference_models import mixed_prompts

from spmd_worker import LLM, RequestOutput, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
SAMPLED = SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True)
PROMPTS = mixed_prompts(8, 40, seed=5)
NAME = "llama3"


def run(llm: LLM, prompts: object, sampling: object = GREEDY, **options: object) -> list[RequestOutput]:
    return llm.generate(prompts, sampling, use_tqdm=False, **options)


def tokens(outputs: list[RequestOutput]) -> list[list[list[int]]]:
    return [[completion.token_ids for completion in output.outputs] for output in outputs]


def check_way_was_taken(llm: LLM, way: str) -> None:
    """The cache was used, in this way: `recomputed`, `swapped`, `from the host tier`, or plainly."""
    counters = llm.llm_engine.counters
    assert counters.num_cached_prompt_tokens > 0
    if way in ("recomputed", "swapped"):
        assert counters.num_preemptions > 0
        assert (counters.num_swapped_in > 0) == (way == "swapped")
    assert (counters.num_loaded_blocks > 0) == (way == "from the host tier")
