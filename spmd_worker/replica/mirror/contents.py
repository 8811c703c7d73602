"""Contents of memory, as a mirror follows them from plans: whose state each slot has, and after how many tokens.

A mirror does not know what is free: contents stay until they are overwritten, and nobody but a row with the same tokens
can read them.
"""

import struct
from collections.abc import Sequence
from typing import Final, NamedTuple

from kv_cache.state_ops import StateOps
from spmd_worker.replica.mirror.records import Computed, Inputs, MirroredSequence, inputs_of, pack_tokens
from spmd_worker.replica.sequence.input_rows import NUM_DIGEST_BYTES
from spmd_worker.replica.sequence.request import Request
from spmd_worker.replica.sequence.sampled import NOT_READ


class Contents(NamedTuple):
    """Something computed from the first `num_tokens` tokens of a sequence, and from the drafts that followed them."""

    computed: Computed
    num_tokens: int
    draft_token_ids: tuple[int, ...] = ()

    def __str__(self) -> str:
        request_id, sample_index = self.computed.key
        return f"{self.num_tokens} tokens of request {request_id}, sample {sample_index}"


def contents_of(sequence: MirroredSequence) -> Contents:
    """A sequence's contents after the last plan that listed it."""
    num_tokens = sequence.num_computed_tokens + sequence.num_scheduled_tokens
    return Contents(sequence.computed, num_tokens, sequence.draft_token_ids)


def begins_alike(computed: Computed, request: Request, output_token_ids: Sequence[int], num_tokens: int) -> bool:
    """True if the first `num_tokens` tokens of a request with these outputs, and all else that is computed from, are
    those of `computed`. Ids that are not read yet are not compared, nor is what has no tokens any more.
    """
    record, ids = computed.record, request.prompt_token_ids
    held_ids: Sequence[int]
    if record is not None:
        inputs, held_ids, held_outputs = (
            inputs_of(record.request),
            record.request.prompt_token_ids,
            record.output_token_ids,
        )
        num_common = min(num_tokens, len(ids), len(held_ids))
        are_alike = ids is held_ids or ids[:num_common] == held_ids[:num_common]
        if are_alike and num_common < num_tokens:
            held_rest = [*held_ids[num_common:], *held_outputs, *record.draft_token_ids][: num_tokens - num_common]
            rest = [*ids[num_common:], *output_token_ids][: num_tokens - num_common]
            are_alike = _are_equal(rest, held_rest)
    elif computed.tokens is None:
        return True
    else:
        inputs = computed.inputs
        own, tokens = (*ids, *output_token_ids)[:num_tokens], computed.tokens[: 8 * num_tokens]
        are_alike = pack_tokens(own) == tokens or _are_equal(own, struct.unpack(f"<{len(tokens) // 8}q", tokens))
    return are_alike and _first(inputs_of(request), num_tokens) == _first(inputs, num_tokens)


def _are_equal(ids: Sequence[int], others: Sequence[int]) -> bool:
    if ids == others:
        return True
    return len(ids) == len(others) and all(a == b or NOT_READ in (a, b) for a, b in zip(ids, others))


def _first(inputs: Inputs, num_tokens: int) -> tuple[int, int, list[tuple[bytes, int, int]]]:
    """Those of the first tokens: names of rows and images are with their positions there. Rows that have a name each
    have those of the first.
    """
    adapter, rope_regime, rows, media = inputs
    named = [each for each in rows if each.start < num_tokens]
    given = [(each.content[: NUM_DIGEST_BYTES * (num_tokens - each.start)], each.start, each.end) for each in named]
    given += [(item.media_id, start, start + count) for item in media for start, count in item.runs]
    return (
        adapter,
        rope_regime,
        [(name, start, min(end, num_tokens)) for name, start, end in given if start < num_tokens],
    )


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
        """Contents of a slot. None: nobody has filled it."""
        owner = self.owners[slot]
        return self._copies[slot] if owner is None else contents_of(owner)

    def moved(self, operations: StateOps) -> Moved:
        """Contents that the moves write. A copy has nothing of drafts: no row lags behind the position of a copy."""
        host: dict[int, Contents | None] = {to: self.held(slot) for slot, to in operations.swap_out}
        device: dict[int, Contents | None] = {
            to: host[slot] if slot in host else self._host.get(slot) for slot, to in operations.swap_in
        }
        for slot, to in operations.copy:
            held = self.held(slot)
            device[to] = None if held is None else held._replace(draft_token_ids=())
        return Moved(device, host)

    def move(self, operations: StateOps, moved: Moved) -> None:
        """A slot that receives something is not its former owner's any more."""
        self._host.update(moved.host)
        for source, _ in operations.swap_in:
            self._host.pop(source, None)
        for slot, contents in moved.device.items():
            self.give(slot, None)
            self._copies[slot] = contents

    def give(self, slot: int, sequence: MirroredSequence | None) -> None:
        """Give a slot to a sequence, or to nobody: nothing can be found in it then."""
        former = self.owners[slot]
        if former is not None:
            former.state_slot = -1
        self.owners[slot], self._copies[slot] = sequence, None
