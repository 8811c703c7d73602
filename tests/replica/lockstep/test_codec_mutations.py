"""Damaged and hostile bytes: nothing but MessageError comes out, no broken checksum is accepted, nothing grows far.

The default run is short. The stress tier mutates a million messages.
"""

import dataclasses
import random

import pytest
from step_records import RunModel, with_checksum
from stress_seed import SEED

from spmd_worker.replica.lockstep.wire.codec import Decoder, Encoder
from spmd_worker.replica.lockstep.wire.message import MessageError, StepMessage
from spmd_worker.replica.sequence.events import Abort, Admit, Close, FinishTransfers, ResetPrefixCache, SetWeightVersion
from spmd_worker.replica.sequence.request import Request
from spmd_worker.replica.sequence.sampling_params import SamplingParams
from spmd_worker.replica.sequence.step import StepPlan

EVENTS = (
    Admit(Request(7, tuple(range(50)), SamplingParams(stop=("stop", "é"), seed=5, logit_bias={3: 1.5}), 2**60)),
    Admit(Request(8, (1, 2), SamplingParams(n=2, best_of=4), 7)),
    Abort(2),
    ResetPrefixCache(),
    SetWeightVersion(2),
    FinishTransfers((3, 4, 7)),
    Close(),
)
INTERESTING_BYTES = (0, 1, 2, 3, 4, 8, 16, 17, 0x7F, 0x80, 0xFE, 0xFF)


def sources(seed: int) -> list[tuple[Decoder, bytes]]:
    """Coded messages of every kind, each with a decoder that has read those before it."""
    run, encoder, result = RunModel(random.Random(seed), 0.7, (0, 1, 1, 1, 1, 1, 3)), Encoder(), []
    coded: list[bytes] = []
    for _ in range(12):
        message = run.next_message()
        message = dataclasses.replace(message, events=EVENTS)
        coded.append(encoder.encode(message))
        decoder = Decoder()
        for earlier in coded[:-1]:
            decoder.decode(earlier)
        result.append((decoder, coded[-1]))
    alone = StepMessage(3, EVENTS, StepPlan(3), (1, 2, 3), b"")
    return [*result, (Decoder(), Encoder().encode(alone))]


def mutated(chance: random.Random, data: bytes, other: bytes) -> bytes:
    """Up to four changes: bits, bytes, insertions, deletions, repetitions, pieces of another message."""
    found = bytearray(data)
    for _ in range(chance.randrange(1, 5)):
        place = chance.randrange(len(found)) if found else 0
        kind = chance.randrange(6)
        if kind == 0 and found:
            found[place] ^= 1 << chance.randrange(8)
        elif kind == 1 and found:
            found[place] = chance.choice(INTERESTING_BYTES)
        elif kind == 2:
            found[place:place] = bytes(chance.choice(INTERESTING_BYTES) for _ in range(chance.randrange(1, 12)))
        elif kind == 3:
            del found[place : place + chance.randrange(1, 12)]
        elif kind == 4:
            found[place:place] = found[place : place + chance.randrange(1, 12)]
        else:
            start = chance.randrange(len(other))
            piece = other[start : start + chance.randrange(1, 24)]
            found[place : place + len(piece)] = piece
    return bytes(found)


def decode_mutations(num_mutations: int, seed: int) -> tuple[int, int]:
    """How many mutations with a broken checksum, and how many with a repaired one, were accepted.

    Every other exception than MessageError passes through and fails the test.
    """
    chance = random.Random(seed)
    found = sources(seed)
    num_broken = num_repaired = 0
    for number in range(num_mutations):
        decoder, data = found[number % len(found)]
        base = decoder._base
        other = found[chance.randrange(len(found))][1]
        if number & 1:
            changed = mutated(chance, data, other)
            num_broken += changed != data and was_accepted(decoder, changed)
        else:
            changed = with_checksum(mutated(chance, data[:-4], other[:-4]))
            num_repaired += was_accepted(decoder, changed)
        decoder._base = base
    return num_broken, num_repaired


def was_accepted(decoder: Decoder, data: bytes) -> bool:
    base = decoder._base
    try:
        message = decoder.decode(data)
    except MessageError:
        assert decoder._base is base, "a refused message changed the decoder"
        return False
    # The densest of all is a row of a delta: 5 numbers and 2 empty lists in its one byte.
    assert num_leaves(message) <= 8 * len(data), (num_leaves(message), len(data))
    return True


def num_leaves(value: object) -> int:
    """Numbers, texts and empty lists in a record; the defaults of sampling parameters are no news."""
    if isinstance(value, SamplingParams):
        return sum(num_leaves(getattr(value, key)) for key in ("stop", "stop_token_ids", "logit_bias"))
    if dataclasses.is_dataclass(value):
        return sum(num_leaves(getattr(value, spec.name)) for spec in dataclasses.fields(value))
    return sum(map(num_leaves, value)) if isinstance(value, tuple) and value else 1


def test_mutated_messages_raise_only_message_errors():
    """Mutated bytes raise nothing but MessageError, and no broken checksum is accepted."""
    num_broken, num_repaired = decode_mutations(4_000, seed=1)
    assert num_broken == 0
    # Negative control: the mutations reach deep enough that some of the repaired ones are messages, only other ones.
    assert num_repaired > 100


@pytest.mark.stress
@pytest.mark.parametrize("part", range(10))
def test_million_mutated_messages_raise_only_message_errors(part: int):
    num_broken, num_repaired = decode_mutations(100_000, 10 * SEED + part)
    print(
        f"\nMESSAGES of seed {SEED}, part {part}: 100,000, {num_broken} broken and {num_repaired} repaired taken",
        end="",
    )
    assert num_broken == 0


def test_accepted_repaired_message_can_be_encoded_again():
    """A hostile message that is accepted is a value like any other: nothing in it breaks what handles it next."""
    chance, num_accepted = random.Random(3), 0
    for decoder, data in sources(3):
        base = decoder._base
        for _ in range(150):
            changed = with_checksum(mutated(chance, data[:-4], data[:-4]))
            decoder._base = base
            try:
                message = decoder.decode(changed)
            except MessageError:
                continue
            num_accepted += 1
            assert Decoder().decode(Encoder().encode(message)) == message
    assert num_accepted > 20
