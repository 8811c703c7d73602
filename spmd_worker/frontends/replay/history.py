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
    FinishTransfers,
    ResetMediaRows,
    ResetPrefixCache,
    SetWeightVersion,
)
from spmd_worker.replica.sequence.metadata import SequenceData, SequenceDataDelta
from spmd_worker.replica.sequence.request import Request
from spmd_worker.replica.sequence.sampled import sample_indices, sampling_keys
from spmd_worker.replica.sequence.sequence import Sequence, SequenceKey, SequenceStatus

_MAX_ITEMS_SHOWN: Final = 12


@dataclass(slots=True)
class _DecodeRun:
    """Consecutive steps that computed one position of a sequence each, without a new block: one line of a history."""

    first_step: int
    first_position: int
    token_ids: list[int]

    @property
    def next_step(self) -> int:
        return self.first_step + len(self.token_ids)


class _SequenceState(NamedTuple):
    """State of a sequence after a step; `transfer` is the number of the one it waits for, or 0."""

    status: SequenceStatus
    num_computed_tokens: int
    num_blocks: int
    transfer: int


class RowHistory:
    """One line per event, passed to `write`. Call `write_request`, then `write_step` for each step, then `flush`."""

    def __init__(self, request: Request, write: Callable[[str], object]) -> None:
        self._request, self._write = request, write
        # State after the last step.
        self._sequences: dict[int, Sequence] = {}
        self._states: dict[int, _SequenceState] = {}
        self._reported_ends: list[int] = []
        self._decode_runs: dict[int, _DecodeRun] = {}

    def write_request(self) -> None:
        request, sampling = self._request, self._request.sampling
        prompt, num_virtual = shorten(request.own_token_ids), request.num_virtual_tokens
        given = request.encoder_input
        virtual = f", after {num_virtual} of a prompt adapter" if num_virtual else ""
        virtual = virtual if given is None else f", after {given.num_rows} rows of the encoder's input"
        self._write(f"request {request.request_id}: {len(request.own_token_ids)} prompt tokens {prompt}{virtual}")
        adapter = f" adapter={request.adapter:016x}" if request.adapter else ""
        self._write(f"  n={sampling.n} max_tokens={sampling.max_tokens} temperature={sampling.temperature:g}{adapter}")

    def write_step(self, step: ReplayedStep, scheduler: Scheduler) -> None:
        """Write the step's effect on the request; `scheduler` is in its state after the step."""
        self._write_preempted(step.plan.step)
        self._write_scheduled(step)
        self._write_finished(step)
        transfers = {each.key: number for number, waits in scheduler.queues.loading.items() for each in waits}
        for key, number in transfers.items():
            state = self._states.get(key.sample_index)
            is_new = state is None or state.status is not SequenceStatus.LOADING
            if key.request_id == self._request.request_id and is_new:
                self._write_event(step.plan.step, key.sample_index, f"waits for transfer {number} of its prefix")
        self._write_events(step, scheduler)
        group = scheduler.queues.groups.get(self._request.request_id)
        self._sequences = {each.sample_index: each for each in group.sequences} if group is not None else {}
        self._states = {
            index: _SequenceState(
                each.status, each.num_computed_tokens, each.table.num_blocks, transfers.get(each.key, 0)
            )
            for index, each in self._sequences.items()
        }

    def flush(self) -> None:
        """Write the decode steps that were held back to be joined in one line."""
        for sample_index in list(self._decode_runs):
            self._flush_decode_run(sample_index)

    def _write_preempted(self, step: int) -> None:
        for sample_index, sequence in self._sequences.items():
            state = self._states[sample_index]
            held = f"{state.num_blocks} blocks, {state.num_computed_tokens} computed tokens"
            if state.status is not SequenceStatus.RUNNING:
                continue
            if sequence.status is SequenceStatus.SWAPPED:
                self._write_event(step, sample_index, f"preempted by swap, copied to the host: {held}")
            elif sequence.status is SequenceStatus.PREEMPTED:
                self._write_event(step, sample_index, f"preempted by recompute, dropped: {held}")

    def _write_scheduled(self, step: ReplayedStep) -> None:
        sampled = _sampled_by_sequence(step)
        blocks: dict[int, list[int]] = {}
        for index, block_id in step.plan.continuing_blocks:
            blocks.setdefault(index, []).append(block_id)
        for index, key in enumerate(step.plan.continuing):
            if key.request_id == self._request.request_id:
                self._write_continuing(step, index, sampled.get(key, ()), blocks.get(index, []))
        for group in step.plan.groups:
            if group.request_id == self._request.request_id:
                for data in group.sequences:
                    token_ids = sampled.get(SequenceKey(group.request_id, data.sample_index), ())
                    text = self._source_text(data) + _scheduled_text(data, token_ids)
                    self._write_event(step.plan.step, data.sample_index, text)

    def _source_text(self, data: SequenceData | SequenceDataDelta) -> str:
        """Source of the computed tokens of a sequence that did not run in the last step."""
        state = self._states.get(data.sample_index)
        if state is None or state.status is SequenceStatus.RUNNING:
            return ""
        if state.status is SequenceStatus.SWAPPED:
            return f"swapped in from the host with {state.num_computed_tokens} computed tokens, "
        return f"finds {data.num_computed_tokens} tokens in the cache, " if data.num_computed_tokens else ""

    def _write_continuing(
        self, step: ReplayedStep, index: int, token_ids: tuple[int, ...], block_ids: list[int]
    ) -> None:
        _, sample_index, position = step.positions[index]
        num_ids = step.plan.continuing_num_ids[index] if step.plan.continuing_num_ids else 1
        if not block_ids and len(token_ids) == num_ids == 1:
            run = self._decode_runs.get(sample_index)
            if run is not None and run.next_step == step.plan.step:
                run.token_ids.append(token_ids[0])
                return
            self._flush_decode_run(sample_index)
            self._decode_runs[sample_index] = _DecodeRun(step.plan.step, position - 1, [token_ids[0]])
            return
        text = f"computes {_positions(position - max(num_ids, 1), position - 1)}"
        if block_ids:
            text += f", gets block{'s' if len(block_ids) > 1 else ''} {', '.join(map(str, block_ids))}"
        self._write_event(step.plan.step, sample_index, text + _samples_text(token_ids))

    def _write_finished(self, step: ReplayedStep) -> None:
        ended = [group for group in step.ended if group.request.request_id == self._request.request_id]
        of_ended = {sequence.sample_index: sequence for group in ended for sequence in group.sequences}
        for sample_index, sequence in (self._sequences | of_ended).items():
            if sequence.status is SequenceStatus.FINISHED and sample_index not in self._reported_ends:
                self._reported_ends.append(sample_index)
                self._write_event(step.plan.step, sample_index, _ending_text(sequence))
        for group in ended:
            num_tokens = sum(len(sequence.output_token_ids) for sequence in group.sequences)
            text = f"answered: {num_tokens} output tokens, {group.num_preemptions} preemptions, "
            text += f"{group.num_cached_tokens or 0} prompt tokens found in the cache"
            self._write_event(step.plan.step, None, text)

    def _write_events(self, step: ReplayedStep, scheduler: Scheduler) -> None:
        for event in step.events:
            text, request_id = "", self._request.request_id
            if isinstance(event, Admit) and event.request.request_id == request_id:
                text = f"admitted after this step, {len(scheduler.waiting) + len(scheduler.queues.held)} wait"
            elif isinstance(event, Abort) and event.request_id == request_id:
                text = "abort requested after this step"
            elif request_id not in scheduler.queues.groups:
                continue
            elif isinstance(event, ResetPrefixCache):
                text = "prefix cache reset after this step"
            elif isinstance(event, ResetMediaRows):
                text = "rows of images and recordings dropped after this step"
            elif isinstance(event, SetWeightVersion | CommitWeights):
                text = f"weight version {event.version} after this step"
            elif isinstance(event, FinishTransfers):
                for sample_index, state in self._states.items():
                    number = state.transfer
                    if number in event.numbers or -number in event.numbers:
                        end = "failed: its blocks are computed" if -number in event.numbers else "finished"
                        self._write_event(step.plan.step, sample_index, f"transfer {number} has {end} after this step")
            if text:
                self._write_event(step.plan.step, None, text)

    def _write_event(self, step: int, sample_index: int | None, text: str) -> None:
        self.flush()
        self._write_line(str(step), sample_index, text)

    def _flush_decode_run(self, sample_index: int) -> None:
        run = self._decode_runs.pop(sample_index, None)
        if run is not None:
            last_step, last_position = run.next_step - 1, run.first_position + len(run.token_ids) - 1
            steps = f"{run.first_step}-{last_step}" if last_step > run.first_step else str(last_step)
            text = f"computes {_positions(run.first_position, last_position)}{_samples_text(run.token_ids)}"
            self._write_line(steps, sample_index, text)

    def _write_line(self, steps: str, sample_index: int | None, text: str) -> None:
        sample = "" if sample_index is None else f"sample {sample_index}"
        self._write(f"  step {steps:>9}  {sample:<9} {text}")


def _sampled_by_sequence(step: ReplayedStep) -> dict[SequenceKey, tuple[int, ...]]:
    """Sampled ids of each scheduled sequence; several where it forked."""
    sampled = dict(zip(sampling_keys(step.plan), step.sampled.rows())) if step.sampled is not None else {}
    for group in step.plan.groups:
        for data in group.sequences:
            indices = sample_indices(data.sample_index, data.num_samples)
            ids = [sampled.get(SequenceKey(group.request_id, index), ()) for index in indices]
            sampled[SequenceKey(group.request_id, data.sample_index)] = tuple(chain.from_iterable(ids))
    return sampled


def _scheduled_text(data: SequenceData | SequenceDataDelta, token_ids: tuple[int, ...]) -> str:
    text = f"computes {_positions(data.num_computed_tokens, data.num_computed_tokens + data.num_scheduled_tokens - 1)}"
    if isinstance(data, SequenceData):
        text += f", sent completely with blocks {shorten(data.block_ids)}"
        if data.num_lagging_tokens:
            text += f", states {data.num_lagging_tokens} tokens behind"
    elif data.appended_block_ids:
        kept = f"keeps {data.num_kept_blocks} blocks and gets" if data.num_kept_blocks else "in blocks"
        text += f", {kept} {shorten(data.appended_block_ids)}"
    if data.draft_token_ids:
        text += f", drafts {shorten(data.draft_token_ids)}"
    return text + _samples_text(token_ids)


def _positions(first: int, last: int) -> str:
    return f"position {first}" if first == last else f"positions {first} to {last}"


def _samples_text(token_ids: Iterable[int]) -> str:
    listed = ", ".join(map(str, token_ids))
    return f", samples {listed}" if listed else ""


def _ending_text(sequence: Sequence) -> str:
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
