"""Mixers with states, and the inputs and outputs of their recurrences: rows may have drafts, or lag (`DraftReplay`).

T: tokens of the step; L: tokens that its rows lag by.
"""

from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from kv_cache.layer_states import LayerStates
from spmd_worker.model.layers.layer_step import LayerStep
from spmd_worker.ops.attention.metadata import AttentionMetadata
from spmd_worker.ops.kernels.adapters import StepAdapters
from spmd_worker.ops.kernels.recurrent import StateSegments


class RecurrentMixer(nn.Module):
    """Mixer whose outputs are a function of states and of all tokens: it has no keys, and leaves no token out."""

    def forward(self, x: Tensor, step: LayerStep) -> Tensor:
        """[T, hidden] -> this rank's part of [T, hidden]."""
        assert step.wanted is None, "a state is a function of all tokens"
        assert step.states is not None, "the layer has states"
        return self.mixed(x, step.metadata, step.states, step.adapters)

    @abstractmethod
    def mixed(
        self, x: Tensor, metadata: AttentionMetadata, states: LayerStates, adapters: StepAdapters | None
    ) -> Tensor:
        """`forward`. Reads and writes the states of the step's sequences alone."""


def recurrent_inputs(
    metadata: AttentionMetadata, states: LayerStates, *parts: Tensor
) -> tuple[StateSegments, Sequence[Tensor]]:
    """Segments of a step's recurrences, and their inputs: `parts`, [T, ...] each, or [T + L, ...] where drafts are
    replayed. Saves the inputs of the step's drafts; call it once a layer, before its kernels write the states.
    """
    replay = metadata.replay
    if replay is None:
        assert metadata.segments is not None, "the step has states"
        return metadata.segments, parts
    assert states.saved is not None, "a layer with states saves the inputs of drafts"
    extended = replay.extend(torch.cat(parts, dim=1), states.saved)
    return replay.segments, extended.split_with_sizes([part.shape[1] for part in parts], dim=1)


def own_outputs(metadata: AttentionMetadata, outputs: Tensor) -> Tensor:
    """Outputs of the step's own tokens, [T, ...]."""
    return outputs if metadata.replay is None else metadata.replay.own(outputs)
