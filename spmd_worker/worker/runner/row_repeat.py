"""Repeats one row of a step by itself, against the same cache, and compares all that the step computed for it.

Every stage of a pipeline repeats its own layers, from the row's part of what the stage before has sent, so that a
repeated row costs no transfer. Keys and values are written again where the step wrote them, in blocks of this row
alone; recurrent states are put back before, and must then become what the step made of them.

H: hidden size; Vs: token ids of this rank's vocabulary shard.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kv_cache.cache_engine import CacheEngine
from spmd_worker.base.errors import StepMismatchError
from spmd_worker.model.adapters.loaded import LoadedAdapters
from spmd_worker.model.decoder import DecoderForCausalLM
from spmd_worker.replica.mirror.mirror import ScheduledSequence
from spmd_worker.worker.runner.batch import Batch


@dataclass(frozen=True, slots=True)
class StepInputs:
    """Copies of what the step may change: a row's part of the residual stream, on a stage that is not the first, and
    its recurrent states.
    """

    batch: Batch
    incoming: Tensor | None
    states: tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class StepOutputs:
    """Results of a step: `hidden` of its tokens, [T, H], or of its samples, [R, H]; and where it samples either
    the `logits` [R, Vs], or their `argmax`: maxima [R] and columns [R].
    """

    hidden: Tensor
    logits: Tensor | None = None
    argmax: tuple[Tensor, Tensor] | None = None

    def copied(self) -> "StepOutputs":
        """The same in memory of its own: that of a group or of a graph is written by the repetition."""
        argmax = None if self.argmax is None else (self.argmax[0].clone(), self.argmax[1].clone())
        return StepOutputs(self.hidden.clone(), None if self.logits is None else self.logits.clone(), argmax)


class RowRepeater:
    """Repeats row `row` of a step, which continues a sequence: it samples once, and no row before it samples more.

    Call `begin` before the step's forward pass and `compare` after it.
    """

    def __init__(
        self,
        model: DecoderForCausalLM,
        engine: CacheEngine,
        adapters: LoadedAdapters | None,
        rank: int,
    ) -> None:
        self._model, self._engine, self._adapters, self._rank = model, engine, adapters, rank

    def begin(
        self, scheduled: Sequence[ScheduledSequence], row: int, batch: Batch, own: Batch, incoming: Tensor | None
    ) -> StepInputs:
        """Copies for the repetition of a row of the step with this batch; `own` is a batch of the row alone."""
        start, stop = batch.attention.query_starts[row : row + 2]
        # The host may not have read the row's last id yet.
        own = replace(own, token_ids=batch.token_ids[start:stop].clone())
        states = self._states(scheduled[row])
        return StepInputs(
            own, None if incoming is None else incoming[start:stop].clone(), tuple([each.clone() for each in states])
        )

    def compare(
        self, step: int, scheduled: Sequence[ScheduledSequence], row: int, batch: Batch, inputs: StepInputs,
        outputs: StepOutputs, *, is_fused: bool,
    ) -> None:  # fmt: skip
        """Raise StepMismatchError unless the row alone has the bits of the step."""
        after = [each.clone() for each in self._states(scheduled[row])]
        for state, before in zip(self._states(scheduled[row]), inputs.states, strict=True):
            state.copy_(before)
        hidden = self._forward(inputs, is_fused=is_fused)
        where = self._where(step, scheduled, row)
        for index, (state, expected) in enumerate(zip(self._states(scheduled[row]), after, strict=True)):
            self._check(where, f"recurrent states of kind {index}", expected, state)
        if not self._model.stage.is_last:
            start, stop = batch.attention.query_starts[row : row + 2]
            self._check(where, "hidden states", outputs.hidden[start:stop], hidden)
            return
        # Rows that continue come first, with a sample each.
        own, hidden = outputs.hidden[batch.sample_rows[row]], hidden[-1]
        self._check(where, "hidden states", own, hidden)
        first_id = self._model.lm_head.shard.start
        if outputs.logits is not None:
            logits = self._model.compute_logits(hidden[None])[0]
            self._check(where, "logits", outputs.logits[row], logits, first_id)
        elif outputs.argmax is not None:
            (value, column), (maxima, columns) = self._model.argmax_logits(hidden[None]), outputs.argmax
            self._check(where, "argmax's logit", maxima[row : row + 1], value)
            if not torch.equal(columns[row : row + 1], column):
                ids = int(columns[row]) + first_id, int(column[0]) + first_id
                raise self._error(where, "argmax", f"token id {ids[0]} in its batch and {ids[1]} alone")

    def _forward(self, inputs: StepInputs, *, is_fused: bool) -> Tensor:
        batch, engine, adapters = inputs.batch, self._engine, None
        if batch.adapter_slots is not None and self._adapters is not None:
            adapters = self._adapters.step(batch.adapter_slots)
        tokens = (batch.token_ids, batch.positions, batch.rope_regimes)
        hidden: Tensor = self._model(
            *(*tokens, engine.layer_caches, batch.attention, inputs.incoming),
            is_fused=is_fused,
            adapters=adapters,
            states=() if engine.states is None else engine.states.layers,
            rope_positions=batch.rope_positions,
        )
        return hidden

    def _states(self, scheduled: ScheduledSequence) -> list[Tensor]:
        """Views of the row's states, in all layers of a kind."""
        states, slot = self._engine.states, scheduled.sequence.state_slot
        return [] if states is None else [each[:, slot] for each in states.tensors]

    def _where(self, step: int, scheduled: Sequence[ScheduledSequence], row: int) -> str:
        sequence = scheduled[row].sequence
        position = sequence.num_computed_tokens + scheduled[row].num_scheduled_tokens - 1
        return (
            f"rank {self._rank}, step {step}: row {row} of {len(scheduled)}, request {sequence.request.request_id}, "
            f"sample {sequence.sample_index}, token at position {position}"
        )

    def _check(self, where: str, what: str, batched: Tensor, alone: Tensor, first_id: int | None = None) -> None:
        """Raise StepMismatchError unless both have the same bits; NaN equals itself."""
        first, second = batched.reshape(-1), alone.reshape(-1)
        assert first.shape == second.shape, (what, batched.shape, alone.shape)
        if torch.equal(first.view(torch.uint8), second.view(torch.uint8)):
            return
        as_bits = (each.view({2: torch.int16, 4: torch.int32}[each.element_size()]) for each in (first, second))
        differs = torch.ne(*as_bits) & ~(first.isnan() & second.isnan())
        if not differs.any():
            return
        index = int(differs.nonzero()[0])
        most = float((first.double() - second.double()).abs().nan_to_num().max())
        subject = f"element {index}" if first_id is None else f"that of token id {index + first_id}"
        raise self._error(
            where,
            what,
            f"{subject} is {first[index].item()!r} in its batch and {second[index].item()!r} alone, the first of "
            f"{int(differs.sum())} that differ, by at most {most:.3g}",
        )

    def _error(self, where: str, what: str, difference: str) -> StepMismatchError:
        return StepMismatchError(
            f"{where}: its {what} differ from those of the same row computed by itself (executor.verify_steps): "
            f"{difference}. What was computed depended on other rows, or memory has changed: run again with "
            f"scheduler.max_num_seqs=1 and compare the answers"
        )
