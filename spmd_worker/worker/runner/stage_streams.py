"""Streams before layers of earlier stages, which a draft head on the last stage reads.

A stage sends them beside its hidden states, side by side in ascending order of layers: [T, (1 + K) * hidden] with those
of K layers of this stage or earlier ones.

T: tokens of the step.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from spmd_worker.ranks.topology import Stage


class StageStreams:
    """`layers` of the complete model, before which the head reads. `own` are those of this stage."""

    def __init__(self, stage: Stage, layers: Sequence[int], hidden_size: int) -> None:
        ordered, self._hidden_size = sorted(set(layers)), hidden_size
        self._earlier = tuple([layer for layer in ordered if layer < stage.start])
        self.own = tuple([layer for layer in ordered if stage.start <= layer < stage.stop])

    @property
    def received_size(self) -> int:
        """Numbers of a token that the previous stage sends."""
        return (1 + len(self._earlier)) * self._hidden_size

    def split(self, received: Tensor) -> tuple[Tensor, dict[int, Tensor]]:
        """[T, `received_size`] -> hidden states [T, hidden], which may be changed in place, and streams by layer."""
        if not self._earlier:
            return received, {}
        hidden, *streams = torch.split(received, self._hidden_size, dim=1)
        return hidden.contiguous(), dict(zip(self._earlier, streams, strict=True))

    def joined(self, hidden: Tensor, streams: Mapping[int, Tensor]) -> Tensor:
        """Hidden states behind this stage, and `streams` by layer -> the tensor for the next stage. Steps that measure
        memory run some layers of a stage alone: a stream that was not read is empty, and its place is taken.
        """
        found = [streams[layer] for layer in (*self._earlier, *self.own)]
        read = [each if each.shape == hidden.shape else hidden for each in found]
        return torch.cat((hidden, *read), dim=1) if read else hidden
