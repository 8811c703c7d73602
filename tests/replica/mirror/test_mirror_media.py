"""Rows of images in the mirror: a plan that reads rows that are not there, or makes some twice, changes nothing."""

from dataclasses import replace

import pytest
from mirror_state import mirror_state

from spmd_worker.replica.mirror.mirror import Mirror, MirrorError
from spmd_worker.replica.sequence.media_items import EncodeMedia, MediaItem
from spmd_worker.replica.sequence.metadata import (
    SequenceData,
    SequenceDataDelta,
    SequenceGroupMetadata,
    SequenceGroupMetadataDelta,
)
from spmd_worker.replica.sequence.request import Request
from spmd_worker.replica.sequence.sampling_params import SamplingParams
from spmd_worker.replica.sequence.sequence import SequenceKey
from spmd_worker.replica.sequence.step import StepPlan

FIRST, SECOND, THIRD = (bytes([number]) * 16 for number in range(3))
# Tokens 1 to 3 and 5 to 6 take the first's rows, 8 to 9 the second's.
ITEMS = (MediaItem(FIRST, ((1, 3), (5, 2)), 20), MediaItem(SECOND, ((8, 2),), 8))
REQUEST = Request(1, (0, 7, 7, 7, 0, 7, 7, 0, 7, 7), SamplingParams(), 0, media=ITEMS)
ENCODES = (EncodeMedia(1, 0, 0), EncodeMedia(1, 1, 0))


def chunk(step: int, first: int, count: int, **fields: object) -> StepPlan:
    data = SequenceDataDelta(0, (), 3, (), first, count, int(first + count == 10))
    return StepPlan(step, (SequenceGroupMetadataDelta(1, (data,)),), num_tokens=count, **fields)


def beginning(count: int = 4, **fields: object) -> StepPlan:
    data = SequenceData(0, (), (0, 1, 2), 0, count, int(count == 10))
    return StepPlan(1, (SequenceGroupMetadata(REQUEST, (data,)),), num_tokens=count, **fields)


def begun() -> Mirror:
    mirror = Mirror(16, 4)
    mirror.apply(beginning(encode=ENCODES[:1]))
    return mirror


def test_rows_are_kept_until_a_plan_drops_them():
    mirror = begun()
    mirror.apply(chunk(2, 4, 4))
    assert list(mirror.media_rows) == [FIRST]
    mirror.apply(chunk(3, 8, 2, encode=ENCODES[1:], drop_rows=(FIRST,)))
    assert list(mirror.media_rows) == [SECOND]
    assert mirror.request(1) is REQUEST
    # A step that decodes alone drops too.
    mirror.apply(StepPlan(4, continuing=(SequenceKey(1, 0),), continuing_token_ids=(5,), num_tokens=1))
    decode = StepPlan(5, continuing=(SequenceKey(1, 0),), continuing_token_ids=(5,), num_tokens=1)
    mirror.apply(replace(decode, drop_rows=(SECOND,)))
    assert not mirror.media_rows


def test_plain_tokens_between_runs_read_no_rows():
    mirror = Mirror(16, 4)
    mirror.apply(beginning(1))
    mirror.apply(chunk(2, 1, 3, encode=ENCODES[:1]))
    mirror.apply(chunk(3, 4, 1, drop_rows=(FIRST,)))
    with pytest.raises(MirrorError, match="to read rows that are kept"):
        mirror.apply(chunk(4, 5, 1))


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (chunk(2, 4, 4, drop_rows=(FIRST,)), "request 1: field encode is without image 0000"),
        (chunk(2, 4, 6), "without image 0101"),
        (chunk(2, 4, 4, encode=ENCODES[:1]), "an image whose rows are not kept yet"),
        (chunk(2, 4, 6, encode=ENCODES[1:] * 2), "an image whose rows are not kept yet"),
        (chunk(2, 4, 4, drop_rows=(THIRD,)), "field drop_rows is 0202"),
        (chunk(2, 4, 4, drop_rows=(FIRST, FIRST)), "field drop_rows is 0000"),
        (chunk(2, 4, 4, encode=(EncodeMedia(1, 2, 0),)), "an image of a request that it holds"),
        (chunk(2, 4, 4, encode=(EncodeMedia(2, 0, 0),)), "an image of a request that it holds"),
        (chunk(2, 4, 6, encode=(EncodeMedia(1, 1, -1),)), "a rank from 0 on"),
    ],
)
def test_wrong_rows_change_nothing(plan: StepPlan, words: str):
    mirror = begun()
    before = mirror_state(mirror)
    with pytest.raises(MirrorError, match=words):
        mirror.apply(plan)
    assert (mirror_state(mirror), list(mirror.media_rows)) == (before, [FIRST])
    mirror.apply(chunk(2, 4, 4))


def test_token_computed_again_reads_its_row():
    """A sequence that sampled without getting an id, whose last token is an image's."""
    mirror = begun()
    mirror.apply(chunk(2, 4, 6, encode=ENCODES[1:]))
    again = StepPlan(3, continuing=(SequenceKey(1, 0),), continuing_num_ids=(0,), num_tokens=1)
    with pytest.raises(MirrorError, match="without image 0101"):
        mirror.apply(replace(again, drop_rows=(SECOND,)))
    mirror.apply(again)
