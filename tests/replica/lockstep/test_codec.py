"""Messages come back as they went; other bytes do not come back at all."""

import dataclasses
import random
import re
import struct
import tracemalloc
from zlib import crc32

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from property_examples import examples
from step_records import RunModel, every_change, messages, sampled_by, with_checksum

from kv_cache.block_ops import BlockOps
from kv_cache.state_ops import StateOps
from spmd_worker.replica.lockstep.wire import codec
from spmd_worker.replica.lockstep.wire.codec import VERSION, Decoder, Encoder, decode_message, encode_message
from spmd_worker.replica.lockstep.wire.message import MessageError, StepMessage
from spmd_worker.replica.sequence.events import (
    Abort,
    Admit,
    Close,
    CommitWeights,
    EndRound,
    EndWorkerEvent,
    FinishTransfers,
    FoundBlocks,
    Interrupt,
    ResetMediaRows,
    ResetPrefixCache,
    SetWeightVersion,
    WorkerEvent,
)
from spmd_worker.replica.sequence.hit_comparison import CachedCopy, HitComparison
from spmd_worker.replica.sequence.input_rows import KEYS_VALUES, InputRows
from spmd_worker.replica.sequence.media_items import EncodeMedia, MediaItem
from spmd_worker.replica.sequence.metadata import (
    SequenceData,
    SequenceDataDelta,
    SequenceGroupMetadata,
    SequenceGroupMetadataDelta,
)
from spmd_worker.replica.sequence.pooling_params import PoolingParams
from spmd_worker.replica.sequence.record_checks import sent_fields
from spmd_worker.replica.sequence.repetition import RepetitionDetectionParams
from spmd_worker.replica.sequence.request import Request
from spmd_worker.replica.sequence.sampled import SampledIds
from spmd_worker.replica.sequence.sampling_params import SamplingParams
from spmd_worker.replica.sequence.sequence import SequenceKey
from spmd_worker.replica.sequence.step import StepPlan
from spmd_worker.replica.sequence.structured_outputs import StructuredOutputsParams
from spmd_worker.replica.sequence.token_rules import ThinkingRules, TimestampRules, TokenRules

FULL_POOLING = PoolingParams(
    task="embed", normalize=True, use_activation=False, dimensions=5, late_chunking_params={"chunk_size": 7}
)
OTHER_SAMPLING = SamplingParams(
    seed=-8,
    stop=("é", "end"),
    temperature=0.25,
    structured_outputs=StructuredOutputsParams(choice=("é", "b"), whitespace_pattern=" ", around="start: @form"),
    repetition_detection=RepetitionDetectionParams(5, 2, 3),
    thinking_token_budget=7,
    token_rules=TokenRules(
        suppress_tokens=(1, 2), timestamps=TimestampRules(9, 4), thinking=ThinkingRules(5, (1,), (2, 3), 4)
    ),
)
FULL_PLAN = StepPlan(
    step=9,
    groups=(
        SequenceGroupMetadataDelta(3, (SequenceDataDelta(0, (11,), 2, (), 32, 1, 1, -1, (12, 14)),)),
        SequenceGroupMetadata(
            Request(4, (5, 6, 7), OTHER_SAMPLING, 2**64 - 1),
            (SequenceData(0, (12, 13), (8, 9), 0, 5, 1), SequenceData(1, (12,), (8, 10), 0, 4, 0, 7, (9,), 2)),
        ),
        SequenceGroupMetadataDelta(
            6, (SequenceDataDelta(0, (21,), 2, (5,), 32, 1, 1), SequenceDataDelta(1, (22,), 0, (6, 7), 32, 1, 1, 9))
        ),
    ),
    block_ops=BlockOps(
        swap_in=((1, 2),),
        swap_out=((3, 4), (5, 6)),
        copy=((7, 8),),
        store=((13, 14),),
        load=((15, 16), (17, 18)),
        transfer=19,
        save=((3, b"three"),),
        fetch=((b"four", 4), (b"five", 5)),
    ),
    finished_sequences=(SequenceKey(1, 0), SequenceKey(6, 2)),
    finished_request_ids=(1,),
    num_tokens=15,
    continuing=(SequenceKey(1, 1), SequenceKey(2, 0), SequenceKey(5, 0)),
    continuing_token_ids=(11, 21, 31, 32),
    continuing_num_ids=(1, 1, 2),
    continuing_blocks=((0, 90), (2, 91)),
    state_ops=StateOps(swap_in=((1, 2),), swap_out=((3, 4), (5, 6)), copy=((7, 8),)),
    encode=(EncodeMedia(4, 0, 1), EncodeMedia(4, 2, 0)),
    drop_rows=(bytes(16), b"another picture."),
    hit_comparisons=(
        HitComparison(SequenceKey(4, 0), (CachedCopy(0, 30, b"six", 2), CachedCopy(1, 31, b"seven", -1))),
        HitComparison(SequenceKey(4, 1), (), (CachedCopy(2, 5, b"eight", 3),)),
    ),
    repeated_rows=(2, 0),
    wants_drafts=True,
)
PLAN_OF_NOBODY = StepPlan(9)
FULL_SAMPLING = SamplingParams(
    n=2,
    best_of=3,
    max_tokens=50,
    stop_token_ids=(3, 4),
    logit_bias={5: 1.5, 6: -2.0},
    allowed_token_ids=(7, 8),
    bad_words=("bad", "word"),
    bad_words_ids=((5, 6), (9,)),
    skip_reading_prefix_cache=True,
    cache_salt="a tenant",
    prompt_logprob_token_ids=((7, 8), (9,)),
    logprob_token_ids=(7, 2),
)
FULL_ROWS = (InputRows(bytes(16), 0, 1, KEYS_VALUES), InputRows(bytes(range(32)), 1, 2))
FULL_MEDIA = (MediaItem(b"a picture's name", ((0, 1),), 4), MediaItem(bytes(range(16)), ((1, 1), (2, 1)), 8, (2, 1)))
FULL_MESSAGE = StepMessage(
    step=9,
    events=(
        *(
            Admit(Request(7, (1, 2, 0, 3), FULL_SAMPLING, 0, 0, FULL_POOLING, 9, FULL_ROWS, 1, FULL_MEDIA, -3)),
            Abort(2),
        ),
        *(ResetPrefixCache(True), ResetMediaRows()),
        *(SetWeightVersion(3), FinishTransfers((5, 6)), EndRound(), Interrupt(1, "KeyboardInterrupt: "), Close()),
        *(WorkerEvent(4, "sleep", b"\0\xff"), EndWorkerEvent(4, "rank 1: no"), CommitWeights(-(2**63), 38)),
        FoundBlocks((b"one", b"two"), (b"three",)),
    ),
    plan=FULL_PLAN,
    sampled_token_ids=(11, 21, 31, 32),
    digest=bytes(range(32)),
    num_sampled_ids=(1, 1, 2),
    mask_checksums=(2**32 - 1, 5),
)


def refit(data: bytes) -> bytes:
    return with_checksum(data[:-4])


def with_plan(**changes) -> StepMessage:
    return dataclasses.replace(FULL_MESSAGE, plan=dataclasses.replace(FULL_PLAN, **changes))


def message_with(sampling: SamplingParams) -> StepMessage:
    return dataclasses.replace(FULL_MESSAGE, events=(Admit(Request(7, (1,), sampling, 0)),))


@given(messages)
@example(FULL_MESSAGE)
@examples(100)
def test_single_message_round_trips(message):
    assert decode_message(encode_message(message)) == message


@given(st.lists(messages, min_size=2, max_size=4), st.booleans())
@examples(30)
def test_consecutive_messages_round_trip(found, are_consecutive):
    encoder, decoder = Encoder(), Decoder()
    for step, message in enumerate(found):
        if are_consecutive:
            message = dataclasses.replace(message, step=step, plan=dataclasses.replace(message.plan, step=step))
        assert decoder.decode(encoder.encode(message)) == message


@pytest.mark.gate("0-*", "1-*", "2-*")
@pytest.mark.parametrize("regularity", [0.5, 0.9, 1.0])
@pytest.mark.parametrize("nums_of_ids", [(1,), (0, 1, 1, 1, 3)])
@pytest.mark.parametrize("seed", range(10))
def test_run_of_messages_round_trips_step_by_step(seed, regularity, nums_of_ids):
    run, encoder, decoder = RunModel(random.Random(seed), regularity, nums_of_ids), Encoder(), Decoder()
    for _ in range(40):
        message = run.next_message()
        assert decoder.decode(encoder.encode(message)) == message


@given(messages)
@examples(15)
def test_two_encoders_agree_on_every_byte(message):
    assert encode_message(message) == encode_message(dataclasses.replace(message))


def test_decoded_records_have_the_types_of_the_originals():
    plan = decode_message(encode_message(FULL_MESSAGE)).plan
    assert isinstance(plan.finished_sequences[0], SequenceKey)
    for group, original in zip(plan.groups, FULL_PLAN.groups):
        assert type(group) is type(original)
        assert isinstance(group.sequences, tuple)
        for data, same in zip(group.sequences, original.sequences):
            for spec in dataclasses.fields(same):
                assert type(getattr(data, spec.name)) is type(getattr(same, spec.name)), spec.name


CHANGES = list(every_change(FULL_MESSAGE))

# The plan before: the three that go on and two more sampled in it, so that FULL_MESSAGE can be coded against it.
PLAN_BEFORE = StepPlan(
    step=8,
    groups=(SequenceGroupMetadataDelta(5, (SequenceDataDelta(0, (), 1, (3,), 16, 4, 1),)),),
    continuing=(SequenceKey(1, 1), SequenceKey(2, 0)),
    continuing_token_ids=(1, 2),
    num_tokens=6,
)
MESSAGE_BEFORE = StepMessage(8, (), PLAN_BEFORE, (1, 2), b"")


def test_every_record_field_is_among_changes():
    changed = {name for path, _ in CHANGES for name in re.findall(r"[a-z_]+", path)}
    records = (Admit, Abort, SetWeightVersion, FinishTransfers, WorkerEvent, EndWorkerEvent, CommitWeights)
    records += (ResetPrefixCache, FoundBlocks, MediaItem, EncodeMedia)
    records += (Request, SamplingParams, StepPlan, BlockOps, StateOps, HitComparison)
    listed = (SequenceData, SequenceDataDelta, SequenceGroupMetadata, SequenceGroupMetadataDelta)
    for record in (*records, *listed):
        missing = {spec.name for spec in sent_fields(record)} - changed
        assert not missing, (record, missing)


def test_every_record_field_round_trips():
    """Every field of every record of the message is changed in turn, and the change must arrive."""
    for path, changed in CHANGES:
        encoded = encode_message(changed)
        assert decode_message(encoded) == changed, path
        assert encoded != encode_message(FULL_MESSAGE), path


def test_every_record_field_round_trips_in_continuing_message():
    found = set()
    for path, changed in [("", FULL_MESSAGE), *CHANGES]:
        encoder, decoder = Encoder(), Decoder()
        decoder.decode(encoder.encode(MESSAGE_BEFORE))
        encoded = encoder.encode(changed)
        assert decoder.decode(encoded) == changed, path
        found.add(encoded)
    assert len(found) == 1 + len({encode_message(changed) for _, changed in CHANGES})


@pytest.mark.parametrize("sampling", [{"best_of": 1}, {"n": 2, "best_of": 5}, {"best_of": 1024, "logprobs": 0}])
def test_best_of_round_trips_when_it_changes_nothing(sampling):
    params = SamplingParams(**sampling)
    decoded = decode_message(encode_message(message_with(params)))
    assert decoded.events[0].request.sampling == params
    assert decoded.events[0].request.sampling != dataclasses.replace(params, best_of=None)


def test_best_of_below_n_is_rejected():
    good = encode_message(message_with(SamplingParams(n=3, best_of=5)))
    # Constant columns (16): n is 3, best_of is there (a flag of 1) and 5, zig-zag.
    bad = good.replace(bytes([16, 6, 16, 2, 16, 10]), bytes([16, 6, 16, 2, 16, 4]))
    assert bad != good
    with pytest.raises(MessageError, match=r"best_of=2 must .*least n=3:"):
        decode_message(refit(bad))


def test_negative_zero_stays_negative():
    decoded = decode_message(encode_message(message_with(SamplingParams(presence_penalty=-0.0))))
    assert str(decoded.events[0].request.sampling.presence_penalty) == "-0.0"


def test_truncated_message_is_rejected_despite_matching_checksum():
    data = encode_message(FULL_MESSAGE)
    for length in range(len(data)):
        with pytest.raises(MessageError):
            decode_message(data[:length])
        with pytest.raises(MessageError):
            decode_message(refit(data[:length].ljust(4)))


@pytest.mark.parametrize("regularity", [0.6, 1.0])
def test_truncated_continuing_message_is_rejected(regularity):
    run, encoder, decoder = RunModel(random.Random(2), regularity), Encoder(), Decoder()
    for _ in range(12):
        message = run.next_message()
        data = encoder.encode(message)
        for length in range(4, len(data)):
            with pytest.raises(MessageError):
                decoder.decode(refit(data[:length]))
        assert decoder.decode(data) == message


def test_flipped_bit_is_rejected():
    data = encode_message(FULL_MESSAGE)
    for bit in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(MessageError, match="checksum"):
            decode_message(bytes(flipped))
    assert decode_message(data) == FULL_MESSAGE


def test_trailing_bytes_are_rejected():
    data = encode_message(FULL_MESSAGE)
    with pytest.raises(MessageError, match="1 bytes left over"):
        decode_message(refit(data[:-4] + b"\0" + data[-4:]))


def test_other_layout_version_is_rejected_by_name():
    data = encode_message(FULL_MESSAGE)
    with pytest.raises(MessageError, match=rf"version {VERSION + 1}, .*reads version {VERSION}$"):
        decode_message(refit(bytes([VERSION + 1]) + data[1:]))


def test_unknown_flags_and_missing_mask_checksums_are_rejected():
    data = encode_message(StepMessage(1, (), StepPlan(1), (), b""))
    for flags, words in ((4, "unknown flags 0x4"), (255, "unknown flags 0xff")):
        with pytest.raises(MessageError, match=words):
            decode_message(refit(data[:1] + bytes([flags]) + data[2:]))
    # Version, flags, step, layout, no digest, no ids, no numbers of ids; then no checksums.
    with pytest.raises(MessageError, match=r"checksums .*announced .*missing"):
        decode_message(refit(data[:1] + b"\x02" + data[2:10] + b"\0" + data[10:]))


def test_records_with_other_fields_are_rejected():
    data = encode_message(FULL_MESSAGE)
    for place in range(3, 7):
        other = data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]
        with pytest.raises(MessageError, match=r"records .*other fields"):
            decode_message(refit(other))


def test_log_from_before_lagging_states_is_rejected(monkeypatch: pytest.MonkeyPatch):
    layout = codec._PLAN.layout.replace(", num_lagging_tokens: int = 0", "")
    assert layout != codec._PLAN.layout
    with monkeypatch.context() as patch:
        patch.setattr(codec, "_LAYOUT", codec._CHECKSUM.pack(crc32(f"{codec._EVENTS.layout}; {layout}".encode())))
        data = encode_message(FULL_MESSAGE)
        assert decode_message(data) == FULL_MESSAGE
    with pytest.raises(MessageError, match="another version of this code wrote the message"):
        decode_message(data)


def test_sampling_parameter_out_of_range_is_rejected():
    data = encode_message(message_with(SamplingParams(top_p=0.5)))
    bad = data.replace(struct.pack("<d", 0.5), struct.pack("<d", 7.0))
    assert bad != data
    with pytest.raises(MessageError, match="top_p=7"):
        decode_message(refit(bad))


def test_lone_surrogate_is_rejected_when_encoding_and_decoding():
    sampling = SamplingParams(stop=("abc",))
    # SamplingParams itself refuses it.
    object.__setattr__(sampling, "stop", ("\ud800",))
    with pytest.raises(MessageError, match="UTF-8"):
        encode_message(message_with(sampling))
    data = encode_message(message_with(SamplingParams(stop=("abc",))))
    with pytest.raises(MessageError, match="UTF-8"):
        decode_message(refit(data.replace(b"abc", b"\xed\xa0\x80")))


@pytest.mark.parametrize(
    "message",
    [
        with_plan(finished_request_ids=(2**63,)),
        with_plan(finished_request_ids=(*range(40), 1.5)),
        with_plan(groups=(SequenceGroupMetadataDelta(3, (SequenceDataDelta(0, (), 0, (), 2**70, 1, 1),)),)),
        with_plan(groups=(PLAN_OF_NOBODY,)),
        dataclasses.replace(FULL_MESSAGE, digest=bytes(65)),
    ],
)
def test_value_outside_layout_is_rejected_when_encoding(message):
    with pytest.raises(MessageError):
        encode_message(message)


def test_huge_count_allocates_nothing():
    head = encode_message(StepMessage(0, (), StepPlan(0), (), b""))[:8]
    for count in (b"\xff\xff\xff\x7f", b"\xff\xff\xff\xff\xff\xff\xff\x7f"):
        with pytest.raises(MessageError, match="entries announced with"):
            decode_message(refit(head + count + bytes(20)))


def rows_that_claim(num_samples: int, num_rows: int, step: int) -> StepMessage:
    """A delta of so many rows, and a snapshot of so many, each of which claims to sample so many ids."""
    deltas = tuple(SequenceDataDelta(row % 4, (), 0, (), 0, 1, num_samples) for row in range(num_rows))
    data = tuple(SequenceData(row % 4, (), (), 0, 1, num_samples) for row in range(num_rows))
    request = Request(2, (5,), SamplingParams(n=1024), 0)
    groups = (SequenceGroupMetadataDelta(1, deltas), SequenceGroupMetadata(request, data))
    return StepMessage(step, (), StepPlan(step, groups), (7,) * 5, b"")


def peak_bytes(act) -> int:
    tracemalloc.start()
    act()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return peak


@pytest.mark.parametrize("num_samples", [1, 1024, 2**40, 2**63 - 1])
def test_claimed_samples_cost_nothing(num_samples):
    """What the next message is coded against is as long as the ids that it brings, not as long as was claimed."""
    encoder, decoder = Encoder(), Decoder()
    found = [rows_that_claim(num_samples, 500, step) for step in (1, 2, 3)]
    coded = [encoder.encode(message) for message in found]
    assert max(map(len, coded)) < 10_000
    assert peak_bytes(lambda: [decoder.decode(data) for data in coded]) < 2_000_000
    assert decode_message(encode_message(found[0])) == found[0]


def test_claimed_samples_cost_memory_when_expanded():
    assert peak_bytes(lambda: sampled_by(rows_that_claim(200, 500, 1).plan)) > 10_000_000


def test_fork_continues_from_ids_of_one_row():
    """Three ids of one row: the parent goes on, its two forks are deltas, and then all three go on."""
    request = Request(3, (5,) * 6, SamplingParams(n=3), 0)
    prompt = StepPlan(1, (SequenceGroupMetadata(request, (SequenceData(0, (), (0, 1), 0, 6, 3),)),), num_tokens=6)
    forks = tuple(SequenceDataDelta(index, (10 + index,), 0, (0, 1 + index), 6, 1, 1) for index in (1, 2))
    parent = SequenceKey(3, 0)
    forked = StepPlan(
        2,
        (SequenceGroupMetadataDelta(3, forks),),
        num_tokens=3,
        continuing=(parent,),
        continuing_token_ids=(10,),
    )
    keys = (parent, SequenceKey(3, 1), SequenceKey(3, 2))
    together = StepPlan(3, num_tokens=3, continuing=keys, continuing_token_ids=(20, 21, 22))
    one_ended = StepPlan(
        4, finished_sequences=(keys[1],), num_tokens=2, continuing=keys[::2], continuing_token_ids=(30, 32)
    )
    sampled = ((), (10, 11, 12), (20, 21, 22), (30, 31, 32))
    encoder, decoder, sizes = Encoder(), Decoder(), []
    for plan, ids in zip((prompt, forked, together, one_ended), sampled):
        message = StepMessage(plan.step, (), plan, ids, b"")
        sizes.append(len(encoder.encode(message)))
        assert decoder.decode(Encoder().encode(message)) == message
    encoder, decoder = Encoder(), Decoder()
    for plan, ids in zip((prompt, forked, together, one_ended), sampled):
        message = StepMessage(plan.step, (), plan, ids, b"")
        assert decoder.decode(encoder.encode(message)) == message
    # Version, flags, step, two checksums, digest, 3 ids and none else, events, which fields of the plan and its tokens,
    # what goes on.
    assert sizes[2] == 3 + 8 + 1 + (1 + 2 + 3) + 1 + 2 + (1 + 2) + 3


def test_message_and_plan_must_be_of_one_step():
    with pytest.raises(AssertionError, match=r"step 3 carries .*step 9$"):
        StepMessage(3, (), FULL_PLAN, (), b"")


# Messages in order.


def coded_run(num_steps: int) -> list[bytes]:
    run, encoder = RunModel(random.Random(5)), Encoder()
    return [encoder.encode(run.next_message()) for _ in range(num_steps)]


def test_dropped_message_is_detected_at_next_one():
    coded = coded_run(4)
    decoder = Decoder()
    decoder.decode(coded[0])
    with pytest.raises(MessageError, match="step 3 where 2 comes"):
        decoder.decode(coded[2])


def test_repeated_message_is_detected():
    coded = coded_run(2)
    decoder = Decoder()
    decoder.decode(coded[0])
    decoder.decode(coded[1])
    with pytest.raises(MessageError, match="step 2 where 3 comes"):
        decoder.decode(coded[1])


def test_message_of_another_run_is_detected():
    other_run, other = RunModel(random.Random(6)), Encoder()
    coded = coded_run(1)
    others = [other.encode(other_run.next_message()) for _ in range(2)]
    decoder = Decoder()
    decoder.decode(coded[0])
    with pytest.raises(MessageError, match=r"step 2 .*another .*step 1$"):
        decoder.decode(others[1])


def test_continuing_message_is_not_read_alone():
    with pytest.raises(MessageError, match=r"against step 1, .*not "):
        decode_message(coded_run(2)[1])


def test_decoder_reads_right_message_after_rejected_one():
    coded = coded_run(3)
    run = RunModel(random.Random(5))
    decoder = Decoder()
    assert decoder.decode(coded[0]) == run.next_message()
    for bad in (coded[2], coded[1][:-1], refit(coded[1][:-5] + coded[1][-4:])):
        with pytest.raises(MessageError):
            decoder.decode(bad)
    assert decoder.decode(coded[1]) == run.next_message()
    assert decoder.decode(coded[2]) == run.next_message()


def test_encoder_state_is_unchanged_after_rejected_value():
    run, same, encoder, decoder = RunModel(random.Random(5)), RunModel(random.Random(5)), Encoder(), Decoder()
    decoder.decode(encoder.encode(run.next_message()))
    message = run.next_message()
    with pytest.raises(MessageError):
        encoder.encode(dataclasses.replace(message, sampled_token_ids=(2**64,)))
    same.next_message()
    assert decoder.decode(encoder.encode(message)) == same.next_message()


def test_message_after_step_gap_is_self_contained():
    encoder = Encoder()
    encoder.encode(with_plan())
    later = dataclasses.replace(FULL_MESSAGE, step=20, plan=dataclasses.replace(FULL_PLAN, step=20))
    assert decode_message(encoder.encode(later)) == later


def test_id_counts_of_sequences_cost_only_their_bytes():
    """What was given to each goes on as it was given, also where one ended: no id and no key is written twice."""
    keys = tuple(SequenceKey(number, 0) for number in range(20))
    before = StepPlan(4, num_tokens=20, continuing=keys, continuing_token_ids=(7,) * 20)
    given = SampledIds.from_rows([(), (1, 2, 3), *[(number,) for number in range(18)]])
    after = given.without([3])
    plan = StepPlan(
        5,
        num_tokens=21,
        continuing=keys[:3] + keys[4:],
        continuing_token_ids=after.token_ids,
        continuing_num_ids=after.num_ids,
    )
    encoder, decoder = Encoder(), Decoder()
    decoder.decode(encoder.encode(StepMessage(4, (), before, (), b"")))
    message = StepMessage(5, (), plan, given.token_ids, b"", given.num_ids)
    data = encoder.encode(message)
    assert decoder.decode(data) == message
    # Ids and numbers, a byte each with a count and two bytes of a column; what is dropped; 20 for the rest.
    assert len(data) <= (21 + 3) + (20 + 3) + 4 + 20


@pytest.mark.parametrize("num_ids", [b"\x02\x01\x00\x01\x01", b"\x01\x01\x00\x04", b"\x02\x01\x01\x00\x05"])
def test_inconsistent_id_counts_are_rejected(num_ids):
    good = encode_message(StepMessage(1, (), StepPlan(1), (5, 6, 7), b"", (1, 2)))
    # A count and a dense column of numbers: (1, 1), (4,), (-1, 4) in place of (1, 2).
    bad = good.replace(b"\x02\x01\x00\x01\x02", num_ids, 1)
    assert bad != good
    with pytest.raises(MessageError, match=r"num_sampled_ids shares out"):
        decode_message(refit(bad))
