"""What memory holds, as a mirror follows it from plans: in each slot, the state after how many tokens of whom.

A mirror does not know what is free: contents stay until they are overwritten, and nobody but a row with the same tokens
can read them.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

from kv_cache.state_ops import StateOps
from spmd_worker.replica.mirror.records import MirroredSequence
from spmd_worker.replica.sequence.request import Request
from spmd_worker.replica.sequence.sampled import NOT_READ


class Contents(NamedTuple):
    """What was computed of the first `num_tokens` tokens of a sequence, and of the drafts that followed them."""

    sequence: MirroredSequence
    num_tokens: int
    draft_token_ids: tuple[int, ...] = ()

    def __str__(self) -> str:
        request_id, sample_index = self.sequence.key
        return f"{self.num_tokens} tokens of request {request_id}, sample {sample_index}"


def contents_of(sequence: MirroredSequence) -> Contents:
    """What a sequence has after the last plan that listed it."""
    num_tokens = sequence.num_computed_tokens + sequence.num_scheduled_tokens
    return Contents(sequence, num_tokens, sequence.draft_token_ids)


def begins_alike(held: MirroredSequence, request: Request, output_token_ids: Sequence[int], num_tokens: int) -> bool:
    """Whether the first `num_tokens` tokens of a request with these outputs, and all that is computed from them, are
    those of `held`, whose ids that are not read yet are not compared.
    """
    other, ids, held_ids = held.request, request.prompt_token_ids, held.request.prompt_token_ids
    if (request.adapter, request.rope_regime) != (other.adapter, other.rope_regime):
        return False
    num_common = min(num_tokens, len(ids), len(held_ids))
    if ids is not held_ids and ids[:num_common] != held_ids[:num_common]:
        return False
    if num_common < num_tokens:
        rest = [*ids[num_common:], *output_token_ids][: num_tokens - num_common]
        held_rest = [*held_ids[num_common:], *held.output_token_ids, *held.draft_token_ids][: num_tokens - num_common]
        pairs = zip(rest, held_rest)
        if len(rest) != len(held_rest) or any(a != b and NOT_READ not in (a, b) for a, b in pairs):
            return False
    return request is other or _given(request, num_tokens) == _given(other, num_tokens)


def _given(request: Request, num_tokens: int) -> list[tuple[bytes, int, int]]:
    """Names of the rows and images among the first tokens, with their positions there."""
    given = [(each.content, each.start, each.end) for each in request.rows]
    given += [(item.media_id, start, start + count) for item in request.media for start, count in item.runs]
    return [(name, start, min(end, num_tokens)) for name, start, end in given if start < num_tokens]


class Moved(NamedTuple):
    """Contents of the slots that a step's moves write, on the device and on the host. None: nobody has filled it."""

    device: dict[int, Contents | None]
    host: dict[int, Contents | None]


NOTHING_MOVED: Final = Moved({}, {})


class MirroredSlots:
    """Slots of recurrent states: the sequence that was given each last, and what those hold that nobody owns."""

    def __init__(self, num_slots: int) -> None:
        self.owners: list[MirroredSequence | None] = [None] * num_slots
        self._copies: list[Contents | None] = [None] * num_slots
        self._host: dict[int, Contents | None] = {}

    def held(self, slot: int) -> Contents | None:
        """What a slot holds. None: nobody has filled it."""
        owner = self.owners[slot]
        return self._copies[slot] if owner is None else contents_of(owner)

    def moved(self, operations: StateOps) -> Moved:
        """What the moves write. A copy has nothing of drafts: no row lags behind the position of a copy."""
        host = {to: self.held(slot) for slot, to in operations.swap_out}
        device = {to: host[slot] if slot in host else self._host.get(slot) for slot, to in operations.swap_in}
        for slot, to in operations.copy:
            held = self.held(slot)
            device[to] = None if held is None else held._replace(draft_token_ids=())
        return Moved(device, host)

    def move(self, operations: StateOps, moved: Moved) -> None:
        """A slot that receives something is not its former owner's any more."""
        self._host.update(moved.host)
        for slot, _ in operations.swap_in:
            self._host.pop(slot, None)
        for slot, contents in moved.device.items():
            self.give(slot, None)
            self._copies[slot] = contents

    def give(self, slot: int, sequence: MirroredSequence | None) -> None:
        """Give a slot to a sequence, or to nobody: nothing can be found in it then."""
        former = self.owners[slot]
        if former is not None:
            former.state_slot = -1
        self.owners[slot], self._copies[slot] = sequence, None
