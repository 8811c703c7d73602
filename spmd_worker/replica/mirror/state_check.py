"""Checks a plan's slots of recurrent states against a mirror: each row keeps its own, no other row's is written, and a
row that is given one finds the state of its tokens there.

A slot has the tokens that its row's last step was given, and the inputs of that step's drafts: the row goes on after
these tokens, or after those of the drafts that have become its ids.
"""

from collections.abc import Iterable, Sequence

from spmd_worker.replica.mirror.contents import NOTHING_MOVED, MirroredSlots, Moved, begins_alike
from spmd_worker.replica.mirror.records import MirroredSequence, PlannedRow, reject
from spmd_worker.replica.sequence.metadata import SequenceData, SequenceDataDelta
from spmd_worker.replica.sequence.sampled import num_equal
from spmd_worker.replica.sequence.step import StepPlan


class StateCheck:
    """One check of one plan, whose rows `PlanCheck` has accepted. There are no `slots` in a model without recurrent
    states. A row has at most `most_drafts` drafts.

    A mirror does not know which sequences are preempted. So a slot may be given to another sequence at any time, and
    who had it may be scheduled again only with a slot of its own.
    """

    def __init__(self, plan: StepPlan, rows: Sequence[PlannedRow], slots: MirroredSlots, most_drafts: int = 0) -> None:
        self._plan, self._rows, self._slots, self._most_drafts = plan, rows, slots, most_drafts

    def check(self, continuing: Sequence[MirroredSequence]) -> Moved:
        """Return what the step's moves write. Raises MirrorError, before anything has changed, for a slot that does not
        exist, is not the row's, or does not hold the state that the row goes on from.
        """
        if not self._slots.owners:
            self._check_stateless()
            return NOTHING_MOVED
        if self._plan.continuing_num_ids and 0 in self._plan.continuing_num_ids:
            reject(self._plan, "continuing_num_ids", 0, "1 or more: a state has the last token already")
        known, given = list(continuing), dict[int, None]()
        for row in self._rows:
            sequence, data = row.sequence, row.data
            if len(data.draft_token_ids) > self._most_drafts:
                rule = f"at most {self._most_drafts}, which a slot has room for"
                reject(self._plan, "draft_token_ids", f"{len(data.draft_token_ids)} drafts", rule, *sequence.key)
            if row.is_new:
                self._check_slots("state_slot", (data.state_slot,), *sequence.key)
                if data.state_slot in given:
                    reject(self._plan, "state_slot", data.state_slot, "each slot given once", *sequence.key)
                given[data.state_slot] = None
            else:
                self._check_known(sequence, data)
                known.append(sequence)
        for sequence in known:
            if sequence.state_slot < 0:
                reject(
                    self._plan, "state_slot", "another sequence's by now", "a new slot, in a snapshot", *sequence.key
                )
            if sequence.state_slot in given:
                reject(
                    self._plan,
                    "state_slot",
                    sequence.state_slot,
                    "one that no other row of the step has",
                    *sequence.key,
                )
        moved = self.check_state_ops(known)
        for row in self._rows:
            if row.is_new:
                self._check_contents(row, moved)
        return moved

    def check_state_ops(self, known: Iterable[MirroredSequence]) -> Moved:
        """Return what the moves write. Their device slots exist and hold something, and each receives once, but none of
        the rows `known`, which keep what they have. The mirror does not know the number of host slots.
        """
        operations = self._plan.state_ops
        if operations.is_empty:
            return NOTHING_MOVED
        received = [slot for _, slot in (*operations.swap_in, *operations.copy)]
        self._check_slots("state_ops", [*received, *[slot for slot, _ in (*operations.swap_out, *operations.copy)]])
        for kind, slots in (("device", received), ("host", [slot for _, slot in operations.swap_out])):
            if len(dict.fromkeys(slots)) != len(slots):
                reject(self._plan, "state_ops", f"{kind} slots {slots} receiving", "each at most once")
        written = dict.fromkeys(received)
        for sequence in known if written else ():
            if sequence.state_slot in written:
                rule = "none that a row of the step continues from"
                reject(self._plan, "state_ops", f"slot {sequence.state_slot} receiving", rule, *sequence.key)
        moved = self._slots.moved(operations)
        for kind, pairs, contents in (
            ("swap-out", operations.swap_out, moved.host),
            ("copy", operations.copy, moved.device),
            ("swap-in", operations.swap_in, moved.device),
        ):
            for source, destination in pairs:
                if contents[destination] is None:
                    reject(
                        self._plan,
                        "state_ops",
                        f"a {kind} of slot {source}, which nobody has filled",
                        "one with a state",
                    )
        return moved

    def _check_stateless(self) -> None:
        if not self._plan.state_ops.is_empty:
            reject(self._plan, "state_ops", self._plan.state_ops, "none in a model without recurrent states")
        for row in self._rows:
            lag = row.sequence.num_lagging_tokens if row.is_new else 0
            for name, value, expected in (("state_slot", row.data.state_slot, -1), ("num_lagging_tokens", lag, 0)):
                if value != expected:
                    reject(
                        self._plan, name, value, f"{expected} in a model without recurrent states", *row.sequence.key
                    )

    def _check_contents(self, row: PlannedRow, moved: Moved) -> None:
        """Check that a row finds the state of its first tokens in the slot that it is given, and lags by accepted
        drafts that are saved beside it.
        """
        key, slot, num_computed = row.sequence.key, row.data.state_slot, row.num_computed_tokens
        lag, outputs = row.sequence.num_lagging_tokens, row.output_token_ids
        if not num_computed:
            if lag:
                reject(self._plan, "num_lagging_tokens", lag, "0 for a sequence that begins", *key)
            return
        state = moved.device[slot] if slot in moved.device else self._slots.held(slot)
        if state is None:
            rule = f"the state after its {num_computed - lag} tokens"
            reject(self._plan, "state_slot", f"{slot}, which nobody has filled", rule, *key)
        if not begins_alike(state.computed, row.request, outputs, min(state.num_tokens, num_computed)):
            rule = f"the state after its {num_computed - lag} tokens"
            reject(self._plan, "state_slot", f"{slot}, with the state after {state}", rule, *key)
        later = outputs[max(state.num_tokens - len(row.request.prompt_token_ids), 0) :]
        num_accepted = num_equal(state.draft_token_ids, later) if state.num_tokens < num_computed else 0
        if num_computed != state.num_tokens + lag or lag > num_accepted:
            rule = f"up to {num_accepted} drafts behind the {state.num_tokens} tokens that slot {slot} has"
            reject(self._plan, "num_computed_tokens", f"{num_computed}, with a lag of {lag}", rule, *key)

    def _check_known(self, sequence: MirroredSequence, data: SequenceData | SequenceDataDelta) -> None:
        if data.state_slot != -1:
            reject(self._plan, "state_slot", data.state_slot, "-1 for a sequence that has its slot", *sequence.key)
        # `PlanCheck` has counted the drafts that are among the sequence's ids.
        if num_lagging_tokens(sequence, data.num_computed_tokens) < 0:
            rule = "the token after the last computed one: a state has that already"
            reject(self._plan, "num_computed_tokens", data.num_computed_tokens, rule, *sequence.key)

    def _check_slots(self, name: str, slots: Iterable[int], *key: int) -> None:
        for slot in slots:
            if not 0 <= slot < len(self._slots.owners):
                reject(self._plan, name, slot, f"from 0 to {len(self._slots.owners) - 1}", *key)


def num_lagging_tokens(sequence: MirroredSequence, num_computed_tokens: int) -> int:
    """Tokens by which the states of a sequence that goes on after `num_computed_tokens` lag: accepted drafts of its
    last step.
    """
    return num_computed_tokens - (sequence.num_computed_tokens + sequence.num_scheduled_tokens)
