"""The first difference is named with both values, causes before effects."""

import dataclasses
import re
from contextlib import nullcontext

import pytest
from hypothesis import given
from property_examples import examples
from step_records import messages
from test_codec import CHANGES, FULL_MESSAGE

from spmd_worker.base.errors import RanksDisagreeError
from spmd_worker.replica.lockstep.difference import check_requests, first_difference, record_of
from spmd_worker.replica.sequence.events import Abort, Admit, Event, FinishTransfers, ResetPrefixCache, SetWeightVersion
from spmd_worker.replica.sequence.hit_comparison import CachedCopy
from spmd_worker.replica.sequence.metadata import (
    SequenceData,
    SequenceDataDelta,
    SequenceGroupMetadata,
    SequenceGroupMetadataDelta,
)
from spmd_worker.replica.sequence.request import Request
from spmd_worker.replica.sequence.sampling_params import SamplingParams
from spmd_worker.replica.sequence.sequence import SequenceKey

PLAN = dataclasses.replace(
    FULL_MESSAGE.plan,
    groups=tuple(
        SequenceGroupMetadata(
            Request(number, (5, 6), SamplingParams(), 0), (SequenceData(0, (), (1, 2, 3, 17), 0, 2, 1),)
        )
        for number in range(6)
    ),
)
COMPARISONS = PLAN.hit_comparisons
EVENTS = (Admit(Request(7, tuple(range(10)), SamplingParams(), 0)),)
MESSAGE = dataclasses.replace(FULL_MESSAGE, plan=PLAN, events=EVENTS)


def difference(mine, theirs, my_rank=0, their_rank=1):
    return first_difference(record_of(mine), record_of(theirs), my_rank, their_rank)


def with_plan(**changes):
    return dataclasses.replace(MESSAGE, plan=dataclasses.replace(PLAN, **changes))


def with_group(number, **changes):
    groups = list(PLAN.groups)
    groups[number] = dataclasses.replace(groups[number], **changes)
    return with_plan(groups=tuple(groups))


def with_request(**changes):
    return dataclasses.replace(MESSAGE, events=(Admit(dataclasses.replace(EVENTS[0].request, **changes)),))


DELTA = SequenceGroupMetadataDelta(2, (SequenceDataDelta(0, (4,), 1, (), 2, 1, 1),))


@pytest.mark.parametrize(
    ("theirs", "words"),
    [
        (
            with_group(5, sequences=(SequenceData(0, (), (1, 2, 3, 21), 0, 2, 1),)),
            "groups[5].block_ids[3]: 17 on rank 0, 21 on rank 1",
        ),
        (
            with_request(prompt_token_ids=(0, 1, 2, 3, 4, 5, 6, 5, 8, 9)),
            "events[0].request.prompt_token_ids[7]: 7 on rank 0, 5 on rank 1",
        ),
        (with_request(stream=9), "events[0].request.stream: 0 on rank 0, 9 on rank 1"),
        (
            with_request(sampling=SamplingParams(temperature=0.5)),
            "events[0].request.sampling.temperature: 1.0 on rank 0, 0.5 on rank 1",
        ),
        (
            with_request(sampling=SamplingParams(seed=3)),
            "events[0].request.sampling.seed: None on rank 0, 3 on rank 1",
        ),
        (
            with_request(sampling=SamplingParams(presence_penalty=-0.0)),
            "events[0].request.sampling.presence_penalty: 0.0 on rank 0, -0.0 on rank 1",
        ),
        (with_plan(groups=PLAN.groups[:5]), "groups: 6 entries on rank 0, 5 on rank 1"),
        (
            with_plan(groups=PLAN.groups[1:]),
            "groups[0].request.request_id: 0 on rank 0, 1 on rank 1 (groups: 6 entries on rank 0, 5 on rank 1)",
        ),
        (
            with_plan(groups=(*PLAN.groups[:2], DELTA, *PLAN.groups[3:])),
            "groups[2]: SequenceGroupMetadata on rank 0, SequenceGroupMetadataDelta on rank 1",
        ),
        (
            with_group(1, sequences=PLAN.groups[1].sequences * 2),
            "groups[1].sequences: 1 entries on rank 0, 2 on rank 1",
        ),
        (
            with_plan(finished_sequences=(SequenceKey(1, 0), SequenceKey(6, 3))),
            "finished_sequences[1].sample_index: 2 on rank 0, 3 on rank 1",
        ),
        (
            with_plan(block_ops=dataclasses.replace(PLAN.block_ops, copy=((7, 9),))),
            "block_ops.copy[0][1]: 8 on rank 0, 9 on rank 1",
        ),
        (
            with_plan(block_ops=dataclasses.replace(PLAN.block_ops, swap_in=((9, 2),))),
            "block_ops.swap_in[0][0]: 1 on rank 0, 9 on rank 1",
        ),
        (
            with_plan(block_ops=dataclasses.replace(PLAN.block_ops, swap_out=((3, 9), (5, 6)))),
            "block_ops.swap_out[0][1]: 4 on rank 0, 9 on rank 1",
        ),
        (
            with_plan(block_ops=dataclasses.replace(PLAN.block_ops, swap_out=((3, 4),))),
            "block_ops.swap_out: 2 entries on rank 0, 1 on rank 1",
        ),
        (
            with_plan(block_ops=dataclasses.replace(PLAN.block_ops, store=((20, 14),))),
            "block_ops.store[0][0]: 13 on rank 0, 20 on rank 1",
        ),
        (
            with_plan(block_ops=dataclasses.replace(PLAN.block_ops, load=((15, 16), (17, 20)))),
            "block_ops.load[1][1]: 18 on rank 0, 20 on rank 1",
        ),
        (
            with_plan(block_ops=dataclasses.replace(PLAN.block_ops, transfer=20)),
            "block_ops.transfer: 19 on rank 0, 20 on rank 1",
        ),
        (
            with_plan(state_ops=dataclasses.replace(PLAN.state_ops, copy=((7, 9),))),
            "state_ops.copy[0][1]: 8 on rank 0, 9 on rank 1",
        ),
        (
            with_plan(hit_comparisons=(dataclasses.replace(COMPARISONS[0], blocks=(CachedCopy(0, 31, b"six", 2),)),)),
            "hit_comparisons[0].blocks[0].number: 30 on rank 0, 31 on rank 1 "
            "(hit_comparisons[0].blocks: 2 entries on rank 0, 1 on rank 1)",
        ),
        (
            with_group(5, sequences=(SequenceData(0, (), (1, 2, 3, 17), 0, 2, 1, 8),)),
            "groups[5].state_slot: -1 on rank 0, 8 on rank 1",
        ),
        (with_plan(num_tokens=3), "num_tokens: 15 on rank 0, 3 on rank 1"),
        (
            with_plan(continuing=(SequenceKey(1, 1), SequenceKey(3, 0), SequenceKey(5, 0))),
            "continuing[1].request_id: 2 on rank 0, 3 on rank 1",
        ),
        (
            with_plan(continuing=(SequenceKey(1, 2), SequenceKey(2, 0), SequenceKey(5, 0))),
            "continuing[0].sample_index: 1 on rank 0, 2 on rank 1",
        ),
        (with_plan(continuing_token_ids=(11, 21, 33, 32)), "continuing_token_ids[2]: 31 on rank 0, 33 on rank 1"),
        (with_plan(continuing_token_ids=(11, 21)), "continuing_token_ids: 4 entries on rank 0, 2 on rank 1"),
        (with_plan(continuing_blocks=((0, 90), (2, 92))), "continuing_blocks[1][1]: 91 on rank 0, 92 on rank 1"),
        (with_plan(continuing_blocks=((0, 90), (1, 91))), "continuing_blocks[1][0]: 2 on rank 0, 1 on rank 1"),
        (
            with_plan(continuing_blocks=((0, 90),)),
            "continuing_blocks: 2 entries on rank 0, 1 on rank 1",
        ),
        (dataclasses.replace(MESSAGE, events=(Abort(1),)), "events[0]: Admit on rank 0, Abort on rank 1"),
        (dataclasses.replace(MESSAGE, events=()), "events: 1 entries on rank 0, 0 on rank 1"),
        (
            with_request(sampling=SamplingParams(best_of=2)),
            "events[0].request.sampling.best_of: None on rank 0, 2 on rank 1",
        ),
        (
            dataclasses.replace(MESSAGE, events=(ResetPrefixCache(),)),
            "events[0]: Admit on rank 0, ResetPrefixCache on rank 1",
        ),
        (
            dataclasses.replace(MESSAGE, sampled_token_ids=(11, 5, 31, 32)),
            "sampled_token_ids[1]: 21 on rank 0, 5 on rank 1",
        ),
        (
            dataclasses.replace(MESSAGE, mask_checksums=(7, 5), sampled_token_ids=(11, 5, 31, 32)),
            "mask_checksums[0]: 4294967295 on rank 0, 7 on rank 1",
        ),
        (
            dataclasses.replace(MESSAGE, step=8, plan=dataclasses.replace(PLAN, step=8)),
            "step: 9 on rank 0, 8 on rank 1",
        ),
    ],
)
def test_first_difference_is_named(theirs, words):
    assert difference(MESSAGE, theirs) == words


@pytest.mark.parametrize(
    ("mine", "theirs", "words"),
    [
        (SetWeightVersion(3), SetWeightVersion(4), "events[0].version: 3 on rank 0, 4 on rank 1"),
        (FinishTransfers((5, 6)), FinishTransfers((5, 7)), "events[0].numbers[1]: 6 on rank 0, 7 on rank 1"),
        (FinishTransfers((5, 6)), FinishTransfers((5,)), "events[0].numbers: 2 entries on rank 0, 1 on rank 1"),
        (
            ResetPrefixCache(),
            SetWeightVersion(0),
            "events[0]: ResetPrefixCache on rank 0, SetWeightVersion on rank 1",
        ),
    ],
)
def test_cache_events_are_distinguished(mine: Event, theirs: Event, words: str):
    one, two = (dataclasses.replace(MESSAGE, events=(each,)) for each in (mine, theirs))
    assert difference(one, two) == words


def test_difference_in_group_names_the_sequence():
    two = SequenceGroupMetadataDelta(
        3, (SequenceDataDelta(0, (4,), 1, (), 2, 1, 1), SequenceDataDelta(1, (5,), 1, (), 2, 1, 1))
    )
    other = dataclasses.replace(
        two, sequences=(two.sequences[0], dataclasses.replace(two.sequences[1], appended_token_ids=(6,)))
    )
    words = difference(with_plan(groups=(two,)), with_plan(groups=(other,)), 0, 3)
    assert words == "groups[0].sequences[1].appended_token_ids[0]: 5 on rank 0, 6 on rank 3"


def test_sampled_id_is_named_before_its_consequences():
    theirs = dataclasses.replace(with_plan(num_tokens=3), sampled_token_ids=(11, 5, 31, 32))
    assert difference(MESSAGE, theirs).startswith("sampled_token_ids[1]")


def test_missing_continuing_sequence_is_named_before_its_count():
    theirs = with_plan(continuing=PLAN.continuing[::2], continuing_token_ids=(11, 31), num_tokens=14)
    words = "continuing[1].request_id: 2 on rank 0, 5 on rank 1 (continuing: 3 entries on rank 0, 2 on rank 1)"
    assert difference(MESSAGE, theirs) == words
    fewer = with_plan(continuing=PLAN.continuing[:2], continuing_token_ids=(11, 21), num_tokens=14)
    assert difference(MESSAGE, fewer) == "continuing: 3 entries on rank 0, 2 on rank 1"


def test_long_value_is_cut_short():
    words = difference(with_request(sampling=SamplingParams(stop=("a" * 5000,))), MESSAGE)
    assert words.startswith("events[0].request.sampling.stop: 1 entries on rank 0, 0 on rank 1")
    other = with_request(sampling=SamplingParams(stop=("b" * 5000,)))
    assert len(difference(with_request(sampling=SamplingParams(stop=("a" * 5000,))), other)) < 400


@given(messages)
@examples(40)
def test_equal_records_have_no_difference(message):
    assert difference(message, dataclasses.replace(message, digest=b"other")) is None


@given(messages, messages)
@examples(60)
def test_difference_of_unequal_records_is_symmetric(one, two):
    is_equal = record_of(one) == record_of(two)
    forth, back = difference(one, two), first_difference(record_of(two), record_of(one), 1, 0)
    assert (forth is None) == (back is None)
    assert is_equal == (forth is None)


def test_every_change_of_every_record_is_named():
    for path, changed in CHANGES:
        words = difference(FULL_MESSAGE, changed)
        assert words is not None, path


@pytest.mark.parametrize(
    ("own", "words"),
    [
        ((), ""),
        ((Abort(3),), ""),
        (EVENTS, ""),
        (with_request(stream=5).events, ""),
        (with_request(priority=2).events, "priority of request 7 is 0 on rank 0, 2 on rank 3; make the same calls"),
        (with_request(prompt_token_ids=(0, 2)).events, "prompt_token_ids[1] of request 7 is 1 on rank 0, 2 on rank 3;"),
        (with_request(request_id=8).events, "request 8 was added on rank 3, not on rank 0; make the same calls"),
    ],
)
def test_other_requests_of_a_rank_are_named(own: tuple[Event, ...], words: str):
    expected = pytest.raises(RanksDisagreeError, match=re.escape(f"ranks were given different requests: {words}"))
    with expected if words else nullcontext():
        check_requests(EVENTS, own, 3)
