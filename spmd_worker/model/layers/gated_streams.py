"""Several residual streams around the parts of a layer (https://arxiv.org/abs/2409.19606): what a part reads of them,
and what they take of its output.

T: tokens; S: streams; H: hidden size; a token's streams are one row [S * H].
"""

import torch
from torch import Tensor, nn

from spmd_worker.model.layers.checkpoint_layer import CheckpointLayer
from spmd_worker.model.layers.context import LayerContext
from spmd_worker.model.layers.linear import ColumnParallelLinear, OutputPart, replicated_linear
from spmd_worker.model_config.layer_config import NormConfig
from spmd_worker.model_config.stream_config import GatedStreamsConfig
from spmd_worker.ops.kernels.reference_recurrent import sigmoid, silu


class StreamNorm(CheckpointLayer):
    """A norm of each stream by itself, with weights of its own: [T, S * H] -> the same, in float32, rounded once.
    Replicated.
    """

    def __init__(self, context: LayerContext, num_streams: int, hidden_size: int, norm: NormConfig) -> None:
        super().__init__()
        assert (norm.kind, norm.has_weight, norm.has_bias) == ("rms", True, False), norm
        self._norm, self._num_streams, self._kernels = norm, num_streams, context.kernels
        self.weight = context.parameter(num_streams * hidden_size)
        self._ones = torch.ones(hidden_size, dtype=torch.float32, device=context.device)

    def forward(self, x: Tensor) -> Tensor:
        streams = x.float().view(len(x), self._num_streams, -1)
        normed = self._kernels.full_norm(streams, self._ones, None, self._norm.eps, offset=0.0, is_centred=False)
        return (normed.view(len(x), -1) * (self.weight.float() + self._norm.offset)).to(x.dtype)


class StreamMixer(nn.Module):
    """The mean of all streams, each number times a gate, before a part of a layer, or the head; and gates of streams
    for the part's output, if it `injects` that. Gates come from all streams, so each rank computes all.
    """

    def __init__(
        self,
        context: LayerContext,
        streams: GatedStreamsConfig,
        hidden_size: int,
        norm: NormConfig,
        *,
        injects: bool = True,
    ) -> None:
        super().__init__()
        self._num_streams, self._rank = streams.num_streams, streams.rank
        size = streams.num_streams * hidden_size
        self.hc_norm = StreamNorm(context, streams.num_streams, hidden_size, norm)
        names = {"input_mix_weight_down": streams.rank} | (
            {"block_inject_weight": streams.num_streams} if injects else {}
        )
        parts = tuple([OutputPart(name, count, 0, count) for name, count in names.items()])
        self.down = ColumnParallelLinear(context, size, parts, has_bias=False)
        self.input_mix_weight_up = replicated_linear(context, "input_mix_weight_up", streams.rank, size)

    def forward(self, streams: Tensor) -> Tensor:
        """[T, S * H] -> [T, H]."""
        return self.enter(streams)[0]

    def enter(self, streams: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """[T, S * H] -> the mean [T, H], and gates [T, S] of the output, [T, 0] if the mixer does not inject."""
        normed, count = self.hc_norm(streams), self._num_streams
        down = self.down(normed) / count
        small, injected = down[:, : self._rank], down[:, self._rank :]
        up: Tensor = self.input_mix_weight_up(silu(small.float()).to(down.dtype))
        products = (sigmoid(up.float()).to(up.dtype) * normed).view(len(streams), count, -1)
        total = products[:, 0].float()
        for stream in range(1, count):
            total = total + products[:, stream].float()
        return (total / count).to(streams.dtype), (2 * sigmoid(injected.float()).to(streams.dtype),)

    def leave(self, streams: Tensor, output: Tensor, gates: Tensor) -> None:
        """Add a part's output [T, H], times each stream's gate [T, S], to the streams [T, S * H], in place."""
        rows = streams.view(len(streams), self._num_streams, -1)
        rows.add_(output.unsqueeze(1) * gates.unsqueeze(2))
