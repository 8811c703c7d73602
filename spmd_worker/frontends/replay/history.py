"""History of one request, step by step, as text: the output of `spmd-worker-replay --row`."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import chain
from typing import Final, NamedTuple

from spmd_worker.frontends.replay.replay import ReplayedStep
from spmd_worker.replica.scheduler.scheduler import Scheduler
from spmd_worker.replica.sequence.events import (
    Abort,
    Admit,
    CommitWeights,
    Event,
    FinishTransfers,
    ResetPrefixCache,
    SetWeightVersion,
)
from spmd_worker.replica.sequence.metadata import SequenceData, SequenceDataDelta
from spmd_worker.replica.sequence.request import Request
from spmd_worker.replica.sequence.sampled import sample_indices, sampling_keys
from spmd_worker.replica.sequence.sequence import Sequence, SequenceKey, SequenceStatus

_MAX_ITEMS_SHOWN: Final = 12


@dataclass(slots=True)
class _Decoding:
    """Consecutive steps that computed one position of a sequence each, without a new block: one line of a history."""

    first_step: int
    first_position: int
    token_ids: list[int]

    @property
    def next_step(self) -> int:
        return self.first_step + len(self.token_ids)

    def text(self) -> str:
        last_position = self.first_position + len(self.token_ids) - 1
        return f"computes {_positions(self.first_position, last_position)}, samples {_listed(self.token_ids)}"


class _LastSeen(NamedTuple):
    """State of a sequence after a step; `transfer` is the number that it waits for, or 0."""

    status: SequenceStatus
    num_computed_tokens: int
    num_blocks: int
    transfer: int


class RowHistory:
    """One line per event, passed to `write`. Call `tell_request`, then `tell_step` for each step, then `tell_rest`."""

    def __init__(self, request: Request, write: Callable[[str], object]) -> None:
        self._request, self._write = request, write
        # State after the last step.
        self._sequences: dict[int, Sequence] = {}
        self._places: dict[int, _LastSeen] = {}
        self._signalled_ends: list[int] = []
        self._decoding: dict[int, _Decoding] = {}

    def tell_request(self) -> None:
        """Report the request's parameters."""
        request, sampling = self._request, self._request.sampling
        prompt = shorten(request.prompt_token_ids)
        self._write(f"request {request.request_id}: {len(request.prompt_token_ids)} prompt tokens {prompt}")
        self._write(f"  n={sampling.n} max_tokens={sampling.max_tokens} temperature={sampling.temperature:g}")

    def tell_step(self, step: ReplayedStep, scheduler: Scheduler) -> None:
        """Report the step's effect on the request; `scheduler` is in its state after the step."""
        self._tell_put_out(step.plan.step)
        self._tell_scheduled(step)
        self._tell_finished(step)
        self._tell_loading(step, scheduler)
        self._tell_events(step, scheduler)
        group = scheduler.queues.groups.get(self._request.request_id)
        self._sequences = {each.sample_index: each for each in group.sequences} if group is not None else {}
        transfers = {each.key: number for number, waits in scheduler.queues.loading.items() for each in waits}
        self._places = {
            index: _LastSeen(each.status, each.num_computed_tokens, each.table.num_blocks, transfers.get(each.key, 0))
            for index, each in self._sequences.items()
        }

    def tell_rest(self) -> None:
        """Report steps that were held back to be joined in one line."""
        for sample_index in list(self._decoding):
            self._tell_decoding(sample_index)

    def _tell_put_out(self, step: int) -> None:
        for sample_index, sequence in self._sequences.items():
            place = self._places[sample_index]
            what = f"{place.num_blocks} blocks, {place.num_computed_tokens} computed tokens"
            if place.status is not SequenceStatus.RUNNING:
                continue
            if sequence.status is SequenceStatus.SWAPPED:
                self._write_report(step, sample_index, f"preempted by swap, goes to the host: {what}")
            elif sequence.status is SequenceStatus.PREEMPTED:
                self._write_report(step, sample_index, f"preempted by recompute, loses: {what}")

    def _tell_loading(self, step: ReplayedStep, scheduler: Scheduler) -> None:
        waits = [(number, each) for number, sequences in scheduler.queues.loading.items() for each in sequences]
        for number, sequence in waits:
            place = self._places.get(sequence.sample_index)
            is_told = place is not None and place.status is SequenceStatus.LOADING
            if sequence.request.request_id == self._request.request_id and not is_told:
                text = f"waits for transfer {number}, which brings its beginning"
                self._write_report(step.plan.step, sequence.sample_index, text)

    def _tell_scheduled(self, step: ReplayedStep) -> None:
        sampled = _sampled_by_sequence(step)
        blocks: dict[int, list[int]] = {}
        for place, block_id in step.plan.continuing_blocks:
            blocks.setdefault(place, []).append(block_id)
        for place, key in enumerate(step.plan.continuing):
            if key.request_id == self._request.request_id:
                self._tell_continuing(step, place, sampled.get(key, ()), blocks.get(place, []))
        for group in step.plan.groups:
            if group.request_id == self._request.request_id:
                for data in group.sequences:
                    token_ids = sampled.get(SequenceKey(group.request_id, data.sample_index), ())
                    text = self._entrance(data) + _describe(data, token_ids)
                    self._write_report(step.plan.step, data.sample_index, text)

    def _entrance(self, data: SequenceData | SequenceDataDelta) -> str:
        """Source of the computed tokens of a sequence that did not run in the last step."""
        place = self._places.get(data.sample_index)
        if place is None or place.status is SequenceStatus.RUNNING:
            return ""
        if place.status is SequenceStatus.SWAPPED:
            return f"comes back from the host with {place.num_computed_tokens} computed tokens, "
        return f"finds {data.num_computed_tokens} tokens in the cache, " if data.num_computed_tokens else ""

    def _tell_continuing(
        self, step: ReplayedStep, place: int, token_ids: tuple[int, ...], block_ids: list[int]
    ) -> None:
        _, sample_index, position = step.places[place]
        num_ids = step.plan.continuing_num_ids[place] if step.plan.continuing_num_ids else 1
        if not block_ids and len(token_ids) == num_ids == 1:
            self._hold_back(step.plan.step, sample_index, position - 1, token_ids[0])
            return
        text = f"computes {_positions(position - max(num_ids, 1), position - 1)}"
        if block_ids:
            text += f", takes block{'s' if len(block_ids) > 1 else ''} {', '.join(map(str, block_ids))}"
        self._write_report(
            step.plan.step, sample_index, text + (f", samples {_listed(token_ids)}" if token_ids else "")
        )

    def _hold_back(self, step: int, sample_index: int, position: int, token_id: int) -> None:
        decoding = self._decoding.get(sample_index)
        if decoding is not None and decoding.next_step == step:
            decoding.token_ids.append(token_id)
            return
        self._tell_decoding(sample_index)
        self._decoding[sample_index] = _Decoding(step, position, [token_id])

    def _tell_finished(self, step: ReplayedStep) -> None:
        ended = [group for group in step.ended if group.request.request_id == self._request.request_id]
        of_ended = {sequence.sample_index: sequence for group in ended for sequence in group.sequences}
        for sample_index, sequence in (self._sequences | of_ended).items():
            if sequence.status is SequenceStatus.FINISHED and sample_index not in self._signalled_ends:
                self._signalled_ends.append(sample_index)
                self._write_report(step.plan.step, sample_index, _ending_of(sequence))
        for group in ended:
            num_tokens = sum(len(sequence.output_token_ids) for sequence in group.sequences)
            text = f"answered: {num_tokens} output tokens, {group.num_preemptions} preemptions, "
            text += f"{group.num_cached_tokens or 0} prompt tokens found in the cache"
            self._write_report(step.plan.step, None, text)

    def _tell_events(self, step: ReplayedStep, scheduler: Scheduler) -> None:
        for event in step.events:
            if isinstance(event, Admit) and event.request.request_id == self._request.request_id:
                self._write_report(step.plan.step, None, f"admitted after this step, {len(scheduler.waiting)} wait")
            elif isinstance(event, Abort) and event.request_id == self._request.request_id:
                self._write_report(step.plan.step, None, "abort asked for after this step")
            elif self._request.request_id in scheduler.queues.groups:
                self._tell_of_cache(step.plan.step, event)

    def _tell_of_cache(self, step: int, event: Event) -> None:
        if isinstance(event, ResetPrefixCache):
            self._write_report(step, None, "prefix cache reset after this step")
        elif isinstance(event, SetWeightVersion | CommitWeights):
            self._write_report(step, None, f"weight version {event.version} after this step")
        elif isinstance(event, FinishTransfers):
            for sample_index, place in self._places.items():
                if place.transfer in event.numbers:
                    self._write_report(step, sample_index, f"transfer {place.transfer} has finished after this step")

    def _write_report(self, step: int, sample_index: int | None, text: str) -> None:
        self.tell_rest()
        self._write_event(str(step), sample_index, text)

    def _tell_decoding(self, sample_index: int) -> None:
        decoding = self._decoding.pop(sample_index, None)
        if decoding is not None:
            last_step = decoding.next_step - 1
            steps = f"{decoding.first_step}-{last_step}" if last_step > decoding.first_step else str(last_step)
            self._write_event(steps, sample_index, decoding.text())

    def _write_event(self, steps: str, sample_index: int | None, text: str) -> None:
        who = "" if sample_index is None else f"sample {sample_index}"
        self._write(f"  step {steps:>9}  {who:<9} {text}")


def _sampled_by_sequence(step: ReplayedStep) -> dict[SequenceKey, tuple[int, ...]]:
    """Sampled ids of each scheduled sequence; several where it forked."""
    sampled = dict(zip(sampling_keys(step.plan), step.sampled.rows())) if step.sampled is not None else {}
    for group in step.plan.groups:
        for data in group.sequences:
            indices = sample_indices(data.sample_index, data.num_samples)
            ids = [sampled.get(SequenceKey(group.request_id, index), ()) for index in indices]
            sampled[SequenceKey(group.request_id, data.sample_index)] = tuple(chain.from_iterable(ids))
    return sampled


def _describe(data: SequenceData | SequenceDataDelta, token_ids: tuple[int, ...]) -> str:
    text = f"computes {_positions(data.num_computed_tokens, data.num_computed_tokens + data.num_scheduled_tokens - 1)}"
    if isinstance(data, SequenceData):
        text += f", told whole with blocks {shorten(data.block_ids)}"
    elif data.appended_block_ids:
        kept = f"keeps {data.num_kept_blocks} blocks and takes" if data.num_kept_blocks else "in blocks"
        text += f", {kept} {shorten(data.appended_block_ids)}"
    return text + (f", samples {_listed(token_ids)}" if token_ids else "")


def _positions(first: int, last: int) -> str:
    return f"position {first}" if first == last else f"positions {first} to {last}"


def _listed(items: Iterable[object]) -> str:
    return ", ".join(map(str, items))


def _ending_of(sequence: Sequence) -> str:
    assert sequence.finish_reason is not None, sequence.key
    reason = sequence.finish_reason.value
    stop = f" at {sequence.stop_reason!r}" if sequence.stop_reason is not None else ""
    return f"ends: {reason}{stop}, {len(sequence.output_token_ids)} tokens {shorten(sequence.output_token_ids)}"


def shorten(items: Iterable[object]) -> str:
    """A list in square brackets, with its middle left out if it is long."""
    texts = [str(item) for item in items]
    if len(texts) > _MAX_ITEMS_SHOWN:
        half = _MAX_ITEMS_SHOWN // 2
        texts = [*texts[:half], "...", *texts[-half:]]
    return f"[{', '.join(texts)}]"
