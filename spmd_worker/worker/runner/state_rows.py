"""Rows of a step as layers with recurrent states take them, built on the host.

    a row that lags by 2, with a given token and 2 drafts, in slot 3, if rows have 4 drafts at most

    tokens of the recurrences   saved 12   saved 13   given   draft   draft
    written to the slot          ------- these: kept 3 ------                the drafts are saved as 12 and 13

T: tokens of the step; S: sequences; L: tokens that rows lag by; D: drafts.
"""

from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from spmd_worker.ops.attention.draft_replay import DraftReplay
from spmd_worker.ops.kernels.host_copies import send, to_device
from spmd_worker.ops.kernels.recurrent import StateSegments
from spmd_worker.replica.mirror.mirror import MirroredSequence, ScheduledSequence

_Integers = NDArray[np.int64]

_NUM_SCHEDULED: Final = attrgetter("num_scheduled_tokens")
_NUM_COMPUTED: Final = attrgetter("sequence.num_computed_tokens")
_NUM_LAGGING: Final = attrgetter("sequence.num_lagging_tokens")
_DRAFTS: Final = attrgetter("sequence.draft_token_ids")


def state_slots(sequences: Iterable[MirroredSequence]) -> _Integers:
    """Slot of each sequence's recurrent states, int64 [S]."""
    slots = np.array([sequence.state_slot for sequence in sequences], dtype=np.int64)
    assert slots.min(initial=0) >= 0, "a row has no slot for its states, and the model has states"
    return slots


def state_segments(
    sequences: Sequence[MirroredSequence], starts: Sequence[int], firsts: Sequence[int], device: torch.device
) -> StateSegments:
    """The step's own tokens: each sequence's from a row of `starts` [S + 1] on, the first at a position of `firsts`."""
    arrays = (state_slots(sequences), np.array(starts), np.array(firsts))
    return StateSegments(*[to_device(torch.from_numpy(each.astype(np.int32)), device) for each in arrays])


def draft_replay(scheduled: Sequence[ScheduledSequence], most_drafts: int, device: torch.device) -> DraftReplay | None:
    """`AttentionMetadata.replay` of a step, if layers save the inputs of `most_drafts` drafts of a row; 0: of none."""
    if not most_drafts or not (any(map(_NUM_LAGGING, scheduled)) or any(map(_DRAFTS, scheduled))):
        return None
    slots = state_slots(each.sequence for each in scheduled)
    counts, firsts, lags = (column(getter, scheduled) for getter in (_NUM_SCHEDULED, _NUM_COMPUTED, _NUM_LAGGING))
    nums_drafts = column(len, list(map(_DRAFTS, scheduled)))
    assert max(lags.max(), nums_drafts.max()) <= most_drafts, (lags, nums_drafts, most_drafts)
    assert (nums_drafts < counts).all(), "a row computes a given token before its drafts"
    # Behind each row's last token, in the step and among the tokens of the recurrences.
    ends, extended_ends = counts.cumsum(), (lags + counts).cumsum()
    own_starts, places = extended_ends - counts, slots * most_drafts
    rows = (
        _ranges(own_starts, counts),
        _ranges(own_starts - lags, lags),
        _ranges(places, lags),
        _ranges(ends - nums_drafts, nums_drafts),
        _ranges(places, nums_drafts),
    )
    segments = (slots, np.append(0, extended_ends), firsts - lags, lags + counts - nums_drafts)
    sent = send([*[each.astype(np.int32) for each in segments], *rows], device)
    return DraftReplay(StateSegments(*sent[:4]), *sent[4:])


def column(getter: Callable[[Any], int], values: Sequence[object]) -> _Integers:
    """Numbers of the values, int64 [len(values)]."""
    return np.fromiter(map(getter, values), np.int64, len(values))


def _ranges(firsts: _Integers, counts: _Integers) -> _Integers:
    """Consecutive numbers, `counts` of them from each of `firsts`, one range behind the other."""
    ends = counts.cumsum()
    numbers: _Integers = np.arange(counts.sum()) + (firsts - ends + counts).repeat(counts)
    return numbers
