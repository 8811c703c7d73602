"""Layers with recurrent states and drafts: the slot keeps a row's state after its given tokens, never a draft's.

What the recurrences of a step's drafts were given is saved beside the state. A row whose drafts were accepted lags: at
its next step the kernels first run over the saved inputs of the accepted drafts, whose outputs are dropped, then over
the row's new tokens; the state is written after the given ones of these. The additions are those of a row without
drafts, in the same order, so the bits are the same. An accepted draft costs its recurrence once more; a rejected one
costs nothing, and no state is copied.

T: tokens of the step; L: tokens that its rows lag by; D: drafts of the step; N: numbers that a layer saves of a draft.
"""

from dataclasses import dataclass

from torch import Tensor

from spmd_worker.ops.kernels.recurrent import StateSegments


@dataclass(frozen=True, slots=True)
class DraftReplay:
    """`segments` of the T + L tokens that the recurrences of a step run over: a row's lagging tokens, its given tokens
    and its drafts, from the position that its slot is at; `kept` counts the first two. Indices are int64:

    `own_rows` [T] and `lagging_rows` [L] are the step's own tokens and the lagging ones among the T + L;
    `replayed_rows` [L] where the latter's inputs are saved, `draft_rows` [D] the drafts among the T, and `saved_rows`
    [D] where theirs are to be saved: slot * most drafts + number of the draft.
    """

    segments: StateSegments
    own_rows: Tensor
    lagging_rows: Tensor
    replayed_rows: Tensor
    draft_rows: Tensor
    saved_rows: Tensor

    def extend(self, inputs: Tensor, saved: Tensor) -> Tensor:
        """Inputs of the recurrences: those of the step [T, N] and `saved` [slots, most drafts, N] -> [T + L, N]. The
        inputs of the step's drafts are saved, after those of the lagging tokens are read.
        """
        flat = saved.view(-1, saved.shape[-1])
        extended = inputs.new_empty(len(inputs) + len(self.lagging_rows), inputs.shape[1])
        extended[self.own_rows] = inputs
        extended[self.lagging_rows] = flat[self.replayed_rows]
        flat[self.saved_rows] = inputs[self.draft_rows]
        return extended

    def own(self, outputs: Tensor) -> Tensor:
        """Outputs [T + L, ...] of the recurrences -> [T, ...], those of the step's own tokens."""
        return outputs[self.own_rows]
