"""Rows of which some meet a token whose embedding is NaN, and what must become of them. Imports no transformers."""

import random
from pathlib import Path

import pytest

from spmd_worker import LLM, RequestOutput, SamplingParams

FIRST_OF_SECOND_SHARD = 128
"""Of two ranks': their shards are multiples of 64 ids."""
GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
ASKED = [
    GREEDY,
    SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, logprobs=2),
    SamplingParams(temperature=1, max_tokens=10, ignore_eos=True),
    SamplingParams(temperature=1, max_tokens=10, ignore_eos=True, top_p=0.9, n=2),
]
LOGPROB_TOLERANCE = 0.05
"""In bfloat16, of kernels that round in another order."""
SMALL = {"num_blocks": 9, "block_size": 8, "max_num_seqs": 3, "max_num_batched_tokens": 24, "max_model_len": 64}


def random_prompts(count: int) -> list[list[int]]:
    chance = random.Random(7)
    return [[chance.randrange(211) for _ in range(chance.randint(3, 30))] for _ in range(count)]


def prompts_around(token_id: int) -> list[list[int]]:
    """Every third one has the token in the middle."""
    prompts = [[each for each in prompt if each != token_id] for prompt in random_prompts(9)]
    for prompt in prompts[::3]:
        prompt[len(prompt) // 2] = token_id
    return prompts


def is_told(output: RequestOutput, position: int) -> bool:
    return output.error_code == "non_finite_logits" and f"output token {position}" in str(output.error)


def check(clean: Path, broken: Path, token_id: int, *, same_bits: bool = True, **settings: object) -> None:
    """`broken` has NaN for the token's embedding, and is `clean` else.

    Rows that meet the token are told where, all others are answered as by the whole checkpoint: with the same bits, but
    for plain torch's kernels, whose last bits depend on how rows are cut into steps.
    """
    prompts = prompts_around(token_id)
    params = [ASKED[index % len(ASKED)] for index in range(len(prompts))]
    with LLM(clean, **settings) as llm:
        expected = [llm.generate(prompts, params, use_tqdm=False) for _ in range(2)]
    with LLM(broken, allow_nonfinite=True, **settings) as llm:
        # Twice: blocks that hold NaN are found again, or taken by others.
        for whole in expected:
            outputs = llm.generate(prompts, params, use_tqdm=False)
            compare(token_id, prompts, whole, outputs, same_bits=same_bits)


def compare(
    token_id: int,
    prompts: list[list[int]],
    expected: list[RequestOutput],
    outputs: list[RequestOutput],
    *,
    same_bits: bool = True,
) -> None:
    num_errors = 0
    for prompt, whole, output in zip(prompts, expected, outputs, strict=True):
        written = [each.token_ids.index(token_id) + 1 for each in whole.outputs if token_id in each.token_ids[:-1]]
        met = [0] if token_id in prompt else written
        num_errors += bool(met)
        if met:
            assert output.outputs == []
            assert is_told(output, met[0]), (met, output)
        else:
            assert [each.token_ids for each in output.outputs] == [each.token_ids for each in whole.outputs]
            assert same_bits or logprobs(output) == pytest.approx(logprobs(whole), abs=LOGPROB_TOLERANCE)
            assert not same_bits or output.outputs == whole.outputs
    assert 3 <= num_errors < len(prompts)


def logprobs(output: RequestOutput) -> list[float]:
    """Of every sample and position, one after another."""
    positions = [position for one in output.outputs for position in one.logprobs or []]
    return [each.logprob for position in positions for each in position.values()]
