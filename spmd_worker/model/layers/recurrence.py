"""Inputs and outputs of the recurrences of a step, in which rows may have drafts, or lag (`DraftReplay`).

T: tokens of the step; L: tokens that its rows lag by.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from kv_cache.layer_states import LayerStates
from spmd_worker.ops.attention.metadata import AttentionMetadata
from spmd_worker.ops.kernels.recurrent import StateSegments


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
