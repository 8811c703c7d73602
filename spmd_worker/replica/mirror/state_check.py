"""Checks a plan's slots of recurrent states against a mirror: each row keeps its own, and no other row's is written.

A slot has the tokens that its row's last step was given, and the inputs of that step's drafts: the row goes on after
these tokens, or after those of the drafts that have become its ids.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NoReturn

from spmd_worker.replica.mirror.records import MirroredGroup, MirroredSequence, MirrorError
from spmd_worker.replica.sequence.metadata import SequenceData, SequenceDataDelta
from spmd_worker.replica.sequence.request import RequestId
from spmd_worker.replica.sequence.sampled import num_equal
from spmd_worker.replica.sequence.step import StepPlan


class StateCheck:
    """One check of one plan, whose rows `PlanCheck` has accepted. `owners` has the sequence that was given each slot
    last; it has no entry in a model without recurrent states. A row has at most `most_drafts` drafts.

    A mirror does not know which sequences are preempted. So a slot may be given to another sequence at any time, and
    who had it may be scheduled again only with a slot of its own.
    """

    def __init__(
        self,
        plan: StepPlan,
        groups: Mapping[RequestId, MirroredGroup],
        owners: Sequence[MirroredSequence | None],
        most_drafts: int = 0,
    ) -> None:
        self._plan, self._groups, self._owners, self._most_drafts = plan, groups, owners, most_drafts

    def check(self, continuing: Sequence[MirroredSequence]) -> None:
        """Raise MirrorError, before anything has changed, for a slot that does not exist or is not the row's."""
        if not self._owners:
            self._check_stateless()
            return
        if self._plan.continuing_num_ids and 0 in self._plan.continuing_num_ids:
            self._reject("continuing_num_ids", 0, "1 or more: a state has the last token already")
        known, given, operations = list(continuing), dict[int, None](), self._plan.state_ops
        copied, swapped_in = (
            dict.fromkeys([slot for _, slot in each]) for each in (operations.copy, operations.swap_in)
        )
        for group in self._plan.groups:
            held = self._groups.get(group.request_id)
            for data in group.sequences:
                sequence = None if held is None else held.sequences.get(data.sample_index)
                key = (group.request_id, data.sample_index)
                if len(data.draft_token_ids) > self._most_drafts:
                    rule = f"at most {self._most_drafts}, which a slot has room for"
                    self._reject("draft_token_ids", f"{len(data.draft_token_ids)} drafts", rule, *key)
                if isinstance(data, SequenceData):
                    is_copy, is_back = data.state_slot in copied, data.state_slot in swapped_in
                    self._check_lag(data, None if is_copy else sequence, *key, is_back=is_back)
                    sequence = None
                if sequence is None:
                    self._check_slots("state_slot", (data.state_slot,), *key)
                    if data.state_slot in given:
                        self._reject("state_slot", data.state_slot, "each slot given once", *key)
                    given[data.state_slot] = None
                else:
                    self._check_known(sequence, data)
                    known.append(sequence)
        for sequence in known:
            if sequence.state_slot < 0:
                self._reject("state_slot", "another sequence's by now", "a new slot, in a snapshot", *sequence.key)
            if sequence.state_slot in given:
                self._reject("state_slot", sequence.state_slot, "one that no other row of the step has", *sequence.key)
        self.check_state_ops(known)

    def check_state_ops(self, known: Iterable[MirroredSequence]) -> None:
        """Check that the moves' device slots exist, that each receives once, and none of the rows `known`, which keep
        what they have. The mirror does not know the number of host slots.
        """
        operations = self._plan.state_ops
        if operations.is_empty:
            return
        received = [slot for _, slot in (*operations.swap_in, *operations.copy)]
        self._check_slots("state_ops", [*received, *[slot for slot, _ in (*operations.swap_out, *operations.copy)]])
        for kind, slots in (("device", received), ("host", [slot for _, slot in operations.swap_out])):
            if len(dict.fromkeys(slots)) != len(slots):
                self._reject("state_ops", f"{kind} slots {slots} receiving", "each at most once")
        written = dict.fromkeys(received)
        for sequence in known if written else ():
            if sequence.state_slot in written:
                rule = "none that a row of the step continues from"
                self._reject("state_ops", f"slot {sequence.state_slot} receiving", rule, *sequence.key)

    def _check_stateless(self) -> None:
        if not self._plan.state_ops.is_empty:
            self._reject("state_ops", self._plan.state_ops, "none in a model without recurrent states")
        for group in self._plan.groups:
            for data in group.sequences:
                lag = data.num_lagging_tokens if isinstance(data, SequenceData) else 0
                for name, value, expected in (("state_slot", data.state_slot, -1), ("num_lagging_tokens", lag, 0)):
                    if value != expected:
                        rule = f"{expected} in a model without recurrent states"
                        self._reject(name, value, rule, group.request_id, data.sample_index)

    def _check_lag(self, data: SequenceData, held: MirroredSequence | None, *key: int, is_back: bool) -> None:
        """Check how far a sequence that is sent completely lags. `held` is what the mirror has of it; None: nothing, or
        it begins from a copy. `is_back`: its states are swapped in.
        """
        lag = data.num_lagging_tokens
        if held is None or not data.num_computed_tokens:
            if lag:
                self._reject("num_lagging_tokens", lag, "0 where nothing is saved of the sequence's drafts", *key)
            return
        if not lag and not is_back and data.state_slot != held.state_slot:
            # Its slot is a snapshot's.
            return
        end = held.num_computed_tokens + held.num_scheduled_tokens
        num_accepted = num_equal(held.draft_token_ids, data.output_token_ids[end - held.num_prompt_tokens :])
        if lag != num_lagging_tokens(held, data.num_computed_tokens) or not 0 <= lag <= num_accepted:
            rule = f"up to {num_accepted} drafts behind the {end} tokens that its state has"
            self._reject("num_computed_tokens", f"{data.num_computed_tokens}, with a lag of {lag}", rule, *key)

    def _check_known(self, sequence: MirroredSequence, data: SequenceData | SequenceDataDelta) -> None:
        if data.state_slot != -1:
            self._reject("state_slot", data.state_slot, "-1 for a sequence that has its slot", *sequence.key)
        # `PlanCheck` has counted the drafts that are among the sequence's ids.
        if num_lagging_tokens(sequence, data.num_computed_tokens) < 0:
            rule = "the token after the last computed one: a state has that already"
            self._reject("num_computed_tokens", data.num_computed_tokens, rule, *sequence.key)

    def _check_slots(self, name: str, slots: Iterable[int], *key: int) -> None:
        for slot in slots:
            if not 0 <= slot < len(self._owners):
                self._reject(name, slot, f"from 0 to {len(self._owners) - 1}", *key)

    def _reject(self, name: str, value: object, expected: object, *key: int) -> NoReturn:
        where = "".join([f", {kind} {number}" for kind, number in zip(("request", "sample"), key)])
        raise MirrorError(f"step {self._plan.step}{where}: field {name} is {value}, the mirror expects {expected}")


def num_lagging_tokens(sequence: MirroredSequence, num_computed_tokens: int) -> int:
    """Tokens by which the states of a sequence that goes on after `num_computed_tokens` lag: accepted drafts of its
    last step.
    """
    return num_computed_tokens - (sequence.num_computed_tokens + sequence.num_scheduled_tokens)
