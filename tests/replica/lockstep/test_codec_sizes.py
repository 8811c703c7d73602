"""The budget in bytes: 6 a running sequence (4 of them its sampled id) and 64; 4 a prompt token and 100."""

import random

import pytest

from spmd_worker.replica.lockstep.wire.codec import Decoder, Encoder, encode_message
from spmd_worker.replica.lockstep.wire.message import StepMessage
from spmd_worker.replica.sequence.events import Admit
from spmd_worker.replica.sequence.metadata import SequenceData, SequenceGroupMetadata
from spmd_worker.replica.sequence.request import Request
from spmd_worker.replica.sequence.sampling_params import SamplingParams
from spmd_worker.replica.sequence.sequence import SequenceKey
from spmd_worker.replica.sequence.step import StepPlan

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


def decoding_message(
    step: int, num_sequences: int, num_prompt_tokens: int, max_token_id: int, left_out: tuple[int, ...] = ()
) -> StepMessage:
    """Step 2 and on: each appends the id it sampled; a new block every 16 steps, for all in the same step.

    Those left out sampled in the last step and have ended.
    """
    chance = random.Random(step)
    # The least and the greatest id are among them, so that all steps need the same number of bytes an id.
    sampled = (max_token_id - 1, 0, *[chance.randrange(max_token_id) for _ in range(num_sequences)])[:num_sequences]
    num_computed = num_prompt_tokens + step - 2
    places = [place for place in range(num_sequences) if place not in left_out]
    blocks = [(number, chance.randrange(2**17)) for number in range(len(places)) if num_computed % BLOCK_SIZE == 0]
    plan = StepPlan(
        step,
        num_tokens=len(places),
        continuing=tuple(SequenceKey(place * 1_000_003, 0) for place in places),
        continuing_token_ids=tuple(sampled[place] for place in places),
        continuing_blocks=tuple(blocks),
        finished_sequences=tuple(SequenceKey(place * 1_000_003, 0) for place in left_out),
        finished_request_ids=tuple(place * 1_000_003 for place in left_out),
    )
    return StepMessage(step, (), plan, sampled, DIGEST)


def run_sizes(num_sequences: int, max_token_id: int, num_steps: int = 32) -> list[int]:
    encoder, decoder = Encoder(), Decoder()
    decoder.decode(encoder.encode(first_message(num_sequences, 100)))
    sizes = []
    for step in range(2, 2 + num_steps):
        message = decoding_message(step, num_sequences, 100, max_token_id)
        data = encoder.encode(message)
        assert decoder.decode(data) == message
        sizes.append(len(data))
    return sizes


@pytest.mark.gate("152000-*", "*-16", "*-1")
@pytest.mark.parametrize("num_sequences", [1, 16, 256, 1024])
@pytest.mark.parametrize("max_token_id", [50_000, 152_000, 2**31])
def test_decoding_step_stays_within_byte_budget(num_sequences, max_token_id):
    """Budget: 6 bytes a sequence and 64."""
    sizes = run_sizes(num_sequences, max_token_id)
    with_blocks = {step for step in range(32) if (100 + step) % BLOCK_SIZE == 0}
    for step, size in enumerate(sizes):
        if step in with_blocks:
            # The one step in 16 in which all take a block: its place, its number.
            assert size <= 9 * num_sequences + 80
        else:
            assert size <= 6 * num_sequences + 64
    # The steps between pay for it.
    assert sum(sizes) <= 32 * (6 * num_sequences + 64)


def test_ended_sequence_costs_few_bytes():
    encoder = Encoder()
    encoder.encode(first_message(256, 100))
    whole = len(encoder.encode(decoding_message(2, 256, 100, 152_000)))
    ended = len(encoder.encode(decoding_message(3, 256, 100, 152_000, left_out=(3, 200))))
    assert ended <= whole + 40


def test_step_costs_more_without_previous_message():
    """Negative control: it is the coding against what the last step sampled that meets the budget."""
    message = decoding_message(2, 256, 100, 152_000)
    assert len(encode_message(message)) > 6 * 256 + 64
    encoder = Encoder()
    first = first_message(256, 100)
    encoder.encode(first)
    assert len(encoder.encode(message)) < 4 * 256 + 64


@pytest.mark.parametrize("num_prompt_tokens", [1, 100, 10_000])
@pytest.mark.parametrize("max_token_id", [256, 150_000, 2**24])
def test_snapshot_stays_within_byte_budget(num_prompt_tokens, max_token_id):
    """Budget: 4 bytes a prompt token and 100."""
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


def test_default_sampling_parameters_cost_less_than_others():
    def size(sampling: SamplingParams) -> int:
        return len(encode_message(StepMessage(1, (Admit(Request(1, (2,), sampling, 3)),), StepPlan(1), (), b"")))

    default = size(SamplingParams())
    assert 0 < size(SamplingParams(temperature=0.5)) - default <= 12
    assert 0 < size(SamplingParams(seed=0, ignore_eos=True)) - default <= 8


def test_step_without_work_is_short():
    assert len(encode_message(StepMessage(1, (), StepPlan(1), (), DIGEST))) <= 64
