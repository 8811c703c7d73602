"""What attention over a paged cache offers to a layer.

T: tokens; Hq, Hkv: query and key-value heads of this rank; D: head size. The packing of a block belongs to the backend;
everybody else moves blocks whole.
"""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from spmd_worker.ops.attention.metadata import AttentionMetadata
from spmd_worker.ops.kernels.api import JoinableLayer
from spmd_worker.ranks.communicator import GroupHandle


class JoinedLayers(Protocol):
    """The layers of a stage, with their weights."""

    def run(
        self, residual: Tensor, angles: tuple[Tensor, Tensor], cache: Tensor, metadata: AttentionMetadata
    ) -> Tensor:
        """The residual stream [T, hidden], which becomes what it is before the last layer's output is added; cosines
        and sines [T, D / 2]; `cache` [layers, blocks, *block_shape] -> this rank's part of that output, [T, hidden].

        As many layers run as the cache has.
        """


class FixedAttention(Protocol):
    """What attention reads of a step, in tensors that stay where they are: for kernels that are recorded once and
    launched again for other steps.
    """

    def fill(self, metadata: AttentionMetadata, num_tokens: int) -> AttentionMetadata:
        """Take over a step, filled up to `num_tokens` with tokens that are nobody's: they write nothing and attend to
        nothing. The metadata to compute it with is the same object for every step of as many.
        """


class AttentionBackend(Protocol):
    """Passed as an argument to the attention layers."""

    def block_shape(self, num_kv_heads: int, block_size: int, head_size: int) -> tuple[int, ...]:
        """Shape of one block of one layer: 2 * num_kv_heads * block_size * head_size elements, in its own order."""

    def write(self, key: Tensor, value: Tensor, layer_cache: Tensor, metadata: AttentionMetadata) -> None:
        """Put keys and values [T, Hkv, D] of this step into `layer_cache` [blocks, *block_shape]."""

    def attend(
        self,
        query: Tensor,
        layer_cache: Tensor,
        metadata: AttentionMetadata,
        scale: float,
        window: int,
        score_cap: float = 0.0,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Attention of queries [T, Hq, D] over the cache, this step's keys included -> [T, Hq, D]: causal, but where
        the metadata says that tokens see later ones.

        `window` 0 looks at everything before; otherwise at the last `window` keys, the query's own included. Where
        `score_cap` is above 0, scores are cap * tanh(score * scale / cap). `sinks`, float32 [Hq], are one more score
        a head, of a key without a value (https://arxiv.org/abs/2309.17453).
        """

    def attend_projected(
        self,
        projected: Tensor,
        angles: tuple[Tensor, Tensor],
        layer_cache: Tensor,
        metadata: AttentionMetadata,
        num_heads: int,
        scale: float,
        window: int,
    ) -> Tensor | None:
        """Rotary embedding, `write` and causal `attend` in one, with the same results; None where there is no such
        call.

        `projected` [T, (Hq + 2 * Hkv) * D] has each token's queries, keys and values and may be overwritten; `angles`
        are cosines and sines [T, D / 2] -> [T, Hq * D].
        """

    def join_layers(self, layers: Sequence[JoinableLayer], group: GroupHandle) -> JoinedLayers | None:
        """All of a stage's layers as one, with the same results; None where they must be called one by one."""
