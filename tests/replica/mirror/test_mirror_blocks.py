"""The mirror's blocks: a plan whose rows read keys and values that are not theirs is refused, before anything changed.

Each plan here differs from one that is accepted by what it leaves out, or by a block.
"""

import dataclasses

import pytest
from mirror_state import mirror_state

from kv_cache.block_ops import BlockOps
from kv_cache.layer_groups import LayerGroups
from spmd_worker.replica.mirror.block_check import MirroredBlocks
from spmd_worker.replica.mirror.mirror import Mirror, MirrorError
from spmd_worker.replica.sequence.input_rows import EMBEDDINGS, KEYS_VALUES, InputRows
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

NUM_BLOCKS, BLOCK_SIZE = 16, 4
PROMPTS = {1: (5, 6, 7, 8, 9, 10), 2: (5, 6, 7, 8, 4, 3), 3: (5, 6, 7, 8, 9, 10), 4: (1, 6, 7, 8, 9, 10)}
FIRST, SECOND = SequenceKey(1, 0), SequenceKey(2, 0)


def sent(
    request_id: int, blocks: tuple[int, ...], outputs: tuple[int, ...] = (), num_computed: int = 0
) -> SequenceGroupMetadata:
    """A row that is sent completely, and computes all that is left of it."""
    request = Request(request_id, PROMPTS[request_id], SamplingParams(n=2), 0)
    num_tokens = len(request.prompt_token_ids) + len(outputs) - num_computed
    return SequenceGroupMetadata(request, (SequenceData(0, outputs, blocks, num_computed, num_tokens, 1),))


def with_rows(sent_row: SequenceGroupMetadata, names: bytes, num_rows: int, kind: str) -> SequenceGroupMetadata:
    """The first `num_rows` positions are given: `names` are one letter for all of them, or one for each."""
    rows = InputRows(b"".join([bytes([name]) * 16 for name in names]), 0, num_rows, kind)
    return dataclasses.replace(sent_row, request=dataclasses.replace(sent_row.request, rows=(rows,)))


def told(request_id: int, kept: int, blocks: tuple[int, ...], first: int, token_id: int = 11, sample_index: int = 0):
    """A row's next token, in a delta."""
    data = SequenceDataDelta(sample_index, (token_id,), kept, blocks, first, 1, 1)
    return SequenceGroupMetadataDelta(request_id, (data,))


def plan(step: int, *groups, **fields) -> StepPlan:
    num_tokens = sum(data.num_scheduled_tokens for group in groups for data in group.sequences)
    return StepPlan(step, groups, **{"num_tokens": num_tokens, **fields})


def decoding(step: int, *keys: SequenceKey, **fields: object) -> StepPlan:
    ids = (11,) * len(keys)
    return StepPlan(step, num_tokens=len(keys), continuing=keys, continuing_token_ids=ids, **fields)


def at_work(*plans: StepPlan) -> Mirror:
    """Requests 1 and 2, whose prompts begin with the same block, have computed these in blocks of their own."""
    mirror = Mirror(NUM_BLOCKS, BLOCK_SIZE)
    for each in (plan(1, sent(1, (0, 1)), sent(2, (2, 3))), *plans):
        mirror.apply(each)
    return mirror


def out(step: int = 2) -> StepPlan:
    """Request 2 is swapped out, and request 1 goes on."""
    return decoding(step, FIRST, block_ops=BlockOps(swap_out=((2, 0), (3, 1))))


BACK = told(2, 0, (4, 5), 6)
IN = BlockOps(swap_in=((0, 4), (1, 5)))
FORK = told(1, 0, (0, 4), 6, sample_index=1)
ENDED = StepPlan(2, finished_request_ids=(1,))
GIVEN = plan(2, with_rows(sent(3, (4, 5), (), 4), b"a", 4, KEYS_VALUES))
SWAPPED = StepPlan(3, block_ops=BlockOps(swap_out=((4, 0), (5, 1))))
ROWS = plan(2, with_rows(sent(3, (4, 5)), b"abcdef", 6, EMBEDDINGS))

ACCEPTED: dict[str, tuple[list[StepPlan], StepPlan]] = {
    "swapped in": ([out()], plan(3, BACK, block_ops=IN)),
    "swapped in, in one step": ([], plan(2, BACK, block_ops=dataclasses.replace(IN, swap_out=((2, 0), (3, 1))))),
    "swapped in, a block is another row's": ([out()], plan(3, told(2, 0, (0, 5), 6), block_ops=BlockOps(((1, 5),)))),
    "a fork with a copy": ([], plan(2, FORK, block_ops=BlockOps(copy=((1, 4),)))),
    "a fork that keeps the last block": (
        [],
        plan(
            2,
            SequenceGroupMetadataDelta(1, (*told(1, 1, (4,), 6).sequences, *told(1, 0, (0, 1), 6, 12, 1).sequences)),
            block_ops=BlockOps(copy=((1, 4),)),
        ),
    ),
    "a prefix": ([], plan(2, sent(3, (0, 4), num_computed=4))),
    "a prefix of an ended row": ([ENDED], plan(3, sent(3, (0, 4), num_computed=4))),
    "a prefix of the step": ([], plan(2, sent(4, (5, 6)), sent(3, (0, 4), num_computed=4))),
    "a prefix from outside": (
        [StepPlan(2, block_ops=BlockOps(load=((0, 4),), transfer=1))],
        plan(3, sent(3, (4, 5), num_computed=4)),
    ),
    "recomputed": ([], plan(2, sent(2, (4, 5), (11,)))),
    "given keys, swapped in": (
        [GIVEN, SWAPPED],
        plan(4, told(3, 0, (6, 7), 6), block_ops=BlockOps(swap_in=((0, 6), (1, 7)))),
    ),
    "given keys, again in blocks that have them": (
        [GIVEN],
        plan(3, with_rows(sent(1, (4, 6), (), 4), b"a", 4, KEYS_VALUES)),
    ),
    "rows of which the first are alike": (
        [ROWS],
        plan(3, with_rows(sent(1, (4, 6), (), 4), b"abcdxy", 6, EMBEDDINGS)),
    ),
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_row_reads_what_was_computed_or_moved(name: str):
    before, last = ACCEPTED[name]
    at_work(*before).apply(last)


REJECTED: dict[str, tuple[list[StepPlan], StepPlan, str]] = {
    "a swap-in left out": (
        [out()],
        plan(3, BACK, block_ops=BlockOps(swap_in=((0, 4),))),
        "step 3, request 2, sample 0: field block_ids is 5, which nobody has filled, .* its tokens 4 to 5 there",
    ),
    "all swap-ins left out": (
        [out()],
        plan(3, BACK),
        "step 3, request 2, sample 0: field block_ids is 4, which nobody has filled, .* its tokens 0 to 3 there",
    ),
    "swap-ins of two blocks swapped": (
        [out()],
        plan(3, BACK, block_ops=BlockOps(swap_in=((1, 4), (0, 5)))),
        "request 2, sample 0: field block_ids is 4, with tokens of request 2, sample 0, .* tokens 0 to 3 there",
    ),
    "another row's blocks swapped in": (
        [plan(2, block_ops=BlockOps(swap_out=((2, 0), (3, 1), (0, 2), (1, 3))))],
        plan(3, BACK, block_ops=BlockOps(swap_in=((2, 4), (3, 5)))),
        "request 2, sample 0: field block_ids is 5, with tokens of request 1, sample 0, .* tokens 4 to 5 there",
    ),
    "a swap-out left out": (
        [decoding(2, FIRST)],
        plan(3, BACK, block_ops=IN),
        "request 2, sample 0: field block_ids is 4, which nobody has filled",
    ),
    "old blocks, which others write": (
        [plan(2, sent(3, (2, 3)))],
        decoding(3, SECOND),
        "step 3, request 2, sample 0: field block_ids is others' by now, .* a new table",
    ),
    "old blocks in a delta, which others write": (
        [plan(2, sent(3, (2, 3)))],
        plan(3, told(2, 2, (), 6)),
        "step 3, request 2, sample 0: field block_ids is others' by now, .* a new table",
    ),
    "a block of a row of the step given away": (
        [],
        dataclasses.replace(plan(2, sent(3, (4, 1))), continuing=(FIRST,), continuing_token_ids=(11,), num_tokens=7),
        "request 1, sample 0: field block_ids is block 1 to request 3, sample 0, .* no block that this row reads",
    ),
    "a block given away while rows decode": (
        [decoding(2, FIRST, SECOND), decoding(3, FIRST, SECOND)],
        decoding(4, FIRST, SECOND, continuing_blocks=((0, 2), (1, 5))),
        "request 2, sample 0: field block_ids is block 2 to request 1, sample 0",
    ),
    "a block given to two rows": ([], plan(2, sent(3, (4, 5)), sent(4, (5, 6))), "block given to two rows"),
    "a fork without a copy": (
        [],
        plan(2, FORK),
        "step 2, request 1, sample 1: field block_ids is 4, which nobody has filled, .* its tokens 4 to 5 there",
    ),
    "a row whose last block is not copied": (
        [],
        plan(2, told(1, 1, (4,), 6)),
        "request 1, sample 0: field block_ids is 4, which nobody has filled",
    ),
    "a prefix of other tokens": (
        [],
        plan(2, sent(4, (0, 4), num_computed=4)),
        "request 4, sample 0: field block_ids is 0, with tokens of request 1, sample 0, .* its tokens 0 to 3 there",
    ),
    "a prefix of another adapter": (
        [],
        plan(
            2,
            dataclasses.replace(
                sent(3, (0, 4), num_computed=4), request=Request(3, PROMPTS[3], SamplingParams(), 0, 7)
            ),
        ),
        "request 3, sample 0: field block_ids is 0, with tokens of request 1",
    ),
    "a prefix at another place": ([], plan(2, sent(3, (1, 4), num_computed=4)), "block_ids is 1, with tokens of"),
    "a prefix that is longer": ([], plan(2, sent(3, (0, 1), (11, 12), 7)), "block_ids is 1, with tokens of request 1"),
    "a prefix of an ended row, overwritten": (
        [ENDED, plan(3, sent(4, (0, 1)))],
        plan(4, sent(3, (0, 4), num_computed=4)),
        "step 4, request 3, sample 0: field block_ids is 0, with tokens of request 4, sample 0",
    ),
    "given keys, not swapped in": (
        [GIVEN, SWAPPED],
        plan(4, told(3, 0, (6, 7), 6), block_ops=BlockOps(swap_in=((1, 7),))),
        "request 3, sample 0: field block_ids is 6, which nobody has filled",
    ),
    "a prefix of other rows": (
        [ROWS],
        plan(3, with_rows(sent(1, (4, 6), (), 4), b"abcxef", 6, EMBEDDINGS)),
        "request 1, sample 0: field block_ids is 4, with tokens of request 3",
    ),
    "a prefix that the step overwrites": (
        [ENDED],
        plan(3, sent(3, (0, 4), num_computed=4), sent(4, (0, 5))),
        "step 3, request 3, sample 0: field block_ids is 0, with tokens of request 4, sample 0",
    ),
}


@pytest.mark.parametrize("name", REJECTED)
def test_wrong_block_is_rejected_and_changes_nothing(name: str):
    before, last, match = REJECTED[name]
    mirror = at_work(*before)
    state = mirror_state(mirror)
    with pytest.raises(MirrorError, match=match):
        mirror.apply(last)
    assert mirror_state(mirror) == state


@pytest.mark.parametrize("name", ["all swap-ins left out", "a prefix of other tokens", "a fork without a copy"])
def test_wrong_block_passes_without_check(name: str, monkeypatch: pytest.MonkeyPatch):
    """Negative control: no other rule sees it."""
    monkeypatch.setattr(MirroredBlocks, "_check_reads", lambda *args: None)
    before, last, _ = REJECTED[name]
    at_work(*before).apply(last)


def test_blocks_behind_window_are_not_read():
    """A table's entries that are left over may name any block."""
    mirror = Mirror(NUM_BLOCKS, BLOCK_SIZE, groups=LayerGroups(1, 1, (2,), 8))
    mirror.apply(plan(1, sent(1, (1, 2, 3, 4))))
    row = sent(3, (1, 0, 3, 4, 5, 6), (11, 12, 13), 6)
    moves = BlockOps(swap_out=((1, 0), (3, 1), (4, 2)), swap_in=((0, 7), (1, 8), (2, 9)))
    back = dataclasses.replace(row.sequences[0], block_ids=(7, 0, 8, 9, 5, 6))
    mirror.apply(plan(2, dataclasses.replace(row, sequences=(back,)), block_ops=moves))
    wrong = dataclasses.replace(row.sequences[0], block_ids=(7, 0, 8, 0, 10, 11))
    with pytest.raises(MirrorError, match="block_ids is 0, which nobody has filled"):
        mirror.apply(plan(3, dataclasses.replace(row, sequences=(wrong,))))


def test_window_ends_behind_accepted_drafts():
    """The blocks before it may be given away in the plan that says so."""
    mirror = Mirror(NUM_BLOCKS, BLOCK_SIZE, groups=LayerGroups(1, 1, (2,), 8), most_drafts=8)
    mirror.apply(plan(1, sent(1, (1, 2, 3, 4))))
    drafts = SequenceDataDelta(0, (20,), 4, (5, 6), 6, 6, 1, draft_token_ids=(21, 22, 23, 24, 25))
    mirror.apply(plan(2, SequenceGroupMetadataDelta(1, (drafts,))))
    accepted = SequenceDataDelta(0, (21, 22, 23, 24, 25, 26), 6, (7, 8), 12, 1, 1)
    mirror.apply(plan(3, SequenceGroupMetadataDelta(1, (accepted,)), sent(2, (10, 4, 11, 12))))
    # Groups with all tokens are read from the first on.
    with pytest.raises(MirrorError, match="request 1, sample 0: field block_ids is block 3 to request 4, sample 0"):
        mirror.apply(plan(4, told(1, 8, (), 13, 27), sent(4, (13, 14, 3, 15))))


def test_tokens_of_ended_rows_are_kept_within_limit():
    """Twice as many as the cache holds; contents of those before are not compared."""
    mirror = Mirror(2, BLOCK_SIZE)
    for number in range(9):
        request = Request(number, (number, 1, 2, 3, 4, 5), SamplingParams(), 0)
        row = SequenceGroupMetadata(request, (SequenceData(0, (), (0, 1), 0, 6, 1),))
        mirror.apply(plan(number + 1, row, finished_request_ids=(number - 1,) if number else ()))
    kept = mirror._blocks._ended
    assert [each.key.request_id for each in kept] == [6, 7]
    assert not any(each.tokens is None for each in kept)


def rows_request(request_id: int, kind: str, content: bytes) -> Request:
    rows = (InputRows(content, 0, 6, kind),)
    return Request(request_id, (0,) * 6 + (7, 8), SamplingParams(), 0, rows=rows)


def test_given_keys_are_written_once():
    """A row's first step begins behind them; who has the same ones may find them."""
    mirror, content = Mirror(NUM_BLOCKS, BLOCK_SIZE), b"k" * 16
    for step, each in ((1, {1: (0, 1), 4: (0, 6)}), (2, {2: (0, 2)})):
        data = {request_id: SequenceData(0, (), blocks, 6, 2, 1) for request_id, blocks in each.items()}
        requests = {request_id: rows_request(request_id, KEYS_VALUES, content) for request_id in each}
        mirror.apply(plan(step, *[SequenceGroupMetadata(requests[number], (data[number],)) for number in each]))
    mirror.apply(decoding(3, FIRST, SECOND, continuing_blocks=((0, 3), (1, 4))))
    other = SequenceGroupMetadata(rows_request(3, KEYS_VALUES, b"o" * 16), (SequenceData(0, (), (0, 5), 6, 2, 1),))
    also = {"continuing": (FIRST,), "continuing_token_ids": (12,), "num_tokens": 3}
    with pytest.raises(MirrorError, match="request 1, sample 0: field block_ids is block 0 to request 3"):
        mirror.apply(plan(4, other, **also))


def test_prefix_of_rows_is_that_of_their_digests():
    """Rows with a digest each share blocks as far as these are equal."""
    mirror, digests = Mirror(NUM_BLOCKS, BLOCK_SIZE), [bytes((number,)) * 16 for number in range(7)]
    whole, alike, other = b"".join(digests[:6]), b"".join(digests[:5] + digests[6:]), b"".join(digests[1:])
    mirror.apply(
        plan(1, SequenceGroupMetadata(rows_request(1, EMBEDDINGS, whole), (SequenceData(0, (), (0, 1), 0, 8, 1),)))
    )
    found = (SequenceData(0, (), (0, 2), 4, 4, 1),)
    mirror.apply(plan(2, SequenceGroupMetadata(rows_request(2, EMBEDDINGS, alike), found)))
    with pytest.raises(MirrorError, match="request 3, sample 0: field block_ids is 0, with tokens of request 1"):
        mirror.apply(plan(3, SequenceGroupMetadata(rows_request(3, EMBEDDINGS, other), found)))
