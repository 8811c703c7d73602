"""The budget in bytes: 6 a running sequence (4 of them its sampled id) and 64; 4 a prompt token and 100."""

import random

import pytest

from spmd_worker.lockstep.codec import Encoder, encode_message
from spmd_worker.lockstep.message import StepMessage
from spmd_worker.sequence.events import Admit
from spmd_worker.sequence.metadata import (
    SequenceData,
    SequenceDataDelta,
    SequenceGroupMetadata,
    SequenceGroupMetadataDelta,
)
from spmd_worker.sequence.request import Request
from spmd_worker.sequence.sampling_params import SamplingParams
from spmd_worker.sequence.step import StepPlan

DIGEST = bytes(range(32))
BLOCK_SIZE = 16


def first_message(num_sequences: int, num_prompt_tokens: int) -> StepMessage:
    """Every request computes its whole prompt and samples; request ids are far apart."""
    blocks = tuple(range(-(-num_prompt_tokens // BLOCK_SIZE)))
    groups = tuple(
        SequenceGroupMetadata(
            Request(number * 1_000_003, (5,) * num_prompt_tokens, SamplingParams(), number),
            (SequenceData(0, (), blocks, 0, num_prompt_tokens, 1),),
        )
        for number in range(num_sequences)
    )
    return StepMessage(1, (), StepPlan(1, groups, num_tokens=num_sequences * num_prompt_tokens), (), DIGEST)


def decode_message_of_step(step: int, num_sequences: int, num_prompt_tokens: int, max_token_id: int) -> StepMessage:
    """Step 2 and on: each sequence appends the id it sampled; a new block every 16 steps, for all in the same step."""
    chance = random.Random(step)
    sampled = tuple(chance.randrange(max_token_id) for _ in range(num_sequences))
    num_computed = num_prompt_tokens + step - 2
    num_blocks = -(-num_computed // BLOCK_SIZE)
    new_blocks = -(-(num_computed + 1) // BLOCK_SIZE) - num_blocks
    groups = tuple(
        SequenceGroupMetadataDelta(
            number * 1_000_003,
            (
                SequenceDataDelta(
                    0,
                    (token,),
                    num_blocks,
                    tuple(chance.randrange(2**17) for _ in range(new_blocks)),
                    num_computed,
                    1,
                    1,
                ),
            ),
        )
        for number, token in enumerate(sampled)
    )
    return StepMessage(step, (), StepPlan(step, groups, num_tokens=num_sequences), sampled, DIGEST)


def run_sizes(num_sequences: int, max_token_id: int, num_steps: int = 32) -> list[int]:
    encoder = Encoder()
    encoder.encode(first_message(num_sequences, 100))
    return [
        len(encoder.encode(decode_message_of_step(step, num_sequences, 100, max_token_id)))
        for step in range(2, 2 + num_steps)
    ]


@pytest.mark.parametrize("num_sequences", [1, 16, 256, 1024])
@pytest.mark.parametrize("max_token_id", [50_000, 150_000, 2**31])
def test_a_steady_step_costs_at_most_6_bytes_a_sequence_and_64(num_sequences, max_token_id):
    sizes = run_sizes(num_sequences, max_token_id)
    with_blocks = {step for step in range(32) if (100 + step) % BLOCK_SIZE == 0}
    for step, size in enumerate(sizes):
        if step not in with_blocks:
            assert size <= 6 * num_sequences + 64
    # The step in which all take a block at once carries one block id more each; the others pay for it.
    assert sum(sizes) <= 32 * (6 * num_sequences + 64)


def test_exact_sizes_of_a_steady_step():
    """3 bytes an id of a vocabulary of 150,000, 2 of one of 50,000, and 63 to 66 around them: 32 are the digest."""
    assert run_sizes(256, 150_000, num_steps=3) == [834, 834, 834]
    assert run_sizes(16, 50_000, num_steps=3) == [95, 95, 95]
    # The one step in 16 in which all 256 take a block: 3 bytes more each, and 7.
    assert run_sizes(256, 150_000, num_steps=13)[-1] == 834 + 3 * 256 + 7


def test_without_the_message_before_a_step_costs_more():
    """Negative control: it is the coding against the last listing that meets the budget."""
    assert len(encode_message(decode_message_of_step(2, 256, 100, 150_000))) > 6 * 256 + 64


@pytest.mark.parametrize("num_prompt_tokens", [1, 100, 10_000])
@pytest.mark.parametrize("max_token_id", [256, 150_000, 2**24])
def test_a_snapshot_costs_at_most_4_bytes_a_prompt_token_and_100(num_prompt_tokens, max_token_id):
    chance = random.Random(1)
    prompt = tuple(chance.randrange(max_token_id) for _ in range(num_prompt_tokens))
    blocks = tuple(chance.randrange(2**20) for _ in range(-(-num_prompt_tokens // BLOCK_SIZE)))
    group = SequenceGroupMetadata(
        Request(2**40, prompt, SamplingParams(), 2**64 - 1), (SequenceData(0, (), blocks, 0, num_prompt_tokens, 1),)
    )
    plan = StepPlan(2**40, (group,), num_tokens=num_prompt_tokens)
    empty = len(encode_message(StepMessage(2**40, (), StepPlan(2**40), (), DIGEST)))
    size = len(encode_message(StepMessage(2**40, (), plan, (), DIGEST))) - empty
    assert size <= 4 * num_prompt_tokens + 100


def test_default_sampling_parameters_cost_one_byte():
    def size(sampling: SamplingParams) -> int:
        return len(encode_message(StepMessage(1, (Admit(Request(1, (2,), sampling, 3)),), StepPlan(1), (), b"")))

    default = size(SamplingParams())
    assert size(SamplingParams(temperature=0.5)) - default == 9
    assert size(SamplingParams(seed=0, ignore_eos=True)) - default == 3 + 2


def test_a_step_without_work_is_short():
    assert len(encode_message(StepMessage(1, (), StepPlan(1), (), bytes(16)))) == 33
